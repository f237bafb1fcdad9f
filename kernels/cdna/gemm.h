// The matrix products on CDNA: find the work (work.h, picks.h), multiply (streamed.h, tile.h), epilogue (finish.h).
// Sums are in the same order in every tile, so a token's result depends neither on the tile nor on the other tokens.
#pragma once
#include "streamed.h"
#include "tile.h"

// Whether an operation's groups are experts, which sort may cut into tiles.
template <class Op> struct ExpertsCut { enum : bool { MAY_BE = false }; };
template <int FORMAT> struct ExpertsCut<Mlp1<FORMAT, 1>> { enum : bool { MAY_BE = true }; };
template <> struct ExpertsCut<Mlp2<false>> { enum : bool { MAY_BE = true }; };

template <class Op, class Weights, int WAVES, int S, int TERMS = 1>
DEV void do_tile(const GemmArgs& a, const Work& work, u32v4* shared) {
  const Wave wave = wave_of(a, work, WAVES);
  Tile<Weights, WAVES, S, TERMS, Indexed<Op>::IS> tile;
  tile.run(a, work, wave, shared);
  barrier();
  Finish<Op>::template run<WAVES>(a, work, wave, tile.sums.result(), (u8*)shared);
}

// A tile of at most MAX_S steps of 16 tokens. Each STEP-th number of steps has code of its own. SPREADS: rows are
// spread over all tiles of the grid.
template <class Op, class Weights, int WAVES, int MAX_S, int STEP, bool SPREADS = false>
DEV void tiled_product(const GemmArgs& a, u32v4* shared) {
  let_successor_start();
  after_predecessor();
  const Work work = SPREADS ? spread_work(a, WAVES) : find_work<MAX_S * TOKENS, ExpertsCut<Op>::MAY_BE>(a, WAVES, BID);
  if (work.group < 0) return;
  switch ((work.count + STEP * TOKENS - 1) / (STEP * TOKENS)) {
    case 1: if constexpr (STEP * 1 <= MAX_S) do_tile<Op, Weights, WAVES, STEP * 1>(a, work, shared); break;
    case 2: if constexpr (STEP * 2 <= MAX_S) do_tile<Op, Weights, WAVES, STEP * 2>(a, work, shared); break;
    case 3: if constexpr (STEP * 3 <= MAX_S) do_tile<Op, Weights, WAVES, STEP * 3>(a, work, shared); break;
    case 4: if constexpr (STEP * 4 <= MAX_S) do_tile<Op, Weights, WAVES, STEP * 4>(a, work, shared); break;
    case 5: if constexpr (STEP * 5 <= MAX_S) do_tile<Op, Weights, WAVES, STEP * 5>(a, work, shared); break;
    case 6: if constexpr (STEP * 6 <= MAX_S) do_tile<Op, Weights, WAVES, STEP * 6>(a, work, shared); break;
    case 7: if constexpr (STEP * 7 <= MAX_S) do_tile<Op, Weights, WAVES, STEP * 7>(a, work, shared); break;
    case 8: if constexpr (STEP * 8 <= MAX_S) do_tile<Op, Weights, WAVES, STEP * 8>(a, work, shared); break;
  }
}

// Code for one size of tile alone: S steps of 16 tokens.
template <class Op, class Weights, int WAVES, int S, int TERMS = 1>
DEV void one_size_product(const GemmArgs& a, u32v4* shared) {
  let_successor_start();
  after_predecessor();
  const Work work = find_work<S * TOKENS>(a, WAVES, BID);
  if (work.group >= 0) do_tile<Op, Weights, WAVES, S, TERMS>(a, work, shared);
}

// LDS of a tile in 16-byte pieces: two buffers, staged by whole blocks.
constexpr int tile_pieces(int tokens, int threads, int terms) {
  return 2 * terms * ((tokens * 8 + threads - 1) / threads * threads);
}

// Makers: each defines a kernel from a row of the catalogue. OCCUPANCY: to compile for, in waves per SIMD.
//
//   STREAMED         up to 16 tokens, see stream.h
//   STREAMED_STORE   the same for QkvStore
//   STREAMED_SORT    the same for SortMlp1, of up to MOST_ROWS rows
//   TILED            up to N tokens in LDS, with code for every STEP-th multiple of 16, see tile.h
//   SPREAD           the same with code for every multiple of 16, the rows spread over all tiles of the grid
//   SPREAD_STORE     the same for QkvStore
//   ONE_SIZE         N tokens in LDS, with code for this size alone, see tile.h
#define STREAMED(NAME, THREADS, SHARED_BYTES, OP, WEIGHTS, FORMAT, TERMS, N, MOST_ROWS, OCCUPANCY)                     \
  KERNEL(NAME, GemmArgs, THREADS, 1, OCCUPANCY) {                                                                      \
    static_assert(N == (int)TOKENS && TERMS == 1, "what a stream holds");                                              \
    streamed_product<Operations<FORMAT, TERMS>::OP, WEIGHTS<FORMAT>, THREADS / WAVE>(a, BID);                          \
  }
