// Shared by `norm_route_cluster4` and `norm_route_cluster8`: rmsnorm and route fused, for few rows, in `fast`; for a
// single row sort and gather, too. Results have the bits of the separate kernels.
//
// A cluster of blocks takes a row. Each block norms all of it, and multiplies it with its share of the experts, one a
// wave, whose weights lie in registers before the predecessor ends. The logits go to the shared memory of the block
// that picks: with several rows one for each, with a single row all, so that each copies its share of the row.
//
// A single row's mlp1 does not wait for the end of this kernel, but for the word `picks` (GemmArgs). The first block
// sets it back before it lets mlp1 start. Then each block adds to its upper half when its share of the row is stored,
// and one adds the picks. So mlp1 waits for blocks that run.
//
// Grid: blocks of a cluster * clusters, which take the rows in turn, at most as many each as a cluster has blocks. The
// router's weights are BF16. There are at most as many experts as waves in a cluster. hidden is at most STEPS *
// ROUTE_STEP and a multiple of 8.
#pragma once
#include "../expert_slots.h"
#include "../norm.h"
#include "../route.h"
#include "cluster.h"

enum : int {
  STEPS = NORM_WAVES,                    // what a wave of norm.h sums is a step of this one
  AHEAD = 3,                             // fours of the row that a lane has in registers or on the way
};

