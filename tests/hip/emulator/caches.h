// Caches that do not see each other, as LLVM's User Guide for AMDGPU Backend has them (Memory Model GFX90A, and GFX942,
// which gfx950 is like). Where the guide leaves something open, what is weaker:
//
// - A compute unit's vector L1 is written through. A load that is not of the device's scope takes what is there,
//   however old. A unit is a resident block's place on a die, so blocks that follow each other there share it.
// - A die's L2 is written back: what is stored without that scope stays in it. gfx90a has one; gfx942 and gfx950 have
//   eight, and block i is on die i % 8. A load of the device's scope takes what memory has, and what this die has
//   stored; it does not renew what the caches have.
// - A die's scalar cache keeps what it has until the launch ends.
// - No line leaves by itself. A miss brings all of a line, that of a store too. All lines are of 128 bytes; those of
//   gfx90a's L1 are shorter.
// - An invalidation of L2 takes all lines for another die's. What has been stored into them stays, and is not written
//   back.
// - Atomic operations change memory, and what their own unit and die have of it.
// - Stores of a wave's instructions reach L2, or memory, in any order, until it waits for them (s_waitcnt vmcnt) or
//   writes L2 back. In the order `forward` they do at once, backward not before that, in a random one it differs. They
//   are in L1 at once. The guide has nothing of a barrier that waits for other waves' stores, but counts on it: so it
//   does.
//
// A launch begins with empty caches, and all is written back when it ends.
#pragma once
#include <bitset>
#include <random>
#include <unordered_map>
#include <vector>

#include "numbers.h"

namespace emulator {

// How far an access or a fence reaches: bits sc0 and sc1 of gfx942 and gfx950. glc of gfx90a is DEVICE.
enum class Scope : u8 { WAVE = 0, BLOCK = 1, DEVICE = 2, SYSTEM = 3 };

constexpr u64 LINE = 128;

struct Line {
  u8 bytes[LINE];
  std::bitset<LINE> dirty;  // stored, and not in memory; of L2 alone
  bool filled = false;      // else it has nothing but dirty bytes
};

class Cache {
 public:
  // The line that begins at an address; not filled if it was not there.
  Line& line(u64 from);
  Line* find(u64 from);
  void invalidate();
  // Whether there was anything to write.
  bool write_back();

 private:
  std::unordered_map<u64, Line> lines_;
  u64 last_from_ = ~u64{0};  // of the line that was asked for last, if it is still there
  Line* last_ = nullptr;
};

// Memory as a block sees it.
class View {
 public:
  View() = default;
  View(Cache& unit, Cache& die, Cache& scalars) : unit_(&unit), die_(&die), scalars_(&scalars) {}

  void load(u64 address, u32 bytes, Scope scope, u8* to);
  void load_scalars(u64 address, u32 bytes, u8* to);
  // Into L1, and further on.
  void store_near(u64 address, u32 bytes, const u8* from);
  void store_far(u64 address, u32 bytes, Scope scope, const u8* from);
  void invalidate(Scope scope);
  // Whether there was anything to write.
  bool write_back(Scope scope) { return scope >= Scope::DEVICE && die_->write_back(); }

 private:
  Line& line_of_die(u64 from);
  Line& line_of(Cache& cache, u64 from);

  Cache *unit_ = nullptr, *die_ = nullptr, *scalars_ = nullptr;
};

// A wave's stores on their way from L1.
class Stores {
 public:
  // The seed says in a random order which are late.
  explicit Stores(u64 seed = 0);
  // An instruction's access begins. All that wait for one wait for those before it, too.
  void begin();
  void store(View& view, u64 address, u32 bytes, Scope scope, const u8* from);
  // Until no more than so many accesses are on their way.
  void wait(View& view, u64 most);
  // Before another access of the wave, which may be to the same bytes.
  void before(View& view, u64 address, u32 bytes) {
    for (const Store& one : stores_) {
      if (one.address < address + bytes && address < one.address + one.bytes) return wait(view, 0);
    }
  }
  bool none() const { return stores_.empty(); }

 private:
  struct Store {
    u64 address, begun;
    u32 bytes;
    Scope scope;
    u8 data[16];
  };

  std::vector<Store> stores_;
  u64 begun_ = 0;
  bool late_;  // whether this instruction's stores are still on their way when the wave goes on
  std::minstd_rand random_;
};

// Those of a launch with so many blocks on the device at once.
class Caches {
 public:
  Caches(u32 dies, u32 residents) : units_(u64{dies} * residents), dies_(dies), scalars_(dies) {}

  View view(u32 resident, u32 block) {
    const u64 die = block % dies_.size();
    return {units_[resident * dies_.size() + die], dies_[die], scalars_[die]};
  }
  void write_back() {
    for (Cache& die : dies_) die.write_back();
  }

 private:
  std::vector<Cache> units_, dies_, scalars_;
};

}  // namespace emulator
