// What the attention kernels of CDNA share: head_dim 64, 8 query heads to a kv head, 16x16x16 MFMA, waves of 64; queries,
// cache and output in one 16-bit format.
//
// Scores.   S^T = K Q^T, keys on M and heads on N. A lane (n = lane % 16, g = lane / 16) gets the scores of column n (one
//           head of one row) with keys 4g..4g+3, which is just what it must hold as operand B of O^T = V^T P^T:
//           probabilities never leave their lane.
// K         as operand A: lane (n, g) needs key n. Along head_dim any order will do if q has the same one, so a lane takes
//           whole pieces, g and 4 + g: product i covers the dims 32 (i / 2) + 8 g + 4 (i % 2) + {0..3}.
// V^T       as operand A: lane (n, g) needs keys 4g..4g+3. It loads dims 4n..4n+3 of each (8 bytes) and regroups them by
//           dim; product d takes dims 4n + d, so that a lane ends with the 16 dims 16g + 4i + d of its column.
// Softmax.  Weights are 2^(s - m); q comes scaled by log2(e) / 8. A column's m is START below the largest score when it was
//           set and moves only when a score exceeds m + HEADROOM. So a probability is at most 2^15, and what is lost
//           because MI200's MFMA flushes FP16 subnormals is 2^-25 of the largest. Each column decides for itself: columns
//           of other rows change no bit. The sink joins at the end: it is part of the sum only.
#pragma once
#include "../gpu/gpu.h"

enum : int {
  HEAD_DIM = 64,
  GROUP_HEADS = 8,               // query heads of a kv head
  KV_ROW = HEAD_DIM * 2,         // bytes of one position's K or V
  V_OFFSET = KV_PAGE * KV_ROW,   // bytes from a head's K to its V
};
#define LOG2E 1.4426950408889634f
#define HEADROOM 15.f
#define START 11.f
#define UNSET -1e30f             // m before the first score: finite, so that masked scores (-inf) weigh exactly 0

#if defined(__AMDGCN__)
typedef float Acc __attribute__((ext_vector_type(4)));
typedef short s16x4 __attribute__((ext_vector_type(4)));
typedef _Float16 f16x4 __attribute__((ext_vector_type(4)));
template <int FORMAT> DEV Acc mfma(u32x2 a, u32x2 b, Acc c) {
  if constexpr (FORMAT == FORMAT_F16)
    return __builtin_amdgcn_mfma_f32_16x16x16f16(__builtin_bit_cast(f16x4, a), __builtin_bit_cast(f16x4, b), c, 0, 0, 0);
  else
    return __builtin_amdgcn_mfma_f32_16x16x16bf16_1k(__builtin_bit_cast(s16x4, a), __builtin_bit_cast(s16x4, b), c, 0, 0, 0);
}
#define GLOBAL __attribute__((address_space(1)))
// Keeps an address a scalar base and a lane's 32-bit offset, where the compiler would make it 64-bit sums of lanes.
#if __clang_major__ >= 17
#define SCALAR(base) asm("" : "+s"(base))
#define VECTOR(offset) asm("" : "+v"(offset))
#else                            // clang 15 cannot place them in a loop
#define SCALAR(base)
#define VECTOR(offset)
#endif
// Loads stay before it, arithmetic after: what is in flight is decided here, not by the scheduler.
#define SCHEDULE_FENCE() __builtin_amdgcn_sched_barrier(0)
// The next `count` instructions of a kind, in the order in which a block asks for them.
#if __clang_major__ >= 17
#define SCHEDULE(kind, count) __builtin_amdgcn_sched_group_barrier(kind, count, 0)
#else
#define SCHEDULE(kind, count) ((void)0)
#endif
enum : int { VECTOR_OPS = 2, MATRIX_OPS = 8, LDS_READS = 0x100, EXPONENTIALS = 0x400 };
// A weight of at most 2^15 needs none of to_f16's saturation.
DEV u16 weight_f16(float v) { return __builtin_bit_cast(u16, (_Float16)v); }
#else
typedef simt::f32x4v Acc;
template <int FORMAT> DEV Acc mfma(u32x2 a, u32x2 b, Acc c) {
  const auto x = __builtin_bit_cast(simt::s16x4, a), y = __builtin_bit_cast(simt::s16x4, b);
  return FORMAT == FORMAT_F16 ? simt::mfma_16x16x16_f16(x, y, c) : simt::mfma_16x16x16_bf16(x, y, c);
}
#define GLOBAL
#define SCALAR(base)
#define VECTOR(offset)
#define SCHEDULE_FENCE()
#define SCHEDULE(kind, count) ((void)0)
DEV u16 weight_f16(float v) { return to_f16(v); }
#endif

// What is the same in all lanes, in a scalar register.
DEV int uniform(int v) { return __builtin_amdgcn_readfirstlane(v); }

typedef const GLOBAL u8* GlobalBytes;
template <class V> DEV V load(GlobalBytes at) {
  typedef u32 Words __attribute__((vector_size(sizeof(V))));           // clang 15 copies no struct from there
  return __builtin_bit_cast(V, *(const GLOBAL Words*)at);
}

