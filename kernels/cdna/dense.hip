// qkv and attn_out, fast: the dense products. See gemm.h. With up to 16 rows a block is one wave, so that few row blocks
// still spread over all compute units. With many, blocks are few for a device: sizes in steps of 16 let the host choose the one
// that leaves the fewest places empty at the end.
#include "gemm.h"

#define DENSE(OP, NAME, Op, Weights)                                                                                   \
  KERNEL(OP##_##NAME##_n16, GemmArgs, 64, 1, 2) { streamed_product<Op, Weights, 1, Weights::STREAM_DEPTH>(a, nullptr); }\
  KERNEL(OP##_##NAME##_n64, GemmArgs, 128, 1, 2) {                                                                     \
    SHARED u32v4 tokens[tile_pieces(64)];                                                                              \
    tiled_product<Op, Weights, 2, 4>(a, tokens);                                                                       \
  }                                                                                                                    \
  DENSE_TILE(OP##_##NAME##_n80, Op, Weights, 5)                                                                        \
  DENSE_TILE(OP##_##NAME##_n96, Op, Weights, 6)                                                                        \
  DENSE_TILE(OP##_##NAME##_n112, Op, Weights, 7)                                                                       \
  DENSE_TILE(OP##_##NAME##_n128, Op, Weights, 8)

#define DENSE_TILE(KERNEL_NAME, Op, Weights, S)                                                                        \
  KERNEL(KERNEL_NAME, GemmArgs, 256, 1, 2) {                                                                           \
    SHARED u32v4 tokens[tile_pieces(S * TOKENS)];                                                                      \
    one_size_product<Op, Weights, 4, S>(a, tokens);                                                                    \
  }

DENSE(qkv, dense_f16x1, Qkv, Dense<FORMAT_F16>)
DENSE(qkv, dense_bf16x1, Qkv, Dense<FORMAT_BF16>)
DENSE(attn_out, dense_f16x1, AttnOut, Dense<FORMAT_F16>)
DENSE(attn_out, dense_bf16x1, AttnOut, Dense<FORMAT_BF16>)
