// norm_route_lean: rmsnorm and route fused as in norm_route, to the bit, in `fast`, for at most as many rows as
// multiprocessors. A row takes as long as its chains of loads and the fetching of its code, which runs once. So loads
// do not wait for each other, half of the router is on the way to registers before the norm begins, and nothing is
// served that such a step has not: nothing is to be added to x, `select` and `exact` are 0, and there is one term.
//
// Work   A thread has a piece of eight elements of the row, or none, and a wave two experts, as in multiply_row() of
//        route.h, in its order. The first wave picks, an expert a lane.
// Grid   one block per row of the bucket. The router's weights are BF16.
#include "../norm_route.h"

enum : int { THREADS = NORM_ROUTE_LEAN_THREADS, EXPERTS = 2 };  // of a wave
static_assert(THREADS / WAVE * EXPERTS == NORM_ROUTE_LEAN_MOST_EXPERTS, "each expert has a wave");
static_assert(NORM_ROUTE_LEAN_MOST_EXPERTS <= WAVE, "each expert has a lane of the first wave");
static_assert(THREADS >= NORM_THREADS && NORM_ROUTE_LEAN_MOST_HIDDEN == NORM_THREADS * 8,
              "a thread has one piece of the norm's, or none");

// A lane's pieces of its wave's experts: those of half a row on their way to registers, the others to L2.
struct RouterRows {
  enum : int { AHEAD = NORM_ROUTE_LEAN_MOST_HIDDEN / ROUTE_K_TILE / 2 };
  const u16* at[EXPERTS];
  Piece pieces[AHEAD][EXPERTS];

  DEV RouterRows(const RouteArgs& a) {
    UNROLL for (int e = 0; e < EXPERTS; e++)
      at[e] = (const u16*)a.w + (i64)min(TID / WAVE * EXPERTS + e, a.n_experts - 1) * a.hidden;
    UNROLL for (int i = 0; i < AHEAD; i++) load(i, LANE * 8 + i * ROUTE_K_TILE, a.hidden);
    const int k = AHEAD * ROUTE_K_TILE + LANE * 64;        // 128 bytes
    UNROLL for (int e = 0; e < EXPERTS; e++)
      if (k < a.hidden) prefetch_l2(at[e] + k);
  }
  DEV void load(int i, int k, int hidden) {
    UNROLL for (int e = 0; e < EXPERTS; e++)
      if (k < hidden) pieces[i][e] = *(const Piece*)(at[e] + k);
  }
};

DEV void multiply_row(const RouteArgs& a, const float* in, RouterRows& rows, float* logits) {
  const int expert = TID / WAVE * EXPERTS + LANE;
  const float bias = LANE < EXPERTS && expert < a.n_experts ? a.bias[expert] : 0.f;
  TreeSums<float> sums = {};
  ROLLED for (int begin = LANE * 8; begin < a.hidden; begin += RouterRows::AHEAD * ROUTE_K_TILE)
    UNROLL for (int i = 0; i < RouterRows::AHEAD; i++) {
      const int k = begin + i * ROUTE_K_TILE;
      if (k >= a.hidden) break;
      u32x4 w[EXPERTS];
      UNROLL for (int e = 0; e < EXPERTS; e++) w[e] = __builtin_bit_cast(u32x4, rows.pieces[i][e]);
      rows.load(i, k + RouterRows::AHEAD * ROUTE_K_TILE, a.hidden);
      UNROLL for (int half = 0; half < 2; half++) {
        const f32x4 t = *(const f32x4*)(in + k + half * 4);
        UNROLL for (int j = 0; j < 4; j++)
          UNROLL for (int e = 0; e < EXPERTS; e++)
            add_product(sums[0][e], from_16<FORMAT_BF16>((u16)(w[e][half * 2 + j / 2] >> j % 2 * 16)), t[j]);
      }
    }
  const float sum = wave_sums<ROUTE_TREE_ROWS * ROUTE_EXPERTS>(&sums[0][0]);
  if (LANE < EXPERTS && expert < a.n_experts) logits[expert] = add_rn(sum, bias);
}

