// Where weights lie on the wire: tiles of WIRE_ROWS rows, one behind the other; a matrix's last tile is filled up with
// zero rows. BF16 and float32 are row-major; MXFP4 has the codes of all rows, then their scales.
#pragma once
#include "gpu/gpu.h"

// Rows of a matrix, filled up to whole tiles.
HOST_DEV int wire_rows(int rows) { return (rows + WIRE_ROWS - 1) & -WIRE_ROWS; }

// A tile of MXFP4 rows with `cols` values each; everything in bytes.
struct WireCodes {
  int cols;
  HOST_DEV int row_codes() const { return cols / 2; }
  HOST_DEV int row_scales() const { return cols / MXFP4_BLOCK; }
  HOST_DEV i64 tile_bytes() const { return (i64)WIRE_ROWS * (row_codes() + row_scales()); }
  // Where the code of an even k is, in the byte's low half, and that of k + 1.
  HOST_DEV i64 code(int row, int k) const { return (i64)row * row_codes() + k / 2; }
  HOST_DEV i64 scale(int row, int k) const {
    return (i64)WIRE_ROWS * row_codes() + (i64)row * row_scales() + k / MXFP4_BLOCK;
  }
};
