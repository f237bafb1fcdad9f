// Work distribution: which block computes which tiles, from row counts that only the device knows.
//
// A token tile (up to N consecutive rows of one group, that is one expert) times all units of a weight matrix is cut
// into chunks of at most CHUNK units. Block b takes chunks b, b + GRID, .. (grid-stride). What a chunk is follows in
// closed form from a table of the groups' tiles: no block waits for a work queue, and every warp finds its block's next
// chunk by itself.
#pragma once
#include "catalogue.h"
#include "copy.h"

enum : int { MAX_GROUPS = GEMM_MOST_EXPERTS };

// A chunk: token rows of one group, weight units of its matrix.
struct Chunk { int group, row, rows, unit, units; };

// How the groups' rows are cut into token tiles, and these into chunks. In shared memory, since the products need their
// registers.
struct GroupTable {
  int rows[MAX_GROUPS];
  int offsets[MAX_GROUPS];
  int first_tile[MAX_GROUPS + 1];
  int groups;
  int tiles;
  int units;                     // of a weight matrix
  int chunks, larger_chunks;     // SpreadSchedule's
};

// Fills the table but for the schedule's part. One warp calls it; a barrier of the block follows.
template <int N> DEV void fill_table(GroupTable& table, const GemmArgs& a) {
  int before = 0;
  for (int base = 0; base < a.groups; base += WAVE) {
    const int g = base + LANE;
    const int rows = g < a.groups ? load_fresh(a.rows + g) : 0;
    const int offset = g < a.groups && a.offsets ? load_fresh(a.offsets + g) : 0;
    const int tiles = (rows + N - 1) / N;
    int sum = tiles;                                       // of lanes 0 .. LANE
    for (int o = 1; o < WAVE; o *= 2) { const int v = __shfl_up_sync(~0u, sum, o); if (LANE >= o) sum += v; }
    if (g < a.groups) table.rows[g] = rows, table.offsets[g] = offset, table.first_tile[g + 1] = before + sum;
    before += shfl(sum, WAVE - 1);
  }
  if (LANE == 0) table.first_tile[0] = 0, table.groups = a.groups, table.tiles = before;
}

// Finds a token tile's rows. A group's tiles have equal numbers of rows, rounded up to multiples of 8, since the
// swizzle depends on row % 8; the last one has the rest.
template <int N> DEV void place_tile(const GroupTable& table, int tile, Chunk& c) {
  int low = 0, high = table.groups;                              // first_tile[low] <= tile < first_tile[high]
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (table.first_tile[middle] <= tile) low = middle; else high = middle;
  }
  const int rows = table.rows[low], tiles = (rows + N - 1) / N;
  const int even = ((rows + tiles - 1) / tiles + 7) / 8 * 8, first = (tile - table.first_tile[low]) * even;
  c.group = low;
  c.row = table.offsets[low] + first;
  c.rows = min(even, rows - first);
}

// For weights that fit in L2 or are read once. Every tile has about the same number of chunks, their total is a
// multiple of the grid, chunks of one tile differ by at most one unit, and all larger chunks come before all smaller
// ones. Consecutive blocks have the same token tile.
template <int N, int CHUNK> struct SpreadSchedule {
  const GroupTable& table;
  int position;

  DEV SpreadSchedule(const GroupTable& table) : table(table), position(BID) {}

  DEV static void plan(GroupTable& t) {
    const int least = t.tiles * ((t.units + CHUNK - 1) / CHUNK);
    t.chunks = min((least + GRID - 1) / GRID * GRID, t.tiles * t.units);
    t.larger_chunks = t.tiles ? SpreadSchedule(t).larger_before(t.tiles) : 0;
  }

  // Chunks in the tiles before `tile`, and larger chunks in them. A tile has `least` or `least` + 1 chunks.
  DEV int chunks_before(int tile) const {
    return (int)((unsigned)tile * (unsigned)table.chunks / (unsigned)table.tiles);
  }
  DEV int larger_before(int tile) const {
    const int least = table.chunks / table.tiles, one_more = chunks_before(tile) - tile * least;
    return one_more * (table.units % (least + 1)) + (tile - one_more) * (table.units % least);
  }
  DEV int before(bool larger, int tile) const {
    return larger ? larger_before(tile) : chunks_before(tile) - larger_before(tile);
  }

  DEV bool next(Chunk& c) {
    if (position >= table.chunks) return false;
    const bool larger = position < table.larger_chunks;
    const int rank = larger ? position : position - table.larger_chunks;
    const int total = larger ? table.larger_chunks : table.chunks - table.larger_chunks;
    int tile = min((int)((float)rank * (float)table.tiles / (float)total), table.tiles - 1);
    while (before(larger, tile) > rank) tile--;
    while (before(larger, tile + 1) <= rank) tile++;
    const int parts = chunks_before(tile + 1) - chunks_before(tile), size = table.units / parts;
    const int index = rank - before(larger, tile);
    c.units = larger ? size + 1 : size;
    c.unit = larger ? index * (size + 1) : table.units % parts * (size + 1) + index * size;
    place_tile<N>(table, tile, c);
    position += GRID;
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
  DEV static void plan(GroupTable&) {}
  DEV int row() const { return BID / columns; }

  DEV bool next(Chunk& c) {
    if (tile >= table.tiles) return false;
    place_tile<N>(table, tile, c);
    c.unit = unit;
    c.units = min(CHUNK, table.units - unit);
    unit += rows * CHUNK;
    if (unit >= table.units) unit = row() * CHUNK, tile += columns;
    return true;
  }
  // Whether the last chunk of next() was this block's last one of its token tile.
  DEV bool tile_done() const { return unit == row() * CHUNK; }
};
