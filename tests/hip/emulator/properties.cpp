// What a runtime says of a device, by the struct of its version: what differs between one library and another.
//
// With R0600 defined it is one of ROCm 6 and 7, else of ROCm 5. COMPUTE_UNITS tells one library from another.
#include <cstring>

#include "hip.h"
#include "settings.h"

#ifndef COMPUTE_UNITS
#define COMPUTE_UNITS 104
#endif

using namespace emulator;

namespace {

// Bytes of the struct, and where in it are the fields that the library reads.
struct Layout {
  size_t bytes, memory, units, arch;
};

int properties(void* at, const Layout& layout, int device) {
  if (!is_device(device)) return INVALID_DEVICE;
  auto* to = static_cast<char*>(at);
  const int units = settings().units ? settings().units : COMPUTE_UNITS;
  std::memset(to, 0xee, layout.bytes);
  std::strcpy(to, "Emulated Instinct");
  std::memcpy(to + layout.memory, &settings().memory, sizeof settings().memory);
  std::memcpy(to + layout.units, &units, sizeof units);
  std::strcpy(to + layout.arch, settings().arch.c_str());
  return SUCCESS;
}

}  // namespace

// The offsets are those of hip_runtime_api.h in ROCm 5.7 and 6.2.
HIP hipGetDeviceProperties(void* at, int device) { return properties(at, {792, 256, 336, 396}, device); }
#ifdef R0600
HIP hipGetDevicePropertiesR0600(void* at, int device) { return properties(at, {1472, 288, 388, 1160}, device); }
#endif
