#include "wave.h"

#include <algorithm>
#include <cstdio>

namespace emulator {
namespace {

std::string hex(u64 number) {
  char text[32];
  std::snprintf(text, sizeof text, "%#llx", static_cast<unsigned long long>(number));
  return text;
}

std::string accesses(u64 bytes, Access access) {
  const char* what = access == Access::READ ? "reads " : access == Access::WRITE ? "writes " : "adds to ";
  return what + std::to_string(bytes) + " bytes";
}

}  // namespace

void Wave::look_up(u64 address, u32 bytes, bool write) {
  const auto fault = [&](const char* what) {
    throw Fault(accesses(bytes, write ? Access::WRITE : Access::READ) + " at " + hex(address) + what);
  };
  const Region* region = block->memory->find(address, bytes);
  if (!region) fault(", which are not allocated");
  const auto& peers = *block->peers;
  if (region->device != ANY_DEVICE && std::find(peers.begin(), peers.end(), region->device) == peers.end()) {
    fault(", another device's to which it has no access");
  }
  if (write && !region->writable) fault(", which are only to be read");
  last_ = *region;
}

void Wave::outside(u64 address, u32 bytes, Access access) const {
  throw Fault(accesses(bytes, access) + " of LDS at " + std::to_string(address) + ", of which there are " +
              std::to_string(block->lds.size()));
}

void Wave::race(u64 address, u32 bytes, Access access) const {
  throw Fault(accesses(bytes, access) + " of LDS at " + std::to_string(address) +
              ", which another wave has touched since the last barrier: a race");
}

}  // namespace emulator
