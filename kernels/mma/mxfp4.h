// MXFP4 weights (E2M1 codes, one power of two per 32 along K) as the A operand of mma.sync or wgmma in registers.
//
// A weight block is 64 rows x 64 k, 2176 bytes: 128 threads x 16 bytes of codes, then 32 scale words (warp, lane / 4).
//   A thread's code word s (of 4) is its fragment of k16 s: registers 0 and 1 (rows g and g + 8, k 2q and 2q + 1),
//     registers 2 and 3 (rows g and g + 8, k 2q + 8 and 2q + 9); the lower k in the lower half.
//   Fragment rows g and g + 8 of a warp's 16 are matrix rows 2g and 2g + 1: gate and up meet in one thread, and the
//     other products store pairs.
//
// Decoding. A 16-bit float whose sign is the code's, and whose low exponent bits and first mantissa bit are the code's
// other three, has the value code * 2^-14 (FP16) or code * 2^-126 (BF16); the code 0.5 is a subnormal. One packed
// multiplication by the scale, which includes the missing power of two, gives the weight. So each of eight codes must
// be moved to that bit field (FIELDS), for two halves at once. Bits of a half:
//          FP16 (field: sign 15, magnitude 11..9)          BF16 (field: sign 15, magnitude 8..6)
//   a0     sign 15, magnitude 11..9: mask                  sign 15, magnitude 8..6: mask
//   a1     sign 12, magnitude 8..6: shift 3, mask          sign 12, magnitude 5..3: shift 3, mask
//   a2     sign 14, magnitude 5..3: mask, times 66, mask   sign 14, magnitude 2..0: mask, times 66, mask
//   a3     sign 13, magnitude 2..0: mask, times 516, mask  sign 13, magnitude 11..9: two shifts, two masks
// 66 = 2 + 64 and 516 = 4 + 512 shift sign and magnitude by different distances in one instruction, on the multiplier's
// pipe, which has slots to spare. Eight weights cost 9 (BF16: 10) integer instructions and 4 multiplications. If one
// shift or rotation sufficed for each of the four codes it would be 7, but no four such positions fit in 16 bits.
//
// A scale word has the scales of rows g (low half) and g + 8 (high half) for k 0..31 and k 32..63:
//   FP16  the high byte of the FP16 number 2^14 * scale: bytes 1 and 3 for k 0..31, bytes 0 and 2 for k 32..63. It
//         holds scales 2^1 .. 2^-30; weights are exact down to scale 2^-23.
//   BF16  the exponent of 2^126 * scale, at bits 14..7 of the halves for k 0..31; a rotation by 8 brings that of k
//         32..63 there. Scales up to 2^1.
// The host shifts a tensor's scales so that the largest is at most 2^1 (PackArgs.shift), and GemmArgs.scale undoes it.
#pragma once
#include "../gpu/gpu.h"

struct Mxfp4 {
  enum : int { UNIT_ROWS = 64, UNIT_BYTES = UNIT_ROWS * MXFP4_SLAB_BYTES, SCALES = UNIT_ROWS * SLAB / 2 };
};

// Places eight codes: bit positions of sign and magnitude within a half.
struct Places { int of[4]; };
DEV u32 place8(const u32 (&code)[4][2], Places sign, Places magnitude) {
  u32 w = 0;
  for (int p = 0; p < 4; p++)
    for (int h = 0; h < 2; h++) w |= ((code[p][h] >> 3) << sign.of[p] | (code[p][h] & 7) << magnitude.of[p]) << 16 * h;
  return w;
}

template <int FORMAT> struct Fp4;

template <> struct Fp4<FORMAT_F16> {
  enum : u32 { FIELDS = 0x8E008E00u, A2 = 0x40384038u, A3 = 0x20072007u };

  static DEV u32 multiply(u32 a, u32 b) {
    u32 d;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
  }
  static DEV u32 scales(u32 word, int k_half) { return (k_half ? word << 8 : word) & 0xFF00FF00u; }
  static DEV u32 field0(u32 w) { return w & FIELDS; }
  static DEV u32 field1(u32 w) { return (w << 3) & FIELDS; }
  static DEV u32 field2(u32 w) { return ((w & A2) * 66u) & FIELDS; }
  static DEV u32 field3(u32 w) { return ((w & A3) * 516u) & FIELDS; }

  // code[i][h] is the code of register a<i>: low half h = 0, high half h = 1.
  static DEV u32 encode8(const u32 (&code)[4][2]) { return place8(code, {{15, 12, 14, 13}}, {{9, 6, 3, 0}}); }
  // The byte of a scale 2^exponent; below the range it is zero.
  static DEV u32 encode_scale(int exponent, int k_half) {
    const int e = min(exponent, 1) + 14 + 15;              // FP16's exponent field, below 1 a subnormal
    const u32 byte = e >= 1 ? (u32)e << 2 : e == 0 ? 2u : e == -1 ? 1u : 0u;
    return k_half ? byte : byte << 8;
  }
};

template <> struct Fp4<FORMAT_BF16> {
  enum : u32 { FIELDS = 0x81C081C0u, A2 = 0x40074007u };

  static DEV u32 multiply(u32 a, u32 b) {
    u32 d;
#if __CUDA_ARCH__ >= 900
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
#else                                    // older ones have no multiplication alone: a sum with -0 changes nothing
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(0x80008000u));
#endif
    return d;
  }
  static DEV u32 scales(u32 word, int k_half) { return (k_half ? __funnelshift_l(word, word, 8) : word) & 0x7F807F80u; }
  static DEV u32 field0(u32 w) { return w & FIELDS; }
  static DEV u32 field1(u32 w) { return (w << 3) & FIELDS; }
  static DEV u32 field2(u32 w) { return ((w & A2) * 66u) & FIELDS; }
  static DEV u32 field3(u32 w) { return ((w << 2) & 0x80008000u) | ((w >> 3) & 0x01C001C0u); }

  static DEV u32 encode8(const u32 (&code)[4][2]) { return place8(code, {{15, 12, 14, 13}}, {{6, 3, 0, 9}}); }
  static DEV u32 encode_scale(int exponent, int k_half) {
    const u32 field = (u32)max(min(exponent, 1) + 126 + 127, 0) << 7;
    return k_half ? field >> 8 | field << 24 : field;      // encode_scales shifts the high half's by 16
  }
};

// The scale word of rows g and g + 8: exponents [row][k half].
template <int FORMAT> DEV u32 encode_scales(const int (&exponent)[2][2]) {
  u32 word = 0;
  for (int half = 0; half < 2; half++)
    for (int row = 0; row < 2; row++) {
      const u32 v = Fp4<FORMAT>::encode_scale(exponent[row][half], half);
      word |= row ? __funnelshift_l(v, v, 16) : v;
    }
  return word;
}

// Decodes eight codes to a thread's fragment of one k16. The compiler turns the broadcasts of scales into operand
// modifiers of the multiplications.
template <int FORMAT> DEV void decode8(u32 w, u32 scales, u32* a) {
  using F = Fp4<FORMAT>;
  u32 low, high;
  asm("{ .reg .b16 l, h; mov.b32 {l, h}, %2; mov.b32 %0, {l, l}; mov.b32 %1, {h, h}; }"
      : "=r"(low), "=r"(high) : "r"(scales));
  a[0] = F::multiply(F::field0(w), low);
  a[1] = F::multiply(F::field1(w), high);
  a[2] = F::multiply(F::field2(w), low);
  a[3] = F::multiply(F::field3(w), high);
}
