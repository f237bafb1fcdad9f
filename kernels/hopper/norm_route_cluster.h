// Shared by `norm_route_cluster4` and `norm_route_cluster8`: rmsnorm and route fused, for few rows, in `fast`; for a
// single row sort and gather, too. The norm has the bits of the separate kernel, the logits those of norm_route_rows.h.
//
// A cluster of blocks takes a row. Each block norms all of it, and multiplies it with its share of the experts. Each
// wave has its share of K, whose weights lie in registers before the predecessor ends. A row's three terms are columns
// of one product. The logits go to the shared memory of the block that picks: with several rows one for each, with a
// single row all, so that each copies its share of the row.
//
// A single row's mlp1 does not wait for the end of this kernel, but for the word `picks` (GemmArgs). The first block
// sets it back before it lets mlp1 start. Then each block adds to its upper half when its share of the row is stored,
// and one adds the picks. So mlp1 waits for blocks that run.
//
// Grid: blocks of a cluster * clusters, which take the rows in turn, at most as many each as a cluster has blocks. The
// router's weights are BF16. There are at most as many experts as waves in a cluster. hidden is at most QUARTERS *
// QUARTER and a multiple of 8.
#pragma once
#include "../expert_slots.h"
#include "../norm.h"
#include "route_products.h"

enum : int { K_TILES = NORM_WAVES };     // what a wave of norm.h sums is a K tile of this one

// Zero, which the compiler does not know: the highest bit of the time in nanoseconds.
DEV u32 unknown_zero() {
  u32 high;
  asm volatile("mov.u32 %0, %%globaltimer_hi;" : "=r"(high)::"memory");
  return high >> 31;
}

