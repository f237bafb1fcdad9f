// attention_decode on Hopper, see ../mma/attention_decode.h: bulk copies fill the warps' ring buffers.
//
// Budget  A multiprocessor needs some 64 KB in flight to draw its share of 4.8 TB/s at a latency of 0.8 us. `many` has
//         8 warps with one stage each, which is free again as soon as its fragments are in registers; `few` has 6 warps
//         with two stages each. The host takes `few` below 4 (row, kv head) pairs per multiprocessor. `team` has two
//         teams a block. Where a block has one job at most, its first team has all the tiles, three a warp, and more of
//         its job's bytes are on their way when the predecessor ends; else a warp has one, and with up to two jobs a
//         team the first team's have two. `block`, which takes whole rows, has 8 warps with one stage each, too.
// Launch  One block per multiprocessor, three of `pair`; TILES * (TILE_BYTES + 8) bytes of dynamic shared memory, the 8
//         for an mbarrier, and behind them two partial sums a warp, or what attention_by_blocks.h needs.
#include "attention.h"
#include "attention_by_blocks.h"

template <int TILES, int WARPS> struct Ring {
  enum : int { BARRIERS = TILES * TILE_BYTES, ALL_BYTES = TILES * (TILE_BYTES + 8) };
  int stages;
  u32 base, barriers;
  u64 policy;                            // keys and values are read once

  DEV Ring(Tiles own) : stages(own.stages) {
    const u32 all = shared_address(DYNAMIC_SHARED);
    base = all + own.first * TILE_BYTES, barriers = all + BARRIERS + own.first * 8;
    if (LANE == 0) {
      for (int s = 0; s < stages; s++) barrier_init(barriers + 8 * s, 1);
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
#define ATTENTION_DECODE(name, format, SIZE, TEAM)                                                 \
  KERNEL(name, AttentionArgs, ATTENTION_DECODE_##SIZE##_THREADS, 1, 1) {                           \
    constexpr int WARPS = ATTENTION_DECODE_##SIZE##_THREADS / WAVE, SUMS = 2 * PARTIAL_FLOATS * 4; \
    constexpr int TILE_SHARE = ATTENTION_DECODE_##SIZE##_SHARED_BYTES - WARPS * SUMS;              \
    constexpr int TILES = TILE_SHARE / (TILE_BYTES + 8);                                           \
    attend<Config<format, TILES, WARPS, TEAM, Ring>>(a);                                           \
  }

// `block`: a tile a warp, and what the warps of a block share.
#define ATTENTION_BY_BLOCKS(name, format)                                                           \
  KERNEL(name, AttentionArgs, ATTENTION_DECODE_BLOCK_THREADS, 1, 1) {                               \
    using By = ByBlocks<format, ATTENTION_DECODE_BLOCK_THREADS / WAVE, 16, Ring>;                   \
    static_assert(By::Ring::ALL_BYTES + sizeof(Shared<By>) == ATTENTION_DECODE_BLOCK_SHARED_BYTES); \
    attend_by_blocks<By>(a);                                                                        \
  }

ATTENTION_DECODE(attention_decode_f16_team, FORMAT_F16, TEAM, 4)
ATTENTION_DECODE(attention_decode_f16_pair, FORMAT_F16, PAIR, 2)
ATTENTION_DECODE(attention_decode_f16_few, FORMAT_F16, FEW, 1)
ATTENTION_DECODE(attention_decode_f16_many, FORMAT_F16, MANY, 1)
ATTENTION_BY_BLOCKS(attention_decode_f16_block, FORMAT_F16)
ATTENTION_DECODE(attention_decode_bf16_team, FORMAT_BF16, TEAM, 4)
ATTENTION_DECODE(attention_decode_bf16_pair, FORMAT_BF16, PAIR, 2)
ATTENTION_DECODE(attention_decode_bf16_few, FORMAT_BF16, FEW, 1)
ATTENTION_DECODE(attention_decode_bf16_many, FORMAT_BF16, MANY, 1)
ATTENTION_BY_BLOCKS(attention_decode_bf16_block, FORMAT_BF16)
