// summarize: what the host needs to draw from a row of logits without seeing it. The sum of the row's exponentials as the
// host's sampler forms it, to the bit, and the tokens that have at least `share` of it, in any order. Grid: one block a
// logits row of the bucket. Rows nobody draws from, and those whose numbers are not finite, get NaN for a sum.
//
// The sampler adds e^(x / T - max) in float64 in the order of the tokens, and each addition rounds. Between two powers of
// two, base and 2 base, the sum S is a whole number of units u = 2^-52 base, and S + e rounds to S plus e rounded to units;
// only where e lies half way between two does S matter, by being even or odd. So what any run of values adds is known from
// S's parity alone: a pair of numbers, found by adding the values to `base` and to `base` + u. Two such pairs give that of
// both runs; so threads, waves and then the block sum in parallel what is to be summed in order. The wave in which S leaves
// its binade, which happens a dozen times a row, adds its values one by one. Values below u / 2 add nothing: their
// exponentials are not made.
#include "gpu/math.h"

enum { THREADS = 512, WAVES = THREADS / WAVE, EACH = 8, TILE = THREADS * EACH };

DEV u64 bits_of(double v) { return __builtin_bit_cast(u64, v); }
DEV double from_bits(u64 bits) { return __builtin_bit_cast(double, bits); }

// A binade: sums from `base` up to below `end`. A sum of 0 leaves its own with the first value that is not.
struct Binade {
  double base, next, end;                                  // next: base + u
  DEV explicit Binade(double sum) {
    base = from_bits(bits_of(sum) & 0x7ffull << 52);
    next = from_bits(bits_of(base) | 1);
    end = sum > 0 ? 2 * base : 0x1p-1000;
  }
  // A value below this, as the exponential's argument, adds less than u / 2. It has a margin for the exponential's
  // roundings, and there is none where these are those of subnormal numbers.
  DEV float nothing_below() const {
    const int exponent = (int)(bits_of(base) >> 52) - 1023;
    return exponent < -70 ? -__builtin_inff() : (float)(exponent - 53) * 0.6931472f - 0.01f;
  }
};

// What a run of values makes of the sums `base` (even) and `next` (odd). As long as all stays below `end` these are exact.
struct Run { double even, odd; };

DEV double add(double sum, const Run& run, const Binade& b) {
  return sum + (bits_of(sum) & 1 ? run.odd - b.next : run.even - b.base);
}
DEV Run wave_run(Run mine, const Binade& b) {
  for (int o = 1; o < WAVE; o *= 2) {
    const Run other{shfl_xor(mine.even, o), shfl_xor(mine.odd, o)};
    const bool upper = LANE & o;
    const Run first{upper ? other.even : mine.even, upper ? other.odd : mine.odd};
    const Run second{upper ? mine.even : other.even, upper ? mine.odd : other.odd};
    mine = Run{add(first.even, second, b), add(first.odd, second, b)};
  }
  return mine;
}

// The C library's expf for arguments up to 0, by the steps of `src/sampler/exp.rs`. NaN stays NaN.
struct Exponential {
  const u64* powers;                                       // 2^(i / 32), less i << 47
  float temperature, max;
  DEV float argument(float logit) const { return add_rn(div_rn(logit, temperature), -max); }
  DEV float operator()(float argument) const {
    const double magic = 0x1.8p52, log2_e_32 = 0x1.71547652b82fep5;
    const double x = argument < -104.5f ? -104.5f : argument;
    const double rounded = fma_rn(x, log2_e_32, magic);
    const double r = fma_rn(x, log2_e_32, magic - rounded);
    const u64 k = bits_of(rounded);
    const double high = fma_rn(0x1.c6af84b912394p-20, r, 0x1.ebfce50fac4f3p-13);
    const double low = fma_rn(0x1.62e42ff0c52d6p-6, r, 1.0);
    return (float)(fma_rn(high, r * r, low) * from_bits(powers[k % 32] + (k << 47)));
  }
};

