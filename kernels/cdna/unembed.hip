// unembed, fast: logits, or for greedy sampling the largest of each 128. See gemm.h.
#include "gemm.h"

#define UNEMBED(OP, NAME, Op, Weights)                                                                                 \
  KERNEL(OP##_##NAME##_n16, GemmArgs, 256, 1, 2) {                                                                     \
    SHARED Best bests[4 * TOKENS];                                                                                     \
    streamed_product<Op, Weights, 4, Weights::STREAM_DEPTH>(a, (u8*)bests);                                            \
  }                                                                                                                    \
  KERNEL(OP##_##NAME##_n64, GemmArgs, 256, 1, 2) {                                                                     \
    SHARED u32v4 tokens[tile_pieces(64)];                                                                              \
    tiled_product<Op, Weights, 4, 4>(a, tokens);                                                                       \
  }                                                                                                                    \
  KERNEL(OP##_##NAME##_n128, GemmArgs, 256, 1, 2) {                                                                    \
    SHARED u32v4 tokens[tile_pieces(128)];                                                                             \
    tiled_product<Op, Weights, 4, 8, 2>(a, tokens);                                                                    \
  }

UNEMBED(unembed_logits, dense_f16x1, Logits, Dense<FORMAT_F16>)
UNEMBED(unembed_logits, dense_bf16x1, Logits, Dense<FORMAT_BF16>)
UNEMBED(unembed_greedy, dense_f16x1, GreedyLogits, Dense<FORMAT_F16>)
UNEMBED(unembed_greedy, dense_bf16x1, GreedyLogits, Dense<FORMAT_BF16>)
