// The experts' products, MXFP4 weights, `exact`: two FP16 or three BF16 terms, pairs of float32 across slabs.
#include "gemm.h"

#define EXPERTS(act, FORMAT, terms, tokens, ...)                                                                               \
  GEMM(mlp1_mxfp4_##act##x##terms##_n##tokens, Mlp1, Mxfp4, SpreadSchedule, FORMAT, terms, Tile<tokens, __VA_ARGS__>)          \
  GEMM(mlp2_mxfp4_##act##x##terms##_n##tokens, Mlp2, Mxfp4, SpreadSchedule, FORMAT, terms, Tile<tokens, __VA_ARGS__>)

EXPERTS(f16, FORMAT_F16, 2, 8, 8, 3, 2)
EXPERTS(f16, FORMAT_F16, 2, 64, 64, 3, 1)
EXPERTS(bf16, FORMAT_BF16, 3, 8, 8, 3, 2)
EXPERTS(bf16, FORMAT_BF16, 3, 64, 64, 3, 1)
