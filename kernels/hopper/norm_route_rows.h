// Shared by the kernels norm_route_rows*: rmsnorm and route fused, for many rows, in `fast`. The router's input never
// leaves the multiprocessor: a block holds ROWS rows of it in shared memory, and multiplies without a barrier between
// the steps of K. Results have the bits of the separate kernels.
//
// Grid: rows of the bucket / ROWS, rounded up. Of the arguments `norm` (see norm_rows.h) and `route` (without `t32`;
// its weights are BF16) are used. At most MAX_EXPERTS experts, MAX_K of them per token.
#pragma once
#include "../route.h"
#include "norm_rows.h"

template <int ROWS, int THREADS> struct NormRouteRows {
  enum : int {
    WAVES = THREADS / WAVE,
    WAVES_A_ROW = WAVES / ROWS,
    EXPERTS = 4,                         // of a wave
  };
  static_assert(WAVES_A_ROW * ROWS == WAVES && ROW_STEPS % WAVES_A_ROW == 0, "waves have equal shares of the rows");
  static_assert(ROUTE_STEP == ROW_STEP, "the steps of route");

  static DEV void multiply(const RouteArgs& a, const Piece* stage, Routing<ROWS>& s) {
    for (int first = TID / WAVE * EXPERTS; first < a.n_experts; first += WAVES * EXPERTS) {
      float sums[ROWS][EXPERTS] = {};
      RawWeights<FORMAT_BF16> raw[EXPERTS], next[EXPERTS];
      load_experts<FORMAT_BF16, EXPERTS>(a, first, LANE * 8, next);
      for (int step = 0; step * ROUTE_STEP < a.hidden; step++) {
        const int k = step * ROUTE_STEP + LANE * 8;
        UNROLL for (int e = 0; e < EXPERTS; e++) raw[e] = next[e];
        load_experts<FORMAT_BF16, EXPERTS>(a, first, k + ROUTE_STEP, next);
        if (k < a.hidden)
          multiply_step<float, FORMAT_BF16, EXPERTS, ROWS, ROW_PIECES>(raw, stage + step * 2 * WAVE, sums);
      }
      finish_rows<float, EXPERTS>(a, sums, first, s);
    }
  }

  static DEV void run(const NormRouteArgs& a, Routing<ROWS>& routing) {
    const int mine = TID / WAVE / WAVES_A_ROW, part = TID / WAVE % WAVES_A_ROW;
    let_successor_start();
    // A row's mbarrier, and what its waves exchange, lie where its logits will be, which are written behind a barrier.
    float* const logits = routing.logits[mine];
    const RowInShared s = {(f32x4*)(DYNAMIC_SHARED + mine * ROW_BYTES), nullptr, shared_address(logits)};
    if (part == 0) s.prepare();
    const int first = BID * ROWS, rows = min(load_fresh(&a.norm.step.header->rows) - first, (int)ROWS);
    barrier();
    after_predecessor();
    if (rows <= 0) return;
    if (mine < rows) {
      if (part == 0) fetch_row<false>(a.norm, first + mine, s);
      norm_by_waves<false, true, WAVES_A_ROW>(a.norm, first + mine, part, s, logits + 2);
    } else if (WAVES_A_ROW > 1) {
      barrier();                                           // the one in which the rows' waves meet
    }
    if (part == 0) s.discard();
    barrier();
    multiply(a.route, (const Piece*)DYNAMIC_SHARED, routing);
    pick_experts<THREADS>(a.route, first, rows, routing);
  }
};

// BLOCKS: of a multiprocessor.
#define NORM_ROUTE_ROWS(NAME, ROWS, THREADS, BLOCKS, SHARED_BYTES)                        \
  static_assert(SHARED_BYTES == ROWS * ROW_BYTES, "all of the block's rows");              \
  KERNEL(NAME, NormRouteArgs, THREADS, BLOCKS, 0) {                                        \
    SHARED alignas(8) Routing<ROWS> routing;                                               \
    NormRouteRows<ROWS, THREADS>::run(a, routing);                                         \
  }
