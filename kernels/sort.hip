// sort: assigns a slot to each (row, expert) pair; an expert's slots are consecutive, in order of rows.
//
// A block takes a share of ROWS rows. A row names an expert at most once, so a share is a bit matrix [expert][row] in
// shared memory, and a pair's slot is the expert's first slot, plus its rows before the share, plus the number of bits
// before its own: population counts and one prefix sum over the words of an expert instead of sorting. The rows before
// and behind its share each block counts itself, so no block waits for another. Bits are set and rows counted by atomic
// additions, whose order does not matter, so slots are the same in every run.
//
// The first block also cuts the experts' rows into tiles, where a family's mlp1 and mlp2 want that.
//
// Grid: rows of the bucket / ROWS, rounded up. At most MAX_EXPERTS experts.
#include "catalogue.h"
#include "expert_cuts.h"
#include "expert_slots.h"
#include "gpu/early.h"
#include "gpu/math.h"

enum {
  THREADS = SORT_THREADS,
  WAVES = THREADS / WAVE,
  MAX_EXPERTS = SORT_MOST_EXPERTS,
  ROWS = SORT_PER_BLOCK,
  WORDS = ROWS / 32,
  STRIDE = WORDS + 1,                    // of a matrix's rows: odd, which spreads experts over LDS banks
  AHEAD = 8,                             // pairs that a thread has in flight while it counts
};
static_assert(ROWS <= THREADS && WORDS <= 32, "a thread a row, a lane a word");

struct Share {
  u32 bits[MAX_EXPERTS * STRIDE];
  int within[MAX_EXPERTS * STRIDE];      // number of bits in the expert's words before this one
  int before[MAX_EXPERTS];               // rows before the share
  int counts[MAX_EXPERTS];               // all rows
  int firsts[MAX_EXPERTS];               // the slot of the expert's first row of the share
};

DEV int bits_set(u32 v) { return __builtin_popcount(v); }

// Counts the rows outside the share, and sets the bits of those within.
DEV void mark(const SortArgs& a, int first_row, int rows, Share& s) {
  const int from = first_row * a.k, to = from + ROWS * a.k, pairs = rows * a.k;
  for (int i = TID; i < pairs; i += THREADS * AHEAD) {
    int experts[AHEAD];
    UNROLL for (int j = 0; j < AHEAD; j++) experts[j] = i + j * THREADS < pairs ? a.experts[i + j * THREADS] : -1;
    UNROLL for (int j = 0; j < AHEAD; j++) {
      const int pair = i + j * THREADS, expert = experts[j];
      if (expert < 0) continue;
      const int row = pair / a.k - first_row;
      if (pair < from) atomic_add(&s.before[expert], 1);
      else if (pair >= to) atomic_add(&s.counts[expert], 1);
      else atomic_add((int*)&s.bits[expert * STRIDE + row / 32], (int)(1u << row % 32));
    }
  }
  barrier();
}

DEV void sum_words(const SortArgs& a, Share& s) {
  // One wave per expert, one lane per word: a prefix sum over lanes.
  for (int e = TID / WAVE; e < a.n_experts; e += WAVES) {
    const int own = LANE < WORDS ? bits_set(s.bits[e * STRIDE + LANE]) : 0;
    int sum = own;
    for (int o = 1; o < WORDS; o *= 2) {
      const int lower = shfl(sum, LANE >= o ? LANE - o : LANE);
      if (LANE >= o) sum += lower;
    }
    if (LANE < WORDS) s.within[e * STRIDE + LANE] = sum - own;
    if (LANE == WORDS - 1) s.counts[e] += s.before[e] + sum;
  }
  barrier();
}

DEV void make_offsets(const SortArgs& a, Share& s) {
  const int end = place_experts(a.n_experts, [&](int e) { return s.counts[e]; }, [&](int e, int first) {
    s.firsts[e] = first + s.before[e];
    if (BID == 0) a.offsets[e] = first, a.counts[e] = s.counts[e];
  });
  if (LANE == WAVE - 1 && BID == 0) a.offsets[a.n_experts] = end;
}

DEV void place(const SortArgs& a, int row, int rows, const Share& s) {
  if (TID >= ROWS || row >= rows) return;
  for (int i = 0; i < a.k; i++) {
    const int e = a.experts[(i64)row * a.k + i], at = e * STRIDE + TID / 32;
    const int slot = s.firsts[e] + s.within[at] + bits_set(s.bits[at] & ((1u << TID % 32) - 1));
    a.slots[(i64)row * a.k + i] = slot;
    if (a.slot_rows) a.slot_rows[slot] = row;
  }
}

KERNEL(sort, SortArgs, THREADS, 1, 4) {
  SHARED Share s;
  let_successor_start();
  for (int i = TID; i < a.n_experts * STRIDE; i += THREADS) s.bits[i] = 0;
  if (TID < MAX_EXPERTS) s.before[TID] = s.counts[TID] = 0;
  const int rows = load_fresh(&a.step.header->rows), first_row = BID * ROWS;
  after_predecessor();
  if (BID > 0 && first_row >= rows) return;
  barrier();
  mark(a, first_row, rows, s);
  sum_words(a, s);
  if (TID < WAVE) make_offsets(a, s);
  barrier();
  place(a, first_row + TID, rows, s);
  if constexpr (CUTS_EXPERTS) {
    SHARED CutOrder<MAX_EXPERTS> order;
    if (BID > 0 || !a.mlp1_cuts) return;
    order.sort<THREADS>(a.n_experts, a.tile_steps, s.counts);
    if (TID / WAVE == 0) order.cut(a.n_experts, a.mlp1_spans, a.places, a.mlp1_cuts);
    if (TID / WAVE == 1) order.cut(a.n_experts, a.mlp2_spans, a.places, a.mlp2_cuts);
  }
}
