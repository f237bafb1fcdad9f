// Shared by norm_route_16x32, _32x32 and _32x128: rmsnorm and route fused, for many rows, in `fast`. The router's input
// never leaves the multiprocessors. The norm has the bits of the separate kernel, the logits those of
// norm_route_cluster.h.
//
// A cluster of four blocks takes ROWS rows; each block has a quarter of K of them in shared memory, and reads that
// quarter of the router's weights. So a multiprocessor reads a quarter of what it would for as many rows of its own. In
// a block each wave multiplies a part of K, all rows with all experts:
//
//   Norm      a wave's rows go to registers. The sums of squares go to all blocks, the row normed to shared memory.
//   Products  of 32 experts at once; their weights are in registers, and those of the next 32 on the way. The parts'
//             sums meet in shared memory, and each quarter's go to the block whose row it is.
//   Picks     are a wave's work for a row, without a barrier.
//
// Grid: at most as many clusters as run at once; they take the rows in turn. Of the arguments `norm` (with one term)
// and `route` (without `t32`; its weights are BF16) are used; nothing is added to x.
#pragma once
#include "../norm.h"
#include "../mma/registers.h"
#include "route_products.h"

enum : int { K_TILES = NORM_WAVES };     // what a wave of norm.h sums is a K tile of this one

// The lane. Opaque, lest the compiler compute with it ahead of the loop over rows, and keep the results in registers.
DEV int lane_here() {
  int lane = LANE;
  asm volatile("" : "+r"(lane));
  return lane;
}

// Prefetches so many bytes, a multiple of 16, into the L2.
DEV void prefetch_l2(const void* p, u32 bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(p), "r"(bytes) : "memory");
}

