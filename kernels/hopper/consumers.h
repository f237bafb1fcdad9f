// Consumers: what a warpgroup does with its blocks of 64 weight rows in a chunk. The loop multiplies, and the
// operation's epilogue stores (../mma/epilogue.h). A kernel's row in the catalogue names one of
//
//   OwnEpilogue     each width of wgmma and number of blocks has code of its own for the epilogue
//   EarlyEpilogue   the same, and what it needs is loaded before the predecessor ends
//   SharedIfLong    all share its code if it is long, which mlp1's is; mlp2's is short, so that this is OwnEpilogue
//   StoredTile      queries, keys and values of many tokens, which are rotated and stored through shared memory
//
// Each has
//
//   FOLLOWS         it calls G::follow() by itself
//   shared_bytes()  of shared memory between stages and Control, for so many warpgroups
//   Of<G>           compute(), for a product G (gemm.h)
#pragma once
#include <type_traits>
#include "../mma/epilogue.h"
#include "instruction.h"
#include "qkv_store.h"
#include "w16_loop.h"

// G: the product (gemm.h).
template <class G> struct Blocks {
  using Op = typename G::Op;
  using T = typename G::T;

  // How many blocks of the chunk this warpgroup has; where each warp multiplies by itself, how many units of 16 rows
  // this warp.
  static DEV int mine(const Chunk& c) {
    if (G::Loop::BY_WARPS && G::IS_W16) return (c.units - TID / WAVE + T::WARPGROUPS * 4 - 1) / (T::WARPGROUPS * 4);
    const int blocks = (c.units + G::BLOCK_UNITS - 1) / G::BLOCK_UNITS;
    return (blocks - TID / 128 + T::WARPGROUPS - 1) / T::WARPGROUPS;
  }
  // Calls Compute::with<N, M>() for the least of wgmma's widths that holds the chunk's tokens, and the number of
  // blocks. A warpgroup without blocks releases the stages.
  template <class Compute, int N, class... More>
  static DEV void pick(const GemmArgs& a, Pipe& p, const Chunk& c, More&... more) {
    if constexpr (N < T::N)
      if (c.rows > N) return pick<Compute, width_of(T::WIDTHS, N + 1)>(a, p, c, more...);
    pick_blocks<Compute, N, T::BLOCKS>(a, p, c, mine(c), more...);
  }
  template <class Compute, int N, int M, class... More>
  static DEV void pick_blocks(const GemmArgs& a, Pipe& p, const Chunk& c, int mine, More&... more) {
    if (mine == M) Compute::template with<N, M>(a, p, c, more...);
    else if constexpr (M > 1) pick_blocks<Compute, N, M - 1>(a, p, c, mine, more...);
    else skip(a, p);
  }
  static DEV void skip(const GemmArgs& a, Pipe& p) {
    for (int k_tile = 0; k_tile < G::k_tiles_of(a); k_tile++, G::advance(p)) G::wait_full(p), G::release(p, p.stage);
  }

  // The first of this thread's two rows in its warpgroup's m-th block.
  static DEV int row_of(const Chunk& c, int m) {
    const int block = TID / 128 + m * T::WARPGROUPS;
    return c.unit * G::UNIT_ROWS + block * 64 + TID / WAVE % 4 * 16 + LANE / 4 * 2;
  }
  static DEV Place place_of(const Chunk& c, int m, float2 bias) {
    return {c, row_of(c, m), LANE % 4, bias, nullptr, nullptr};
  }
  // What the epilogue needs, in `fast` loaded before the product, which hides the way from memory.
  template <int N> struct Ahead {
    float2 bias;
    typename Op::template Tokens<N / 8> tokens;
    DEV void load(const GemmArgs& a, const Chunk& c, int m) {
      bias = Op::bias(a, c.group, row_of(c, m));
      tokens.load(a, place_of(c, m, bias));
    }
  };
  // ALL: there are M blocks, and not fewer.
  template <bool ALL, int N, int M>
  static DEV void store(const GemmArgs& a, const Chunk& c, const float (&sum)[M][N / 2], const Ahead<N> (&ahead)[M]) {
    const int wg = TID / 128, warp = TID / WAVE % 4;
#pragma unroll
    for (int m = 0; m < M; m++) {
      const int block = wg + m * T::WARPGROUPS;
      if (!ALL && block * G::BLOCK_UNITS >= c.units) return;
      if (G::IS_W16 && block * G::BLOCK_UNITS + warp >= c.units) continue;
      Place place = place_of(c, m, ahead[m].bias);
      auto& control = G::control();
      if (Op::GREEDY) place.best = control.best[TID / WAVE], place.best_index = control.best_index[TID / WAVE];
      if constexpr (Op::AHEAD) Op::template store_tokens<N / 8, G::ELEMENTS>(a, place, sum[m], ahead[m].tokens);
      else Op::template store<N, G::ELEMENTS, G::TERMS>(a, place, sum[m]);
    }
  }
};

