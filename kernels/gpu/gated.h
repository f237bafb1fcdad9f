// The gated unit between an expert's two products: gate * sigmoid(1.702 gate) * (up + 1), with gate and up clamped to
// at most `limit` and up also to at least -`limit`. Clamping keeps a NaN, as the float32 baseline does: by comparisons,
// or by the minimum and maximum that return NaN, which most instructions of these names drop.
#pragma once
#include "gpu.h"

#if defined(__CUDACC__) && __CUDA_ARCH__ >= 900
DEV float at_most(float v, float bound) { asm("min.NaN.f32 %0, %0, %1;" : "+f"(v) : "f"(bound)); return v; }
DEV float at_least(float v, float bound) { asm("max.NaN.f32 %0, %0, %1;" : "+f"(v) : "f"(bound)); return v; }
// 1 / v for v from 1 on, rounded to nearest up to 2^126, without the branches of a division: one step of Newton's.
// Beyond that it is 0, and the exact value is no normal float32.
DEV float reciprocal(float v) {
  const float about = rcp_fast(v);
  return v > 0x1p126f ? about : fma_rn(fma_rn(-v, about, 1.f), about, about);
}
#else
DEV float at_most(float v, float bound) { return v > bound ? bound : v; }
DEV float at_least(float v, float bound) { return v < bound ? bound : v; }
DEV float reciprocal(float v) { return div_rn(1.f, v); }
#endif

// `accurate`: every operation is rounded as the baseline rounds it, and `exponential` is the target's e^x in float32;
// else the hardware's approximations do.
template <class Exponential>
DEV float gated_unit(float gate, float up, float limit, bool accurate, Exponential exponential) {
  gate = at_most(gate, limit);
  up = at_least(at_most(up, limit), -limit);
  if (accurate)
    return mul_rn(mul_rn(gate, reciprocal(add_rn(1.f, exponential(mul_rn(-1.702f, gate))))), add_rn(up, 1.f));
  return gate * rcp_fast(1.f + exp2_fast(gate * (-1.702f * LOG2E))) * (up + 1.f);
}
