// Shared by `route` and `norm_route`: router logits in float32 (exact: exact products, summed in float64), the k
// largest of them (top-k), and their softmax.
//
// A block's waves split the experts; a wave's lanes split K in pieces of eight. So a row's sums are the same whatever
// rows share its block. The k largest are found by rank: each expert counts those ahead of it, so there is no chain of
// k searches.
//
//   One row   is read from where it is, and a wave has ROUTE_AHEAD K tiles of the weights of ROUTE_EXPERTS experts in
//             flight.
//   Several   are staged in shared memory for all waves, one K tile at a time. A wave's sums of all rows and 4 or 8
//             experts stay in its registers. So a block reads each weight from L2 once, and each operand serves many
//             products.
#pragma once
#include "catalogue.h"
#include "gpu/math.h"

enum { ROUTE_ROWS = ROUTE_PER_BLOCK, MAX_EXPERTS = ROUTE_MOST_EXPERTS, MAX_K = ROUTE_MOST_EXPERTS_PER_TOKEN };
// Experts and rows whose sums a wave reduces together; K tiles that a wave with one row has in flight.
enum { ROUTE_EXPERTS = 4, ROUTE_TREE_ROWS = 4, ROUTE_AHEAD = 3 };
enum { ROUTE_K_TILE = WAVE * 8 };        // elements of K that a wave multiplies at once

// A block's results for its ROWS rows. Picks (the k largest) are in order of the logit, the largest first.
template <int ROWS> struct Routing {
  float logits[ROWS][MAX_EXPERTS];
  u32 orders[ROWS][MAX_EXPERTS];         // order_of(logit)
  int picks[ROWS][MAX_K];
  float exponentials[ROWS][MAX_K];       // of each pick's logit minus the largest
};

// A number that compares as the logit does; NaN is the smallest, zeros are equal.
DEV u32 order_of(float v) {
  const u32 bits = __builtin_bit_cast(u32, v);
  return v != v ? 0 : v == 0 ? 0x80000000u : bits >> 31 ? ~bits : bits | 0x80000000u;
}

DEV void add_product(float& sum, float w, float t) { sum = fma_rn(w, t, sum); }
DEV void add_product(double& sum, double w, double t) { sum += w * t; }      // the product is exact

template <class Sum> using TreeSums = Sum[ROUTE_TREE_ROWS][ROUTE_EXPERTS];
// Sums over the wave's lanes for ROUTE_TREE_ROWS rows from `row` on and ROUTE_EXPERTS experts from `first` on, and
// stores the logits: one tree, however many of the rows exist.
template <class Sum, int ROWS>
DEV void finish_logits(const RouteArgs& a, TreeSums<Sum>& sums, int row, int first, Routing<ROWS>& s) {
  const float sum = (float)wave_sums<ROUTE_TREE_ROWS * ROUTE_EXPERTS>(&sums[0][0]);
  const int r = row + LANE / ROUTE_EXPERTS, expert = first + LANE % ROUTE_EXPERTS;
  if (LANE / ROUTE_EXPERTS >= ROUTE_TREE_ROWS || r >= ROWS || expert >= a.n_experts) return;
  const float logit = add_rn(sum, a.bias[expert]);
  s.logits[r][expert] = logit, s.orders[r][expert] = order_of(logit);
}

// ---- one row