struct InRegisters {
  enum : bool { FOLLOWS = false };
  static constexpr int shared_bytes(int) { return 0; }
};

struct OwnEpilogue : InRegisters {
  template <class G> struct Of {
    using Mine = Blocks<G>;
    static DEV void compute(const GemmArgs& a, Pipe& p, const Chunk& c) {
      Mine::template pick<Of, G::T::LEAST>(a, p, c);
    }
    template <int N, int M> static DEV void with(const GemmArgs& a, Pipe& p, const Chunk& c) {
      float sum[M][N / 2];
      clear(sum);
      typename Mine::template Ahead<N> ahead[M];
      const auto load_ahead = [&] {
#pragma unroll
        for (int m = 0; m < M; m++) ahead[m].load(a, c, m);
      };
      if (G::TERMS == 1) load_ahead();                     // `exact` has no registers for it during the product
      if (G::Consumer::FOLLOWS) G::follow(a);              // a second time returns at once
      G::Loop::template Of<G, N, M>::multiply(a, p, sum);
      if (G::TERMS > 1) load_ahead();
      Mine::template store<true, N, M>(a, c, sum, ahead);
    }
  };
};

// What it needs follows from the plan and from weights, by a chain of loads that takes longer than the first stage.
struct EarlyEpilogue : OwnEpilogue {
  enum : bool { FOLLOWS = true };
};

// Products use parts of the largest one's registers: the code of a long epilogue takes as long to come from memory as
// to run.
struct SharedIfLong : InRegisters {
  template <class G> struct OfAll {
    static_assert(G::TERMS == 1, "what it needs is loaded ahead of the product");
    using Mine = Blocks<G>;
    enum : int { N = G::T::N, M = G::T::BLOCKS };
    static DEV void compute(const GemmArgs& a, Pipe& p, const Chunk& c) {
      float sum[M][N / 2];
      typename Mine::template Ahead<N> ahead[M];
#pragma unroll
      for (int m = 0; m < M; m++) ahead[m].load(a, c, m);
      Mine::template pick<OfAll, G::T::LEAST>(a, p, c, sum);
      Mine::template store<false, N, M>(a, c, sum, ahead);
    }
    template <int WIDTH, int BLOCKS>
    static DEV void with(const GemmArgs& a, Pipe& p, const Chunk&, float (&sum)[M][N / 2]) {
      G::Loop::template Of<G, WIDTH, BLOCKS>::multiply(a, p, sum);
    }
  };
  template <class G> using Of = std::conditional_t<G::Op::LONG, OfAll<G>, OwnEpilogue::Of<G>>;
};

// It has a tile's tokens together. What it needs of them is loaded behind the product: loads and branches between its
// wgmmas have the compiler wait for each of these, which takes 6 % longer.
struct StoredTile : InRegisters {
  static constexpr int shared_bytes(int warpgroups) { return warpgroups * (int)sizeof(QkvStoreTile<128>::Shared); }
  template <class G> struct Of {
    using Mine = Blocks<G>;
    static DEV void compute(const GemmArgs& a, Pipe& p, const Chunk& c) {
      Mine::template pick<Of, G::T::LEAST>(a, p, c);
    }
    template <int N, int M> static DEV void with(const GemmArgs& a, Pipe& p, const Chunk& c) {
      float sum[M][N / 2];
      clear(sum);
      // Units of the chunk before the warpgroup's m-th block.
      const auto before = [&](int m) { return (TID / 128 + m * G::T::WARPGROUPS) * G::BLOCK_UNITS; };
      const RopeStoreArgs& s = G::Op::store_of(a);
      QkvStoreTile<N> tile(s, ((typename QkvStoreTile<N>::Shared*)G::behind_stages())[TID / 128]);
      float2 bias[M];
#pragma unroll
      for (int m = 0; m < M; m++) bias[m] = G::Op::bias(a, c.group, Mine::row_of(c, m));
      const int last = min(c.unit + before(M - 1) + G::BLOCK_UNITS, c.unit + c.units) - 1;
      W16Loop<G, N, M>::multiply(a, p, sum);
      tile.load(s, c, c.unit + before(0), last);
#pragma unroll
      for (int m = 0; m < M; m++) {
        if (m > 0 && G::T::WARPGROUPS * 64 % s.head_dim != 0) tile.load(s, c, c.unit + before(m), last);
        const Place place = Mine::place_of(c, m, bias[m]);
        tile.template store<G::ELEMENTS>(a, place, c.unit + before(m), c.units - before(m), sum[m]);
      }
    }
  };
};
