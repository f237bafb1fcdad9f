// What `route` and `norm_route` share: router logits in float32 (exact: float64 sums of rounded products), the k largest,
// their softmax.
//
// A block's waves split the experts, ROUTE_EXPERTS at a time; a wave's lanes split K in pieces of eight: a row's sums are the
// same whatever rows share its block. The k largest are found by rank, each expert counting those ahead of it: no chain
// of k searches.
#pragma once
#include "gpu/math.h"

// Rows a block takes at most, experts a wave takes at once, steps of K a wave with one row has under way.
enum { ROUTE_ROWS = 4, ROUTE_EXPERTS = 4, ROUTE_AHEAD = 3, MAX_EXPERTS = 256, MAX_K = 8 };

// What a block knows of its rows. Places of picks are in order of the logit, the largest first.
struct Routing {
  float logits[ROUTE_ROWS][MAX_EXPERTS];
  u32 orders[ROUTE_ROWS][MAX_EXPERTS];
  int picks[ROUTE_ROWS][MAX_K];
};

// One wave's products of R rows and experts `first` to `first + ROUTE_EXPERTS - 1`, N elements of K a lane at a time; `in` is the
// first row. What is not there repeats the last one. The sums' tree is that of ROUTE_ROWS rows for any R.
template <class Sum, int FORMAT, int N, int R> DEV void multiply(const RouteArgs& a, const float* in, int rows, int first, Routing& s) {
  constexpr int STEPS = R == 1 ? (int)ROUTE_AHEAD : 1, STRIDE = WAVE * N;
  Sum sums[ROUTE_ROWS][ROUTE_EXPERTS] = {};
  for (int k = LANE * N; k < a.hidden; k += STEPS * STRIDE) {
    float w[STEPS][ROUTE_EXPERTS][N], t[STEPS][R][N];
    UNROLL for (int step = 0; step < STEPS; step++) {
      const int at = k + step * STRIDE < a.hidden ? k + step * STRIDE : k;
      UNROLL for (int e = 0; e < ROUTE_EXPERTS; e++) {
        const int expert = first + e < a.n_experts ? first + e : a.n_experts - 1;
        load_some<FORMAT, N>(a.w, (i64)expert * a.hidden + at, w[step][e]);
      }
      UNROLL for (int r = 0; r < R; r++) load_some<FORMAT_F32, N>(in, (i64)(r < rows ? r : rows - 1) * a.hidden + at, t[step][r]);
    }
    UNROLL for (int step = 0; step < STEPS; step++)
      UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int e = 0; e < ROUTE_EXPERTS; e++)
          UNROLL for (int i = 0; i < N; i++)
            sums[r][e] += k + step * STRIDE < a.hidden ? (Sum)mul_rn(w[step][e][i], t[step][r][i]) : (Sum)0;
  }
  const float sum = (float)wave_sums<ROUTE_ROWS * ROUTE_EXPERTS>(&sums[0][0]);
  const int r = LANE / ROUTE_EXPERTS, expert = first + LANE % ROUTE_EXPERTS;
  if (r < R && expert < a.n_experts) s.logits[r][expert] = add_rn(sum, a.bias[expert]);
}

template <class Sum, int FORMAT, int R, int THREADS> DEV void multiply_all(const RouteArgs& a, const float* in, int rows, Routing& s) {
  for (int first = TID / WAVE * ROUTE_EXPERTS; first < a.n_experts; first += THREADS / WAVE * ROUTE_EXPERTS)
    if (a.hidden % 8 == 0) multiply<Sum, FORMAT, 8, R>(a, in, rows, first, s);
    else multiply<Sum, FORMAT, 1, R>(a, in, rows, first, s);
}
template <class Sum, int R, int THREADS> DEV void multiply_all(const RouteArgs& a, const float* in, int rows, Routing& s) {
  if (a.format == FORMAT_F32) multiply_all<Sum, FORMAT_F32, R, THREADS>(a, in, rows, s);
  else multiply_all<Sum, FORMAT_BF16, R, THREADS>(a, in, rows, s);
}

// A number that orders as the logit does; NaN is the smallest, zeros are equal.
DEV u32 order_of(float v) {
  const u32 bits = __builtin_bit_cast(u32, v);
  return v != v ? 0 : v == 0 ? 0x80000000u : bits >> 31 ? ~bits : bits | 0x80000000u;
}
// How many experts of a row come before one: a larger logit, or the same and a lower index.
DEV int rank_of(const u32* orders, int n, int expert) {
  const u32 mine = orders[expert];
  int rank = 0;
  for (int e = 0; e < expert; e++) rank += orders[e] >= mine;
  for (int e = expert + 1; e < n; e++) rank += orders[e] > mine;
  return rank;
}

// The place of a pick among a row's, in order of the expert's index.
DEV int place_of(const int* picks, int k, int rank) {
  int place = 0;
  for (int i = 0; i < k; i++) place += picks[i] < picks[rank];
  return place;
}
// The share of the pick at place `rank`, as the CPU's softmax over the picks, the largest first.
DEV float share_of(const float* logits, const int* picks, int k, int rank) {
  const double largest = logits[picks[0]];
  double sum = 0, mine = 0;
  for (int i = 0; i < k; i++) {
    const double e = exp_f32((float)((double)logits[picks[i]] - largest));
    sum += e;
    if (i == rank) mine = e;
  }
  return (float)(mine / sum);
}

// Routes `rows` rows, at most R, of which `in` is the first and number `first_row` of the step, by a block of THREADS. When it
// returns all of them see the picks.
template <int R, int THREADS> DEV void route_rows(const RouteArgs& a, const float* in, int first_row, int rows, Routing& s) {
  if (a.exact) multiply_all<double, R, THREADS>(a, in, rows, s);
  else multiply_all<float, R, THREADS>(a, in, rows, s);
  barrier();
  for (int i = TID; i < rows * a.n_experts; i += THREADS) {
    const int r = i / a.n_experts, expert = i % a.n_experts;
    s.orders[r][expert] = order_of(s.logits[r][expert]);
  }
  barrier();
  for (int i = TID; i < rows * a.n_experts; i += THREADS) {
    const int r = i / a.n_experts, expert = i % a.n_experts;
    const int rank = rank_of(s.orders[r], a.n_experts, expert);
    if (rank < a.k) s.picks[r][rank] = expert;
  }
  barrier();
  for (int i = TID; i < rows * a.k; i += THREADS) {
    const int r = i / a.k, rank = i % a.k;
    const i64 at = (i64)(first_row + r) * a.k + place_of(s.picks[r], a.k, rank);
    a.experts[at] = s.picks[r][rank];
    a.shares[at] = share_of(s.logits[r], s.picks[r], a.k, rank);
  }
}
