// 16-bit weights in `fast`: both operands from shared memory, wgmma of width N for each of a warpgroup's M blocks.
#pragma once
#include "copy.h"
#include "instruction.h"
#include "../mma/w16.h"

// G: the product (gemm.h). A stage is released once the next one's wgmmas are queued behind its own. Where the pipeline
// is deep a stage has little to multiply, 80 cycles with eight tokens, and a wait takes some 200: so several stages are
// waited for at once.
template <class G, int N, int M> struct W16Loop {
  enum : bool { TOKENS_FIRST = G::TOKENS_FIRST };          // tokens are wgmma's A, weights its B
  enum : int { AT_ONCE = TOKENS_FIRST ? 1 : G::STAGES >= 16 ? 4 : G::STAGES >= 8 ? 2 : 1 };

  static DEV void multiply(const GemmArgs& a, Pipe& p, float (&sum)[M][N / 2]) {
    multiply_while<false>(a, p, sum, [] {});
  }
  // Calls meanwhile() behind the first slab's wgmmas, if there is something to do.
  template <bool SOMETHING, class Meanwhile>
  static DEV void multiply_while(const GemmArgs& a, Pipe& p, float (&sum)[M][N / 2], Meanwhile meanwhile) {
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
        for (int s = 0; s < 4; s++)
#pragma unroll
          for (int m = 0; m < M; m++)
            if constexpr (TOKENS_FIRST) Wgmma<G::ELEMENTS, N>::d16(sum[m], tokens + 2 * s, weights + 2 * s, 1);
            else Wgmma<G::ELEMENTS, N>::d16(sum[m], G::block_of(weights, m) + 2 * s, tokens + 2 * s, 1);
      }
      wgmma_commit();
      wgmma_wait<1>();
      if constexpr (AT_ONCE > 1) G::release(p, held, held_count);
      else if (held >= 0) G::release(p, held);
      held = first, held_count = COUNT;
    };
    int k = 0;
    if constexpr (SOMETHING) multiply(Count<1>()), meanwhile(), k++;
    if constexpr (AT_ONCE > 1)
      for (; k + AT_ONCE <= a.k_blocks; k += AT_ONCE) multiply(Count<AT_ONCE>());
    for (; k < a.k_blocks; k++) multiply(Count<1>());
    wgmma_wait<0>();
    G::release(p, held, held_count);
  }
};
