// Calls the epilogue with a wave's accumulators.
#pragma once
#include "../best.h"
#include "epilogue.h"
#include "weights.h"
#include "work.h"

// A wave's part: the tile's tokens times one row block.
struct Wave {
  int row_block;   // clamped to the last one
  bool live;       // false: past the last one; it computes with the others and stores nothing
};
DEV Wave wave_of(const GemmArgs& a, const Work& work, int waves) {
  const int row_block = work.span * waves + uniform(wave_among(waves));
  return Wave{row_block < a.row_blocks ? row_block : a.row_blocks - 1, row_block < a.row_blocks};
}
template <class Weights> DEV Global slabs_of(const GemmArgs& a, const Work& work, const Wave& wave) {
  const i64 row_block = (i64)work.group * a.row_blocks + wave.row_block;
  return (Global)a.weights + row_block * a.k_blocks * Weights::SLAB_BYTES;
}

template <class Sum> DEV void scaled_sums(const GemmArgs& a, const Sum& low, const Sum& high, float* sums) {
  for (int i = 0; i < 4; i++) sums[i] = (float)(low[i] * a.scale), sums[4 + i] = (float)(high[i] * a.scale);
}

template <class Op, class Sum, int S>
DEV void finish(const GemmArgs& a, const Work& work, const Wave& wave, const Sum (&acc)[2][S], u8*) {
  if (!wave.live) return;
  const int n = LANE % 16, o = wave.row_block * BLOCK_ROWS + LANE / 16 * 8;
#pragma unroll
  for (int s = 0; s < S; s++) {
    const int t = s * TOKENS + n;
    if (t >= work.count) continue;
    float sums[8];
    scaled_sums(a, acc[0][s], acc[1][s], sums);
    Op::store(a, Place{work.group, work.first + t, o}, sums);
  }
}

// mlp1's output has a column for every two rows: four waves fill a slab of 64. Beyond the last row block they store
// zeros.
template <class Op, class Sum, int S>
DEV void finish_mlp1(const GemmArgs& a, const Work& work, const Wave& wave, const Sum (&acc)[2][S], u8* shared) {
  if (wave.live) return finish<Op>(a, work, wave, acc, shared);
  const int n = LANE % 16, o = (work.span * 4 + wave_among(4)) * BLOCK_ROWS + LANE / 16 * 8;
#pragma unroll
  for (int s = 0; s < S; s++)
    if (s * TOKENS + n < work.count) Op::store_zeros(a, work.first + s * TOKENS + n, o);
}

// The unembedding: the block's argmax for each token, the lowest index of the largest logit. If all are NaN: NaN and 0.
template <class Sum> DEV Best best_of_lane(const GemmArgs& a, const Sum& low, const Sum& high, int o, bool live) {
  float sums[8];
  scaled_sums(a, low, high, sums);
  Best best = Best::none();
  for (int i = 0; i < 8; i++) if (live && o + i < a.n) best.take(sums[i], o + i);
  for (int mask = 16; mask < WAVE; mask *= 2) best.take(shfl_xor(best.logit, mask), shfl_xor(best.index, mask));
  return best;
}

// `shared` has room for WAVES * S * 16 Best and is no longer read by any wave.
template <int WAVES, class Sum, int S>
DEV void finish_greedy(const GemmArgs& a, const Work& work, const Wave& wave, const Sum (&acc)[2][S], u8* shared) {
  Best* bests = (Best*)shared;
  const int n = LANE % 16, o = wave.row_block * BLOCK_ROWS + LANE / 16 * 8;
#pragma unroll
  for (int s = 0; s < S; s++) {
    const Best best = best_of_lane(a, acc[0][s], acc[1][s], o, wave.live);
    if (LANE < TOKENS) bests[(TID / WAVE * S + s) * TOKENS + n] = best;
  }
  barrier();
  for (int t = TID; t < work.count; t += WAVES * WAVE) {
    Best best = bests[t];
    for (int w = 1; w < WAVES; w++) best.take(bests[w * S * TOKENS + t].logit, bests[w * S * TOKENS + t].index);
    const i64 at = (i64)work.span * a.best_rows + work.first + t;
    a.best[at] = best.index == NO_INDEX ? __builtin_nanf("") : best.logit;
    a.best_index[at] = best.index == NO_INDEX ? 0 : best.index;
  }
}
