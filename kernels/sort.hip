// sort: assigns a slot to each (row, expert) pair; an expert's slots are consecutive, in order of rows.
//
// One block, one thread per row. A row names an expert at most once, so a chunk of rows is a bit matrix [expert][row]
// in shared memory, and a pair's slot is the expert's first slot plus the number of bits before its own: population
// counts and one prefix sum over 32 words per expert instead of sorting. Bits are set by atomic additions, whose order
// does not matter, so slots are the same in every run. Rows beyond a chunk are taken in further rounds, first to count,
// then to assign slots.
//
// Grid: 1. At most MAX_EXPERTS experts.
#include "catalogue.h"
#include "expert_slots.h"

enum {
  THREADS = SORT_THREADS,
  WAVES = THREADS / WAVE,
  MAX_EXPERTS = SORT_MOST_EXPERTS,
  MATRIX_WORDS = MAX_EXPERTS * (16 + 1),
};

struct Chunks {
  u32* bits;         // [n_experts][words + 1]; the odd stride spreads experts over LDS banks
  int* before;       // [n_experts][words + 1]: number of bits in the expert's words before this one
  int* counts;       // [n_experts]: rows of the chunks so far
  int* firsts;       // [n_experts]: the slot of the expert's first row of the chunk
  int words;         // per chunk, of 32 rows each
  int rows;
  int n_experts;
  int k;
};

DEV int bits_set(u32 v) { return __builtin_popcount(v); }

DEV void mark(const Chunks& c, const int* experts, int first_row) {
  const int stride = c.words + 1;
  barrier();
  for (int i = TID; i < c.n_experts * stride; i += THREADS) c.bits[i] = 0;
  barrier();
  const int row = first_row + TID;
  if (TID < c.words * 32 && row < c.rows)
    for (int i = 0; i < c.k; i++)
      atomic_add((int*)&c.bits[experts[(i64)row * c.k + i] * stride + TID / 32], (int)(1u << TID % 32));
  barrier();
  // One wave per expert, one lane per word: a prefix sum over lanes.
  for (int e = TID / WAVE; e < c.n_experts; e += WAVES) {
    const int own = LANE < c.words ? bits_set(c.bits[e * stride + LANE]) : 0;
    int sum = own;
    for (int o = 1; o < 32; o *= 2) {
      const int lower = shfl(sum, LANE >= o ? LANE - o : LANE);
      if (LANE >= o) sum += lower;
    }
    if (LANE < c.words) c.before[e * stride + LANE] = sum - own;
    if (LANE == c.words - 1) c.counts[e] += sum;
  }
  barrier();
}

DEV void make_offsets(const SortArgs& a, const Chunks& c) {
  const int end = place_experts(c.n_experts, [&](int e) { return c.counts[e]; }, [&](int e, int first) {
    a.offsets[e] = c.firsts[e] = first, a.counts[e] = c.counts[e];
  });
  if (LANE == WAVE - 1) a.offsets[c.n_experts] = end;
}

DEV void place(const SortArgs& a, const Chunks& c, int first_row) {
  const int row = first_row + TID, word = TID / 32, stride = c.words + 1;
  if (word >= c.words || row >= c.rows) return;
  for (int i = 0; i < c.k; i++) {
    const int e = a.experts[(i64)row * c.k + i], at = e * stride + word;
    a.slots[(i64)row * c.k + i] = c.firsts[e] + c.before[at] + bits_set(c.bits[at] & ((1u << TID % 32) - 1));
  }
}

KERNEL(sort, SortArgs, THREADS, 1, 4) {
  SHARED u32 bits[MATRIX_WORDS];
  SHARED int before[MATRIX_WORDS];
  SHARED int counts[MAX_EXPERTS];
  SHARED int firsts[MAX_EXPERTS];
  let_successor_start();
  after_predecessor();
  const int rows = a.step.header->rows, words = a.n_experts <= MAX_EXPERTS / 2 ? 32 : 16, chunk = words * 32;
  const Chunks c{bits, before, counts, firsts, words, rows, a.n_experts, a.k};
  if (TID < MAX_EXPERTS) counts[TID] = 0;
  for (int row = 0; row < rows; row += chunk) mark(c, a.experts, row);
  barrier();
  if (TID < WAVE) make_offsets(a, c);
  barrier();
  // With a single chunk the bits are still in shared memory.
  if (rows <= chunk) {
    place(a, c, 0);
    return;
  }
  if (TID < MAX_EXPERTS) counts[TID] = 0;
  for (int row = 0; row < rows; row += chunk) {
    mark(c, a.experts, row);
    place(a, c, row);
    barrier();
    if (TID < a.n_experts) firsts[TID] += counts[TID], counts[TID] = 0;
  }
}
