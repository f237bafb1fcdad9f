// Memory that a kernel may touch: what is allocated, of whom, and whether it may be written. Every access is looked up.
#pragma once
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "numbers.h"

namespace emulator {

constexpr u8 POISON = 0xff;  // of what nobody has written: NaN in every format, no good index
constexpr int ANY_DEVICE = -1;

struct Region {
  u64 from = 0, bytes = 0;
  int device = ANY_DEVICE;  // whose memory; ANY_DEVICE: the host's
  bool writable = true;

  bool holds(u64 address, u64 size) const { return address - from < bytes && size <= bytes - (address - from); }
};

// All regions. Between them lie addresses that belong to none.
class Memory {
 public:
  void add(const Region& region);
  void remove(u64 from);
  // The region that has these bytes, or NULL.
  const Region* find(u64 address, u64 size) const;

 private:
  std::map<u64, Region> regions_;
};

// A device's memory: pages of its own for each allocation, poisoned, so that what follows it is nobody's.
void* take_pages(u64 bytes);
void give_pages(void* at, u64 bytes);

}  // namespace emulator
