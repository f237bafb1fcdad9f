// Operations on lanes, from functions on the numbers of one lane: `lanes([](f32 a, f32 b) { return a + b; })`. The
// function's types say how sources are read, and the result is written to the lanes that are active.
#pragma once
#include <array>
#include <type_traits>
#include <utility>

#include "table.h"

namespace emulator {

template <class T>
using Values = std::array<T, LANES>;

// A function that is one expression has no state: a value of its type is the function.
template <class F>
inline constexpr F function{};

template <class T>
constexpr Type type_of() {
  if constexpr (std::is_same_v<T, f64>) return Type::F64;
  if constexpr (std::is_same_v<T, f32>) return Type::F32;
  if constexpr (sizeof(T) == 8) return Type::TWO_WORDS;
  if constexpr (sizeof(T) == 2) return Type::F16;
  return Type::WORD;
}

// A source as numbers of a type, by the registers that hold them or by a copy. A 16-bit one is the lower half.
template <class T>
class Source {
 public:
  Source(const Wave& w, const Operand& source) {
    if (source.kind == Operand::VECTOR) {
      low_ = w.v[source.reg].lane;
      if constexpr (sizeof(T) == 8) high_ = w.v[source.reg + 1].lane;
    } else if constexpr (sizeof(T) == 8) {
      low_ = copy_[0].fill(low_word(w.two_words(source)));
      high_ = copy_[1].fill(high_word(w.two_words(source)));
    } else {
      low_ = copy_[0].fill(w.word(source));
    }
    if (source.part != Part::DWORD) take_part(source);
    if (source.absolute || source.negative) change_sign(source);
  }
  Source(const Source&) = delete;
  Source& operator=(const Source&) = delete;

  T operator[](int lane) const {
    if constexpr (sizeof(T) == 8) {
      return bit_cast<T>(static_cast<u64>(high_[lane]) << 32 | low_[lane]);
    } else if constexpr (sizeof(T) == 4) {
      return bit_cast<T>(low_[lane]);
    } else {
      return bit_cast<T>(static_cast<u16>(low_[lane]));
    }
  }

 private:
  struct Copy : Lanes {
    const u32* fill(u32 word) {
      std::fill(lane, lane + LANES, word);
      return lane;
    }
  };

  void take_part(const Operand& source) {
    const int bits = source.part < Part::WORD_0 ? 8 : 16;
    const int first = static_cast<int>(bits == 8 ? Part::BYTE_0 : Part::WORD_0);
    const int left = 32 - bits - bits * (static_cast<int>(source.part) - first), right = 32 - bits;
    for (int i = 0; i < LANES; i++) {
      const u32 word = low_[i] << left;
      copy_[0].lane[i] = source.signed_part ? static_cast<u32>(static_cast<i32>(word) >> right) : word >> right;
    }
    low_ = copy_[0].lane;
  }
  void change_sign(const Operand& source) {
    constexpr u32 SIGN = sizeof(T) == 2 ? 0x8000 : 0x80000000;
    const u32 keep = source.absolute ? ~SIGN : ~0u, flip = source.negative ? SIGN : 0;
    const u32*& top = sizeof(T) == 8 ? high_ : low_;
    Copy& copy = copy_[sizeof(T) == 8];
    for (int i = 0; i < LANES; i++) copy.lane[i] = (top[i] & keep) ^ flip;
    top = copy.lane;
  }

