// What a kernel of a step may do before its predecessor has ended, that is before after_predecessor().
//
// upload and embed, and the matrix products, let their successor start only after their own predecessor has ended. So
// what comes behind embed may read the plan before it waits, and what comes behind a product what was written before
// that product's predecessor ended. All that was written before the kernel was launched on its multiprocessor, whose L1
// is empty then.
#pragma once
#include "gpu.h"

#if defined(__CUDACC__)
// A value another kernel wrote, past L1.
DEV int load_fresh(const int* p) {
  int v;
  asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
// Starts to bring the 128 bytes there into the L2.
DEV void prefetch_l2(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }
#else
// Kernels do not overlap here.
DEV int load_fresh(const int* p) { return *p; }
DEV void prefetch_l2(const void*) {}
#endif
