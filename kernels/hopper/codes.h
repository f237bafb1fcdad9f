// A thread's part of MXFP4 weights (mxfp4.h) in a stage of a product: of M blocks, those of its warpgroup.
#pragma once
#include "copy.h"
#include "../mma/mxfp4.h"

// G: the product (gemm.h).
template <class G, int M> struct Codes {
  u32x4 words[M];
  u32 scales[M];
  DEV void load(u32 codes_at, u32 scales_at) {
#pragma unroll
    for (int m = 0; m < M; m++) {
      const u32 further = m * G::NEXT_BLOCK;
      asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(words[m][0]), "=r"(words[m][1]), "=r"(words[m][2]), "=r"(words[m][3])
                   : "r"(codes_at + further));
      asm volatile("ld.shared.u32 %0, [%1];" : "=r"(scales[m]) : "r"(scales_at + further));
    }
  }
  DEV void decode(int k16, u32 (&fragment)[M][4]) const {
#pragma unroll
    for (int m = 0; m < M; m++)
      decode8<G::ELEMENTS>(words[m][k16], Fp4<G::ELEMENTS>::scales(scales[m], k16 / 2), fragment[m]);
  }
};

// Where they begin in stage 0, opaque to the compiler, which would work it out at every stage.
struct CodesAt {
  u32 codes, scales;
  // From the address of the warpgroup's first block.
  DEV CodesAt(u32 block) : codes(block + TID % 128 * 16), scales(block + Mxfp4::SCALES + TID % 128 / 4 * 4) {
    asm volatile("" : "+r"(codes), "+r"(scales));
  }
};
