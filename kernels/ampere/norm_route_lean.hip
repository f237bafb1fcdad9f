// norm_route_lean: rmsnorm and route fused as in norm_route, to the bit, in `fast`, for at most as many rows as
// multiprocessors. A block runs its code once, and fetching it takes longer than running it: here the router's loop is
// rolled, with a wave for each two experts.
//
// Grid: one block per row of the bucket. The router's weights are BF16.
#include "../norm_route.h"

enum : int { THREADS = NORM_ROUTE_LEAN_THREADS, EXPERTS = 2 };  // of a wave
static_assert(THREADS / WAVE * EXPERTS == NORM_ROUTE_LEAN_MOST_EXPERTS, "each expert has a wave");
static_assert(THREADS >= NORM_THREADS && NORM_ROUTE_LEAN_MOST_HIDDEN == NORM_THREADS * 8,
              "a thread has one piece of the norm's, or none");

// The products of multiply_row() in route.h, in its order.
DEV void multiply_row(const RouteArgs& a, const float* in, Routing<1>& s) {
  const int first = TID / WAVE * EXPERTS;
  const u16* at[EXPERTS];
  UNROLL for (int e = 0; e < EXPERTS; e++)
    at[e] = (const u16*)a.w + (i64)(first + e < a.n_experts ? first + e : a.n_experts - 1) * a.hidden;
  TreeSums<float> sums = {};
  Piece next[EXPERTS];
  UNROLL for (int e = 0; e < EXPERTS; e++) next[e] = *(const Piece*)(at[e] + LANE * 8);
  ROLLED for (int k = LANE * 8; k < a.hidden; k += ROUTE_STEP) {
    u32x4 w[EXPERTS];
    UNROLL for (int e = 0; e < EXPERTS; e++) w[e] = __builtin_bit_cast(u32x4, next[e]);
    const int ahead = k + ROUTE_STEP < a.hidden ? k + ROUTE_STEP : k;
    UNROLL for (int e = 0; e < EXPERTS; e++) next[e] = *(const Piece*)(at[e] + ahead);
    UNROLL for (int half = 0; half < 2; half++) {
      const f32x4 t = *(const f32x4*)(in + k + half * 4);
      UNROLL for (int i = 0; i < 4; i++)
        UNROLL for (int e = 0; e < EXPERTS; e++)
          add_product(sums[0][e], from_16<FORMAT_BF16>((u16)(w[e][half * 2 + i / 2] >> i % 2 * 16)), t[i]);
    }
  }
  const float sum = wave_sums<ROUTE_TREE_ROWS * ROUTE_EXPERTS>(&sums[0][0]);
  if (LANE >= EXPERTS || first + LANE >= a.n_experts) return;
  const float logit = add_rn(sum, a.bias[first + LANE]);
  s.logits[0][first + LANE] = logit, s.orders[0][first + LANE] = order_of(logit);
}

KERNEL(norm_route_lean, NormRouteArgs, THREADS, 1, 1) {
  SHARED f32x4 row[NORM_ROUTE_LEAN_MOST_HIDDEN / 4];
  SHARED double scratch[THREADS / WAVE];
  SHARED Routing<1> s;
  float* t = (float*)row;
  let_successor_start();
  prefetch_router<THREADS>(a.route);
  const int index = prepare_norm(a.norm);
  after_predecessor();
  if (index < 0) return;
  norm_row(a.norm, BID, BID, scratch, [&](int k, const float* v) {
    UNROLL for (int j = 0; j < 8; j++) t[k + j] = v[j];
  });
  barrier();
  multiply_row(a.route, t, s);
  pick_experts<THREADS>(a.route, BID, 1, s);
  if (a.alone) send_alone<THREADS>(a, s, t);
}
