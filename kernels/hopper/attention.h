// Bulk copies of tiles of the KV cache.
#pragma once
#include "../mma/attention.h"
#include "copy.h"

// Starts the bulk copy of a tile's positions first .. last, K and V; it reports to `barrier` (an mbarrier).
DEV void copy_tile(u32 to, const u8* from, int first, int last, u32 barrier, u64 policy) {
  const u32 bytes = (last - first + 1) * ROW_BYTES, skip = first * ROW_BYTES;
  barrier_arrive_expect(barrier, 2 * bytes);
  if (bytes == HALF_TILE) {
    bulk_copy(to, from, TILE_BYTES, barrier, policy);
  } else {
    bulk_copy(to + skip, from + skip, bytes, barrier, policy);
    bulk_copy(to + HALF_TILE + skip, from + HALF_TILE + skip, bytes, barrier, policy);
  }
}
