// attention_peak: what prefill attention's products and softmax reach side by side, at head_dim 64. Each of four
// warpgroups multiplies a tile of 64 rows and 64 keys, and meanwhile weighs scores that no product waits for: so the
// matrix cores, the exponentials and the registers' ports are what limits it. Operands do not leave shared memory.
//
// Grid: two blocks per multiprocessor, one after the other.
#include "attention_products.h"
#include "copy.h"

enum : int {
  THREADS = ATTENTION_PEAK_THREADS,
  GROUPS = THREADS / 128,
  OPERANDS = GROUPS * HALF_TILE + TILE_BYTES,              // queries of each warpgroup, and a tile for all
};
static_assert(PEAK_FLOPS == GROUPS * 2 * 2 * KV_PAGE * KV_PAGE * HEAD_DIM, "operations of an iteration");

KERNEL(attention_peak, PeakArgs, THREADS, 1, 1) {
  after_predecessor();
  __shared__ __align__(1024) u32 operands[OPERANDS / 4];
  u32 seed = TID * 2654435761u + 12345u;
  // FP16 numbers between 1/4 and 1/2 of either sign: random data draws the power that real data does.
  for (int i = TID; i < OPERANDS / 4; i += THREADS) {
    seed = seed * 1664525u + 1013904223u;
    operands[i] = (seed & 0x83ff83ffu) | 0x34003400u;
  }
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  barrier();
  const u32 tile = shared_address((u8*)operands), queries = tile + TILE_BYTES + TID / 128 * HALF_TILE;
  Rows r = {};
  float weights[32];
  u32 p[K16S][4] = {};
  for (int row = 0; row < 2; row++) r.m[row] = NEGATIVE_INFINITY;
  for (int i = 0; i < 32; i++) weights[i] = (float)((i * 7 + TID) % 13);
  pin(r.o);
  ROLLED for (int i = 0; i < a.iterations; i++) {
    wgmma_fence();
    issue_scores<FORMAT_F16>(r.o, queries, tile);          // into the same registers, of which there are not more
    issue_values<FORMAT_F16>(r.o, p, tile);
    wgmma_commit();
    float f[2];
    softmax<FORMAT_F16>(weights, r, f);
    // Never true. It keeps the wait behind the exponentials.
    if (!(r.sum[0] + r.sum[1] >= 0)) asm volatile("nanosleep.u32 0;");
    wgmma_wait<0>();
    pin(r.o);
    pack<FORMAT_F16>(weights, p);
  }
  float sum = r.sum[0] + r.sum[1];
  for (int i = 0; i < 32; i++) sum += r.o[i];
  if (a.never) a.out[TID] = sum;
}
