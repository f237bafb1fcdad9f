// Tiles of the experts' products with MXFP4 weights and FP16 activations. Up to 32 tokens DRAM is the limit: many
// blocks a chunk make large copies. From 48 on registers are: fewer blocks. Everywhere a second fragment buffer lets
// decoding go on while wgmma works: with few rows a warpgroup has one block, whose k16 steps wait for each other, and
// nothing else hides it. As experts' rows are uneven, tiles from 48 on multiply in steps of 16 tokens or 32. A kernel
// holds a handful of widths before its registers spill, so a tile leaves the widths of the narrower one to that.
#pragma once
#include "gemm.h"

#define MXFP4_F16_TILE(op, Op, tokens, ...) \
  GEMM(op##_mxfp4_f16x1_n##tokens, Op, Mxfp4, SpreadSchedule, FORMAT_F16, 1, Tile<tokens, __VA_ARGS__>)

#define MXFP4_F16_TILES(op, Op)                           \
  MXFP4_F16_TILE(op, Op, 8, 8, 3, 3, 2, 2)                \
  MXFP4_F16_TILE(op, Op, 16, 16, 3, 3, 2, 2)              \
  MXFP4_F16_TILE(op, Op, 32, 32, 3, 3, 1, 2)              \
  MXFP4_F16_TILE(op, Op, 48, 16, 3, 2, 2, 2, false, 32)   \
  MXFP4_F16_TILE(op, Op, 64, 64, 3, 2, 2, 2)              \
  MXFP4_F16_TILE(op, Op, 96, 16, 3, 1, 2, 2, false, 48)   \
  MXFP4_F16_TILE(op, Op, 128, 16, 3, 1, 2, 2, false, 80)  \
  MXFP4_F16_TILE(op, Op, 192, 16, 3, 1, 1, 2, false, 176) \
  MXFP4_F16_TILE(op, Op, 256, 32, 2, 1, 1, 2)