  const u32 *low_ = nullptr, *high_ = nullptr;
  Copy copy_[sizeof(T) == 8 ? 2 : 1];
};

// Words to the active lanes of a register.
inline void write_words(Wave& w, int reg, const u32* words) {
  u32* to = w.v[reg].lane;
  if (w.exec() == ~u64{0}) {
    std::memcpy(to, words, sizeof(Lanes));
    return;
  }
  const u32* active = w.active();
  for (int i = 0; i < LANES; i++) to[i] = (words[i] & active[i]) | (to[i] & ~active[i]);
}

// Puts words into a part of the destination.
inline void write_part(Wave& w, const Instruction& in, Values<u32>& words) {
  const int bits = in.part < Part::WORD_0 ? 8 : 16;
  const int first = static_cast<int>(bits == 8 ? Part::BYTE_0 : Part::WORD_0);
  const int shift = bits * (static_cast<int>(in.part) - first), above = 32 - bits - shift;
  const u32 field = ((u32{1} << bits) - 1) << shift;
  const u32* old = w.v[in.to.reg].lane;
  for (int i = 0; i < LANES; i++) {
    const u32 placed = words[i] << shift & field;
    switch (in.rest) {
      case Rest::ZERO: words[i] = placed; break;
      case Rest::SIGN: words[i] = static_cast<u32>(static_cast<i32>(placed << above) >> above); break;
      case Rest::KEEP: words[i] = placed | (old[i] & ~field); break;
    }
  }
  write_words(w, in.to.reg, words.data());
}

// Results to the active lanes. 16 bits clear the upper half, as on all of gfx9.
template <class T>
void write(Wave& w, const Instruction& in, Values<T>& results) {
  if constexpr (std::is_floating_point_v<T>) {
    if (in.clamp) {
      for (T& result : results) result = result > 1 ? T{1} : result > 0 ? result : T{0};
    }
  }
  Values<u32> words;
  if constexpr (sizeof(T) == 8) {
    Values<u32> high;
    for (int i = 0; i < LANES; i++) {
      words[i] = low_word(bit_cast<u64>(results[i]));
      high[i] = high_word(bit_cast<u64>(results[i]));
    }
    write_words(w, in.to.reg, words.data());
    write_words(w, in.to.reg + 1, high.data());
    return;
  } else if constexpr (sizeof(T) == 4) {
    std::memcpy(words.data(), results.data(), sizeof words);
  } else {
    for (int i = 0; i < LANES; i++) words[i] = bit_cast<u16>(results[i]);
  }
  if (in.part == Part::DWORD) {
    write_words(w, in.to.reg, words.data());
  } else {
    write_part(w, in, words);
  }
}

// A bit for each lane, 0 for those that are not active.
inline void write_mask(Wave& w, const Operand& to, const Values<bool>& conditions) {
  u64 mask = 0;
  for (int i = 0; i < LANES; i += 8) {
    u64 eight;
    std::memcpy(&eight, &conditions[i], 8);
    // Each byte's bit comes to stand in the topmost byte.
    mask |= (eight * 0x0102040810204080 >> 56) << i;
  }
  w.set_pair(to.reg, mask & w.exec());
}

// The rest makes operations of functions.

// Source I of an instruction.
template <class T, size_t I>
struct Numbered : Source<T> {
  Numbered(const Wave& w, const Instruction& in) : Source<T>(w, in.source[I]) {}
};
template <class... S>
struct Sources : S... {
  Sources(const Wave& w, const Instruction& in) : S(w, in)... {}
};

template <class F, class R, class... A>
struct LaneFunction {
  using Result = R;
  static constexpr size_t sources = sizeof...(A);

  template <size_t... I>
  static void apply(const Wave& w, const Instruction& in, Values<R>& results, std::index_sequence<I...>) {
    const Sources<Numbered<A, I>...> sources(w, in);
    for (int i = 0; i < LANES; i++) results[i] = function<F>(static_cast<const Numbered<A, I>&>(sources)[i]...);
  }
  static void to_lanes(Wave& w, const Instruction& in) {
    Values<R> results;
    apply(w, in, results, std::index_sequence_for<A...>());
    write<R>(w, in, results);
  }
  static void to_mask(Wave& w, const Instruction& in) {
    Values<R> results;
    apply(w, in, results, std::index_sequence_for<A...>());
    write_mask(w, in.to, results);
  }
  static Operation operation(Execute execute, const char* operands) {
    Operation made{execute, operands};
    size_t k = 0;
    ((made.types[k++] = type_of<A>()), ...);
    made.clamps = std::is_floating_point_v<R>;
    return made;
  }
};

template <class F>
struct LaneFunctionOf : LaneFunctionOf<decltype(&F::operator())> {};
template <class F, class R, class... A>
struct LaneFunctionOf<R (F::*)(A...) const> : LaneFunction<F, R, A...> {};

// A result for each lane.
template <class F>
Operation lanes(F) {
  using Function = LaneFunctionOf<F>;
  constexpr const char* OPERANDS[] = {"", "d0", "d01", "d012"};
  return Function::operation(Function::to_lanes, OPERANDS[Function::sources]);
}

// The last source is the destination's old value.
template <class F>
Operation accumulated(F) {
  using Function = LaneFunctionOf<F>;
  static_assert(Function::sources == 3);
  return Function::operation(Function::to_lanes, "d01a");
}

// A condition for each lane.
template <class F>
Operation condition(F) {
  using Function = LaneFunctionOf<F>;
  static_assert(Function::sources == 2);
  return Function::operation(Function::to_mask, "d01");
}

}  // namespace emulator
