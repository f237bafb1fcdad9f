// Up to 16 tokens: the time is that of reading the weights. A wave streams the slabs of one row block, DEPTH of them
// in flight, and reads tokens from the caches: no LDS, no barrier. K is not split, so an element's sum is the same as
// in every other tile. Enough bytes are in flight without split-K: DEPTH slabs of 1 KB (MXFP4) or 4 KB for hundreds of
// waves, against 1.6 TB/s times a microsecond.
#pragma once
#include "finish.h"

template <class Weights, int DEPTH> struct Stream {
  typedef typename Weights::Raw Raw;

  int slabs;
  Global weights, tokens;
  u32 slab_bytes;
  typename Weights::Place weight_at;
  u32 token_at[2];
  Raw raw[DEPTH];
  u32v4 pieces[DEPTH][2];
  f32v4 acc[2][1];

  DEV void load_slab(int c, int into) {
    load_weights(c, into);
    load_tokens(c, into);
  }
  DEV void load_weights(int c, int into) {
    c = c < slabs ? c : slabs - 1;
    Global slab = weights + (u32)c * (u32)Weights::SLAB_BYTES;
    SCALAR(slab);
    for (int i = 0; i < Weights::LOADS; i++) Weights::load_part(raw[into], slab, weight_at, i);
  }
  DEV void load_tokens(int c, int into) {
    c = c < slabs ? c : slabs - 1;
    for (int piece = 0; piece < 2; piece++)
      pieces[into][piece] = load_handed<u32v4>(tokens + (u64)(u32)c * slab_bytes, token_at[piece]);
  }
  DEV bool has_tokens(int of) const { return is_there(pieces[of][0]) & is_there(pieces[of][1]); }
  // Slab c's tokens, where they were not there when they were loaded.
  DEV void await(int c, int of) {
    if constexpr (WITHIN_LAUNCH) while (wave_any(!has_tokens(of))) {
      still_wait();
      load_tokens(c, of);
    }
  }
  // The first slabs. Their weights are on the way while tokens that blocks hand on are awaited, all at once.
  DEV void load_first() {
    if constexpr (WITHIN_LAUNCH) {
#pragma unroll
      for (int d = 0; d < DEPTH; d++) load_weights(d, d);
      SCHEDULE_FENCE();
      for (;;) {
        bool all = true;
#pragma unroll
        for (int d = 0; d < DEPTH; d++) load_tokens(d, d);
#pragma unroll
        for (int d = 0; d < DEPTH; d++) all &= has_tokens(d);
        if (!wave_any(!all)) break;
        still_wait();
      }
    } else {
#pragma unroll
      for (int d = 0; d < DEPTH; d++) { load_slab(d, d); SCHEDULE_FENCE(); }
    }
  }
  DEV void multiply(int b) {
    for (int piece = 0; piece < 2; piece++) {
      Operand w;
      for (int r = 0; r < 2; r++) Weights::decode(raw[b], piece, r, w);
      for (int i = 0; i < PIECE_MFMAS; i++) for (int r = 0; r < 2; r++) {
        const u32v4 x = pieces[b][piece];
        f32v4& sum = acc[r][0];
        if constexpr (PIECE_MFMAS == 1)
          sum = mfma_of_piece<Weights::FORMAT>(w.of[r][0], w.of[r][1], u32v2{x[0], x[1]}, u32v2{x[2], x[3]}, sum);
        else sum = mfma<Weights::FORMAT>(w.of[r][i], u32v2{x[2 * i], x[2 * i + 1]}, sum);
      }
    }
  }
  // `row`: of the input, the lane's token; one that exists.
  DEV void run(const GemmArgs& a, const Work& work, const Wave& wave, int row) {
    const int g = LANE / 16;
    slabs = a.k_blocks;
    SCALAR(slabs);   // else the first slabs' addresses move out of a loop that calls run, and take 18 throughout it
    weights = slabs_of<Weights>(a, work, wave);
    tokens = (Global)a.input;
    slab_bytes = (u32)a.in_rows * (SLAB * 2);
    for (int piece = 0; piece < 2; piece++) token_at[piece] = row * (SLAB * 2) + ((g * 2 + piece) ^ (row % 8)) * 16;
    acc[0][0] = acc[1][0] = f32v4{0, 0, 0, 0};
    load_first();
    int c = 0;
    for (; c + DEPTH <= slabs; c += DEPTH) {
      loads_in_flight_for<(DEPTH - 1) * SLAB_MFMAS>();
#pragma unroll
      for (int d = 0; d < DEPTH; d++) {
        await(c + d, d);
        multiply(d);
        SCHEDULE_FENCE();
        load_slab(c + d + DEPTH, d);
        SCHEDULE_FENCE();
      }
    }
#pragma unroll
    for (int d = 0; d < DEPTH - 1; d++) if (c + d < slabs) await(c + d, d), multiply(d);
  }
};
