// Few rows: mlp1's blocks find their expert's rows in the router's picks, and read them where they are. So no kernel
// sorts and gathers in a step that takes as long as its launches.
//
// A lane has the picks of a row. A vote on each pick gives the rows that have an expert, as bits, and the number of
// picks of lower experts. Expert e begins at the first multiple of GROUP_ALIGN from that number + (GROUP_ALIGN - 1) e
// on: behind the end of the expert before it, however many rows that one has. This leaves more slots empty than sort
// does, and ends below the same bound.
#pragma once
#include "catalogue.h"
#include "../expert_slots.h"
#include "work.h"

enum : int {
  MOST_PICKS = ROUTE_MOST_EXPERTS_PER_TOKEN,
  NO_EXPERT = 0x7fffffff,                // higher than all
};

// An expert's rows.
struct Found {
  u64 rows;                              // bit r: row r
  int first;                             // the first one's slot

  // Takes the first TOKENS rows out, and returns number LANE % TOKENS of them, or the last one.
  DEV int take_tile() {
    int row = 0, n = LANE % TOKENS;
    VECTOR(n);   // else the comparisons move out of the loop over tiles, and take 32 scalar registers throughout it
    for (int i = 0; i < TOKENS && rows; i++) {
      if (n >= i) row = lowest_of(rows);
      rows &= rows - 1;
    }
    return row;
  }
};

struct Picks {
  int k;
  int of[MOST_PICKS];

  // The loads do not wait for the number of rows; but nobody hands on what rows that do not exist have picked.
  DEV Picks(const SortMlp1Args& a, int rows) : k(a.sort.k) {
    const int* mine = a.sort.experts + (LANE < (WITHIN_LAUNCH ? rows : a.most_rows) ? LANE : 0) * k;
    for (;;) {
      bool all = true;
#pragma unroll
      for (int i = 0; i < MOST_PICKS; i++) of[i] = i < k ? peek(mine + i) : (int)NO_EXPERT;
#pragma unroll
      for (int i = 0; i < MOST_PICKS; i++) all = all && is_there(of[i]);
      if (all) break;
      still_wait();
    }
#pragma unroll
    for (int i = 0; i < MOST_PICKS; i++) of[i] = LANE < rows ? of[i] : (int)NO_EXPERT;
  }
  // All lanes of a wave call it with the same expert. It looks at all MOST_PICKS: those from the k-th on are nobody's,
  // and a loop that may end early is one that clang 17 does not unroll, with the picks in scratch.
  DEV Found find(int expert) const {
    u64 rows = 0;
    int lower = 0;
#pragma unroll
    for (int i = 0; i < MOST_PICKS; i++) {
      rows |= ballot(of[i] == expert);
      lower += bits_of(ballot(of[i] < expert));
    }
    return Found{rows, WITHIN_LAUNCH ? lower : slots_of(lower + (GROUP_ALIGN - 1) * expert)};
  }
  // Stores counts, offsets and slots, for the kernels after this one. A wave takes every WAVES-th expert.
  template <int WAVES> DEV void store(const SortArgs& a) const {
    for (int e = uniform(wave_among(WAVES)); e <= a.n_experts; e += WAVES) {
      const Found found = find(e);
      if (LANE == 0) hand_on(a.offsets + e, found.first);
      if (e == a.n_experts) break;
      if (LANE == 0) hand_on(a.counts + e, bits_of(found.rows));
      const int slot = found.first + bits_of(found.rows & ((1ull << LANE) - 1));
#pragma unroll
      for (int i = 0; i < MOST_PICKS; i++) if (of[i] == e) hand_on(a.slots + LANE * k + i, slot);
    }
  }
};
