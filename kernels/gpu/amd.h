// AMD by clang freestanding or hipcc, 17 on (15 spills): gfx9 with MFMA, and later ones, with narrow waves. See gpu.h.
#pragma once

#ifdef __GFX9__
#define WAVE 64
#define TERM_SHIFT FLUSHING_TERM_SHIFT
#else
#define WAVE 32
#define TERM_SHIFT 0
#endif
#define KERNEL(name, Args, threads, blocks, waves)                                                                     \
  extern "C" __attribute__((global))                                                                                   \
  __attribute__((amdgpu_flat_work_group_size(threads, threads), amdgpu_waves_per_eu(waves))) void name(const Args a)
#define DEV __attribute__((device)) inline __attribute__((always_inline))
#define HOST_DEV __attribute__((device)) inline __attribute__((always_inline))
#define SHARED __attribute__((shared))
extern __attribute__((shared)) __attribute__((aligned(1024))) unsigned char getp_dynamic_shared[];
#define DYNAMIC_SHARED getp_dynamic_shared
#ifdef ONE_LAUNCH
// Computed anew wherever they are used: else all that depends on them alone moves out of the loop over commands, and
// does not fit the registers.
DEV int thread_now() {
  int thread = __builtin_amdgcn_workitem_id_x();
  asm volatile("" : "+v"(thread));
  return thread;
}
DEV int block_now() {
  int block = __builtin_amdgcn_workgroup_id_x();
  asm volatile("" : "+s"(block));
  return block;
}
#define TID thread_now()
#define BID block_now()
#else
#define TID ((int)__builtin_amdgcn_workitem_id_x())
#define BID ((int)__builtin_amdgcn_workgroup_id_x())
#endif
#define GRID ((int)(__builtin_amdgcn_grid_size_x() / __builtin_amdgcn_workgroup_size_x()))

DEV void barrier() {
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
  __builtin_amdgcn_s_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}
DEV int shfl(int v, int lane) { return __builtin_amdgcn_ds_bpermute(lane * 4, v); }
DEV unsigned shfl(unsigned v, int lane) { return (unsigned)shfl((int)v, lane); }
DEV float shfl(float v, int lane) { return __builtin_bit_cast(float, shfl(__builtin_bit_cast(int, v), lane)); }
DEV int shfl_xor(int v, int mask) { return shfl(v, (TID % WAVE) ^ mask); }
DEV unsigned shfl_xor(unsigned v, int mask) { return shfl(v, (TID % WAVE) ^ mask); }
DEV float shfl_xor(float v, int mask) { return shfl(v, (TID % WAVE) ^ mask); }
#if WAVE == 32
DEV bool wave_any(bool b) { return __builtin_amdgcn_ballot_w32(b) != 0; }
#elif __has_builtin(__builtin_amdgcn_ballot_w64)
DEV bool wave_any(bool b) { return __builtin_amdgcn_ballot_w64(b) != 0; }
#else
DEV bool wave_any(bool b) { return __builtin_amdgcn_uicmp((unsigned)b, 0u, 33) != 0; }
#endif
DEV int atomic_add(int* p, int v) { return __atomic_fetch_add(p, v, __ATOMIC_RELAXED); }
DEV int atomic_min(int* p, int v) { return __atomic_fetch_min(p, v, __ATOMIC_RELAXED); }
DEV int atomic_max(int* p, int v) { return __atomic_fetch_max(p, v, __ATOMIC_RELAXED); }
#if __has_builtin(__builtin_amdgcn_exp2f)
DEV float exp2_fast(float x) { return __builtin_amdgcn_exp2f(x); }
#else
DEV float exp2_fast(float x) { return __builtin_exp2f(x); }
#endif
DEV float rcp_fast(float x) { return __builtin_amdgcn_rcpf(x); }
// Without the pragma clang may contract a product and the sum it goes into.
DEV float div_rn(float a, float b) { return a / b; }
DEV float sqrt_rn(float a) { return __builtin_sqrtf(a); }
DEV float fma_rn(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
DEV double fma_rn(double a, double b, double c) { return __builtin_fma(a, b, c); }
DEV float mul_rn(float a, float b) {
#pragma clang fp contract(off)
  return a * b;
}
DEV float add_rn(float a, float b) {
#pragma clang fp contract(off)
  return a + b;
}
DEV float saturate_f16(float v) {
  return v > 65504.f && v < __builtin_inff() ? 65504.f : v < -65504.f && v > -__builtin_inff() ? -65504.f : v;
}
DEV unsigned short to_f16(float v) { return __builtin_bit_cast(unsigned short, (_Float16)saturate_f16(v)); }
DEV float f16_to_f32(unsigned short v) { return (float)__builtin_bit_cast(_Float16, v); }
DEV unsigned short to_bf16(float v) {
  const unsigned x = __builtin_bit_cast(unsigned, v);
  return v != v ? 0x7fc0 : (unsigned short)((x + 0x7fff + (x >> 16 & 1)) >> 16);
}
DEV float bf16_to_f32(unsigned short v) { return __builtin_bit_cast(float, (unsigned)v << 16); }
DEV unsigned pack_f16(float low, float high) { return (unsigned)to_f16(high) << 16 | to_f16(low); }
DEV unsigned pack_bf16(float low, float high) { return (unsigned)to_bf16(high) << 16 | to_bf16(low); }
DEV void after_predecessor() {}
DEV void let_successor_start() {}
DEV void fence_device() { __builtin_amdgcn_fence(__ATOMIC_ACQ_REL, "agent"); }
DEV void fence_system() { __builtin_amdgcn_fence(__ATOMIC_SEQ_CST, ""); }
