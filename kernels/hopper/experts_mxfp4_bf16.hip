// The experts' products, MXFP4 weights, BF16 activations: for models whose values do not fit FP16.
#include "gemm.h"

#define EXPERTS(tokens, ...)                                                                                                     \
  GEMM(mlp1_mxfp4_bf16x1_n##tokens, Mlp1, Mxfp4, SpreadSchedule, FORMAT_BF16, 1, Tile<tokens, __VA_ARGS__>)   \
  GEMM(mlp2_mxfp4_bf16x1_n##tokens, Mlp2, Mxfp4, SpreadSchedule, FORMAT_BF16, 1, Tile<tokens, __VA_ARGS__>)

EXPERTS(16, 16, 3, 4)
EXPERTS(64, 64, 3, 2)
EXPERTS(256, 64, 2, 1, 1, 2)
