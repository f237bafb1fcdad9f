// embed: x[row] = the embedding of the row's token: the plan's token, or the token that the device sampled last for a
// slot. Grid: one block per row of the bucket.
#include "catalogue.h"
#include "gpu/math.h"

enum { THREADS = EMBED_THREADS };

template <int FORMAT> DEV void copy_row(const void* table, i64 token, float* x, int hidden) {
  for (int k = TID * 8; k < hidden; k += THREADS * 8) {
    float v[8];
    load8<FORMAT>(table, token * hidden + k, hidden - k, v);
    store8(x + k, hidden - k, v);
  }
}

KERNEL(embed, EmbedArgs, THREADS, 4, 4) {
  after_predecessor();
  let_successor_start();
  const int row = BID;
  if (row >= a.step.header->rows) return;
  int token = a.step.tokens[row];
  if (token < 0) token = a.step.last_tokens[-1 - token];
  float* x = a.x + (i64)row * a.hidden;
  if (a.format == FORMAT_F32) copy_row<FORMAT_F32>(a.table, token, x, a.hidden);
  else copy_row<FORMAT_BF16>(a.table, token, x, a.hidden);
}
