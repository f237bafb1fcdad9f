// Up to 8 tokens, of one term: a block has one unit of 16 weight rows a warp, and what it takes is latency.
//
// Code    A block runs it once, and fetching it from memory takes longer than running it: all stages are filled by one
//         loop, and there is one body for every slab.
// Stages  Slabs; all are on their way from the beginning. A slab's fragments are in registers before it is multiplied:
//         they are loaded while the slab before it is, whose multiplications wait for each other, and its stage is then
//         filled again.
#pragma once
#include "../mma/async_copy.h"
#include "operands.h"
#include "weights.h"

// P: the Gemm.
template <class P> struct Few {
  enum : int { STAGES = P::STAGES, STAGE_BYTES = P::STAGE_BYTES };
  using Mine = typename P::Mine;

  // `weights` and `tokens` are of the next slab.
  struct Source : Operands {
    int left;                                              // slabs that are not on their way
    u32 row;                                               // without tokens in the stages: the token, in shared memory

    DEV Source(const GemmArgs& a, const Chunk& c) : Operands(a, c, P::BLOCK_BYTES), left(a.k_blocks) {}
    // The next slab, behind the last one nothing.
    DEV void copy(u32 stage) {
      if (left > 0) {
        copy_pieces<P::WEIGHT_BYTES / 16, P::THREADS>(stage + P::TOKEN_BYTES, weights, weight_pieces, thread());
        copy_pieces<P::TOKEN_BYTES / 16, P::THREADS>(stage, tokens, token_pieces, thread());
        weights += weight_slab, tokens += token_slab, left--;
      }
      commit_copies();
    }
    DEV void start(u32 shared) {
      ROLLED for (int stage = 0; stage < STAGES; stage++) copy(shared + stage * STAGE_BYTES);
    }
    // A lane's piece of the first four of its token in slab `k`, in this stage. A token by itself is all eight.
    DEV u32 pieces(u32 stage, int k) const {
      if (P::TOKEN_BYTES == 0) return row + k * ROW_BYTES + LANE / 8 * 16;
      return stage + LANE % 8 * ROW_BYTES + (LANE / 8 ^ LANE % 8) * 16;
    }
  };

  // A lane's fragments of a slab; of MXFP4 weights the codes that they are decoded from.
  struct Slab {
    Mine mine;
    u32 a[P::IS_W16 ? 4 : 1][1][4], b[2][4];

    // `pieces`: of the lane's token.
    DEV void load(u32 stage, u32 pieces, const typename Mine::At& at) {
      mine.load(stage + P::TOKEN_BYTES, at);
      if constexpr (P::IS_W16) UNROLL for (int k16 = 0; k16 < 4; k16++) mine.fragment(k16, a[k16]);
      // Pieces 0 to 3 and 4 to 7.
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

  // Of those that share the stages.
  static DEV int thread() { return P::TOKEN_BYTES == 0 ? LANE : TID; }
  static DEV void block_barrier() {
    if constexpr ((int)P::THREADS == WAVE) __syncwarp();
    else barrier();
  }

  // `warp`: of those that share the stages at `shared`.
  static DEV void multiply(u32 shared, int warp, int k_blocks, Source& source, float (&sum)[1][4]) {
    static_assert(STAGE_BYTES % ROW_BYTES == 0, "the swizzle of a token's pieces is an exclusive or of addresses");
    static_assert(STAGES >= 3, "a stage is loaded while others are on their way");
    const typename Mine::At at = Mine::locate(warp);
    wait_copies<STAGES - 1>();
    block_barrier();
    Slab now, next;
    now.load(shared, source.pieces(shared, 0), at);
    u32 stage = shared;
#pragma unroll 2
    for (int k = 0; k < k_blocks; k++) {
      wait_copies<STAGES - 2>();
      block_barrier();
      source.copy(stage);                                  // all warps have loaded what was there
      stage = stage == shared + (STAGES - 1) * STAGE_BYTES ? shared : stage + STAGE_BYTES;
      next.load(stage, source.pieces(stage, k + 1), at);   // behind the last slab anything
      now.multiply(sum);
      now = next;
    }
  }
};
