// draw_wide: samples the tokens of the rows whose nucleus is too wide for draw, bit for bit as the host's sampler.
//
// The sampler adds probabilities in float32 in descending order. While the sum S stays in one binade it is a whole
// number of units u = 2^-23 base, and S + p rounds to S plus p rounded to units, whatever S is, unless p is half way
// between two units. So the order of the tokens matters only where S leaves its binade, where it exceeds top-p or the
// random number, and at such halves. Three passes over the row:
// 1. Probabilities are put into buckets, in descending order; each bucket's mass, of approximate exponentials, tells
//    which binade S is in at the bucket, or that the bucket has a place where order matters.
// 2. Each bucket where order does not matter sums its probabilities, rounded to units. One with a half becomes one
//    where order matters.
// 3. Tokens of buckets where order matters are collected and sorted.
// Then one thread adds up: sorted tokens one by one, what lies between them by the buckets' sums. It checks that S was
// in the foreseen binade wherever it took a bucket's sum. Where it was not, where sorted tokens are too many, or where
// S never exceeds top-p, the result is -1 and the host samples the row. Grid: one block per logits row of the bucket.
#include "catalogue.h"
#include "sorted_keys.h"
#include "sum_before.h"

// A binade of probabilities down to 2^-HEAD_BINADES has 64 buckets (HEAD_SHIFT), of the TAIL_BINADES below 512.
enum {
  THREADS = DRAW_WIDE_THREADS,
  WAVES = THREADS / WAVE,
  EACH = 8,
  HEAD_BINADES = 12,
  TAIL_BINADES = 10,
  HEAD_SHIFT = 17,                                         // from a float's bits: 64 steps
  TAIL_SHIFT = 14,                                         // 512 steps
  HEAD_BUCKETS = HEAD_BINADES << (23 - HEAD_SHIFT),
  BUCKETS = HEAD_BUCKETS + (TAIL_BINADES << (23 - TAIL_SHIFT)),
  BUCKETS_EACH = (BUCKETS + THREADS - 1) / THREADS,
  MOST_KEYS = 4096,
};

// A bucket's state: the biased exponent of S where the bucket starts, with SORTED set if order matters in it.
enum : u8 { SORTED = 128, BEYOND = 255 };                  // BEYOND: after the nucleus
// Of a bucket with a half. Its sum stays negative whatever is added: that is less than two binades' units.
enum : int { HALF = -2147483647 - 1 };

struct Shared {
  u64 keys[MOST_KEYS];
  u64 powers[POWERS];
  double waves[WAVES];
  u32 sums[THREADS * BUCKETS_EACH];                        // first masses, in units of 2^-32; then whole units
  u8 states[THREADS * BUCKETS_EACH];
  int found, reach;
};
static_assert(sizeof(Shared) == DRAW_WIDE_SHARED_BYTES, "as the catalogue has it");

enum : u32 { ONE = 127u << 23, TAIL = (u32)HEAD_BINADES << 23 };

DEV int bucket_of(float p) {
  const u32 bits = bits_of(p), below = bits > ONE ? 0 : ONE - bits;
  return (int)(below < TAIL ? below >> HEAD_SHIFT : HEAD_BUCKETS + ((below - TAIL) >> TAIL_SHIFT));
}
// The largest probability of a bucket.
DEV float top_of(int bucket) {
  const u32 in_tail = TAIL + ((u32)(bucket - HEAD_BUCKETS) << TAIL_SHIFT);
  const u32 below = bucket < HEAD_BUCKETS ? (u32)bucket << HEAD_SHIFT : in_tail;
  return __builtin_bit_cast(float, ONE - below);
}

// Probabilities of a row. From 2^-30 on they are between `low` and `high` of their approximation: its product, its
// exponential of an argument above -32 and its quotient have relative errors below 2^-19.4 together.
struct Probabilities {
  Exponential exponential;
  double sum;
  float share;                                             // 1 / sum
  DEV float approximate(float argument) const { return exp2_fast(argument * LOG2E) * share; }
  DEV static float low(float p) { return p - p * 0x1p-19f; }
  DEV static float high(float p) { return p + p * 0x1p-19f; }
  DEV float exact(float argument) const { return (float)(exponential(argument) / sum); }
};

