// rmsnorm_rows: see norm_rows.h; it adds the experts' outputs. A block is a wave, and six rows with these fit a
// multiprocessor's shared memory.
//
// Grid: rows of the bucket.
#include "norm_rows.h"

enum : int { THREADS = NORM_ROWS_THREADS, ADDED_BYTES = ROW_EXPERTS * ROW_BYTES / 2 };
static_assert(THREADS == WAVE && NORM_ROWS_SHARED_BYTES == ROW_BYTES + ADDED_BYTES + 8, "a row and what is added");

KERNEL(rmsnorm_rows, NormArgs, THREADS, 6, 0) {
  let_successor_start();
  const RowInShared s = {(f32x4*)DYNAMIC_SHARED, (const u16*)(DYNAMIC_SHARED + ROW_BYTES),
                         shared_address(DYNAMIC_SHARED + ROW_BYTES + ADDED_BYTES)};
  s.prepare();
  const int rows = load_fresh(&a.step.header->rows), row = BID;
  after_predecessor();
  if (row >= rows) return;
  fetch_row<true>(a, row, s);
  norm_by_wave<true, false>(a, row, s);
}
