// MXFP4 weights in `fast`: a warpgroup decodes its blocks into registers, wgmma's A operand, while it multiplies
// what it decoded before.
#pragma once
#include "codes.h"
#include "instruction.h"
#include "loop.h"

// G: the product (gemm.h). A software pipeline: while wgmma multiplies a group of k16s, the next group is decoded into
// the other fragment buffer.
//
//   IN_FLIGHT 2   decoding begins when the group before is done
//   IN_FLIGHT 1   the compiler spreads decoding over the group's multiplications, for which the next stage's codes have
//                 to be there a stage ahead: stages alternate between two sets of codes, which are registers
template <class G, int K16S, int IN_FLIGHT, int N, int M> struct CodesLoop {
  enum : bool { ONE = IN_FLIGHT == 1 };
  enum : int { GROUPS = 4 / K16S };                        // of a stage
  static_assert(GROUPS % 2 == 0, "the first group of each stage has the first fragment buffer");

  template <class Sums> static DEV void multiply(const GemmArgs& a, Pipe& p, Sums& sum) {
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
      for (int i = 0; i < N / 2; i++) sum[m][i] = 0.f;
    const CodesAt at(G::first_block(p));
    Codes<G, M> sets[2];
    u32 fragment[2][K16S][M][4];
    auto fetch = [&](Codes<G, M>& codes) {
      G::wait_full(p);
      codes.load(at.codes + p.stage * G::STAGE_BYTES, at.scales + p.stage * G::STAGE_BYTES);
    };
    auto decode = [&](const Codes<G, M>& codes, int group) {
#pragma unroll
      for (int s = 0; s < K16S; s++) codes.decode(group * K16S + s, fragment[group % 2][s]);
    };
    fetch(sets[0]);
    decode(sets[0], 0);
    int held = -1;
    // The last stage is peeled (a compile-time flag), so that the loop has no branches: with branches the compiler
    // serializes wgmma.
    auto stage = [&](auto is_last, auto set) {
      constexpr bool LAST = decltype(is_last)::value;
      constexpr int SET = decltype(set)::value;
      Codes<G, M>& codes = sets[SET];
      Codes<G, M>& next = sets[ONE ? 1 - SET : SET];
      const int current = p.stage;
      const u64 tokens = wgmma_descriptor(p.base + current * G::STAGE_BYTES);
      G::advance(p);
      if (ONE && !LAST) fetch(next);
#pragma unroll
      for (int group = 0; group < GROUPS; group++) {
        const bool end = group == GROUPS - 1;
        wgmma_fence();
#pragma unroll
        for (int s = 0; s < K16S; s++)
#pragma unroll
          for (int m = 0; m < M; m++)
            Wgmma<G::ELEMENTS, N>::a16(sum[m], fragment[group % 2][s][m], tokens + 2 * (group * K16S + s), 1);
        wgmma_commit();
        if (!ONE) wgmma_wait<1>();                         // the next group's fragment buffer is free
        if (!ONE && group == 0 && held >= 0) G::release(p, held);
        if (!end) decode(codes, group + 1);
        else if (!LAST) decode(next, 0);
        if (!ONE && !LAST && group == GROUPS - 2) fetch(next);  // this stage's codes are decoded
        if (ONE) wgmma_wait<0>();
        if (ONE && end) G::release(p, current);
      }
      held = current;
    };
    int k = 1;
    if constexpr (ONE) {
      for (; k + 2 <= a.k_blocks; k += 2) stage(Flag<false>(), Count<0>()), stage(Flag<false>(), Count<1>());
      if (k < a.k_blocks) stage(Flag<false>(), Count<0>()), stage(Flag<true>(), Count<1>());
      else stage(Flag<true>(), Count<0>());
    } else {
      for (; k < a.k_blocks; k++) stage(Flag<false>(), Count<0>());
      stage(Flag<true>(), Count<0>());
      wgmma_wait<0>();
      G::release(p, held);
    }
  }
};

template <int K16S, int IN_FLIGHT, bool READ_AGAIN_> struct OfCodes : LoopOfWarpgroups {
  enum : bool { READ_AGAIN = READ_AGAIN_ };
  template <class G, int N, int M> using Of = CodesLoop<G, K16S, IN_FLIGHT, N, M>;
};
