// settle: x += the weighted sum of each row's expert outputs, where no norm follows that would add it: at the end of a
// device's layers, if another device has the next ones. The sum equals norm.h's to the bit.
//
// Grid: one block per row of the bucket.
#include "norm.h"
static_assert(SETTLE_THREADS == NORM_THREADS, "norm.h counts with them");

KERNEL(settle, NormArgs, SETTLE_THREADS, 2, 4) {
  let_successor_start();
  after_predecessor();
  if (BID >= a.step.header->rows) return;
  for (int k = TID * 8; k < a.hidden; k += NORM_THREADS * 8) {
    float x[8];
    settle_piece(a, BID, k, x);
  }
}
