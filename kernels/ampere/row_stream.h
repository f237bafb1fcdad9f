// Products of one row: a warp's units of 16 weight rows, past a row in shared memory. A unit's multiplications wait for
// each other, some 33 clocks each, and four are a slab: what a slab takes besides must come between them.
#pragma once
#include "../mma/mxfp4.h"
#include "../mma/w16.h"
#include "../mma/warp.h"
#include "row.h"

// How a lane's part of SLABS slabs lies in a stage, and comes there.
enum : int { SLABS = 2 };
template <class Weights> struct Slabs;
template <> struct Slabs<W16> {
  enum : int { BLOCK_BYTES = W16::BLOCK_BYTES, SLAB_BYTES = W16::UNIT_BYTES };
  struct From {
    const u8* at;
    DEV void advance(u32 slab) { at += slab; }
  };
  static DEV From find(const GemmArgs& a, int group, int unit, int lane) {
    return {a.weights + (i64)group * a.k_blocks * a.row_blocks * BLOCK_BYTES + (i64)unit * SLAB_BYTES + lane * 16};
  }
  // A slab, or zeros.
  static DEV void copy(u32 to, const From& from, bool there, int lane) {
    UNROLL for (int j = 0; j < SLAB_BYTES; j += 512) copy16_or_zeros(to + lane * 16 + j, from.at + j, there);
  }
  u32 a[4][4];
  static DEV u32 locate(int lane) { return lane % 16 * SLAB * 2 + (lane / 16 ^ lane % 8) * 16; }
  DEV void load(u32 slab, int) { UNROLL for (int k16 = 0; k16 < 4; k16++) load_matrices(a[k16], slab ^ k16 * 32); }
  DEV void fragment(int k16, u32 (&to)[4]) const { UNROLL for (int i = 0; i < 4; i++) to[i] = a[k16][i]; }
};
template <> struct Slabs<Mxfp4> {
  enum : int { BLOCK_BYTES = Mxfp4::UNIT_BYTES, SLAB_BYTES = Mxfp4::UNIT_BYTES / 4, CODES = 512 };
  struct From {
    const u8* at;                                          // the codes
    int scales;                                            // from there to a piece of a slab's scales
    DEV void advance(u32 slab) { at += slab; }
  };
  static DEV From find(const GemmArgs& a, int group, int unit, int lane) {
    const u8* block = a.weights + ((i64)group * a.k_blocks * a.row_blocks + unit / 4) * BLOCK_BYTES;
    return {block + unit % 4 * CODES + lane * 16,
            Mxfp4::SCALES + unit % 4 * 32 + lane % 2 * 16 - unit % 4 * CODES - lane * 16};
  }
  // A slab, or zeros; two lanes copy its scales.
  static DEV void copy(u32 to, const From& from, bool there, int lane) {
    copy16_or_zeros(to + lane * 16, from.at, there);
    asm volatile("{ .reg .pred p; setp.lt.s32 p, %0, 2;\n"
                 "@p cp.async.cg.shared.global.L2::128B [%1], [%2], 16, %3; }"
                 ::"r"(lane), "r"(to + CODES + lane * 16), "l"(from.at + from.scales), "r"(there ? 16 : 0) : "memory");
  }
  u32x4 words;
  u32 scales;
  static DEV u32 locate(int lane) { return lane * 16; }
  DEV void load(u32 slab, int lane) {
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3]) : "r"(slab));
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(scales) : "r"(slab + CODES + lane / 4 * 4 - lane * 16));
  }
  DEV void fragment(int k16, u32 (&to)[4]) const {
    decode8<FORMAT_F16>(words[k16], Fp4<FORMAT_F16>::scales(scales, k16 / 2), to);
  }
};

