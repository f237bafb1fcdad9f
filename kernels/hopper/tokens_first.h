// Tokens as wgmma's A, 64 of them for each warpgroup, and a chunk's units of 16-bit weights as B. So a few units are
// not padded to 64 rows.
#pragma once
#include "w16_loop.h"

// G: the product (gemm.h).
template <class G> struct TokensFirst {
  using Op = typename G::Op;

  static DEV void compute(const GemmArgs& a, Pipe& p, const Chunk& c) { with<G::T::UNITS>(a, p, c); }
  // Picks the number of units. The launches that these tiles are for make chunks of the most or one fewer. For other
  // numbers wgmma multiplies stale shared memory, too.
  template <int UNITS> static DEV void with(const GemmArgs& a, Pipe& p, const Chunk& c) {
    if constexpr (UNITS == (int)G::T::UNITS && UNITS > 1)
      if (c.units < UNITS) return with<UNITS - 1>(a, p, c);
    float sum[1][UNITS * 8];
    f32x4 bias[UNITS];
    const int first_row = c.unit * W16::UNIT_ROWS + LANE % 4 * 4;
    const auto row = [&](int u) { return first_row + u * W16::UNIT_ROWS; };
    const auto exists = [&](int u) { return u < c.units && row(u) < a.n; };
    clear(sum);
#pragma unroll
    for (int u = 0; u < UNITS; u++) bias[u] = exists(u) ? Op::bias_of_four(a, row(u)) : f32x4{};
    W16Loop<G, UNITS * 16, 1>::multiply(a, p, sum);
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
