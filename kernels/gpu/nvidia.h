// NVIDIA from sm_75 on, nvcc. See gpu.h. Some instructions are younger: before sm_90 others stand in for them.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#define WAVE 32
#define KERNEL(name, Args, threads, blocks, waves) \
  extern "C" __global__ void __launch_bounds__(threads, blocks) name(const __grid_constant__ Args a)
#define DEV __device__ __forceinline__
#define HOST_DEV __host__ __device__ __forceinline__
#define SHARED __shared__
extern __shared__ __align__(1024) unsigned char getp_dynamic_shared[];
#define DYNAMIC_SHARED getp_dynamic_shared
#define TID ((int)threadIdx.x)
#define BID ((int)blockIdx.x)
#define GRID ((int)gridDim.x)
#define TERM_SHIFT 0

DEV void barrier() { __syncthreads(); }
DEV float shfl_xor(float v, int mask) { return __shfl_xor_sync(~0u, v, mask); }
DEV int shfl_xor(int v, int mask) { return __shfl_xor_sync(~0u, v, mask); }
DEV unsigned shfl_xor(unsigned v, int mask) { return __shfl_xor_sync(~0u, v, mask); }
DEV float shfl(float v, int lane) { return __shfl_sync(~0u, v, lane); }
DEV int shfl(int v, int lane) { return __shfl_sync(~0u, v, lane); }
DEV unsigned shfl(unsigned v, int lane) { return __shfl_sync(~0u, v, lane); }
DEV bool wave_any(bool b) { return __any_sync(~0u, b); }
DEV int atomic_add(int* p, int v) { return atomicAdd(p, v); }
DEV int atomic_min(int* p, int v) { return atomicMin(p, v); }
DEV int atomic_max(int* p, int v) { return atomicMax(p, v); }
DEV float exp2_fast(float x) { asm("ex2.approx.ftz.f32 %0, %0;" : "+f"(x)); return x; }
DEV float rcp_fast(float x) { asm("rcp.approx.ftz.f32 %0, %0;" : "+f"(x)); return x; }
DEV float div_rn(float a, float b) { return __fdiv_rn(a, b); }
DEV float sqrt_rn(float a) { return __fsqrt_rn(a); }
DEV float fma_rn(float a, float b, float c) { return __fmaf_rn(a, b, c); }
DEV double fma_rn(double a, double b, double c) { return __fma_rn(a, b, c); }
DEV float mul_rn(float a, float b) { return __fmul_rn(a, b); }
DEV float add_rn(float a, float b) { return __fadd_rn(a, b); }
#if __CUDA_ARCH__ >= 900
// Rounded to nearest, but at most the larger of FP16's largest number and of what rounding towards zero gives: that
// leaves infinity as it is, and makes none of a finite value. NaN stays NaN. Comparisons would take a branch for each.
DEV unsigned short to_f16(float v) {
  unsigned short r;
  asm("{ .reg .b16 most, near; cvt.rz.f16.f32 most, %1; abs.f16 most, most; max.NaN.f16 most, most, %2;\n"
      "cvt.rn.f16.f32 near, %1; min.NaN.xorsign.abs.f16 %0, near, most; }"
      : "=h"(r) : "f"(v), "h"((unsigned short)0x7BFF));
  return r;
}
#else
DEV unsigned short to_f16(float v) {
  const bool is_finite = v < __int_as_float(0x7f800000) && v > __int_as_float(0xff800000);
  return __half_as_ushort(__float2half_rn(is_finite ? fminf(fmaxf(v, -65504.f), 65504.f) : v));
}
#endif
DEV unsigned short to_bf16(float v) { return __bfloat16_as_ushort(__float2bfloat16_rn(v)); }
DEV float f16_to_f32(unsigned short v) { return __half2float(__ushort_as_half(v)); }
DEV float bf16_to_f32(unsigned short v) { return __uint_as_float((unsigned)v << 16); }
#if __CUDA_ARCH__ >= 900
DEV unsigned pack_f16(float low, float high) {
  unsigned r;                                              // cvt puts its first operand into the high half
  asm("{ .reg .b32 most, near; cvt.rz.f16x2.f32 most, %1, %2; abs.f16x2 most, most; max.NaN.f16x2 most, most, %3;\n"
      "cvt.rn.f16x2.f32 near, %1, %2; min.NaN.xorsign.abs.f16x2 %0, near, most; }"
      : "=r"(r) : "f"(high), "f"(low), "r"(0x7BFF7BFF));
  return r;
}
DEV unsigned pack_bf16(float low, float high) {
  unsigned r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}
DEV void after_predecessor() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
DEV void let_successor_start() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
#else
DEV unsigned pack_f16(float low, float high) { return (unsigned)to_f16(high) << 16 | to_f16(low); }
DEV unsigned pack_bf16(float low, float high) { return (unsigned)to_bf16(high) << 16 | to_bf16(low); }
// Launches do not overlap.
DEV void after_predecessor() {}
DEV void let_successor_start() {}
#endif
DEV void fence_device() { __threadfence(); }
DEV void fence_system() { __threadfence_system(); }
