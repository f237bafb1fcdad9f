#include "memory.h"

#include <sys/mman.h>

namespace emulator {

void Memory::add(const Region& region) { regions_[region.from] = region; }

void Memory::remove(u64 from) { regions_.erase(from); }

const Region* Memory::find(u64 address, u64 size) const {
  auto behind = regions_.upper_bound(address);
  if (behind == regions_.begin()) return nullptr;
  const Region& region = std::prev(behind)->second;
  return region.holds(address, size) ? &region : nullptr;
}

namespace {
constexpr u64 PAGE = 4096;
// With a page behind them that is not the allocation's.
u64 pages(u64 bytes) { return (bytes + 2 * PAGE - 1) / PAGE * PAGE; }
}  // namespace

void* take_pages(u64 bytes) {
  void* at = mmap(nullptr, pages(bytes), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (at == MAP_FAILED) return nullptr;
  std::memset(at, POISON, bytes);
  return at;
}

void give_pages(void* at, u64 bytes) { munmap(at, pages(bytes)); }

}  // namespace emulator