DEV int min_of(int a, int b) { return a < b ? a : b; }
DEV int max_of(int a, int b) { return a > b ? a : b; }
DEV float max_of(float a, float b) { return a > b ? a : b; }
DEV float largest(Acc v) { return max_of(max_of(v[0], v[1]), max_of(v[2], v[3])); }
// Over the four lanes of a column.
DEV float column_max(float v) {
  v = max_of(v, shfl_xor(v, 16));
  return max_of(v, shfl_xor(v, 32));
}
DEV float column_sum(float v) {
  v += shfl_xor(v, 16);
  return v + shfl_xor(v, 32);
}

DEV u32 low_halves(u32 a, u32 b) { return b << 16 | (a & 0xffff); }
DEV u32 high_halves(u32 a, u32 b) { return (b & 0xffff0000) | a >> 16; }
template <int FORMAT> DEV u32 pack_weights(float low, float high) {
  if constexpr (FORMAT == FORMAT_F16) return (u32)weight_f16(high) << 16 | weight_f16(low);
  const u32 x = __builtin_bit_cast(u32, low), y = __builtin_bit_cast(u32, high);   // positive, never NaN
  return high_halves(x + 0x7fff + (x >> 16 & 1), y + 0x7fff + (y >> 16 & 1));
}

// Where a sequence's positions lie in this layer.
struct Pages { const int* table; int ring; };              // ring: the table's length if it is one, else 0
DEV Pages pages_of(const AttentionArgs& a, const ChunkInfo& chunk) {
  if (a.windowed) return {a.step.tables + uniform(chunk.window), uniform(chunk.window_pages)};
  return {a.step.tables + uniform(chunk.full), 0};
}
DEV int page_number(const Pages& pages, int page) { return pages.table[pages.ring ? page % pages.ring : page]; }
DEV GlobalBytes head_of_page(const AttentionArgs& a, int number, int kv_head) {
  return (GlobalBytes)a.kv + (number * a.page_bytes + (i64)kv_head * a.head_bytes);
}
DEV int first_visible(const AttentionArgs& a, int position) { return a.windowed ? max_of(0, position - a.window + 1) : 0; }

// Operand B of the score products: a lane's dims of its column's query.
DEV void load_query(u32x2* q, const u16* query, int g) {
  for (int z = 0; z < 2; z++) {
    const u32x4 piece = *(const u32x4*)(query + (z * 4 + g) * 8);
    q[z * 2] = {{piece[0], piece[1]}}, q[z * 2 + 1] = {{piece[2], piece[3]}};
  }
}
// Scores of 16 keys, from a lane's two pieces of K, for N blocks of columns. Products of different blocks take turns, so
// that none waits for the one before it.
template <int FORMAT, int N> DEV void score(Acc* s, u32x4 k0, u32x4 k1, const u32x2 (*q)[4]) {
  const u32x2 k[4] = {{{k0[0], k0[1]}}, {{k0[2], k0[3]}}, {{k1[0], k1[1]}}, {{k1[2], k1[3]}}};
  for (int c = 0; c < N; c++) s[c] = Acc{};
  for (int i = 0; i < 4; i++) for (int c = 0; c < N; c++) s[c] = mfma<FORMAT>(k[i], q[c][i], s[c]);
}
// One column: a lane's share of O and of l, and m.
struct Sums { float m, l; Acc o[4]; };
DEV bool rises(const Sums& u, float top) { return top > u.m + HEADROOM; }
// Sets m anew where a column's largest score asks for it; all lanes of the wave call it.
DEV void raise(Sums& u, float top) {
  top = column_max(top);
  const float m = rises(u, top) ? top - START : u.m, factor = exp2_fast(u.m - m);
  u.m = m, u.l *= factor;
  for (int d = 0; d < 4; d++) u.o[d] *= factor;
}
// Operand B of the value products from 16 keys' scores; the weights join l.
template <int FORMAT> DEV u32x2 weigh(Sums& u, Acc s) {
  s -= u.m;
  float e[4];
  for (int i = 0; i < 4; i++) e[i] = exp2_fast(s[i]);
  u.l += (e[0] + e[1]) + (e[2] + e[3]);
  return {{pack_weights<FORMAT>(e[0], e[1]), pack_weights<FORMAT>(e[2], e[3])}};
}
// Operand A of product d from four keys' dims 4n..4n+3.
DEV u32x2 value_operand(const u32x2* v, int d) {
  const int word = d / 2;
  if (d % 2) return {{high_halves(v[0][word], v[1][word]), high_halves(v[2][word], v[3][word])}};
  return {{low_halves(v[0][word], v[1][word]), low_halves(v[2][word], v[3][word])}};
}
// A lane's 16 dims of a finished column, to the tiled activations. A mean of values needs no saturation.
template <int FORMAT> DEV void store_column(const AttentionArgs& a, int row, int head, const Acc* o, float factor) {
  for (int half = 0; half < 2; half++) {
    u32x4 piece;
    for (int w = 0; w < 4; w++) {
      const int i = half * 2 + w / 2, d = w % 2 * 2;
      const float low = o[d][i] * factor, high = o[d + 1][i] * factor;
      piece[w] = FORMAT == FORMAT_F16 ? pack_weights<FORMAT_F16>(low, high) : pack_bf16(low, high);
    }
    *(u32x4*)(a.out + tiled_index(row, head * HEAD_DIM + LANE / 16 * 16 + half * 8, a.out_rows)) = piece;
  }
}
