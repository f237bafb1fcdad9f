// The argmax that is fused with the unembedding: that of each warp (GreedyLogits, epilogue.h) in shared memory, and the
// block's.
#pragma once
#include "../mma/epilogue.h"

// G: the product (gemm.h).
template <class G> struct BlockArgmax {
  static DEV void reset() {
    for (int i = LANE; i < G::T::N; i += WAVE)
      G::control().best[TID / WAVE][i] = -INFINITY, G::control().best_index[TID / WAVE][i] = 0;
    __syncwarp();
  }

  // Writes the argmax of each token of a tile, as candidate number work.row(). Each token has as many candidates as the
  // grid has blocks; those that no block of the raster computes are filled with -infinity.
  static DEV void write(const GemmArgs& a, const Chunk& c, const typename G::Work& work) {
    G::consumers_barrier();
    for (int token = TID; token < c.rows; token += G::CONSUMERS) {
      float v = -INFINITY;
      int index = 0;
      for (int w = 0; w < G::BEST_WARPS; w++) {
        const float other = G::control().best[w][token];
        const int other_index = G::control().best_index[w][token];
        if (w == 0) v = other, index = other_index;
        else GreedyLogits::take_larger(v, index, other, other_index);
      }
      for (int i = work.row(); i < GRID; i += work.rows) {
        const i64 at = (i64)i * a.best_rows + c.row + token;
        a.best[at] = i < work.rows ? v : -INFINITY;
        a.best_index[at] = i < work.rows ? index : 0;
      }
    }
    G::consumers_barrier();
  }
};
