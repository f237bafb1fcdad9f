// argmax: the lowest index of each logits row's largest logit, for the host and for the next step's embed. NaN is
// smaller than everything; a row of NaN alone gives token 0 and logit -inf.
//
//   argmax         from the candidates [candidates][best_rows] of the unembedding, ROWS rows per block: as many as fill
//                  a sector of 32 bytes. Grid: logits rows of the bucket / ROWS, rounded up.
//   argmax_logits  from whole logits rows, of the tokens that may be sampled: `best` is [logits rows][candidates],
//                  best_index is not read. Grid: one block per logits row of the bucket.
#include "best.h"
#include "catalogue.h"
#include "gpu/gpu.h"

enum { THREADS = ARGMAX_THREADS, ROWS = ARGMAX_PER_BLOCK, LISTS = THREADS / ROWS };

DEV void give_out(const ArgmaxArgs& a, int row, Best best) {
  const unsigned token = best.index == NO_INDEX ? 0 : best.index;
  Greedy* host = a.host + (i64)a.step.header->turn * a.best_rows;
  host[row] = Greedy{token, best.logit};
  const int slot = a.step.logits[row].slot;
  if (slot >= 0) a.step.last_tokens[slot] = token;
  fence_system();
}

// The argmax of n candidates, the first at `first`, `stride` apart.
DEV Best best_of(const Best* lists, int first, int stride, int n) {
  Best best = lists[first];
  for (int i = 1; i < n; i++) best.take(lists[first + i * stride].logit, lists[first + i * stride].index);
  return best;
}

KERNEL(argmax, ArgmaxArgs, THREADS, 1, 4) {
  SHARED Best lists[THREADS];
  let_successor_start();
  after_predecessor();
  const int rows = a.step.header->logits_rows, row = BID * ROWS + TID % ROWS;
  if (BID * ROWS >= rows) return;
  Best best = Best::none();
  if (row < rows)
    for (int c = TID / ROWS; c < a.candidates; c += LISTS) {
      const i64 at = (i64)c * a.best_rows + row;
      best.take(a.best[at], a.best_index[at]);
    }
  lists[TID] = best;
  barrier();
  // Two rounds reduce 128 candidates of a row to 8, then to one.
  if (TID < ROWS * 8) best = best_of(lists, TID, ROWS * 8, LISTS / 8);
  barrier();
  if (TID < ROWS * 8) lists[TID] = best;
  barrier();
  if (TID < ROWS && row < rows) give_out(a, row, best_of(lists, TID, ROWS, 8));
}

KERNEL(argmax_logits, ArgmaxArgs, THREADS, 1, 4) {
  SHARED Best lists[THREADS];
  let_successor_start();
  after_predecessor();
  if (BID >= a.step.header->logits_rows) return;
  const float* logits = a.best + (i64)BID * a.candidates;
  Best best = Best::none();
  for (int i = TID; i < a.drawable; i += THREADS) best.take(logits[i], i);
  lists[TID] = best;
  barrier();
  if (TID < 32) best = best_of(lists, TID, 32, THREADS / 32);
  barrier();
  if (TID < 32) lists[TID] = best;
  barrier();
  if (TID == 0) give_out(a, BID, best_of(lists, 0, 1, 32));
}
