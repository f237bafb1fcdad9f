// 16-bit weights in `fast`: both operands from shared memory, wgmma of width N for each of a warpgroup's M blocks.
#pragma once
#include "copy.h"
#include "instruction.h"
#include "loop.h"
#include "../mma/w16.h"

// Weights are wgmma's A, tokens its B. Where the pipeline is deep a stage has little to multiply, 80 cycles with eight
// tokens, and a wait takes some 200: so several stages are waited for at once.
template <class G> struct WeightsAreA {
  enum : int { AT_ONCE = G::STAGES >= 16 ? 4 : G::STAGES >= 8 ? 2 : 1 };
  // The s-th 16 of a slab along K, by descriptors of the warpgroup's weights and tokens.
  template <int N, int M> static DEV void multiply(float (&sum)[M][N / 2], u64 weights, u64 tokens, int s) {
#pragma unroll
    for (int m = 0; m < M; m++)
      Wgmma<G::ELEMENTS, N>::d16(sum[m], G::block_of(weights, m) + 2 * s, tokens + 2 * s, 1);
  }
};

// G: the product (gemm.h). A stage is released once the next one's wgmmas are queued behind its own.
template <class G, int N, int M, class Operands = WeightsAreA<G>> struct W16Loop {
  enum : int { AT_ONCE = Operands::AT_ONCE };

  static DEV void multiply(const GemmArgs& a, Pipe& p, float (&sum)[M][N / 2]) {
    int held = -1, held_count = 0;
    auto multiply = [&](auto count) {
      constexpr int COUNT = decltype(count)::value;
      const int first = p.stage;
      Pipe ahead = p;
#pragma unroll
      for (int i = 0; i < COUNT; i++, G::advance(ahead)) G::wait_full(ahead);
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < COUNT; i++, G::advance(p)) {
        const u64 tokens = wgmma_descriptor(G::first_token(p) + p.stage * G::STAGE_BYTES);
        const u64 weights = wgmma_descriptor(G::first_block(p) + p.stage * G::STAGE_BYTES);
#pragma unroll
        for (int s = 0; s < 4; s++) Operands::template multiply<N, M>(sum, weights, tokens, s);
      }
      wgmma_commit();
      wgmma_wait<1>();
      if constexpr (AT_ONCE > 1) G::release(p, held, held_count);
      else if (held >= 0) G::release(p, held);
      held = first, held_count = COUNT;
    };
    int k = 0;
    if constexpr (AT_ONCE > 1)
      for (; k + AT_ONCE <= a.k_blocks; k += AT_ONCE) multiply(Count<AT_ONCE>());
    for (; k < a.k_blocks; k++) multiply(Count<1>());
    wgmma_wait<0>();
    G::release(p, held, held_count);
  }
};

struct OfW16 : LoopOfWarpgroups {
  template <class G, int N, int M> using Of = W16Loop<G, N, M>;
};
