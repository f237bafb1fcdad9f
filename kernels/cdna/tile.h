// A tile of up to 128 tokens: `WAVES` waves side by side along the weights' rows, 32 rows each, so that no weight is
// decoded twice in a block. Weights go from memory to registers, tokens through LDS, one slab of 64 K at a time.
//
// Tokens of a slab are contiguous in memory and already swizzled (args.h): staging copies 16 bytes per thread
// unchanged. LDS is double-buffered, with one barrier per slab, before the last part's MFMAs; during these the next
// slab's first tokens are read. A slab is processed in parts: its two pieces of K and, with more than 64 tokens, each
// piece in two halves of the tokens, so that only half of the tokens' fragments are in registers. This is a software
// pipeline: while a part's MFMAs run, the next part's tokens are read from LDS and the next piece's weights are
// decoded. Weights are requested two to three slabs ahead.
//
// With several terms (`exact`) a slab's parts are its terms, lowest first. Their float32 sum is a slab's sum; FP16's
// is scaled by 2^-11 before each higher term is added. Slabs are summed in float64 registers, which allows up to 64
// tokens.
//
// Registers per lane at 128 tokens: 64 sums, 32 fragments, 16 in staging, 15 (MXFP4) or 48 (16-bit) raw weights, 16
// decoded.
#pragma once
#include "finish.h"

// Sums of a slab, and of all slabs.
template <int S, int TERMS> struct Sums {
  f32v4 slab[2][S];
  f64v4 total[2][S];
  DEV void clear() {
    for (int r = 0; r < 2; r++) for (int s = 0; s < S; s++)
      slab[r][s] = f32v4{0, 0, 0, 0}, total[r][s] = f64v4{0, 0, 0, 0};
  }
  // Called before the next higher term is added.
  template <int FORMAT> DEV void next_term() {
    const float down = 1.f / (1 << TERM_SHIFT);
    if (FORMAT == FORMAT_F16) for (int r = 0; r < 2; r++) for (int s = 0; s < S; s++) slab[r][s] *= down;
  }
  DEV void end_slab() {
    for (int r = 0; r < 2; r++) for (int s = 0; s < S; s++) for (int i = 0; i < 4; i++) {
      total[r][s][i] += (double)slab[r][s][i];
      slab[r][s][i] = 0;
    }
  }
  DEV const f64v4 (&result() const)[2][S] { return total; }
};
// With one term all sums are float32.
template <int S> struct Sums<S, 1> {
  f32v4 slab[2][S];
  DEV void clear() { for (int r = 0; r < 2; r++) for (int s = 0; s < S; s++) slab[r][s] = f32v4{0, 0, 0, 0}; }
  template <int FORMAT> DEV void next_term() {}
  DEV void end_slab() {}
  DEV const f32v4 (&result() const)[2][S] { return slab; }
};

