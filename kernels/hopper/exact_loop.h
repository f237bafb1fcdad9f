// `exact`: activations have several terms, and sums have to lose little.
//
// One slab with 16-bit weights, SLABS_CHAINED slabs with MXFP4, are summed in fresh accumulators, low terms first:
// MXFP4's products are so short that wgmma loses little of them. What comes of these is added up in float32, which
// rounds to nearest as wgmma does not: with 16-bit weights SLABS_TOGETHER at a time, and then their sums, so that no
// chain of additions is long.
#pragma once
#include "catalogue.h"
#include "codes.h"
#include "instruction.h"
#include "loop.h"
#include "../mma/w16.h"

// G: the product (gemm.h).
template <class G, int N, int M> struct ExactLoop {
  enum : bool { IS_W16 = G::IS_W16 };
  enum : int { SLABS = IS_W16 ? 1 : SLABS_CHAINED };

  static DEV void multiply(const GemmArgs& a, Pipe& p, float (&sum)[M][N / 2]) {
    const CodesAt at(G::first_block(p));
    if constexpr (IS_W16) {
      float part[M][N / 2];
      clear(part);
      for (int k = 0; k < a.k_blocks; k++) {
        if (k > 0 && k % SLABS_TOGETHER == 0) add(sum, part), clear(part);
        multiply_slabs<SLABS>(p, at, part);
      }
      add(sum, part);
    } else {
      int k = 0;
      for (; k + SLABS <= a.k_blocks; k += SLABS) multiply_slabs<SLABS>(p, at, sum);
      static_assert(SLABS == 2, "at most one is left");
      if (k < a.k_blocks) multiply_slabs<1>(p, at, sum);
    }
  }
  static DEV void add(float (&sum)[M][N / 2], const float (&more)[M][N / 2]) {
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
      for (int i = 0; i < N / 2; i++) sum[m][i] = add_rn(sum[m][i], more[m][i]);
  }

  // Decoded weights serve all terms. A thread of three warpgroups has 160 registers. Beside a tile's sums and, of
  // MXFP4, 32 for two slabs' weights they hold fresh accumulators of 96 tokens: halves of wider tiles take turns.
  template <int COUNT> static DEV void multiply_slabs(Pipe& p, const CodesAt& at, float (&sum)[M][N / 2]) {
    constexpr int AT_ONCE = 96, HALF = N > AT_ONCE && G::T::WARPGROUPS > 2 ? (N / 2 + 7) / 8 * 8 : N;
    u64 tokens[COUNT], weights[COUNT];                     // descriptors; MXFP4's weights are in `fragment`
    u32 fragment[COUNT][4][M][4];
    Pipe ahead = p;
#pragma unroll
    for (int i = 0; i < COUNT; i++, G::advance(ahead)) {
      G::wait_full(ahead);
      const int further = ahead.stage * G::STAGE_BYTES;
      tokens[i] = wgmma_descriptor(p.base + further);
      if constexpr (IS_W16) {
        weights[i] = wgmma_descriptor(G::first_block(p) + further);
      } else {
        Codes<G, M> codes;
        codes.load(at.codes + further, at.scales + further);
#pragma unroll
        for (int s = 0; s < 4; s++) codes.decode(s, fragment[i][s]);
      }
    }
    const auto multiply = [&](auto from, auto width) {
      constexpr int FROM = decltype(from)::value, W = decltype(width)::value;
      float part[M][W / 2];
      wgmma_fence();
#pragma unroll
      for (int term = G::TERMS - 1; term >= 0; term--)
#pragma unroll
        for (int i = 0; i < COUNT; i++)
#pragma unroll
          for (int s = 0; s < 4; s++) {
            const u64 those = tokens[i] + (term * G::TERM_BYTES + FROM * SLAB * 2) / 16 + 2 * s;
            const int accumulate = term < G::TERMS - 1 || i > 0 || s > 0;
#pragma unroll
            for (int m = 0; m < M; m++)
              if constexpr (IS_W16)
                Wgmma<G::ELEMENTS, W>::d16(part[m], G::block_of(weights[i], m) + 2 * s, those, accumulate);
              else
                Wgmma<G::ELEMENTS, W>::a16(part[m], fragment[i][s][m], those, accumulate);
          }
      wgmma_commit();
      wgmma_wait<0>();
      if (FROM + W == N) {
        G::release(p, p.stage, COUNT);
#pragma unroll
        for (int i = 0; i < COUNT; i++) G::advance(p);
      }
#pragma unroll
      for (int m = 0; m < M; m++)
#pragma unroll
        for (int i = 0; i < W / 2; i++) sum[m][FROM / 2 + i] = add_rn(sum[m][FROM / 2 + i], part[m][i]);
    };
    multiply(Count<0>(), Count<HALF>());
    if constexpr (HALF < N) multiply(Count<HALF>(), Count<N - HALF>());
  }
};

struct OfTerms : LoopOfWarpgroups {
  template <class G, int N, int M> using Of = ExactLoop<G, N, M>;
};
