// Tiles of the experts' products with MXFP4 weights and FP16 activations. Up to 32 tokens DRAM is the limit: many blocks a
// chunk make large copies. From 48 on registers are: fewer blocks. Everywhere a second fragment buffer lets decoding go on
// while wgmma works: with few rows a warpgroup has one block, whose k16 steps wait for each other, and nothing else hides
// it. Tiles above 64 multiply in steps of 32 tokens, as experts' rows are uneven.
#pragma once
#include "gemm.h"

#define MXFP4_F16_TILE(op, Op, tokens, ...) \
  GEMM(op##_mxfp4_f16x1_n##tokens, Op, Mxfp4, SpreadSchedule, FORMAT_F16, 1, Tile<tokens, __VA_ARGS__>)

#define MXFP4_F16_TILES(op, Op)                \
  MXFP4_F16_TILE(op, Op, 8, 8, 3, 3, 2, 2)     \
  MXFP4_F16_TILE(op, Op, 16, 16, 3, 3, 2, 2)   \
  MXFP4_F16_TILE(op, Op, 32, 32, 3, 3, 1, 2)   \
  MXFP4_F16_TILE(op, Op, 48, 48, 3, 2, 2, 2)   \
  MXFP4_F16_TILE(op, Op, 64, 64, 3, 2, 2, 2)   \
  MXFP4_F16_TILE(op, Op, 128, 32, 3, 1, 2, 2)  \
  MXFP4_F16_TILE(op, Op, 256, 32, 2, 1, 1, 2)
