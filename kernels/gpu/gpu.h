// The portability layer of the kernels: the same names on AMD (clang or hipcc), on NVIDIA (nvcc) and on the CPU
// emulated as a SIMT machine (g++ or clang). Each target's header defines
//
//   WAVE                               lanes of a wave: 64 on gfx9 and the SIMT machine, else 32
//   KERNEL(name, Args, threads, blocks, waves) { ... a ... }
//                                      a kernel with one argument struct, `a`, and blocks of `threads` threads; the
//                                      occupancy to compile for is `blocks` per multiprocessor (NVIDIA) or `waves` per
//                                      SIMD (AMD), which bounds the registers
//   DEV, HOST_DEV                      an inlined function of the device; one for both sides
//   SHARED                             a static array in the block's shared memory (LDS)
//   DYNAMIC_SHARED                     unsigned char*: the block's dynamic shared memory, 1024-byte aligned
//   TID, BID, GRID                     thread in its block, block in the grid, blocks in the grid (one dimension)
//   barrier()                          for all threads of the block; makes their earlier shared and global writes
//                                      visible to the block
//   shfl_xor, shfl                     another lane's 32-bit value (float, int, unsigned); with SHUFFLES_DOUBLES
//                                      shfl of double, too
//   wave_any(bool)                     whether any lane's is true
//   atomic_add, atomic_min, atomic_max on int in global or shared memory, returning the old value
//   exp2_fast, rcp_fast                the hardware's approximations
//   div_rn, sqrt_rn, fma_rn, mul_rn, add_rn
//                                      correctly rounded, never contracted; fma_rn on double, too
//   to_f16, to_bf16, f16_to_f32, bf16_to_f32
//                                      16-bit formats as unsigned short; to_f16 rounds to nearest even and saturates
//                                      finite values; pack_f16, pack_bf16(low, high): two at once
//   after_predecessor()                waits until the kernels before this one in the stream have ended and their
//                                      writes are visible (PDL). Every thread calls it before it reads or writes what
//                                      other kernels of a step write
//   let_successor_start()              the next kernel may start its prologue (up to its after_predecessor)
//   fence_device()                     orders writes before it, and reads after it, for all blocks of the device
//   fence_system()                     the host and other devices see writes before it no later than writes after it
//   TERM_SHIFT                         see store_terms
#pragma once
#if defined(__CUDACC__)
#include "nvidia.h"
#elif defined(__AMDGCN__) || (defined(__HIP__) && defined(__HIP_DEVICE_COMPILE__))
#include "amd.h"
#elif defined(__HIP__)
#error "compile HIP for the device only (--cuda-device-only or --genco)"
#else
#include "simt.h"
#endif
#include "../args.h"

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

// 8 and 16 bytes that are loaded and stored in one access.
struct alignas(8) u32x2 {
  u32 v[2];
  HOST_DEV u32& operator[](int i) { return v[i]; }
  HOST_DEV u32 operator[](int i) const { return v[i]; }
};
struct alignas(16) u32x4 {
  u32 v[4];
  HOST_DEV u32& operator[](int i) { return v[i]; }
  HOST_DEV u32 operator[](int i) const { return v[i]; }
};
struct alignas(16) f32x4 {
  float v[4];
  HOST_DEV float& operator[](int i) { return v[i]; }
  HOST_DEV float operator[](int i) const { return v[i]; }
};

#include "handed_on.h"

#define LANE (TID % WAVE)

constexpr float LOG2E = 1.4426950408889634f;

DEV float wave_sum(float v) { for (int o = WAVE / 2; o; o /= 2) v += shfl_xor(v, o); return v; }
DEV float wave_max(float v) {
  for (int o = WAVE / 2; o; o /= 2) {
    const float w = shfl_xor(v, o);
    v = w > v ? w : v;
  }
  return v;
}
#ifndef SHUFFLES_DOUBLES
DEV double shfl(double v, int lane) {
  const u64 bits = __builtin_bit_cast(u64, v);
  const u64 low = (u32)shfl((int)(u32)bits, lane), high = (u32)shfl((int)(u32)(bits >> 32), lane);
  return __builtin_bit_cast(double, high << 32 | low);
}
#endif
DEV double shfl_xor(double v, int mask) { return shfl(v, LANE ^ mask); }
DEV double wave_sum(double v) { for (int o = WAVE / 2; o; o /= 2) v += shfl_xor(v, o); return v; }

