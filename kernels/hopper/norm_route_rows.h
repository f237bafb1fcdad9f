// Shared by the kernels norm_route_rows* and norm_route_pairs*: rmsnorm and route fused, for many rows, in `fast`. The
// router's input never leaves the multiprocessors. Results have the bits of the separate kernels.
//
// A block norms ROWS rows, a wave one, to its shared memory. Then each wave multiplies all rows there with EXPERTS
// experts. A lane keeps the sums of its own part of K of all these rows and experts in registers, so that what it loads
// serves many products: of 7 rows and 8 experts, 22 loads of 16 bytes serve 448 of them.
//
//   Weights   come to shared memory of the wave's own, RING steps of K ahead, a lane's to where the lane reads them. So
//             no wave waits for another one between the steps. Loads to registers came too late: all multiprocessors
//             ask for the same lines at about the same time.
//   Pairs     of blocks (a cluster) share their rows: each norms half of them to both, and has half of the experts. So
//             a multiprocessor reads half of the weights from the L2, which is the limit with 128 experts.
//   Picks     are a wave's work for a row, without a barrier.
//
// Grid: at most a block for each multiprocessor; they take the rows in turn. Of the arguments `norm` (with one term)
// and `route` (without `t32`; its weights are BF16) are used; nothing is added to x.
#pragma once
#include "../norm.h"
#include "../route.h"
#include "cluster.h"

enum : int {
  STEPS = NORM_WAVES,                    // what a wave of norm.h sums is a step of this one
  ROW_BYTES = STEPS * ROUTE_STEP * 4,
  MOST_EXPERTS = 128,
  EXPERTS_A_LANE = MOST_EXPERTS / WAVE,
  TREES = 16,                            // sums that a wave adds over its lanes at once
};

// The lane. Opaque, lest the compiler compute with it ahead of the loop over rows, and keep the results in registers.
DEV int lane_here() {
  int lane = LANE;
  asm volatile("" : "+r"(lane));
  return lane;
}