// Calls visit(argument, token) for each of a thread's tokens.
template <class Visit>
DEV void for_each(const float* logits, int n, const Exponential& exponential, const Visit& visit) {
  float raw[EACH];
  if (TID * EACH < n) load8<FORMAT_F32>(logits, TID * EACH, n - TID * EACH, raw);
  for (int first = TID * EACH; first < n; first += THREADS * EACH) {
    float v[EACH];
    UNROLL for (int i = 0; i < EACH; i++) v[i] = raw[i];
    const int next = first + THREADS * EACH;
    if (next < n) load8<FORMAT_F32>(logits, next, n - next, raw);  // in flight while these are visited
    UNROLL for (int i = 0; i < EACH; i++) if (first + i < n) visit(exponential.argument(v[i]), first + i);
  }
}

// What S is foreseen to be at least and at most, from the mass of the buckets before, in units of 2^-32. Roundings of S
// go either way: of a hundred thousand, the sum is far below the margin.
DEV float at_least(double mass) { return (float)(mass * ((1 - 0x1p-15) * 0x1p-32)); }
DEV float at_most(double mass) { return (float)(mass * ((1 + 0x1p-15) * 0x1p-32)); }

// Turns masses into states, and leaves 0 in the sums.
DEV void foresee(Shared& s, float topp, float coin) {
  const int mine = TID * BUCKETS_EACH;
  double mass = 0;
  for (int i = 0; i < BUCKETS_EACH; i++) mass += s.sums[mine + i];
  const double before = sum_before(mass, s.waves);
  // The sums of masses are exact, so one thread at most finds that its buckets make the nucleus whole.
  mass = before;
  for (int i = 0; i < BUCKETS_EACH && (mine == 0 || at_most(before) < topp); i++) {
    mass += s.sums[mine + i];
    if (at_most(mass) < topp) continue;
    s.reach = mine + i;
    break;
  }
  barrier();
  // The sum that ends the nucleus exceeds topp by at most its last token.
  const float limit_low = coin * topp, limit_high = coin * (topp + (s.reach < BUCKETS ? top_of(s.reach) : 0.f));
  mass = before;
  for (int i = 0; i < BUCKETS_EACH; i++) {
    const float start_low = at_least(mass), start_high = at_most(mass);
    mass += s.sums[mine + i];
    const float end_low = at_least(mass), end_high = at_most(mass);
    const u32 binade = bits_of(start_low) >> 23;
    const bool leaves = binade != bits_of(end_high) >> 23 || binade != bits_of(start_high) >> 23 ||
                        binade != bits_of(end_low) >> 23;
    const bool ends = end_high >= topp, draws = end_high >= limit_low && start_low <= limit_high;
    s.states[mine + i] = start_low > topp ? (u8)BEYOND : (u8)(binade | (leaves || ends || draws ? SORTED : 0));
    s.sums[mine + i] = 0;
  }
  barrier();
}

// The first of n sorted keys at which S exceeds `limit`; n if none does, and -1 if S was not as foreseen.
DEV int first_above(const Shared& s, int n, float limit, float& sum) {
  sum = 0;
  int next = 0;                                            // the first bucket that is not summed
  u32 units = 0;                                           // of the buckets before it
  for (int first = 0; first < n; first += KEYS_AT_ONCE) {
    u64 keys[KEYS_AT_ONCE];
    UNROLL for (int i = 0; i < KEYS_AT_ONCE; i++) keys[i] = s.keys[first + i];
    UNROLL for (int i = 0; i < KEYS_AT_ONCE; i++) {
      if (first + i >= n) break;
      const float p = probability_of(keys[i]);
      const int bucket = bucket_of(p);
      if (bucket >= next) {
        const u32 before = s.sums[bucket], bits = bits_of(sum), after = bits + (before - units);
        if (before != units) {
          if (bits >> 23 != (s.states[next] & 127u) || after >> 23 != bits >> 23) return -1;
          sum = __builtin_bit_cast(float, after);
          if (sum > limit) return -1;
        }
        units = before, next = bucket + 1;
      }
      if ((sum += p) > limit) return first + i;
    }
  }
  return n;
}

DEV int draw_sorted(const Shared& s, int n, float topp, float coin) {
  float mass, sum;
  const int last = first_above(s, n, topp, mass);
  if (last < 0 || last == n) return -1;
  const int drawn = first_above(s, last, mul_rn(coin, mass), sum);
  return drawn < 0 ? -1 : token_of(s.keys[drawn]);
}

