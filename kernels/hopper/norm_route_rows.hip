// norm_route_rows: rmsnorm and route fused, for many rows, in `fast`. The router's input never leaves the
// multiprocessor: a block holds ROUTE_ROWS rows of it in shared memory, and multiplies without a barrier between the
// steps of K. Results have the bits of the separate kernels.
//
// Grid: rows of the bucket / ROUTE_ROWS, rounded up. Of the arguments `norm` (see norm_rows.h) and `route` (without
// `t32`; its weights are BF16) are used. At most MAX_EXPERTS experts, MAX_K of them per token.
#include "../route.h"
#include "norm_rows.h"

enum : int {
  THREADS = NORM_ROUTE_ROWS_THREADS,
  EXPERTS = 4,                           // of a wave
};
static_assert(THREADS == ROUTE_ROWS * WAVE && ROUTE_STEP == ROW_STEP, "a wave a row, and the steps of route");
static_assert(NORM_ROUTE_ROWS_SHARED_BYTES == ROUTE_ROWS * ROW_BYTES, "all of the block's rows");

DEV void multiply_held(const RouteArgs& a, const Piece* stage, Routing<ROUTE_ROWS>& s) {
  for (int first = TID / WAVE * EXPERTS; first < a.n_experts; first += THREADS / WAVE * EXPERTS) {
    float sums[ROUTE_ROWS][EXPERTS] = {};
    RawWeights<FORMAT_BF16> raw[EXPERTS], next[EXPERTS];
    load_experts<FORMAT_BF16, EXPERTS>(a, first, LANE * 8, next);
    for (int step = 0; step * ROUTE_STEP < a.hidden; step++) {
      const int k = step * ROUTE_STEP + LANE * 8;
      UNROLL for (int e = 0; e < EXPERTS; e++) raw[e] = next[e];
      load_experts<FORMAT_BF16, EXPERTS>(a, first, k + ROUTE_STEP, next);
      if (k < a.hidden)
        multiply_step<float, FORMAT_BF16, EXPERTS, ROW_PIECES>(raw, stage + step * 2 * WAVE, sums);
    }
    finish_rows<float, EXPERTS>(a, sums, first, s);
  }
}

KERNEL(norm_route_rows, NormRouteArgs, THREADS, 2, 0) {
  SHARED alignas(8) Routing<ROUTE_ROWS> routing;
  const int wave = TID / WAVE;
  let_successor_start();
  // The mbarriers lie where the routing will be written, behind a barrier of the block.
  const RowInShared s = {(f32x4*)(DYNAMIC_SHARED + wave * ROW_BYTES), nullptr,
                         shared_address(&routing.logits[wave][0])};
  s.prepare();
  const int first = BID * ROUTE_ROWS, rows = min(load_fresh(&a.norm.step.header->rows) - first, (int)ROUTE_ROWS);
  after_predecessor();
  if (rows <= 0) return;
  if (wave < rows) {
    fetch_row<false>(a.norm, first + wave, s);
    norm_by_waves<false, true, 1>(a.norm, first + wave, 0, s, nullptr);
  }
  s.discard();
  barrier();
  multiply_held(a.route, (const Piece*)DYNAMIC_SHARED, routing);
  pick_experts<THREADS>(a.route, first, rows, routing);
}
