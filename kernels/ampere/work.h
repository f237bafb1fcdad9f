// Work distribution: which block computes which tile, found on the device from the groups' (experts') row counts.
//
// A group's rows are cut into the fewest tiles of at most TILE rows, as evenly as multiples of 8 allow. A block does
// one tile for one span of weight rows. Block ids run over groups, then over spans, then over a group's tiles: blocks
// that read the same weights have neighbouring ids and run at the same time, so the weights come from memory once.
#pragma once
#include "../mma/epilogue.h"

// Exclusive prefix sum over the warp's lanes.
DEV int warp_prefix(int v) {
  int sum = v;
  for (int o = 1; o < WAVE; o *= 2) {
    const int below = __shfl_up_sync(~0u, sum, o);
    if (LANE >= o) sum += below;
  }
  return sum - v;
}

// A group, and the number of one of its blocks; of no group, no rows.
struct Found { int group, rows, offset, block; };

// The group that block number `block` belongs to. A lane loads what is known of a group, so that nothing is loaded
// again.
template <int TILE> DEV Found find_group(const GemmArgs& a, int spans, int block) {
  for (int base = 0; base < a.groups; base += WAVE) {
    const int group = base + LANE;
    const int rows = group < a.groups ? a.rows[group] : 0, offset = group < a.groups ? a.offsets[group] : 0;
    const int blocks = (rows + TILE - 1) / TILE * spans, before = warp_prefix(blocks);
    const u32 found = __ballot_sync(~0u, block >= before && block < before + blocks);
    if (found) {
      const int lane = __ffs(found) - 1;
      return Found{base + lane, shfl(rows, lane), shfl(offset, lane), block - shfl(before, lane)};
    }
    block -= shfl(before + blocks, WAVE - 1);
  }
  return Found{0, 0, 0, 0};
}

// What this block computes: token rows of a group (none: nothing), and from which unit of 16 weight rows on, of which
// the span has UNITS.
template <int TILE, int UNITS> DEV Chunk find_work(const GemmArgs& a) {
  const int all = a.row_blocks * 4, spans = (all + UNITS - 1) / UNITS;
  const Found found = a.offsets ? find_group<TILE>(a, spans, BID) : Found{0, a.rows[0], 0, BID};
  const int tiles = (found.rows + TILE - 1) / TILE;
  if (found.block >= tiles * spans) return Chunk{0, 0, 0, 0, 0};
  const int span = quotient(found.block, tiles), tile = found.block - span * tiles;
  const int even = (quotient(found.rows + tiles - 1, tiles) + 7) / 8 * 8, first = tile * even, unit = span * UNITS;
  return Chunk{found.group, found.offset + first, min(even, found.rows - first), unit, min((int)UNITS, all - unit)};
}
