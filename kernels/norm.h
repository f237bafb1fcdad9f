// Shared by `rmsnorm`, `norm_route` and `settle`: x += the weighted sum of the row's expert outputs, then RMSNorm: t =
// x / sqrt(mean(x^2) + 1e-5) * weight.
//
// A block computes one row. Each thread keeps its pieces of eight elements of x in registers from the sum of squares to
// the scaling, so everything is read once: with 2880 elements 11.5 KB of x and 23 KB of four experts' FP16 outputs; 17
// KB are written. A row's sums are a tree over the block's threads, the same whatever other rows there are.
#pragma once
#include "catalogue.h"
#include "gpu/early.h"
#include "gpu/math.h"

enum { NORM_WAVES = NORM_THREADS / WAVE, NORM_PIECES = NORM_MOST_HIDDEN / (NORM_THREADS * 8) };
static_assert(NORM_PIECES * NORM_THREADS * 8 == NORM_MOST_HIDDEN, "a thread's pieces are whole");

DEV f32x4 four_of(const float* v) { return f32x4{v[0], v[1], v[2], v[3]}; }

// Of a piece of a row in float32: the sum of its squares, and its norm, zeros where the row has ended.
DEV float sum_of_squares(const float (&x)[8]) {
  float squares = 0;
  UNROLL for (int j = 0; j < 8; j++) squares += mul_rn(x[j], x[j]);
  return squares;
}
DEV void norm_piece(const float (&x)[8], const float (&w)[8], float scale, bool exists, float (&t)[8]) {
  UNROLL for (int j = 0; j < 8; j++) t[j] = exists ? w[j] * (scale * x[j]) : 0.f;
}

// The block's row, or -1 beyond the step's rows. It is known before the predecessor has ended; meanwhile the norm's
// weights are prefetched, since the layers' other weights have evicted them from L2 since the last step.
DEV int prepare_norm(const NormArgs& a) {
  if (BID == 0 && TID * 32 < a.hidden) prefetch_l2(a.weight + TID * 32);
  const int rows = load_fresh(a.select ? &a.step.header->logits_rows : &a.step.header->rows);
  return BID >= rows ? -1 : a.select ? load_fresh(&a.step.logits[BID].row) : BID;
}

// Adds the weighted sum of the row's expert outputs to x, in order of the experts' indices like the CPU: a chain of
// float32 FMAs, then one addition to x.
template <int FORMAT> DEV void add_experts(const NormArgs& a, int row, int k, float* x) {
  float sum[8] = {};
  for (int i = 0; i < a.k; i++) {
    const float share = a.shares[(i64)row * a.k + i];
    float y[8];
    load8<FORMAT>(a.y, (i64)a.slots[(i64)row * a.k + i] * a.hidden + k, a.hidden - k, y);
    UNROLL for (int j = 0; j < 8; j++) sum[j] = fma_rn(share, y[j], sum[j]);
  }
  UNROLL for (int j = 0; j < 8; j++) x[j] = add_rn(x[j], sum[j]);
}

// A piece of the row, and the experts' outputs added to it, also in memory where all rows are normed.
DEV void settle_piece(const NormArgs& a, int row, int k, float* x) {
  float* at = a.x + (i64)row * a.hidden + k;
  load8<FORMAT_F32>(at, 0, a.hidden - k, x);
  if (!a.y) return;
  if (a.y_format == FORMAT_F32) add_experts<FORMAT_F32>(a, row, k, x);
  else add_experts<FORMAT_F16>(a, row, k, x);
  if (!a.select) store8(at, a.hidden - k, x);
}

// 1 / sqrt(mean square + 1e-5), of the sum of squares.
template <class Sum> DEV float inverse_root(Sum squares, int hidden) {
  const Sum mean = squares / (Sum)hidden + (Sum)1e-5f;
  return div_rn(1.f, sqrt_rn((float)mean));
}
// The same of a row in the block's registers. The sum of squares is float64 (exact) or float32.
template <class Sum> DEV float row_scale(float (*x)[8], int hidden, Sum* scratch) {
  Sum squares = 0;
  UNROLL for (int p = 0; p < NORM_PIECES; p++)
    if ((p * NORM_THREADS + TID) * 8 < hidden)
      UNROLL for (int j = 0; j < 8; j++) squares += (Sum)mul_rn(x[p][j], x[p][j]);
  return inverse_root(block_sum<NORM_WAVES>(squares, scratch), hidden);
}

// Norms row `row` of x into row `to` of t. Calls use(k, t) with each piece, also with the zeros after the row's end.
// `scratch` is used by nothing else.
template <class Use> DEV void norm_row(const NormArgs& a, int row, int to, double* scratch, Use use) {
  float x[NORM_PIECES][8] = {};
  UNROLL for (int p = 0; p < NORM_PIECES; p++) {
    const int k = (p * NORM_THREADS + TID) * 8;
    if (k < a.hidden) settle_piece(a, row, k, x[p]);
  }
  const float scale = a.exact ? row_scale(x, a.hidden, scratch) : row_scale(x, a.hidden, (float*)scratch);
  const int padded = (a.hidden + SLAB - 1) / SLAB * SLAB;
  UNROLL for (int p = 0; p < NORM_PIECES; p++) {
    const int k = (p * NORM_THREADS + TID) * 8;
    if (k >= padded) continue;
    float w[8], t[8];
    load8<FORMAT_F32>(a.weight, k, a.hidden - k, w);
    UNROLL for (int j = 0; j < 8; j++) {
      const float scaled =
          a.exact ? (float)((double)w[j] * ((double)scale * (double)x[p][j])) : w[j] * (scale * x[p][j]);
      t[j] = k + j < a.hidden ? scaled : 0.f;
    }
    use(k, t);
    u16* at = a.t + tiled_index(to, k, a.t_rows);
    store_terms8(a.format, at, a.t_term, a.terms, t);
  }
}
