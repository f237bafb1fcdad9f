// Shared by the attention kernels of CDNA: head_dim 64, 8 query heads per kv head (GQA), MFMA of 16 x 16 outputs, waves
// of 64; queries, cache and output in one 16-bit format.
//
// Scores.   S^T = K Q^T, keys on M and heads on N. A lane (n = lane % 16, g = lane / 16) gets column n (one head of one
//           row) of the scores of keys 4g..4g+3. That is what it must hold as operand B of O^T = V^T P^T: probabilities
//           never leave their lane.
// K         is operand A: lane (n, g) has key n. The order of head_dim is free as long as q has the same one, so a lane
//           takes whole 16-byte pieces, g and 4 + g: MFMA i covers dims 32 (i / 2) + 8 g + 4 (i % 2) + {0..3}.
// V^T       is operand A: lane (n, g) has keys 4g..4g+3. It loads dims 4n..4n+3 of each key (8 bytes) and regroups them
//           by dim; MFMA d takes dims 4n + d, so a lane ends with the 16 dims 16g + 4i + d of its column.
// Softmax.  Online. Weights are 2^(s - m); q is already scaled by log2(e) / 8. A column's m is set to START below its
//           largest score, and moves only when a score exceeds m + HEADROOM. So a weight is at most 2^15, and what
//           MI200's MFMA loses by flushing FP16 subnormals is 2^-25 of the largest. Each column decides for itself:
//           columns of other rows change no bit. The sink joins at the end: it has a part of the sum and no value.
#pragma once
#include "catalogue.h"
#include "mfma.h"

enum : int {
  HEAD_DIM = ATTENTION_DECODE_HEAD_DIM,
  GROUP_HEADS = ATTENTION_DECODE_HEADS_PER_KV_HEAD,        // query heads per kv head
  KV_ROW = HEAD_DIM * 2,         // bytes of one position's K or V
  V_OFFSET = KV_PAGE * KV_ROW,   // bytes from a head's K to its V
  STEP = 16,                     // keys per MFMA
  SCORE_MFMAS = 2 * PIECE_MFMAS, // MFMAs of 16 keys and 16 columns
};
#define HEADROOM 15.f
#define START 11.f
#define UNSET -1e30f             // m before the first score: finite, so that masked scores (-inf) weigh exactly 0

typedef f32v4 Acc;

// Weights are at most 2^15, so they do not need to_f16's saturation.
#if defined(__AMDGCN__)
DEV u16 weight_f16(float v) { return __builtin_bit_cast(u16, (_Float16)v); }
#else
DEV u16 weight_f16(float v) { return to_f16(v); }
#endif

DEV int min_of(int a, int b) { return a < b ? a : b; }
DEV int max_of(int a, int b) { return a > b ? a : b; }
DEV float max_of(float a, float b) { return a > b ? a : b; }
DEV float largest(Acc v) { return max_of(max_of(v[0], v[1]), max_of(v[2], v[3])); }
// Reductions over the four lanes of a column.
DEV float column_max(float v) {
  v = max_of(v, shfl_xor(v, 16));
  return max_of(v, shfl_xor(v, 32));
}
DEV float column_sum(float v) {
  v += shfl_xor(v, 16);
  return v + shfl_xor(v, 32);
}

DEV u32 low_halves(u32 a, u32 b) { return byte_permute(b, a, 0x05040100); }
DEV u32 high_halves(u32 a, u32 b) { return byte_permute(b, a, 0x07060302); }
template <int FORMAT> DEV u32 pack_weights(float low, float high) {
  if constexpr (FORMAT == FORMAT_F16) return (u32)weight_f16(high) << 16 | weight_f16(low);
  const u32 x = __builtin_bit_cast(u32, low), y = __builtin_bit_cast(u32, high);   // positive, never NaN
  return high_halves(x + 0x7fff + (x >> 16 & 1), y + 0x7fff + (y >> 16 & 1));
}

// A sequence's page table for this kind of layer.
// ring: the table's length in windowed layers, where it is a ring buffer; else 0
struct Pages { const int* table; int ring; };
DEV Pages pages_of(const AttentionArgs& a, const ChunkInfo& chunk) {
  if (a.windowed) return {a.step.tables + uniform(chunk.window), uniform(chunk.window_pages)};
  return {a.step.tables + uniform(chunk.full), 0};
}
DEV int page_number(const Pages& pages, int page) { return pages.table[pages.ring ? page % pages.ring : page]; }
DEV Global head_of_page(const AttentionArgs& a, int number, int kv_head) {
  return (Global)a.kv + (number * a.page_bytes + (i64)kv_head * a.head_bytes);
}
DEV int first_visible(const AttentionArgs& a, int position) {
  return a.windowed ? max_of(0, position - a.window + 1) : 0;
}

