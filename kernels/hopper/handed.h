// Two ways to run a product (gemm.h), for any number of rows: the producer finds the consumers' chunks, too, and hands
// them over in shared memory. They read the next one when its first stage is full.
//
//   HandedByLanes    up to 64 tokens: lanes of the producer's warp fill the first stages
//   HandedByThread   more: one thread fills all
#pragma once
#include "lanes.h"

// What both have. G: the product.
template <class G> struct Handed {
  using Work = typename G::Work;
  using Consumer = typename G::Consumer::template Of<G>;
  static_assert(!G::T::SINGLE, "a single tile's rows are not known yet when its chunk is handed over");
  static_assert(!G::Op::GREEDY, "an argmax is Raster's");
  static_assert(!G::Consumer::FOLLOWS, "consumers wait for their chunks anyway");

  static DEV void prepare(const GemmArgs& a, const Pipe& p) { G::prepare_by_two_warps(a, p); }

  static DEV int next_place(int place) { return place < MAX_STAGES ? place + 1 : 0; }
  // A stage without copies, and no units.
  static DEV void end(const Pipe& p, int place) {
    G::wait_empty(p);
    G::control().chunks[place].units = 0;
    barrier_arrive(p.full + 8 * p.stage);
  }

  static DEV void consume(const GemmArgs& a, Work, Pipe& p) {
    G::follow(a);
    for (int place = 0;; place = next_place(place)) {
      G::wait_full(p);
      const Chunk& c = G::control().chunks[place];         // read again where it takes no registers meanwhile
      if (c.units == 0) return;
      Consumer::compute(a, p, c);
    }
  }
};

struct HandedByLanes {
  enum : bool { ONE_THREAD = false };
  enum : int { MOST_PRODUCERS = 1 };

  template <class G> struct Of : Handed<G> {
    using Both = Handed<G>;
    using Work = typename G::Work;
    using Mine = Lanes<G>;

    static DEV void produce(const GemmArgs& a, Work work, Pipe p) {
      auto& chunks = G::control().chunks;
      Chunk c;
      bool some = work.template next<false>(c);
      if (G::by_picks(a)) global_proxy_fence();
      const int k_tiles = G::k_tiles_of(a);
      int k_tile = 0, place = 0;
      if (some) k_tile = Mine::filled(a);
      if (some) Mine::fill_early(a, p, c);
      if (G::EARLY) after_predecessor();
      if (some) Mine::fill(a, p, c, [&] { chunks[0] = c; });
      if (LANE > 0) return;
      G::begin_at(p, k_tile);
      for (; some; some = work.template next<false>(c), k_tile = 0) {
        for (; k_tile < k_tiles; k_tile++) {
          G::wait_empty(p);
          if (k_tile == 0) chunks[place] = c;
          if (k_tile >= Mine::WEIGHTS_ALONE) G::request_weights(a, p, p.stage, c, k_tile);
          G::copy_tokens(a, p, c, k_tile);
          G::produced(p);
        }
        place = Both::next_place(place);
      }
      Both::end(p, place);
    }
  };
};

struct HandedByThread {
  enum : bool { ONE_THREAD = true };
  enum : int { MOST_PRODUCERS = 1 };

  template <class G> struct Of : Handed<G> {
    using Both = Handed<G>;
    using Work = typename G::Work;

    static DEV void produce(const GemmArgs& a, Work work, Pipe p) {
      auto& chunks = G::control().chunks;
      Chunk c;
      bool some = work.template next<false>(c);
      if (G::by_picks(a)) global_proxy_fence();
      const int k_tiles = G::k_tiles_of(a);
      int early = 0, place = 0;                            // early: the K tiles of it whose weights are under way
      if constexpr (G::EARLY) {
        for (; some && early < min((int)G::STAGES, k_tiles); early++) G::request_weights(a, p, early, c, early);
        after_predecessor();
      }
      G::begin_at(p, 0);
      for (; some; some = work.template next<false>(c), early = 0) {
        for (int k_tile = 0; k_tile < k_tiles; k_tile++) {
          G::wait_empty(p);
          if (k_tile == 0) chunks[place] = c;
          if (k_tile >= early) G::request_weights(a, p, p.stage, c, k_tile);
          G::copy_tokens(a, p, c, k_tile);
          G::produced(p);
        }
        place = Both::next_place(place);
      }
      Both::end(p, place);
    }
  };
};
