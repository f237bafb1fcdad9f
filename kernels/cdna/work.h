// Work distribution: which block computes which tile, found on the device from the groups' (experts') row counts, so
// that nothing waits for the host.
//
// A group's rows are cut into tiles, as evenly as steps of 16 allow: into the fewest of at most TILE rows or as `cuts`
// say, in whose order groups then are (find_work), or into as many as the grid has (spread_work). A block does one tile
// for `waves` row blocks, one per wave. Blocks are numbered over groups, then over row blocks, then over a group's
// tiles: those that read the same weights have neighbouring numbers and run at the same time, so the weights come from
// memory once. Where a device is several dies with an L2 each, they also run on one die: block ids go to the dies in
// turn, and die_order numbers them anew.
#pragma once
#include "mfma.h"

struct Work {
  int group;       // -1: the block has nothing to do
  int first;       // input row the tile starts at
  int count;       // rows of the tile
  int span;        // index of the run of `waves` row blocks
};

enum : int { TOKENS = 16 };   // per MFMA

// The wave's number among so many, a block's or those of several that share a launch's block.
DEV int wave_among(int waves) { return TID / WAVE % waves; }

// The number of block `id` of so many, such that `neighbours` numbers from a multiple of it on are on one die. Blocks
// that fill no round of all dies keep their ids.
HOST_DEV int die_order(int id, int blocks, int neighbours, int dies) {
  const int round = neighbours * dies;
  if (dies == 1 || id >= blocks - blocks % round) return id;
  return id - id % round + id % dies * neighbours + id / dies % neighbours;
}

template <int TILE> DEV int tiles_of(int rows) { return (rows + TILE - 1) / TILE; }

// Exclusive prefix sum over the wave's lanes.
DEV int wave_prefix(int v) {
  int sum = v;
  for (int o = 1; o < WAVE; o *= 2) {
    const int below = shfl(sum, LANE - o < 0 ? LANE : LANE - o);
    if (LANE >= o) sum += below;
  }
  return sum - v;
}

// Number i of the groups, and its tiles. CUTS: there may be cuts.
template <int TILE, bool CUTS> DEV ExpertCut cut_at(const GemmArgs& a, int i) {
  if (i >= a.groups) return ExpertCut{0, 0};
  if (CUTS && a.cuts) return a.cuts[i];
  return ExpertCut{i, tiles_of<TILE>(take(a.rows + i))};
}

// The group that block number `block` belongs to, -1 if there is none; `block` becomes its number within the group.
template <int TILE, bool CUTS> DEV ExpertCut find_group(const GemmArgs& a, int spans, int& block) {
  for (int base = 0; base < a.groups; base += WAVE) {
    const ExpertCut cut = cut_at<TILE, CUTS>(a, base + LANE);
    const int blocks = cut.tiles * spans;
    const int before = wave_prefix(blocks);
    const u64 found = ballot(block >= before && block < before + blocks);
    if (found) {
      const int lane = lowest_of(found);
      block = uniform(block - shfl(before, lane));
      return ExpertCut{uniform(shfl(cut.expert, lane)), uniform(shfl(cut.tiles, lane))};
    }
    block -= uniform(shfl(before + blocks, WAVE - 1));
  }
  return ExpertCut{-1, 0};
}

// The first step of a group's tile. The larger tiles come first, so that the last ones to begin are small.
DEV int first_step(int steps, int tiles, int tile) {
  const int more = steps % tiles;
  return steps / tiles * tile + (tile < more ? tile : more);
}

// Tile number block % tiles of a group, for run number block / tiles of row blocks.
DEV Work cut_rows(const GemmArgs& a, int group, int rows, int tiles, int block) {
  const int tile = block % tiles, steps = (rows + TOKENS - 1) / TOKENS;
  const int from = first_step(steps, tiles, tile) * TOKENS, to = first_step(steps, tiles, tile + 1) * TOKENS;
  const int offset = a.offsets ? uniform(take(a.offsets + group)) : 0;
  return Work{group, offset + from, (to < rows ? to : rows) - from, block / tiles};
}

DEV int spans_of(const GemmArgs& a, int waves) { return (a.row_blocks + waves - 1) / waves; }

// Streams have one tile a group, or rarely two: ids stay. The number of a group's rows may be handed on, that of all
// rows stands in the plan.
template <int TILE, bool CUTS = false> DEV Work find_work(const GemmArgs& a, int waves, int block) {
  const bool ordered = DIES > 1 && TILE > TOKENS;
  const int spans = spans_of(a, waves);
  ExpertCut cut{0, 0};
  if (a.groups > 1) {
    if (ordered) block = die_order(block, GRID, DIE_BLOCKS, DIES);
    cut = find_group<TILE, CUTS>(a, spans, block);
    if (cut.expert < 0) return Work{-1, 0, 0, 0};
  }
  const int rows = uniform(a.groups > 1 ? take(a.rows + cut.expert) : a.rows[0]);
  if (a.groups == 1) {
    cut.tiles = tiles_of<TILE>(rows);
    if (block >= cut.tiles * spans) return Work{-1, 0, 0, 0};
    if (ordered) block = die_order(block, cut.tiles * spans, cut.tiles, DIES);
  }
  return cut_rows(a, cut.expert, rows, cut.tiles, block);
}

// The host knows the most rows alone, and makes the grid for them. Fewer rows make every tile smaller, so that all
// compute units keep their share. Of fewer steps than tiles some tiles get none.
DEV Work spread_work(const GemmArgs& a, int waves) {
  const int rows = uniform(a.rows[0]), tiles = GRID / spans_of(a, waves);
  const Work work = cut_rows(a, 0, rows, tiles, die_order(BID, GRID, tiles, DIES));
  return work.count > 0 ? work : Work{-1, 0, 0, 0};
}
