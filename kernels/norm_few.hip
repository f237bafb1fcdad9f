// rmsnorm_few: rmsnorm of norm.h with the experts' outputs, for few rows, in `fast`. A row takes as long as its chain
// of loads there, so all that does not depend on the row's slots is loaded at once, and then all outputs. Where kernels
// overlap, all but the outputs is in registers before the predecessor ends: kernels before the experts' products have
// written it. The bits are those of norm.h.
//
// Grid: rows of the bucket. hidden is at most THREADS * 8 and a multiple of 8, and a row has at most EXPERTS experts.
// `select`, `t32` and `exact` are not served, there is one term, and y is FP16.
#include "norm.h"

enum : int { THREADS = NORM_FEW_THREADS, EXPERTS = NORM_FEW_MOST_EXPERTS_PER_TOKEN };
static_assert(THREADS == NORM_THREADS && THREADS * 8 == NORM_FEW_MOST_HIDDEN, "norm.h's waves, and a piece a thread");

KERNEL(rmsnorm_few, NormArgs, THREADS, 1, 0) {
  SHARED float scratch[NORM_WAVES];
  const int row = BID, k = TID * 8;
  const bool exists = k < a.hidden;
  let_successor_start();
  const int rows = load_fresh(&a.step.header->rows);
  float w[8] = {}, x[8] = {}, shares[EXPERTS] = {};
  const u16* y[EXPERTS] = {};
  float* at = a.x + (i64)row * a.hidden + k;
  if (row < rows && exists) {
    load8_aligned<FORMAT_F32>(a.weight, k, w);
    load8_aligned<FORMAT_F32>(at, 0, x);
    UNROLL for (int i = 0; i < EXPERTS; i++)
      if (i < a.k) {
        y[i] = (const u16*)a.y + (i64)a.slots[(i64)row * a.k + i] * a.hidden + k;
        shares[i] = a.shares[(i64)row * a.k + i];
      }
  }
  after_predecessor();
  if (row >= rows) return;
  if (exists) {
    u32x4 packed[EXPERTS];
    UNROLL for (int i = 0; i < EXPERTS; i++)
      if (i < a.k) packed[i] = *(const u32x4*)y[i];
    float sum[8] = {};
    UNROLL for (int i = 0; i < EXPERTS; i++)
      if (i < a.k)
        UNROLL for (int j = 0; j < 8; j++)
          sum[j] = fma_rn(shares[i], from_16<FORMAT_F16>((u16)(packed[i][j / 2] >> j % 2 * 16)), sum[j]);
    UNROLL for (int j = 0; j < 8; j++) x[j] = add_rn(x[j], sum[j]);
  }
  const float scale = inverse_root(block_sum<NORM_WAVES>(sum_of_squares(x), scratch), a.hidden);
  if (exists) store8(at, 8, x);
  if (k >= (a.hidden + SLAB - 1) / SLAB * SLAB) return;
  float t[8];
  norm_piece(x, w, scale, exists, t);
  u16* to = a.t + tiled_index(row, k, a.t_rows);
  store_terms8(a.format, to, a.t_term, 1, t);
}
