// CDNA's matrix instruction and what goes with it, and the same names on the emulated SIMT machine.
//
// One MFMA multiplies 16 weight rows (operand A) by 16 tokens (operand B) over 16 of K, in 8 issue slots of 4 clocks
// on gfx90a and in 4 on gfx942. Lane l = 16 g + n supplies A's row n and B's token n, each at the four K of its g,
// and gets rows 4 g .. 4 g + 3 of token n. gfx950 has one that takes twice as much of K, eight of each lane, in 4
// slots.
#pragma once
#include "../gpu/gpu.h"

typedef u32 u32v2 __attribute__((vector_size(8)));
typedef u32 u32v4 __attribute__((vector_size(16)));
typedef float f32v4 __attribute__((vector_size(16)));
typedef double f64v4 __attribute__((vector_size(32)));

#if defined(__gfx90a__)
enum : int { MFMA_SLOTS = 8 };
#else
enum : int { MFMA_SLOTS = 4 };
#endif

#if defined(__AMDGCN__)
#define GLOBAL __attribute__((address_space(1)))
typedef _Float16 f16v4 __attribute__((ext_vector_type(4)));
typedef short s16v4 __attribute__((ext_vector_type(4)));

DEV u32 multiply_f16x2(u32 a, u32 b) {
  typedef _Float16 f16v2 __attribute__((ext_vector_type(2)));
  return __builtin_bit_cast(u32, __builtin_bit_cast(f16v2, a) * __builtin_bit_cast(f16v2, b));
}
template <int FORMAT> DEV f32v4 mfma(u32v2 a, u32v2 b, f32v4 c) {
  if constexpr (FORMAT == FORMAT_F16) {
    const f16v4 x = __builtin_bit_cast(f16v4, a), y = __builtin_bit_cast(f16v4, b);
    return __builtin_amdgcn_mfma_f32_16x16x16f16(x, y, c, 0, 0, 0);
  } else {
    const s16v4 x = __builtin_bit_cast(s16v4, a), y = __builtin_bit_cast(s16v4, b);
    return __builtin_amdgcn_mfma_f32_16x16x16bf16_1k(x, y, c, 0, 0, 0);
  }
}
#if defined(__gfx950__)
enum : int { PIECE_MFMAS = 1, CONVERTS_FP4 = true };
template <int FORMAT> DEV f32v4 mfma_of_piece(u32v2 a0, u32v2 a1, u32v2 b0, u32v2 b1, f32v4 c) {
  const u32v4 a8 = {a0[0], a0[1], a1[0], a1[1]}, b8 = {b0[0], b0[1], b1[0], b1[1]};
  if constexpr (FORMAT == FORMAT_F16) {
    typedef _Float16 f16v8 __attribute__((ext_vector_type(8)));
    const f16v8 x = __builtin_bit_cast(f16v8, a8), y = __builtin_bit_cast(f16v8, b8);
    return __builtin_amdgcn_mfma_f32_16x16x32_f16(x, y, c, 0, 0, 0);
  } else {
    typedef __bf16 bf16v8 __attribute__((ext_vector_type(8)));
    const bf16v8 x = __builtin_bit_cast(bf16v8, a8), y = __builtin_bit_cast(bf16v8, b8);
    return __builtin_amdgcn_mfma_f32_16x16x32_bf16(x, y, c, 0, 0, 0);
  }
}
// A word's eight FP4 codes times the power of two that is `scale`.
template <int FORMAT> DEV void convert_fp4(u32 codes, float scale, u32v2& low, u32v2& high) {
  const auto pair = [&](auto converted) { return __builtin_bit_cast(u32, converted); };
  if constexpr (FORMAT == FORMAT_F16) {
    low[0] = pair(__builtin_amdgcn_cvt_scalef32_pk_f16_fp4(codes, scale, 0));
    low[1] = pair(__builtin_amdgcn_cvt_scalef32_pk_f16_fp4(codes, scale, 1));
    high[0] = pair(__builtin_amdgcn_cvt_scalef32_pk_f16_fp4(codes, scale, 2));
    high[1] = pair(__builtin_amdgcn_cvt_scalef32_pk_f16_fp4(codes, scale, 3));
  } else {
    low[0] = pair(__builtin_amdgcn_cvt_scalef32_pk_bf16_fp4(codes, scale, 0));
    low[1] = pair(__builtin_amdgcn_cvt_scalef32_pk_bf16_fp4(codes, scale, 1));
    high[0] = pair(__builtin_amdgcn_cvt_scalef32_pk_bf16_fp4(codes, scale, 2));
    high[1] = pair(__builtin_amdgcn_cvt_scalef32_pk_bf16_fp4(codes, scale, 3));
  }
}
#endif
// SCHEDULE: the scheduler places the next n instructions of a kind here, in the order of these lines.
enum : int { VALU = 2, MFMA = 8, TRANSCENDENTAL = 0x400 };
// The scheduler moves nothing across: it would sink loads to their uses and leave the matrix core waiting.
#define SCHEDULE_FENCE() __builtin_amdgcn_sched_barrier(0)
// It moves vector and scalar arithmetic across, and nothing else.
#define SCHEDULE_PIN() __builtin_amdgcn_sched_barrier(2 | 4)
#if __has_builtin(__builtin_amdgcn_sched_group_barrier)
#define SCHEDULE(what, n) __builtin_amdgcn_sched_group_barrier(what, n, 0)
#else
#define SCHEDULE(what, n)
#endif
// Keep an address as scalar base + 32-bit vector offset. Otherwise loop strength reduction makes 64-bit vector
// additions of it, four or five VALU per load.
#define SCALAR(base) asm("" : "+s"(base))
#define VECTOR(offset) asm("" : "+v"(offset))
#define SCALAR_AND_VECTOR(base, offset) asm("" : "+s"(base), "+v"(offset))
// Waits until at most so many of the wave's reads and writes of LDS are under way.
template <int MOST> DEV void wait_for_lds() { __builtin_amdgcn_s_waitcnt(0xc07f | (MOST < 15 ? MOST : 15) << 8); }
// Stands in a loop, and states that so many MFMAs run between any of its loads and the first wait for it. The code
// object keeps this place and the number in a section that is never loaded; tests/loads_in_flight.rs checks the machine
// code against it.
template <int MFMAS> DEV void loads_in_flight_for() {
  asm volatile("1:\n\t.pushsection .getp.loops,\"\",@progbits\n\t.quad 1b, %0\n\t.popsection" : : "n"(MFMAS));
}
#else
#define GLOBAL
#define SCHEDULE_FENCE() (void)0
#define SCHEDULE_PIN() (void)0
#define SCHEDULE(what, n) (void)0
#define SCALAR(base)
#define VECTOR(offset)
#define SCALAR_AND_VECTOR(base, offset)
DEV u32 multiply_f16x2(u32 a, u32 b) {
  return pack_f16(f16_to_f32((u16)a) * f16_to_f32((u16)b), f16_to_f32((u16)(a >> 16)) * f16_to_f32((u16)(b >> 16)));
}
template <int MOST> DEV void wait_for_lds() {}
template <int MFMAS> DEV void loads_in_flight_for() {}
template <int FORMAT> DEV f32v4 mfma(u32v2 a, u32v2 b, f32v4 c) {
  const simt::s16x4 sa = __builtin_bit_cast(simt::s16x4, a), sb = __builtin_bit_cast(simt::s16x4, b);
  return FORMAT == FORMAT_F16 ? simt::mfma_16x16x16_f16(sa, sb, c) : simt::mfma_16x16x16_bf16(sa, sb, c);
}
#endif

