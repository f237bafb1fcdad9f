// route: router logits in float32 (exact: float64 sums of rounded products), the k largest, their softmax.
//
// A block takes ROWS rows, so that the router's weights (184 KB at 32 experts of 2880) are read once for all of them and the
// products stay below what one SM draws from the L2; of few rows, of which each can have a multiprocessor, it takes one,
// and the registers hold AHEAD steps of K under way. Its waves split the experts, EXPERTS at a time; a wave's lanes
// split K in pieces of eight: a row's sums are the same whatever rows share its block.
// The k largest are found by rank, each expert counting those ahead of it: no chain of k searches.
//
// Grid: rows of the bucket / block_rows (ROWS or 1), rounded up. At most MAX_EXPERTS experts, MAX_K of them a token.
#include "gpu/math.h"

enum { ROWS = 4, EXPERTS = 4, AHEAD = 3, WAVES = 8, THREADS = WAVES * WAVE, MAX_EXPERTS = 256, MAX_K = 8 };

// One wave's products of R rows and experts `first` to `first + EXPERTS - 1`, N elements of K a lane at a time. What is not
// there repeats the last one. The sums' tree is that of ROWS rows for any R.
template <class Sum, int FORMAT, int N, int R> DEV void multiply(const RouteArgs& a, int first_row, int rows, int first, float* logits) {
  constexpr int STEPS = R == 1 ? (int)AHEAD : 1, STRIDE = WAVE * N;
  Sum sums[ROWS][EXPERTS] = {};
  for (int k = LANE * N; k < a.hidden; k += STEPS * STRIDE) {
    float w[STEPS][EXPERTS][N], t[STEPS][R][N];
    UNROLL for (int s = 0; s < STEPS; s++) {
      const int at = k + s * STRIDE < a.hidden ? k + s * STRIDE : k;
      UNROLL for (int e = 0; e < EXPERTS; e++) {
        const int expert = first + e < a.n_experts ? first + e : a.n_experts - 1;
        load_some<FORMAT, N>(a.w, (i64)expert * a.hidden + at, w[s][e]);
      }
      UNROLL for (int r = 0; r < R; r++)
        load_some<FORMAT_F32, N>(a.t32, (i64)(first_row + (r < rows ? r : rows - 1)) * a.hidden + at, t[s][r]);
    }
    UNROLL for (int s = 0; s < STEPS; s++)
      UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int e = 0; e < EXPERTS; e++)
          UNROLL for (int i = 0; i < N; i++)
            sums[r][e] += k + s * STRIDE < a.hidden ? (Sum)mul_rn(w[s][e][i], t[s][r][i]) : (Sum)0;
  }
  const float sum = (float)wave_sums<ROWS * EXPERTS>(&sums[0][0]);
  const int r = LANE / EXPERTS, expert = first + LANE % EXPERTS;
  if (r < R && expert < a.n_experts) logits[r * MAX_EXPERTS + expert] = add_rn(sum, a.bias[expert]);
}

template <class Sum, int FORMAT, int N> DEV void multiply_all(const RouteArgs& a, int first_row, int rows, float* logits) {
  for (int first = TID / WAVE * EXPERTS; first < a.n_experts; first += WAVES * EXPERTS)
    if (a.block_rows == 1) multiply<Sum, FORMAT, N, 1>(a, first_row, rows, first, logits);
    else multiply<Sum, FORMAT, N, ROWS>(a, first_row, rows, first, logits);
}
template <class Sum, int FORMAT> DEV void multiply_all(const RouteArgs& a, int first_row, int rows, float* logits) {
  if (a.hidden % 8 == 0) multiply_all<Sum, FORMAT, 8>(a, first_row, rows, logits);
  else multiply_all<Sum, FORMAT, 1>(a, first_row, rows, logits);
}
template <class Sum> DEV void multiply_all(const RouteArgs& a, int first_row, int rows, float* logits) {
  if (a.format == FORMAT_F32) multiply_all<Sum, FORMAT_F32>(a, first_row, rows, logits);
  else multiply_all<Sum, FORMAT_BF16>(a, first_row, rows, logits);
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

KERNEL(route, RouteArgs, THREADS, 2, 2) {
  SHARED float logits[ROWS * MAX_EXPERTS];
  SHARED u32 orders[ROWS * MAX_EXPERTS];
  SHARED int picks[ROWS * MAX_K];
  let_successor_start();
  after_predecessor();
  const int first_row = BID * a.block_rows;
  const int left = a.step.header->rows - first_row;
  if (left <= 0) return;
  const int rows = left < a.block_rows ? left : a.block_rows;
  if (a.exact) multiply_all<double>(a, first_row, rows, logits);
  else multiply_all<float>(a, first_row, rows, logits);
  barrier();
  for (int i = TID; i < ROWS * MAX_EXPERTS; i += THREADS) orders[i] = order_of(logits[i]);
  barrier();
  for (int i = TID; i < rows * a.n_experts; i += THREADS) {
    const int r = i / a.n_experts, expert = i % a.n_experts;
    const int rank = rank_of(orders + r * MAX_EXPERTS, a.n_experts, expert);
    if (rank < a.k) picks[r * MAX_K + rank] = expert;
  }
  barrier();
  for (int i = TID; i < rows * a.k; i += THREADS) {
    const int r = i / a.k, rank = i % a.k;
    const int* picked = picks + r * MAX_K;
    int place = 0;
    for (int j = 0; j < a.k; j++) place += picked[j] < picked[rank];
    const i64 at = (i64)(first_row + r) * a.k + place;
    a.experts[at] = picked[rank];
    a.shares[at] = share_of(logits + r * MAX_EXPERTS, picked, a.k, rank);
  }
}