// A warp's ring buffer, through which its units come one after the other.
template <class Weights, int STAGES> struct Stream {
  using Of = Slabs<Weights>;
  enum : int { STAGE_BYTES = SLABS * Of::SLAB_BYTES, BYTES = STAGES * STAGE_BYTES };
  static_assert(SLABS == 2 && STAGES >= 4, "a stage is filled again while the next one is multiplied");
  const int lane;
  u32 base, stage;                                         // the next slabs to be multiplied
  typename Of::From from, next;
  u32 slab, next_slab;                                     // bytes from one to the next
  int left, next_left;                                     // slabs that are not on their way

  DEV Stream(u32 base)
      : lane(LANE), base(base), stage(base), from(), next(), slab(0), next_slab(0), left(0), next_left(0) {}
  // The unit after the one that is being copied.
  DEV void then(const GemmArgs& a, int group, int unit) {
    next = Of::find(a, group, unit, lane), next_left = a.k_blocks, next_slab = a.row_blocks * Of::BLOCK_BYTES;
  }
  // Before a stage is filled: when a unit has been copied the next one comes. Without branches, so that what is
  // multiplied meanwhile is not held up.
  DEV void turn() {
    const bool over = left <= 0;
    from = over ? next : from, slab = over ? next_slab : slab, left = over ? next_left : left;
    next_left = over ? 0 : next_left;
  }
  DEV void copy(u32 to) {
    Of::copy(to, from, left > 0, lane);
    if (left > 0) from.advance(slab);
    left--;
  }
  // Fills an empty ring buffer but for the stage before the first one, which multiply() fills.
  DEV void start() {
    u32 to = stage;
    ROLLED for (int i = 0; i < STAGES - 1; i++, to = after(to)) {
      turn();
      copy(to), copy(to + Of::SLAB_BYTES);
      commit_copies();
    }
  }
  DEV u32 after(u32 stage) const { return stage == base + BYTES - STAGE_BYTES ? base : stage + STAGE_BYTES; }
  DEV u32 before(u32 stage) const { return stage == base ? base + BYTES - STAGE_BYTES : stage - STAGE_BYTES; }

  // A slab and the row's part of it, in registers.
  struct Loaded {
    Of weights;
    u32 b[2][4];
    DEV void load(u32 slab, u32 pieces, int lane) {
      weights.load(slab, lane);
      load_matrices(b[0], pieces);
      load_matrices(b[1], pieces ^ 64);
    }
    DEV void multiply(float (&sum)[4]) const {
      UNROLL for (int k16 = 0; k16 < 4; k16++) {
        u32 a[4];
        weights.fragment(k16, a);
        mma<FORMAT_F16>(sum, a, b[k16 / 2][k16 % 2 * 2], b[k16 / 2][k16 % 2 * 2 + 1]);
      }
    }
  };
  // The unit that comes first, times the row at `row`, behind which there are zeros. While a slab is multiplied the
  // next one is loaded, and one is on its way to the stage before.
  DEV void multiply(u32 row, int k_blocks, float (&sum)[4]) {
    const u32 at = Of::locate(lane);
    u32 pieces = row + lane / 8 * 16, free = before(stage);
    wait_copies<STAGES - 2>();
    __syncwarp();
    Loaded even, odd;
    even.load(stage + at, pieces, lane);
    ROLLED for (int slabs = k_blocks; slabs > 0; slabs -= SLABS, pieces += SLABS * ROW_BYTES) {
      odd.load(stage + at + Of::SLAB_BYTES, pieces + ROW_BYTES, lane);
      turn(), copy(free);
      even.multiply(sum);
      wait_copies<STAGES - 3>();
      __syncwarp();
      copy(free + Of::SLAB_BYTES), commit_copies();
      free = stage, stage = after(stage);
      even.load(stage + at, pieces + SLABS * ROW_BYTES, lane);  // behind the last slab anything
      odd.multiply(sum);
    }
  }
};

DEV int units_of(const GemmArgs& a) { return a.row_blocks * 4; }
// The first of a lane's two rows of a unit.
DEV int row_of(int unit) { return unit * 16 + LANE / 4 * 2; }
DEV Place place_of(const Chunk& c, int unit) { return {c, row_of(unit), LANE % 4, {}, nullptr, nullptr}; }
// Whether the lane stores what a unit gives: its four columns are all the row.
DEV bool stores() { return LANE % 4 == 0; }
