// rmsnorm_rows: see norm_rows.h. A block has a row and its experts' outputs, of which six fit a multiprocessor's shared
// memory.
//
// Grid: rows of the bucket.
#include "norm_rows.h"

enum : int { WAVES = NORM_ROWS_THREADS / WAVE, ADDED_BYTES = ROW_EXPERTS * ROW_BYTES / 2 };
static_assert(ROW_K_TILES % WAVES == 0, "the waves have equal shares");
static_assert(NORM_ROWS_SHARED_BYTES == ROW_BYTES + ADDED_BYTES + 8 + ROW_K_TILES * 4, "a row and what is added");

KERNEL(rmsnorm_rows, NormArgs, NORM_ROWS_THREADS, 6, 0) {
  u8* const behind = DYNAMIC_SHARED + ROW_BYTES + ADDED_BYTES;
  const RowInShared s = {(f32x4*)DYNAMIC_SHARED, (const u16*)(DYNAMIC_SHARED + ROW_BYTES), shared_address(behind)};
  float* const sums = (float*)(behind + 8);
  const int row = BID, wave = TID / WAVE;
  let_successor_start();
  if (wave == 0) s.prepare();
  const int rows = load_fresh(&a.step.header->rows);
  barrier();
  after_predecessor();
  if (row >= rows) return;
  if (wave == 0) fetch_row(a, row, s);
  norm_by_waves<WAVES>(a, row, wave, s, sums);
}
