// summarize: what the host needs to draw from a row of logits without seeing it. Either the sum of the row's exponentials as
// the host's sampler forms it, to the bit, and the tokens that have at least `share` of it, in any order; or, where all
// tokens may be drawn, the token itself. Grid: one block a logits row of the bucket. Rows nobody draws from, and those whose
// numbers are not finite, get NaN for a sum.
//
// The sampler adds e^(x / T - max) in float64 in the order of the tokens, and each addition rounds. Between two powers of
// two, base and 2 base, the sum S is a whole number of units u = 2^-52 base, and S + e rounds to S plus e rounded to units;
// only where e lies half way between two does S matter, by being even or odd. So what any run of values adds is known from
// S's parity alone: a pair of numbers, found by adding the values to `base` and to `base` + u. Two such pairs give that of
// both runs; so threads, waves and then the block sum in parallel what is to be summed in order. The wave in which S leaves
// its binade, which happens a dozen times a row, adds its values one by one. Values below u / 2 add nothing: their
// exponentials are not made. The running sum of float32 probabilities, up to where it exceeds the coin, is found likewise.
#include "gpu/math.h"

enum { THREADS = 512, WAVES = THREADS / WAVE, EACH = 8, TILE = THREADS * EACH };

template <class T> struct Bits;
template <> struct Bits<double> { typedef u64 Word; enum { FRACTION = 52, BIAS = 1023 }; };
template <> struct Bits<float> { typedef u32 Word; enum { FRACTION = 23, BIAS = 127 }; };
template <class T> DEV typename Bits<T>::Word bits_of(T v) { return __builtin_bit_cast(typename Bits<T>::Word, v); }

// The exponent of a number that is not negative.
template <class T> DEV int exponent_of(T v) { return (int)(bits_of(v) >> Bits<T>::FRACTION) - Bits<T>::BIAS; }

// A binade: sums from `base` up to below `end`. A sum of 0 leaves its own with the first value that is not.
template <class T> struct Binade {
  T base, next, end;                                       // next: base + u
  DEV explicit Binade(T sum) {
    typedef typename Bits<T>::Word Word;
    const Word word = bits_of(sum) >> Bits<T>::FRACTION << Bits<T>::FRACTION;
    base = __builtin_bit_cast(T, word);
    next = __builtin_bit_cast(T, word | 1);
    end = sum > 0 ? 2 * base : (T)1e-45;
  }
};

// What a run of values makes of the sums `base` (even) and `next` (odd). As long as all stays below `end` these are exact.
template <class T> struct Run { T even, odd; };

template <class T> DEV T add(T sum, const Run<T>& run, const Binade<T>& b) {
  return sum + (bits_of(sum) & 1 ? run.odd - b.next : run.even - b.base);
}
template <class T> DEV Run<T> wave_run(Run<T> mine, const Binade<T>& b) {
  for (int o = 1; o < WAVE; o *= 2) {
    const Run<T> other{shfl_xor(mine.even, o), shfl_xor(mine.odd, o)};
    const bool upper = LANE & o;
    const Run<T> first{upper ? other.even : mine.even, upper ? other.odd : mine.odd};
    const Run<T> second{upper ? mine.even : other.even, upper ? mine.odd : other.odd};
    mine = Run<T>{add(first.even, second, b), add(first.odd, second, b)};
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
    return (float)(fma_rn(high, r * r, low) * __builtin_bit_cast(double, powers[k % 32] + (k << 47)));
  }
};

template <class T> struct Shared {
  Run<T> runs[2][WAVES];
  float alone[WAVE * EACH];                                // values of the wave that adds them one by one
  T sum;
  int reached;
};