template <class Weights, int WAVES, int S, int TERMS> struct Tile {
  enum : int {
    THREADS = WAVES * WAVE,
    HALVES = S > 4 ? 2 : 1, PART_S = (S + HALVES - 1) / HALVES, PARTS = TERMS * 2 * HALVES,
    STAGED = (S * TOKENS * 8 + THREADS - 1) / THREADS,   // 16-byte pieces per thread and term
    TERM = STAGED * THREADS, BUFFER = TERMS * TERM,      // pieces in LDS
    // A piece is decoded during the first MFMAs after the last use of the one before, or, where MFMAs leave fewer issue
    // slots, during all of them: a part has one run of 16 rows.
    SPREADS = PIECE_MFMAS == 1 && HALVES == 2, DECODE_PARTS = SPREADS ? 2 : 1,
    DECODE_PART = PARTS - HALVES, STEP_MFMAS = 2 * PIECE_MFMAS,                        // of a piece and 16 tokens
    DECODE_MFMAS = STEP_MFMAS * PART_S * DECODE_PARTS,
    VALU_PER_MFMA = (Weights::DECODE_VALU + DECODE_MFMAS - 1) / DECODE_MFMAS,
    // Weights that are decoded free their registers in the middle of a slab, 16-bit ones only with the slab's last
    // MFMA. Tokens are requested before weights.
    DECODES = Weights::DECODE_VALU > 0, LEAD = DECODES ? 3 : 2, LOAD_PART = HALVES,
  };
  static_assert(TERMS == 1 || HALVES == 1, "float64 sums of more than 64 tokens do not fit");
  typedef typename Weights::Raw Raw;

  int slabs, buffer = 0, next_tokens = 0;
  Global weights, tokens;
  i64 slab_bytes, term_bytes;
  u32v4* lds;
  typename Weights::Place weight_at;
  u32 token_at = TID * 16;
  int fragment_at[2];
  Raw raw[3];
  Operand operand[2];
  u32v4 staged[TERMS][STAGED], fragments[2][PART_S];
  Sums<S, TERMS> sums;

  // A part's term, piece of K, and steps of 16 tokens.
  static DEV constexpr int term_of(int part) { return TERMS - 1 - part / (2 * HALVES); }
  static DEV constexpr int piece_of(int part) { return part / HALVES % 2; }
  static DEV constexpr int step_of(int part, int j) { return part % HALVES * PART_S + j; }

  DEV int clamped(int c) const { return c < slabs ? c : slabs - 1; }
  // Loads the next slab's tokens; after the last slab that one again.
  DEV void load_tokens() {
    for (int term = 0; term < TERMS; term++) for (int j = 0; j < STAGED; j++)
      staged[term][j] = load<u32v4>(tokens + term * term_bytes + j * (THREADS * 16), token_at);
    if (++next_tokens < slabs) tokens += slab_bytes;
  }
  DEV void store_tokens(int to) {
    for (int term = 0; term < TERMS; term++) for (int j = 0; j < STAGED; j++)
      lds[to + term * TERM + j * THREADS + TID] = staged[term][j];
  }
  DEV void load_weights(int c, int into) {
    raw[into] = Weights::load_slab(weights + (u32)clamped(c) * (u32)Weights::SLAB_BYTES, weight_at);
  }
  DEV void read_fragments(int from, int part) {
    for (int j = 0; j < PART_S; j++)
      if (step_of(part, j) < S)
        fragments[part % 2][j] =
            lds[from + term_of(part) * TERM + fragment_at[piece_of(part)] + step_of(part, j) * TOKENS * 8];
  }
  DEV void multiply(int part) {
    const Operand& w = operand[piece_of(part)];
    for (int r = 0; r < 2; r++) for (int i = 0; i < PIECE_MFMAS; i++) for (int j = 0; j < PART_S; j++) {
      const int s = step_of(part, j);
      if (s >= S) continue;
      const u32v4 f = fragments[part % 2][j];
      f32v4& sum = sums.slab[r][s];
      if constexpr (PIECE_MFMAS == 1)
        sum = mfma_of_piece<Weights::FORMAT>(w.of[r][0], w.of[r][1], u32v2{f[0], f[1]}, u32v2{f[2], f[3]}, sum);
      else sum = mfma<Weights::FORMAT>(w.of[r][i], u32v2{f[2 * i], f[2 * i + 1]}, sum);
    }
  }
  // Interleaves decoding with MFMAs: an MFMA occupies several issue slots, all but one of which other instructions may
  // use. Loads from memory stay before the MFMAs: among them the scheduler would reorder them, and then a wait for one
  // would wait for all.
  static DEV void weave(int part) {
    const int first = part % HALVES * PART_S, mfma = STEP_MFMAS * ((first + PART_S < S ? first + PART_S : S) - first);
    const bool decodes = part < DECODE_PARTS || (part >= DECODE_PART && part < DECODE_PART + DECODE_PARTS);
#pragma unroll
    for (int i = 0; i < mfma; i++) {
      SCHEDULE(MFMA, 1);
      if (i < PART_S) SCHEDULE(LDS_READ, 1);
      if (decodes) SCHEDULE(VALU, VALU_PER_MFMA);
    }
  }
  // Decodes a piece from run FIRST on, or that run alone where two parts have one each.
  template <int FIRST> DEV void decode(const Raw& from, int piece) {
    for (int r = FIRST; r < (SPREADS ? FIRST + 1 : 2); r++) Weights::decode(from, piece, r, operand[piece]);
  }
  // Computes a slab. Its weights are in raw[b], its first piece is decoded, its first tokens are in registers.
  DEV void slab(int c, int b) {
    const int other = buffer ^ BUFFER;
#pragma unroll
    for (int part = 0; part < PARTS; part++) {
      const bool last = part == PARTS - 1;
      SCHEDULE_FENCE();
      if (last) barrier();
      if (part == 0) store_tokens(other), load_tokens();
      if (part == LOAD_PART) load_weights(c + LEAD, (b + LEAD) % 3);
      if (DECODES) SCHEDULE_FENCE();   // 16-bit weights leave the MFMAs' slots empty anyway: reads come first
      read_fragments(last ? other : buffer, (part + 1) % PARTS);
      if (!DECODES) SCHEDULE_FENCE();
      if (part > 0 && term_of(part) != term_of(part - 1)) sums.template next_term<Weights::FORMAT>();
      multiply(part);
      if (part == 0) decode<0>(raw[b], 1);
      if (part == DECODE_PART) decode<0>(raw[(b + 1) % 3], 0);
      if (SPREADS && part == 1) decode<1>(raw[b], 1);
      if (SPREADS && part == DECODE_PART + 1) decode<1>(raw[(b + 1) % 3], 0);
      if (DECODES) weave(part);
    }
    SCHEDULE_FENCE();
    sums.end_slab();
    buffer = other;
  }
  DEV void run(const GemmArgs& a, const Work& work, const Wave& wave, u32v4* shared) {
    const int n = LANE % 16, g = LANE / 16;
    slabs = a.k_blocks, lds = shared;
    weights = slabs_of<Weights>(a, work, wave);
    tokens = (Global)a.input + (i64)work.first * (SLAB * 2);
    slab_bytes = (i64)a.in_rows * (SLAB * 2), term_bytes = a.in_term * 2;
    for (int piece = 0; piece < 2; piece++) fragment_at[piece] = n * 8 + ((g * 2 + piece) ^ (n % 8));
    sums.clear();
    // Requests are in the loop's order; else the loop's first wait would be for all of them.
    load_tokens(), load_weights(0, 0);
    SCHEDULE_FENCE();
    for (int c = 1; c < LEAD - 1; c++) load_weights(c, c);
    SCHEDULE_FENCE();
    store_tokens(0), load_tokens();
    SCHEDULE_FENCE();
    load_weights(LEAD - 1, LEAD - 1);
    SCHEDULE_FENCE();
    barrier();
    read_fragments(0, 0);
    for (int r = 0; r < 2; r++) Weights::decode(raw[0], 0, r, operand[0]);
    int c = 0;
    for (; c + 3 <= slabs; c += 3) {
      loads_in_flight_for<TERMS * S * SLAB_MFMAS>();
      slab(c, 0), slab(c + 1, 1), slab(c + 2, 2);
    }
    if (c < slabs) slab(c, 0);
    if (c + 1 < slabs) slab(c + 1, 1);
  }
};
