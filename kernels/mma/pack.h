// pack_mxfp4, pack_w16: from the wire format (row-major tiles of WIRE_ROWS rows, wire.h) to the layouts that the
// products read. Bytes per member, one matrix of the tensor (an expert's):
//   MXFP4   k_blocks * row_blocks * 2176      [k block][row block of 64 rows] blocks, see mxfp4.h
//   W16     k_blocks * row_blocks * 8192      [k block][row block][4 units of 16 rows], see w16.h
// row_blocks is rows / 64 rounded up, k_blocks is cols / 64 rounded up; beyond the matrix there are zeros. A thread
// block packs one row block x k block at a time.
//
// Grid: any (grid-stride).
#pragma once
#include "catalogue.h"
#include "../wire.h"
#include "w16.h"
#include "mxfp4.h"

// A member's wire tiles, MXFP4: codes of WIRE_ROWS rows, then their scales.
struct CodesOnWire {
  const u8* at;
  int rows, cols;
  DEV const u8* tile(int row) const { return at + row / WIRE_ROWS * WireCodes{cols}.tile_bytes(); }
  DEV u32 two_codes(int row, int k) const {                 // k and k + 1, k even
    return row < rows && k < cols ? tile(row)[WireCodes{cols}.code(row % WIRE_ROWS, k)] : 0;
  }
  DEV int exponent(int row, int k) const {
    if (row >= rows || k >= cols) return -127;
    return (int)tile(row)[WireCodes{cols}.scale(row % WIRE_ROWS, k)] - 127;
  }
};

template <int FORMAT> DEV void pack_codes(const CodesOnWire& wire, u8* out, int row, int k, int shift) {
  const int warp = TID / WAVE, g = LANE / 4, q = LANE % 4;
  const int pair = row + warp * 16 + 2 * g;                // fragment rows g and g + 8 are matrix rows 2g and 2g + 1
  u32x4 words;
  for (int s = 0; s < 4; s++) {
    u32 code[4][2];
    for (int p = 0; p < 4; p++) {
      const u32 both = wire.two_codes(pair + p % 2, k + s * 16 + p / 2 * 8 + q * 2);
      code[p][0] = both & 15, code[p][1] = both >> 4;
    }
    words[s] = Fp4<FORMAT>::encode8(code);
  }
  ((u32x4*)out)[TID] = words;
  if (q != 0) return;
  int exponent[2][2];
  for (int r = 0; r < 2; r++)
    for (int half = 0; half < 2; half++) exponent[r][half] = wire.exponent(pair + r, k + half * 32) + shift;
  ((u32*)(out + Mxfp4::SCALES))[warp * 8 + g] = encode_scales<FORMAT>(exponent);
}

// A member's wire tiles, BF16.
struct ElementsOnWire {
  const u16* at;
  int rows, cols;
  DEV float get(int row, int k) const { return row < rows && k < cols ? bf16_to_f32(at[(i64)row * cols + k]) : 0.f; }
};

// Thread t packs pieces t, t + PACK_THREADS, .. of the block's 512: stored row piece / 8, position piece % 8.
template <int FORMAT>
DEV void pack_elements(const ElementsOnWire& wire, u8* out, int row, int k, int shift, int half) {
  const float factor = ldexpf(1.f, shift);
  for (int piece = TID; piece < 64 * 8; piece += PACK_THREADS) {
    const int stored = piece / 8, from = W16::matrix_row(row + stored, half), k8 = k + ((piece % 8) ^ (stored % 8)) * 8;
    u32x4 packed;
    for (int j = 0; j < 8; j += 2) {
      const u16 low = to_16<FORMAT>(wire.get(from, k8 + j) * factor);
      const u16 high = to_16<FORMAT>(wire.get(from, k8 + j + 1) * factor);
      packed[j / 2] = (u32)high << 16 | low;
    }
    ((u32x4*)out)[piece] = packed;
  }
}

// Calls body(member, first row, first k, out) for every block of every member.
template <class Body> DEV void for_each_block(const PackArgs& a, int block_bytes, Body body) {
  const i64 blocks = (i64)a.k_blocks * a.row_blocks, all = blocks * a.members;
  for (i64 i = BID; i < all; i += GRID) {
    const i64 at = i % blocks;
    body(i / blocks, (int)(at % a.row_blocks) * 64, (int)(at / a.row_blocks) * 64, a.out + i * block_bytes);
  }
}

KERNEL(pack_mxfp4, PackArgs, PACK_THREADS, 8, 4) {
  after_predecessor();
  for_each_block(a, Mxfp4::UNIT_BYTES, [&](i64 member, int row, int k, u8* out) {
    const i64 tiles = member * (wire_rows(a.rows) / WIRE_ROWS);
    const CodesOnWire wire = {a.wire + tiles * WireCodes{a.cols}.tile_bytes(), a.rows, a.cols};
    if (a.format == FORMAT_F16) pack_codes<FORMAT_F16>(wire, out, row, k, a.shift);
    else pack_codes<FORMAT_BF16>(wire, out, row, k, a.shift);
  });
}

KERNEL(pack_w16, PackArgs, PACK_THREADS, 8, 4) {
  after_predecessor();
  for_each_block(a, W16::BLOCK_BYTES, [&](i64 member, int row, int k, u8* out) {
    const ElementsOnWire wire = {(const u16*)a.wire + member * wire_rows(a.rows) * a.cols, a.rows, a.cols};
    if (a.format == FORMAT_F16) pack_elements<FORMAT_F16>(wire, out, row, k, a.shift, a.half);
    else pack_elements<FORMAT_BF16>(wire, out, row, k, a.shift, a.half);
  });
}
