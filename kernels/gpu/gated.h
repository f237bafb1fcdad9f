// The gated unit between an expert's two products: gate * sigmoid(1.702 gate) * (up + 1), with gate and up clamped to
// at most `limit` and up also to at least -`limit`. Clamping by comparisons keeps a NaN, as the float32 baseline does;
// minimum and maximum instructions would drop it.
#pragma once
#include "gpu.h"

// `accurate`: every operation is rounded as the baseline rounds it, and `exponential` is the target's e^x in float32;
// else the hardware's approximations do.
template <class Exponential>
DEV float gated_unit(float gate, float up, float limit, bool accurate, Exponential exponential) {
  gate = gate > limit ? limit : gate;
  up = up > limit ? limit : up < -limit ? -limit : up;
  if (accurate)
    return mul_rn(mul_rn(gate, div_rn(1.f, add_rn(1.f, exponential(mul_rn(-1.702f, gate))))), add_rn(up, 1.f));
  return gate * rcp_fast(1.f + exp2_fast(gate * (-1.702f * 1.44269504f))) * (up + 1.f);   // log2(e)
}
