// synthesize: makes a random tensor in the wire format from a seed, for benchmarks without a checkpoint.
//
// An element is a hash of the seed and its index, in integer arithmetic up to the last rounding, so that all targets
// make the same model. A normally distributed number is a sum of eight 16-bit uniform ones (at most 4.9 standard
// deviations). A vector of n values is a tensor of n rows and one column. Padding rows are zeros.
//
// Grid: any.
#include "catalogue.h"
#include "gpu/math.h"
#include "wire.h"

enum { THREADS = SYNTHESIZE_THREADS };

// The finalizer of SplitMix64.
DEV u64 mix(u64 v) {
  v = (v ^ v >> 30) * 0xbf58476d1ce4e5b9ull;
  v = (v ^ v >> 27) * 0x94d049bb133111ebull;
  return v ^ v >> 31;
}
// A random number. The seed is hashed, so that the sequences of different seeds are not shifted copies of each other.
DEV u64 draw(u32 seed, i64 index) {
  return mix(mix(seed + 0x9e3779b97f4a7c15ull) ^ (u64)index * 0x9e3779b97f4a7c15ull);
}

DEV int sum_of_halves(u64 v) {
  return (int)(v & 0xffff) + (int)(v >> 16 & 0xffff) + (int)(v >> 32 & 0xffff) + (int)(v >> 48);
}
DEV float normal(const SynthesizeArgs& a, i64 index) {
  const int sum = sum_of_halves(draw(a.seed, 2 * index)) + sum_of_halves(draw(a.seed, 2 * index + 1));
  const float unit = (float)(sum - 4 * 65535) * (1.f / 53510.084f);          // 65536 * sqrt(8 / 12)
  return fma_rn(a.deviation, unit, a.mean);
}

// Whether a row belongs to a matrix or is padding.
DEV bool is_row(const SynthesizeArgs& a, i64 row) {
  return row % wire_rows(a.rows) < a.rows;
}

DEV void write_values(const SynthesizeArgs& a) {
  const i64 n = a.tiles * WIRE_ROWS * a.cols;
  for (i64 i = (i64)BID * THREADS + TID; i < n; i += (i64)GRID * THREADS) {
    const float v = is_row(a, i / a.cols) ? normal(a, i) : 0.f;
    if (a.format == FORMAT_F32) ((float*)a.wire)[i] = v;
    else ((u16*)a.wire)[i] = to_bf16(v);
  }
}

// A block of codes and its scale at a time.
DEV void write_mxfp4(const SynthesizeArgs& a) {
  const WireCodes wire{a.cols};
  const int blocks = wire.row_scales();
  const i64 n = a.tiles * WIRE_ROWS * blocks;
  for (i64 i = (i64)BID * THREADS + TID; i < n; i += (i64)GRID * THREADS) {
    const i64 tile = i / (WIRE_ROWS * blocks);
    const int in_tile = (int)(i % (WIRE_ROWS * blocks));
    u8* at = a.wire + tile * wire.tile_bytes();
    const bool real = is_row(a, i / blocks);
    const u64 low = real ? draw(a.seed, 3 * i) : 0, high = real ? draw(a.seed, 3 * i + 1) : 0;
    *(u32x4*)(at + (i64)in_tile * (MXFP4_BLOCK / 2)) = u32x4{(u32)low, (u32)(low >> 32), (u32)high, (u32)(high >> 32)};
    const int exponent = a.exponent - (int)(draw(a.seed, 3 * i + 2) >> 63);
    at[wire.scale(0, 0) + in_tile] = real ? (u8)(exponent + 127) : 0;
  }
}

KERNEL(synthesize, SynthesizeArgs, THREADS, 4, 4) {
  let_successor_start();
  after_predecessor();
  if (a.format == FORMAT_MXFP4) write_mxfp4(a);
  else write_values(a);
}