// BLOCKS: of a cluster.
template <int THREADS, int BLOCKS> struct NormRoute {
  enum : int {
    WAVES = THREADS / WAVE,
    EXPERTS = WAVES * BLOCKS,
    OWN_K_TILES = (K_TILES + WAVES - 1) / WAVES,           // that a wave norms
    ALL_PARTS = QUARTERS * PARTS,
    OWN_PARTS = ALL_PARTS / WAVES,                         // that a wave multiplies
    HALVES = 16 / WAVES,                                   // parts in one product: the experts are half its rows
    CHAINS = OWN_PARTS / HALVES,
    COLUMN = K_TILES * ROUTE_K_TILE * 2 + 2 * K_BLOCK,     // bytes of a term: lanes load without bank conflicts
  };
  static_assert(K_TILES * ROUTE_K_TILE == QUARTERS * QUARTER && ALL_PARTS % WAVES == 0, "waves share K");
  static_assert(WAVES == 8 || WAVES == 16, "the block's experts are the rows of one product, or half of them");
  struct Shared {
    alignas(16) u8 terms[ROUTER_TERMS * COLUMN];           // of the row normed
    alignas(16) float parts[WAVES][ALL_PARTS + 4];         // sums of each part of K for the block's experts
    u32 logits[EXPERTS];                 // of the row whose experts the block picks
    int picks[MAX_K];
    alignas(8) u64 arrived;              // mbarrier: its logits
    float squares[2][K_TILES];           // of the row's K tiles, in turn for rows
  };
  // The upper half of `picks` is minus the number of additions to come.
  enum : u64 { ONE = 1ull << 32, NO_PICKS = ~0u };
  using Row = float[OWN_K_TILES][8];     // a lane's eight of each of its wave's K tiles
  using Weights = u32x4[CHAINS][PART_BLOCKS][2];           // of row g of a product, and of row g + 8

  // Calls f(i, k_tile, k) for the wave's K tiles; k is the lane's first element.
  template <class F> static DEV void for_k_tiles(F f) {
    UNROLL for (int i = 0; i < OWN_K_TILES; i++) {
      const int k_tile = TID / WAVE + i * WAVES;
      if (k_tile < K_TILES) f(i, k_tile, k_tile * ROUTE_K_TILE + LANE * 8);
    }
  }
  static DEV void load(const NormArgs& a, const float* from, Row& x) {
    UNROLL for (int i = 0; i < OWN_K_TILES; i++)
      UNROLL for (int j = 0; j < 8; j++) x[i][j] = 0;
    for_k_tiles([&](int i, int, int k) {
      if (k < a.hidden) load8_aligned<FORMAT_F32>(from, k, x[i]);
    });
  }

  static DEV u32x4* term_at(Shared& s, int term, int k) { return (u32x4*)(s.terms + term * COLUMN + k * 2); }

  // Leaves the norm of the row x in s.terms, and stores this block's share of it.
  static DEV void norm(const NormArgs& a, int row, int turn, int rank, const Row& x, Shared& s) {
    Row w;
    load(a, a.weight, w);
    float squares[OWN_K_TILES] = {};
    UNROLL for (int i = 0; i < OWN_K_TILES; i++)
      UNROLL for (int j = 0; j < 8; j++) squares[i] += mul_rn(x[i][j], x[i][j]);
    UNROLL for (int i = 0; i < OWN_K_TILES; i++) squares[i] = wave_sum(squares[i]);
    for_k_tiles([&](int i, int k_tile, int) {
      if (LANE == 0) s.squares[turn % 2][k_tile] = squares[i];
    });
    barrier();
    float sum = s.squares[turn % 2][0];
    UNROLL for (int k_tile = 1; k_tile < K_TILES; k_tile++) sum += s.squares[turn % 2][k_tile];
    const float scale = inverse_root(sum, a.hidden);
    for_k_tiles([&](int i, int k_tile, int k) {
      float t[8];
      UNROLL for (int j = 0; j < 8; j++) t[j] = k < a.hidden ? w[i][j] * (scale * x[i][j]) : 0.f;
      u32x4 terms[ROUTER_TERMS];
      split8(t, terms);
      UNROLL for (int term = 0; term < ROUTER_TERMS; term++) *term_at(s, term, k) = terms[term];
      if (k_tile % BLOCKS != rank || k >= (a.hidden + SLAB - 1) / SLAB * SLAB) return;
      u16* at = a.t + tiled_index(row, k, a.t_rows);
      store_terms8(a.format, at, a.t_term, 1, t);
    });
    barrier();
  }

  // With eight experts rows 8 to 15 are the same ones and the next part, whose terms are columns 3 to 5. (What a part's
  // weights and the other part's terms yield is not used.)
  static DEV int part_of(int chain, bool second) {
    return TID / WAVE * OWN_PARTS + chain * HALVES + (HALVES > 1 && second);
  }
  // The block's experts, which may be fewer than it has waves.
  static DEV int expert_of(int rank, int number) { return number * BLOCKS + rank; }
  static DEV void load_weights(const RouteArgs& a, int rank, Weights& w) {
    UNROLL for (int chain = 0; chain < CHAINS; chain++)
      UNROLL for (int block = 0; block < PART_BLOCKS; block++)
        UNROLL for (int h = 0; h < 2; h++) {
          const int expert = expert_of(rank, (HALVES > 1 ? 0 : h * 8) + LANE / 4);
          const int k = part_of(chain, h) * PART + block * K_BLOCK + LANE % 4 * 8;
          w[chain][block][h] = u32x4{0, 0, 0, 0};
          if (expert < a.n_experts) w[chain][block][h] = router_weights(a, expert, k);
        }
  }

  // Weights are loaded four words at once, and mma takes words of two rows in turn. So they change places, here and not
  // when each load ends.
  static DEV void arrange(Weights& w) {
    const u32 zero = unknown_zero();
    UNROLL for (int chain = 0; chain < CHAINS; chain++)
      UNROLL for (int block = 0; block < PART_BLOCKS; block++)
        UNROLL for (int h = 0; h < 2; h++)
          UNROLL for (int i = 0; i < 4; i++) w[chain][block][h][i] ^= zero;
  }

  // The wave's parts of the products of the row and the block's experts. Columns without a term are zeros.
  static DEV void multiply(const Weights& w, Shared& s) {
    const int g = LANE / 4, q = LANE % 4;
    const bool second = g >= ROUTER_TERMS;
    float sums[CHAINS][4] = {};
    u32x4 t[2][CHAINS];                  // of a block of each part; the next one's are on the way, but no more
    const auto load = [&](int block) {
      UNROLL for (int chain = 0; chain < CHAINS; chain++) {
        t[block % 2][chain] = u32x4{0, 0, 0, 0};
        if (g < ROUTER_TERMS * HALVES)
          t[block % 2][chain] = *term_at(s, g % ROUTER_TERMS, part_of(chain, second) * PART + block * K_BLOCK + q * 8);
      }
      asm volatile("" ::: "memory");
    };
    load(0);
    UNROLL for (int block = 0; block < PART_BLOCKS; block++) {
      if (block + 1 < PART_BLOCKS) load(block + 1);
      UNROLL for (int half = 0; half < 2; half++)
        UNROLL for (int chain = 0; chain < CHAINS; chain++)
          multiply_half(sums[chain], w[chain][block][0], w[chain][block][1], t[block % 2][chain], half);
    }
    UNROLL for (int chain = 0; chain < CHAINS; chain++) {
      const float* const d = sums[chain];                  // lane 4 g + q has columns 2 q and 2 q + 1
      const float next[3] = {shfl(d[0], LANE + 1), shfl(d[2], LANE + 1), shfl(d[3], LANE + 1)};
      if (q == 0) s.parts[g][part_of(chain, false)] = part_sum(d[0], d[1], next[0]);
      if (HALVES > 1 && q == 1) s.parts[g][part_of(chain, true)] = part_sum(d[3], next[1], next[2]);
      if (HALVES == 1 && q == 0) s.parts[g + 8][part_of(chain, false)] = part_sum(d[2], d[3], next[1]);
    }
    barrier();
  }
  // Adds the parts of one of the block's experts; a lane of four has a quarter of them.
  static DEV float logit_of(const Shared& s, int number, float bias) {
    const int quarter = LANE % QUARTERS;
    float parts[PARTS];
    UNROLL for (int i = 0; i < PARTS; i += 4) {
      const f32x4 v = *(const f32x4*)&s.parts[number][quarter * PARTS + i];
      UNROLL for (int j = 0; j < 4; j++) parts[i + j] = v[j];
    }
    float sum = parts[0];
    UNROLL for (int part = 1; part < PARTS; part++) sum = add_rn(sum, parts[part]);
    float logit = shfl(sum, LANE - quarter);
    UNROLL for (int i = 1; i < QUARTERS; i++) logit = add_rn(logit, shfl(sum, LANE - quarter + i));
    return add_rn(logit, bias);
  }

  // Picks the experts of row `row` when their logits have come. By one wave.
  static DEV void pick(const NormRouteArgs& a, int rank, int row, Shared& s) {
    const RouteArgs& r = a.route;
    barrier_wait_cluster(shared_address(&s.arrived), 0);
    u32 claims[EXPERTS / WAVE];
    UNROLL for (int i = 0; i < EXPERTS / WAVE; i++) {
      const int expert = i * WAVE + LANE;
      claims[i] = expert < r.n_experts ? claim_of(__builtin_bit_cast(float, s.logits[expert])) : 0;
    }
    const int picked = pick_by_wave(r.k, claims), place = place_by_wave(r.k, picked);
    if (a.picks && rank == BLOCKS - 1) {
      const u32 picks = __reduce_xor_sync(~0u, LANE < r.k ? (picked ^ 255u) << 8 * place : 0);
      if (LANE == 0) add(a.picks, ONE + (NO_PICKS ^ picks));
    }
    if (LANE < r.k) s.picks[LANE] = picked;
    if (!a.sends || rank == 0) share_by_wave(r, row, picked, place, __builtin_bit_cast(float, s.logits[picked]));
  }

  // Writes slots and counts, and copies this block's share of the row to the slots; all threads know the picks. The
  // first block has the shares to compute.
  static DEV void send_alone(const NormRouteArgs& a, int rank, Shared& s) {
    const int k = a.route.k;
    if (rank == 1) place_alone<THREADS>(a, s.picks);
    const GatherArgs& g = a.gather;
    for (int i = TID * (BLOCKS - 1) + rank - 1; i < g.k_blocks * SLAB / 8 * k; i += THREADS * (BLOCKS - 1)) {
      const int piece = i / k;
      float v[8] = {};
      UNROLL for (int term = ROUTER_TERMS - 1; term >= 0; term--) {
        const u32x4 packed = *term_at(s, term, piece * 8);
        UNROLL for (int j = 0; j < 8; j++) v[j] += from_16<FORMAT_BF16>((u16)(packed[j / 2] >> j % 2 * 16));
      }
      u16* at = g.out + tiled_index(i % k * slots_of(1), piece * 8, g.out_rows);
      store_terms8(a.norm.format, at, g.out_term, 1, v);
    }
  }

  static DEV void run(const NormRouteArgs& a, Shared& s) {
    const NormArgs& n = a.norm;
    const RouteArgs& r = a.route;
    const int rank = BID % BLOCKS, cluster = BID / BLOCKS, clusters = GRID / BLOCKS;
    const u32 arrived = shared_address(&s.arrived);
    if (TID == 0) barrier_init(arrived, 1), barrier_init_done();
    // Four threads have a logit to send, of one of the block's experts; with a single row they send it to all blocks.
    const int number = TID / QUARTERS, expert = expert_of(rank, number);
    const bool sends = number < WAVES;
    const float bias = sends && expert < r.n_experts ? r.bias[expert] : 0.f;
    Weights w;
    load_weights(r, rank, w);
    if (BID == 0 && TID * 32 < n.hidden) prefetch_l2(n.weight + TID * 32);
    if (a.picks && BID == 0) {
      if (TID == 0) *a.picks = 0 - (BLOCKS + 1) * ONE, fence_device();
      barrier();
    }
    cluster_arrive();
    let_successor_start();
    const int rows = load_fresh(&n.step.header->rows);
    const int mine = rows <= cluster ? 0 : (rows - cluster - 1) / clusters + 1;
    const bool picks = a.sends ? mine > 0 : rank < mine;
    const int picked = a.sends ? 0 : rank;
    cluster_wait();
    if (TID == 0 && picks) barrier_arrive_expect(arrived, r.n_experts * 4);
    after_predecessor();
    if (mine == 0) {
      if (a.picks && BID == 0 && TID == 0) add(a.picks, (BLOCKS + 1) * ONE + NO_PICKS);
      return;
    }
    const auto row_of = [&](int turn) { return cluster + turn * clusters; };
    Row x;
    load(n, n.x + (i64)row_of(0) * n.hidden, x);
    barrier();                           // that weights are arranged behind the loads, not before
    arrange(w);
    for (int turn = 0; turn < mine; turn++) {
      norm(n, row_of(turn), turn, rank, x, s);
      if (turn + 1 < mine) load(n, n.x + (i64)row_of(turn + 1) * n.hidden, x);
      multiply(w, s);
      if (a.picks && TID == THREADS - WAVE) add_release(a.picks, ONE);
      if (!sends) continue;
      const float logit = logit_of(s, number, bias);
      UNROLL for (int i = 0; i < BLOCKS; i += QUARTERS) {
        const int to = i + LANE % QUARTERS;
        const u32 at = address_in(shared_address(&s.logits[expert]), to), bar = address_in(arrived, to);
        if (expert < r.n_experts && (a.sends || to == turn)) send(at, __builtin_bit_cast(u32, logit), bar);
      }
    }
    if (!picks) return;
    if (TID < WAVE) pick(a, rank, row_of(picked), s);
    if (!a.sends || rank == 0) return;
    barrier();
    send_alone(a, rank, s);
  }
};

#define NORM_ROUTE(name, threads, blocks, cluster)                             \
  CLUSTER_KERNEL(name, NormRouteArgs, threads, blocks, cluster) {              \
    SHARED NormRoute<threads, cluster>::Shared s;                              \
    NormRoute<threads, cluster>::run(a, s);                                    \
  }