// Lane i gets the expert of the i-th largest logit. Of equal ones the lower expert comes first.
DEV int pick_largest(float logit, int n_experts, int k) {
  u32 order = LANE < n_experts ? order_of(logit) + 1 : 0;  // no order is the largest number
  int pick = 0;
  ROLLED for (int i = 0; i < k; i++) {
    const int expert = __ffs(__ballot_sync(~0u, order == __reduce_max_sync(~0u, order))) - 1;
    if (LANE == expert) order = 0;
    if (LANE == i) pick = expert;
  }
  return pick;
}

// The first wave's: stores the picks in order of the experts, and their shares, by the sums of share_experts() in
// route.h; of a single row also where its experts find it, as place_alone() does.
DEV void store_picks(const NormRouteArgs& a, float logit) {
  const int k = a.route.k, n = a.route.n_experts;
  const int mine = pick_largest(logit, n, k);
  const float of_pick = shfl(logit, mine), largest = shfl(of_pick, 0);
  const float exponential = exp_f32((float)((double)of_pick - (double)largest));
  double sum = 0;
  int place = 0, before = 0, here = 0;
  ROLLED for (int i = 0; i < k; i++) {
    const int pick = shfl(mine, i);
    sum += (double)shfl(exponential, i);
    place += pick < mine, before += pick < LANE, here += pick == LANE;
  }
  if (LANE < k) {
    const i64 at = (i64)BID * k + place;
    a.route.experts[at] = mine;
    a.route.shares[at] = (float)((double)exponential / sum);
  }
  if (!a.sends) return;
  if (LANE < n) a.sort.offsets[LANE] = before * slots_of(1), a.sort.counts[LANE] = here;
  if (LANE == 0) a.sort.offsets[n] = k * slots_of(1);
  if (LANE < k) a.sort.slots[LANE] = LANE * slots_of(1);
}

template <int FORMAT> DEV void store_row(const NormRouteArgs& a, int k, float (&t)[8]) {
  u32x4 packed;
  UNROLL for (int j = 0; j < 8; j += 2) packed[j / 2] = leading_terms<FORMAT>(t[j], t[j + 1]);
  *(u32x4*)(a.norm.t + tiled_index(BID, k, a.norm.t_rows)) = packed;
  if (!a.sends) return;
  ROLLED for (int i = 0; i < a.route.k; i++)
    *(u32x4*)(a.gather.out + tiled_index(i * slots_of(1), k, a.gather.out_rows)) = packed;
}

KERNEL(norm_route_lean, NormRouteArgs, THREADS, 1, 1) {
  SHARED f32x4 row[NORM_ROUTE_LEAN_MOST_HIDDEN / 4];
  SHARED float scratch[THREADS / WAVE], logits[NORM_ROUTE_LEAN_MOST_EXPERTS];
  const NormArgs& n = a.norm;
  const int k = TID * 8;
  const bool exists = k < n.hidden;
  float* const t = (float*)row;
  let_successor_start();
  const int rows = load_fresh(&n.step.header->rows);
  float w[8] = {}, x[8] = {};
  if (exists) load8_aligned<FORMAT_F32>(n.weight, k, w);
  RouterRows router(a.route);
  after_predecessor();
  if (exists) load8_aligned<FORMAT_F32>(n.x + (i64)BID * n.hidden, k, x);  // x has room for the bucket's rows
  if (BID >= rows) return;
  const float scale = inverse_root(block_sum<NORM_WAVES>(sum_of_squares(x), scratch), n.hidden);
  if (k < (n.hidden + SLAB - 1) / SLAB * SLAB) {
    float normed[8];
    norm_piece(x, w, scale, exists, normed);
    UNROLL for (int j = 0; j < 8; j++) t[k + j] = normed[j];
    if (n.format == FORMAT_F16) store_row<FORMAT_F16>(a, k, normed);
    else store_row<FORMAT_BF16>(a, k, normed);
  }
  barrier();
  multiply_row(a.route, t, router, logits);
  barrier();
  if (TID < WAVE) store_picks(a, LANE < a.route.n_experts ? logits[LANE] : 0.f);
}
