// Layers of a model in one launch without a barrier, where caches do not see each other. Vectors that cross blocks are
// in memory; each value is written once, by the wave that computes it, and whoever reads polls until all are there.
//
// Why no value is taken for another's. Vector p is in buffer p % 3, and every wave computes some values of each vector.
//
// 1. A wave writes its values of vector p when it has read all of vector p - 1.
// 2. So who has read all of vector p knows that all waves have read all of vector p - 1. Each wave then wipes those
//    values of that which are its own, waits until that is done, and only then writes its values of vector p + 1.
// 3. So who has read all of vector p + 1 knows that vector p - 1 is wiped. Only then it reads vector p + 2, which is in
//    the same buffer.
//
// The last two vectors stay. The next launch has other buffers and wipes these, so there are three vectors twice.
//
// Macros: WIDE loads four values in one access. These make it wrong: LOAD_SCOPE, STORE_SCOPE and LOAD_BITS say that an
// access reaches less far, ANY_NAN writes a NaN as it is, NO_WIPE wipes nothing, FEW_BUFFERS has two buffers, NO_WAIT
// wipes late and goes on.
#include "gpu/gpu.h"
#include "one_launch.h"

#ifndef LOAD_SCOPE
#define LOAD_SCOPE __HIP_MEMORY_SCOPE_AGENT
#endif
#ifndef STORE_SCOPE
#define STORE_SCOPE __HIP_MEMORY_SCOPE_AGENT
#endif
#ifdef LOAD_BITS
#elif defined(__gfx90a__)
#define LOAD_BITS "glc"
#else
#define LOAD_BITS "sc1"
#endif

// Sixteen bytes in one access: the compiler has no atomic one of that size.
DEV u32x4 load(const u32* from) {
#ifdef WIDE
  typedef u32 Words __attribute__((ext_vector_type(4)));
  Words words;
  asm volatile("global_load_dwordx4 %0, %1, off " LOAD_BITS "\n\ts_waitcnt vmcnt(0)"
               : "=&v"(words)
               : "v"(from)
               : "memory");
  return {words[0], words[1], words[2], words[3]};
#else
  u32x4 words;
  for (int i = 0; i < 4; i++) words[i] = __hip_atomic_load(from + i, __ATOMIC_RELAXED, LOAD_SCOPE);
  return words;
#endif
}
DEV void store(u32* to, u32 value) { __hip_atomic_store(to, value, __ATOMIC_RELAXED, STORE_SCOPE); }
// Until this wave's stores are done.
DEV void wait_for_own_stores() { asm volatile("s_waitcnt vmcnt(0)" : : : "memory"); }

// A value's bits, which are not UNWRITTEN.
DEV u32 bits_of(float v) {
#ifdef ANY_NAN
  return __builtin_bit_cast(u32, v);
#else
  return v == v ? __builtin_bit_cast(u32, v) : NAN_BITS;
#endif
}

DEV u32* buffer(const ChainArgs& a, int vector) {
#ifdef FEW_BUFFERS
  return a.buffers + vector % (BUFFERS - 1) * WIDTH;
#else
  return a.buffers + vector % BUFFERS * WIDTH;
#endif
}

// The lane's four values of a vector, once all are there.
DEV f32x4 await(const u32* vector) {
  u32x4 words;
  bool all;
  do {
    words = load(vector + 4 * LANE);
    all = words[0] != UNWRITTEN && words[1] != UNWRITTEN && words[2] != UNWRITTEN && words[3] != UNWRITTEN;
  } while (!all);
  return __builtin_bit_cast(f32x4, words);
}

DEV float dot(const float* row, const f32x4& x) {
  float sum = 0;
  for (int i = 0; i < 4; i++) sum = fma_rn(row[4 * LANE + i], x[i], sum);
  return wave_sum(sum);
}

KERNEL(chain, ChainArgs, BLOCK_THREADS, 1, 1) {
  // The wave's own values; the first lanes have one each.
  const int first = (BID * (BLOCK_THREADS / WAVE) + TID / WAVE) * ROWS, own = first + LANE;
  const bool owns = LANE < ROWS;
  for (int i = 0; owns && i < BUFFERS; i++) a.next_buffers[i * WIDTH + own] = UNWRITTEN;
  float residual = owns ? a.x[own] : 0;
  f32x4 x = *(const f32x4*)(a.x + 4 * LANE);
  for (int phase = 0; phase < a.phases; phase++) {
    if (phase > 0) x = await(buffer(a, phase - 1));
#if !defined(NO_WIPE) && !defined(NO_WAIT)
    if (owns && phase > 1) store(buffer(a, phase - 2) + own, UNWRITTEN);
#endif
    float v = 0;
    for (int i = 0; i < ROWS; i++) {
      const float sum = dot(a.weights + ((i64)phase * WIDTH + first + i) * WIDTH, x);
      if (LANE == i) v = sum;
    }
    if (phase % 2 == 0) v = v < 0 ? v / 4 : v;
    else v = residual = residual + v;
#ifdef NO_WAIT
    if (owns && phase > 1) store(buffer(a, phase - 2) + own, UNWRITTEN);
#else
    wait_for_own_stores();
#endif
    if (owns && phase < a.phases - 1) store(buffer(a, phase) + own, bits_of(v));
    if (owns && phase == a.phases - 1) a.y[own] = v;
  }
}
