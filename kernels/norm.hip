// rmsnorm: see norm.h.
//
// Grid: one block per row of the bucket (select: per logits row). hidden is at most NORM_MOST_HIDDEN.
#include "norm.h"

KERNEL(rmsnorm, NormArgs, NORM_THREADS, 2, 4) {
  SHARED double scratch[NORM_WAVES];
  let_successor_start();
  const int row = prepare_norm(a);
  after_predecessor();
  if (row < 0) return;
  norm_row(a, row, BID, scratch, [&](int k, const float* t) {
    if (a.t32) store8(a.t32 + (i64)BID * a.hidden + k, a.hidden - k, t);
  });
}
