// The matrix products on CDNA: find the work (work.h, picks.h), multiply (stream.h, tile.h), epilogue (finish.h). Sums
// are in the same order in every tile, so a token's result depends neither on the tile nor on the other tokens.
#pragma once
#include "picks.h"
#include "stream.h"
#include "tile.h"

// Whether an operation's tokens are the step's rows, of which GemmArgs has the index.
template <class Op> struct Indexed { enum : bool { IS = false }; };
template <int FORMAT> struct Indexed<Mlp1<FORMAT, 1>> { enum : bool { IS = true }; };

// Whether an operation's groups are experts, which sort may cut into tiles.
template <class Op> struct ExpertsCut { enum : bool { MAY_BE = false }; };
template <int FORMAT> struct ExpertsCut<Mlp1<FORMAT, 1>> { enum : bool { MAY_BE = true }; };
template <> struct ExpertsCut<Mlp2<false>> { enum : bool { MAY_BE = true }; };

// How an operation ends. MEETS: its waves exchange results through LDS.
template <class Op> struct Finish {
  enum : bool { MEETS = false };
  template <int WAVES, class Sum, int S>
  static DEV void run(const GemmArgs& a, const Work& work, const Wave& wave, const Sum (&acc)[2][S], u8* shared) {
    finish<Op>(a, work, wave, acc, shared);
  }
};
template <int FORMAT, int TERMS> struct Finish<Mlp1<FORMAT, TERMS>> {
  enum : bool { MEETS = false };
  template <int WAVES, class Sum, int S>
  static DEV void run(const GemmArgs& a, const Work& work, const Wave& wave, const Sum (&acc)[2][S], u8* shared) {
    static_assert(WAVES == 4, "zeros are filled in by slabs");
    finish_mlp1<Mlp1<FORMAT, TERMS>>(a, work, wave, acc, shared);
  }
};
struct GreedyLogits {};
template <> struct Finish<GreedyLogits> {
  enum : bool { MEETS = true };
  template <int WAVES, class Sum, int S>
  static DEV void run(const GemmArgs& a, const Work& work, const Wave& wave, const Sum (&acc)[2][S], u8* shared) {
    finish_greedy<WAVES>(a, work, wave, acc, shared);
  }
};
template <> struct Finish<Logits> : Finish<GreedyLogits> {
  template <int WAVES, class Sum, int S>
  static DEV void run(const GemmArgs& a, const Work& work, const Wave& wave, const Sum (&acc)[2][S], u8* shared) {
    finish<Logits>(a, work, wave, acc, shared);
    finish_greedy<WAVES>(a, work, wave, acc, shared);
  }
};

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
  const Work work = SPREADS ? spread_work(a, WAVES) : find_work<MAX_S * TOKENS, ExpertsCut<Op>::MAY_BE>(a, WAVES);
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
  const Work work = find_work<S * TOKENS>(a, WAVES);
  if (work.group >= 0) do_tile<Op, Weights, WAVES, S, TERMS>(a, work, shared);
}

template <class Op, class Weights, int WAVES> DEV void streamed_product(const GemmArgs& a) {
  let_successor_start();
  after_predecessor();
  const Work work = find_work<TOKENS>(a, WAVES);
  if (work.group < 0) return;
  const Wave wave = wave_of(a, work, WAVES);
  const int n = LANE % TOKENS;
  Stream<Weights, Weights::STREAM_DEPTH> stream;
  // clamped: no memory traffic for rows that do not exist
  const int slot = work.first + (n < work.count ? n : work.count - 1);
  stream.run(a, work, wave, Indexed<Op>::IS ? a.slot_rows[slot] : slot);
  if constexpr (Finish<Op>::MEETS) {
    SHARED Best bests[WAVES * TOKENS];
    Finish<Op>::template run<WAVES>(a, work, wave, stream.acc, (u8*)bests);
  } else {
    Finish<Op>::template run<WAVES>(a, work, wave, stream.acc, nullptr);
  }
}

// mlp1 and what sort does for it, see picks.h; the first block stores that. Blocks after it run over the experts, or
// over the picks of the most rows if these are fewer, then over row blocks. Of an expert's picks the first one's blocks
// take all its rows, in tiles one after another: more than TOKENS rows are rare.
template <class Op, class Weights, int WAVES> DEV void sorting_product(const SortMlp1Args& args) {
  let_successor_start();
  after_predecessor();
  const GemmArgs& a = args.product;
  const int rows = args.sort.step.header->rows, k = args.sort.k;
  if (BID == 0) return Picks(args, rows).store<WAVES>(args.sort);
  const int spans = (a.row_blocks + WAVES - 1) / WAVES, place = (BID - 1) / spans, span = (BID - 1) % spans;
  const bool by_pick = args.most_rows * k < a.groups;
  const int expert = uniform(by_pick ? args.sort.experts[place] : place);
  Found found = Picks(args, rows).find(expert);
  if (by_pick && place >= rows * k) return;
  if (!found.rows || (by_pick && place >= (lowest_of(found.rows) + 1) * k)) return;
  Stream<Weights, Weights::STREAM_DEPTH> stream;
  while (found.rows) {
    const int count = bits_of(found.rows);
    const Work work{expert, found.first, count < TOKENS ? count : (int)TOKENS, span};
    const Wave wave = wave_of(a, work, WAVES);
    stream.run(a, work, wave, found.take_tile());
    Finish<Op>::template run<WAVES>(a, work, wave, stream.acc, nullptr);
    found.first += TOKENS;
  }
}

// LDS of a tile in 16-byte pieces: two buffers, staged by whole blocks.
constexpr int tile_pieces(int tokens, int threads, int terms) {
  return 2 * terms * ((tokens * 8 + threads - 1) / threads * threads);
}

// The epilogues of catalogue.rs's operations.
template <int FORMAT, int TERMS> struct Operations {
  using Qkv = ::Qkv;
  using QkvStore = ::QkvStore<FORMAT>;
  using AttnOut = ::AttnOut;
  using Mlp1 = ::Mlp1<FORMAT, TERMS>;
  using SortMlp1 = Mlp1;
  using Mlp2 = ::Mlp2<(TERMS > 1)>;
  using GreedyLogits = ::GreedyLogits;
  using Logits = ::Logits;
};

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
    streamed_product<Operations<FORMAT, TERMS>::OP, WEIGHTS<FORMAT>, THREADS / WAVE>(a);                               \
  }
#define STREAMED_STORE(NAME, THREADS, SHARED_BYTES, OP, WEIGHTS, FORMAT, TERMS, N, MOST_ROWS, OCCUPANCY)               \
  KERNEL(NAME, QkvStoreArgs, THREADS, 1, OCCUPANCY) {                                                                  \
    static_assert(N == (int)TOKENS && MOST_ROWS == N && TERMS == 1, "what a stream holds");                            \
    streamed_product<Operations<FORMAT, TERMS>::OP, WEIGHTS<FORMAT>, THREADS / WAVE>(a.product);                       \
  }
#define STREAMED_SORT(NAME, THREADS, SHARED_BYTES, OP, WEIGHTS, FORMAT, TERMS, N, MOST_ROWS, OCCUPANCY)                \
  KERNEL(NAME, SortMlp1Args, THREADS, 1, OCCUPANCY) {                                                                  \
    static_assert(N == (int)TOKENS && MOST_ROWS <= WAVE && TERMS == 1, "what a stream holds, and a lane a row");       \
    sorting_product<Operations<FORMAT, TERMS>::OP, WEIGHTS<FORMAT>, THREADS / WAVE>(a);                                \
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
