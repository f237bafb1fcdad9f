// attention_decode by cp.async, see ../mma/attention_decode.h: the lanes of a warp fill its ring buffer together.
//
// Budget  A multiprocessor of an A100 draws its share of 2.0 TB/s with some 15 KB in flight, one of an H100 with 20 KB,
//         and one of a 4090 with 6 KB. A warp has one stage, a tile of 16 KB, which is free again as soon as its
//         fragments are in registers: `team` and `many` have four warps, `pair` two.
// Launch  Blocks a multiprocessor: as many as an H100's shared memory holds. Of 100 KB one runs at a time, or two of
//         `pair`. A tile a warp, and behind them two partial sums a warp.
#include "../mma/attention_decode.h"

template <int TILES, int WARPS> struct Ring {
  enum : int { stages = TILES / WARPS, ALL_BYTES = TILES * TILE_BYTES };
  u32 base;

  DEV Ring(Tiles own) : base(shared_address(DYNAMIC_SHARED) + own.first * TILE_BYTES) {}
  // Each stage's copies are a group, also where there are none: wait() counts them.
  DEV void copy_nothing() const { commit_copies(); }
  DEV void copy(const AttentionArgs& a, const Job& job, int page, int number, int stage) const {
    const u8* from = tile_of(a, job, number) + LANE % 8 * 16;
    const int begin = page * KV_PAGE, first = job.first - begin, last = job.last - begin;
    const u32 to = base + stage * TILE_BYTES + LANE % 8 * 16;
#pragma unroll 4                         // all at once take registers that there are not
    for (int row = LANE / 8; row < KV_PAGE; row += WAVE / 8) {
      if (row < first || row > last) continue;
      copy16(to + row * KEY_BYTES, from + row * KEY_BYTES);
      copy16(to + row * KEY_BYTES + HALF_TILE, from + row * KEY_BYTES + HALF_TILE);
    }
    commit_copies();
  }
  DEV void wait(int, u32) const {
    wait_copies<stages - 1>();
    __syncwarp();
  }
};

// SIZE: TEAM, PAIR or MANY.
#define ATTENTION_DECODE(name, format, SIZE, TEAM)                                                 \
  KERNEL(name, AttentionArgs, ATTENTION_DECODE_##SIZE##_THREADS, 2, 1) {                           \
    constexpr int WARPS = ATTENTION_DECODE_##SIZE##_THREADS / WAVE, SUMS = 2 * PARTIAL_FLOATS * 4; \
    constexpr int TILES = (ATTENTION_DECODE_##SIZE##_SHARED_BYTES - WARPS * SUMS) / TILE_BYTES;    \
    attend<Config<format, TILES, WARPS, TEAM, Ring>>(a);                                           \
  }

ATTENTION_DECODE(attention_decode_f16_team, FORMAT_F16, TEAM, 4)
ATTENTION_DECODE(attention_decode_f16_pair, FORMAT_F16, PAIR, 2)
ATTENTION_DECODE(attention_decode_f16_many, FORMAT_F16, MANY, 1)
ATTENTION_DECODE(attention_decode_bf16_team, FORMAT_BF16, TEAM, 4)
ATTENTION_DECODE(attention_decode_bf16_pair, FORMAT_BF16, PAIR, 2)
ATTENTION_DECODE(attention_decode_bf16_many, FORMAT_BF16, MANY, 1)
