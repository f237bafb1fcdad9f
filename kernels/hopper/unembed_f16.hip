// The unembedding, 16-bit weights, FP16 activations: logits, or each row's largest. The weights are 1.2 GB: rows of up to 256
// make a column of blocks each, see RasterSchedule.
#include "gemm.h"

#define UNEMBED(tokens, ...)                                                                                                    \
  GEMM(unembed_greedy_dense_f16x1_n##tokens, GreedyLogits, Dense, RasterSchedule, FORMAT_F16, 1, Tile<tokens, __VA_ARGS__>)         \
  GEMM(unembed_logits_dense_f16x1_n##tokens, Logits, Dense, RasterSchedule, FORMAT_F16, 1, Tile<tokens, __VA_ARGS__>)

#define SINGLE(tokens) UNEMBED(tokens, tokens, 2, 2, 4, 1, true)
SINGLE(8)
SINGLE(32)
SINGLE(64)
SINGLE(128)
UNEMBED(256, 32, 2, 1)
