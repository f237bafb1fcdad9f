// qkv and attn_out, fast: the dense products. See gemm.h. With up to 16 rows a block is one wave, so that few row blocks
// still spread over all compute units.
#include "gemm.h"

#define DENSE(OP, NAME, Op, Weights)                                                                                   \
  KERNEL(OP##_##NAME##_n16, GemmArgs, 64, 1, 2) { streamed_product<Op, Weights, 1, Weights::STREAM_DEPTH>(a, nullptr); }\
  KERNEL(OP##_##NAME##_n64, GemmArgs, 128, 1, 2) {                                                                     \
    SHARED u32v4 tokens[tile_pieces(64)];                                                                              \
    tiled_product<Op, Weights, 2, 4>(a, tokens);                                                                       \
  }                                                                                                                    \
  KERNEL(OP##_##NAME##_n128, GemmArgs, 256, 1, 2) {                                                                    \
    SHARED u32v4 tokens[tile_pieces(128)];                                                                             \
    tiled_product<Op, Weights, 4, 8, 2>(a, tokens);                                                                    \
  }

DENSE(qkv, dense_f16x1, Qkv, Dense<FORMAT_F16>)
DENSE(qkv, dense_bf16x1, Qkv, Dense<FORMAT_BF16>)
DENSE(attn_out, dense_f16x1, AttnOut, Dense<FORMAT_F16>)
DENSE(attn_out, dense_bf16x1, AttnOut, Dense<FORMAT_BF16>)
