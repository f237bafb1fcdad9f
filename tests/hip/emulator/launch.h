// Runs a kernel: its blocks one after the other, the waves of a block in turns from barrier to barrier.
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
