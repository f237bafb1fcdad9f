// draw: samples a token from each row of logits, bit for bit as the host's sampler, with the random number in the plan:
// from all tokens, or from a nucleus (top-p). For a nucleus, tokens with a probability of at least `least` are sorted,
// if they are at most DRAW_TOKENS. If they are more, or if their sum does not exceed topp, the result is -1, and
// draw_wide samples the row if it can. If a logit is not finite it is -1, too, and the host samples the row. Grid: one
// block per logits row of the bucket.
#include "ordered_sum.h"
#include "sorted_keys.h"
#include "sum_before.h"

// A lower bound of the arguments whose exponentials can reach the share `least` of the sum: the exponent of `least`,
// rounded down, with a margin for roundings. The largest exponential is 1, so the sum is at least 1.
DEV float argument_of(float least) { return exponent_of(least) * 0.6931472f - 0.02f; }

// The first of n keys at which the running sum of probabilities exceeds `limit`, or -1.
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

// The token sampled from n sorted keys, or -1 if the sum of their probabilities does not exceed `topp`.
DEV int draw_from_nucleus(const u64* keys, int n, float topp, float coin) {
  float mass, sum;
  const int last = first_above(keys, n, topp, mass);
  if (last < 0) return -1;
  const int drawn = first_above(keys, last, mul_rn(coin, mass), sum);
  return token_of(keys[drawn < 0 || drawn > last ? last : drawn]);
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

// Without a nucleus the token is drawn at which the running sum of float32 probabilities first exceeds `coin`. That sum
// differs from S / sum, where S is the running float64 sum of exponentials and `sum` the whole one, only by roundings:
// - of each addition: half a unit of sums below 1, HALF_UNIT, or what is added if that is less. Of all of them it is at
//   most `capped`: what each thread adds in a tile, but at most EACH times HALF_UNIT. No probability is larger than its
//   exponential.
// - of the addition that exceeds `coin`, perhaps to above 1: another HALF_UNIT.
// - of the quotients: 2^-24 of each, and all together are 1.
// - of S, in any order, and of what the threads add: less than 2^-48 of `sum` an addition.
// So a token that takes S / sum from at most `coin` less all these to more than `coin` and all these is the one drawn.
constexpr float HALF_UNIT = 0x1p-25f;
// With more they seldom leave a token, and it is not looked for.
constexpr double MOST_ROUNDINGS = 0x1p-8;

// One thread gets that token, the others -1; all get -1 where roundings decide. `before`: the sums before the tiles.
DEV int draw_beyond_roundings(const float* logits, int n, const Exponential& exponential, double sum, float coin,
                              float capped, const double* before, double* waves) {
  const double roundings = 1.01 * capped + 0x1p-22 + n * 0x1p-48;
  if (roundings > MOST_ROUNDINGS || n > KEPT_TILES * TILE) return -1;
  const double low = (coin - roundings) * sum, high = (coin + roundings) * sum;
  int tile = 0;
  for (int stride = KEPT_TILES / 2; stride; stride /= 2)
    if ((tile + stride) * TILE < n && before[tile + stride] <= low) tile += stride;
  if ((tile + 1) * TILE < n && !(before[tile + 1] > high)) return -1;
  const int mine = tile * TILE + TID * EACH, end = mine + EACH < n ? mine + EACH : n;
  const auto exponential_at = [&](int i) { return exponential(exponential.argument(logits[i])); };
  double added = 0;
  ROLLED for (int i = mine; i < end; i++) added += exponential_at(i);
  double s = before[tile] + sum_before(added, waves);
  if (s > low || s + added <= low) return -1;
  int i = mine;
  while (i < end && (s += exponential_at(i)) <= low) i++;
  return i < end && s > high ? i : -1;
}

// The largest exponential is 1. Where the sum is more than this, tokens of at least 1/16384 seldom make a nucleus, and
// are not looked for if the row may have too many of them. A margin for roundings is added to their sum below.
constexpr double MOST_SUM = 32;

// Two blocks a multiprocessor: with three, Hopper's registers do not suffice by three words a thread.
KERNEL(draw, DrawArgs, THREADS, 2, 2) {
  SHARED u64 powers[POWERS];
  SHARED union { Shared<double> sums; Shared<float> masses; } shared;
  SHARED u64 keys[DRAW_TOKENS];
  SHARED float masses[WAVES];
  SHARED double waves[WAVES];
  SHARED int found, beyond_roundings;
  let_successor_start();
  after_predecessor();
  const StepHeader& header = *a.step.header;
  if (BID >= header.logits_rows) return;
  const LogitsRowInfo& row = a.step.logits[BID];
  if (row.slot < 0 || row.temperature == 0) {
    // Nothing is drawn here: a greedy row's token is the argmax, which is there.
    if (TID == 0) {
      a.sums[BID] = __builtin_nan("");
      a.host[header.turn * a.host_rows + BID] = -1;
      fence_system();
    }
    return;
  }
  if (TID < POWERS) powers[TID] = a.powers[TID];
  if (TID == 0) found = 0, beyond_roundings = -1;
  barrier();
  const float* logits = a.logits + (i64)BID * a.vocab;
  const int n = a.drawable;
  const double temperature = row.temperature;
  const float max = (float)(logits[a.step.last_tokens[row.slot]] / temperature);
  const Exponential exponential{powers, 1 / temperature, max};
  int drawn = -1;
  u64 large = 0;
  double sum = __builtin_nan("");
  const float large_from = argument_of(row.least);
  float capped = 0;
  if (max - max == 0)
    sum = sum_in_order<double>(logits, n, exponential, 1, __builtin_inf(), shared.sums, drawn, large_from, large,
                               EACH * HALF_UNIT, capped);
  barrier();

  const float topp = row.topp;
  if (sum == sum && topp == 0) {
    capped = block_sum<WAVES>(capped, masses);
    const int mine = draw_beyond_roundings(logits, n, exponential, sum, row.coin, capped, shared.sums.before, waves);
    if (mine >= 0) beyond_roundings = mine;
    barrier();
    drawn = beyond_roundings;
    if (drawn < 0)
      sum_in_order<float>(logits, n, exponential, sum, row.coin, shared.masses, drawn, __builtin_inff(), large, 0,
                          capped);
    if (drawn < 0) drawn = n - 1;
  } else if (sum <= MOST_SUM || (sum == sum && n <= DRAW_TOKENS)) {
    find_probable(logits, n, exponential, sum, row.least, large, keys, found);
    barrier();
    const int probable = found;
    float mass = 0;
    for (int i = TID; i < probable && i < DRAW_TOKENS; i += THREADS) mass += probability_of(keys[i]);
    mass = block_sum<WAVES>(mass, masses);
    if (probable <= DRAW_TOKENS && mass * 1.001f > topp) {
      sort_keys<THREADS>(keys, probable);
      if (TID == 0) drawn = draw_from_nucleus(keys, probable, topp, row.coin);
    }
  }
  if (TID == 0) {
    a.sums[BID] = drawn < 0 ? sum : -sum;
    a.host[header.turn * a.host_rows + BID] = drawn;
    if (drawn >= 0) a.step.last_tokens[row.slot] = drawn;
    fence_system();
  }
}
