// All products in `exact`: activations of two FP16 terms or three BF16 ones, chunks of K summed in float64. See tile.h. Three
// terms of 64 tokens take so much LDS that a SIMD has one wave.
#include "gemm.h"

#define EXACT(OP, NAME, TERMS, Op, Weights, WAVES_16)                                                                  \
  KERNEL(OP##_##NAME##x##TERMS##_n16, GemmArgs, WAVES_16 * WAVE, 1, 2) {                                               \
    SHARED u32v4 tokens[tile_pieces(16, WAVES_16 * WAVE, TERMS)];                                                      \
    one_size_product<Op, Weights, WAVES_16, 1, TERMS>(a, tokens);                                                         \
  }                                                                                                                    \
  KERNEL(OP##_##NAME##x##TERMS##_n64, GemmArgs, 256, 1, TERMS == 3 ? 1 : 2) {                                          \
    SHARED u32v4 tokens[tile_pieces(64, 256, TERMS)];                                                                  \
    one_size_product<Op, Weights, 4, 4, TERMS>(a, tokens);                                                                \
  }

#define EXACT_PRODUCTS(act, FORMAT, TERMS)                                                                             \
  EXACT(qkv, dense_##act, TERMS, Qkv, Dense<FORMAT>, 1)                                                                \
  EXACT(attn_out, dense_##act, TERMS, AttnOut, Dense<FORMAT>, 1)                                                       \
  EXACT(unembed_logits, dense_##act, TERMS, Logits, Dense<FORMAT>, 4)                                                  \
  EXACT(unembed_greedy, dense_##act, TERMS, GreedyLogits, Dense<FORMAT>, 4)                                            \
  EXACT(mlp1, mxfp4_##act, TERMS, Mlp1One<FORMAT>::With<TERMS>, Mxfp4<FORMAT>, 4)                                      \
  EXACT(mlp1, dense_##act, TERMS, Mlp1One<FORMAT>::With<TERMS>, Dense<FORMAT>, 4)                                      \
  EXACT(mlp2, mxfp4_##act, TERMS, Mlp2<true>, Mxfp4<FORMAT>, 4)                                                        \
  EXACT(mlp2, dense_##act, TERMS, Mlp2<true>, Dense<FORMAT>, 4)

// A comma would end a macro's argument.
template <int FORMAT> struct Mlp1One { template <int TERMS> using With = Mlp1<FORMAT, TERMS>; };

EXACT_PRODUCTS(f16, FORMAT_F16, 2)
EXACT_PRODUCTS(bf16, FORMAT_BF16, 3)
