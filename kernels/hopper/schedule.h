// Work distribution: which block computes which tiles, from row counts that only the device knows.
//
// A token tile (up to N consecutive rows of one group, that is one expert) times all units of a weight matrix is cut
// into chunks of at most CHUNK units, of which each block takes one a round. What a chunk is follows in closed form
// from a table of the groups' tiles: no block waits for a work queue.
#pragma once
#include "catalogue.h"
#include "../mma/epilogue.h"
#include "copy.h"

enum : int { MAX_GROUPS = GEMM_MOST_EXPERTS };

// How the groups' rows are cut into token tiles, and these into chunks. In shared memory, since the products need their
// registers. Groups are in order of their tiles' width, the widest first.
struct GroupTable {
  int rows[MAX_GROUPS];
  int offsets[MAX_GROUPS];
  int group[MAX_GROUPS];
  int first_tile[MAX_GROUPS + 1];
  int groups;
  int tiles;
  int units;                     // of a weight matrix
  // SpreadSchedule's: the first `more` tiles have parts[0] chunks each, the others parts[1], which is one fewer. Of a
  // tile's chunks the first extra[] have size[] + 1 units, the others size[].
  int more, parts[2], size[2], extra[2];
  int chunks, larger_chunks;
  int further[2];                // from a position of this block to its next in even and odd rounds, see `doubled`
};

// Widths of a tile, all multiples of 8 up to 256: bit w is set if it has that of 8 (w + 1) tokens.
HOST_DEV constexpr int widths_below(u32 widths, int tokens) {  // how many do not hold so many tokens
  int below = 0;
  for (int w = 0; 8 * (w + 1) < tokens; w++) below += widths >> w & 1;
  return below;
}
HOST_DEV constexpr int width_of(u32 widths, int tokens) {  // the least that does, if there is one
  int w = (tokens + 7) / 8;
  while (w < 32 && !(widths >> (w - 1) & 1)) w++;
  return 8 * w;
}

enum : int { RUN = (MAX_GROUPS + WAVE - 1) / WAVE };       // of groups, a lane

// Fills the table but for the schedule's part, where all tiles have the same width: a lane has a run of groups. One
// warp calls it.
template <int N> DEV void fill_table(GroupTable& table, const GemmArgs& a) {
  const int run = (a.groups + WAVE - 1) / WAVE, first = LANE * run, count = min(run, a.groups - first);
  int rows[RUN], offsets[RUN];
#pragma unroll
  for (int i = 0; i < RUN; i++)
    if (i < count) {
      rows[i] = load_fresh(a.rows + first + i);
      offsets[i] = a.offsets ? load_fresh(a.offsets + first + i) : 0;
    }
  int tiles = 0;
#pragma unroll
  for (int i = 0; i < RUN; i++)
    if (i < count) tiles += (rows[i] + N - 1) / N;
  int before = tiles;                                      // of lanes 0 .. LANE
  for (int o = 1; o < WAVE; o *= 2) { const int v = __shfl_up_sync(~0u, before, o); if (LANE >= o) before += v; }
  if (LANE == WAVE - 1) table.groups = a.groups, table.tiles = before, table.first_tile[a.groups] = before;
  before -= tiles;
#pragma unroll
  for (int i = 0; i < RUN; i++) {
    if (i >= count) continue;
    const int g = first + i;
    table.rows[g] = rows[i], table.offsets[g] = offsets[i], table.group[g] = g, table.first_tile[g] = before;
    before += (rows[i] + N - 1) / N;
  }
}

