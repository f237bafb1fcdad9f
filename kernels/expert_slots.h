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
