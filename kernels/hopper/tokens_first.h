// A way to run a product (gemm.h), for 65 to 256 rows: tokens are wgmma's A, 64 of them for each warpgroup, and a
// chunk's units of 16-bit weights its B. So a few units are not padded to 64 rows. Each role finds its chunks.
#pragma once
#include "schedule.h"
#include "w16_loop.h"

// A tile of N tokens, and chunks of at most UNITS units of weights. See Tile (gemm.h). Consumers have enough registers.
template <int N_, int MOST_ROWS, int WARPGROUPS_, int UNITS_> struct TokenTile {
  enum : int { N = N_, WARPGROUPS = WARPGROUPS_, UNITS = UNITS_ };
  enum : bool { SINGLE = MOST_ROWS == N_, SHIFTS_REGISTERS = false };
  static_assert(MOST_ROWS == 0 || SINGLE, "one tile or any number of them");
  static_assert(N_ == WARPGROUPS_ * 64, "a warpgroup for each 64 tokens");
  static constexpr int chunk(int) { return UNITS; }
  static DEV void enter_rows(GroupTable& table, const GemmArgs& a) { fill_table_by_width<N, 0>(table, a); }
  // A warpgroup's tokens and weights in a stage.
  static DEV int own_tokens() { return TID / 128 * 64 * SLAB * 2; }
  template <int> static DEV int own_weights() { return 0; }
};

template <class G> struct TokensAreA {
  enum : int { AT_ONCE = 1 };
  template <int N, int M> static DEV void multiply(float (&sum)[M][N / 2], u64 weights, u64 tokens, int s) {
    static_assert(M == 1, "a warpgroup has 64 tokens");
    Wgmma<G::ELEMENTS, N>::d16(sum[0], tokens + 2 * s, weights + 2 * s, 1);
  }
};

struct TokensFirst {
  enum : bool { ONE_THREAD = true };
  enum : int { MOST_PRODUCERS = 1 };

  // G: the product.
  template <class G> struct Of {
    using Op = typename G::Op;
    using Work = typename G::Work;
    enum : bool { SINGLE = G::T::SINGLE };
    // Stages whose weights are requested before the predecessor ends: 20 to 60 KB were alike, all stages slower.
    enum : int { IN_40_KB = 40 * 1024 / G::WEIGHT_BYTES, EARLY_STAGES = IN_40_KB < G::STAGES ? IN_40_KB : G::STAGES };
    static_assert(G::IS_W16 && G::TERMS == 1, "weights are wgmma's B, and come from shared memory");
    static_assert(G::EARLY && !Op::OF_EXPERTS && !Op::GREEDY, "a layer's own matrices");

    static DEV void prepare(const GemmArgs& a, const Pipe& p) { G::prepare_by_two_warps(a, p); }

    static DEV void produce(const GemmArgs& a, Work work, Pipe p) {
      G::template produce_by_thread<EARLY_STAGES>(a, work, p);
    }

    static DEV void consume(const GemmArgs& a, Work work, Pipe& p) {
      G::follow(a);
      const int rows = SINGLE ? G::rows_of_single(a) : 0;
      for (Chunk c; work.template next<false>(c);) {
        if (SINGLE) c.rows = rows;
        compute<G::T::UNITS>(a, p, c);
      }
    }

    // Picks the number of units. The launches that these tiles are for make chunks of the most or one fewer. For other
    // numbers wgmma multiplies stale shared memory, too.
    template <int UNITS> static DEV void compute(const GemmArgs& a, Pipe& p, const Chunk& c) {
      if constexpr (UNITS == (int)G::T::UNITS && UNITS > 1)
        if (c.units < UNITS) return compute<UNITS - 1>(a, p, c);
      float sum[1][UNITS * 8];
      f32x4 bias[UNITS];
      const int first_row = c.unit * W16::UNIT_ROWS + LANE % 4 * 4;
      const auto row = [&](int u) { return first_row + u * W16::UNIT_ROWS; };
      const auto exists = [&](int u) { return u < c.units && row(u) < a.n; };
      clear(sum);
#pragma unroll
      for (int u = 0; u < UNITS; u++) bias[u] = exists(u) ? Op::bias_of_four(a, row(u)) : f32x4{};
      W16Loop<G, UNITS * 16, 1, TokensAreA<G>>::multiply(a, p, sum);
#pragma unroll
      for (int t = 0; t < 2; t++) {
        const int token = TID / WAVE * 16 + LANE / 4 + 8 * t;
        if (token >= c.rows) continue;
        float* out = a.out + (i64)(c.row + token) * a.n + first_row;
#pragma unroll
        for (int u = 0; u < UNITS; u++) {
          f32x4 v = bias[u];
#pragma unroll
          for (int i = 0; i < 4; i++) v[i] = sum[0][8 * u + 2 * t + i % 2 * 4 + i / 2] * a.scale + bias[u][i];
          if (exists(u)) Op::store_four(out + u * W16::UNIT_ROWS, v);
        }
      }
    }
  };
};
