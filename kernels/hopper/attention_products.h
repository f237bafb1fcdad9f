// Prefill attention's products of a tile of 64 keys by a warpgroup, on wgmma m64n64k16: S = Q K^T with both operands in
// shared memory, O += P V with P in registers.
#pragma once
#include "../mma/attention_rows.h"
#include "instruction.h"

// wgmma writes accumulators asynchronously, which the compiler does not know: keeps it from moving them across this
// point.
DEV void pin(float* v) { UNROLL for (int i = 0; i < 32; i++) asm volatile("" : "+f"(v[i])::"memory"); }

// The descriptor of an operand of 128-byte rows in the 128-byte swizzle, 8 rows per 1024 bytes. Rows hold head dims,
// which are the contracted dimension of Q and K (K-major), but not of V (MN-major).
DEV u64 operand(u32 at) { return (u64)(at >> 4) | (u64)(1024 >> 4) << 16 | (u64)(1024 >> 4) << 32 | 1ull << 62; }
// of k16, in a descriptor's units of 16 bytes
constexpr u32 K16_ALONG_ROWS = 32 >> 4, K16_DOWN_ROWS = 16 * KEY_BYTES >> 4;

// Wgmma of instruction.h has no transposed operands. A is in registers.
#define WGMMA_TRANSPOSED(types) \
  asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32." types " {" WGMMA_D64 "}" \
               ", {%32,%33,%34,%35}, %36, 1, 1, 1, 1;" \
               : WGMMA_O64 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))
template <int FORMAT> DEV void wgmma_transposed(float* d, const u32* a, u64 b) {
  if (FORMAT == FORMAT_F16) WGMMA_TRANSPOSED("f16.f16");
  else WGMMA_TRANSPOSED("bf16.bf16");
}

template <int FORMAT> DEV void issue_scores(float* s, u32 queries, u32 tile) {
  UNROLL for (int k = 0; k < K16S; k++)
    Wgmma<FORMAT, KV_PAGE>::d16(s, operand(queries) + k * K16_ALONG_ROWS, operand(tile) + k * K16_ALONG_ROWS, k > 0);
}
template <int FORMAT> DEV void issue_values(float* o, const u32 (*p)[4], u32 tile) {
  UNROLL for (int k = 0; k < K16S; k++)
    wgmma_transposed<FORMAT>(o, p[k], operand(tile + HALF_TILE) + k * K16_DOWN_ROWS);
}
