// The wire format of weights, from host to device: tiles of WIRE_ROWS rows, one after the other; a matrix's last tile
// is filled up with zero rows. BF16 and float32 are row-major; an MXFP4 tile has the codes of all rows, then their
// scales. The host writes it by `src/weights/row_major.rs`; `tests/header/wire.rs` compares the two, byte for byte.
#pragma once
#include "gpu/gpu.h"

// Rows of a matrix, rounded up to whole tiles.
HOST_DEV int wire_rows(int rows) { return (rows + WIRE_ROWS - 1) & -WIRE_ROWS; }

// Offsets within a tile of MXFP4 rows with `cols` values each, in bytes.
struct WireCodes {
  int cols;
  HOST_DEV int row_codes() const { return cols / 2; }
  HOST_DEV int row_scales() const { return cols / MXFP4_BLOCK; }
  HOST_DEV i64 tile_bytes() const { return (i64)WIRE_ROWS * (row_codes() + row_scales()); }
  // The byte with the codes of an even k (low half) and of k + 1.
  HOST_DEV i64 code(int row, int k) const { return (i64)row * row_codes() + k / 2; }
  HOST_DEV i64 scale(int row, int k) const {
    return (i64)WIRE_ROWS * row_codes() + (i64)row * row_scales() + k / MXFP4_BLOCK;
  }
};
