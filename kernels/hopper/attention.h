// What decode and prefill attention share on Hopper: how tiles of the cache come in, and the softmax.
//
// A (page, kv head) of the cache is one tile: 64 keys of 128 bytes, then 64 values of 128 bytes. Its 16-byte pieces are
// swizzled as ldmatrix and wgmma (128-byte swizzle) want them, so one bulk copy of 16 KB brings it as it is.
#pragma once
#include "../gpu/math.h"
#include "catalogue.h"
#include "copy.h"

enum : int {
  HEAD_DIM = ATTENTION_DECODE_HEAD_DIM,
  GROUP_HEADS = ATTENTION_DECODE_HEADS_PER_KV_HEAD,        // query heads that share a kv head
  ROW_BYTES = HEAD_DIM * 2,
  HALF_TILE = KV_PAGE * ROW_BYTES,       // K of a tile, or V
  TILE_BYTES = 2 * HALF_TILE,
};

constexpr float LOG2E = 1.4426950408889634f;
constexpr float NEGATIVE_INFINITY = -__builtin_inff();

// Weights are 2^(score - m). A common factor costs no precision as long as nothing overflows, so m follows the running
// maximum only when that has got this far away: FP16 ends at 2^16, BF16 at float32's end.
template <int FORMAT> constexpr float SLACK = FORMAT == FORMAT_F16 ? 8.f : 32.f;

DEV float max_of(float a, float b) { return fmaxf(a, b); }

// Two weights, at most 2^SLACK, as 16-bit values.
template <int FORMAT> DEV u32 pack_weights(float low, float high) {
  u32 r;                                 // cvt puts its first operand into the high half
  if (FORMAT == FORMAT_F16) asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  else asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}
// Two results. They are means of finite values, but the rounding of weights may carry one past FP16's end.
template <int FORMAT> DEV u32 pack_output(float low, float high) {
  u32 r;
  if (FORMAT == FORMAT_F16) asm("cvt.rn.satfinite.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  else asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}

// What the weighted values are multiplied by in the end: the sink has a part of the sum and no value.
DEV float normalizer(float m, float sum, float sink) {
  const float top = max_of(m, sink), scale = exp2_fast(m - top);
  return scale / (sum * scale + exp2_fast(sink - top));
}

// Brings rows first .. last of a tile's K and V, and tells the barrier.
DEV void copy_tile(u32 to, const u8* from, int first, int last, u32 barrier, u64 policy) {
  const u32 bytes = (last - first + 1) * ROW_BYTES, skip = first * ROW_BYTES;
  barrier_arrive_expect(barrier, 2 * bytes);
  if (bytes == HALF_TILE) {
    bulk_copy(to, from, TILE_BYTES, barrier, policy);
  } else {
    bulk_copy(to + skip, from + skip, bytes, barrier, policy);
    bulk_copy(to + HALF_TILE + skip, from + HALF_TILE + skip, bytes, barrier, policy);
  }
}

// Where a sequence's pages are listed: page i is at base[i % ring].
struct PageTable { const int* base; int ring; };
DEV PageTable page_table(const AttentionArgs& a, const ChunkInfo& chunk) {
  return a.windowed ? PageTable{a.step.tables + chunk.window, chunk.window_pages}
                    : PageTable{a.step.tables + chunk.full, 0x7fffffff};
}
DEV int page_number(const PageTable& table, int page) { return __ldg(table.base + page % table.ring); }

DEV int first_visible_key(const AttentionArgs& a, int position) {
  return a.windowed ? max(0, position - a.window + 1) : 0;
}
