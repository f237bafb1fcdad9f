// The experts' products where the checkpoint's experts are not MXFP4: 16-bit weights.
#include "gemm.h"

#define EXPERTS(act, FORMAT, terms, tokens, ...)                                                                               \
  GEMM(mlp1_dense_##act##x##terms##_n##tokens, Mlp1, Dense, SpreadSchedule, FORMAT, terms, Tile<tokens, __VA_ARGS__>)          \
  GEMM(mlp2_dense_##act##x##terms##_n##tokens, Mlp2, Dense, SpreadSchedule, FORMAT, terms, Tile<tokens, __VA_ARGS__>)

EXPERTS(f16, FORMAT_F16, 1, 16, 16, 2, 2)
EXPERTS(f16, FORMAT_F16, 1, 256, 64, 2, 1)
EXPERTS(bf16, FORMAT_BF16, 1, 16, 16, 2, 2)
EXPERTS(bf16, FORMAT_BF16, 1, 256, 64, 2, 1)
EXPERTS(f16, FORMAT_F16, 2, 64, 64, 3, 1)
EXPERTS(bf16, FORMAT_BF16, 3, 64, 64, 3, 1)
