// rmsnorm of norm.h where rows are many, with the experts' outputs to add, in `fast`. Bulk copies bring the rows to
// shared memory, so many are on the way to a multiprocessor without a register for them. The bits are those of norm.h.
//
// hidden is at most ROW_K_TILES * ROW_K_TILE and a multiple of 8, and a row has at most ROW_EXPERTS experts. `select`,
// `t32` and `exact` are not served, there is one term, and y is FP16.
#pragma once
#include "../norm.h"
#include "bulk_store.h"

enum : int {
  ROW_K_TILE = WAVE * 8,                 // elements that a wave takes at once, eight a lane
  ROW_K_TILES = NORM_WAVES,              // what a wave of norm.h sums is a K tile of this one
  ROW_PIECES = ROW_K_TILES * ROW_K_TILE / 4,  // of four float32 elements
  ROW_BYTES = ROW_PIECES * 16,
  ROW_EXPERTS = 4,
};

// A row in shared memory, the experts' outputs, and the mbarrier that their copies report to.
struct RowInShared {
  f32x4* x;
  const u16* y;
  u32 bar;

  DEV void prepare() const {
    if (LANE == 0) barrier_init(bar, 1), barrier_init_done();
    __syncwarp();
  }
  // Eight elements of a K tile in the order in which they came.
  DEV void load(int k_tile, float* v) const {
    UNROLL for (int h = 0; h < 2; h++) {
      const f32x4 four = x[(k_tile * WAVE + LANE) * 2 + h];
      UNROLL for (int i = 0; i < 4; i++) v[4 * h + i] = four[i];
    }
  }
  DEV void store(int k_tile, const float* v) const {
    UNROLL for (int h = 0; h < 2; h++) x[(k_tile * WAVE + LANE) * 2 + h] = four_of(v + 4 * h);
  }
};

// Starts the copies of row `row` and its experts' outputs. One wave calls it.
DEV void fetch_row(const NormArgs& a, int row, const RowInShared& s) {
  if (LANE == 0) {
    barrier_arrive_expect(s.bar, a.hidden * (4 + 2 * a.k));
    bulk_copy(shared_address(s.x), a.x + (i64)row * a.hidden, a.hidden * 4, s.bar, evict_normal());
  }
  __syncwarp();
  if (LANE < a.k) {
    const i64 slot = a.slots[(i64)row * a.k + LANE];
    const u16* from = (const u16*)a.y + slot * a.hidden;
    bulk_copy(shared_address(s.y + LANE * a.hidden), from, a.hidden * 2, s.bar, evict_first());
  }
}

// x of a K tile with the experts' outputs added: loaded by a lane whose elements exist.
DEV void load_k_tile(const NormArgs& a, const RowInShared& s, int k_tile, float mine, float* v) {
  const int k = k_tile * ROW_K_TILE + LANE * 8;
  const bool exists = k < a.hidden;
  UNROLL for (int j = 0; j < 8; j++) v[j] = 0;
  if (exists) s.load(k_tile, v);
  float added[8] = {};
  UNROLL for (int i = 0; i < ROW_EXPERTS; i++) {
    const float share = shfl(mine, i);
    if (i >= a.k || !exists) continue;
    float y[8];
    load8_aligned<FORMAT_F16>(s.y, i * a.hidden + k, y);
    UNROLL for (int j = 0; j < 8; j++) added[j] = fma_rn(share, y[j], added[j]);
  }
  UNROLL for (int j = 0; j < 8; j++) v[j] = add_rn(v[j], added[j]);
}

// Norms row `row`, whose copies have been started; WAVES waves share it, of which this is number `wave`, and have
// `sums` to exchange their K tiles' sums. x += the experts' outputs before, and is stored; a lane keeps its elements in
// registers, and loads their weights while the row is on its way.
template <int WAVES> DEV void norm_by_waves(const NormArgs& a, int row, int wave, const RowInShared& s, float* sums) {
  constexpr int K_TILES = ROW_K_TILES / WAVES;
  float x[K_TILES][8], weights[K_TILES][8], squares[K_TILES];
  UNROLL for (int i = 0; i < K_TILES; i++) {
    const int k = (wave * K_TILES + i) * ROW_K_TILE + LANE * 8;
    if (k < a.hidden) load8_aligned<FORMAT_F32>(a.weight, k, weights[i]);
  }
  const float mine = LANE < a.k ? a.shares[(i64)row * a.k + LANE] : 0.f;
  barrier_wait(s.bar, 0);
  UNROLL for (int i = 0; i < K_TILES; i++) {
    load_k_tile(a, s, wave * K_TILES + i, mine, x[i]);
    squares[i] = 0;
    UNROLL for (int j = 0; j < 8; j++) squares[i] += mul_rn(x[i][j], x[i][j]);
  }
  UNROLL for (int i = 0; i < K_TILES; i++) {
    const int k_tile = wave * K_TILES + i;
    if (k_tile * ROW_K_TILE + LANE * 8 < a.hidden) s.store(k_tile, x[i]);
  }
  async_proxy_fence();
  // The K tiles' trees side by side, then the chain over their sums.
  UNROLL for (int i = 0; i < K_TILES; i++) squares[i] = wave_sum(squares[i]);
  if (LANE == 0) UNROLL for (int i = 0; i < K_TILES; i++) sums[wave * K_TILES + i] = squares[i];
  barrier();
  float sum = sums[0];
  UNROLL for (int k_tile = 1; k_tile < ROW_K_TILES; k_tile++) sum += sums[k_tile];
  const bool stores = wave == 0 && LANE == 0;
  if (stores) bulk_store(a.x + (i64)row * a.hidden, shared_address(s.x), a.hidden * 4);
  const float scale = inverse_root(sum, a.hidden);
  const int padded = (a.hidden + SLAB - 1) / SLAB * SLAB;
  UNROLL for (int i = 0; i < K_TILES; i++) {
    const int k_tile = wave * K_TILES + i, k = k_tile * ROW_K_TILE + LANE * 8;
    float t[8];
    UNROLL for (int j = 0; j < 8; j++) t[j] = k < a.hidden ? weights[i][j] * (scale * x[i][j]) : 0.f;
    if (k >= padded) continue;
    u16* at = a.t + tiled_index(row, k, a.t_rows);
    store_terms8(a.format, at, a.t_term, 1, t);
  }
  if (stores) bulk_stores_read();
}
