// attention_peak: what prefill attention's products and softmax reach where no keys have to be fetched.
//
// Grid: two blocks per multiprocessor.
#include "../mma/registers.h"
#include "attention_products.h"

enum : int {
  THREADS = ATTENTION_PEAK_THREADS,
  TILES = PEAK_FLOPS / (THREADS / WAVE * STRIPS * 2 * 2 * 16 * KV_PAGE * HEAD_DIM),        // of an iteration
};

KERNEL(attention_peak, PeakArgs, THREADS, 2, 1) {
  after_predecessor();
  __shared__ __align__(128) u32 tile[TILE_BYTES / 4];
  u32 seed = TID * 2654435761u + 12345u;
  // FP16 numbers between 1/4 and 1/2 of either sign: random data draws the power that real data does.
  const auto random_pair = [&] { seed = seed * 1664525u + 1013904223u; return (seed & 0x83ff83ffu) | 0x34003400u; };
  for (int i = TID; i < TILE_BYTES / 4; i += THREADS) tile[i] = random_pair();
  barrier();
  Queries q[STRIPS];
  Rows r[STRIPS] = {};
  UNROLL for (int u = 0; u < STRIPS; u++) {
    UNROLL for (int s = 0; s < K16S; s++) UNROLL for (int i = 0; i < 4; i++) q[u].v[s][i] = random_pair();
    UNROLL for (int row = 0; row < 2; row++) r[u].m[row] = NEGATIVE_INFINITY;
  }
  const u32 at = shared_address(tile);
  ROLLED for (int i = 0; i < a.iterations * TILES; i++) {
    float s[STRIPS][32];
    u32 p[STRIPS][K16S][4];
    multiply_keys<FORMAT_F16>(s, q, at);
    UNROLL for (int u = 0; u < STRIPS; u++) {
      float f[2];
      softmax<FORMAT_F16>(s[u], r[u], f);
      rescale(r[u], f);
      pack<FORMAT_F16>(s[u], p[u]);
    }
    multiply_values<FORMAT_F16>(r, p, at + HALF_TILE);
  }
  float sum = 0;
  for (int u = 0; u < STRIPS; u++) for (int i = 0; i < 32; i++) sum += r[u].o[i] + r[u].sum[i % 2];
  if (a.never) a.out[TID] = sum;
}
