// The products of the attention, 16-bit weights, FP16 activations. Few rows: each multiprocessor has about three units of
// weights (48 rows), one warpgroup is enough, and nearly all of shared memory is copies under way.
#include "gemm.h"

#define LAYERS(tokens, ...)                                                                                           \
  GEMM(qkv_dense_f16x1_n##tokens, Qkv, Dense, SpreadSchedule, FORMAT_F16, 1, Tile<tokens, __VA_ARGS__>)            \
  GEMM(attn_out_dense_f16x1_n##tokens, AttnOut, Dense, SpreadSchedule, FORMAT_F16, 1, Tile<tokens, __VA_ARGS__>)

#define SINGLE(tokens) LAYERS(tokens, tokens, 1, 1, 4, 1, true)
SINGLE(8)
SINGLE(32)
SINGLE(64)
SINGLE(128)
LAYERS(192, 32, 3, 1)
LAYERS(256, 32, 2, 1)
