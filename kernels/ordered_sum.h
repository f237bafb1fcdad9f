// The sum of a row's exponentials in the order of its tokens, computed by a block, equal to the bit to the host's
// sequential sum.
//
// The host's sampler adds e^(x / T - max) in float64 in the order of the tokens, and each addition rounds. While the
// sum S stays in one binade, from base to 2 base, it is a whole number of units u = 2^-52 base, and S + e rounds to S
// plus e rounded to units. S matters only where e is half way between two units: ties go to even, so S's parity
// decides. So what a run of values adds depends on S's parity alone: two numbers, found by adding the values to `base`
// (even) and to `base` + u (odd). The pairs of two consecutive runs combine to the pair of both; so threads, waves and
// the block sum in parallel what is to be summed in order. The thread in whose values S leaves its binade, which
// happens a dozen times per row, is found, its values are added one by one, and the threads after it start again in the
// new binade. Values below u / 2 add nothing: their exponentials are not computed. The running sum of float32
// probabilities, up to where it exceeds the random number (`coin`), is found in the same way.
#pragma once
#include "catalogue.h"
#include "gpu/math.h"

// Of 128 to 1024 threads with 8 or 16 values each, 256 with 16 were fastest for 890 rows, a quarter faster than 512
// with 8, and for a single row; for 32 to 132 rows they are a tenth slower than the best (benches/record).
enum { THREADS = DRAW_THREADS, WAVES = THREADS / WAVE, EACH = 16, TILE = THREADS * EACH };

template <class T> struct Bits;
template <> struct Bits<double> { typedef u64 Word; enum { FRACTION = 52, BIAS = 1023 }; };
template <> struct Bits<float> { typedef u32 Word; enum { FRACTION = 23, BIAS = 127 }; };
template <class T> DEV typename Bits<T>::Word bits_of(T v) { return __builtin_bit_cast(typename Bits<T>::Word, v); }

// The exponent of a number that is not negative.
template <class T> DEV int exponent_of(T v) { return (int)(bits_of(v) >> Bits<T>::FRACTION) - Bits<T>::BIAS; }

// A binade: sums from `base` up to, not including, `end`. 0 and the subnormal numbers are one, too.
template <class T> struct Binade {
  T base, next, end;                                       // next: base + u
  DEV explicit Binade(T sum) {
    typedef typename Bits<T>::Word Word;
    const Word word = bits_of(sum) >> Bits<T>::FRACTION << Bits<T>::FRACTION;
    base = __builtin_bit_cast(T, word);
    next = __builtin_bit_cast(T, word | 1);
    end = __builtin_bit_cast(T, word + ((Word)1 << Bits<T>::FRACTION));
  }
};

// What a run of values makes of the sums `base` (even) and `next` (odd). Exact as long as all sums stay below `end`.
template <class T> struct Run { T even, odd; };

template <class T> DEV T add(T sum, const Run<T>& run, const Binade<T>& b) {
  return sum + (bits_of(sum) & 1 ? run.odd - b.next : run.even - b.base);
}
// Combines the runs of N lanes in order; the first lane has the result.
template <int N, class T> DEV Run<T> lanes_run(Run<T> mine, const Binade<T>& b) {
  for (int o = 1; o < N; o *= 2) {
    const int from = (LANE + o) % WAVE;
    const T even = shfl(mine.even, from) - b.base, odd = shfl(mine.odd, from) - b.next;
    mine.even += bits_of(mine.even) & 1 ? odd : even;
    mine.odd += bits_of(mine.odd) & 1 ? odd : even;
  }
  return mine;
}

// The C library's expf for arguments up to 0, by the steps of `src/sampler/exp.rs`. NaN stays NaN.
struct Exponential {
  const u64* powers;                                       // 2^(i / POWERS), less i << 47
  double inverse;                                          // of the temperature
  float max;
  // x / T - max. A quotient of float32 numbers is never nearer than 2^-49 of itself to the midpoint of two float32
  // numbers, and the product with 1 / T has an error of at most 2^-52: so it rounds as the quotient does.
  DEV float argument(float logit) const { return add_rn((float)(logit * inverse), -max); }
  DEV float operator()(float argument) const {
    const double magic = 0x1.8p52, log2_e_32 = 0x1.71547652b82fep5;
    const double x = argument < -104.5f ? -104.5f : argument;
    const double rounded = fma_rn(x, log2_e_32, magic);
    const double r = fma_rn(x, log2_e_32, magic - rounded);
    const u64 k = bits_of(rounded);
    const double high = fma_rn(0x1.c6af84b912394p-20, r, 0x1.ebfce50fac4f3p-13);
    const double low = fma_rn(0x1.62e42ff0c52d6p-6, r, 1.0);
    return (float)(fma_rn(high, r * r, low) * __builtin_bit_cast(double, powers[k % POWERS] + (k << 47)));
  }
};

