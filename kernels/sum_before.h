// Sums over the threads of a block.
#pragma once
#include "gpu/gpu.h"

// The sum of `mine` over the threads before this one. `waves`: room for a number of each wave.
DEV double sum_before(double mine, double* waves) {
  double inclusive = mine;
  for (int o = 1; o < WAVE; o *= 2) {
    const double from = shfl(inclusive, (LANE - o) & (WAVE - 1));
    if (LANE >= o) inclusive += from;
  }
  if (LANE == WAVE - 1) waves[TID / WAVE] = inclusive;
  barrier();
  double before = inclusive - mine;
  for (int wave = 0; wave < TID / WAVE; wave++) before += waves[wave];
  barrier();
  return before;
}
