// Products of few rows, whose weights are streamed past the tokens (stream.h), and what differs between all products'
// operations.
#pragma once
#include "picks.h"
#include "stream.h"

// Whether an operation's tokens are the step's rows, of which GemmArgs has the index.
template <class Op> struct Indexed { enum : bool { IS = false }; };
template <int FORMAT> struct Indexed<Mlp1<FORMAT, 1>> { enum : bool { IS = true }; };

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

template <class Op, class Weights, int WAVES> DEV void streamed_product(const GemmArgs& a, int block) {
  let_successor_start();
  after_predecessor();
  const Work work = find_work<TOKENS>(a, WAVES, block);
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
template <class Op, class Weights, int WAVES> DEV void sorting_product(const SortMlp1Args& args, int block) {
  let_successor_start();
  after_predecessor();
  const GemmArgs& a = args.product;
  const int rows = args.sort.step.header->rows, k = args.sort.k;
  if (block == 0) return Picks(args, rows).store<WAVES>(args.sort);
  const int spans = (a.row_blocks + WAVES - 1) / WAVES, place = (block - 1) / spans, span = (block - 1) % spans;
  const bool by_pick = args.most_rows * k < a.groups;
  const int pick = WITHIN_LAUNCH && place >= rows * k ? 0 : place;   // nobody hands on what others have picked
  const int expert = uniform(by_pick ? take(args.sort.experts + pick) : place);
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
