#include "lds.h"

#include "memory.h"

namespace emulator {

void Lds::reset(u32 bytes, int waves) {
  bytes_.assign(bytes, POISON);
  words_.assign(waves > 1 ? (bytes + 3) / 4 : 0, {});
  phase_ = 1;
}

bool Lds::parts_race(u32 address, u32 size, int wave, Access access) {
  bytes_apart_.resize(words_.size());
  bool race = false;
  for (u32 at = address; at < address + size; at++) {
    Touched& word = words_[at / 4];
    if (word.phase != phase_) word = {phase_};
    auto& bytes = bytes_apart_[at / 4];
    if (!word.apart) bytes.fill(word);
    word.apart = true;
    race |= touch(bytes[at % 4], static_cast<u8>(wave), static_cast<u8>(access));
  }
  return race;
}

}  // namespace emulator
