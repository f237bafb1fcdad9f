// Numbers by their bits.
#pragma once
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

namespace emulator {

using u8 = std::uint8_t;
using u16 = std::uint16_t;
using u32 = std::uint32_t;
using u64 = std::uint64_t;
using i8 = std::int8_t;
using i16 = std::int16_t;
using i32 = std::int32_t;
using i64 = std::int64_t;
using f32 = float;
using f64 = double;
using std::bit_cast;

// FP16. Sums and products of it are computed in float32 and rounded again: float32 has more than twice its bits and
// two, so nothing is rounded wrongly.
struct f16 {
  u16 bits;
};

inline f32 to_f32(f16 half) {
  const u32 sign = static_cast<u32>(half.bits & 0x8000) << 16;
  const u32 magnitude = static_cast<u32>(half.bits & 0x7fff) << 13;
  // Read as a float32 the exponent is 112 too small, also that of a subnormal.
  const u32 finite = bit_cast<u32>(bit_cast<f32>(magnitude) * 0x1p112f);
  return bit_cast<f32>(sign | (magnitude >= 0x7c00u << 13 ? magnitude | 0x7f800000 : finite));
}

// To the nearest, ties to even.
inline f16 to_f16(f32 value) {
  const u32 bits = bit_cast<u32>(value), magnitude = bits & 0x7fffffff;
  const u32 normal = (magnitude - (112u << 23) + 0xfff + (magnitude >> 13 & 1)) >> 13;
  // Added to 0.5, whose last bit is FP16's smallest number, a small one is rounded to that.
  const u32 subnormal = bit_cast<u32>(bit_cast<f32>(magnitude) + 0.5f) - bit_cast<u32>(0.5f);
  const u32 special = magnitude > 0x7f800000 ? 0x7e00 | (magnitude >> 13 & 0x3ff) : 0x7c00;
  const u32 finite = magnitude < bit_cast<u32>(0x1p-14f) ? subnormal : normal;
  const u32 rounded = magnitude >= bit_cast<u32>(0x1p16f) ? special : finite;
  return {static_cast<u16>((bits >> 16 & 0x8000) | rounded)};
}

inline f32 bf16_to_f32(u16 bits) { return bit_cast<f32>(static_cast<u32>(bits) << 16); }

inline int exponent(f32 value) { return static_cast<int>(bit_cast<u32>(value) >> 23 & 0xff); }
inline int exponent(f64 value) { return static_cast<int>(bit_cast<u64>(value) >> 52 & 0x7ff); }

template <class T>
bool subnormal(T value) {
  return value != 0 && exponent(value) == 0;
}

template <class T>
T flush(T value) {
  return exponent(value) == 0 ? std::copysign(T{0}, value) : value;
}

// Half of a word: 0 the lower.
inline u16 half_of(u32 word, int half) { return static_cast<u16>(word >> 16 * half); }
inline u32 low_word(u64 x) { return static_cast<u32>(x); }
inline u32 high_word(u64 x) { return static_cast<u32>(x >> 32); }

}  // namespace emulator
