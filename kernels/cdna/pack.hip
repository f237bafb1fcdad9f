// pack_mxfp4, pack_w16: weights from the wire format (wire.h) to the layout of weights.h. A wire tile of 32 rows
// becomes a row block; a thread writes what one lane of a slab will read.
//
// Bytes per member, one matrix of the tensor (an expert's): row_blocks * k_blocks * SLAB_BYTES, with row_blocks = rows
// / 32 and k_blocks = cols / 64 rounded up and SLAB_BYTES 1088 (MXFP4) or 4096 (16 bits).
//
// Grid: any (grid-stride).
#include "catalogue.h"
#include "../wire.h"
#include "weights.h"

enum : int { THREADS = PACK_THREADS };

// A lane of a slab: its wire tile, and its columns of the tile's rows.
struct LanePlace { i64 slab; i64 tile; int k; int n; int lane; };

DEV LanePlace lane_place(const PackArgs& a, i64 item) {
  const i64 slab = item / WAVE;
  const int lane = (int)(item % WAVE);
  return LanePlace{slab, slab / a.k_blocks, (int)(slab % a.k_blocks) * SLAB + lane / 16 * 16, lane % 16, lane};
}
DEV i64 lanes(const PackArgs& a) { return (i64)a.members * a.row_blocks * a.k_blocks * WAVE; }

DEV u8 code_at(const PackArgs& a, const u8* tile, int row, int k) {
  return k < a.cols ? tile[WireCodes{a.cols}.code(row, k)] >> (k % 2 * 4) & 15 : 0;
}
// Eight codes from column k on, in the order of weights.h's words.
DEV u32 code_word(const PackArgs& a, const u8* tile, int row, int k) {
  u32 word = 0;
  for (int i = 0; i < 8; i++) {
    const u32 code = code_at(a, tile, row, k + i);
    word |= (code & 7) << magnitude_at(i) | (code >> 3) << sign_at(i);
  }
  return word;
}
DEV int clamp_int(int v, int low, int high) { return v < low ? low : v > high ? high : v; }

// A scale is out of range only where all of a block's codes are 0, or where the host chose so.
DEV u8 scale_byte(const PackArgs& a, const u8* tile, int row, int k) {
  if (k >= a.cols) return 0;
  const int e8m0 = tile[WireCodes{a.cols}.scale(row, k)] + a.shift;
  if (a.format == FORMAT_F16) {
    const int exponent = clamp_int(e8m0 - 127, -13, 13);
    return (u8)(CONVERTS_FP4 ? exponent + 127 : (exponent + 15) << 2);
  }
  return (u8)(clamp_int(e8m0 - 64, 0, 188) + (CONVERTS_FP4 ? 64 : 0));
}

KERNEL(pack_mxfp4, PackArgs, THREADS, 1, 4) {
  after_predecessor();
  const i64 tile_bytes = WireCodes{a.cols}.tile_bytes();
  for (i64 item = (i64)BID * THREADS + TID; item < lanes(a); item += (i64)GRID * THREADS) {
    const LanePlace p = lane_place(a, item);
    const u8* tile = a.wire + p.tile * tile_bytes;
    u8* slab = a.out + p.slab * Mxfp4<FORMAT_F16>::SLAB_BYTES;
    u32v4 words;
    for (int i = 0; i < 4; i++) words[i] = code_word(a, tile, row_of(i / 2, p.n), p.k + i % 2 * 8);
    *(u32v4*)(slab + p.lane * 16) = words;
    if (p.k % MXFP4_BLOCK) continue;
    for (int r = 0; r < 2; r++)
      slab[Mxfp4<FORMAT_F16>::SCALES + (p.lane / 32 * 16 + p.n) * 2 + r] = scale_byte(a, tile, row_of(r, p.n), p.k);
  }
}

// 2^e for e in -126 .. 127.
DEV float exp2_of(int e) { return __builtin_bit_cast(float, (u32)(e + 127) << 23); }

DEV u16 w16_at(const PackArgs& a, const u16* row, int k) {
  if (k >= a.cols) return 0;
  const float v = bf16_to_f32(row[k]) * exp2_of(a.shift);
  return a.format == FORMAT_F16 ? to_f16(v) : to_bf16(v);
}

// The wire's row of a lane's run r, counted over all members. Rows beyond the matrix are zeros there.
DEV i64 wire_row(const PackArgs& a, const LanePlace& p, int r) {
  const int row_block = (int)(p.tile % a.row_blocks), row = row_block * BLOCK_ROWS + row_of(r, p.n);
  return (p.tile - row_block) * BLOCK_ROWS + (row < a.rows ? matrix_row(row, a.half) : row);
}

// The wire format is BF16.
KERNEL(pack_w16, PackArgs, THREADS, 1, 4) {
  after_predecessor();
  for (i64 item = (i64)BID * THREADS + TID; item < lanes(a); item += (i64)GRID * THREADS) {
    const LanePlace p = lane_place(a, item);
    u8* slab = a.out + p.slab * W16<FORMAT_F16>::SLAB_BYTES;
    for (int i = 0; i < 4; i++) {
      const u16* row = (const u16*)a.wire + wire_row(a, p, i / 2) * a.cols;
      const int k = p.k + i % 2 * 8;
      u32v4 words;
      for (int w = 0; w < 4; w++)
        words[w] = (u32)w16_at(a, row, k + 2 * w + 1) << 16 | w16_at(a, row, k + 2 * w);
      *(u32v4*)(slab + i * 1024 + p.lane * 16) = words;
    }
  }
}
