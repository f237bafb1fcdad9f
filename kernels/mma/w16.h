// 16-bit weights as the A operand in shared memory, of mma.sync or wgmma.
//
// A unit is 16 rows x 64 k, 2048 bytes: rows of 128 bytes, eight pieces each, piece p at position p ^ (row % 8). So a
// bulk copy of a run of units is a matrix in the 128-byte swizzle. Work may be distributed by units, not blocks of 64
// rows: a matrix of 2880 rows is only 45 blocks for 132 multiprocessors, but 180 units. Where only some of a block's
// units were copied, wgmma multiplies stale shared memory for the others, and the epilogue does not store those rows.
// Stored rows g and g + 8 of a unit, which are one thread's, are matrix rows 2g and 2g + 1, as in mxfp4.h; of queries,
// keys and values in `fast` elements i and i + head_dim / 2 of one head, which are rotated together.
#pragma once
#include "../gpu/gpu.h"

struct W16 {
  enum : int { UNIT_ROWS = 16, UNIT_BYTES = UNIT_ROWS * W16_SLAB_BYTES, BLOCK_BYTES = 4 * UNIT_BYTES };
  // The matrix row that is stored as this one. `half` is head_dim / 2 where rows are in pairs half a head apart, or 0.
  static HOST_DEV int matrix_row(int stored, int half) {
    const int unit = stored / UNIT_ROWS, pair = stored % 8, second = stored % UNIT_ROWS / 8;
    if (half == 0) return unit * UNIT_ROWS + pair * 2 + second;
    const int units = half / 8;                            // of a head
    return unit / units * 2 * half + unit % units * 8 + pair + second * half;
  }
};
