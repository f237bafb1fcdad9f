// What a block multiplies, in device memory.
#pragma once
#include "../mma/epilogue.h"

enum : int { ROW_BYTES = SLAB * 2 };                       // of a token in a slab

struct Operands {
  const u8 *weights, *tokens;                              // of the first slab
  i64 weight_slab, token_slab;                             // bytes
  int weight_pieces, token_pieces;                         // of a slab, of 16 bytes

  // `block_bytes`: of 64 weight rows in a slab.
  DEV Operands(const GemmArgs& a, const Chunk& c, int block_bytes) {
    weight_slab = (i64)a.row_blocks * block_bytes;
    weights = a.weights + (i64)c.group * a.k_blocks * weight_slab + (i64)c.unit * block_bytes / 4;
    token_slab = (i64)a.in_rows * ROW_BYTES;
    tokens = (const u8*)a.input + (i64)c.row * ROW_BYTES;
    weight_pieces = c.units * block_bytes / 4 / 16, token_pieces = c.rows * (ROW_BYTES / 16);
  }
};