// ROWS: of a cluster. EXPERTS: at most.
template <int ROWS, int EXPERTS> struct NormRouteRows {
  enum : int {
    WAVES = PARTS,
    OWN = ROWS / QUARTERS,               // rows whose experts a block picks
    PAIRS = ROWS / (2 * WAVES),          // of a wave's rows; its rows are WAVES apart
    K_TILES_HERE = QUARTER / ROUTE_K_TILE,
    TERM_BYTES = 2 * QUARTER * 2,        // of a pair of rows
    PAIR_BYTES = ROUTER_TERMS * TERM_BYTES,
    SET = 32,                            // experts multiplied at once
    SETS = EXPERTS / SET,
    SUM_STRIDE = SET + 8,                // of a row's sums: a wave stores them without bank conflicts
    EXPERTS_A_LANE = EXPERTS / WAVE,
    SUMS_AT = ROWS / 2 * PAIR_BYTES,
    LOGITS_AT = SUMS_AT + WAVES * ROWS * SUM_STRIDE * 4,
    SQUARES_AT = LOGITS_AT + OWN * QUARTERS * EXPERTS * 4,
    NORM_AT = SQUARES_AT + ROWS * K_TILES * 4,
    BIAS_AT = NORM_AT + QUARTER * 4,
    SHARED_BYTES = BIAS_AT + EXPERTS * 4,
  };
  static_assert(K_TILES * ROUTE_K_TILE == QUARTERS * QUARTER, "a quarter is whole K tiles of the norm");
  static_assert(OWN <= WAVES, "a wave picks a row's experts");

  // A term of pair `pair` of wave `wave`: of lane `lane`'s eight elements of `k_tile` the first or second four, two
  // of a row and of the other row in turn, as mma takes them. Lanes that load from waves g and g + 1 do so without bank
  // conflicts.
  static DEV u8* term_at(int pair, int wave, int term, int k_tile, int half, int lane) {
    u8* const at = DYNAMIC_SHARED + (pair * WAVES + wave) * PAIR_BYTES + term * TERM_BYTES;
    return at + ((k_tile * 2 + half) * WAVE + (lane ^ wave % 2 * 4)) * 16;
  }
  // A wave's sums of its part of K: [row][expert].
  static DEV float* sums_at(int wave) { return (float*)(DYNAMIC_SHARED + SUMS_AT) + wave * ROWS * SUM_STRIDE; }
  // A quarter's logits of one of the block's own rows.
  static DEV float* logits_at(int own, int quarter) {
    return (float*)(DYNAMIC_SHARED + LOGITS_AT) + (own * QUARTERS + quarter) * EXPERTS;
  }
  static DEV float* squares_at(int row) { return (float*)(DYNAMIC_SHARED + SQUARES_AT) + row * K_TILES; }

  // The norm's weights of this quarter, as a row with an even number.
  static DEV f32x4* weights_at(int k_tile, int half, int lane) {
    return (f32x4*)(DYNAMIC_SHARED + NORM_AT) + (k_tile * 2 + half) * WAVE + lane;
  }
  static DEV float* bias_at(int expert) { return (float*)(DYNAMIC_SHARED + BIAS_AT) + expert; }
  static DEV void load_constants(const NormArgs& a, const RouteArgs& r, int quarter) {
    const int k_tile = TID / WAVE, k = quarter * QUARTER + k_tile * ROUTE_K_TILE + LANE * 8;
    if (k_tile < K_TILES_HERE && k < a.hidden)
      UNROLL for (int h = 0; h < 2; h++) *weights_at(k_tile, h, LANE) = *(const f32x4*)(a.weight + k + 4 * h);
    if (TID < r.n_experts) *bias_at(TID) = r.bias[TID];
  }

  // This block's quarter of a wave's rows.
  using Own = float[PAIRS][2][K_TILES_HERE][8];
  static DEV int row_of(int pair, int second) { return (pair * 2 + second) * WAVES + TID / WAVE; }
  static DEV int k_of(int quarter, int k_tile, int lane) {
    return quarter * QUARTER + k_tile * ROUTE_K_TILE + lane * 8;
  }
  template <class F> static DEV void for_rows(F f) {
    UNROLL for (int pair = 0; pair < PAIRS; pair++)
      UNROLL for (int second = 0; second < 2; second++)
        UNROLL for (int k_tile = 0; k_tile < K_TILES_HERE; k_tile++) f(pair, second, k_tile);
  }
  // Of rows `first` to `first + ROWS - 1`; those beyond the last row are zeros.
  static DEV void load_rows(const NormArgs& a, int first, int rows, int quarter, Own& x) {
    const int lane = lane_here();
    for_rows([&](int pair, int second, int k_tile) {
      const int row = first + row_of(pair, second), k = k_of(quarter, k_tile, lane);
      UNROLL for (int j = 0; j < 8; j++) x[pair][second][k_tile][j] = 0;
      if (row < rows && k < a.hidden)
        load8_aligned<FORMAT_F32>(a.x + (i64)row * a.hidden, k, x[pair][second][k_tile]);
    });
  }

  // Norms them. Until all blocks have sent their squares, a pair waits where its first two terms will be.
  static DEV void norm(const NormArgs& a, int first, int rows, int quarter, const Own& x) {
    const int lane = lane_here(), wave = TID / WAVE;
    for_rows([&](int pair, int second, int k_tile) {
      const float* const v = x[pair][second][k_tile];
      float squares = 0;
      UNROLL for (int j = 0; j < 8; j++) squares += mul_rn(v[j], v[j]);
      UNROLL for (int h = 0; h < 2; h++) *(f32x4*)term_at(pair, wave, second, k_tile, h, lane) = four_of(v + 4 * h);
      squares = wave_sum(squares);
      const u32 at = shared_address(squares_at(row_of(pair, second)) + quarter * K_TILES_HERE + k_tile);
      if (lane < QUARTERS) send(address_in(at, lane), squares);
    });
    cluster_barrier();
    const float* const squares = squares_at(row_of(0, lane % (2 * PAIRS)));     // a lane has a row's scale
    float sum = squares[0];
    UNROLL for (int k_tile = 1; k_tile < K_TILES; k_tile++) sum += squares[k_tile];
    const float scale = inverse_root(sum, a.hidden);
    ROLLED for (int pair = 0; pair < PAIRS; pair++) {
      const float scales[2] = {shfl(scale, 2 * pair), shfl(scale, 2 * pair + 1)};
      UNROLL for (int k_tile = 0; k_tile < K_TILES_HERE; k_tile++) {
        const int k = k_of(quarter, k_tile, lane);
        u32x4 terms[2][ROUTER_TERMS];
        UNROLL for (int second = 0; second < 2; second++) {
          float t[8];
          UNROLL for (int h = 0; h < 2; h++) {
            const f32x4 w = *weights_at(k_tile, h, lane);
            const f32x4 v = *(const f32x4*)term_at(pair, wave, second, k_tile, h, lane);
            UNROLL for (int j = 0; j < 4; j++) t[4 * h + j] = k < a.hidden ? w[j] * (scales[second] * v[j]) : 0.f;
          }
          split8(t, terms[second]);
          store(a, first + row_of(pair, second), rows, k, t);
        }
        UNROLL for (int term = 0; term < ROUTER_TERMS; term++)
          UNROLL for (int h = 0; h < 2; h++) {
            const u32x4 &one = terms[0][term], &other = terms[1][term];
            *(u32x4*)term_at(pair, wave, term, k_tile, h, lane) =
                u32x4{one[2 * h], other[2 * h], one[2 * h + 1], other[2 * h + 1]};
          }
      }
    }
    barrier();
  }
  // Stores eight elements of a row for the experts.
  static DEV void store(const NormArgs& a, int row, int rows, int k, float* t) {
    if (row >= rows || k >= (a.hidden + SLAB - 1) / SLAB * SLAB) return;
    u16* const at = a.t + tiled_index(row, k, a.t_rows);
    float most = 0;
    u32x4 packed;
    UNROLL for (int j = 0; j < 8; j++) most = fmaxf(most, fabsf(t[j]));
    UNROLL for (int j = 0; j < 4; j++) packed[j] = pack_finite(t[2 * j], t[2 * j + 1]);
    if (a.format != FORMAT_F16) store_terms8<FORMAT_BF16>(at, a.t_term, 1, t);
    else if (most < __builtin_inff()) *(u32x4*)at = packed;
    else store_terms8<FORMAT_F16>(at, a.t_term, 1, t);
  }

  // A lane's weights of the wave's part of K and a set of experts: of g, g + 8, g + 16 and g + 24 of it. Beyond the
  // last expert, the last one is repeated.
  struct Weights {
    u32x4 w[PART_BLOCKS][SET / 8];

    DEV void load(const RouteArgs& a, int quarter, int set, int block) {
      const int k = quarter * QUARTER + TID / WAVE * PART + block * K_BLOCK + LANE % 4 * 8;
      UNROLL for (int e = 0; e < SET / 8; e++)
        w[block][e] = router_weights(a, min(set * SET + e * 8 + LANE / 4, a.n_experts - 1), k);
    }
    DEV void load(const RouteArgs& a, int quarter) {
      UNROLL for (int block = 0; block < PART_BLOCKS; block++) load(a, quarter, 0, block);
    }
  };

  // The wave's sums of a set of experts. Weights of set `next` follow those that are done with.
  static DEV void multiply(const RouteArgs& a, Weights& weights, int quarter, int next, float* to) {
    Weights ahead;
    float sums[PAIRS][SET / 8][ROUTER_TERMS][4] = {};
    const int g = LANE / 4, q = LANE % 4, wave = TID / WAVE;
    UNROLL for (int block = 0; block < PART_BLOCKS; block++) {
      const int at = wave * PART_BLOCKS + block, k_tile = at * K_BLOCK / ROUTE_K_TILE;     // of the quarter
      if (SETS > 1) ahead.load(a, quarter, next, block);
      UNROLL for (int pair = 0; pair < PAIRS; pair++)
        UNROLL for (int h = 0; h < 2; h++) {
          u32x4 t[ROUTER_TERMS];
          UNROLL for (int term = 0; term < ROUTER_TERMS; term++)
            t[term] = *(const u32x4*)term_at(pair, g, term, k_tile, h, at * K_BLOCK % ROUTE_K_TILE / 8 + q);
          UNROLL for (int term = 0; term < ROUTER_TERMS; term++)
            UNROLL for (int e = 0; e < SET / 8; e++) {
              const u32x4 w = weights.w[block][e];
              mma<FORMAT_BF16>(sums[pair][e][term], t[term].v, w[2 * h], w[2 * h + 1]);
            }
        }
    }
    if (SETS > 1) weights = ahead;
    UNROLL for (int pair = 0; pair < PAIRS; pair++)
      UNROLL for (int e = 0; e < SET / 8; e++)
        UNROLL for (int j = 0; j < 4; j++)
          to[((pair * 2 + j / 2) * WAVES + g) * SUM_STRIDE + e * 8 + q * 2 + j % 2] =
              part_sum(sums[pair][e][0][j], sums[pair][e][1][j], sums[pair][e][2][j]);
  }

  // Adds a set's parts, and gives the quarter's logits to the blocks whose rows they are.
  static DEV void give(int quarter, int set) {
    const int row = TID / (SET / 4), expert = TID % (SET / 4) * 4;
    if (row >= ROWS) return;
    f32x4 sum = *(const f32x4*)(sums_at(0) + row * SUM_STRIDE + expert);
    UNROLL for (int part = 1; part < PARTS; part++) {
      const f32x4 v = *(const f32x4*)(sums_at(part) + row * SUM_STRIDE + expert);
      UNROLL for (int i = 0; i < 4; i++) sum[i] = add_rn(sum[i], v[i]);
    }
    const u32 to = shared_address(logits_at(row % OWN, quarter) + set * SET + expert);
    send(address_in(to, row / OWN), sum);
  }

  // Picks the experts of row `row`, number `own` of the block's, and stores them with their shares.
  static DEV void pick(const RouteArgs& a, int row, int own) {
    float* const logits = logits_at(own, 0);
    u32 claims[EXPERTS_A_LANE];
    UNROLL for (int i = 0; i < EXPERTS_A_LANE; i++) {
      const int expert = i * WAVE + LANE;
      float logit = logits[expert];
      UNROLL for (int quarter = 1; quarter < QUARTERS; quarter++)
        logit = add_rn(logit, logits_at(own, quarter)[expert]);
      logits[expert] = logit = add_rn(logit, *bias_at(expert));
      claims[i] = expert < a.n_experts ? claim_of(logit) : 0;
    }
    __syncwarp();
    const int picked = pick_by_wave(a.k, claims);
    share_by_wave(a, row, picked, place_by_wave(a.k, picked), logits[picked]);
  }

  // The weights leave DRAM while the rows are normed.
  static DEV void prefetch(const NormRouteArgs& a) {
    for (int expert = BID; SETS > 1 && TID == 0 && expert < a.route.n_experts; expert += GRID)
      prefetch_l2((const u16*)a.route.w + (i64)expert * a.route.hidden, a.route.hidden * 2);
    if (BID == 0 && TID == WAVE) prefetch_l2(a.norm.weight, a.norm.hidden * 4);
  }
  // The next rows, this block's quarter of them.
  static DEV void prefetch_rows(const NormArgs& a, int first, int rows, int quarter) {
    const int row = first + (int)(LANE * WAVES + TID / WAVE);
    const int elements = min((int)QUARTER, a.hidden - quarter * QUARTER);
    if (LANE < ROWS / WAVES && row < rows && elements > 0)
      prefetch_l2(a.x + (i64)row * a.hidden + quarter * QUARTER, elements * 4);
  }

  static DEV void run(const NormRouteArgs& a) {
    const NormArgs& n = a.norm;
    const RouteArgs& r = a.route;
    const int quarter = BID % QUARTERS, wave = TID / WAVE, turn = GRID / QUARTERS * ROWS;
    const int rows = load_fresh(&n.step.header->rows);
    int first = BID / QUARTERS * ROWS;
    cluster_arrive();
    let_successor_start();
    prefetch(a);
    Weights weights;
    load_constants(n, r, quarter);
    if (first < rows) weights.load(r, quarter);
    after_predecessor();
    cluster_wait();
    const int sets = (r.n_experts + SET - 1) / SET;
    Own x;
    if (first < rows) load_rows(n, first, rows, quarter, x);
    for (; first < rows; first += turn) {
      norm(n, first, rows, quarter, x);
      prefetch_rows(n, first + turn, rows, quarter);
      ROLLED for (int set = 0; set < (SETS > 1 ? sets : 1); set++) {
        if (set > 0) barrier();          // behind the last set's sums
        multiply(r, weights, quarter, set + 1 < sets ? set + 1 : 0, sums_at(wave));
        barrier();
        give(quarter, set);
      }
      load_rows(n, first + turn, rows, quarter, x);
      cluster_barrier();
      const int own = quarter * OWN + wave;
      if (wave < OWN && first + own < rows) pick(r, first + own, wave);
    }
  }
};

#define NORM_ROUTE_ROWS(NAME, NAMES, RESIDENT)                                                              \
  CLUSTER_KERNEL(NAME, NormRouteArgs, NAMES##_THREADS, RESIDENT, NAMES##_CLUSTER) {                         \
    using Rows = NormRouteRows<NAMES##_PER_BLOCK * NAMES##_CLUSTER, NAMES##_MOST_EXPERTS>;                  \
    static_assert(Rows::SHARED_BYTES == NAMES##_SHARED_BYTES, "rows, sums, logits and squares");            \
    static_assert(NAMES##_THREADS == Rows::WAVES * WAVE && NAMES##_CLUSTER == QUARTERS, "a wave for a part"); \
    Rows::run(a);                                                                                           \
  }
