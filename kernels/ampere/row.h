// What the parts of one_launch.h have in common: warps, barriers, and what a block keeps.
#pragma once
#define ONE_LAUNCH
#include "../gpu/gpu.h"

// Read anew each time: else the compiler computes what depends on them for all parts at once, before the first layer,
// and has no registers left for it.
DEV int this_thread() {
  unsigned thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread % 1024;                                    // which is not negative
}
DEV int this_block() {
  unsigned block;
  asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(block));
  return block % 65536;
}
DEV int all_blocks() {
  unsigned blocks;
  asm volatile("mov.u32 %0, %%nctaid.x;" : "=r"(blocks));
  return blocks % 65536;
}
#undef TID
#undef BID
#undef GRID
#define TID this_thread()
#define BID this_block()
#define GRID all_blocks()

#include "../mma/async_copy.h"
#include "../mma/attention_decode.h"
#include "../mma/qkv_store.h"
#include "../norm_route.h"
#include "operands.h"

// Stages are as many as 227 KB of shared memory leave, most for attn_out, whose units have most slabs and whose memory
// would idle soonest: beside them lie 38 KB of rows and of what commands say. The more slabs a stage has, the fewer
// instructions a slab takes, which is what the experts' products wait for.
enum : int {
  ROW_WARPS = NORM_WAVES,                                  // as many as a norm has
  DENSE_WARPS = 4,                                         // which multiply for qkv and attn_out
  THREADS = (ROW_WARPS + DENSE_WARPS) * WAVE,              // 16 warps: each thread may have 128 registers
  TEAM_WARPS = 4,                                          // of a job of attention, one for each 16 of a head's dims
  DENSE_SLABS = 2,                                         // of a stage
  QKV_STAGES = 5,
  OUT_STAGES = 9,
  EXPERT_SLABS = 3,
  EXPERT_STAGES = 4,
  EXPERTS = 4,                                             // at most, of a row
  MOST_N_EXPERTS = 128,
  HIDDEN = NORM_FEW_MOST_HIDDEN,
  WIDE = ONE_LAUNCH_MOST_SLABS * SLAB,                     // at most, of attention's outputs and an expert's units
};

// ---- barriers of warps

enum : int {
  ROW_BARRIER = 1,                                         // the row's warps meet
  NORMED_BARRIER,                                          // the row's tell the dense ones that the row is normed
  OUT_BARRIER,                                             // those that multiply for attn_out meet
  DENSE_BARRIER,                                           // the dense ones tell the row's that they have multiplied
  TEAM_BARRIER,                                            // a job's warps meet
};
DEV void tell(int id, int threads) {
  __syncwarp();
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
DEV void meet_row() { meet(ROW_BARRIER, ROW_WARPS * WAVE); }

// ---- what a block keeps

// What the commands of a layer say.
struct Layer {
  NormArgs norm;
  QkvStoreArgs qkv;
  AttentionArgs attention;
  GemmArgs out;
  struct Router {                                          // as NormRouteArgs begins
    NormArgs norm;
    RouteArgs route;
  } router;
  GemmArgs mlp1, mlp2;
  u16* newest;
  float *out_also, *logits;
};
enum : int { NORM, QKV, ATTENTION, ATTN_OUT, ROUTE, MLP1, MLP2, OF_LAYER };
// That of warps which are a layer behind, theirs who are ahead, and the one that these fetch.
enum : int { LAYERS_KEPT = 3 };

struct Shared {
  alignas(128) u16 t[HIDDEN + SLAB];                       // the normed row, of qkv and then of mlp1
  alignas(128) u16 wide[WIDE + (EXPERT_SLABS - 1) * SLAB]; // attention's outputs, then an expert's gated units
  alignas(16) float x[HIDDEN];                             // the residual row, then the router's normed row
  alignas(16) u16 router[HIDDEN];                          // an expert's weights
  Layer layers[LAYERS_KEPT];
  alignas(16) u16 newest[128];                             // of attention: the row's key and value of one KV head
  float sums[2][NORM_WAVES];
  int picks[EXPERTS];                                      // in order of the experts
  float shares[EXPERTS];
};
static SHARED Shared s;
// Behind the normed row and the gated units are zeros up to a whole stage, behind attention's outputs anything.
static_assert(HIDDEN / SLAB % DENSE_SLABS == 0 && HIDDEN / SLAB % EXPERT_SLABS == 0, "t has the zeros of whole stages");
static_assert(DENSE_SLABS == 2, "the host sees to it that attention's outputs have an even number of slabs");

DEV Layer& layer_of(int i) { return s.layers[i % LAYERS_KEPT]; }
// Threads `thread` of `threads` fetch layer `i`'s.
template <class T> DEV void fetch(T& to, const LayerCommand& from, int thread, int threads) {
  ROLLED for (int i = thread; i < (int)sizeof(T) / 8; i += threads) ((u64*)&to)[i] = from.args[i];
}
DEV void fetch_layer(const LayerCommand* commands, int i, int thread, int threads) {
  const LayerCommand* of = commands + i * OF_LAYER;
  Layer& to = layer_of(i);
  fetch(to.norm, of[NORM], thread, threads), fetch(to.qkv, of[QKV], thread, threads);
  fetch(to.attention, of[ATTENTION], thread, threads), fetch(to.out, of[ATTN_OUT], thread, threads);
  static_assert(__builtin_offsetof(NormRouteArgs, route) == sizeof(NormArgs), "the router's begin with these two");
  fetch(to.router, of[ROUTE], thread, threads);
  fetch(to.mlp1, of[MLP1], thread, threads), fetch(to.mlp2, of[MLP2], thread, threads);
  if (thread == 0) to.newest = of[QKV].newest, to.out_also = of[ATTN_OUT].to, to.logits = of[ROUTE].to;
}

