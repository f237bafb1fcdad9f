// The CPU emulated as a SIMT machine: waves of 64 and the matrix instructions of gfx90a, for g++ and clang. See gpu.h.
//
// A thread of a block is a fiber with its own stack. It runs until it waits for others: lanes of a wave at collectives
// (shuffles, votes, MFMA), threads of a block at barriers; the last one to arrive executes the collective. So nothing
// spins, and a divergent collective or barrier, whose threads can never all arrive, is detected and reported. The
// launch's policy is the order in which runnable threads run. Blocks may be spread over several OS threads.
//
// A code object is a shared library of kernels and simt.cpp. KERNEL exports a function by the kernel's name, to be
// passed to simt_launch. Compile kernels with -fvisibility=hidden, so that functions of one name in several files stay
// apart. g++ does not inline all of them, and needs -fno-weak, too.
//
// SHARED memory is thread-local. Before each block it is filled with 0xff bytes (NaN in every format), and so is
// DYNAMIC_SHARED. Therefore a program or library with kernels must have no other thread_local variables. Under
// AddressSanitizer SHARED is static instead, so that it gets red zones, and launches run one block at a time.
#pragma once
#if !defined(__x86_64__)
#error "the SIMT machine switches stacks in x86-64 assembly"
#endif
#include <cstdint>
#include <cstring>

extern "C" {
typedef void (*simt_kernel)(const void* args);

enum simt_policy {
  SIMT_IN_ORDER = 0,        // wave 0's threads in order, then wave 1's: the fastest
  SIMT_RANDOM = 1,          // a random runnable thread
  SIMT_ONE_WAVE_FIRST = 2,  // a random wave as far as it can run: missing barriers give wrong results
  SIMT_OVERLAPS = 16,       // a flag: every thread must call after_predecessor()
};

// Runs a kernel's `grid` blocks on `os_threads` threads. The arguments are copied first. Returns 0, or 1 with the
// failure in `message`; the grid is then left unfinished.
int simt_launch(simt_kernel kernel, int grid, int block, int shared_bytes, const void* args, int args_bytes,
                int os_threads, int policy, unsigned long long seed, char* message, int message_bytes);
}

