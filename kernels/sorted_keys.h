// Tokens sorted by their probabilities, as the sampler's stable sort orders them.
#pragma once
#include "exponential.h"

// Ascending keys are descending probabilities, and ascending tokens of equal probability.
DEV u64 key_of(float probability, int token) { return (u64)~bits_of(probability) << 32 | (u32)token; }
DEV float probability_of(u64 key) { return __builtin_bit_cast(float, ~(u32)(key >> 32)); }
DEV int token_of(u64 key) { return (int)(u32)key; }

// Bitonic sort of n keys by a block of so many threads, which all call it after the keys are written. The array is
// filled up with keys of probability 0 to a multiple of KEYS_AT_ONCE, and to a power of two.
enum { KEYS_AT_ONCE = 8 };
template <int THREADS> DEV void sort_keys(u64* keys, int n) {
  int size = KEYS_AT_ONCE;
  while (size < n) size *= 2;
  for (int i = n + TID; i < size; i += THREADS) keys[i] = key_of(0, 0);
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
