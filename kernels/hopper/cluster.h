// Thread block clusters: blocks that run at the same time and reach each other's shared memory.
#pragma once
#include "copy.h"

// KERNEL for clusters of so many blocks; the grid is a multiple of them.
#define CLUSTER_KERNEL(name, Args, threads, blocks, cluster) \
  extern "C" __global__ void __cluster_dims__(cluster, 1, 1) __launch_bounds__(threads, blocks) \
      name(const __grid_constant__ Args a)

// All blocks of the cluster have arrived when cluster_wait() returns. No data goes with it but mbarriers that were
// made before barrier_init_done().
DEV void cluster_arrive() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
DEV void cluster_wait() { asm volatile("barrier.cluster.wait.aligned;" ::: "memory"); }
// All threads of the cluster meet, and see what the others have written to shared memory.
DEV void cluster_barrier() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// What lies at this shared address in another block of the cluster.
DEV u32 address_in(u32 address, int rank) {
  u32 there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
  return there;
}
// Writes four bytes to another block, which its mbarrier counts. Both addresses are of address_in().
DEV void send(u32 to, u32 value, u32 bar) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];"
               ::"r"(to), "r"(value), "r"(bar) : "memory");
}
// Writes to an address of address_in(), or of the block's own; cluster_barrier() shows it to the others.
DEV void send(u32 to, float v) { asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(to), "f"(v) : "memory"); }
DEV void send(u32 to, f32x4 v) {
  asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};"
               ::"r"(to), "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3]) : "memory");
}
// barrier_wait() for what other blocks have sent.
DEV void barrier_wait_cluster(u32 bar, u32 parity) {
  asm volatile(
      "{ .reg .pred done;\n"
      "again: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again; }" ::"r"(bar), "r"(parity) : "memory");
}
