// Runs a kernel: its blocks one after the other, the waves of a block in turns from barrier to barrier; both forward,
// backward or at random.
//
// Found are accesses outside of what is allocated, in memory and in LDS, races of a block's waves in LDS, and reads of
// what nobody has written, by the values they give. A race in memory shows only where another order gives another
// answer. Not seen is what a card does at once: caches and their fences, the order between blocks, waits that are
// missing (s_waitcnt, and what independent instructions must not overlap), the order in which streams and devices
// overtake each other, and time. No document says in which order the matrix cores add, and what the last bit of
// v_exp_f32 and its like is: here both are as they may be.
#pragma once
#include <vector>

#include "program.h"

namespace emulator {

struct Launch {
  Kernel* kernel = nullptr;
  int device = 0;
  u32 blocks = 0, threads = 0, dynamic_lds = 0;
  std::vector<u8> arguments;
};

// Throws a Fault, which says where it was.
void run(const Launch& launch, Memory& memory, const std::vector<int>& peers);

}  // namespace emulator
