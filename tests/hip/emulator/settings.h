// What the emulator is told by the environment.
#pragma once
#include <string>

#include "numbers.h"

namespace emulator {

enum class Order { FORWARD, BACKWARD, RANDOM };

struct Settings {
  std::string target;  // HIP_EMULATOR_ARCH: gfx90a, gfx942, gfx950
  std::string arch;    // the same with the features that a runtime names
  int devices;         // HIP_EMULATOR_DEVICES: 1
  u64 memory;          // HIP_EMULATOR_MEMORY_MIB, of each: 1024
  int units;           // HIP_EMULATOR_UNITS: compute units; 0: what the library is compiled with
  Order order;         // HIP_EMULATOR_ORDER of blocks and waves: forward, backward, or a number for a random one
  u64 seed;
  bool caches;          // HIP_EMULATOR_CACHES: 1 for caches that do not see each other
  u32 residents;        // HIP_EMULATOR_RESIDENT: how many blocks of a launch run at once: 1
  bool together;        // HIP_EMULATOR_TOGETHER: 1: there are launches of blocks that wait for each other; events then
                        // count launches, of 5 us each
  u64 ticks;            // HIP_EMULATOR_TICKS: by how much the clock moves when it is read: 0
  std::string objdump;  // HIP_EMULATOR_OBJDUMP: llvm-objdump-22
  std::string report;   // HIP_EMULATOR_REPORT: a file to which kernels and their launches are written at the end
  // What is wrong with the runtime.
  int version;       // HIP_EMULATOR_VERSION: what hipRuntimeGetVersion gives
  int refuse;        // HIP_EMULATOR_REFUSE: the code that hipModuleLoadData fails with
  int invalidate;    // HIP_EMULATOR_INVALIDATE: how many captures are invalidated, in their second launch
  int drop;          // HIP_EMULATOR_DROP: which kernel of a capture its graph lacks, counted from 1
  std::string link;  // HIP_EMULATOR_LINK: the type and the hops of links; without it they are not known
};

const Settings& settings();

}  // namespace emulator
