// Bulk copies from global to shared memory, and the mbarriers that they report to.
#pragma once
#include "../gpu/early.h"
#include "../mma/registers.h"

// An mbarrier in shared memory: a phase ends when all arrivals and all expected bytes are in.
DEV void barrier_init(u32 bar, int arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(bar), "r"(arrivals));
}
DEV void barrier_init_done() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
DEV void barrier_expect(u32 bar, u32 bytes) {
  asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}
DEV void barrier_arrive_expect(u32 bar, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}
DEV void barrier_arrive(u32 bar) { asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(bar) : "memory"); }
DEV void barrier_wait(u32 bar, u32 parity) {
  asm volatile(
      "{ .reg .pred done;\n"
      "again: mbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n"
      "@!done bra again; }" ::"r"(bar), "r"(parity) : "memory");
}

// A word by which the blocks of a kernel tell another one that runs what they have written: who loads the sum may read
// what the thread's block wrote before a barrier and add_release(), bulk copies after global_proxy_fence(). add() tells
// nothing but its value.
DEV void add_release(u64* word, u64 v) {
  asm volatile("red.release.gpu.global.add.u64 [%0], %1;" ::"l"(word), "l"(v) : "memory");
}
DEV void add(u64* word, u64 v) {
  asm volatile("red.relaxed.gpu.global.add.u64 [%0], %1;" ::"l"(word), "l"(v) : "memory");
}
DEV u64 load_acquire(const u64* word) {
  u64 v;
  asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(v) : "l"(word) : "memory");
  return v;
}
DEV void global_proxy_fence() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

// A consumer's or the producer's position in the ring buffer of stages.
struct Pipe {
  u32 base, full, empty;         // shared addresses: stages, mbarriers
  int stage;
  u32 phase;
};

// L2's eviction policy for the lines of a copy.
DEV u64 evict_first() { u64 p; asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(p)); return p; }
DEV u64 evict_normal() { u64 p; asm("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(p)); return p; }
DEV u64 evict_last() { u64 p; asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(p)); return p; }

// `bytes` is a multiple of 16; both addresses are aligned to 16.
DEV void bulk_copy(u32 to, const void* from, u32 bytes, u32 bar, u64 policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;"
      ::"r"(to), "l"(from), "r"(bytes), "r"(bar), "l"(policy) : "memory");
}
