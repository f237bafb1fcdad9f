// Products of few tokens. wgmma needs a warpgroup, and each group of wgmmas takes some hundred cycles beside its few
// multiplications. Here each warp multiplies its 16 rows of a block by itself: it waits for no other warp, loads
// operands and decodes ahead, and waits once for a stage of several slabs. The bits are wgmma's, see warp.h.
#pragma once
#include <type_traits>
#include "codes.h"
#include "loop.h"
#include "../mma/warp.h"

// A warp's rows of M blocks in one slab, as they lie in shared memory. locate() says where this thread's parts of stage
// 0 begin, from the address of its warpgroup's first block; load() gets them from so many bytes further. bits() has
// some of each load.
template <class G, int M> struct WarpCodes {
  enum : int { PARTS = 2 };
  Codes<G, M> codes;
  static DEV void locate(u32 block, u32 (&at)[PARTS]) {
    at[0] = block + TID % 128 * 16;
    at[1] = block + Mxfp4::SCALES + TID % 128 / 4 * 4;
  }
  DEV void load(const u32 (&at)[PARTS], u32 further) { codes.load(at[0] + further, at[1] + further); }
  DEV void fragments(int k16, u32 (&fragment)[M][4]) const { codes.decode(k16, fragment); }
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
  DEV void fragments(int k16, u32 (&fragment)[M][4]) const {
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
      for (int i = 0; i < 4; i++) fragment[m][i] = values[m][k16][i];
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
  // Weights of two slabs in turn, tokens of a slab's halves, and the fragments of a k16 and of the next.
  At at;
  Weights weights[2];
  u32 tokens[2][N / 8][4];
  u32 fragment[2][M][4];

  // Of slab i of a stage.
  DEV void load_weights(const Pipe& p, int i) {
    weights[i % 2].load(at.weights, p.stage * G::STAGE_BYTES + i * G::WEIGHT_BYTES);
  }
  DEV void load_tokens(const Pipe& p, int i, int half) {
#pragma unroll
    for (int j = 0; j < N / 8; j++)
      load_matrices(tokens[half][j],
                    at.tokens[half] + p.stage * G::STAGE_BYTES + i * G::TOKEN_BYTES + j * 8 * SLAB * 2);
  }
  DEV void decode(int i, int k16) { weights[i % 2].fragments(k16, fragment[k16 % 2]); }
  DEV void multiply_k16(int k16, float (&sum)[M][N / 2]) const {
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
      for (int j = 0; j < N / 8; j++) {
        const u32* b = tokens[k16 / 2][j] + 2 * (k16 % 2);
        mma<G::ELEMENTS>(sum[m] + 4 * j, fragment[k16 % 2][m], b[0], b[1]);
      }
  }

  // COUNT slabs of a stage from slab FIRST on. A slab is loaded during the last two k16s of the slab before, and
  // leaves its own last two to the slab behind; one is decoded before the one ahead of it is multiplied. So the
  // chain of multiplications goes on over the wait for a stage.
  template <int COUNT, int FIRST> DEV void multiply_slabs(const Pipe& p, float (&sum)[M][N / 2]) {
#pragma unroll
    for (int i = FIRST; i < FIRST + COUNT; i++) {
      load_weights(p, i);
      load_tokens(p, i, 0);
      multiply_k16(2, sum);
      decode(i + 1, 3);
      multiply_k16(3, sum);
      load_tokens(p, i, 1);
      decode(i, 0);
      multiply_k16(0, sum);
      decode(i, 1);
      multiply_k16(1, sum);
      decode(i, 2);
    }
  }
  // Zero, once the weights of slab i and the tokens are in registers; `zero` is one that the compiler does not know.
  DEV u32 loaded(int i, u32 zero) const {
    u32 all = weights[i % 2].bits();
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
      for (int j = 0; j < N / 8; j++) all ^= tokens[half][j][0];
    return all & zero;
  }
  // An arrival at an mbarrier may overtake loads from shared memory that are still under way, and the stage be
  // overwritten before they are done. So its address depends on what they load; those of a warp are done in order.
  static DEV void release(Pipe& p, u32 loaded) {
    Pipe then = p;
    then.empty += loaded;
    __syncwarp();
    G::release(then, p.stage);
    G::advance(p);
  }
  // The last two k16s of slab i.
  DEV void finish(int i, float (&sum)[M][N / 2]) {
    multiply_k16(2, sum);
    decode(i, 3);
    multiply_k16(3, sum);
  }

  static DEV void multiply(const GemmArgs& a, Pipe& p, float (&sum)[M][N / 2]) {
    constexpr int SLABS = G::SLABS;
    static_assert(SLABS == 2 || SLABS == 4, "slabs alternate between two sets of registers");
    ByWarps by = {At(p)};                                  // before the first slab comes one of zeros
    const u32 zero = (u32)(a.k_blocks >> 31);
    const int whole = a.k_blocks / SLABS, rest = a.k_blocks % SLABS;
    for (int k_tile = 0; k_tile < whole; k_tile++) {
      G::wait_full(p);
      by.template multiply_slabs<SLABS, 0>(p, sum);
      release(p, by.loaded(SLABS - 1, zero));
    }
    if (rest == 0) return by.finish(SLABS - 1, sum);
    G::wait_full(p);
    by.template multiply_slabs<1, 0>(p, sum);
    if (SLABS > 2 && rest > 1) by.template multiply_slabs<1, 1>(p, sum);
    if (SLABS > 2 && rest > 2) by.template multiply_slabs<1, 2>(p, sum);
    if (rest == 2) release(p, by.loaded(1, zero)), by.finish(1, sum);
    else release(p, by.loaded(0, zero)), by.finish(0, sum);
  }
};

// SLABS: of a stage.
template <int SLABS_> struct OfWarps : LoopOfWarps {
  enum : int { SLABS = SLABS_ };
  template <class G, int N, int M> using Of = ByWarps<G, N, M>;
};
