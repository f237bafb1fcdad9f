// Shared by attention kernels: tiles of the KV cache, page tables, and parts of the online softmax.
//
// The part of a 16-bit cache page that belongs to one kv head is one tile: 64 keys of 128 bytes, then 64 values of 128
// bytes. Its 16-byte pieces already have the 128-byte swizzle that ldmatrix (and wgmma) expects, so that its 16 KB come
// into shared memory as they are.
#pragma once
#include "../gpu/math.h"
#include "catalogue.h"

enum : int {
  HEAD_DIM = ATTENTION_DECODE_HEAD_DIM,
  GROUP_HEADS = ATTENTION_DECODE_HEADS_PER_KV_HEAD,        // query heads per kv head: a GQA group
  KEY_BYTES = HEAD_DIM * 2,
  HALF_TILE = KV_PAGE * KEY_BYTES,       // K of a tile, or V
  TILE_BYTES = 2 * HALF_TILE,
};

constexpr float NEGATIVE_INFINITY = -__builtin_inff();

// Online softmax: weights are 2^(score - m), where m is the running maximum or an earlier value of it. A common factor
// of all weights costs no precision unless a weight overflows, so m is updated only when the running maximum exceeds it
// by more than SLACK. FP16 overflows at 2^16, BF16 where float32 does.
template <int FORMAT> constexpr float SLACK = FORMAT == FORMAT_F16 ? 8.f : 32.f;

DEV float max_of(float a, float b) { return fmaxf(a, b); }

// Packs two weights, each at most 2^SLACK.
template <int FORMAT> DEV u32 pack_weights(float low, float high) {
  u32 r;                                 // cvt puts its first operand into the high half
  if (FORMAT == FORMAT_F16) asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  else asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}
// Packs two outputs. They are weighted means of finite values, but rounding of the weights may carry one past FP16's
// largest number: it saturates.
template <int FORMAT> DEV u32 pack_output(float low, float high) {
  u32 r;
  if (FORMAT == FORMAT_F16) asm("cvt.rn.satfinite.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  else asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}

// The final factor of the weighted sum of values: 1 / (sum of weights + weight of the sink). The sink has no value.
DEV float normalizer(float m, float sum, float sink) {
  const float top = max_of(m, sink), scale = exp2_fast(m - top);
  return scale / (sum * scale + exp2_fast(sink - top));
}

// A sequence's page table: the number of its page i is base[i % ring].
struct PageTable { const int* base; int ring; };
DEV PageTable page_table(const AttentionArgs& a, const ChunkInfo& chunk) {
  return a.windowed ? PageTable{a.step.tables + chunk.window, chunk.window_pages}
                    : PageTable{a.step.tables + chunk.full, 0x7fffffff};
}
DEV int page_number(const PageTable& table, int page) { return __ldg(table.base + page % table.ring); }

DEV int first_visible_key(const AttentionArgs& a, int position) {
  return a.windowed ? max(0, position - a.window + 1) : 0;
}
