// norm_route_rows: rmsnorm and route fused, for more rows than multiprocessors, in `fast`. The router's input never
// leaves the multiprocessor. The bits are those of the separate kernels.
//
// A block takes ROWS rows. Its threads load and norm them as norm.h's do, all rows at once, and keep them in LDS as
// route.h stages them: every K tile, where that has two. The waves then multiply as route.h's do.
//
// Grid: rows of the bucket / ROWS, rounded up. hidden is at most MOST_HIDDEN and a multiple of 8; route.h's limits
// hold. The router's weights are BF16, there is one term, and nothing is added to x. Of the arguments `norm` and
// `route` are used, without their `t32`.
#include "../norm.h"
#include "../route.h"

enum : int {
  THREADS = NORM_ROUTE_ROWS_THREADS,
  ROWS = NORM_ROUTE_ROWS_PER_BLOCK,
  MOST_HIDDEN = NORM_ROUTE_ROWS_MOST_HIDDEN,
  K_TILES = MOST_HIDDEN / ROUTE_K_TILE,
};
static_assert(ROWS == ROUTE_ROWS, "as many as route.h stages");
static_assert(MOST_HIDDEN == NORM_THREADS * 8 && NORM_THREADS <= THREADS, "norm.h's waves, and a piece a thread");
static_assert(K_TILES * ROUTE_K_TILE == MOST_HIDDEN, "rows are whole K tiles");

// Rows from `first` on, `rows` of them. Beyond the last row that one again.
DEV void keep_normed(const NormArgs& a, int first, int rows, float* scratch, Piece* kept) {
  const int k = TID * 8;
  const bool exists = k < a.hidden;
  float x[ROWS][8] = {}, w[8] = {};
  if (exists) {
    UNROLL for (int r = 0; r < ROWS; r++)
      load8_aligned<FORMAT_F32>(a.x, (i64)(first + (r < rows ? r : rows - 1)) * a.hidden + k, x[r]);
    load8_aligned<FORMAT_F32>(a.weight, k, w);
  }
  UNROLL for (int r = 0; r < ROWS; r++) {
    const float squares = wave_sum(sum_of_squares(x[r]));
    if (LANE == 0 && TID < NORM_THREADS) scratch[r * NORM_WAVES + TID / WAVE] = squares;
  }
  barrier();
  if (k >= MOST_HIDDEN) return;
  const int lane = k % ROUTE_K_TILE / 8;
  Piece* k_tile = kept + k / ROUTE_K_TILE * StagedRows::PIECES;
  UNROLL for (int r = 0; r < ROWS; r++) {
    float squares = scratch[r * NORM_WAVES];
    for (int i = 1; i < NORM_WAVES; i++) squares += scratch[r * NORM_WAVES + i];
    const float scale = inverse_root(squares, a.hidden);
    float t[8];
    norm_piece(x[r], w, scale, exists, t);
    UNROLL for (int half = 0; half < 2; half++)
      k_tile[(r * 2 + half) * WAVE + lane] = __builtin_bit_cast(Piece, four_of(t + 4 * half));
    if (r >= rows || k >= (a.hidden + SLAB - 1) / SLAB * SLAB) continue;
    u16* at = a.t + tiled_index(first + r, k, a.t_rows);
    store_terms8(a.format, at, a.t_term, 1, t);
  }
}

// E experts per wave.
template <int E> DEV void multiply_kept(const RouteArgs& a, const Piece* kept, Routing<ROWS>& s) {
  for (int base = 0; base < a.n_experts; base += THREADS / WAVE * E) {
    const int first = base + TID / WAVE * E;
    float sums[ROWS][E] = {};
    RawWeights<FORMAT_BF16> raw[E], next[E];
    load_experts<FORMAT_BF16, E>(a, first, LANE * 8, next);
    for (int k = 0; k < a.hidden; k += ROUTE_K_TILE) {
      UNROLL for (int e = 0; e < E; e++) raw[e] = next[e];
      if (k + ROUTE_K_TILE < a.hidden) load_experts<FORMAT_BF16, E>(a, first, k + ROUTE_K_TILE + LANE * 8, next);
      const Piece* k_tile = kept + k / ROUTE_K_TILE * StagedRows::PIECES;
      if (k + LANE * 8 < a.hidden) multiply_k_tile<float, FORMAT_BF16, E, ROWS, 2 * WAVE>(raw, k_tile, sums);
    }
    finish_rows<float, E>(a, sums, first, s);
  }
}

KERNEL(norm_route_rows, NormRouteArgs, THREADS, 1, 2) {
  SHARED Piece kept[K_TILES * StagedRows::PIECES];
  SHARED float scratch[ROWS * NORM_WAVES];
  SHARED Routing<ROWS> s;
  let_successor_start();
  after_predecessor();
  const int first = BID * ROWS, left = a.norm.step.header->rows - first, rows = left < ROWS ? left : ROWS;
  if (left <= 0) return;
  keep_normed(a.norm, first, rows, scratch, kept);
  barrier();
  if (a.route.n_experts > THREADS / WAVE * 4) multiply_kept<8>(a.route, kept, s);
  else multiply_kept<4>(a.route, kept, s);
  pick_experts<THREADS>(a.route, first, rows, s);
}
