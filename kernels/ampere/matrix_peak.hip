// matrix_peak: the peak throughput of mma.sync. Each warp has independent accumulators, as many as a product's.
//
// Grid: two blocks per multiprocessor.
#include "catalogue.h"
#include "../mma/warp.h"

enum : int {
  THREADS = MATRIX_PEAK_THREADS,
  UNITS = 2,
  COLUMNS = 8,                                             // of eight each
  ROUNDS = PEAK_FLOPS / (THREADS / WAVE * UNITS * COLUMNS * 2 * 16 * 8 * 16),
};

KERNEL(matrix_peak, PeakArgs, THREADS, 2, 1) {
  after_predecessor();
  u32 seed = TID * 2654435761u + 12345u;
  // FP16 numbers between 1 and 2 of either sign: random data draws the power that real data does.
  const auto random_pair = [&] { seed = seed * 1664525u + 1013904223u; return (seed & 0x83ff83ffu) | 0x3c003c00u; };
  u32 x[UNITS][4], y[COLUMNS][2];
  for (int i = 0; i < UNITS; i++) for (int j = 0; j < 4; j++) x[i][j] = random_pair();
  for (int i = 0; i < COLUMNS; i++) for (int j = 0; j < 2; j++) y[i][j] = random_pair();
  float sums[UNITS][COLUMNS][4] = {};
  for (int i = 0; i < a.iterations; i++)
#pragma unroll
    for (int round = 0; round < ROUNDS; round++)
#pragma unroll
      for (int unit = 0; unit < UNITS; unit++)
#pragma unroll
        for (int column = 0; column < COLUMNS; column++)
          mma<FORMAT_F16>(sums[unit][column], x[unit], y[column][0], y[column][1]);
  float sum = 0;
  for (int unit = 0; unit < UNITS; unit++)
    for (int column = 0; column < COLUMNS; column++)
      for (int i = 0; i < 4; i++) sum += sums[unit][column][i];
  if (a.never) a.out[TID] = sum;
}
