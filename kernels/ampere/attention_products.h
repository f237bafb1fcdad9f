// Prefill attention's products of a tile of 64 keys by a warp, on mma.sync: S = Q K^T, then O += P V, for two strips of
// 16 rows of scores that share each load of keys and values.
#pragma once
#include "../mma/attention_rows.h"
#include "../mma/warp.h"

enum : int { STRIPS = 2 };               // of a warp

// The A fragments of a strip's queries: of lane 4 g + q, head g of queries `query` and the next.
struct Queries { u32 v[K16S][4]; };

template <int FORMAT> DEV void multiply_keys(float (&s)[STRIPS][32], const Queries (&q)[STRIPS], u32 keys) {
  const u32 at = keys + (LANE % 8 + LANE / 16 * 8) * KEY_BYTES + (LANE / 8 % 2 ^ LANE % 8) * 16;
  UNROLL for (int u = 0; u < STRIPS; u++) UNROLL for (int i = 0; i < 32; i++) s[u][i] = 0;
  UNROLL for (int k16 = 0; k16 < K16S; k16++)
    UNROLL for (int j = 0; j < KV_PAGE / 16; j++) {
      u32 k[4];
      load_matrices(k, (at ^ k16 * 32) + j * 16 * KEY_BYTES);
      UNROLL for (int u = 0; u < STRIPS; u++) {
        mma<FORMAT>(s[u] + 8 * j, q[u].v[k16], k[0], k[1]);
        mma<FORMAT>(s[u] + 8 * j + 4, q[u].v[k16], k[2], k[3]);
      }
    }
}

template <int FORMAT> DEV void multiply_values(Rows (&r)[STRIPS], const u32 (&p)[STRIPS][K16S][4], u32 values) {
  const u32 at = values + (LANE % 8 + LANE / 8 % 2 * 8) * KEY_BYTES + (LANE / 16 ^ LANE % 8) * 16;
  UNROLL for (int k16 = 0; k16 < K16S; k16++)
    UNROLL for (int j = 0; j < HEAD_DIM / 16; j++) {
      u32 v[4];
      load_transposed(v, (at ^ j * 32) + k16 * 16 * KEY_BYTES);
      UNROLL for (int u = 0; u < STRIPS; u++) {
        mma<FORMAT>(r[u].o + 8 * j, p[u][k16], v[0], v[1]);
        mma<FORMAT>(r[u].o + 8 * j + 4, p[u][k16], v[2], v[3]);
      }
    }
}
