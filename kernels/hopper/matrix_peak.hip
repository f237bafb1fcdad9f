// matrix_peak: the peak throughput of wgmma. One warpgroup per block, both operands in shared memory, one m64n256k16
// after the other on the same accumulators, as in the products.
//
// Grid: two blocks per multiprocessor.
#include "catalogue.h"
#include "instruction.h"

enum : int {
  THREADS = MATRIX_PEAK_THREADS,
  ROWS = 64,
  COLUMNS = 256,
  SLAB_K16S = 4,
  K16S = PEAK_FLOPS / (2 * ROWS * COLUMNS * 16),
};

KERNEL(matrix_peak, PeakArgs, THREADS, 2, 1) {
  after_predecessor();
  __shared__ __align__(1024) u32 operands[(ROWS + COLUMNS) * SLAB / 2];
  u32 seed = TID * 2654435761u + 12345u;
  // FP16 numbers between 1 and 2 of either sign: random data draws the power that real data does.
  for (int i = TID; i < (int)(sizeof(operands) / 4); i += THREADS) {
    seed = seed * 1664525u + 1013904223u;
    operands[i] = (seed & 0x83ff83ffu) | 0x3c003c00u;
  }
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  barrier();
  const u64 at = (u64)__cvta_generic_to_shared(operands) >> 4, layout = 64ull << 32 | 1ull << 62;
  const u64 weights = layout | at, tokens = layout | (at + ROWS * 8);
  float sums[COLUMNS / 2] = {};
  for (int i = 0; i < a.iterations; i++) {
    wgmma_fence();
#pragma unroll
    for (int k16 = 0; k16 < K16S; k16++)
      Wgmma<FORMAT_F16, COLUMNS>::d16(sums, weights + k16 % SLAB_K16S * 2, tokens + k16 % SLAB_K16S * 2, 1);
    wgmma_commit();
    wgmma_wait<0>();
  }
  float sum = 0;
  for (int i = 0; i < COLUMNS / 2; i++) sum += sums[i];
  if (a.never) a.out[TID] = sum;
}
