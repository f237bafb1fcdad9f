// Products of few tokens. wgmma needs a warpgroup, and each group of wgmmas takes some hundred cycles beside its few
// multiplications. Here each warp multiplies its 16 rows of a block by itself: it waits for no other warp, loads
// operands half a slab ahead, and waits once for a stage of several slabs. The bits are wgmma's, see warp.h.
#pragma once
#include <type_traits>
#include "copy.h"
#include "mxfp4.h"
#include "warp.h"

// A warp's rows of M blocks in one slab, as they lie in shared memory. locate() says where this thread's parts of stage
// 0 begin, from the address of its warpgroup's first block; load() gets them from so many bytes further. bits() has
// some of each load.
template <class G, int M> struct WarpCodes {
  enum : int { PARTS = 2 };
  typename G::template Codes<M> codes;
  static DEV void locate(u32 block, u32 (&at)[PARTS]) {
    at[0] = block + TID % 128 * 16;
    at[1] = block + Mxfp4::SCALES + TID % 128 / 4 * 4;
  }
  DEV void load(const u32 (&at)[PARTS], u32 further) { codes.load(at[0] + further, at[1] + further); }
  DEV void fragments(int step, u32 (&fragment)[M][4]) const { codes.decode(step, fragment); }
  DEV u32 bits() const {
    u32 all = 0;
#pragma unroll
    for (int m = 0; m < M; m++) all ^= codes.words[m][0] ^ codes.scales[m];
    return all;
  }
};
template <class G, int M> struct WarpW16 {
  enum : int { PARTS = 4 };                                // 16 along K each
  u32 values[M][PARTS][4];
  static DEV void locate(u32 block, u32 (&at)[PARTS]) {
    const u32 row = block + TID / WAVE % 4 * G::UNIT_BYTES + LANE % 16 * SLAB * 2;
#pragma unroll
    for (int s = 0; s < PARTS; s++) at[s] = row + ((2 * s + LANE / 16) ^ (LANE % 8)) * 16;
  }
  DEV void load(const u32 (&at)[PARTS], u32 further) {
#pragma unroll
    for (int s = 0; s < PARTS; s++)
#pragma unroll
      for (int m = 0; m < M; m++) load_matrices(values[m][s], at[s] + further + m * G::NEXT_BLOCK);
  }
  DEV void fragments(int step, u32 (&fragment)[M][4]) const {
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
      for (int i = 0; i < 4; i++) fragment[m][i] = values[m][step][i];
  }
  DEV u32 bits() const {
    u32 all = 0;
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
      for (int s = 0; s < PARTS; s++) all ^= values[m][s][0];
    return all;
  }
};

// G: the product (gemm.h).
template <class G, int N, int M> struct ByWarps {
  using Weights = std::conditional_t<(bool)G::IS_W16, WarpW16<G, M>, WarpCodes<G, M>>;
  // Where this thread's operands of stage 0 begin, opaque to the compiler, which would work it out for every slab.
  struct At {
    u32 weights[Weights::PARTS], tokens[2];
    DEV At(const Pipe& p) {
      Weights::locate(G::first_block(p), weights);
#pragma unroll
      for (int half = 0; half < 2; half++)
        tokens[half] = p.base + LANE % 8 * SLAB * 2 + ((4 * half + LANE / 8) ^ (LANE % 8)) * 16;
#pragma unroll
      for (int i = 0; i < Weights::PARTS; i++) asm volatile("" : "+r"(weights[i]));
      asm volatile("" : "+r"(tokens[0]), "+r"(tokens[1]));
    }
  };
  // Weights of a slab, and of the next; tokens of half a slab, and of the next half.
  At at;
  Weights weights[2];
  u32 tokens[2][N / 8][4];

  // Slab i of a stage.
  DEV void load_weights(const Pipe& p, int i) {
    weights[i % 2].load(at.weights, p.stage * G::STAGE_BYTES + i * G::WEIGHT_BYTES);
  }
  DEV void load_tokens(const Pipe& p, int i, int half) {
#pragma unroll
    for (int j = 0; j < N / 8; j++)
      load_matrices(tokens[half][j],
                    at.tokens[half] + p.stage * G::STAGE_BYTES + i * G::TOKEN_BYTES + j * 8 * SLAB * 2);
  }
  DEV void multiply_half(int i, int half, float (&sum)[M][N / 2]) const {
#pragma unroll
    for (int s = 0; s < 2; s++) {
      u32 fragment[M][4];
      weights[i % 2].fragments(2 * half + s, fragment);
#pragma unroll
      for (int m = 0; m < M; m++)
#pragma unroll
        for (int j = 0; j < N / 8; j++) {
          const u32* b = tokens[half][j] + 2 * s;
          mma<G::ELEMENTS>(sum[m] + 4 * j, fragment[m], b[0], b[1]);
        }
    }
  }
  // Multiplies slab i, which is loaded but for the second half's tokens; `load_next` loads as much of the next.
  template <class LoadNext> DEV void multiply_slab(const Pipe& p, int i, float (&sum)[M][N / 2], LoadNext load_next) {
    load_tokens(p, i, 1);
    multiply_half(i, 0, sum);
    load_next();
    multiply_half(i, 1, sum);
  }

  // Zero, once the weights of slab i and the second half's tokens are in registers; `zero` is one that the compiler
  // does not know.
  DEV u32 loaded(int i, u32 zero) const {
    u32 all = weights[i % 2].bits();
#pragma unroll
    for (int j = 0; j < N / 8; j++) all ^= tokens[1][j][0];
    return all & zero;
  }
  // An arrival at an mbarrier may overtake loads from shared memory that are still under way, and the stage be
  // overwritten before they are done. So its address depends on what they load; those of a warp are done in order.
  static DEV void release(const Pipe& p, int stage, u32 loaded) {
    Pipe then = p;
    then.empty += loaded;
    __syncwarp();
    G::release(then, stage);
  }

  static DEV void multiply(const GemmArgs& a, Pipe& p, float (&sum)[M][N / 2]) {
    constexpr int SLABS = G::SLABS;
    static_assert(SLABS % 2 == 0, "slabs alternate between two sets of registers");
    const u32 zero = (u32)(a.k_blocks >> 31);
    ByWarps by = {At(p)};
    const auto load = [&](int i) { by.load_weights(p, i), by.load_tokens(p, i, 0); };
    G::wait_full(p);
    load(0);
    const int last = G::steps_of(a) - 1;
    for (int step = 0; step < last; step++) {
#pragma unroll
      for (int i = 0; i < SLABS; i++)
        by.multiply_slab(p, i, sum, [&] {
          if (i + 1 < SLABS) return load(i + 1);
          const int done = p.stage;
          G::advance(p);
          G::wait_full(p);
          load(0);
          release(p, done, by.loaded(SLABS - 1, zero));
        });
    }
    const int count = G::slabs_of(a, last);
#pragma unroll
    for (int i = 0; i < SLABS; i++)
      if (i < count)
        by.multiply_slab(p, i, sum, [&] {
          if (i + 1 < count) load(i + 1);
        });
    release(p, p.stage, by.loaded(0, zero) | by.loaded(1, zero));
    G::advance(p);
  }
};
