// Shared by the kernels norm_route_*: the router's products on the matrix cores, for a router in BF16. The row normed,
// in float32, is the sum of three BF16 terms, so no bit of it is lost, and each product is exact.
//
// All these kernels add in the same order, whatever rows they have. K is cut in QUARTERS of PARTS parts of PART
// elements. A part's products are a chain for each term; a part's sum is high + (middle + low). A quarter is the chain
// of its parts' sums, and a logit the chain of the quarters, plus the bias. Within 32 elements of K the lanes 4 g + q
// have elements 8 q to 8 q + 7, of weights and tokens alike, so that they load 16 bytes at once.
//
// The largest error of a share against float64 is 1.0e-6, where multiply-adds in float32 had 1.7e-6.
#pragma once
#include "../route.h"
#include "cluster.h"
#include "../mma/warp.h"

enum : int {
  QUARTERS = 4,
  PARTS = 8,                             // of a quarter
  PART_BLOCKS = 3,                       // of a part
  K_BLOCK = 32,
  PART = PART_BLOCKS * K_BLOCK,
  QUARTER = PARTS * PART,
  ROUTER_TERMS = 3,
};

// Eight floats as terms: each the upper half of what is left.
DEV void split8(const float* values, u32x4* terms) {
  float v[8];
  UNROLL for (int j = 0; j < 8; j++) v[j] = values[j];
  UNROLL for (int term = 0; term < ROUTER_TERMS; term++)
    UNROLL for (int j = 0; j < 8; j += 2) {
      const u32 low = __builtin_bit_cast(u32, v[j]), high = __builtin_bit_cast(u32, v[j + 1]);
      terms[term][j / 2] = __byte_perm(low, high, 0x7632);
      v[j] -= __builtin_bit_cast(float, low & 0xFFFF0000u);
      v[j + 1] -= __builtin_bit_cast(float, high & 0xFFFF0000u);
    }
}

// The eight weights of expert `expert` from k on; zeros behind K's end.
DEV u32x4 router_weights(const RouteArgs& a, int expert, int k) {
  if (k >= a.hidden) return u32x4{0, 0, 0, 0};
  return *(const u32x4*)((const u16*)a.w + (i64)expert * a.hidden + k);
}

// sums[16 experts x 8 columns] += weights of experts g and g + 8, and tokens of column g, over the first or second half
// of 32 elements of K.
DEV void multiply_half(float* sums, u32x4 w, u32x4 w8, u32x4 t, int half) {
  const int s = half * 2;
  const u32 a[4] = {w[s], w8[s], w[s + 1], w8[s + 1]};
  mma<FORMAT_BF16>(sums, a, t[s], t[s + 1]);
}

DEV float part_sum(float high, float middle, float low) { return add_rn(high, add_rn(middle, low)); }

// ---- from logits to picks, by one wave for a row

// What pick_by_wave compares: the larger, the rather picked; 0 is not.
DEV u32 claim_of(float logit) { return order_of(logit) + 1; }

// The k experts of the largest claims, of equal ones those of lower index, as rank_of() has it: lane `rank` gets the
// one of that rank. A lane has the claims of experts LANE, LANE + 32, ..
template <int N> DEV int pick_by_wave(int k, u32 (&claims)[N]) {
  int picked = 0;
  for (int rank = 0; rank < k; rank++) {
    u32 most = claims[0];
    UNROLL for (int i = 1; i < N; i++) most = max(most, claims[i]);
    most = __reduce_max_sync(~0u, most);
    int expert = 0;
    UNROLL for (int i = N - 1; i >= 0; i--) {
      const u32 lanes = __ballot_sync(~0u, claims[i] == most);
      expert = lanes ? i * WAVE + __ffs(lanes) - 1 : expert;
    }
    UNROLL for (int i = 0; i < N; i++) claims[i] = i * WAVE + LANE == expert ? 0 : claims[i];
    picked = LANE == rank ? expert : picked;
  }
  return picked;
}
// A pick's position among the row's picks in order of the expert's index.
DEV int place_by_wave(int k, int picked) {
  int place = 0;
  for (int i = 0; i < k; i++) place += shfl(picked, i) < picked;
  return place;
}
// Stores the picks, whose logits the lanes have, and their shares, as share_experts() does.
DEV void share_by_wave(const RouteArgs& a, int row, int picked, int place, float logit) {
  const float exponential = exp_f32((float)((double)logit - (double)shfl(logit, 0)));
  double sum = 0;
  for (int i = 0; i < a.k; i++) sum += (double)shfl(exponential, i);
  if (LANE >= a.k) return;
  const i64 at = (i64)row * a.k + place;
  a.experts[at] = picked;
  a.shares[at] = (float)((double)exponential / sum);
}
