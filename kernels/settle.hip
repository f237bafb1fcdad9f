// settle: x += what each row's experts gave, where no norm follows that adds it: at the end of a device's layers, if
// another device has the next ones. The sum is the norm's own (norm.h), to the bit.
//
// Grid: one block a row of the bucket.
#include "norm.h"
static_assert(SETTLE_THREADS == NORM_THREADS, "norm.h counts with them");

KERNEL(settle, NormArgs, SETTLE_THREADS, 2, 4) {
  let_successor_start();
  after_predecessor();
  if (BID >= a.step.header->rows) return;
  for (int k = TID * 8; k < a.hidden; k += NORM_THREADS * 8) {
    float x[8];
    load_piece(a, BID, k, x);
  }
}
