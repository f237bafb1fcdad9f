// mlp1, fast: the experts' first product with the gated unit. See gemm.h.
#include "gemm.h"

#define MLP1(NAME, Weights, STEP)                                                                                      \
  KERNEL(mlp1_##NAME##_n16, GemmArgs, 256, 1, 3) {                                                                     \
    streamed_product<Mlp1<Weights::FORMAT, 1>, Weights, 4, Weights::STREAM_DEPTH>(a, nullptr);                         \
  }                                                                                                                    \
  KERNEL(mlp1_##NAME##_n64, GemmArgs, 256, 1, 3) {                                                                     \
    SHARED u32v4 tokens[tile_pieces(64)];                                                                              \
    tiled_product<Mlp1<Weights::FORMAT, 1>, Weights, 4, 4, STEP>(a, tokens);                                           \
  }                                                                                                                    \
  KERNEL(mlp1_##NAME##_n128, GemmArgs, 256, 1, 2) {                                                                    \
    SHARED u32v4 tokens[tile_pieces(128)];                                                                             \
    tiled_product<Mlp1<Weights::FORMAT, 1>, Weights, 4, 8, STEP>(a, tokens);                                           \
  }

MLP1(mxfp4_f16x1, Mxfp4<FORMAT_F16>, 1)
// Fall-backs: half as many tile sizes to compile.
MLP1(mxfp4_bf16x1, Mxfp4<FORMAT_BF16>, 2)
MLP1(dense_f16x1, Dense<FORMAT_F16>, 2)
MLP1(dense_bf16x1, Dense<FORMAT_BF16>, 2)
