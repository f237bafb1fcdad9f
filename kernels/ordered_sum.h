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
#include "exponential.h"

// Of 128 to 1024 threads with 8 or 16 values each, 256 with 16 were fastest for 890 rows, a quarter faster than 512
// with 8, and for a single row; for 32 to 132 rows they are a tenth slower than the best (benches/record).
enum { THREADS = DRAW_THREADS, WAVES = THREADS / WAVE, EACH = 16, TILE = THREADS * EACH };

// The sums before so many tiles are kept: 64 tiles are 262,144 tokens.
enum { KEPT_TILES = 64 };

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

// Each lane's and those of the lanes before it.
template <class T> DEV Run<T> lanes_runs(Run<T> mine, const Binade<T>& b) {
  ROLLED for (int o = 1; o < WAVE; o *= 2) {
    const int from = (LANE + WAVE - o) % WAVE;
    const Run<T> before{shfl(mine.even, from), shfl(mine.odd, from)};
    const T even = mine.even - b.base, odd = mine.odd - b.next;
    if (LANE < o) continue;
    mine.even = before.even + (bits_of(before.even) & 1 ? odd : even);
    mine.odd = before.odd + (bits_of(before.odd) & 1 ? odd : even);
  }
  return mine;
}

DEV void load_mine(const float* logits, int mine, int n, float* v) {
  UNROLL for (int i = 0; i < EACH; i += 8) if (mine + i < n) load8<FORMAT_F32>(logits, mine + i, n - mine - i, v + i);
}

template <class T> struct Shared {
  Run<T> waves[2][WAVES];
  T sum;                                                   // after the thread in whose values it leaves its binade
  float values[WAVE][EACH];                                // of that thread's wave
  int next, reached;                                       // the thread after it, and what is reached in it
  T before[KEPT_TILES];                                    // the sum before tile t, at t % KEPT_TILES
};

// The sum of `exponential` / `total` of a row's logits, each quotient rounded to float32, in type T and in order of the
// tokens; it ends with the first token that makes it exceed `limit`, whose index becomes `reached`. All threads get the
// same result. Bit t % 64 of `large` is set where a value of this wave in tile t has an argument of at least
// `large_from`. What this thread adds in a tile, but at most `cap`, is added to `capped`.
template <class T>
DEV T sum_in_order(const float* logits, int n, const Exponential& exponential, double total, T limit,
                   Shared<T>& shared, int& reached, float large_from, u64& large, float cap, float& capped) {
  T sum = 0;
  int turn = 0;
  float raw[EACH];
  load_mine(logits, TID * EACH, n, raw);
  for (int first = 0; first < n && reached < 0 && sum == sum; first += TILE) {
    const int mine = first + TID * EACH;
    if (TID == 0) shared.before[first / TILE % KEPT_TILES] = sum;
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
      if (something) {
        const float added = (float)(run.even - b.base);
        capped += from > 0 ? 0 : added < cap ? added : cap;
      }
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
      int wave = from / WAVE;
      for (T next; wave < WAVES - 1 && (next = add(sum, waves[wave], b)) < b.end && next <= limit; wave++) sum = next;
      if (TID / WAVE == wave) {
        UNROLL for (int i = 0; i < EACH; i++) shared.values[LANE][i] = v[i];
        const T mine_after = add(sum, lanes_runs(run, b), b);
        const T mine_before = shfl(mine_after, (LANE + WAVE - 1) % WAVE);
        const bool stays = mine_after < b.end && mine_after <= limit;
        const bool is_first = LANE == 0 || (mine_before < b.end && mine_before <= limit);
        if (is_first && (!stays || LANE == WAVE - 1)) {
          T next = LANE == 0 ? sum : mine_before;
          int at = -1;
          ROLLED for (int i = 0; i < EACH; i++) {
            if (at < 0) next += shared.values[LANE][i];
            if (at < 0 && next > limit) at = mine + i;
          }
          shared.sum = next, shared.next = TID + 1, shared.reached = at;
        }
      }
      barrier();
      sum = shared.sum, from = shared.next, reached = shared.reached;
    }
  }
  return sum;
}
