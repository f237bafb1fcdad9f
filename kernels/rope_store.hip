// rope_store: applies the rotary embedding to queries and keys, writes q, and writes keys and values to the KV cache.
//
// One block per row; a thread has four pairs (i, i + head_dim / 2) of a head, or four elements of a value: it reads 16
// bytes and writes 8 or 16, and neighbouring threads fill cache lines. head_dim is a multiple of 8.
//
// Grid: one block per row of the bucket.
#include "catalogue.h"
#include "gpu/early.h"

enum { THREADS = ROPE_STORE_THREADS };

DEV int kv_page(const Step& step, const ChunkInfo& chunk, int position, bool windowed) {
  const int page = position / KV_PAGE;
  return step.tables[windowed ? chunk.window + page % chunk.window_pages : chunk.full + page];
}

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

// Rounded as on the CPU: the first product is rounded, the second one is fused with the addition.
template <int FORMAT> DEV void rotate(const RopeStoreArgs& a, const Place& place, int head, int i) {
  const int half = a.head_dim / 2, heads = a.heads + 2 * a.kv_heads;
  const float* in = a.qkv + ((i64)place.row * heads + head) * a.head_dim + i;
  const f32x4 x = *(const f32x4*)in, y = *(const f32x4*)(in + half);
  const f32x4 cos = *(const f32x4*)(a.cos + (i64)place.position * half + i);
  const f32x4 sin = *(const f32x4*)(a.sin + (i64)place.position * half + i);
  const bool query = head < a.heads;
  // 16-bit attention computes 2^(q k): q is scaled by log2(e) / sqrt(head_dim) before it is rounded to 16 bits.
  const float scale = query && FORMAT != FORMAT_F32 ? div_rn(1.44269504f, sqrt_rn((float)a.head_dim)) : 1.f;
  float first[4], second[4];
  for (int j = 0; j < 4; j++) {
    first[j] = mul_rn(fma_rn(x[j], cos[j], -mul_rn(y[j], sin[j])), scale);
    second[j] = mul_rn(fma_rn(y[j], cos[j], mul_rn(x[j], sin[j])), scale);
  }
  if (query) {
    const i64 at = ((i64)place.row * a.heads + head) * a.head_dim + i;
    store4<FORMAT>(a.q, at, first);
    store4<FORMAT>(a.q, at + half, second);
  } else {
    u8* keys = place.page + (i64)(head - a.heads) * a.head_bytes;
    store4<FORMAT>(keys, kv_index(place.position, i, a.head_dim), first);
    store4<FORMAT>(keys, kv_index(place.position, i + half, a.head_dim), second);
  }
}

template <int FORMAT> DEV void copy_value(const RopeStoreArgs& a, const Place& place, int kv_head, int d) {
  const int heads = a.heads + 2 * a.kv_heads;
  const f32x4 in = *(const f32x4*)(a.qkv + ((i64)place.row * heads + a.heads + a.kv_heads + kv_head) * a.head_dim + d);
  const float v[4] = {in[0], in[1], in[2], in[3]};
  u8* head = place.page + (i64)kv_head * a.head_bytes;
  store4<FORMAT>(head, KV_PAGE * a.head_dim + kv_index(place.position, d, a.head_dim), v);
}

template <int FORMAT> DEV void store_row(const RopeStoreArgs& a, const Place& place) {
  const int quads = a.head_dim / 8, rotated = (a.heads + a.kv_heads) * quads, values = a.kv_heads * quads * 2;
  for (int i = TID; i < rotated; i += THREADS) rotate<FORMAT>(a, place, i / quads, i % quads * 4);
  for (int i = TID; i < values; i += THREADS) copy_value<FORMAT>(a, place, i / (quads * 2), i % (quads * 2) * 4);
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
