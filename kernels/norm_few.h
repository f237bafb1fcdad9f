// rmsnorm of norm.h with the experts' outputs, for few rows, in `fast`. A row takes as long as its chain of loads
// there, so all that does not depend on the row's slots is loaded at once, and then all outputs. Where kernels overlap,
// all but the outputs is in registers before the predecessor ends: kernels before the experts' products have written
// it. The bits are those of norm.h.
//
// hidden is at most NORM_THREADS * 8 and a multiple of 8, a row has at most NORM_FEW_MOST_EXPERTS_PER_TOKEN experts.
// `select`, `t32` and `exact` are not served, there is one term, and y is FP16. A block has as many threads or more.
#pragma once
#include "norm.h"

static_assert(NORM_THREADS * 8 == NORM_FEW_MOST_HIDDEN, "a piece a thread");

// Row `row` of x with the experts' outputs, which becomes that of `sums`, and its norm. Within one launch `k` is 0
// where there are no outputs, `sums` may be NULL, and `select` is -1 where x is of the launch before. Calls use(k, t)
// with each piece of the norm, also with the zeros after the row's end. `scratch` has a float for each wave.
template <class Use> DEV void norm_few(const NormArgs& a, int row, float* sums, float* scratch, Use use) {
  constexpr int EXPERTS = NORM_FEW_MOST_EXPERTS_PER_TOKEN;
  const int k = TID * 8;
  const bool exists = k < a.hidden;
  let_successor_start();
  const int rows = load_fresh(&a.step.header->rows);
  float w[8] = {}, x[8] = {}, shares[EXPERTS] = {};
  const u16* y[EXPERTS] = {};
  float* at = a.x + (i64)row * a.hidden + k;
  if (row < rows && exists) {
    load8_aligned<FORMAT_F32>(a.weight, k, w);
    if (WITHIN_LAUNCH && a.select < 0) load8_aligned<FORMAT_F32>(at, 0, x);
    else take8(at, x);
    UNROLL for (int i = 0; i < EXPERTS; i++)
      if (i < a.k) {
        y[i] = (const u16*)a.y + (i64)take(a.slots + (i64)row * a.k + i) * a.hidden + k;
        shares[i] = take(a.shares + (i64)row * a.k + i);
      }
  }
  after_predecessor();
  if (row >= rows) return;
  if (exists) {
    u32x4 packed[EXPERTS];
    if (WITHIN_LAUNCH) UNROLL for (int i = 0; i < EXPERTS; i++) packed[i] = u32x4{};   // else they live from row to row
    for (;;) {
      UNROLL for (int i = 0; i < EXPERTS; i++)
        if (i < a.k) packed[i] = peek((const u32x4*)y[i]);
      bool all = true;
      UNROLL for (int i = 0; i < EXPERTS; i++)
        if (i < a.k) all &= is_there(packed[i]);
      if (all) break;
      still_wait();
    }
    float sum[8] = {};
    UNROLL for (int i = 0; i < EXPERTS; i++)
      if (i < a.k)
        UNROLL for (int j = 0; j < 8; j++)
          sum[j] = fma_rn(shares[i], from_16<FORMAT_F16>((u16)(packed[i][j / 2] >> j % 2 * 16)), sum[j]);
    if (!WITHIN_LAUNCH || a.k) UNROLL for (int j = 0; j < 8; j++) x[j] = add_rn(x[j], sum[j]);
  }
  const float scale = inverse_root(block_sum<NORM_WAVES>(sum_of_squares(x), scratch), a.hidden);
  if (!WITHIN_LAUNCH && exists) store8(at, 8, x);
  if (WITHIN_LAUNCH && exists && sums) {
    hand_on((f32x4*)(sums + (i64)row * a.hidden + k), four_of(x));
    hand_on((f32x4*)(sums + (i64)row * a.hidden + k) + 1, four_of(x + 4));
  }
  if (k >= (a.hidden + SLAB - 1) / SLAB * SLAB) return;
  float t[8];
  norm_piece(x, w, scale, exists, t);
  use(k, t);
  u16* to = a.t + tiled_index(row, k, a.t_rows);
  store_terms8(a.format, to, a.t_term, 1, t);
}
