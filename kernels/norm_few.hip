// rmsnorm_few: see norm_few.h.
//
// Grid: rows of the bucket.
#include "norm_few.h"

enum : int { THREADS = NORM_FEW_THREADS };
static_assert(THREADS == NORM_THREADS, "norm.h's waves");

KERNEL(rmsnorm_few, NormArgs, THREADS, 1, 0) {
  SHARED float scratch[NORM_WAVES];
  norm_few(a, BID, a.x, scratch, [](int, const float*) {});
}