KERNEL(summarize, SummarizeArgs, THREADS, 2, 4) {
  SHARED u64 powers[32];
  SHARED Run runs[2][WAVES];
  SHARED float alone[WAVE * EACH];                         // values of the wave in which the sum leaves its binade
  SHARED double carried;
  SHARED u64 keys[SUMMARY_KEYS];
  SHARED int found;
  let_successor_start();
  after_predecessor();
  if (BID >= a.step.header->logits_rows) return;
  if (TID < 32) powers[TID] = a.powers[TID];
  if (TID == 0) found = 0;
  barrier();
  Summary* out = (a.step.header->parity ? a.host[1] : a.host[0]) + BID;
  const float* logits = a.logits + (i64)BID * a.vocab;
  const int slot = a.step.logits[BID].slot, n = a.vocab;
  const float temperature = a.step.header->temperature;
  const float max = slot < 0 ? __builtin_nanf("") : div_rn(logits[a.step.last_tokens[slot]], temperature);
  const Exponential exponential{powers, temperature, max};

  double sum = max - max == 0 ? 0 : __builtin_nan("");
  int turn = 0;
  for (int first = 0; first < n && sum == sum; first += TILE) {
    const int mine = first + TID * EACH;
    float v[EACH];
    load8<FORMAT_F32>(logits, mine, n - mine, v);
    const float nothing_below = Binade(sum).nothing_below();
    bool something = false;
    UNROLL for (int i = 0; i < EACH; i++) {
      v[i] = mine + i < n ? exponential.argument(v[i]) : -__builtin_inff();
      something |= !(v[i] < nothing_below);
    }
    if (something) UNROLL for (int i = 0; i < EACH; i++) v[i] = exponential(v[i]);
    else UNROLL for (int i = 0; i < EACH; i++) v[i] = 0;

    for (int wave = 0; wave < WAVES && sum == sum;) {      // waves before this one are in the sum
      const Binade b(sum);
      Run run{b.base, b.next};
      UNROLL for (int i = 0; i < EACH; i++) run.even += v[i], run.odd += v[i];
      run = wave_run(run, b);
      if (LANE == 0) runs[turn][TID / WAVE] = run;
      barrier();
      for (; wave < WAVES; wave++) {
        const double after = add(sum, runs[turn][wave], b);
        if (!(after < b.end)) break;                       // NaN, too
        sum = after;
      }
      turn ^= 1;
      if (wave == WAVES) break;
      if (TID / WAVE == wave) UNROLL for (int i = 0; i < EACH; i++) alone[LANE * EACH + i] = v[i];
      barrier();
      if (TID == 0) {
        double by_one = sum;
        for (int i = 0; i < WAVE * EACH; i++) by_one += alone[i];
        carried = by_one;
      }
      barrier();
      sum = carried;
      wave++;
    }
  }

  if (sum == sum) {
    const float floor = (float)(a.share * sum);
    // Logits below the cut have exponentials below the floor: the power of two below it, less what roundings can do.
    const int exponent = (int)(__builtin_bit_cast(u32, floor) >> 23) - 127;
    const double magnitude = max < 0 ? -max : max;
    const float cut = (float)(temperature * (max + exponent * 0.6931472 - 0.02 - 1e-6 * (magnitude + 105)));
    for (int mine = TID * EACH; mine < n; mine += TILE) {
      float v[EACH];
      load8<FORMAT_F32>(logits, mine, n - mine, v);
      for (int i = 0; i < EACH; i++) {
        if (mine + i >= n || !(v[i] >= cut)) continue;
        const float e = exponential(exponential.argument(v[i]));
        if (e < floor) continue;
        const int at = atomic_add(&found, 1);
        if (at < SUMMARY_KEYS) keys[at] = (u64)~__builtin_bit_cast(u32, e) << 32 | (u32)(mine + i);
      }
    }
  }
  barrier();
  const int count = found <= SUMMARY_KEYS ? found : 0;
  for (int i = TID; i < count; i += THREADS) out->keys[i] = keys[i];
  if (TID == 0) {
    out->sum = found <= SUMMARY_KEYS ? sum : __builtin_nan("");
    out->count = count;
  }
  fence_system();
}
