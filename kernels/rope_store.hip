// rope_store: applies the rotary embedding to queries and keys, writes q, and writes keys and values to the KV cache.
//
// One block per row; a thread has four pairs (i, i + head_dim / 2) of a head: it reads twice 16 bytes and writes twice
// 8 or 16, and neighbouring threads fill cache lines. head_dim is a multiple of 8.
//
// Grid: one block per row of the bucket.
#include "catalogue.h"
#include "gpu/early.h"
#include "rope.h"

enum { THREADS = ROPE_STORE_THREADS };

template <int FORMAT> DEV void store4(void* array, i64 at, const float* v) {
  if (FORMAT == FORMAT_F32) *(f32x4*)((float*)array + at) = f32x4{v[0], v[1], v[2], v[3]};
  else *(u32x2*)((u16*)array + at) = u32x2{(u32)to_16<FORMAT>(v[1]) << 16 | to_16<FORMAT>(v[0]),
                                          (u32)to_16<FORMAT>(v[3]) << 16 | to_16<FORMAT>(v[2])};
}

struct Place {
  int row;
  int position;
  u8* page;          // the page with the row's position, of this layer
};

// Elements i to i + 3 of a head's first half, and of its second half.
DEV void load_pairs(const RopeStoreArgs& a, const float* head, int i, float* x, float* y) {
  const float* in = head + (a.paired ? 2 * i : i);
  const f32x4 first = *(const f32x4*)in, second = *(const f32x4*)(in + (a.paired ? 4 : a.head_dim / 2));
  for (int j = 0; j < 4; j++) x[j] = first[j], y[j] = second[j];
  if (!a.paired) return;
  for (int j = 0; j < 2; j++)
    x[j] = first[2 * j], y[j] = first[2 * j + 1], x[2 + j] = second[2 * j], y[2 + j] = second[2 * j + 1];
}

template <int FORMAT> DEV void store_pairs(const RopeStoreArgs& a, const Place& place, int head, int i) {
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
  if (head < a.heads) {
    const i64 at = ((i64)place.row * a.heads + head) * a.head_dim + i;
    store4<FORMAT>(a.q, at, x);
    store4<FORMAT>(a.q, at + half, y);
    return;
  }
  const int kv_head = head - a.heads, value = kv_head >= a.kv_heads;
  u8* page = place.page + (i64)(value ? kv_head - a.kv_heads : kv_head) * a.head_bytes;
  const int begin = value ? KV_PAGE * a.head_dim : 0;
  store4<FORMAT>(page, begin + kv_index(place.position, i, a.head_dim), x);
  store4<FORMAT>(page, begin + kv_index(place.position, i + half, a.head_dim), y);
}

template <int FORMAT> DEV void store_row(const RopeStoreArgs& a, const Place& place) {
  const int quads = a.head_dim / 8, all = (a.heads + 2 * a.kv_heads) * quads;
  for (int i = TID; i < all; i += THREADS) store_pairs<FORMAT>(a, place, i / quads, i % quads * 4);
}

KERNEL(rope_store, RopeStoreArgs, THREADS, 4, 4) {
  let_successor_start();
  Place place{BID, -1, nullptr};
  if (BID < a.step.header->rows) {                         // the plan may be read already: see early.h
    place.position = a.step.positions[BID];
    const ChunkInfo& chunk = a.step.chunks[a.step.row_chunk[BID]];
    place.page = a.kv + kv_page(a.step, chunk, place.position, a.windowed) * a.page_bytes;
  }
  after_predecessor();
  if (place.position < 0) return;
  if (a.format == FORMAT_F32) store_row<FORMAT_F32>(a, place);
  else if (a.format == FORMAT_F16) store_row<FORMAT_F16>(a, place);
  else store_row<FORMAT_BF16>(a, place);
}
