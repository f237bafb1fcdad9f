// gather: copies each row's activations to its experts' slots, so that an expert's rows of a slab are contiguous.
//
// A block copies ROWS rows of one slab: eight threads per row, 16 bytes each, read once and written k times, with the
// swizzle of the destination row.
//
// Grid: (rows of the bucket / ROWS, rounded up) * k_blocks.
#include "catalogue.h"
#include "gpu/early.h"
#include "gpu/math.h"

enum { ROWS = GATHER_PER_BLOCK, THREADS = GATHER_THREADS };
static_assert(THREADS == ROWS * 8, "eight threads a row");

KERNEL(gather, GatherArgs, THREADS, 8, 8) {
  let_successor_start();
  const int rows = load_fresh(&a.step.header->rows);
  after_predecessor();
  const int slab = BID % a.k_blocks, row = BID / a.k_blocks * ROWS + TID / 8, k = slab * SLAB + TID % 8 * 8;
  if (row >= rows) return;
  for (int term = 0; term < a.terms; term++) {
    const Piece piece = *(const Piece*)(a.input + term * a.in_term + tiled_index(row, k, a.in_rows));
    for (int i = 0; i < a.k; i++) {
      const int slot = a.slots[(i64)row * a.k + i];
      *(Piece*)(a.out + term * a.out_term + tiled_index(slot, k, a.out_rows)) = piece;
    }
  }
}
