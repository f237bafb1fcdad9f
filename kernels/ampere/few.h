// Up to 8 tokens, of one term: a block has one unit of 16 weight rows a warp, and what it takes is latency.
//
// Code    A block runs it once, and fetching it from memory takes longer than running it: all stages are filled by one
//         loop, and there is one body for every slab.
// Stages  Slabs; all are on their way from the beginning. A slab's fragments are in registers before it is multiplied:
//         they are loaded while the slab before it is, whose multiplications wait for each other, and its stage is then
//         filled again.
#pragma once
#include "copy.h"
#include "operands.h"
#include "weights.h"

// P: the Gemm.
template <class P> struct Few {
  enum : int { FIRST = 4, STAGES = P::STAGES, STAGE_BYTES = P::STAGE_BYTES };
  using Mine = typename P::Mine;

  // `weights` and `tokens` are of the next slab.
  struct Source : Operands {
    int weights_left, tokens_left;                         // slabs that are not on their way

    DEV Source(const GemmArgs& a, const Chunk& c)
        : Operands(a, c, P::BLOCK_BYTES), weights_left(a.k_blocks), tokens_left(a.k_blocks) {}
    // The next slab, behind the last one nothing.
    DEV void copy_weights(u32 stage) {
      if (weights_left-- <= 0) return;
      copy_pieces<P::WEIGHT_BYTES / 16, P::THREADS>(stage + P::TOKEN_BYTES, weights, weight_pieces);
      weights += weight_slab;
    }
    DEV void copy_tokens(u32 stage) {
      if (tokens_left-- <= 0) return;
      copy_pieces<P::TOKEN_BYTES / 16, P::THREADS>(stage, tokens, token_pieces);
      tokens += token_slab;
    }
    DEV void copy(u32 stage) {
      copy_weights(stage), copy_tokens(stage);
      commit_copies();
    }
    // Some weights come first: of a single tile the number of rows, and so what is to be copied of them, is not here
    // yet.
    DEV void start(u32 shared) {
      ROLLED for (int stage = 0; stage < FIRST; stage++) copy_weights(shared + stage * STAGE_BYTES);
      ROLLED for (int stage = 0; stage < STAGES; stage++) {
        const u32 at = shared + stage * STAGE_BYTES;
        if (stage >= FIRST) copy_weights(at);
        copy_tokens(at);
        commit_copies();
      }
    }
  };

  // A lane's fragments of a slab; of MXFP4 weights the codes that they are decoded from.
  struct Slab {
    Mine mine;
    u32 a[P::IS_W16 ? 4 : 1][1][4], b[2][4];

    DEV void load(u32 stage, const typename Mine::At& at) {
      mine.load(stage + P::TOKEN_BYTES, at);
      if constexpr (P::IS_W16) UNROLL for (int k16 = 0; k16 < 4; k16++) mine.fragment(k16, a[k16]);
      // A token's pieces 0 to 3 and 4 to 7.
      const u32 pieces = stage + LANE % 8 * ROW_BYTES + (LANE / 8 ^ LANE % 8) * 16;
      load_matrices(b[0], pieces);
      load_matrices(b[1], pieces ^ 64);
    }
    DEV void multiply(float (&sum)[1][4]) const {
      UNROLL for (int k16 = 0; k16 < 4; k16++) {
        const u32 b0 = b[k16 / 2][k16 % 2 * 2], b1 = b[k16 / 2][k16 % 2 * 2 + 1];
        if constexpr (P::IS_W16) {
          mma<P::ELEMENTS>(sum[0], a[k16][0], b0, b1);
        } else {
          u32 decoded[1][4];
          mine.fragment(k16, decoded);
          mma<P::ELEMENTS>(sum[0], decoded[0], b0, b1);
        }
      }
    }
  };

  static DEV void block_barrier() {
    if constexpr ((int)P::THREADS == WAVE) __syncwarp();
    else barrier();
  }

  static DEV void multiply(int k_blocks, Source& source, float (&sum)[1][4]) {
    static_assert(STAGE_BYTES % ROW_BYTES == 0, "the swizzle of a token's pieces is an exclusive or of addresses");
    static_assert(STAGES >= FIRST, "the first weights have stages");
    const u32 shared = shared_address(DYNAMIC_SHARED);
    const typename Mine::At at = Mine::locate();
    wait_copies<STAGES - 1>();
    block_barrier();
    Slab now, next;
    now.load(shared, at);
    u32 stage = shared;
#pragma unroll 2
    for (int k = 0; k < k_blocks; k++) {
      wait_copies<STAGES - 2>();
      block_barrier();
      source.copy(stage);                                  // all warps have loaded what was there
      stage = stage == shared + (STAGES - 1) * STAGE_BYTES ? shared : stage + STAGE_BYTES;
      next.load(stage, at);                                // behind the last slab anything
      now.multiply(sum);
      now = next;
    }
  }
};
