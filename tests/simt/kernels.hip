// Kernels for tests/simt.
#include "gpu/gpu.h"

struct TestArgs { float* x; int n; float factor; };

// x[0..n) times a factor.
KERNEL(test_scale, TestArgs, 64, 1, 1) {
  after_predecessor();
  const int i = BID * 64 + TID;
  if (i < a.n) a.x[i] *= a.factor;
}

KERNEL(test_diverge, TestArgs, 64, 1, 1) {
  if (TID == 5) shfl(1, 0);
  else barrier();
}
