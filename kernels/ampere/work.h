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

// The group that block number `block` belongs to, -1 if there is none; `block` becomes its number within the group.
template <int TILE> DEV int find_group(const GemmArgs& a, int spans, int& block) {
  for (int base = 0; base < a.groups; base += WAVE) {
    const int group = base + LANE;
    const int blocks = group < a.groups ? (a.rows[group] + TILE - 1) / TILE * spans : 0;
    const int before = warp_prefix(blocks);
    const u32 found = __ballot_sync(~0u, block >= before && block < before + blocks);
    if (found) {
      const int lane = __ffs(found) - 1;
      block -= shfl(before, lane);
      return base + lane;
    }
    block -= shfl(before + blocks, WAVE - 1);
  }
  return -1;
}

// What this block computes: token rows of a group (none: nothing), and from which unit of 16 weight rows on, of which
// the span has UNITS.
template <int TILE, int UNITS> DEV Chunk find_work(const GemmArgs& a) {
  const int all = a.row_blocks * 4, spans = (all + UNITS - 1) / UNITS;
  int block = BID, group = 0;
  if (a.groups > 1) group = find_group<TILE>(a, spans, block);
  if (group < 0) return Chunk{0, 0, 0, 0, 0};
  const int rows = a.rows[group], tiles = (rows + TILE - 1) / TILE;
  if (block >= tiles * spans) return Chunk{0, 0, 0, 0, 0};
  const int span = quotient(block, tiles), tile = block - span * tiles;
  const int even = (quotient(rows + tiles - 1, tiles) + 7) / 8 * 8, first = tile * even;
  const int offset = a.offsets ? a.offsets[group] : 0, unit = span * UNITS;
  return Chunk{group, offset + first, min(even, rows - first), unit, min((int)UNITS, all - unit)};
}