namespace simt {
#if defined(__SANITIZE_ADDRESS__)
#define SIMT_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define SIMT_ASAN 1
#endif
#endif

constexpr uintptr_t ARENA_BYTES = 256u << 20;     // holds a machine and its fibers' stacks, aligned to its size
constexpr int MAX_THREADS = 1024;
constexpr int MAX_SHARED_BYTES = 64 << 10;        // gfx90a's

#pragma GCC diagnostic ignored "-Wpsabi"            // vectors of 64 bytes are only passed to inlined functions
typedef short s16x4 __attribute__((vector_size(8)));
typedef float f32x4v __attribute__((vector_size(16)));
typedef float f32x16v __attribute__((vector_size(64)));

// What kernels read of the machine that runs their block.
struct Block {
  int tid, bid, grid;
  unsigned char* shared;
};
// Found from the stack pointer: cheaper than a thread-local variable, and right on whatever OS thread the fiber runs.
inline Block& block() { return *(Block*)((uintptr_t)__builtin_frame_address(0) & ~(ARENA_BYTES - 1)); }

struct Registration {
  Registration(simt_kernel kernel, const char* name, int threads, int args_bytes);
};

// To the thread whose stack pointer is `load`; NULL: the calling thread goes on.
struct Switch { void** save; void* load; };
#ifdef SIMT_ASAN
void arrived();
#endif
// Keeps what the thread needs on its stack and the stack's pointer in *save, then continues the other thread where it
// has left. It goes by a jump and is inlined into kernels: a processor predicts returns by the order of calls, and
// threads of a wave return in another order than they have called. The functions around it call others, so they keep
// nothing below their stack pointer.
__attribute__((always_inline)) inline void switch_stacks(Switch to) {
  asm volatile(
      "push %%rbp\n lea 1f(%%rip), %%rcx\n push %%rcx\n mov %%rsp, (%0)\n"
      "mov %1, %%rsp\n pop %%rcx\n jmp *%%rcx\n 1: pop %%rbp"
      : "+a"(to.save), "+d"(to.load)
      :
      : "rbx", "rcx", "rsi", "rdi", "r8", "r9", "r10", "r11", "r12", "r13", "r14", "r15", "memory", "cc",
        "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", "xmm11", "xmm12",
        "xmm13", "xmm14", "xmm15");
}
__attribute__((always_inline)) inline void wait(Switch to) {
  if (!to.load) return;
  switch_stacks(to);
#ifdef SIMT_ASAN
  arrived();
#endif
}

void note_after_predecessor();
// A thread brings what it has to a barrier or a collective, waits for the others, and takes what came of it.
Switch bring_barrier();
Switch bring_value(uint64_t value);
uint64_t take_value(int from_lane);
Switch bring_vote(bool value);
bool take_vote();
Switch bring_uniform(uint32_t value);
void take_uniform(uint32_t value);
Switch bring_16x16x16(bool bf16, s16x4 a, s16x4 b, const f32x4v& c);
f32x4v take_16x16x16();
Switch bring_32x32x8(bool bf16, s16x4 a, s16x4 b, const f32x16v& c);
void take_32x32x8(f32x16v* d);

__attribute__((always_inline)) inline void block_barrier() { wait(bring_barrier()); }
__attribute__((always_inline)) inline uint64_t shuffle(uint64_t value, int from_lane) {
  wait(bring_value(value));
  return take_value(from_lane);
}
__attribute__((always_inline)) inline bool any(bool value) {
  wait(bring_vote(value));
  return take_vote();
}
// The value; an error where the wave's lanes differ (not in order: unchecked).
__attribute__((always_inline)) inline uint32_t uniform(uint32_t value) {
  wait(bring_uniform(value));
  take_uniform(value);
  return value;
}

// D = A B + C as V_MFMA_F32_*. Lane l has row l % M of A and column l % M of B, both at k = l / M * 4 + (0..3). Of C
// and D it has, for 16x16, column l % 16 and rows l / 16 * 4 + i; for 32x32, column l % 32 and rows 8 * (i / 4) + 4 *
// (l / 32) + i % 4. Subnormal inputs count as zeros, as on MI200.
#ifdef __clang__
#define SIMT_INLINE inline __attribute__((always_inline))
#else
#define SIMT_INLINE inline                        // a kernel that is one function takes g++ minutes
#endif
__attribute__((always_inline)) inline f32x4v mfma_16x16x16(bool bf16, s16x4 a, s16x4 b, const f32x4v& c) {
  wait(bring_16x16x16(bf16, a, b, c));
  return take_16x16x16();
}
__attribute__((always_inline)) inline f32x16v mfma_32x32x8(bool bf16, s16x4 a, s16x4 b, const f32x16v& c) {
  f32x16v d;
  wait(bring_32x32x8(bf16, a, b, c));
  take_32x32x8(&d);
  return d;
}
SIMT_INLINE f32x4v mfma_16x16x16_f16(s16x4 a, s16x4 b, f32x4v c) { return mfma_16x16x16(false, a, b, c); }
SIMT_INLINE f32x4v mfma_16x16x16_bf16(s16x4 a, s16x4 b, f32x4v c) { return mfma_16x16x16(true, a, b, c); }
SIMT_INLINE f32x16v mfma_32x32x8_f16(s16x4 a, s16x4 b, const f32x16v& c) { return mfma_32x32x8(false, a, b, c); }
SIMT_INLINE f32x16v mfma_32x32x8_bf16(s16x4 a, s16x4 b, const f32x16v& c) { return mfma_32x32x8(true, a, b, c); }

template <class To, class From> inline To bits(From v) {
  static_assert(sizeof(To) == sizeof(From), "same size");
  To r;
  memcpy(&r, &v, sizeof r);
  return r;
}
// Keeps a product from being fused with an addition.
inline float rounded(float v) {
  asm("" : "+x"(v));
  return v;
}
}  // namespace simt

