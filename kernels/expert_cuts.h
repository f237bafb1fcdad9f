// How experts' rows are cut into tiles, and in which order blocks take them: see ExpertCut. Blocks that read the same
// weights stay together, and the last round of blocks is to fill the device.
//
// A device works on `places` blocks at once, a round. Experts with the largest tiles come first, so that what is left
// at the end is small. Some experts at the end have a tile more than they need, so many that all rounds together take
// least. A round takes as long as its first tile, and each tile a step and a quarter more than it has.
//
// Products' sums do not depend on tiles, and cuts depend on nothing but the experts' numbers of rows.
#pragma once
#include "gpu/gpu.h"

enum { CUT_STEP = 16 };                  // rows
DEV int fewest_tiles(int steps, int tile) { return (steps + tile - 1) / tile; }
DEV int one_tile_more(int steps, int tiles) { return tiles < steps ? tiles + 1 : tiles; }

// Experts in order of their largest tiles.
template <int MOST> struct CutOrder {
  int keys[MOST];                        // by expert: larger with larger tiles
  int experts[MOST];
  // By place in the order: the fewest tiles, a tile more, and in their order the steps of the largest tile of each.
  struct Tiles { short fewest, more, largest, smaller; } tiles[MOST];

  // A block of THREADS threads calls it. `tile`: most steps.
  template <int THREADS> DEV void sort(int n, int tile, const int* counts) {
    for (int e = TID; e < n; e += THREADS) {
      const int steps = (counts[e] + CUT_STEP - 1) / CUT_STEP;
      keys[e] = steps ? steps * 256 / fewest_tiles(steps, tile) : 0;
    }
    barrier();
    for (int e = TID; e < n; e += THREADS) {
      const int steps = (counts[e] + CUT_STEP - 1) / CUT_STEP;
      int place = 0;
      for (int i = 0; i < n; i++) place += keys[i] + (i < e) > keys[e];
      const int fewest = fewest_tiles(steps, tile), more = one_tile_more(steps, fewest);
      experts[place] = e;
      tiles[place] = steps ? Tiles{(short)fewest, (short)more, (short)((steps + fewest - 1) / fewest),
                                   (short)((steps + more - 1) / more)}
                           : Tiles{0, 0, 0, 0};
    }
    barrier();
  }
  // A wave calls it. A lane tries a number of experts with a tile more, up to half of those that have rows.
  DEV void cut(int n, int spans, int places, ExpertCut* cuts) const {
    int live = 0;
    for (int i = LANE; i < n; i += WAVE) live += tiles[i].fewest > 0;
    for (int o = 1; o < WAVE; o *= 2) live += shfl_xor(live, o);
    const int stride = live / 2 / WAVE + 1, tried = LANE * stride <= live / 2 ? LANE * stride : 0;
    int cost = 0, blocks = 0, round = 0;
    for (int i = 0; i < live; i++) {
      const Tiles t = tiles[i];
      const bool more = i >= live - tried;
      blocks += (more ? t.more : t.fewest) * spans;
      for (; round < blocks; round += places) cost += 4 * (more ? t.smaller : t.largest) + 5;
    }
    int best = cost * WAVE + LANE;
    for (int o = 1; o < WAVE; o *= 2) {
      const int other = shfl_xor(best, o);
      best = other < best ? other : best;
    }
    const int chosen = best % WAVE * stride;
    for (int i = LANE; i < n; i += WAVE)
      cuts[i] = ExpertCut{experts[i], i < live && i >= live - chosen ? tiles[i].more : tiles[i].fewest};
  }
};
