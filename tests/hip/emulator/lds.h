// A block's LDS, and which waves have touched it since the last barrier.
#pragma once
#include <array>
#include <vector>

#include "numbers.h"

namespace emulator {

enum class Access : u8 { READ = 1, WRITE = 2, ATOMIC = 4 };

class Lds {
 public:
  // `waves`: how many share it; a single one races with nobody.
  void reset(u32 bytes, int waves);
  void barrier() { phase_++; }
  u32 size() const { return static_cast<u32>(bytes_.size()); }
  u8* at(u32 address) { return bytes_.data() + address; }

  // Notes that a wave touches these bytes. Whether another wave has touched one of them since the last barrier, one of
  // the two writes, and not both by atomic operations.
  bool races(u32 address, u32 size, int wave, Access access) {
    if (words_.empty()) return false;
    if ((address | size) % 4 != 0) return parts_race(address, size, wave, access);
    bool race = false;
    for (u32 word = address / 4; word < (address + size) / 4; word++) race |= word_races(word, wave, access);
    return race;
  }

 private:
  // Of a word since a barrier: who touched it, SEVERAL for more than one wave, and how. Where bytes of it have been
  // touched apart, `bytes_apart_` has that of each.
  struct Touched {
    u32 phase = 0;
    u8 wave = 0, how = 0;
    bool apart = false;
  };
  static constexpr u8 SEVERAL = 0xff;

  // Waves may share what they only read, or only touch by atomic operations.
  bool touch(Touched& touched, u8 wave, u8 how) const {
    const bool shared = touched.wave != wave && touched.how != 0;
    const bool written = (how | touched.how) & static_cast<u8>(Access::WRITE);
    const bool race = shared && (written || how != touched.how);
    touched.wave = shared ? SEVERAL : wave;
    touched.how |= how;
    return race;
  }
  bool word_races(u32 index, int wave, Access access) {
    Touched& word = words_[index];
    if (word.phase != phase_) word = {phase_};
    if (word.apart) return parts_race(4 * index, 4, wave, access);
    return touch(word, static_cast<u8>(wave), static_cast<u8>(access));
  }
  bool parts_race(u32 address, u32 size, int wave, Access access);

  std::vector<u8> bytes_;
  std::vector<Touched> words_;
  std::vector<std::array<Touched, 4>> bytes_apart_;
  u32 phase_ = 0;
};

}  // namespace emulator