#define STREAMED_STORE(NAME, THREADS, SHARED_BYTES, OP, WEIGHTS, FORMAT, TERMS, N, MOST_ROWS, OCCUPANCY)               \
  KERNEL(NAME, QkvStoreArgs, THREADS, 1, OCCUPANCY) {                                                                  \
    static_assert(N == (int)TOKENS && MOST_ROWS == N && TERMS == 1, "what a stream holds");                            \
    streamed_product<Operations<FORMAT, TERMS>::OP, WEIGHTS<FORMAT>, THREADS / WAVE>(a.product, BID);                  \
  }
#define STREAMED_SORT(NAME, THREADS, SHARED_BYTES, OP, WEIGHTS, FORMAT, TERMS, N, MOST_ROWS, OCCUPANCY)                \
  KERNEL(NAME, SortMlp1Args, THREADS, 1, OCCUPANCY) {                                                                  \
    static_assert(N == (int)TOKENS && MOST_ROWS <= WAVE && TERMS == 1, "what a stream holds, and a lane a row");       \
    sorting_product<Operations<FORMAT, TERMS>::OP, WEIGHTS<FORMAT>, THREADS / WAVE>(a, BID);                           \
  }
#define TILED(NAME, THREADS, SHARED_BYTES, OP, WEIGHTS, FORMAT, TERMS, N, MOST_ROWS, OCCUPANCY, STEP)                  \
  KERNEL(NAME, GemmArgs, THREADS, 1, OCCUPANCY) {                                                                      \
    static_assert(TERMS == 1, "float64 sums of several sizes would not fit the registers");                            \
    SHARED u32v4 tokens[tile_pieces(N, THREADS, TERMS)];                                                               \
    tiled_product<Operations<FORMAT, TERMS>::OP, WEIGHTS<FORMAT>, THREADS / WAVE, N / TOKENS, STEP>(a, tokens);        \
  }
#define SPREAD(NAME, THREADS, SHARED_BYTES, OP, WEIGHTS, FORMAT, TERMS, N, MOST_ROWS, OCCUPANCY)                       \
  KERNEL(NAME, GemmArgs, THREADS, 1, OCCUPANCY) {                                                                      \
    static_assert(TERMS == 1, "float64 sums of several sizes would not fit the registers");                            \
    SHARED u32v4 tokens[tile_pieces(N, THREADS, TERMS)];                                                               \
    tiled_product<Operations<FORMAT, TERMS>::OP, WEIGHTS<FORMAT>, THREADS / WAVE, N / TOKENS, 1, true>(a, tokens);     \
  }
#define SPREAD_STORE(NAME, THREADS, SHARED_BYTES, OP, WEIGHTS, FORMAT, TERMS, N, MOST_ROWS, OCCUPANCY)                 \
  KERNEL(NAME, QkvStoreArgs, THREADS, 1, OCCUPANCY) {                                                                  \
    static_assert(TERMS == 1, "float64 sums of several sizes would not fit the registers");                            \
    SHARED u32v4 tokens[tile_pieces(N, THREADS, TERMS)];                                                               \
    tiled_product<Operations<FORMAT, TERMS>::OP, WEIGHTS<FORMAT>, THREADS / WAVE, N / TOKENS, 1, true>(a.product,      \
                                                                                                       tokens);        \
  }
#define ONE_SIZE(NAME, THREADS, SHARED_BYTES, OP, WEIGHTS, FORMAT, TERMS, N, MOST_ROWS, OCCUPANCY)                     \
  KERNEL(NAME, GemmArgs, THREADS, 1, OCCUPANCY) {                                                                      \
    SHARED u32v4 tokens[tile_pieces(N, THREADS, TERMS)];                                                               \
    one_size_product<Operations<FORMAT, TERMS>::OP, WEIGHTS<FORMAT>, THREADS / WAVE, N / TOKENS, TERMS>(a, tokens);    \
  }
