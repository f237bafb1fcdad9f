// Functions shared by kernels: an accurate exponential, loads of eight elements, block-wide sums.
#pragma once
#include "gpu.h"

#if defined(__GNUC__) && !defined(__clang__) && !defined(__CUDACC__)
#define UNROLL _Pragma("GCC unroll 16")
#define ROLLED _Pragma("GCC unroll 1")
#else
#define UNROLL _Pragma("unroll")
#define ROLLED _Pragma("unroll 1")
#endif

// 16 bytes to copy. A native vector: clang keeps a struct that is only copied in memory (LDS on AMD).
#if defined(__CUDACC__)
typedef uint4 Piece;
#else
typedef u32 Piece __attribute__((vector_size(16), may_alias));
#endif

// e^x with a relative error of 3e-11: rounded to float32 it nearly always equals a correctly rounded expf. x = n ln 2 +
// 4 r; the result is the series of e^r up to the sixth power, squared twice: four constants in registers, where a
// series of e^(4 r) needs seven. Adding 2^52 * 1.5 rounds to an integer and leaves it in the low bits; NaN passes
// through without a conversion. Arguments are clamped where the result is beyond float32 on either side.
DEV double exp_f64(float x) {
  const double magic = 6755399441055744.0;
  const double clamped = x < -150.f ? -150.f : x > 150.f ? 150.f : x;
  const double shifted = clamped * 1.4426950408889634 + magic;
  const double r = (clamped - (shifted - magic) * 0.6931471805599453) * 0.25;
  double p = r * (1.0 / 720) + 1.0 / 120;
  p = p * r + 1.0 / 24;
  p = p * r + 1.0 / 6;
  p = p * r + 0.5;
  p = p * r + 1;
  p = p * r + 1;
  p *= p;
  p *= p;
  const int exponent = (int)(u32)__builtin_bit_cast(u64, shifted);
  return p * __builtin_bit_cast(double, (u64)(u32)(1023 + exponent) << 52);
}
DEV float exp_f32(float x) { return (float)exp_f64(x); }

// Loads eight consecutive elements of an array in a format, from element `first` on, as float32; 16-byte aligned.
template <int FORMAT> DEV void load8_aligned(const void* array, i64 first, float* v) {
  if (FORMAT == FORMAT_F32) {
    const f32x4* at = (const f32x4*)((const float*)array + first);
    const f32x4 low = at[0], high = at[1];
    UNROLL for (int i = 0; i < 4; i++) v[i] = low[i], v[4 + i] = high[i];
  } else {
    const u32x4 packed = *(const u32x4*)((const u16*)array + first);
    UNROLL for (int i = 0; i < 8; i++) v[i] = from_16<FORMAT>((u16)(packed[i / 2] >> i % 2 * 16));
  }
}
// Eight consecutive float32 that are handed on, 16-byte aligned.
DEV void take8(const float* at, float* v) {
  f32x4 low, high;
  for (;;) {
    low = peek((const f32x4*)at), high = peek((const f32x4*)at + 1);
    if ((is_there(low) & is_there(high)) || !still_wait()) break;
  }
  UNROLL for (int i = 0; i < 4; i++) v[i] = low[i], v[4 + i] = high[i];
}
// Loads N elements of a row: 8 (aligned), or 1 if the row's width is not a multiple of 8.
template <int FORMAT, int N> DEV void load_some(const void* array, i64 first, float* v) {
  if (N == 8) load8_aligned<FORMAT>(array, first, v);
  else v[0] = FORMAT == FORMAT_F32 ? ((const float*)array)[first] : from_16<FORMAT>(((const u16*)array)[first]);
}
// Loads and stores of eight elements with any alignment, of which only `n` exist; the others are loaded as zeros.
DEV bool whole(const void* at, int n) { return n >= 8 && (u64)at % 16 == 0; }
template <int FORMAT> DEV void load8(const void* array, i64 first, int n, float* v) {
  const float* wide = (const float*)array + first;
  const u16* narrow = (const u16*)array + first;
  if (whole(FORMAT == FORMAT_F32 ? (const void*)wide : narrow, n)) {
    load8_aligned<FORMAT>(array, first, v);
  } else {
    UNROLL for (int i = 0; i < 8; i++)
      v[i] = i >= n ? 0.f : FORMAT == FORMAT_F32 ? wide[i] : from_16<FORMAT>(narrow[i]);
  }
}
DEV void store8(float* at, int n, const float* v) {
  if (whole(at, n)) {
    *(f32x4*)at = f32x4{v[0], v[1], v[2], v[3]};
    *(f32x4*)(at + 4) = f32x4{v[4], v[5], v[6], v[7]};
  } else {
    UNROLL for (int i = 0; i < 8; i++) if (i < n) at[i] = v[i];
  }
}

// Reduce-scatter over groups of LANES neighbouring lanes with VALUES values each: a lane's first VALUES / LANES values
// become the group's sums number LANE % LANES * VALUES / LANES and following. It takes one shuffle per sum instead of
// one per sum and level.
template <int VALUES, int LANES, class T> DEV void deal_sums(T* v) {
  if constexpr (LANES > 1) {
    const bool upper = TID & LANES / 2;
    UNROLL for (int i = 0; i < VALUES / 2; i++) {
      const T low = v[i], high = v[VALUES / 2 + i];         // values, so that no compiler selects between addresses
      v[i] = (upper ? high : low) + shfl_xor(upper ? low : high, LANES / 2);
    }
    deal_sums<VALUES / 2, LANES / 2>(v);
  }
}
// Sums VALUES values per lane over the wave; returns the sum of value LANE % VALUES.
template <int VALUES, class T> DEV T wave_sums(T* v) {
  deal_sums<VALUES, VALUES>(v);
  T sum = v[0];
  for (int o = VALUES; o < WAVE; o *= 2) sum += shfl_xor(sum, o);
  return sum;
}

// Sums over a block of `WAVES` waves in a fixed order; every thread gets the sum. `scratch` has WAVES values that
// nothing else uses until the block's next barrier. `meet` is that of the first WAVES waves, where others go on.
template <int WAVES, class T, class Meet> DEV T block_sum(T v, T* scratch, Meet meet) {
  v = wave_sum(v);
  if (LANE == 0) scratch[TID / WAVE] = v;
  meet();
  T sum = scratch[0];
  for (int i = 1; i < WAVES; i++) sum += scratch[i];
  return sum;
}
template <int WAVES, class T> DEV T block_sum(T v, T* scratch) {
  return block_sum<WAVES>(v, scratch, [] { barrier(); });
}
