// Expert offsets: each expert's first slot, see SortArgs.
#pragma once
#include "gpu/gpu.h"

// Slots of an expert with so many rows.
HOST_DEV int slots_of(int rows) { return (rows + GROUP_ALIGN - 1) / GROUP_ALIGN * GROUP_ALIGN; }

// Calls found(expert, its first slot) for each expert. Returns the end of the last expert's slots, in the last lane
// alone. One wave calls it; a lane has consecutive experts. `count(expert)` is an expert's number of rows.
template <class Count, class Found> DEV int place_experts(int n_experts, Count count, Found found) {
  const int run = (n_experts + WAVE - 1) / WAVE;
  const auto slots = [&](int e) { return e < n_experts ? slots_of(count(e)) : 0; };
  int own = 0;
  for (int i = 0; i < run; i++) own += slots(LANE * run + i);
  int sum = own;
  for (int o = 1; o < WAVE; o *= 2) {
    const int lower = shfl(sum, LANE >= o ? LANE - o : LANE);
    if (LANE >= o) sum += lower;
  }
  int slot = sum - own;
  for (int i = 0; i < run; i++) {
    const int e = LANE * run + i;
    if (e < n_experts) found(e, slot);
    slot += slots(e);
  }
  return sum;
}

// Writes slots, offsets and counts of a single row, whose experts are `picks`. THREADS threads call it; this is number
// `thread` of them.
template <int THREADS> DEV void place_alone(const NormRouteArgs& a, const int* picks, int thread = TID) {
  const int k = a.route.k;
  for (int e = thread; e <= a.route.n_experts; e += THREADS) {
    int before = 0, here = 0;
    for (int i = 0; i < k; i++) before += picks[i] < e, here += picks[i] == e;
    a.sort.offsets[e] = before * slots_of(1);
    if (e < a.route.n_experts) a.sort.counts[e] = here;
  }
  if (thread < k) a.sort.slots[thread] = thread * slots_of(1);
}
