// Copies from global to shared memory that run beside arithmetic (cp.async). A thread commits its copies in groups and
// waits for the oldest ones; what other threads have copied it may read behind a barrier.
#pragma once
#include "registers.h"

// 16 bytes; both addresses are aligned to 16.
DEV void copy16(u32 to, const void* from) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
// The same, or 16 bytes of zeros.
DEV void copy16_or_zeros(u32 to, const void* from, bool there) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;"
               ::"r"(to), "l"(from), "r"(there ? 16 : 0) : "memory");
}
DEV void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most LEFT of the thread's groups are under way.
template <int LEFT> DEV void wait_copies() { asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory"); }

// THREADS threads, of which this is number `thread`, copy `count` pieces of 16 bytes, of at most MOST.
template <int MOST, int THREADS> DEV void copy_pieces(u32 to, const u8* from, int count, int thread = TID) {
#pragma unroll
  for (int first = 0; first < MOST; first += THREADS) {
    const int i = first + thread;
    if (i < count) copy16(to + i * 16, from + i * 16);
  }
}
