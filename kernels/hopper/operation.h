// The operations (../mma/epilogue.h), and what products on Hopper need of each:
//
//   EARLY         the kernel may find its work before the predecessor ends (PDL): what it reads for that was written
//                 before the predecessor's own predecessor ended, and the predecessor lets this kernel start only after
//                 that (gemm.h)
//   early_slabs() slabs whose weights are requested before the predecessor ends where rows are few (lanes.h), of
//                 tiles of so many tokens
//   Schedule      work distribution (schedule.h)
//   OF_EXPERTS    of a single row the kernel finds its work in the router's word (GemmArgs.picks), if there is one
//   OF_ROUTER     it reads that row where the router left it
//   LONG          its epilogue is so long that a tile's widths share its code (SharedIfLong, consumers.h)
//   bias_of_four(), store_four()
//                 what tokens_first.h has in place of bias() and store(): a thread has the rows 4q .. 4q + 3 of a unit
//                 for a token, and n is a multiple of 4
#pragma once
#include "../mma/epilogue.h"
#include "../mma/qkv_store.h"
#include "schedule.h"

template <class Op> struct OnHopper;

// Most operations: the plan has the number of rows, so it is known early.
template <class Op> struct OfPlan : Op {
  enum : bool { EARLY = true, OF_EXPERTS = false, OF_ROUTER = false, LONG = false };
  static constexpr int early_slabs(int) { return 8; }      // more would delay the predecessor's own accesses
  template <int N, int CHUNK> using Schedule = SpreadSchedule<N, CHUNK>;
};

template <> struct OnHopper<Qkv> : OfPlan<Qkv> {
  DEV static f32x4 bias_of_four(const GemmArgs& a, int row) {
    if (a.half == 0) return *(const f32x4*)(a.bias + row);
    const int stored = row / W16::UNIT_ROWS * W16::UNIT_ROWS + LANE % 4 * 2;
    const int first = W16::matrix_row(stored, a.half), second = W16::matrix_row(stored + 1, a.half);
    return f32x4{a.bias[first], a.bias[first + a.half], a.bias[second], a.bias[second + a.half]};
  }
  DEV static void store_four(float* at, const f32x4& v) { *(f32x4*)at = v; }
};
template <> struct OnHopper<QkvStore> : OfPlan<QkvStore> {};

template <> struct OnHopper<AttnOut> : OfPlan<AttnOut> {
  // The stages of a tile of 8 hold fewer than 32: attention's accesses are few. Wider ones were not measured.
  static constexpr int early_slabs(int tokens) { return tokens == 8 ? 32 : OfPlan<AttnOut>::early_slabs(tokens); }
  DEV static f32x4 bias_of_four(const GemmArgs& a, int row) { return *(const f32x4*)(a.bias + row); }
  DEV static void store_four(float* at, const f32x4& v) {
    asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};"
                 ::"l"(at), "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3]) : "memory");
  }
};

// It has to wait for the router.
template <> struct OnHopper<Mlp1> : OfPlan<Mlp1> {
  enum : bool { EARLY = false, OF_EXPERTS = true, OF_ROUTER = true, LONG = true };
};
template <> struct OnHopper<Mlp2> : OfPlan<Mlp2> {
  enum : bool { OF_EXPERTS = true };
};

template <class Op> struct Unembeds : OfPlan<Op> {
  template <int N, int CHUNK> using Schedule = RasterSchedule<N, CHUNK>;
};
template <> struct OnHopper<GreedyLogits> : Unembeds<GreedyLogits> {};
template <> struct OnHopper<Logits> : Unembeds<Logits> {};
