// Products of one row: a warp's units of 16 weight rows, past a row in shared memory. A unit's multiplications wait for
// each other, some 33 clocks each, and four are a slab: what a slab takes besides must come between them.
#pragma once
#include "../mma/mxfp4.h"
#include "../mma/w16.h"
#include "../mma/warp.h"
#include "row.h"

// How slabs come from device memory to a stage, and from there to registers. A stage's address is a lane's own: where
// the first piece comes that the lane copies.
template <class Weights> struct Slabs;
template <> struct Slabs<W16> {
  enum : int { BLOCK_BYTES = W16::BLOCK_BYTES, SLAB_BYTES = W16::UNIT_BYTES };
  // Of a unit, in device memory: the next slab, and bytes from one to the next.
  struct From {
    const u8* at;
    u32 slab;
    static DEV From find(const GemmArgs& a, int group, int unit) {
      const u32 slab = a.row_blocks * BLOCK_BYTES;
      return {a.weights + (i64)group * a.k_blocks * slab + (i64)unit * SLAB_BYTES + LANE * 16, slab};
    }
    // SLABS slabs: the first `there`, and zeros.
    template <int SLABS> DEV void copy(u32 stage, int there) const {
      UNROLL for (int i = 0; i < SLABS; i++)
        UNROLL for (int j = 0; j < SLAB_BYTES; j += 512)
          copy16_or_zeros(stage + i * SLAB_BYTES + j, at + i * slab + j, there > i);
    }
    template <int SLABS> DEV void advance() { at += SLABS * slab; }
  };
  u32 a[4][4];
  // Bytes from a lane's address of a stage to what the lane loads.
  static DEV u32 locate(int lane) { return lane % 16 * SLAB * 2 + (lane / 16 ^ lane % 8) * 16 - lane * 16; }
  DEV void load(u32 slab, int) { UNROLL for (int k16 = 0; k16 < 4; k16++) load_matrices(a[k16], slab ^ k16 * 32); }
  DEV void fragment(int k16, u32 (&to)[4]) const { UNROLL for (int i = 0; i < 4; i++) to[i] = a[k16][i]; }
};
template <> struct Slabs<Mxfp4> {
  enum : int { BLOCK_BYTES = Mxfp4::UNIT_BYTES, SLAB_BYTES = Mxfp4::UNIT_BYTES / 4, CODES = 512 };
  struct From {
    const u8 *at, *scales;                                 // codes; a piece of the scales, of slab lane / 2
    u32 slab;
    static DEV From find(const GemmArgs& a, int group, int unit) {
      const u8* block = a.weights + ((i64)group * a.k_blocks * a.row_blocks + unit / 4) * BLOCK_BYTES;
      const u32 slab = a.row_blocks * BLOCK_BYTES;
      return {block + unit % 4 * CODES + LANE * 16,
              block + Mxfp4::SCALES + unit % 4 * 32 + LANE % 2 * 16 + LANE / 2 * slab, slab};
    }
    template <int SLABS> DEV void copy(u32 stage, int there) const {
      UNROLL for (int i = 0; i < SLABS; i++) copy16_or_zeros(stage + i * SLAB_BYTES, at + i * slab, there > i);
      // Two lanes copy a slab's scales, which come behind its codes. Their own addresses are 32 bytes further from slab
      // to slab. In assembly, as with a branch around copy16_or_zeros() a stage takes three instructions more.
      const int lane = LANE, of = lane / 2;
      asm volatile("{ .reg .pred p; setp.lt.s32 p, %0, %4;\n"
                   "@p cp.async.cg.shared.global.L2::128B [%1], [%2], 16, %3; }"
                   ::"r"(lane), "r"(stage + CODES + of * (SLAB_BYTES - 32)), "l"(scales), "r"(there > of ? 16 : 0),
                     "n"(2 * SLABS) : "memory");
    }
    template <int SLABS> DEV void advance() { at += SLABS * slab, scales += SLABS * slab; }
  };
  u32x4 words;
  u32 scales;
  static DEV u32 locate(int) { return 0; }
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
template <class Weights, int SLABS, int STAGES> struct Stream {
  using Of = Slabs<Weights>;
  enum : int { STAGE_BYTES = SLABS * Of::SLAB_BYTES, BYTES = STAGES * STAGE_BYTES };
  static_assert(STAGES >= 3, "a stage is filled again while the next one is multiplied");
  const int lane;
  u32 base, stage;                                         // the next slabs to be multiplied
  typename Of::From from, next;
  int left, next_left;                                     // slabs that are not on their way

  DEV Stream(u32 ring)
      : lane(LANE), base(ring + lane * 16), stage(base), from(), next(), left(0), next_left(0) {}
  // The unit after the one that is being copied.
  DEV void then(const GemmArgs& a, int group, int unit) {
    next = Of::From::find(a, group, unit), next_left = a.k_blocks;
  }
  // When a unit has been copied the next one comes. Without branches, so that what is multiplied meanwhile is not held
  // up.
  DEV void fill(u32 to) {
    const bool over = left <= 0;
    from = over ? next : from, left = over ? next_left : left, next_left = over ? 0 : next_left;
    from.template copy<SLABS>(to, left);
    from.template advance<SLABS>(), left -= SLABS;
  }
  // Fills an empty ring buffer but for the stage before the first one, which multiply() fills.
  DEV void start() {
    u32 to = stage;
    ROLLED for (int i = 0; i < STAGES - 1; i++, to = after(to)) fill(to), commit_copies();
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
      load_matrices(b[1], pieces + 64);
    }
    DEV void multiply(float (&sum)[4]) const {
      UNROLL for (int k16 = 0; k16 < 4; k16++) {
        u32 a[4];
        weights.fragment(k16, a);
        mma<FORMAT_F16>(sum, a, b[k16 / 2][k16 % 2 * 2], b[k16 / 2][k16 % 2 * 2 + 1]);
      }
    }
  };
  // The unit that comes first, times the row at `row`, behind which there are zeros up to a whole stage. While a slab
  // is multiplied the next one is loaded, and a stage is on its way to the one before.
  DEV void multiply(u32 row, int k_blocks, float (&sum)[4]) {
    const u32 at = Of::locate(lane);
    u32 pieces = row + lane / 8 * 16, free = before(stage);
    wait_copies<STAGES - 2>();
    __syncwarp();
    Loaded slab[SLABS];
    slab[0].load(stage + at, pieces, lane);
    const auto multiply_stage = [&](const auto& copy) {
      UNROLL for (int i = 0; i < SLABS; i++) {
        if (i + 1 < SLABS) {
          slab[i + 1].load(stage + at + (i + 1) * Of::SLAB_BYTES, pieces + (i + 1) * ROW_BYTES, lane);
        } else {
          wait_copies<STAGES - 2>();
          __syncwarp();
          free = stage, stage = after(stage);
          pieces += SLABS * ROW_BYTES;
          slab[0].load(stage + at, pieces, lane);          // behind the last slab anything
        }
        if (i == 0) copy(), commit_copies();
        slab[i].multiply(sum);
      }
    };
    // While all that is copied is of one unit, copies take no more than additions to addresses.
    const int stages = (k_blocks + SLABS - 1) / SLABS, plain = min(stages, max(left, 0) / SLABS);
    left -= plain * SLABS;
    ROLLED for (int i = 0; i < plain; i++)
      multiply_stage([&] { from.template copy<SLABS>(free, SLABS), from.template advance<SLABS>(); });
    ROLLED for (int i = plain; i < stages; i++) multiply_stage([&] { fill(free); });
  }
};
// Of the row's warps, and of those that multiply for qkv and for attn_out.
using ExpertStream = Stream<Mxfp4, EXPERT_SLABS, EXPERT_STAGES>;
using QkvStream = Stream<W16, DENSE_SLABS, QKV_STAGES>;
using OutStream = Stream<W16, DENSE_SLABS, OUT_STAGES>;

DEV int units_of(const GemmArgs& a) { return a.row_blocks * 4; }
// The first of a lane's two rows of a unit.
DEV int row_of(int unit) { return unit * 16 + LANE / 4 * 2; }
DEV Place place_of(const Chunk& c, int unit) { return {c, row_of(unit), LANE % 4, {}, nullptr, nullptr}; }
// Whether the lane stores what a unit gives: its four columns are all the row.
DEV bool stores() { return LANE % 4 == 0; }
