// norm_route: rmsnorm and route fused, for at most as many rows as multiprocessors; for a single row sort and gather
// are fused, too. With few rows a step takes as long as its launches.
//
// The router reads the row from shared memory, and prefetches ROUTE_AHEAD K tiles of its weights to registers. Results
// have the same bits as those of the separate kernels. A single row's experts have a slot each, GROUP_ALIGN apart.
//
// Grid: one block per row of the bucket. Limits are those of norm.h and route.h. `norm.t32` and `route.t32` are unused;
// `sort` and `gather` are used only if the bucket is of one row (`sends`).
#include "norm_route.h"
static_assert(NORM_ROUTE_THREADS == NORM_THREADS, "norm.h counts with them");

KERNEL(norm_route, NormRouteArgs, NORM_ROUTE_THREADS, 1, 2) {
  SHARED f32x4 row[NORM_MOST_HIDDEN / 4];
  SHARED double scratch[NORM_WAVES];
  SHARED Routing<1> s;
  float* t = (float*)row;
  let_successor_start();
  prefetch_router<NORM_THREADS>(a.route);
  const int index = prepare_norm(a.norm);
  after_predecessor();
  if (index < 0) return;
  norm_row(a.norm, BID, BID, scratch, [&](int k, const float* v) {
    UNROLL for (int j = 0; j < 8; j++) t[k + j] = v[j];
  });
  barrier();
  route_row<NORM_THREADS>(a.route, t, BID, s);
  if (a.sends) send_alone<NORM_THREADS>(a, s, t);
}
