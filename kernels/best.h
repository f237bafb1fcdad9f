// The largest of logits, and of equals the lowest index. NaN is never taken.
#pragma once
#include "gpu/gpu.h"

enum : int { NO_INDEX = 0x7fffffff };

struct Best {
  float logit;
  int index;
  static DEV Best none() { return {-__builtin_inff(), NO_INDEX}; }
  DEV void take(float v, int i) { if (v > logit || (v == logit && i < index)) logit = v, index = i; }
};
