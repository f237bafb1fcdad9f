// draw: samples a token from each row of logits, bit for bit as the host's sampler, with the random number in the plan:
// from all tokens, or from a nucleus (top-p). For a nucleus, tokens with a probability of at least `least` are sorted,
// if they are at most DRAW_TOKENS. If they are more, if their sum does not exceed topp, or if a logit is not finite,
// the result is -1 and the host samples the row. Grid: one block per logits row of the bucket.
#include "ordered_sum.h"

// Bitonic sort of `size` keys, a power of two. All threads call it, after the keys are written.
DEV void sort(u64* keys, int size) {
  for (int run = 2; run <= size; run *= 2)
    for (int stride = run / 2; stride > 0; stride /= 2) {
      barrier();
      for (int i = TID; i < size / 2; i += THREADS) {
        const int low = 2 * i - i % stride, high = low + stride;
        const u64 first = keys[low], second = keys[high];
        if ((first > second) == ((low & run) == 0)) keys[low] = second, keys[high] = first;
      }
    }
  barrier();
}

// Sort keys: ascending keys are descending probabilities, and ascending tokens of equal probability, as in the
// sampler's stable sort.
DEV u64 key_of(float probability, int token) { return (u64)~bits_of(probability) << 32 | (u32)token; }
DEV float probability_of(u64 key) { return __builtin_bit_cast(float, ~(u32)(key >> 32)); }

// The first of n keys at which the running sum of probabilities exceeds `limit`, or -1. The array is padded with keys
// of probability 0 to a multiple of KEYS_AT_ONCE.
enum { KEYS_AT_ONCE = 8 };
DEV int first_above(const u64* keys, int n, float limit, float& sum) {
  sum = 0;
  for (int first = 0; first < n; first += KEYS_AT_ONCE) {
    float p[KEYS_AT_ONCE];
    UNROLL for (int i = 0; i < KEYS_AT_ONCE; i++) p[i] = probability_of(keys[first + i]);
    UNROLL for (int i = 0; i < KEYS_AT_ONCE; i++)
      if ((sum += p[i]) > limit) return first + i;
  }
  return -1;
}

// A lower bound of the arguments whose exponentials can reach the share `least` of the sum: the exponent of `least`,
// rounded down, with a margin for roundings. The largest exponential is 1, so the sum is at least 1.
DEV float argument_of(float least) { return exponent_of(least) * 0.6931472f - 0.02f; }

// The token sampled from n sorted keys, or -1 if the sum of their probabilities does not exceed `topp`.
DEV int draw_from_nucleus(const u64* keys, int n, float topp, float coin) {
  float mass, sum;
  const int last = first_above(keys, n, topp, mass);
  if (last < 0) return -1;
  const int drawn = first_above(keys, last, mul_rn(coin, mass), sum);
  return (int)(u32)keys[drawn < 0 || drawn > last ? last : drawn];
}

// Writes the keys of all tokens with a probability of at least `least`, in any order, and counts them in `found`.
// `large`: the tiles in which this wave may have such tokens.
DEV void find_probable(const float* logits, int n, const Exponential& exponential, double sum, float least, u64 large,
                       u64* keys, int& found) {
  for (int tile = 0; tile * TILE < n; tile++) {
    if (!(large >> tile % 64 & 1)) continue;
    const int first = tile * TILE + TID * EACH;
    float v[EACH];
    load_mine(logits, first, n, v);
    for (int i = 0; i < EACH; i++) {
      if (first + i >= n) break;
      const float argument = exponential.argument(v[i]);
      if (!(argument >= argument_of(least))) continue;
      const float p = (float)(exponential(argument) / sum);
      if (p < least) continue;
      const int at = atomic_add(&found, 1);
      if (at < DRAW_TOKENS) keys[at] = key_of(p, first + i);
    }
  }
}

KERNEL(draw, DrawArgs, THREADS, 3, 2) {
  SHARED u64 powers[POWERS];
  SHARED union { Shared<double> sums; Shared<float> masses; } shared;
  SHARED u64 keys[DRAW_TOKENS];
  SHARED int found;
  let_successor_start();
  after_predecessor();
  const StepHeader& header = *a.step.header;
  if (BID >= header.logits_rows) return;
  if (TID < POWERS) powers[TID] = a.powers[TID];
  if (TID == 0) found = 0;
  barrier();
  const float* logits = a.logits + (i64)BID * a.vocab;
  const int slot = a.step.logits[BID].slot, n = a.vocab;
  const float coin = a.step.logits[BID].coin, topp = header.topp, least = header.least;
  const double temperature = header.temperature;
  const float max = slot < 0 ? __builtin_nanf("") : (float)(logits[a.step.last_tokens[slot]] / temperature);
  const Exponential exponential{powers, 1 / temperature, max};
  int drawn = -1;
  u64 large = 0;
  double sum = __builtin_nan("");
  const float large_from = argument_of(least);
  if (max - max == 0)
    sum = sum_in_order<double>(logits, n, exponential, 1, __builtin_inf(), shared.sums, drawn, large_from, large);
  barrier();

  if (sum == sum && topp == 0) {
    sum_in_order<float>(logits, n, exponential, sum, coin, shared.masses, drawn, __builtin_inff(), large);
    if (drawn < 0) drawn = n - 1;
  } else if (sum == sum) {
    find_probable(logits, n, exponential, sum, least, large, keys, found);
    barrier();
    const int probable = found;
    if (probable <= DRAW_TOKENS) {
      int size = KEYS_AT_ONCE;
      while (size < probable) size *= 2;
      for (int i = probable + TID; i < size; i += THREADS) keys[i] = key_of(0, 0);
      sort(keys, size);
      if (TID == 0) drawn = draw_from_nucleus(keys, probable, topp, coin);
    }
  }
  if (TID == 0) {
    if (a.sums) a.sums[BID] = sum;
    a.host[header.turn * a.host_rows + BID] = drawn;
    if (drawn >= 0) a.step.last_tokens[slot] = drawn;
    fence_system();
  }
}