// The same where a tile has several widths.
template <int N, u32 WIDTHS> DEV void fill_table_by_width(GroupTable& table, const GemmArgs& a) {
  enum : int { COUNT = widths_below(WIDTHS, N) + 1 };
  int rows[RUN], offsets[RUN], width[RUN];
#pragma unroll
  for (int i = 0; i < RUN; i++) {
    const int g = i * WAVE + LANE;
    rows[i] = g < a.groups ? load_fresh(a.rows + g) : 0;
    offsets[i] = g < a.groups && a.offsets ? load_fresh(a.offsets + g) : 0;
  }
#pragma unroll
  for (int i = 0; i < RUN; i++) {
    const int tiles = (rows[i] + N - 1) / N, share = tiles > 1 ? quotient(rows[i] + tiles - 1, tiles) : rows[i];
    const u32 narrower = (1u << max(share - 1, 0) / 8) - 1;
    width[i] = i * WAVE + LANE < a.groups ? __popc(WIDTHS & narrower) : -1;
  }
  int place = 0;
  for (int w = COUNT - 1; w >= 0; w--)
#pragma unroll
    for (int i = 0; i < RUN; i++) {
      if (i * WAVE >= a.groups) continue;
      const u32 lanes = __ballot_sync(~0u, width[i] == w);
      if (width[i] == w) {
        const int at = place + __popc(lanes & ((1u << LANE) - 1));
        table.rows[at] = rows[i], table.offsets[at] = offsets[i], table.group[at] = i * WAVE + LANE;
      }
      place += __popc(lanes);
    }
  __syncwarp();
  int before = 0;
  for (int base = 0; base < a.groups; base += WAVE) {
    const int g = base + LANE, tiles = g < a.groups ? (table.rows[g] + N - 1) / N : 0;
    int sum = tiles;                                       // of lanes 0 .. LANE
    for (int o = 1; o < WAVE; o *= 2) { const int v = __shfl_up_sync(~0u, sum, o); if (LANE >= o) sum += v; }
    if (g < a.groups) table.first_tile[g + 1] = before + sum;
    before += shfl(sum, WAVE - 1);
  }
  if (LANE == 0) table.first_tile[0] = 0, table.groups = a.groups, table.tiles = before;
}

// The same of a single row, whose experts (GemmArgs.picks) are still to come: what a block does with them is known.
DEV void fill_table_of_row(GroupTable& table, const GemmArgs& a) {
  if (LANE < a.picked) table.rows[LANE] = 1, table.offsets[LANE] = LANE * GROUP_ALIGN;
  if (LANE <= a.picked) table.first_tile[LANE] = LANE;
  if (LANE == 0) table.groups = table.tiles = a.picked;
}

// Waits for the experts, and enters them. By one warp.
DEV void enter_picks(GroupTable& table, const GemmArgs& a) {
  u64 word;
  do word = load_acquire(a.picks);
  while (word >> 32);
  if (LANE < a.picked) table.group[LANE] = (int)(word >> LANE * 8) & 255;
  if (LANE == 0 && (word & 255) == 255) table.chunks = 0;
  __syncwarp();
}
// The expert of a chunk that was found before.
DEV int picked_group(const GroupTable& table, const Chunk& c) { return table.group[c.row / GROUP_ALIGN]; }

// The group of a tile, as the table numbers it. WARP: a whole warp looks for it.
template <bool WARP> DEV int group_of(const GroupTable& table, int tile) {
  if (WARP) {
    int before = 0;
    for (int g = LANE; g - LANE < table.groups; g += WAVE)
      before += __popc(__ballot_sync(~0u, g < table.groups && table.first_tile[g + 1] <= tile));
    return before;
  }
  int low = 0, high = table.groups;                        // first_tile[low] <= tile < first_tile[high]
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (table.first_tile[middle] <= tile) low = middle; else high = middle;
  }
  return low;
}

// Finds a token tile's rows. A group's tiles have equal numbers of rows, rounded up to multiples of 8, since the
// swizzle depends on row % 8; the last one has the rest.
template <int N, bool WARP> DEV void place_tile(const GroupTable& table, int tile, Chunk& c) {
  const int low = group_of<WARP>(table, tile);
  const int rows = table.rows[low], tiles = (rows + N - 1) / N;
  const int share = tiles == 1 ? rows : quotient(rows + tiles - 1, tiles);
  const int even = (share + 7) / 8 * 8, first = (tile - table.first_tile[low]) * even;
  c.group = table.group[low];
  c.row = table.offsets[low] + first;
  c.rows = min(even, rows - first);
}