// BLOCKS: of a cluster.
template <int THREADS, int BLOCKS> struct NormRoute {
  enum : int {
    WAVES = THREADS / WAVE,
    EXPERTS = WAVES * BLOCKS,
    OWN_STEPS = (STEPS + WAVES - 1) / WAVES,               // that a wave norms
  };
  struct Shared {
    f32x4 t[STEPS * 2 * WAVE];           // the row normed: [step][first or second four of a lane's eight][lane]
    u32 logits[BLOCKS][EXPERTS];         // of the cluster's rows
    alignas(16) Routing<1> routing;
    alignas(8) u64 arrived[BLOCKS];      // mbarriers: a row's logits
    float squares[2][STEPS];             // of the row's steps, in turn for rows
  };
  using Row = float[OWN_STEPS][8];       // a lane's eight of each of its wave's steps
  using Weights = u32x4[STEPS];          // a lane's eight of each step of its wave's expert

  // Calls f(i, step, k) for the wave's steps; k is the lane's first element.
  template <class F> static DEV void for_steps(F f) {
    UNROLL for (int i = 0; i < OWN_STEPS; i++) {
      const int step = TID / WAVE + i * WAVES;
      if (step < STEPS) f(i, step, step * ROUTE_STEP + LANE * 8);
    }
  }
  static DEV void load(const NormArgs& a, const float* from, Row& x) {
    for_steps([&](int i, int, int k) {
      UNROLL for (int j = 0; j < 8; j++) x[i][j] = 0;
      if (k < a.hidden) load8_aligned<FORMAT_F32>(from, k, x[i]);
    });
  }

  // Leaves the norm of the row x in s.t, and stores this block's share of it.
  static DEV void norm(const NormArgs& a, int row, int turn, int rank, const Row& x, Shared& s) {
    Row w;
    load(a, a.weight, w);
    for_steps([&](int i, int step, int) {
      float squares = 0;
      UNROLL for (int j = 0; j < 8; j++) squares += mul_rn(x[i][j], x[i][j]);
      squares = wave_sum(squares);
      if (LANE == 0) s.squares[turn % 2][step] = squares;
    });
    barrier();
    float sum = s.squares[turn % 2][0];
    UNROLL for (int step = 1; step < STEPS; step++) sum += s.squares[turn % 2][step];
    const float scale = inverse_root(sum, a.hidden);
    for_steps([&](int i, int step, int k) {
      float t[8];
      UNROLL for (int j = 0; j < 8; j++) t[j] = k < a.hidden ? w[i][j] * (scale * x[i][j]) : 0.f;
      UNROLL for (int h = 0; h < 2; h++)
        s.t[(step * 2 + h) * WAVE + LANE] = f32x4{t[4 * h], t[4 * h + 1], t[4 * h + 2], t[4 * h + 3]};
      if (step % BLOCKS != rank || k >= (a.hidden + SLAB - 1) / SLAB * SLAB) return;
      u16* at = a.t + tiled_index(row, k, a.t_rows);
      if (a.format == FORMAT_F16) store_terms8<FORMAT_F16>(at, a.t_term, 1, t);
      else store_terms8<FORMAT_BF16>(at, a.t_term, 1, t);
    });
    barrier();
  }

  // The product of the row and the wave's expert. The weights are opaque to the compiler, which would keep them as
  // float32 for all rows.
  static DEV float multiply(const RouteArgs& a, Weights& w, const Shared& s) {
    float sum = 0;
    f32x4 t[AHEAD];
    const auto load = [&](int half) {
      if (half < 2 * STEPS) t[half % AHEAD] = s.t[half * WAVE + LANE];
      asm volatile("" ::: "memory");
    };
    UNROLL for (int half = 0; half < AHEAD - 1; half++) load(half);
    UNROLL for (int half = 0; half < 2 * STEPS; half++) {
      load(half + AHEAD - 1);
      u32* words = w[half / 2].v + half % 2 * 2;
      asm volatile("" : "+r"(words[0]), "+r"(words[1]));
      if (half / 2 * ROUTE_STEP + LANE * 8 < a.hidden)
        UNROLL for (int i = 0; i < 4; i++)
          add_product(sum, from_16<FORMAT_BF16>((u16)(words[i / 2] >> i % 2 * 16)), t[half % AHEAD][i]);
    }
    for (int o = 8; o; o /= 2) sum += shfl_xor(sum, o);    // the tree of finish_logits
    return sum + shfl_xor(sum, 16);
  }

  // rank_experts for one row, four threads an expert: each compares it with a quarter of the others. The logits go with
  // the picks to `routing`. When it returns all threads see the picks.
  static DEV void rank_row(const RouteArgs& r, const u32* logits, Routing<1>& routing) {
    static_assert(THREADS >= 4 * EXPERTS && MAX_EXPERTS % 16 == 0, "an expert for each four threads, whole quads");
    for (int e = TID; e < (r.n_experts + 15) / 16 * 16; e += THREADS) {
      const float logit = __builtin_bit_cast(float, e < r.n_experts ? logits[e] : 0);
      routing.logits[0][e] = logit, routing.orders[0][e] = e < r.n_experts ? order_of(logit) : 0;
    }
    barrier();
    const int expert = TID / 4;
    const u32 mine = routing.orders[0][min(expert, r.n_experts - 1)];
    int rank = 0;                        // no order is the largest number
#pragma unroll 2
    for (int e = TID % 4 * 4; e < r.n_experts; e += 16) {
      const u32x4 others = *(const u32x4*)&routing.orders[0][e];
      UNROLL for (int i = 0; i < 4; i++) rank += others[i] + (e + i < expert) > mine;
    }
    rank += shfl_xor(rank, 1);
    rank += shfl_xor(rank, 2);
    if (TID % 4 == 0 && expert < r.n_experts && rank < r.k) routing.picks[0][rank] = expert;
    barrier();
  }

  // Writes slots and counts, and copies this block's share of the row to the slots; all threads know the picks. The
  // first block has the shares to compute.
  static DEV void send_alone(const NormRouteArgs& a, int rank, const Shared& s) {
    const int k = a.route.k, *picks = s.routing.picks[0];
    if (rank == 1) {
      for (int e = TID; e <= a.route.n_experts; e += THREADS) {
        int before = 0, here = 0;
        for (int i = 0; i < k; i++) before += picks[i] < e, here += picks[i] == e;
        a.sort.offsets[e] = before * slots_of(1);
        if (e < a.route.n_experts) a.sort.counts[e] = here;
      }
      if (TID < k) a.sort.slots[TID] = TID * slots_of(1);
    }
    const GatherArgs& g = a.gather;
    for (int i = TID * (BLOCKS - 1) + rank - 1; i < g.k_blocks * SLAB / 8 * k; i += THREADS * (BLOCKS - 1)) {
      const int piece = i / k, first = piece / WAVE * 2 * WAVE + piece % WAVE;
      float v[8];
      UNROLL for (int j = 0; j < 8; j++) v[j] = s.t[first + j / 4 * WAVE][j % 4];
      u16* at = g.out + tiled_index(i % k * slots_of(1), piece * 8, g.out_rows);
      if (a.norm.format == FORMAT_F16) store_terms8<FORMAT_F16>(at, g.out_term, 1, v);
      else store_terms8<FORMAT_BF16>(at, g.out_term, 1, v);
    }
  }

  // The upper half of `picks` is minus the number of additions to come.
  enum : u64 { ONE = 1ull << 32, NO_PICKS = ~0u };
  static DEV u64 picks_of(const RouteArgs& r, const Routing<1>& s) {
    u32 picks = NO_PICKS;
    for (int i = 0; i < r.k; i++) picks ^= (s.picks[0][i] ^ 255u) << 8 * place_of(s.picks[0], r.k, i);
    return picks;
  }

  static DEV void run(const NormRouteArgs& a, Shared& s) {
    const NormArgs& n = a.norm;
    const RouteArgs& r = a.route;
    const int rank = BID % BLOCKS, cluster = BID / BLOCKS, clusters = GRID / BLOCKS;
    if (TID < BLOCKS) barrier_init(shared_address(&s.arrived[TID]), 1), barrier_init_done();
    cluster_arrive();
    const int expert = TID / WAVE * BLOCKS + rank;
    const bool multiplies = expert < r.n_experts;
    Weights w = {};
    float bias = 0;
    if (multiplies) {
      const u16* from = (const u16*)r.w + (i64)expert * r.hidden + LANE * 8;
      UNROLL for (int step = 0; step < STEPS; step++)
        if (step * ROUTE_STEP + LANE * 8 < r.hidden) w[step] = *(const u32x4*)(from + step * ROUTE_STEP);
      bias = r.bias[expert];
    }
    if (BID == 0 && TID * 32 < n.hidden) prefetch_l2(n.weight + TID * 32);
    if (a.picks && BID == 0) {
      if (TID == 0) *a.picks = 0 - (BLOCKS + 1) * ONE, fence_device();
      barrier();
    }
    let_successor_start();
    const int rows = load_fresh(&n.step.header->rows);
    const int mine = rows <= cluster ? 0 : (rows - cluster - 1) / clusters + 1;
    const bool picks = a.alone ? mine > 0 : rank < mine;
    const int picked = a.alone ? 0 : rank;
    cluster_wait();
    if (TID == 0 && picks) barrier_arrive_expect(shared_address(&s.arrived[picked]), r.n_experts * 4);
    after_predecessor();
    if (mine == 0) {
      if (a.picks && BID == 0 && TID == 0) add(a.picks, (BLOCKS + 1) * ONE + NO_PICKS);
      return;
    }
    const auto row_of = [&](int turn) { return cluster + turn * clusters; };
    Row x;
    load(n, n.x + (i64)row_of(0) * n.hidden, x);
    for (int turn = 0; turn < mine; turn++) {
      norm(n, row_of(turn), turn, rank, x, s);
      if (a.picks && TID == THREADS - WAVE) add_release(a.picks, ONE);
      if (turn + 1 < mine) load(n, n.x + (i64)row_of(turn + 1) * n.hidden, x);
      if (!multiplies) continue;
      const u32 logit = __builtin_bit_cast(u32, add_rn(multiply(r, w, s), bias));
      if (LANE < BLOCKS && (a.alone || LANE == turn))
        send(address_in(shared_address(&s.logits[turn][expert]), LANE), logit,
             address_in(shared_address(&s.arrived[turn]), LANE));
    }
    if (!picks) return;
    barrier_wait_cluster(shared_address(&s.arrived[picked]), 0);
    rank_row(r, s.logits[picked], s.routing);
    if (a.picks && rank == BLOCKS - 1 && TID == 0) add(a.picks, ONE + picks_of(r, s.routing));
    if (!a.alone || rank == 0) share_experts<THREADS>(r, row_of(picked), 1, s.routing);
    else send_alone(a, rank, s);
  }
};

#define NORM_ROUTE(name, threads, blocks, cluster)                             \
  CLUSTER_KERNEL(name, NormRouteArgs, threads, blocks, cluster) {              \
    SHARED NormRoute<threads, cluster>::Shared s;                              \
    NormRoute<threads, cluster>::run(a, s);                                    \
  }