// One wave's products of the row `in`, number `row` of the block's rows, and experts `first` to `first + ROUTE_EXPERTS
// - 1`, N elements of K per lane at a time. Beyond the last expert, the last one is repeated.
template <class Sum, int FORMAT, int N, int ROWS>
DEV void multiply_row(const RouteArgs& a, const float* in, int row, int first, Routing<ROWS>& s) {
  constexpr int STRIDE = WAVE * N;
  Sum sums[ROUTE_TREE_ROWS][ROUTE_EXPERTS] = {};
  for (int k = LANE * N; k < a.hidden; k += ROUTE_AHEAD * STRIDE) {
    float w[ROUTE_AHEAD][ROUTE_EXPERTS][N], t[ROUTE_AHEAD][N];
    UNROLL for (int k_tile = 0; k_tile < ROUTE_AHEAD; k_tile++) {
      const int at = k + k_tile * STRIDE < a.hidden ? k + k_tile * STRIDE : k;
      UNROLL for (int e = 0; e < ROUTE_EXPERTS; e++) {
        const int expert = first + e < a.n_experts ? first + e : a.n_experts - 1;
        load_some<FORMAT, N>(a.w, (i64)expert * a.hidden + at, w[k_tile][e]);
      }
      load_some<FORMAT_F32, N>(in, at, t[k_tile]);
    }
    UNROLL for (int k_tile = 0; k_tile < ROUTE_AHEAD; k_tile++) {
      if (k + k_tile * STRIDE >= a.hidden) break;
      UNROLL for (int i = 0; i < N; i++) {
        const Sum v = t[k_tile][i];
        UNROLL for (int e = 0; e < ROUTE_EXPERTS; e++) add_product(sums[0][e], w[k_tile][e][i], v);
      }
    }
  }
  finish_logits(a, sums, row, first, s);
}

template <class Sum, int FORMAT, int THREADS, int ROWS>
DEV void multiply_row(const RouteArgs& a, const float* in, int row, Routing<ROWS>& s) {
  for (int first = TID / WAVE * ROUTE_EXPERTS; first < a.n_experts; first += THREADS / WAVE * ROUTE_EXPERTS)
    if (a.hidden % 8 == 0) multiply_row<Sum, FORMAT, 8>(a, in, row, first, s);
    else multiply_row<Sum, FORMAT, 1>(a, in, row, first, s);
}

// ---- several rows

// Eight weights of an expert as they lie in memory.
template <int FORMAT> struct RawWeights {
  Piece pieces[FORMAT == FORMAT_F32 ? 2 : 1];
  DEV void load(const void* w, i64 first) {
    const Piece* at = (const Piece*)((const u8*)w + first * (FORMAT == FORMAT_F32 ? 4 : 2));
    UNROLL for (int i = 0; i < (FORMAT == FORMAT_F32 ? 2 : 1); i++) pieces[i] = at[i];
  }
  // Four of the eight: the first or the second half.
  template <class Value> DEV void take(int half, Value* v) const {
    const u32x4 words = __builtin_bit_cast(u32x4, pieces[FORMAT == FORMAT_F32 ? half : 0]);
    UNROLL for (int i = 0; i < 4; i++)
      v[i] = FORMAT == FORMAT_F32 ? __builtin_bit_cast(float, words[i])
                                  : from_16<FORMAT>((u16)(words[half * 2 + i / 2] >> i % 2 * 16));
  }
};

// A K tile of the block's rows: [row][first or second four of a lane's eight][lane], so that a wave reads without
// bank conflicts. Double-buffered: one stage is filled while the other is read.
struct StagedRows {
  enum : int { PIECES = ROUTE_ROWS * 2 * WAVE };           // of four elements each
  Piece pieces[2][PIECES];
};
// A thread's pieces of the next K tile, in flight.
template <int THREADS> struct Ahead {
  enum : int { COUNT = StagedRows::PIECES / THREADS };
  Piece pieces[COUNT];
  DEV void load(const RouteArgs& a, const float* in, int rows, int k) {
    UNROLL for (int i = 0; i < COUNT; i++) {
      const int piece = TID + i * THREADS, row = piece / (2 * WAVE), at = k + piece % (2 * WAVE) * 4;
      pieces[i] = *(const Piece*)(in + (i64)(row < rows ? row : rows - 1) * a.hidden + (at < a.hidden ? at : 0));
    }
  }
  DEV void store(Piece* stage) const {
    UNROLL for (int i = 0; i < COUNT; i++) {
      const int piece = TID + i * THREADS, row = piece / (2 * WAVE), at = piece % (2 * WAVE);
      stage[(row * 2 + at % 2) * WAVE + at / 2] = pieces[i];
    }
  }
};

