// score: what the log-probabilities of a logits row take, where the plan asks for them: the logit of one token, those
// of the row's most probable tokens, the largest logit, and the sum of e^(logit - largest). The host takes the
// logarithm in float64. Where a logit is NaN or infinity, or all are -infinity, the sum is NaN, and the host computes
// all of it. Grid: one block per logits row of the bucket.
//
// One pass over the row gives the sum, in which each thread scales its exponentials by its own largest logit so far.
// It also gives each thread's most probable token. Of these tokens the `top`th most probable one is a bound: `top`
// tokens are at least as probable, and so the most probable ones of the row are. A second pass collects all that are,
// in the tiles whose largest logit says that there are some. They are about `top`, unless probable tokens crowd in the
// places of a few threads. If they are more than there is room for, the `top`th of those collected is the next bound.
#include "catalogue.h"
#include "sorted_keys.h"

enum {
  THREADS = SCORE_THREADS,
  WAVES = THREADS / WAVE,
  EACH = 8,                                                // and the next 8 on their way: 56 registers on Hopper
  TILE = THREADS * EACH,
  // Tiles whose largest logits are kept apart: 262,144 tokens, more than gpt-oss has. Further tiles share their places.
  KEPT_TILES = 128,
  // Many times the `top` that are looked for; 8 KiB, so that LDS leaves room for four blocks.
  KEYS = 1024,
};
static_assert(KEYS >= THREADS && THREADS >= MOST_TOP, "as many threads' tokens are sorted");

// Ascending keys are descending logits, and ascending tokens of equal logits; 0 and -0 are equal.
DEV u64 logit_key(float logit, u32 token) {
  const u32 bits = bits_of(logit + 0.f), ascending = bits >> 31 ? ~bits : bits | 1u << 31;
  return (u64)~ascending << 32 | token;
}
DEV float logit_of(u64 key) {
  const u32 ascending = ~(u32)(key >> 32);
  return __builtin_bit_cast(float, ascending >> 31 ? ascending ^ 1u << 31 : ~ascending);
}

// Eight logits from `first` on; those behind the row's end are -infinity.
DEV void load_mine(const float* logits, int first, int n, float* v) {
  if (first < n) load8<FORMAT_F32>(logits, first, n - first, v);
  UNROLL for (int i = 0; i < EACH; i++) if (first + i >= n) v[i] = -__builtin_inff();
}

// The keys of all tokens up to `bound`, in any order, as far as there is room; `found` counts them all. `highest`: the
// largest logit that this wave has in each tile.
DEV void collect(const float* logits, int n, const float* highest, u64 bound, u64* keys, int& found) {
  const float least = logit_of(bound);
  for (int tile = 0; tile * TILE < n; tile++) {
    if (!(highest[tile % KEPT_TILES] >= least)) continue;
    const int first = tile * TILE + TID * EACH;
    float v[EACH];
    load_mine(logits, first, n, v);
    for (int i = 0; i < EACH; i++) {
      if (first + i >= n || !(v[i] >= least)) continue;
      const u64 key = logit_key(v[i], first + i);
      if (key > bound) continue;
      const int at = atomic_add(&found, 1);
      if (at < KEYS) keys[at] = key;
    }
  }
}

KERNEL(score, ScoreArgs, THREADS, 4, 4) {
  SHARED u64 keys[KEYS];
  SHARED float highest[WAVES][KEPT_TILES], maxima[WAVES];
  SHARED double sums[WAVES];
  SHARED int found;
  let_successor_start();
  after_predecessor();
  const StepHeader& header = *a.step.header;
  if (BID >= header.logits_rows) return;
  const LogitsRowInfo& row = a.step.logits[BID];
  const int top = row.top, n = a.vocab;
  if (top < 0) return;
  const float* logits = a.logits + (i64)BID * n;

  float largest = -__builtin_inff();
  double sum = 0;
  u64 best = logit_key(largest, ~0u);
  float next[EACH];
  load_mine(logits, TID * EACH, n, next);
  for (int tile = 0; tile * TILE < n; tile++) {
    const int first = tile * TILE + TID * EACH;
    float v[EACH], most = -__builtin_inff();
    int at = 0;
    UNROLL for (int i = 0; i < EACH; i++) {
      v[i] = next[i];
      if (v[i] > most) most = v[i], at = i;
    }
    load_mine(logits, first + TILE, n, next);              // in flight while these are summed
    if (most > largest) {
      sum *= exp2_fast((largest - most) * LOG2E);
      largest = most;
      best = logit_key(most, first + at);
    }
    const float base = largest == -__builtin_inff() ? 0 : largest;
    float added = 0;
    UNROLL for (int i = 0; i < EACH; i++) added += exp2_fast((v[i] - base) * LOG2E);
    sum += added;
    if (top > 0) {
      most = wave_max(most);
      float& kept = highest[TID / WAVE][tile % KEPT_TILES];
      if (LANE == 0) kept = tile >= KEPT_TILES && kept > most ? kept : most;
    }
  }
  const float wave_largest = wave_max(largest);
  if (LANE == 0) maxima[TID / WAVE] = wave_largest;
  keys[TID] = best;
  if (TID == 0) found = 0;
  barrier();
  float block_largest = maxima[0];
  for (int i = 1; i < WAVES; i++) block_largest = maxima[i] > block_largest ? maxima[i] : block_largest;
  sum = block_sum<WAVES>(sum * exp2_fast((largest - block_largest) * LOG2E), sums);

  Scored& host = a.host[header.turn * a.host_rows + BID];
  if (sum == sum && top > 0) {
    sort_keys<THREADS>(keys, THREADS);
    for (int n_found = KEYS + 1; n_found > KEYS;) {
      const u64 bound = keys[top - 1];
      barrier();
      collect(logits, n, highest[TID / WAVE], bound, keys, found);
      barrier();
      n_found = found;
      sort_keys<THREADS>(keys, n_found < KEYS ? n_found : KEYS);
      if (TID == 0) found = 0;
    }
    if (TID < top && TID < n) {
      host.top_tokens[TID] = token_of(keys[TID]);
      host.top_logits[TID] = logit_of(keys[TID]);
    }
  }
  if (TID == 0) {
    const int token = row.next >= 0 ? row.next : a.step.last_tokens[row.slot];
    host.sum = sum, host.largest = block_largest, host.token = token, host.logit = logits[token];
  }
  fence_system();
}
