// mlp2, fast: the experts' second product. See gemm.h.
#include "gemm.h"

#define MLP2(NAME, Weights, STEP)                                                                                      \
  KERNEL(mlp2_##NAME##_n16, GemmArgs, 256, 1, 3) {                                                                     \
    streamed_product<Mlp2<false>, Weights, 4, Weights::STREAM_DEPTH>(a, nullptr);                                      \
  }                                                                                                                    \
  KERNEL(mlp2_##NAME##_n64, GemmArgs, 256, 1, 3) {                                                                     \
    SHARED u32v4 tokens[tile_pieces(64)];                                                                              \
    tiled_product<Mlp2<false>, Weights, 4, 4, STEP>(a, tokens);                                                        \
  }                                                                                                                    \
  KERNEL(mlp2_##NAME##_n128, GemmArgs, 256, 1, 2) {                                                                    \
    SHARED u32v4 tokens[tile_pieces(128)];                                                                             \
    tiled_product<Mlp2<false>, Weights, 4, 8, STEP>(a, tokens);                                                        \
  }

MLP2(mxfp4_f16x1, Mxfp4<FORMAT_F16>, 1)
// Fall-backs: half as many tile sizes to compile.
MLP2(mxfp4_bf16x1, Mxfp4<FORMAT_BF16>, 2)
MLP2(dense_f16x1, Dense<FORMAT_F16>, 2)
MLP2(dense_bf16x1, Dense<FORMAT_BF16>, 2)
