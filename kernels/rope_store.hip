// rope_store: applies the rotary embedding to queries and keys, writes q, and writes keys and values to the KV cache.
//
// One block per row; a thread has four pairs (i, i + head_dim / 2) of a head: it reads twice 16 bytes and writes twice
// 8 or 16, and neighbouring threads fill cache lines. head_dim is a multiple of 8.
//
// Grid: one block per row of the bucket.
#include "catalogue.h"
#include "gpu/early.h"
#include "rope_pairs.h"

enum { THREADS = ROPE_STORE_THREADS };

// Elements i to i + 3 of a head's first half, and of its second half.
DEV void load_pairs(const RopeStoreArgs& a, const float* head, int i, float* x, float* y) {
  const float* in = head + (a.paired ? 2 * i : i);
  const f32x4 first = *(const f32x4*)in, second = *(const f32x4*)(in + (a.paired ? 4 : a.head_dim / 2));
  for (int j = 0; j < 4; j++) x[j] = first[j], y[j] = second[j];
  if (!a.paired) return;
  for (int j = 0; j < 2; j++)
    x[j] = first[2 * j], y[j] = first[2 * j + 1], x[2 + j] = second[2 * j], y[2 + j] = second[2 * j + 1];
}

template <int FORMAT> DEV void rotate_and_store(const RopeStoreArgs& a, const RowPlace& place, int head, int i) {
  const int half = a.head_dim / 2, heads = a.heads + 2 * a.kv_heads;
  float x[4], y[4];
  load_pairs(a, a.qkv + ((i64)place.row * heads + head) * a.head_dim, i, x, y);
  if (head < a.heads + a.kv_heads) {
    const f32x4 cos = *(const f32x4*)(a.cos + (i64)place.position * half + i);
    const f32x4 sin = *(const f32x4*)(a.sin + (i64)place.position * half + i);
    const float scale = head < a.heads && FORMAT != FORMAT_F32 ? query_scale(a.head_dim) : 1.f;
    for (int j = 0; j < 4; j++) {
      rotate(x[j], y[j], cos[j], sin[j]);
      x[j] = mul_rn(x[j], scale), y[j] = mul_rn(y[j], scale);
    }
  }
  store_pairs<FORMAT>(a, place, head, i, x, y);
}

template <int FORMAT> DEV void store_row(const RopeStoreArgs& a, const RowPlace& place) {
  const int quads = a.head_dim / 8, all = (a.heads + 2 * a.kv_heads) * quads;
  for (int i = TID; i < all; i += THREADS) rotate_and_store<FORMAT>(a, place, i / quads, i % quads * 4);
}

KERNEL(rope_store, RopeStoreArgs, THREADS, 4, 4) {
  let_successor_start();
  RowPlace place{BID, -1, nullptr};
  if (BID < a.step.header->rows) place = row_place(a, BID);      // the plan may be read already: see early.h
  after_predecessor();
  if (place.position < 0) return;
  if (a.format == FORMAT_F32) store_row<FORMAT_F32>(a, place);
  else if (a.format == FORMAT_F16) store_row<FORMAT_F16>(a, place);
  else store_row<FORMAT_BF16>(a, place);
}
