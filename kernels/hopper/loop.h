// What the frame (gemm.h) has to know of a loop that multiplies. A loop's own struct adds Of<G, N, M>, whose multiply()
// takes a chunk through all of K: of a product G, tokens of width N, and M blocks of 64 weight rows a warpgroup.
//
//   BY_WARPS     each warp multiplies by itself
//   SLABS        of a stage
//   READ_AGAIN   token tiles of a later round read the same weights again, from the L2
//   producer_registers(), consumer_registers()
//                of a thread, where the producer gives some up for so many consumer warpgroups
#pragma once

struct LoopOfWarpgroups {
  enum : bool { BY_WARPS = false, READ_AGAIN = false };
  enum : int { SLABS = 1 };
  static constexpr int producer_registers(int warpgroups) { return warpgroups == 3 ? 32 : 24; }
  static constexpr int consumer_registers(int warpgroups) {
    return warpgroups == 2 ? 240 : warpgroups == 3 ? 160 : 112;
  }
};
struct LoopOfWarps {
  enum : bool { BY_WARPS = true, READ_AGAIN = false };
  static constexpr int producer_registers(int) { return 56; }
  static constexpr int consumer_registers(int) { return 144; }
};
