// A way to run a product (gemm.h), for tokens so few that they are multiplied sooner than one thread can request the
// next stage: several producers take turns at the stages, each a warp of its own. Each role finds its chunks.
#pragma once
#include "lanes.h"

struct Turns {
  enum : bool { ONE_THREAD = false };
  enum : int { MOST_PRODUCERS = 4 };

  // G: the product.
  template <class G> struct Of {
    using Work = typename G::Work;
    using Mine = Lanes<G>;
    using Consumer = typename G::Consumer::template Of<G>;
    enum : bool { SINGLE = G::T::SINGLE, FOLLOWS = G::Consumer::FOLLOWS };
    static_assert(!G::Op::GREEDY, "an argmax is Raster's");
    static_assert(!FOLLOWS || (SINGLE && G::EARLY), "what the epilogue needs is known early of a single tile");

    static DEV void prepare(const GemmArgs& a, const Pipe& p) {
      if (TID >= G::CONSUMERS && TID < G::CONSUMERS + G::PRODUCERS * WAVE) prepare_producer(a, p);
    }
    // Each producer's warp makes the table, all the same one, and requests what its first stages take: so none waits
    // for another before the first copies are on their way.
    static DEV void prepare_producer(const GemmArgs& a, const Pipe& p) {
      G::make_barriers(p, Mine::first_stage());
      G::make_table(a);
      GroupTable& table = G::control().table;
      Chunk c;
      if (!Work(table).template next<true>(c)) return;
      if (G::by_picks(a)) {
        enter_picks(table, a);
        if (table.chunks == 0) return;
        c.group = picked_group(table, c);
      }
      Mine::fill_early(a, p, c);
      if (G::EARLY) return;
      if (G::by_picks(a)) global_proxy_fence();            // for the row, while weights are on their way
      Mine::fill(a, p, c, [] {});
    }

    static DEV void produce(const GemmArgs& a, Work work, Pipe p) {
      Chunk c;
      bool some = work.template next<true>(c);
      const int k_tiles = G::k_tiles_of(a);
      int rows = 0, filled = 0;
      if (some) filled = Mine::filled(a);
      if (G::EARLY) after_predecessor();
      if (SINGLE) c.rows = rows = G::rows_to_copy(a);
      if (G::EARLY && some) Mine::fill(a, p, c, [] {});
      if (LANE > 0) return;
      int k_tile = filled + G::producer();
      G::begin_at(p, k_tile);
      for (; some; some = work.template next<false>(c), k_tile -= k_tiles) {
        if (SINGLE) c.rows = rows;
        for (; k_tile < k_tiles; k_tile += G::PRODUCERS) {
          G::wait_empty(p);
          if (k_tile >= Mine::WEIGHTS_ALONE) G::request_weights(a, p, p.stage, c, k_tile);
          G::copy_tokens(a, p, c, k_tile);
          G::produced(p);
        }
      }
    }

    static DEV void consume(const GemmArgs& a, Work work, Pipe& p) {
      if (!FOLLOWS) G::follow(a);
      const int rows = SINGLE ? G::rows_of_single(a) : 0;
      for (Chunk c; work.template next<true>(c);) {
        if (SINGLE) c.rows = rows;
        Consumer::compute(a, p, c);
      }
      if (FOLLOWS) G::follow(a);                           // warps without weights, too
    }
  };
};
