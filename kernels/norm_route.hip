// norm_route: rmsnorm and route fused, for at most as many rows as multiprocessors; for a single row sort and gather
// are fused, too. With few rows a step takes as long as its launches.
//
// The router reads the row from shared memory, and prefetches ROUTE_AHEAD steps of its weights to registers. Results
// have the same bits as those of the separate kernels. A single row's experts have a slot each, GROUP_ALIGN apart.
//
// Grid: one block per row of the bucket. Limits are those of norm.h and route.h. `norm.t32` and `route.t32` are unused;
// `sort` and `gather` are used only if the bucket is of one row (`alone`).
#include "expert_slots.h"
#include "norm.h"
#include "route.h"
static_assert(NORM_ROUTE_THREADS == NORM_THREADS, "norm.h counts with them");

// Writes slots and counts, and copies the row to the slots; all threads know the chosen experts.
DEV void send_alone(const NormRouteArgs& a, const Routing<1>& s, const float* t) {
  const int k = a.route.k, *picks = s.picks[0];
  for (int e = TID; e <= a.route.n_experts; e += NORM_THREADS) {
    int before = 0, here = 0;
    for (int i = 0; i < k; i++) before += picks[i] < e, here += picks[i] == e;
    a.sort.offsets[e] = before * slots_of(1);
    if (e < a.route.n_experts) a.sort.counts[e] = here;
  }
  if (TID < k) a.sort.slots[TID] = TID * slots_of(1);
  const GatherArgs& g = a.gather;
  for (int i = TID; i < g.k_blocks * SLAB / 8 * k; i += NORM_THREADS) {
    float v[8];
    UNROLL for (int j = 0; j < 8; j++) v[j] = t[i / k * 8 + j];
    u16* at = g.out + tiled_index(i % k * slots_of(1), i / k * 8, g.out_rows);
    if (a.norm.format == FORMAT_F16) store_terms8<FORMAT_F16>(at, g.out_term, g.terms, v);
    else store_terms8<FORMAT_BF16>(at, g.out_term, g.terms, v);
  }
}

// Prefetches the router's weights to L2 before the predecessor ends: other weights have evicted them since the last
// step.
DEV void prefetch_router(const RouteArgs& a) {
  const i64 bytes = (i64)a.n_experts * a.hidden * (a.format == FORMAT_F32 ? 4 : 2);
  for (i64 at = (i64)(BID * NORM_THREADS + TID) * 128; at < bytes; at += (i64)GRID * NORM_THREADS * 128)
    prefetch_l2((const u8*)a.w + at);
}

KERNEL(norm_route, NormRouteArgs, NORM_ROUTE_THREADS, 1, 2) {
  SHARED f32x4 row[NORM_MOST_HIDDEN / 4];
  SHARED double scratch[NORM_WAVES];
  SHARED Routing<1> s;
  float* t = (float*)row;
  let_successor_start();
  prefetch_router(a.route);
  const int index = prepare_norm(a.norm);
  after_predecessor();
  if (index < 0) return;
  norm_row(a.norm, BID, BID, scratch, [&](int k, const float* v) {
    UNROLL for (int j = 0; j < 8; j++) t[k + j] = v[j];
  });
  barrier();
  route_row<NORM_THREADS>(a.route, t, BID, s);
  if (a.alone) send_alone(a, s, t);
}
