// Pairs of a head's elements, i and i + head_dim / 2, stored where attention reads them: queries in q, keys and values
// in the cache.
#pragma once
#include "rope.h"

template <int FORMAT> DEV u32x2 narrowed(const float* v) {
  return u32x2{(u32)to_16<FORMAT>(v[1]) << 16 | to_16<FORMAT>(v[0]),
               (u32)to_16<FORMAT>(v[3]) << 16 | to_16<FORMAT>(v[2])};
}
template <int FORMAT> DEV void store4(void* array, i64 at, const float* v) {
  if (FORMAT == FORMAT_F32) *(f32x4*)((float*)array + at) = f32x4{v[0], v[1], v[2], v[3]};
  else *(u32x2*)((u16*)array + at) = narrowed<FORMAT>(v);
}
template <int FORMAT> DEV void hand_on4(void* array, i64 at, const float* v) {
  if (FORMAT == FORMAT_F32) hand_on((f32x4*)((float*)array + at), f32x4{v[0], v[1], v[2], v[3]});
  else hand_on((u32x2*)((u16*)array + at), narrowed<FORMAT>(v));
}

struct RowPlace {
  int row;
  int position;
  u8* page;          // the page with the row's position, of this layer
};

DEV RowPlace row_place(const RopeStoreArgs& a, int row) {
  const int position = a.step.positions[row];
  const ChunkInfo& chunk = a.step.chunks[a.step.row_chunk[row]];
  return RowPlace{row, position, a.kv + kv_page(a.step, chunk, position, a.windowed) * a.page_bytes};
}

// Stores elements i to i + 3 of a head's first half, x, and of its second half, y. Heads are numbered queries first,
// then keys, then values.
template <int FORMAT>
DEV void store_pairs(const RopeStoreArgs& a, const RowPlace& place, int head, int i, const float* x, const float* y) {
  const int half = a.head_dim / 2;
  if (head < a.heads) {
    const i64 at = ((i64)place.row * a.heads + head) * a.head_dim + i;
    hand_on4<FORMAT>(a.q, at, x);
    hand_on4<FORMAT>(a.q, at + half, y);
    return;
  }
  const int kv_head = head - a.heads, value = kv_head >= a.kv_heads;
  u8* page = place.page + (i64)(value ? kv_head - a.kv_heads : kv_head) * a.head_bytes;
  const int begin = value ? KV_PAGE * a.head_dim : 0;
  store4<FORMAT>(page, begin + kv_index(place.position, i, a.head_dim), x);
  store4<FORMAT>(page, begin + kv_index(place.position, i + half, a.head_dim), y);
}
