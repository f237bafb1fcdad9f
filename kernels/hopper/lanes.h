// A chunk's first stages, where tokens are few: each is filled by a lane of the producer's warp, as one lane would
// issue the copies one after the other. Only early stages get their weights before the predecessor ends; in the others
// weights would delay the tokens. Where several producers take turns, each fills those that are its.
#pragma once
#include "copy.h"

// Of a pipeline: one a lane.
enum : int { MAX_STAGES = WAVE };

// G: the product (gemm.h).
template <class G> struct Lanes {
  static_assert((int)G::T::N <= 64, "tokens are few");
  // K tiles of the first chunk of which the weights are under way, and not the tokens. So what compares with it is
  // always true; without the comparison the compiler makes other code of a producer's loop, which was not measured.
  enum : int { WEIGHTS_ALONE = 0 };

  static DEV int first_stage() { return G::producer() + G::PRODUCERS * LANE; }
  static DEV int filled(const GemmArgs& a) { return min((int)G::STAGES, G::k_tiles_of(a)); }
  static DEV bool is_early(const GemmArgs& a, int stage) {
    return (G::EARLY || G::by_picks(a)) && stage < G::EARLY_SLABS / G::SLABS;
  }
  static DEV void fill_early(const GemmArgs& a, const Pipe& p, const Chunk& c) {
    const int stage = first_stage();
    if (stage >= filled(a)) return;
    G::expect_weights(a, p, stage, c, stage);
    if (is_early(a, stage)) G::copy_weights(a, p, stage, c, stage);
  }
  // Calls hand_over() before stage 0 is full.
  template <class F> static DEV void fill(const GemmArgs& a, Pipe p, const Chunk& c, F hand_over) {
    const int stage = p.stage = first_stage();
    if (stage >= filled(a)) return;
    if (stage == 0) hand_over();
    G::copy_tokens(a, p, c, stage);
    if (!is_early(a, stage)) G::copy_weights(a, p, stage, c, stage);
  }
};
