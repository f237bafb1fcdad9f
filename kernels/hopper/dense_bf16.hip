// The products with 16-bit weights, BF16 activations: for models whose values do not fit FP16.
#include "gemm.h"

#define DENSE(tokens, layers, unembedding)                                                                   \
  GEMM(qkv_dense_bf16x1_n##tokens, Qkv, Dense, SpreadSchedule, FORMAT_BF16, 1, layers)                       \
  GEMM(attn_out_dense_bf16x1_n##tokens, AttnOut, Dense, SpreadSchedule, FORMAT_BF16, 1, layers)              \
  GEMM(unembed_greedy_dense_bf16x1_n##tokens, GreedyLogits, Dense, RasterSchedule, FORMAT_BF16, 1, unembedding)    \
  GEMM(unembed_logits_dense_bf16x1_n##tokens, Logits, Dense, RasterSchedule, FORMAT_BF16, 1, unembedding)

using Few = Tile<16, 16, 1, 1, 4, 1, true>;
using FewWide = Tile<16, 16, 2, 2, 4, 1, true>;
using Many = Tile<256, 64, 2, 1>;
DENSE(16, Few, FewWide)
DENSE(256, Many, Many)
