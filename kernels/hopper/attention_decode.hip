// attention_decode on Hopper, see ../mma/attention_decode.h: bulk copies fill the warps' ring buffers.
//
// Budget  A multiprocessor needs some 64 KB in flight to draw its share of 4.8 TB/s at a latency of 0.8 us. `many` has
//         8 warps with one stage each, which is free again as soon as its fragments are in registers; `few` has 6 warps
//         with two stages each. The host takes `few` below 4 (row, kv head) pairs per multiprocessor. `team` has three
//         stages a warp: of up to 8 rows a block has few jobs, and of the first one's pages more are on their way when
//         the predecessor ends.
// Launch  One block per multiprocessor, three of `pair`; WARPS * STAGES * (TILE_BYTES + 8) bytes of dynamic shared
//         memory, the 8 for an mbarrier, and behind them two partial sums a warp.
#include "../mma/attention_decode.h"
#include "attention.h"

template <int STAGES, int WARPS> struct Ring {
  enum : int { BARRIERS = WARPS * STAGES * TILE_BYTES, ALL_BYTES = WARPS * STAGES * (TILE_BYTES + 8) };
  u32 base, barriers;
  u64 policy;                            // keys and values are read once

  DEV Ring(int warp) {
    const u32 all = shared_address(DYNAMIC_SHARED);
    base = all + warp * STAGES * TILE_BYTES, barriers = all + BARRIERS + warp * STAGES * 8;
    if (LANE == 0) {
      for (int s = 0; s < STAGES; s++) barrier_init(barriers + 8 * s, 1);
      barrier_init_done();
    }
    __syncwarp();
    policy = evict_first();
  }
  DEV void copy_nothing() const {}
  DEV void copy(const AttentionArgs& a, const Job& job, int page, int number, int stage) const {
    if (LANE != 0) return;
    const u8* from = tile_of(a, job, number);
    const int begin = page * KV_PAGE;
    copy_tile(base + stage * TILE_BYTES, from, max(job.first - begin, 0), min(job.last - begin, KV_PAGE - 1),
              barriers + 8 * stage, policy);
  }
  DEV void wait(int stage, u32 parity) const { barrier_wait(barriers + 8 * stage, parity); }
};

// SIZE: TEAM, PAIR, FEW or MANY.
#define ATTENTION_DECODE(name, format, SIZE, TOGETHER)                                             \
  KERNEL(name, AttentionArgs, ATTENTION_DECODE_##SIZE##_THREADS, 1, 1) {                           \
    constexpr int WARPS = ATTENTION_DECODE_##SIZE##_THREADS / WAVE, SUMS = 2 * PARTIAL_FLOATS * 4; \
    constexpr int WARP_BYTES = ATTENTION_DECODE_##SIZE##_SHARED_BYTES / WARPS;                     \
    constexpr int STAGES = (WARP_BYTES - SUMS) / (TILE_BYTES + 8);                                 \
    attend<Config<format, STAGES, WARPS, TOGETHER, Ring>>(a);                                            \
  }

ATTENTION_DECODE(attention_decode_f16_team, FORMAT_F16, TEAM, true)
ATTENTION_DECODE(attention_decode_f16_pair, FORMAT_F16, PAIR, true)
ATTENTION_DECODE(attention_decode_f16_few, FORMAT_F16, FEW, false)
ATTENTION_DECODE(attention_decode_f16_many, FORMAT_F16, MANY, false)
ATTENTION_DECODE(attention_decode_bf16_team, FORMAT_BF16, TEAM, true)
ATTENTION_DECODE(attention_decode_bf16_pair, FORMAT_BF16, PAIR, true)
ATTENTION_DECODE(attention_decode_bf16_few, FORMAT_BF16, FEW, false)
ATTENTION_DECODE(attention_decode_bf16_many, FORMAT_BF16, MANY, false)
