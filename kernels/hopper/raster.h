// Two ways to run a product (gemm.h), for the unembedding: a block stays with one token tile and walks down the weights
// (RasterSchedule), and stores the argmax of its logits of each token. Each role finds its chunks.
//
//   RasterByLanes    up to 64 tokens: lanes of the producer's warp fill the first stages
//   RasterByThread   more: one thread fills all
#pragma once
#include "block_argmax.h"
#include "lanes.h"

// What both have. G: the product.
template <class G> struct Raster {
  using Work = typename G::Work;
  using Consumer = typename G::Consumer::template Of<G>;
  using Argmax = BlockArgmax<G>;
  enum : bool { SINGLE = G::T::SINGLE };
  static_assert(G::Op::GREEDY && G::EARLY, "the unembedding");
  static_assert(!G::Consumer::FOLLOWS, "there is nothing that it could load early");

  static DEV void prepare(const GemmArgs& a, const Pipe& p) { G::prepare_by_two_warps(a, p); }

  static DEV void consume(const GemmArgs& a, Work work, Pipe& p) {
    G::follow(a);
    const int rows = SINGLE ? G::rows_of_single(a) : 0;
    bool fresh = true;
    for (Chunk c; work.template next<false>(c);) {
      if (SINGLE) c.rows = rows;
      if (fresh) Argmax::reset();
      Consumer::compute(a, p, c);
      fresh = work.tile_done();
      if (fresh) Argmax::write(a, c, work);
    }
  }
};

struct RasterByLanes {
  enum : bool { ONE_THREAD = false };
  enum : int { MOST_PRODUCERS = 1 };

  template <class G> struct Of : Raster<G> {
    using Work = typename G::Work;
    using Mine = Lanes<G>;
    enum : bool { SINGLE = G::T::SINGLE };

    static DEV void produce(const GemmArgs& a, Work work, Pipe p) {
      Chunk c;
      bool some = work.template next<false>(c);
      const int k_tiles = G::k_tiles_of(a);
      int k_tile = 0, rows = 0;
      if (some) k_tile = Mine::filled(a);
      if (some) Mine::fill_early(a, p, c);
      after_predecessor();
      if (SINGLE) c.rows = rows = G::rows_to_copy(a);
      if (some) Mine::fill(a, p, c, [] {});
      if (LANE > 0) return;
      G::begin_at(p, k_tile);
      for (; some; some = work.template next<false>(c), k_tile = 0) {
        if (SINGLE) c.rows = rows;
        for (; k_tile < k_tiles; k_tile++) {
          G::wait_empty(p);
          if (k_tile >= Mine::WEIGHTS_ALONE) G::request_weights(a, p, p.stage, c, k_tile);
          G::copy_tokens(a, p, c, k_tile);
          G::produced(p);
        }
      }
    }
  };
};

struct RasterByThread {
  enum : bool { ONE_THREAD = true };
  enum : int { MOST_PRODUCERS = 1 };

  template <class G> struct Of : Raster<G> {
    static DEV void produce(const GemmArgs& a, typename G::Work work, Pipe p) {
      G::template produce_by_thread<G::STAGES>(a, work, p);
    }
  };
};
