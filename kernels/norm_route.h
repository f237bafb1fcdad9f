// Shared by kernels that fuse rmsnorm and route, of blocks of THREADS threads.
#pragma once
#include "expert_slots.h"
#include "norm.h"
#include "route.h"

// Writes slots and counts, and copies the row to the slots; all threads know the chosen experts.
template <int THREADS> DEV void send_alone(const NormRouteArgs& a, const Routing<1>& s, const float* t) {
  const int k = a.route.k;
  place_alone<THREADS>(a, s.picks[0]);
  const GatherArgs& g = a.gather;
  for (int i = TID; i < g.k_blocks * SLAB / 8 * k; i += THREADS) {
    float v[8];
    UNROLL for (int j = 0; j < 8; j++) v[j] = t[i / k * 8 + j];
    u16* at = g.out + tiled_index(i % k * slots_of(1), i / k * 8, g.out_rows);
    store_terms8(a.norm.format, at, g.out_term, g.terms, v);
  }
}

// Prefetches the router's weights to L2 before the predecessor ends: other weights have evicted them since the last
// step.
template <int THREADS> DEV void prefetch_router(const RouteArgs& a) {
  const i64 bytes = (i64)a.n_experts * a.hidden * (a.format == FORMAT_F32 ? 4 : 2);
  for (i64 at = (i64)(BID * THREADS + TID) * 128; at < bytes; at += (i64)GRID * THREADS * 128)
    prefetch_l2((const u8*)a.w + at);
}