// The sum of `exponential` over `total` of a row's logits, each rounded to float32, in type T and in order; up to the first
// that makes it exceed `limit`, whose index becomes `reached`.
template <class T>
DEV T sum_in_order(const float* logits, int n, const Exponential& exponential, double total, T limit, Shared<T>& shared, int& reached) {
  T sum = 0;
  int turn = 0;
  reached = -1;
  for (int first = 0; first < n && reached < 0 && sum == sum; first += TILE) {
    const int mine = first + TID * EACH;
    float v[EACH];
    load8<FORMAT_F32>(logits, mine, n - mine, v);
    // Arguments below this make values below u / 2. It has a margin for their roundings; where these may be those of subnormal
    // numbers there is no such argument.
    const int half_unit = exponent_of(sum) - Bits<T>::FRACTION - 1;
    const float nothing_below = half_unit < -120 ? -__builtin_inff() : (float)(half_unit + exponent_of(total)) * 0.6931472f - 0.01f;
    bool something = false;
    UNROLL for (int i = 0; i < EACH; i++) {
      v[i] = mine + i < n ? exponential.argument(v[i]) : -__builtin_inff();
      something |= !(v[i] < nothing_below);
    }
    if (something) UNROLL for (int i = 0; i < EACH; i++) v[i] = exponential(v[i]);
    else UNROLL for (int i = 0; i < EACH; i++) v[i] = 0;
    if (something && total != 1) UNROLL for (int i = 0; i < EACH; i++) v[i] = (float)(v[i] / total);

    for (int wave = 0; wave < WAVES && reached < 0 && sum == sum;) {   // waves before this one are in the sum
      const Binade<T> b(sum);
      Run<T> run{b.base, b.next};
      UNROLL for (int i = 0; i < EACH; i++) run.even += v[i], run.odd += v[i];
      run = wave_run(run, b);
      if (LANE == 0) shared.runs[turn][TID / WAVE] = run;
      barrier();
      for (; wave < WAVES; wave++) {
        const T after = add(sum, shared.runs[turn][wave], b);
        if (!(after < b.end) || after > limit) break;      // NaN, too
        sum = after;
      }
      turn ^= 1;
      if (wave == WAVES) break;
      if (TID / WAVE == wave) UNROLL for (int i = 0; i < EACH; i++) shared.alone[LANE * EACH + i] = v[i];
      barrier();
      if (TID == 0) {
        T by_one = sum;
        int i = 0;
        while (i < WAVE * EACH && !((by_one += shared.alone[i]) > limit)) i++;
        shared.sum = by_one;
        shared.reached = i < WAVE * EACH ? first + wave * WAVE * EACH + i : -1;
      }
      barrier();
      sum = shared.sum;
      reached = shared.reached;
      wave++;
    }
  }
  return sum;
}

KERNEL(summarize, SummarizeArgs, THREADS, 2, 4) {
  SHARED u64 powers[32];
  SHARED Shared<double> sums;
  SHARED Shared<float> masses;
  SHARED u64 keys[SUMMARY_KEYS];
  SHARED int found;
  let_successor_start();
  after_predecessor();
  if (BID >= a.step.header->logits_rows) return;
  if (TID < 32) powers[TID] = a.powers[TID];
  if (TID == 0) found = 0;
  barrier();
  const float* logits = a.logits + (i64)BID * a.vocab;
  const int slot = a.step.logits[BID].slot, n = a.vocab;
  const float temperature = a.step.header->temperature;
  const float max = slot < 0 ? __builtin_nanf("") : div_rn(logits[a.step.last_tokens[slot]], temperature);
  const Exponential exponential{powers, temperature, max};
  const bool numbers = max - max == 0;
  int drawn = -1;
  double sum = numbers ? sum_in_order<double>(logits, n, exponential, 1, __builtin_inf(), sums, drawn) : __builtin_nan("");

  if (sum == sum && a.step.header->draws_all) {
    sum_in_order<float>(logits, n, exponential, sum, a.step.logits[BID].coin, masses, drawn);
    if (drawn < 0) drawn = n - 1;
  } else if (sum == sum) {
    const float floor = (float)(a.share * sum);
    // Logits below the cut have exponentials below the floor: the power of two below it, less what roundings can do.
    const double magnitude = max < 0 ? -max : max;
    const float cut = (float)(temperature * (max + exponent_of(floor) * 0.6931472 - 0.02 - 1e-6 * (magnitude + 105)));
    for (int mine = TID * EACH; mine < n; mine += TILE) {
      float v[EACH];
      load8<FORMAT_F32>(logits, mine, n - mine, v);
      for (int i = 0; i < EACH; i++) {
        if (mine + i >= n || !(v[i] >= cut)) continue;
        const float e = exponential(exponential.argument(v[i]));
        if (e < floor) continue;
        const int at = atomic_add(&found, 1);
        if (at < SUMMARY_KEYS) keys[at] = (u64)~bits_of(e) << 32 | (u32)(mine + i);
      }
    }
  }
  barrier();
  Summary* out = (a.step.header->parity ? a.host[1] : a.host[0]) + BID;
  const int count = found <= SUMMARY_KEYS ? found : 0;
  for (int i = TID; i < count; i += THREADS) out->keys[i] = keys[i];
  if (TID == 0) {
    out->sum = found <= SUMMARY_KEYS ? sum : __builtin_nan("");
    out->count = count;
    out->token = drawn;
  }
  fence_system();
}
