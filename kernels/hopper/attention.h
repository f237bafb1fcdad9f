// Bulk copies of tiles of the KV cache, and ring buffers that several warps read.
#pragma once
#include "../mma/attention.h"
#include "copy.h"

// Starts the bulk copy of a tile's positions first .. last, K and V; it reports to `barrier` (an mbarrier).
DEV void copy_tile(u32 to, const u8* from, int first, int last, u32 barrier, u64 policy) {
  const u32 bytes = (last - first + 1) * KEY_BYTES, skip = first * KEY_BYTES;
  barrier_arrive_expect(barrier, 2 * bytes);
  if (bytes == HALF_TILE) {
    bulk_copy(to, from, TILE_BYTES, barrier, policy);
  } else {
    bulk_copy(to + skip, from + skip, bytes, barrier, policy);
    bulk_copy(to + HALF_TILE + skip, from + HALF_TILE + skip, bytes, barrier, policy);
  }
}

// A position in a ring buffer of COUNT places, each with two mbarriers, `full` and `empty`.
template <int COUNT> struct RingPlace {
  u32 barriers;
  int place = 0;
  u32 parity = 0;

  DEV u32 full() const { return barriers + 16 * place; }
  DEV u32 empty() const { return barriers + 16 * place + 8; }
  DEV void wait_full() const { barrier_wait(full(), parity); }
  DEV void wait_empty() const { barrier_wait(empty(), parity ^ 1); }
  DEV void release() const { if (LANE == 0) barrier_arrive(empty()); }
  DEV void advance() { if (++place == COUNT) place = 0, parity ^= 1; }
};
