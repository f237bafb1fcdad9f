// attention_decode: see attention_decode.h.
#include "attention_decode.h"

static_assert((int)ATTENTION_DECODE_THREADS == (int)WAVE, "a wave an item");

template <int FORMAT> DEV void attention_decode(const AttentionArgs& a) {
  alignas(16) SHARED float sums[2 * PARTIAL_FLOATS];
  let_successor_start();
  after_predecessor();
  attention_decode<FORMAT>(a, BID, sums, nullptr);
}

KERNEL(attention_decode_f16, AttentionArgs, ATTENTION_DECODE_THREADS, 1, 3) { attention_decode<FORMAT_F16>(a); }
KERNEL(attention_decode_bf16, AttentionArgs, ATTENTION_DECODE_THREADS, 1, 3) { attention_decode<FORMAT_BF16>(a); }