// A lane's eight K of a row and of a token are multiplied by PIECE_MFMAS MFMAs: by mfma_of_piece where that is one,
// else by two with others between them, as the second waits for the first.
#if !defined(__gfx950__)
enum : int { PIECE_MFMAS = 2, CONVERTS_FP4 = false };
template <int FORMAT> DEV void convert_fp4(u32 codes, float scale, u32v2& low, u32v2& high);
template <int FORMAT> DEV f32v4 mfma_of_piece(u32v2 a0, u32v2 a1, u32v2 b0, u32v2 b1, f32v4 c) {
  return mfma<FORMAT>(a1, b1, mfma<FORMAT>(a0, b0, c));
}
#endif

// Dies of a device, each with compute units and an L2 of its own. MI250's two are a device each.
#if defined(__gfx942__) || defined(__gfx950__)
enum : int { DIES = 8 };
#else
enum : int { DIES = 1 };
#endif

// A bit for each of the wave's lanes, all of which call it.
#if !defined(__AMDGCN__)
DEV u64 ballot(bool b) {
  u64 set = (u64)b << LANE;
  for (int o = 1; o < WAVE; o *= 2) set |= simt::shuffle(set, LANE ^ o);
  return set;
}
#elif __has_builtin(__builtin_amdgcn_ballot_w64)
DEV u64 ballot(bool b) { return __builtin_amdgcn_ballot_w64(b); }
#else
DEV u64 ballot(bool b) { return __builtin_amdgcn_uicmp((unsigned)b, 0u, 33); }
#endif
DEV int bits_of(u64 set) { return __builtin_popcountll(set); }
DEV int lowest_of(u64 set) { return __builtin_ctzll(set); }
// A value that is the same in all lanes, in a scalar register.
DEV int uniform(int v) { return __builtin_amdgcn_readfirstlane(v); }
DEV u32 byte_permute(u32 high, u32 low, u32 selector) { return __builtin_amdgcn_perm(high, low, selector); }
DEV u32 rotate_right(u32 v, int by) { return __builtin_amdgcn_alignbit(v, v, by); }
DEV u32 select_bits(u32 mask, u32 a, u32 b) { return (mask & a) | (~mask & b); }

typedef const GLOBAL u8* Global;
template <class T> DEV T load(Global at) { return *(const GLOBAL T*)at; }
// Loads at a uniform base plus a lane's offset. The compiler is told that the offset may have changed, so it never
// copies it: the offset stays in one register, next to the loads.
template <class T> DEV T load(Global base, u32& offset) {
  SCALAR_AND_VECTOR(base, offset);
  return load<T>(base + offset);
}
// The same of what other blocks hand on, as it is now.
template <class T> DEV T load_handed(Global base, u32& offset) {
  SCALAR_AND_VECTOR(base, offset);
  if constexpr (WITHIN_LAUNCH) return peek((const T*)(base + offset));
  else return load<T>(base + offset);
}
