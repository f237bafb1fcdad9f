// A warp's units of 16 weight rows in a slab of 64 along K, as they lie in shared memory, and the fragments of
// mma.sync's A operand that come of them.
#pragma once
#include "../mma/mxfp4.h"
#include "../mma/w16.h"
#include "../mma/warp.h"

// UNITS: of the warp. locate() says where this lane's parts of a slab begin, load() gets them, fragment() gives the
// fragments of k16 `k16`, of four.
template <class Weights, int FORMAT, int UNITS> struct Units;

template <int FORMAT, int UNITS> struct Units<Mxfp4, FORMAT, UNITS> {
  u32x4 words[UNITS];
  u32 scales[UNITS];
  struct At { u32 words, scales; };

  static DEV At locate(int warp = TID / WAVE) {
    const int unit = warp * UNITS, block = unit / 4 * Mxfp4::UNIT_BYTES;
    return {(u32)(block + unit % 4 * 512 + LANE * 16), (u32)(block + Mxfp4::SCALES + unit % 4 * 32 + LANE / 4 * 4)};
  }
  DEV void load(u32 slab, const At& at) {
    static_assert(4 % UNITS == 0, "of one block");
#pragma unroll
    for (int m = 0; m < UNITS; m++) {
      asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(words[m][0]), "=r"(words[m][1]), "=r"(words[m][2]), "=r"(words[m][3])
                   : "r"(slab + at.words + m * 512));
      asm volatile("ld.shared.u32 %0, [%1];" : "=r"(scales[m]) : "r"(slab + at.scales + m * 32));
    }
  }
  DEV void fragment(int k16, u32 (&a)[UNITS][4]) const {
#pragma unroll
    for (int m = 0; m < UNITS; m++)
      decode8<FORMAT>(words[m][k16], Fp4<FORMAT>::scales(scales[m], k16 / 2), a[m]);
  }
};

template <int FORMAT, int UNITS> struct Units<W16, FORMAT, UNITS> {
  u32 from;
  struct At { u32 row; };

  static DEV At locate(int warp = TID / WAVE) {
    return {(u32)(warp * UNITS * W16::UNIT_BYTES + LANE % 16 * SLAB * 2 + (LANE / 16 ^ LANE % 8) * 16)};
  }
  DEV void load(u32 slab, const At& at) { from = slab + at.row; }
  DEV void fragment(int k16, u32 (&a)[UNITS][4]) const {
#pragma unroll
    for (int m = 0; m < UNITS; m++) load_matrices(a[m], (from ^ k16 * 32) + m * W16::UNIT_BYTES);
  }
};
