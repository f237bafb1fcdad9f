// Runs a kernel: its blocks one after the other, or several at once (HIP_EMULATOR_RESIDENT), whose waves take turns of
// some instructions; the waves of a single block in turns from barrier to barrier. Both forward, backward or at random.
//
// Found are accesses outside of what is allocated, in memory and in LDS, races of a block's waves in LDS, a launch in
// which nothing is left but waiting, and reads of what nobody has written, by the values they give. So are, with
// HIP_EMULATOR_CACHES, reads of what another block has written where no fence or scope makes it visible, and stores
// that overtake each other or an atomic operation for lack of a wait: caches.h says how. A race in memory shows only
// where another order gives another answer. Not seen is what a card does at once: waits for loads that are missing,
// and what independent instructions must not overlap, the order in which streams and devices overtake each other, and
// time. No document says in which order the matrix cores add, and what the last bit of v_exp_f32 and its like is: here
// both are as they may be.
#pragma once
#include <vector>

#include "program.h"

namespace emulator {

constexpr u32 HIDDEN_BYTES = 256;  // of arguments behind those that are written down

struct Launch {
  Kernel* kernel = nullptr;
  int device = 0;
  u32 blocks = 0, threads = 0, dynamic_lds = 0;
  std::vector<u8> arguments;
  bool together = false;  // all blocks at once
};

// Throws a Fault, which says where it was.
void run(const Launch& launch, Memory& memory, const std::vector<int>& peers);

}  // namespace emulator