// The index of element (row, k) in a tiled buffer of `rows` rows.
HOST_DEV i64 tiled_index(int row, int k, int rows) {
  return ((i64)(k / SLAB) * rows + row) * SLAB + ((k / 8 % 8) ^ (row % 8)) * 8 + k % 8;
}
// The index of a position's dim d within a head's K (or V) of a page. The exclusive or stays within the largest power
// of two that divides the number of pieces: all of them where head_dim is a power of two.
HOST_DEV int kv_index(int position, int d, int head_dim) {
  const unsigned at = (unsigned)position % KV_PAGE, pieces = (unsigned)head_dim / 8, power = pieces & -pieces;
  return (int)(at * head_dim + (((unsigned)d / 8) ^ (at & (power - 1))) * 8 + (unsigned)d % 8);
}

// A value as 16-bit terms, largest first: value = term 0 + (term 1 + (term 2 ..) * 2^-TERM_SHIFT) * 2^-TERM_SHIFT.
// FP16's later terms are scaled up where the matrix cores flush subnormals to zero (MI200): TERM_SHIFT is 11 there and
// 0 elsewhere. BF16 needs no scale. `at` is the element in term 0.
template <int FORMAT> DEV u16 to_16(float v) { return FORMAT == FORMAT_F16 ? to_f16(v) : to_bf16(v); }
template <int FORMAT> DEV float from_16(u16 v) { return FORMAT == FORMAT_F16 ? f16_to_f32(v) : bf16_to_f32(v); }
// A value's first term. Where subnormals are flushed to zero, a subnormal first term is stored as 0, and the value goes
// into the next term, which is scaled.
template <int FORMAT> DEV u16 leading_term(float v) {
  const bool subnormal = v < 0x1p-14f && v > -0x1p-14f;
  return FORMAT == FORMAT_F16 && TERM_SHIFT != 0 && subnormal ? 0 : to_16<FORMAT>(v);
}
// The same of two values: the first one's is in the low half.
template <int FORMAT> DEV u32 leading_terms(float low, float high) {
  if (FORMAT == FORMAT_BF16) return pack_bf16(low, high);
  if (TERM_SHIFT == 0) return pack_f16(low, high);
  return (u32)leading_term<FORMAT>(high) << 16 | leading_term<FORMAT>(low);
}
template <int FORMAT> DEV void store_terms(u16* at, i64 term, int terms, float v) {
  for (int i = 0; i < terms; i++) {
    const u16 t = leading_term<FORMAT>(v);
    at[i * term] = t;
    v = v - from_16<FORMAT>(t);
    if (FORMAT == FORMAT_F16) v *= (float)(1 << TERM_SHIFT);
  }
}
// Eight consecutive elements, the first at a multiple of 8 along K; they are overwritten.
template <int FORMAT> DEV void store_terms8(u16* at, i64 term, int terms, float* v) {
  for (int i = 0; i < terms; i++) {
    u32x4 packed;
    for (int j = 0; j < 8; j += 2) {
      const u32 both = packed[j / 2] = leading_terms<FORMAT>(v[j], v[j + 1]);
      v[j] -= from_16<FORMAT>((u16)both), v[j + 1] -= from_16<FORMAT>((u16)(both >> 16));
      if (FORMAT == FORMAT_F16) v[j] *= (float)(1 << TERM_SHIFT), v[j + 1] *= (float)(1 << TERM_SHIFT);
    }
    hand_on((u32x4*)(at + i * term), packed);
  }
}
// The same in a format that is known at run time alone: FP16 or BF16.
DEV void store_terms(int format, u16* at, i64 term, int terms, float v) {
  if (format == FORMAT_F16) store_terms<FORMAT_F16>(at, term, terms, v);
  else store_terms<FORMAT_BF16>(at, term, terms, v);
}
DEV void store_terms8(int format, u16* at, i64 term, int terms, float* v) {
  if (format == FORMAT_F16) store_terms8<FORMAT_F16>(at, term, terms, v);
  else store_terms8<FORMAT_BF16>(at, term, terms, v);
}