#define WAVE 64
#define KERNEL(name, Args, threads, blocks, waves)                                                                     \
  static void name##_body([[maybe_unused]] const Args& a);                                                             \
  extern "C" __attribute__((visibility("default"))) void name(const void* args) { name##_body(*(const Args*)args); }   \
  static const simt::Registration name##_registration(name, #name, threads, sizeof(Args));                             \
  static void name##_body([[maybe_unused]] const Args& a)
#define DEV SIMT_INLINE
#define HOST_DEV SIMT_INLINE
#ifdef SIMT_ASAN
#define SHARED static
#else
#define SHARED static thread_local
#endif
#define DYNAMIC_SHARED (simt::block().shared)
#define TID (simt::block().tid)
#define BID (simt::block().bid)
#define GRID (simt::block().grid)
#define TERM_SHIFT FLUSHING_TERM_SHIFT

DEV void barrier() { simt::block_barrier(); }
DEV int shfl(int v, int lane) { return (int)simt::shuffle((uint32_t)v, lane); }
DEV unsigned shfl(unsigned v, int lane) { return (unsigned)simt::shuffle(v, lane); }
DEV float shfl(float v, int lane) { return simt::bits<float>((uint32_t)simt::shuffle(simt::bits<uint32_t>(v), lane)); }
#define SHUFFLES_DOUBLES
DEV double shfl(double v, int lane) { return simt::bits<double>(simt::shuffle(simt::bits<uint64_t>(v), lane)); }
DEV int shfl_xor(int v, int mask) { return shfl(v, (TID % WAVE) ^ mask); }
DEV unsigned shfl_xor(unsigned v, int mask) { return shfl(v, (TID % WAVE) ^ mask); }
DEV float shfl_xor(float v, int mask) { return shfl(v, (TID % WAVE) ^ mask); }
DEV bool wave_any(bool b) { return simt::any(b); }
DEV int atomic_add(int* p, int v) { return __atomic_fetch_add(p, v, __ATOMIC_SEQ_CST); }
DEV int atomic_min(int* p, int v) {
  int old = __atomic_load_n(p, __ATOMIC_SEQ_CST);
  while (v < old && !__atomic_compare_exchange_n(p, &old, v, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) {}
  return old;
}
DEV int atomic_max(int* p, int v) {
  int old = __atomic_load_n(p, __ATOMIC_SEQ_CST);
  while (v > old && !__atomic_compare_exchange_n(p, &old, v, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) {}
  return old;
}
DEV float exp2_fast(float x) { return __builtin_exp2f(x); }
DEV float rcp_fast(float x) { return 1.f / x; }
DEV float div_rn(float a, float b) { return a / b; }
DEV float sqrt_rn(float a) { return __builtin_sqrtf(a); }
DEV float fma_rn(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
DEV double fma_rn(double a, double b, double c) { return __builtin_fma(a, b, c); }
DEV float mul_rn(float a, float b) { return simt::rounded(a * b); }
DEV float add_rn(float a, float b) { return simt::rounded(simt::rounded(a) + simt::rounded(b)); }
DEV unsigned short to_f16(float v) {
  const uint32_t x = simt::bits<uint32_t>(v), sign = x >> 16 & 0x8000, magnitude = x & 0x7fffffff;
  if (magnitude > 0x7f800000) return (unsigned short)(sign | 0x7e00);
  if (magnitude == 0x7f800000) return (unsigned short)(sign | 0x7c00);
  if (magnitude > 0x477fe000) return (unsigned short)(sign | 0x7bff);          // above 65504
  if (magnitude < 0x38800000) {                               // subnormal: 0.5's ulp is FP16's smallest step
    const float shifted = simt::bits<float>(magnitude) + 0.5f;
    return (unsigned short)(sign | (simt::bits<uint32_t>(shifted) - 0x3f000000));
  }
  return (unsigned short)(sign | (magnitude - (112u << 23) + 0xfff + (magnitude >> 13 & 1)) >> 13);
}
DEV float f16_to_f32(unsigned short v) {
  const float magnitude = simt::bits<float>((uint32_t)(v & 0x7fff) << 13) * 0x1p112f;
  const uint32_t m = simt::bits<uint32_t>(magnitude) | ((v & 0x7c00) == 0x7c00 ? 0x7f800000u : 0u);
  return simt::bits<float>(m | (uint32_t)(v & 0x8000) << 16);
}
DEV unsigned short to_bf16(float v) {
  const uint32_t x = simt::bits<uint32_t>(v);
  return v != v ? 0x7fc0 : (unsigned short)((x + 0x7fff + (x >> 16 & 1)) >> 16);
}
DEV float bf16_to_f32(unsigned short v) { return simt::bits<float>((uint32_t)v << 16); }
DEV unsigned pack_f16(float low, float high) { return (unsigned)to_f16(high) << 16 | to_f16(low); }
DEV unsigned pack_bf16(float low, float high) { return (unsigned)to_bf16(high) << 16 | to_bf16(low); }
DEV void after_predecessor() { simt::note_after_predecessor(); }
DEV void let_successor_start() {}
DEV void fence_device() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
DEV void fence_system() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }

// AMD's own instructions, by the names of clang's builtins.
DEV unsigned __builtin_amdgcn_perm(unsigned high, unsigned low, unsigned selectors) {
  const uint64_t bytes = (uint64_t)high << 32 | low;
  unsigned result = 0;
  for (int i = 0; i < 4; i++) {
    const unsigned s = selectors >> 8 * i & 0xff;
    unsigned byte = 0xff;                                       // 13 and more
    if (s < 8) byte = (unsigned)(bytes >> 8 * s) & 0xff;
    else if (s < 12) byte = bytes >> (16 * (s - 8) + 15) & 1 ? 0xff : 0;       // the sign of a 16-bit half, repeated
    else if (s == 12) byte = 0;
    result |= byte << 8 * i;
  }
  return result;
}
DEV unsigned __builtin_amdgcn_alignbit(unsigned high, unsigned low, unsigned shift) {
  return (unsigned)(((uint64_t)high << 32 | low) >> (shift & 31));
}
DEV int __builtin_amdgcn_readfirstlane(int v) { return (int)simt::uniform((uint32_t)v); }
