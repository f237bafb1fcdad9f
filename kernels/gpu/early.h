// What a kernel may read in its prologue, before after_predecessor(), with programmatic dependent launch (PDL).
//
// Where kernels overlap, on Hopper, upload, embed and the matrix products call let_successor_start() only after their
// own predecessor has ended. So kernels after embed may read the plan in their prologue, and a kernel after a product
// may read what was written before that product's predecessor ended. All of that was written before the kernel started
// on its multiprocessor, whose L1 is empty at that time.
#pragma once
#include "gpu.h"

#if defined(__CUDACC__)
// Loads a value that another kernel wrote, bypassing L1.
DEV int load_fresh(const int* p) {
  int v;
  asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
// Prefetches 128 bytes into the L2.
DEV void prefetch_l2(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }
#else
// AMD's kernels do not overlap, and the SIMT machine runs them one after the other.
DEV int load_fresh(const int* p) { return *p; }
DEV void prefetch_l2(const void*) {}
#endif
