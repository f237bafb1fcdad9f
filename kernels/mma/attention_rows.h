// Shared by kernels of prefill attention: items, and the online softmax of a warp's 16 rows of scores, two queries of
// eight heads each, by tiles of one page.
#pragma once
#include "attention.h"

enum : int { K16S = 4 };                 // in 64 along K

// A tile of query rows for one kv head.
struct Item {
  int row;                               // of the tile's first row, within the step
  int rows;                              // 0: there are no more items
  int position;                          // of the first row
  int kv_head;
};

DEV int first_page(const AttentionArgs& a, const Item& item) { return first_visible_key(a, item.position) / KV_PAGE; }
DEV int last_page(const Item& item) { return (item.position + item.rows - 1) / KV_PAGE; }

// A lane has two rows: head lane / 4 of two queries. Element 4 i + 2 r + e of an accumulator is row r and key (S) or
// dim (O) 8 i + 2 (lane % 4) + e.
struct Rows {
  float o[32], m[2], sum[2];
  int first[2], last[2];                 // keys that the rows see
};

DEV bool all_visible(const Rows& r, int key) { return key >= r.first[1] && key + KV_PAGE - 1 <= r.last[0]; }

// Masks invisible keys of a tile. `key` is the tile's first key. Of what a row sees there is a bit a key, since a
// comparison a score takes longer.
DEV void mask(float* s, const Rows& r, int key) {
  UNROLL for (int row = 0; row < 2; row++) {
    const int first = max(r.first[row] - key, 0), last = min(r.last[row] - key, KV_PAGE - 1);
    u64 seen = first > last ? 0 : (~0ull << first) & (~0ull >> (KV_PAGE - 1 - last));
    seen >>= LANE % 4 * 2;
    const u32 words[2] = {(u32)seen, (u32)(seen >> 32)};
    UNROLL for (int i = 0; i < 8; i++) UNROLL for (int j = 0; j < 2; j++)
      if (!(words[i / 4] >> (i % 4 * 8 + j) & 1)) s[4 * i + 2 * row + j] = NEGATIVE_INFINITY;
  }
}

// Updates a row's maximum m if a score exceeds it by more than `slack`. Returns the factor that rescales the row's
// sums. Other rows have no influence.
DEV float move_maximum(const float* s, int row, float& m, float slack) {
  float top = max_of(s[2 * row], s[2 * row + 1]);
  UNROLL for (int i = 1; i < 8; i++) top = max_of(top, max_of(s[4 * i + 2 * row], s[4 * i + 2 * row + 1]));
  top = max_of(top, shfl_xor(top, 1)), top = max_of(top, shfl_xor(top, 2));
  if (!(top > m + slack)) return 1;
  const float f = exp2_fast(m - top);
  m = top;
  return f;
}

// Turns scores into weights and rescales the rows' sums of weights. The factor for O is left in f, since wgmma may
// still be writing O.
template <int FORMAT> DEV void softmax(float* s, Rows& r, float* f) {
  float m[2];
  UNROLL for (int row = 0; row < 2; row++) {
    f[row] = move_maximum(s, row, r.m[row], SLACK<FORMAT>);
    m[row] = r.m[row] == NEGATIVE_INFINITY ? 0 : r.m[row];       // no visible key so far: all weights become 0
  }
  UNROLL for (int row = 0; row < 2; row++) r.sum[row] = mul_rn(r.sum[row], f[row]);
  UNROLL for (int i = 0; i < 8; i++) {
    UNROLL for (int j = 0; j < 4; j++) s[4 * i + j] = exp2_fast(s[4 * i + j] - m[j / 2]);
    UNROLL for (int row = 0; row < 2; row++) r.sum[row] += s[4 * i + 2 * row] + s[4 * i + 2 * row + 1];
  }
}

DEV void rescale(Rows& r, const float* f) {
  if (wave_any(f[0] != 1 || f[1] != 1)) UNROLL for (int i = 0; i < 32; i++) r.o[i] *= f[i / 2 % 2];
}

// Packs weights as the A fragment of the next product.
template <int FORMAT> DEV void pack(const float* s, u32 (*p)[4]) {
  UNROLL for (int i = 0; i < 8; i++)
    UNROLL for (int row = 0; row < 2; row++)
      p[i / 2][i % 2 * 2 + row] = pack_weights<FORMAT>(s[4 * i + 2 * row], s[4 * i + 2 * row + 1]);
}

template <int FORMAT> DEV void store_rows(const AttentionArgs& a, const Item& w, const Rows& r, int first_query) {
  const int head = w.kv_head * GROUP_HEADS + LANE / 4;
  const float sink = __ldg(a.sinks + head) * LOG2E;
  UNROLL for (int row = 0; row < 2; row++) {
    float sum = r.sum[row];
    sum += shfl_xor(sum, 1), sum += shfl_xor(sum, 2);
    const float f = normalizer(r.m[row], sum, sink);
    if (first_query + row >= w.rows) continue;
    UNROLL for (int i = 0; i < 8; i++) {
      const int k = head * HEAD_DIM + 8 * i + LANE % 4 * 2;
      *(u32*)(a.out + tiled_index(w.row + first_query + row, k, a.out_rows)) =
          pack_output<FORMAT>(r.o[4 * i + 2 * row] * f, r.o[4 * i + 2 * row + 1] * f);
    }
  }
}
