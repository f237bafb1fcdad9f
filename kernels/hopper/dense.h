// 16-bit weights as wgmma's operand A in shared memory.
//
// A unit is 16 rows x 64 k, 2048 bytes: rows of 128 bytes, eight pieces each, piece p at place p ^ (row % 8), so a bulk copy
// of a run of units is a matrix in the 128-byte swizzle. Units, not blocks of 64 rows, are what the scheduler deals out: a
// matrix of 2880 rows is only 45 blocks for 132 multiprocessors, but 180 units. A block of which only some units were
// brought multiplies whatever lies behind them, and nobody stores the result.
// Row slots g and g + 8 of a unit are matrix rows 2g and 2g + 1: as in mxfp4.h.
#pragma once
#include "../gpu/gpu.h"

struct Dense {
  enum : int { UNIT_ROWS = 16, UNIT_BYTES = UNIT_ROWS * DENSE_SLAB_BYTES, BLOCK_BYTES = 4 * UNIT_BYTES };
  // The row of the matrix that is at a slot.
  static HOST_DEV int matrix_row(int slot) { return slot / 16 * 16 + slot % 8 * 2 + slot % 16 / 8; }
};