// For weights that fit in L2 or are read once. Every tile has about the same number of chunks, their total is a
// multiple of the grid, chunks of one tile differ by at most one unit, and all larger chunks come before all smaller
// ones. Consecutive blocks have the same token tile. As wide tiles come first a round's first chunks take longest, so
// every other round goes through the blocks backwards: all have about the same work.
// A division takes as long as several multiplications of few tokens, so each chunk needs only one.
template <int N, int CHUNK> struct SpreadSchedule {
  const GroupTable& table;
  int doubled;                                               // twice the position, odd in odd rounds

  DEV SpreadSchedule(const GroupTable& table) : table(table), doubled(2 * BID) {}

  // By one warp.
  DEV static void plan(GroupTable& t, int units) {
    const int tiles = t.tiles, least = tiles * ((units + CHUNK - 1) / CHUNK);
    const int chunks = min(quotient(least + GRID - 1, GRID) * GRID, tiles * units);
    const int each = quotient(chunks, max(tiles, 1)), more = chunks - each * tiles;
    const int fewer = LANE % 2, parts = each + 1 - fewer, size = quotient(units, max(parts, 1));
    const int extra = units - size * parts, larger = extra * (fewer ? tiles - more : more);
    const int all_larger = larger + shfl_xor(larger, 1);
    if (LANE < 2) t.parts[fewer] = parts, t.size[fewer] = size, t.extra[fewer] = extra;
    if (LANE == 0) {
      t.units = units, t.chunks = chunks, t.more = more, t.larger_chunks = all_larger;
      t.further[0] = 4 * (GRID - BID) - 1, t.further[1] = 4 * BID + 1;
    }
  }

  template <bool WARP> DEV bool next(Chunk& c) {
    const int position = doubled >> 1;
    if (position >= table.chunks) return false;
    const bool larger = position < table.larger_chunks;
    const auto of_tile = [&](int fewer) {
      return larger ? table.extra[fewer] : table.parts[fewer] - table.extra[fewer];
    };
    const int rank = larger ? position : position - table.larger_chunks, before = table.more * of_tile(0);
    const int fewer = rank >= before, each = of_tile(fewer), from = fewer ? rank - before : rank;
    const int nth = quotient(from, each), index = from - nth * each, size = table.size[fewer];
    c.units = larger ? size + 1 : size;
    c.unit = larger ? index * (size + 1) : table.extra[fewer] * (size + 1) + index * size;
    place_tile<N, WARP>(table, (fewer ? table.more : 0) + nth, c);
    doubled += table.further[doubled & 1];
    return true;
  }
};

// For a matrix far larger than L2 (the unembedding). A block stays with one token tile and walks down the weights;
// neighbouring blocks read the same weights for different token tiles at the same time, so each weight comes from DRAM
// once.
template <int N, int CHUNK> struct RasterSchedule {
  const GroupTable& table;
  int columns, rows;                                       // the grid as a raster: token tiles x runs of weights
  int tile, unit;

  DEV RasterSchedule(const GroupTable& table) : table(table), columns(max(1, min(table.tiles, GRID))) {
    rows = min(GRID / columns, (table.units + CHUNK - 1) / CHUNK);
    tile = row() < rows ? BID % columns : table.tiles;
    unit = row() * CHUNK;
  }
  DEV static void plan(GroupTable& t, int units) {
    if (LANE == 0) t.units = units;
  }
  DEV int row() const { return BID / columns; }

  template <bool WARP> DEV bool next(Chunk& c) {
    if (tile >= table.tiles) return false;
    place_tile<N, WARP>(table, tile, c);
    c.unit = unit;
    c.units = min(CHUNK, table.units - unit);
    unit += rows * CHUNK;
    if (unit >= table.units) unit = row() * CHUNK, tile += columns;
    return true;
  }
  // Whether the last chunk of next() was this block's last one of its token tile.
  DEV bool tile_done() const { return unit == row() * CHUNK; }
};
