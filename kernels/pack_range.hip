// range: the smallest and the largest exponent of a tensor in the wire format, from which the host chooses the power of
// two that brings it into FP16's range. For BF16 also the smallest of the rows' largest exponents, which decides
// whether small values may be flushed. Padding rows are ignored.
//
// Grid: any; from four blocks per multiprocessor on it reads at the rate of memory.
#include "catalogue.h"
#include "gpu/math.h"
#include "wire.h"

enum : int { THREADS = PACK_RANGE_THREADS, WAVES = THREADS / WAVE, NOTHING = -0x7fffffff - 1 };

struct Range { int smallest, largest, weakest_row; };
DEV Range nothing() { return {0x7fffffff, NOTHING, 0x7fffffff}; }
DEV void widen(Range& range, int exponent) {
  if (exponent < range.smallest) range.smallest = exponent;
  if (exponent > range.largest) range.largest = exponent;
}

// Includes the exponent of a BF16 value; a subnormal's is that of its leading bit.
DEV void widen_by_bf16(Range& range, u32 value) {
  const int field = (int)(value >> 7 & 255), mantissa = (int)(value & 127);
  if (field) widen(range, field - 127);
  else if (mantissa) widen(range, 31 - __builtin_clz((u32)mantissa) - 133);
}

DEV int wave_largest(int v) {
  for (int o = WAVE / 2; o; o /= 2) {
    const int other = shfl_xor(v, o);
    v = other > v ? other : v;
  }
  return v;
}

// The range of a lane's part of a row, read 16 bytes at a time if rows are aligned to that.
DEV Range range_of_row(const u16* values, int cols) {
  Range range = nothing();
  const int pieces = cols % 8 == 0 ? cols / 8 : 0;
  for (int i = LANE; i < pieces; i += WAVE) {
    const u32x4 piece = ((const u32x4*)values)[i];
    for (int j = 0; j < 4; j++) {
      widen_by_bf16(range, piece[j] & 0xffff);
      widen_by_bf16(range, piece[j] >> 16);
    }
  }
  for (int k = pieces * 8 + LANE; k < cols; k += WAVE) widen_by_bf16(range, values[k]);
  return range;
}

// One wave per row. Zeros are ignored, and so is padding.
DEV Range range_of_bf16(const RangeArgs& a) {
  Range range = nothing();
  for (i64 row = (i64)BID * WAVES + TID / WAVE; row < a.tiles * WIRE_ROWS; row += (i64)GRID * WAVES) {
    const Range own = range_of_row((const u16*)a.wire + row * a.cols, a.cols);
    const int largest = wave_largest(own.largest);
    if (own.smallest < range.smallest) range.smallest = own.smallest;
    if (largest > range.largest) range.largest = largest;
    if (largest != NOTHING && largest < range.weakest_row) range.weakest_row = largest;
  }
  return range;
}

DEV Range range_of_scales(const RangeArgs& a) {
  Range range = nothing();
  const WireCodes wire{a.cols};
  const int matrix_tiles = wire_rows(a.rows) / WIRE_ROWS;
  for (i64 tile = BID; tile < a.tiles; tile += GRID) {
    const u8* scales = a.wire + tile * wire.tile_bytes() + wire.scale(0, 0);
    const int left = a.rows - (int)(tile % matrix_tiles) * WIRE_ROWS;
    const int n = (left < WIRE_ROWS ? left : WIRE_ROWS) * wire.row_scales();
    for (int i = TID; i < n; i += THREADS) widen(range, (int)scales[i] - 127);
  }
  return range;
}

KERNEL(range, RangeArgs, THREADS, 4, 4) {
  SHARED int smallest;
  SHARED int largest;
  SHARED int weakest_row;
  let_successor_start();
  after_predecessor();
  const Range range = a.format == FORMAT_MXFP4 ? range_of_scales(a) : range_of_bf16(a);
  if (TID == 0) smallest = weakest_row = 0x7fffffff, largest = NOTHING;
  barrier();
  atomic_min(&smallest, range.smallest);
  atomic_max(&largest, range.largest);
  atomic_min(&weakest_row, range.weakest_row);
  barrier();
  if (TID == 0) {
    atomic_min(a.result, smallest);
    atomic_max(a.result + 1, largest);
    atomic_min(a.result + 2, weakest_row);
  }
}