// The weights of E experts from `first` on, a lane's eight from k on. Beyond the last expert, the last one is repeated.
template <int FORMAT, int E> DEV void load_experts(const RouteArgs& a, int first, int k, RawWeights<FORMAT>* raw) {
  UNROLL for (int e = 0; e < E; e++) {
    const int expert = first + e < a.n_experts ? first + e : a.n_experts - 1;
    raw[e].load(a.w, (i64)expert * a.hidden + (k < a.hidden ? k : 0));
  }
}
// A K tile: products of ROWS staged rows, ROW_PIECES apart, and E experts.
template <class Sum, int FORMAT, int E, int ROWS, int ROW_PIECES>
DEV void multiply_k_tile(const RawWeights<FORMAT>* raw, const Piece* stage, Sum (*sums)[E]) {
  UNROLL for (int half = 0; half < 2; half++) {
    Sum w[E][4];
    UNROLL for (int e = 0; e < E; e++) raw[e].take(half, w[e]);
    UNROLL for (int r = 0; r < ROWS; r++) {
      const f32x4 piece = __builtin_bit_cast(f32x4, stage[r * ROW_PIECES + half * WAVE + LANE]);
      UNROLL for (int i = 0; i < 4; i++) {
        const Sum t = piece[i];
        UNROLL for (int e = 0; e < E; e++) add_product(sums[r][e], w[e][i], t);
      }
    }
  }
}
template <class Sum, int E, int ROWS>
DEV void finish_rows(const RouteArgs& a, const Sum (*sums)[E], int first, Routing<ROWS>& s) {
  UNROLL for (int r = 0; r < ROWS; r += ROUTE_TREE_ROWS)
    UNROLL for (int e = 0; e < E; e += ROUTE_EXPERTS) {
      Sum part[ROUTE_TREE_ROWS][ROUTE_EXPERTS];
      UNROLL for (int i = 0; i < ROUTE_TREE_ROWS; i++)
        UNROLL for (int j = 0; j < ROUTE_EXPERTS; j++) part[i][j] = sums[r + i][e + j];
      finish_logits(a, part, r, first + e, s);
    }
}

// E experts per wave. Beyond the last row, the last one is repeated. (Prefetching two ahead was slower by a
// tenth.)
template <class Sum, int FORMAT, int E, int THREADS>
DEV void multiply_staged(const RouteArgs& a, const float* in, int rows, StagedRows& stage, Routing<ROUTE_ROWS>& s) {
  int turn = 0;
  for (int base = 0; base < a.n_experts; base += THREADS / WAVE * E) {
    const int first = base + TID / WAVE * E;
    Sum sums[ROUTE_ROWS][E] = {};
    RawWeights<FORMAT> raw[E], next[E];
    Ahead<THREADS> ahead;
    ahead.load(a, in, rows, 0);
    load_experts<FORMAT, E>(a, first, LANE * 8, next);
    for (int k = 0; k < a.hidden; k += ROUTE_K_TILE, turn ^= 1) {
      ahead.store(stage.pieces[turn]);
      UNROLL for (int e = 0; e < E; e++) raw[e] = next[e];
      barrier();
      if (k + ROUTE_K_TILE < a.hidden)
        ahead.load(a, in, rows, k + ROUTE_K_TILE), load_experts<FORMAT, E>(a, first, k + ROUTE_K_TILE + LANE * 8, next);
      if (k + LANE * 8 < a.hidden) multiply_k_tile<Sum, FORMAT, E, ROUTE_ROWS, 2 * WAVE>(raw, stage.pieces[turn], sums);
    }
    finish_rows<Sum, E>(a, sums, first, s);
  }
}

template <class Sum, int FORMAT, int THREADS>
DEV void multiply_rows(const RouteArgs& a, const float* in, int rows, StagedRows& stage, Routing<ROUTE_ROWS>& s) {
  constexpr int MOST = sizeof(Sum) == 4 && FORMAT != FORMAT_F32 ? 8 : 4;         // as registers allow
  if (a.hidden % 8)
    for (int r = 0; r < rows; r++) multiply_row<Sum, FORMAT, THREADS>(a, in + (i64)r * a.hidden, r, s);
  else if (a.n_experts > THREADS / WAVE * 4)
    multiply_staged<Sum, FORMAT, MOST, THREADS>(a, in, rows, stage, s);
  else
    multiply_staged<Sum, FORMAT, 4, THREADS>(a, in, rows, stage, s);
}