DEV void load_mine(const float* logits, int mine, int n, float* v) {
  UNROLL for (int i = 0; i < EACH; i += 8) if (mine + i < n) load8<FORMAT_F32>(logits, mine + i, n - mine - i, v + i);
}

template <class T> struct Shared {
  Run<T> waves[2][WAVES];
  Run<T> lanes[WAVE];                                      // of the wave in which the sum leaves its binade,
  float values[WAVE][EACH];                                // and their values
};

// The sum of `exponential` / `total` of a row's logits, each quotient rounded to float32, in type T and in order of the
// tokens; it ends with the first token that makes it exceed `limit`, whose index becomes `reached`. All threads get the
// same result. Bit t % 64 of `large` is set where a value of this wave in tile t has an argument of at least
// `large_from`.
template <class T>
DEV T sum_in_order(const float* logits, int n, const Exponential& exponential, double total, T limit,
                   Shared<T>& shared, int& reached, float large_from, u64& large) {
  T sum = 0;
  int turn = 0;
  float raw[EACH];
  load_mine(logits, TID * EACH, n, raw);
  for (int first = 0; first < n && reached < 0 && sum == sum; first += TILE) {
    const int mine = first + TID * EACH;
    // Arguments below this have exponentials below u / 2. The margin of a hundredth is more than their rounding errors.
    // Below 2^-120 the exponentials may be subnormal, multiples of 2^-149: no bound there.
    const int half_unit = exponent_of(sum) - Bits<T>::FRACTION - 1;
    const float least_argument = (float)(half_unit + exponent_of(total)) * 0.6931472f - 0.01f;
    const float nothing_below = half_unit < -120 ? -__builtin_inff() : least_argument;
    float v[EACH];
    bool something = false, any_large = false;
    UNROLL for (int i = 0; i < EACH; i++) {
      v[i] = mine + i < n ? exponential.argument(raw[i]) : -__builtin_inff();
      something |= !(v[i] < nothing_below);
      any_large |= v[i] >= large_from;
    }
    if (wave_any(any_large)) large |= (u64)1 << first / TILE % 64;
    load_mine(logits, mine + TILE, n, raw);                // in flight while these are summed
    if (something) UNROLL for (int i = 0; i < EACH; i++) v[i] = exponential(v[i]);
    else UNROLL for (int i = 0; i < EACH; i++) v[i] = 0;
    if (something && total != 1) UNROLL for (int i = 0; i < EACH; i++) v[i] = (float)(v[i] / total);

    // the values of threads before `from` are summed
    for (int from = 0; from < THREADS && reached < 0 && sum == sum;) {
      const Binade<T> b(sum);
      Run<T> run{b.base, b.next};
      if (TID >= from) UNROLL for (int i = 0; i < EACH; i++) run.even += v[i], run.odd += v[i];
      const Run<T> wave_run = lanes_run<WAVE>(run, b);
      const Run<T>* waves = shared.waves[turn];
      if (LANE == 0) shared.waves[turn][TID / WAVE] = wave_run;
      turn ^= 1;
      barrier();
      const Run<T> all = lanes_run<WAVES>(waves[LANE % WAVES], b);
      const T after = add(sum, Run<T>{shfl(all.even, 0), shfl(all.odd, 0)}, b);
      if (after < b.end && after <= limit) {
        sum = after;
        break;
      }
      // NaN fails both comparisons, here and below.
      int wave = from / WAVE, lane = 0;
      for (T next; wave < WAVES - 1 && (next = add(sum, waves[wave], b)) < b.end && next <= limit; wave++) sum = next;
      if (TID / WAVE == wave) {
        shared.lanes[LANE] = run;
        UNROLL for (int i = 0; i < EACH; i++) shared.values[LANE][i] = v[i];
      }
      barrier();
      const Run<T>* lanes = shared.lanes;
      for (T next; lane < WAVE - 1 && (next = add(sum, lanes[lane], b)) < b.end && next <= limit; lane++) sum = next;
      from = wave * WAVE + lane;
      for (int i = 0; i < EACH && reached < 0; i++) {
        sum += shared.values[lane][i];
        if (sum > limit) reached = first + from * EACH + i;
      }
      from++;
    }
  }
  return sum;
}
