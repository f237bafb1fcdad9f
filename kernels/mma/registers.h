// Instructions that kernels of several kinds use.
#pragma once
#include "../gpu/gpu.h"

DEV u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// Division without a sign takes half the time.
DEV int quotient(int a, int b) { return (int)((unsigned)a / (unsigned)b); }

// Transposes an 8 x 8 matrix of 16-bit elements, row g of which is in lanes 4g .. 4g + 3, two a lane. Volatile: all
// lanes take part, so it must not move behind a branch.
DEV u32 transpose8(u32 v) {
  u32 r;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(v));
  return r;
}

// Two values as FP16, to nearest even. What is beyond its largest number becomes that, infinities, too; NaN stays. It
// is one instruction, where pack_f16, which keeps infinities, takes several.
DEV u32 pack_finite(float low, float high) {
  u32 r;
  asm("cvt.rn.satfinite.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}
