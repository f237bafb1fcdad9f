// What becomes of queries, keys and values before attention reads them.
#pragma once
#include "gpu/gpu.h"

// The page with a row's position, among those of its layer.
DEV int kv_page(const Step& step, const ChunkInfo& chunk, int position, bool windowed) {
  const int page = position / KV_PAGE;
  return step.tables[windowed ? chunk.window + page % chunk.window_pages : chunk.full + page];
}

// Rotates the elements i and i + head_dim / 2 of a head. Rounded as on the CPU: the first product is rounded, the
// second one is fused with the addition.
DEV void rotate(float& x, float& y, float cos, float sin) {
  const float turned = fma_rn(x, cos, -mul_rn(y, sin));
  y = fma_rn(y, cos, mul_rn(x, sin));
  x = turned;
}

// 16-bit attention computes 2^(q k): q is scaled before it is rounded to 16 bits.
DEV float query_scale(int head_dim) { return div_rn(LOG2E, sqrt_rn((float)head_dim)); }
