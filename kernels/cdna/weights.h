// Packed weights. A row block is 32 rows, as in the wire format; a slab of it is 64 K of these rows. A row block's
// slabs are contiguous in order, so a wave reads one stream from front to back. Padding rows and columns are zeros.
//
// Lane l = 16 g + n of a slab has K 16 g .. 16 g + 15 of the two rows row_of(0, n) and row_of(1, n). An MFMA takes
// four of a lane's K, gfx950's eight; which is free as long as tokens match, and tokens are stored in pieces of 8 like
// all activations. So a slab is four steps along K, (piece 0, half 0), (piece 0, half 1), (piece 1, half 0), (piece 1,
// half 1), or on gfx950 two, piece 0 and piece 1. Every sum has this order, whatever the tile.
#pragma once
#include "mfma.h"

enum : int {
  BLOCK_ROWS = WIRE_ROWS,
  SLAB_MFMAS = 4 * PIECE_MFMAS,   // per slab and 16 tokens: two pieces of K, two runs of 16 rows
};

// The weight row of row n of run r. With it a lane's results, rows 4 g + i of two MFMAs, are 8 consecutive rows
// 8 g + 4 r + i.
HOST_DEV int row_of(int r, int n) { return 8 * (n / 4) + 4 * r + n % 4; }

// The matrix row at row o of the packed weights. `half` is head_dim / 2 where rows of heads are in pairs half a head
// apart, so that a lane's 8 results are 4 pairs of one head; 0 where rows are in their own order.
HOST_DEV int matrix_row(int o, int half) {
  if (half == 0) return o;
  const int in_head = o % (2 * half);
  return o - in_head + in_head / 2 + in_head % 2 * half;
}

// A lane's A operands of one piece: [r][half].
struct Operand { u32v2 of[2][2]; };

// 16-bit weights: [r][piece] of 16 bytes per lane.
template <int FORMAT_> struct W16 {
  static constexpr int FORMAT = FORMAT_;
  enum : int { SLAB_BYTES = BLOCK_ROWS * W16_SLAB_BYTES, LOADS = 4, DECODE_VALU = 0, STREAM_DEPTH = 4 };
  struct Raw { u32v4 of[2][2]; };
  // A lane's offsets within a slab.
  struct Place { u32 of = LANE * 16; };
  static DEV void load_part(Raw& raw, Global slab, Place& at, int i) {
    VECTOR(at.of);
    raw.of[i / 2][i % 2] = load<u32v4>(slab + at.of + i * 1024);
  }
  // A piece of run r.
  static DEV void decode(const Raw& raw, int piece, int r, Operand& out) {
    for (int half = 0; half < 2; half++)
      out.of[r][half] = u32v2{raw.of[r][piece][2 * half], raw.of[r][piece][2 * half + 1]};
  }
};

// MXFP4: 1024 bytes of codes, 16 per lane, word 2 r + piece; then 64 bytes of scales, byte (K half * 16 + n) * 2 + r.
//
// gfx950 converts FP4 by itself, two codes by a VALU: a word's codes are in the order of K, and a scale's byte is the
// exponent of a float32.
//
// Elsewhere the code of K b (b = 0..3) has its magnitude in bits 8 b .. 8 b + 2 and its sign in bit 8 b + 7; the code
// of K 4 + b has its magnitude in bits 8 b + 4 .. 8 b + 6 and its sign in bit 8 ((b + 1) % 4) + 3. A rotation by 4
// moves the second four codes to where the first four were. MI200's MFMA flushes subnormals to zero, so a table decodes
// to normal numbers:
//
// FP16, 15 VALU for 8 codes: .5 1 1.5 2 3 4 6 have zero low bytes and high bytes 38 3C 3E 40 42 44 46; multiplied by
//       the scale. 0 stays 0. The scale byte is the high byte of 2^e; e is in -13 .. 13, where neither 0.5 * 2^e is
//       subnormal nor 6 * 2^e infinite.
// BF16, 17 VALU: the table's numbers have 0.5's exponent at 63: 1F80 2000 2040 2080 20C0 2100 2140. The scale byte,
//       E8M0 - 64, is added to the exponent. 0 becomes 2^-63 of the block's 0.5: nothing in float32 and, summed,
//       nothing in float64.
HOST_DEV int magnitude_at(int i) { return CONVERTS_FP4 ? 4 * i : 8 * (i % 4) + i / 4 * 4; }
HOST_DEV int sign_at(int i) { return CONVERTS_FP4 ? 4 * i + 3 : i < 4 ? 8 * i + 7 : 8 * ((i - 3) % 4) + 3; }

template <int FORMAT_> struct Mxfp4 {
  static constexpr int FORMAT = FORMAT_;
  enum : int {
    SLAB_BYTES = BLOCK_ROWS * MXFP4_SLAB_BYTES,
    SCALES = BLOCK_ROWS * SLAB / 2,
    LOADS = 2,
    DECODE_VALU = CONVERTS_FP4 ? 12 : FORMAT == FORMAT_F16 ? 32 : 38,
    STREAM_DEPTH = 6,
  };
  struct Raw { u32v4 codes; u32 scales; };
  // Scales are loaded as whole words, for two lanes each: two bytes would have to be widened within the loop, and that
  // waits for the load.
  struct Place { u32 codes = LANE * 16, scales = SCALES + (LANE / 32 * 16 + LANE % 16) / 2 * 4; };
  static DEV void load_part(Raw& raw, Global slab, Place& at, int i) {
    VECTOR(at.codes);
    VECTOR(at.scales);
    if (i == 0) raw.codes = load<u32v4>(slab + at.codes);
    else raw.scales = load<u32>(slab + at.scales);
  }
  static DEV void decode(const Raw& raw, int piece, int r, Operand& out) {
    const u32 codes = raw.codes[2 * r + piece];
    if constexpr (CONVERTS_FP4) {
      const u32 exponent = raw.scales >> (16 * (LANE % 2)) >> (8 * r) & 255u;
      convert_fp4<FORMAT>(codes, __builtin_bit_cast(float, exponent << 23), out.of[r][0], out.of[r][1]);
      return;
    }
    const u32 scale = scale_pair(raw.scales, r);
    out.of[r][0] = decode4(codes, scale);
    out.of[r][1] = decode4(rotate_right(codes, 4), scale);
  }
  static DEV u32 scale_pair(u32 scales, int r) {
    const u32 odd = LANE % 2;    // which half of the word
    if (FORMAT == FORMAT_F16) return byte_permute(scales, scales, (r ? 0x010c010cu : 0x000c000cu) + odd * 0x02000200u);
    return (scales >> (16 * odd) >> (8 * r) & 255u) * 0x00800080u;
  }
  static DEV u32v2 decode4(u32 codes, u32 scale) {
    const u32 index = codes & 0x07070707u;
    if (FORMAT == FORMAT_F16) {
      const u32 high = select_bits(0x80808080u, codes, byte_permute(0x46444240u, 0x3e3c3800u, index));
      return u32v2{multiply_f16x2(byte_permute(high, 0, 0x050c040cu), scale),
                   multiply_f16x2(byte_permute(high, 0, 0x070c060cu), scale)};
    }
    const u32 low = byte_permute(0x4000c080u, 0x40008000u, index);
    const u32 high = select_bits(0x80808080u, codes, byte_permute(0x21212020u, 0x20201f00u, index));
    return u32v2{byte_permute(high, low, 0x05010400u) + scale, byte_permute(high, low, 0x07030602u) + scale};
  }
};