DEV u32 wave_most(u32 v) { return __reduce_max_sync(~0u, v); }
DEV int wave_least(int v) { return __reduce_min_sync(~0u, v); }
// Prefetches so many bytes, a multiple of 16, into the L2.
DEV void prefetch_l2(const void* p, u32 bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(p), "r"(bytes) : "memory");
}
// Copies 16 bytes to shared memory. When copies_wait() returns, the thread sees those of all its groups but the last
// LEFT; copies_commit() ends a group.
DEV void copy_async(u32 to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
DEV void copies_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int LEFT> DEV void copies_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory"); }
DEV u32x4 load_shared(u32 at) {
  u32x4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3]) : "r"(at) : "memory");
  return v;
}
// pack_f16 of finite values, and of NaN.
DEV u32 pack_finite(float low, float high) {
  u32 r;
  asm("cvt.rn.satfinite.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}

template <int ROWS, int CLUSTER, int THREADS, int EXPERTS, int RING> struct NormRouteRows {
  enum : int {
    ALL_ROWS = ROWS * CLUSTER,
    WAVES = THREADS / WAVE,
    STRIDE = WAVES * CLUSTER * EXPERTS,  // experts that a cluster has at once
    LOGITS_AT = ALL_ROWS * ROW_BYTES,
    RINGS_AT = LOGITS_AT + ROWS * MOST_EXPERTS * 4,
    RING_STEP = EXPERTS * WAVE * 16,
    SHARED_BYTES = RINGS_AT + WAVES * RING * RING_STEP,
  };
  static_assert(ROWS <= WAVES, "a wave a row");
  static_assert(TREES % EXPERTS == 0, "a lane has the sums of one expert");

  // A row normed: [step][first or second four of a lane's eight][lane]. Behind the row's end are zeros.
  static DEV f32x4* row_at(int row) { return (f32x4*)(DYNAMIC_SHARED + row * ROW_BYTES); }
  // Of one of the block's own rows.
  static DEV float* logits_at(int row) { return (float*)(DYNAMIC_SHARED + LOGITS_AT) + row * MOST_EXPERTS; }

  // Norms row `row` of the step to row `to` of all blocks of the cluster.
  static DEV void norm(const NormArgs& a, int row, int to) {
    const int lane = lane_here(), padded = (a.hidden + SLAB - 1) / SLAB * SLAB;
    float x[STEPS][8], w[STEPS][8], squares[STEPS];
    const auto load = [&](const float* from, float (*v)[8]) {
      UNROLL for (int step = 0; step < STEPS; step++) {
        const int k = step * ROUTE_STEP + lane * 8;
        UNROLL for (int j = 0; j < 8; j++) v[step][j] = 0;
        if (k < a.hidden) load8_aligned<FORMAT_F32>(from, k, v[step]);
      }
    };
    load(a.x + (i64)row * a.hidden, x);
    load(a.weight, w);
    UNROLL for (int step = 0; step < STEPS; step++) {
      squares[step] = 0;
      UNROLL for (int j = 0; j < 8; j++) squares[step] += mul_rn(x[step][j], x[step][j]);
    }
    // The steps' trees side by side, then the chain over their sums.
    UNROLL for (int step = 0; step < STEPS; step++) squares[step] = wave_sum(squares[step]);
    float sum = squares[0];
    UNROLL for (int step = 1; step < STEPS; step++) sum += squares[step];
    const float scale = inverse_root(sum, a.hidden);
    u32 at[CLUSTER];
    UNROLL for (int i = 0; i < CLUSTER; i++) {
      at[i] = shared_address(row_at(to) + lane);
      if (CLUSTER > 1) at[i] = address_in(at[i], i);
    }
    const bool packs = a.format == FORMAT_F16;
    float most = 0;
    UNROLL for (int step = 0; step < STEPS; step++) {
      const int k = step * ROUTE_STEP + lane * 8;
      const float here = k < a.hidden ? scale : 0.f;       // of a row that is not finite, too
      float t[8];
      UNROLL for (int j = 0; j < 8; j++) t[j] = w[step][j] * (here * x[step][j]), most = fmaxf(most, fabsf(t[j]));
      UNROLL for (int h = 0; h < 2; h++)
        UNROLL for (int i = 0; i < CLUSTER; i++)
          send(at[i] + (step * 2 + h) * WAVE * 16, f32x4{t[4 * h], t[4 * h + 1], t[4 * h + 2], t[4 * h + 3]});
      u32x4 packed;
      UNROLL for (int j = 0; j < 4; j++) packed[j] = pack_finite(t[2 * j], t[2 * j + 1]);
      if (packs && k < padded) *(u32x4*)(a.t + tiled_index(row, k, a.t_rows)) = packed;
    }
    if (packs && most < __builtin_inff()) return;
    ROLLED for (int k = lane * 8; k < padded; k += ROUTE_STEP) {
      float t[8];
      UNROLL for (int j = 0; j < 8; j++) t[j] = row_at(to)[(k / ROUTE_STEP * 2 + j / 4) * WAVE + lane][j % 4];
      u16* const tiled = a.t + tiled_index(row, k, a.t_rows);
      if (packs) store_terms8<FORMAT_F16>(tiled, a.t_term, 1, t);
      else store_terms8<FORMAT_BF16>(tiled, a.t_term, 1, t);
    }
  }

  // The weights of a wave's experts on their way. Beyond the last expert, the last one is repeated.
  struct Weights {
    const u16* first;                    // of the matrix
    int hidden;
    u32 experts[EXPERTS], ring;

    DEV void fetch(int step) const {
      const int k = step * ROUTE_STEP + LANE * 8;
      if (k < hidden)
        UNROLL for (int e = 0; e < EXPERTS; e++)
          copy_async(ring + step % RING * RING_STEP + e * WAVE * 16, first + k + experts[e]);
      copies_commit();
    }
    // Starts the first copies for experts from `expert` on.
    DEV void start(const RouteArgs& a, int expert) {
      first = (const u16*)a.w, hidden = a.hidden;
      ring = shared_address(DYNAMIC_SHARED + RINGS_AT + TID / WAVE * RING * RING_STEP + LANE * 16);
      UNROLL for (int e = 0; e < EXPERTS; e++) {
        experts[e] = min(expert + e, a.n_experts - 1) * a.hidden;
        asm volatile("" : "+r"(experts[e]));               // not to be computed again in each step
      }
      UNROLL for (int step = 0; step < RING; step++) fetch(step);
    }
    // A step's, whose place in the ring is for another step from then on.
    DEV void take(int step, u32x4* raw) const {
      copies_wait<RING - 1>();
      UNROLL for (int e = 0; e < EXPERTS; e++) raw[e] = load_shared(ring + step % RING * RING_STEP + e * WAVE * 16);
      fetch(step + RING);
    }
  };

  // A lane without elements in the last step adds products of zeros there.
  static DEV void multiply(const Weights& weights, float (*sums)[EXPERTS]) {
    const f32x4* t = row_at(0) + LANE;
    ROLLED for (int step = 0; step * ROUTE_STEP < weights.hidden; step++, t += 2 * WAVE) {
      const bool exists = step * ROUTE_STEP + LANE * 8 < weights.hidden;
      const u32 low = exists ? 0x1044 : 0x4444, high = exists ? 0x3244 : 0x4444;
      u32x4 raw[EXPERTS];
      weights.take(step, raw);
      UNROLL for (int half = 0; half < 2; half++) {
        float w[EXPERTS][4];
        UNROLL for (int e = 0; e < EXPERTS; e++)
          UNROLL for (int i = 0; i < 4; i++)
            w[e][i] = __builtin_bit_cast(float, __byte_perm(raw[e][half * 2 + i / 2], 0, i % 2 ? high : low));
        UNROLL for (int r = 0; r < ALL_ROWS; r++) {
          const f32x4 v = t[r * (ROW_BYTES / 16) + half * WAVE];
          UNROLL for (int i = 0; i < 4; i++)
            UNROLL for (int e = 0; e < EXPERTS; e++) add_product(sums[r][e], w[e][i], v[i]);
        }
      }
    }
  }

  // Adds the sums of all rows and experts from `first` on over the lanes, by the tree of finish_logits, and gives the
  // logits to the blocks whose rows they are. `bias` is that of expert first + LANE % EXPERTS.
  static DEV void finish(const RouteArgs& a, int first, float bias, const float* sums) {
    constexpr int COUNT = ALL_ROWS * EXPERTS;
    const u32 lane = lane_here();
    UNROLL for (int from = 0; from < COUNT; from += TREES) {
      float part[TREES];
      UNROLL for (int i = 0; i < TREES; i++) part[i] = from + i < COUNT ? sums[from + i] : 0.f;
      const float sum = wave_sums<TREES>(part);
      const u32 at = from + lane % TREES, row = at / EXPERTS, expert = first + at % EXPERTS;
      if (lane >= TREES || at >= COUNT || expert >= (u32)a.n_experts) continue;
      const u32 to = shared_address(logits_at(row % ROWS) + expert);
      send(CLUSTER > 1 ? address_in(to, row / ROWS) : to, add_rn(sum, bias));
    }
  }

  // Picks the experts of row `row`, and stores them with their shares, as pick_experts does.
  static DEV void pick(const RouteArgs& a, int row, const float* logits) {
    u32 orders[EXPERTS_A_LANE];                            // 0: not to be picked, or not again
    UNROLL for (int i = 0; i < EXPERTS_A_LANE; i++) {
      const int expert = i * WAVE + LANE;
      orders[i] = expert < a.n_experts ? order_of(logits[expert]) + 1 : 0;
    }
    int picked = 0;                                        // the lane's: lane `rank` has the one of that rank
    for (int rank = 0; rank < a.k; rank++) {
      u32 most = orders[0];
      UNROLL for (int i = 1; i < EXPERTS_A_LANE; i++) most = max(most, orders[i]);
      most = wave_most(most);
      int expert = MOST_EXPERTS;
      UNROLL for (int i = EXPERTS_A_LANE - 1; i >= 0; i--) expert = orders[i] == most ? i * WAVE + LANE : expert;
      expert = wave_least(expert);
      UNROLL for (int i = 0; i < EXPERTS_A_LANE; i++) orders[i] = i * WAVE + LANE == expert ? 0 : orders[i];
      picked = LANE == rank ? expert : picked;
    }
    const float logit = logits[picked];
    const float exponential = exp_f32((float)((double)logit - (double)shfl(logit, 0)));
    double sum = 0;
    int place = 0;
    for (int i = 0; i < a.k; i++) sum += (double)shfl(exponential, i), place += shfl(picked, i) < picked;
    if (LANE >= a.k) return;
    const i64 at = (i64)row * a.k + place;
    a.experts[at] = picked;
    a.shares[at] = (float)((double)exponential / sum);
  }

  // What the cluster's blocks have written is seen by all of them.
  static DEV void meet() {
    if (CLUSTER > 1) cluster_barrier();
    else barrier();
  }

  // The weights leave DRAM while the rows are normed.
  static DEV void prefetch(const NormRouteArgs& a) {
    if (BID < a.route.n_experts && TID == 0)
      prefetch_l2((const u16*)a.route.w + (i64)BID * a.route.hidden, a.route.hidden * 2);
    if (BID == 0 && TID == WAVE) prefetch_l2(a.norm.weight, a.norm.hidden * 4);
  }

  static DEV void run(const NormRouteArgs& a) {
    const NormArgs& n = a.norm;
    const RouteArgs& r = a.route;
    const int rank = BID % CLUSTER, wave = TID / WAVE, expert = (wave * CLUSTER + rank) * EXPERTS;
    const int rows = load_fresh(&n.step.header->rows), turn = GRID * ROWS;
    int own = BID * ROWS;                // the block's first row
    Weights weights;
    if (CLUSTER > 1) cluster_arrive();
    let_successor_start();
    prefetch(a);
    const auto follow = [&](int next) {
      if (next < r.n_experts) weights.start(r, next);
    };
    if (own - rank * ROWS < rows) follow(expert);
    after_predecessor();
    if (CLUSTER > 1) cluster_wait();
    for (; own - rank * ROWS < rows; own += turn) {
      if (wave < ROWS && own + wave < rows) norm(n, own + wave, rank * ROWS + wave);
      meet();
      const bool again = own - rank * ROWS + turn < rows;
      if (TID < ROWS && own + turn + TID < rows)
        prefetch_l2(n.x + (i64)(own + turn + TID) * n.hidden, n.hidden * 4);
      ROLLED for (int first = expert; first < r.n_experts; first += STRIDE) {
        const float bias = r.bias[min(first + LANE % EXPERTS, r.n_experts - 1)];
        float sums[ALL_ROWS][EXPERTS] = {};
        multiply(weights, sums);
        if (first + STRIDE < r.n_experts) follow(first + STRIDE);
        else if (again) follow(expert);
        finish(r, first, bias, &sums[0][0]);
      }
      meet();
      if (wave < ROWS && own + wave < rows) pick(r, own + wave, logits_at(wave));
    }
  }
};

#define NORM_ROUTE_ROWS(NAME, NAMES, EXPERTS, RING)                                                         \
  CLUSTER_KERNEL(NAME, NormRouteArgs, NAMES##_THREADS, 1, NAMES##_CLUSTER) {                                \
    using Rows = NormRouteRows<NAMES##_PER_BLOCK, NAMES##_CLUSTER, NAMES##_THREADS, EXPERTS, RING>;         \
    static_assert(Rows::SHARED_BYTES == NAMES##_SHARED_BYTES, "rows, logits and rings");                    \
    static_assert(NAMES##_MOST_EXPERTS <= MOST_EXPERTS, "logits have places");                              \
    Rows::run(a);                                                                                           \
  }
