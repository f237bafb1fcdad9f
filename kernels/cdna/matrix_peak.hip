// matrix_peak: the peak throughput of MFMA. Four waves, one per SIMD; each has eight independent accumulators, more
// than the instruction's latency requires.
//
// Grid: a few blocks per compute unit.
#include "catalogue.h"
#include "mfma.h"

enum : int {
  THREADS = MATRIX_PEAK_THREADS,
  CHAINS = 8,
  OPERANDS = 2 / PIECE_MFMAS,            // each four K of a lane
  MFMA_FLOPS = 2 * 16 * 16 * 16 * OPERANDS,
  STEPS = PEAK_FLOPS / (4 * CHAINS * MFMA_FLOPS),
};

KERNEL(matrix_peak, PeakArgs, THREADS, 1, 1) {
  after_predecessor();
  u32 seed = TID * 2654435761u + 12345u;
  // FP16 numbers between 1 and 2 of either sign: random data draws the power that real data does.
  auto random_pair = [&] { seed = seed * 1664525u + 1013904223u; return (seed & 0x83ff83ffu) | 0x3c003c00u; };
  u32v2 x[2 * OPERANDS], y[2 * OPERANDS];
  for (int i = 0; i < 2 * OPERANDS; i++)
    x[i] = u32v2{random_pair(), random_pair()}, y[i] = u32v2{random_pair(), random_pair()};
  f32v4 sums[CHAINS] = {};
  for (int i = 0; i < a.iterations; i++)
#pragma unroll
    for (int step = 0; step < STEPS; step++)
#pragma unroll
      for (int chain = 0; chain < CHAINS; chain++)
        if constexpr (PIECE_MFMAS == 1) {
          const int i = step % 2, j = chain % 2;
          sums[chain] = mfma_of_piece<FORMAT_F16>(x[i], x[2 + i], y[j], y[2 + j], sums[chain]);
        } else {
          sums[chain] = mfma<FORMAT_F16>(x[step % 2], y[chain % 2], sums[chain]);
        }
  float sum = 0;
  for (int chain = 0; chain < CHAINS; chain++) for (int i = 0; i < 4; i++) sum += sums[chain][i];
  if (a.never) a.out[TID] = sum;
}