// Loads operand B of the score MFMAs: a lane's dims of its column's query.
DEV void load_query(u32v2* q, const u16* query, int g) {
  for (int z = 0; z < 2; z++) {
    const u32v4 piece = take((const u32v4*)(query + (z * 4 + g) * 8));
    q[z * 2] = u32v2{piece[0], piece[1]}, q[z * 2 + 1] = u32v2{piece[2], piece[3]};
  }
}
// Scores of 16 keys, from a lane's two pieces of K, for N blocks of columns. MFMAs of different blocks alternate, so
// that none waits for the result of the one before it.
template <int FORMAT, int N> DEV void score(Acc* s, u32v4 k0, u32v4 k1, const u32v2 (*q)[4]) {
  const u32v2 k[4] = {{k0[0], k0[1]}, {k0[2], k0[3]}, {k1[0], k1[1]}, {k1[2], k1[3]}};
  for (int c = 0; c < N; c++) s[c] = Acc{};
  if constexpr (PIECE_MFMAS == 1) {
    for (int i = 0; i < 4; i += 2) for (int c = 0; c < N; c++)
      s[c] = mfma_of_piece<FORMAT>(k[i], k[i + 1], q[c][i], q[c][i + 1], s[c]);
  } else {
    for (int i = 0; i < 4; i++) for (int c = 0; c < N; c++) s[c] = mfma<FORMAT>(k[i], q[c][i], s[c]);
  }
}
// Running sums of one column: m, and a lane's share of O and of l, the sum of weights.
struct Sums { float m, l; Acc o[4]; };
DEV bool rises(const Sums& u, float top) { return top > u.m + HEADROOM; }
// Updates m where a column's largest score exceeds it by too much; all lanes of the wave call it.
DEV void raise(Sums& u, float top) {
  top = column_max(top);
  const float m = rises(u, top) ? top - START : u.m, factor = exp2_fast(u.m - m);
  u.m = m, u.l *= factor;
  for (int d = 0; d < 4; d++) u.o[d] *= factor;
}
// Turns 16 keys' scores into weights, operand B of the value MFMAs, and adds them to l.
template <int FORMAT> DEV u32v2 weigh(Sums& u, Acc s) {
  s -= u.m;
  float e[4];
  for (int i = 0; i < 4; i++) e[i] = exp2_fast(s[i]);
  u.l += (e[0] + e[1]) + (e[2] + e[3]);
  return u32v2{pack_weights<FORMAT>(e[0], e[1]), pack_weights<FORMAT>(e[2], e[3])};
}
// Operand A of value MFMA d, from four keys' dims 4n..4n+3.
DEV u32v2 value_operand(const u32v2* v, int d) {
  const int word = d / 2;
  if (d % 2) return u32v2{high_halves(v[0][word], v[1][word]), high_halves(v[2][word], v[3][word])};
  return u32v2{low_halves(v[0][word], v[1][word]), low_halves(v[2][word], v[3][word])};
}
// Stores a lane's 16 dims of a finished column as tiled activations. A weighted mean of values needs no saturation.
template <int FORMAT> DEV void store_column(const AttentionArgs& a, int row, int head, const Acc* o, float factor) {
  for (int half = 0; half < 2; half++) {
    u32v4 piece;
    for (int w = 0; w < 4; w++) {
      const int i = half * 2 + w / 2, d = w % 2 * 2;
      float low = o[d][i] * factor, high = o[d + 1][i] * factor;
      // Else clang takes an instruction for product and conversion that loses the sign of a zero.
      if constexpr (WITHIN_LAUNCH) { VECTOR(low); VECTOR(high); }
      piece[w] = FORMAT == FORMAT_F16 ? pack_weights<FORMAT_F16>(low, high) : pack_bf16(low, high);
    }
    hand_on((u32v4*)(a.out + tiled_index(row, head * HEAD_DIM + LANE / 16 * 16 + half * 8, a.out_rows)), piece);
  }
}
