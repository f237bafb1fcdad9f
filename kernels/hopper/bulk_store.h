// Bulk copies from shared to global memory, and what they need of shared memory.
#pragma once
#include "copy.h"

// What the thread has written to shared memory is visible to bulk copies and wgmma.
DEV void async_proxy_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
// The memory at `from` may be written again, and the block may end, after bulk_stores_read() of the same thread.
DEV void bulk_store(void* to, u32 from, u32 bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;"
               ::"l"(to), "r"(from), "r"(bytes) : "memory");
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
DEV void bulk_stores_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
