// The products with 16-bit weights, `exact`: two FP16 or three BF16 terms, pairs of float32 across slabs.
#include "gemm.h"

#define DENSE(act, FORMAT, terms, tokens, layers, unembedding)                                                             \
  GEMM(qkv_dense_##act##x##terms##_n##tokens, Qkv, Dense, SpreadSchedule, FORMAT, terms, layers)                           \
  GEMM(attn_out_dense_##act##x##terms##_n##tokens, AttnOut, Dense, SpreadSchedule, FORMAT, terms, layers)                  \
  GEMM(unembed_greedy_dense_##act##x##terms##_n##tokens, GreedyLogits, Dense, RasterSchedule, FORMAT, terms, unembedding)        \
  GEMM(unembed_logits_dense_##act##x##terms##_n##tokens, Logits, Dense, RasterSchedule, FORMAT, terms, unembedding)

using Few = Tile<8, 8, 1, 1, 4, 1, true>;
using FewWide = Tile<8, 8, 2, 2, 4, 1, true>;
using Many = Tile<64, 64, 3, 1>;
DENSE(f16, FORMAT_F16, 2, 8, Few, FewWide)
DENSE(f16, FORMAT_F16, 2, 64, Many, Many)
DENSE(bf16, FORMAT_BF16, 3, 8, Few, FewWide)
DENSE(bf16, FORMAT_BF16, 3, 64, Many, Many)