KERNEL(draw_wide, DrawArgs, THREADS, 2, 2) {
  Shared& s = *(Shared*)DYNAMIC_SHARED;
  let_successor_start();
  after_predecessor();
  const StepHeader& header = *a.step.header;
  if (BID >= header.logits_rows) return;
  const double sum = a.sums[BID];
  if (!(sum > 0)) return;
  for (int i = TID; i < POWERS; i += THREADS) s.powers[i] = a.powers[i];
  for (int i = TID; i < THREADS * BUCKETS_EACH; i += THREADS) s.sums[i] = 0;
  if (TID == 0) s.found = 0, s.reach = BUCKETS;
  barrier();
  const float* logits = a.logits + (i64)BID * a.vocab;
  const LogitsRowInfo& row = a.step.logits[BID];
  const int slot = row.slot, n = a.drawable;
  const float coin = row.coin, topp = row.topp;
  const double temperature = row.temperature;
  const float max = (float)(logits[a.step.last_tokens[slot]] / temperature);
  const Probabilities probabilities{Exponential{s.powers, 1 / temperature, max}, sum, (float)(1 / sum)};
  // Tokens of this bucket and later ones may be too improbable for the sampler.
  const int improbable = bucket_of(div_rn(add_rn(1, -topp), (float)(n - 1)));
  const int end = improbable < BUCKETS ? improbable : BUCKETS;

  for_each(logits, n, probabilities.exponential, [&](float argument, int) {
    float p = probabilities.approximate(argument);
    int bucket = bucket_of(Probabilities::high(p));
    if (bucket >= end) return;
    if (bucket != bucket_of(Probabilities::low(p))) bucket = bucket_of(p = probabilities.exact(argument));
    if (bucket < end) atomic_add((int*)&s.sums[bucket], (int)(p < 1 ? (u32)(p * 0x1p32f) : ~0u));
  });
  barrier();
  foresee(s, topp, coin);

  for_each(logits, n, probabilities.exponential, [&](float argument, int) {
    const float about = probabilities.approximate(argument);
    const float low = Probabilities::low(about), high = Probabilities::high(about);
    int bucket = bucket_of(high);
    if (bucket >= end) return;
    float base = __builtin_bit_cast(float, (u32)(s.states[bucket] & 127) << 23);
    u32 after = bits_of(base + high);
    if (bucket != bucket_of(low) || after != bits_of(base + low)) {
      const float p = probabilities.exact(argument);
      bucket = bucket_of(p);
      if (bucket >= end) return;
      base = __builtin_bit_cast(float, (u32)(s.states[bucket] & 127) << 23);
      after = bits_of(base + p);
      const float unit = __builtin_bit_cast(float, bits_of(base) + 1) - base;
      const float rest = p - (base + p - base);
      if (s.states[bucket] < SORTED && 2 * (rest < 0 ? -rest : rest) == unit) {
        atomic_min((int*)&s.sums[bucket], HALF);
        return;
      }
    }
    if (s.states[bucket] < SORTED) atomic_add((int*)&s.sums[bucket], (int)(after - bits_of(base)));
  });
  barrier();

  // Each bucket's sum becomes that of all before it.
  const int mine = TID * BUCKETS_EACH;
  double units = 0;
  for (int i = 0; i < BUCKETS_EACH; i++) {
    if ((int)s.sums[mine + i] < 0) s.states[mine + i] |= SORTED;
    units += s.states[mine + i] < SORTED ? s.sums[mine + i] : 0;
  }
  u32 before = (u32)sum_before(units, s.waves);
  for (int i = 0; i < BUCKETS_EACH; i++) {
    const u32 units = s.states[mine + i] < SORTED ? s.sums[mine + i] : 0;
    s.sums[mine + i] = before;
    before += units;
  }

  for_each(logits, n, probabilities.exponential, [&](float argument, int token) {
    const float about = probabilities.approximate(argument);
    const int high = bucket_of(Probabilities::high(about)), low = bucket_of(Probabilities::low(about));
    const auto sorted = [&](int bucket) {
      return bucket < end && s.states[bucket] >= SORTED && s.states[bucket] != BEYOND;
    };
    if (!sorted(high) && !sorted(low)) return;
    const float p = probabilities.exact(argument);
    if (!sorted(bucket_of(p))) return;
    const int at = atomic_add(&s.found, 1);
    if (at < MOST_KEYS) s.keys[at] = key_of(p, token);
  });
  barrier();
  const int found = s.found;
  if (found > MOST_KEYS) return;
  sort_keys<THREADS>(s.keys, found);
  if (TID > 0) return;
  const int drawn = draw_sorted(s, found, topp, coin);
  if (drawn < 0) return;
  a.host[header.turn * a.host_rows + BID] = drawn;
  a.step.last_tokens[slot] = drawn;
  fence_system();
}