// ---- from logits to picks

// An expert's rank: how many experts of the row have a larger logit, or an equal one and a lower index.
DEV int rank_of(const u32* orders, int n, int expert) {
  const u32 mine = orders[expert];
  int rank = 0;
  for (int e = 0; e < n; e++) rank += orders[e] + (e < expert) > mine;   // no order is the largest number
  return rank;
}

// A pick's position among the row's picks in order of the expert's index.
DEV int place_of(const int* picks, int k, int rank) {
  int place = 0;
  for (int i = 0; i < k; i++) place += picks[i] < picks[rank];
  return place;
}

// Picks experts from the logits of `rows` rows. When it returns all threads see the picks.
template <int THREADS, int ROWS> DEV void rank_experts(const RouteArgs& a, int rows, Routing<ROWS>& s) {
  barrier();
  for (int i = TID; i < rows * a.n_experts; i += THREADS) {
    const int r = i / a.n_experts, expert = i % a.n_experts;
    const int rank = rank_of(s.orders[r], a.n_experts, expert);
    if (rank < a.k) s.picks[r][rank] = expert;
  }
  barrier();
}

// Stores the picks of `rows` rows, the first of which is number `first_row` of the step, and their shares: the CPU's
// softmax over the picks, summed from the largest on.
template <int THREADS, int ROWS> DEV void share_experts(const RouteArgs& a, int first_row, int rows, Routing<ROWS>& s) {
  for (int i = TID; i < rows * a.k; i += THREADS) {
    const int r = i / a.k, rank = i % a.k, *picks = s.picks[r];
    s.exponentials[r][rank] = exp_f32((float)((double)s.logits[r][picks[rank]] - (double)s.logits[r][picks[0]]));
  }
  barrier();
  for (int i = TID; i < rows * a.k; i += THREADS) {
    const int r = i / a.k, rank = i % a.k;
    double sum = 0;
    for (int j = 0; j < a.k; j++) sum += (double)s.exponentials[r][j];
    const i64 at = (i64)(first_row + r) * a.k + place_of(s.picks[r], a.k, rank);
    hand_on(a.experts + at, s.picks[r][rank]);
    hand_on(a.shares + at, (float)((double)s.exponentials[r][rank] / sum));
  }
}

template <int THREADS, int ROWS> DEV void pick_experts(const RouteArgs& a, int first_row, int rows, Routing<ROWS>& s) {
  rank_experts<THREADS>(a, rows, s);
  share_experts<THREADS>(a, first_row, rows, s);
}

// ---- entry points of the kernels

// Routes row `row` of the step, which is at `in`.
template <int THREADS> DEV void route_row(const RouteArgs& a, const float* in, int row, Routing<1>& s) {
  const auto multiply = [&](auto zero) {
    if (a.format == FORMAT_F32) multiply_row<decltype(zero), FORMAT_F32, THREADS>(a, in, 0, s);
    else multiply_row<decltype(zero), FORMAT_BF16, THREADS>(a, in, 0, s);
  };
  if (a.exact) multiply(0.0);
  else multiply(0.f);
  pick_experts<THREADS>(a, row, 1, s);
}

// Routes `rows` rows, at most ROUTE_ROWS, from row `first_row` of the step on; the first is at `in`.
template <int THREADS>
DEV void route_rows(const RouteArgs& a, const float* in, int first_row, int rows, StagedRows& stage,
                    Routing<ROUTE_ROWS>& s) {
  const auto multiply = [&](auto zero) {
    if (a.format == FORMAT_F32) multiply_rows<decltype(zero), FORMAT_F32, THREADS>(a, in, rows, stage, s);
    else multiply_rows<decltype(zero), FORMAT_BF16, THREADS>(a, in, rows, stage, s);
  };
  if (a.exact) multiply(0.0);
  else multiply(0.f);
  pick_experts<THREADS>(a, first_row, rows, s);
}
