// sort_gather: sort and gather fused, for few rows, where a step takes as long as its launches.
//
// Every block sorts redundantly: an expert's rows are a few words of bits in shared memory, and a pair's slot is the
// expert's first slot plus the number of bits before its own, as in sort. Then the block copies ROWS rows of one slab,
// as gather does. The first block writes slots and offsets.
//
// Grid: (rows of the bucket / ROWS, rounded up) * k_blocks. At most FEW_ROWS rows, MAX_EXPERTS experts, MAX_TERMS
// terms.
#include "catalogue.h"
#include "expert_slots.h"
#include "gpu/early.h"
#include "gpu/math.h"

enum {
  ROWS = SORT_GATHER_PER_BLOCK,
  THREADS = SORT_GATHER_THREADS,
  FEW_ROWS = SORT_GATHER_MOST_ROWS,
  WORDS = FEW_ROWS / 32,
  MAX_EXPERTS = SORT_GATHER_MOST_EXPERTS,
  MAX_K = SORT_GATHER_MOST_EXPERTS_PER_TOKEN,
  MAX_TERMS = 3,
};
static_assert(THREADS == ROWS * 8, "eight threads a row");

struct Sorted {
  u32 bits[MAX_EXPERTS][WORDS + 1];  // rows of each expert; the odd stride spreads experts over LDS banks
  int firsts[MAX_EXPERTS];                                 // an expert's first slot
  int experts[FEW_ROWS * MAX_K];

  DEV int before(int expert, int row) const {
    int count = __builtin_popcount(bits[expert][row / 32] & ((1u << row % 32) - 1));
    for (int w = 0; w < row / 32; w++) count += __builtin_popcount(bits[expert][w]);
    return count;
  }
  DEV int count(int expert) const {
    int count = 0;
    for (int w = 0; w < WORDS; w++) count += __builtin_popcount(bits[expert][w]);
    return count;
  }
  DEV int slot(int pair, int k) const { return firsts[experts[pair]] + before(experts[pair], pair / k); }
};

DEV void make_offsets(const SortArgs& a, Sorted& s) {
  const int end = place_experts(a.n_experts, [&](int e) { return s.count(e); }, [&](int e, int first) {
    s.firsts[e] = first;
    if (BID == 0) a.offsets[e] = first, a.counts[e] = s.count(e);
  });
  if (LANE == WAVE - 1 && BID == 0) a.offsets[a.n_experts] = end;
}

KERNEL(sort_gather, SortGatherArgs, THREADS, 4, 4) {
  SHARED Sorted s;
  let_successor_start();
  const GatherArgs& g = a.gather;
  const int n_experts = a.sort.n_experts, k = a.sort.k;
  const int slab = BID % g.k_blocks, row = BID / g.k_blocks * ROWS + TID / 8, piece = slab * SLAB + TID % 8 * 8;
  for (int i = TID; i < n_experts * (WORDS + 1); i += THREADS) (&s.bits[0][0])[i] = 0;
  const int rows = load_fresh(&a.sort.step.header->rows);
  after_predecessor();
  Piece pieces[MAX_TERMS] = {};                            // in flight while the block sorts
  UNROLL for (int t = 0; t < MAX_TERMS; t++)
    if (row < rows && t < g.terms)
      pieces[t] = *(const Piece*)(g.input + t * g.in_term + tiled_index(row, piece, g.in_rows));
  barrier();
  for (int pair = TID; pair < rows * k; pair += THREADS) {
    const int expert = s.experts[pair] = a.sort.experts[pair], r = pair / k;
    atomic_add((int*)&s.bits[expert][r / 32], (int)(1u << r % 32));
  }
  barrier();
  if (TID < WAVE) make_offsets(a.sort, s);
  barrier();
  if (BID == 0)
    for (int pair = TID; pair < rows * k; pair += THREADS) a.sort.slots[pair] = s.slot(pair, k);
  if (row >= rows) return;
  for (int i = 0; i < k; i++) {
    const i64 at = tiled_index(s.slot(row * k + i, k), piece, g.out_rows);
    UNROLL for (int t = 0; t < MAX_TERMS; t++)
      if (t < g.terms) *(Piece*)(g.out + t * g.out_term + at) = pieces[t];
  }
}
