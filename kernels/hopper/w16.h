// 16-bit weights as wgmma's A operand in shared memory.
//
// A unit is 16 rows x 64 k, 2048 bytes: rows of 128 bytes, eight pieces each, piece p at position p ^ (row % 8). So a
// bulk copy of a run of units is a matrix in the 128-byte swizzle. The scheduler distributes units, not blocks of 64
// rows: a matrix of 2880 rows is only 45 blocks for 132 multiprocessors, but 180 units. Where only some of a block's
// units were copied, wgmma multiplies stale shared memory for the others, and the epilogue does not store those rows.
// Row slots g and g + 8 of a unit are matrix rows 2g and 2g + 1, as in mxfp4.h.
#pragma once
#include "../gpu/gpu.h"

struct W16 {
  enum : int { UNIT_ROWS = 16, UNIT_BYTES = UNIT_ROWS * W16_SLAB_BYTES, BLOCK_BYTES = 4 * UNIT_BYTES };
  // The matrix row at a row slot.
  static HOST_DEV int matrix_row(int slot) { return slot / 16 * 16 + slot % 8 * 2 + slot % 16 / 8; }
};
