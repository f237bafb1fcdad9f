// A tile of up to 128 tokens: `WAVES` waves side by side along the weights' rows, 32 rows each, so that no weight is
// decoded twice in a block. Weights go from memory to registers, tokens through LDS, one slab of 64 K at a time.
//
// Tokens of a slab are contiguous in memory and already swizzled (args.h): staging copies 16 bytes per thread
// unchanged. mlp1's tokens (INDEXED) lie apart, as the step's rows: a thread has the place of each of its pieces in a
// slab, where the swizzle is that of the row, and stores them with that of the token. LDS is double-buffered, with one
// barrier per slab, before the last part's MFMAs; during these the next slab's first tokens are read. A slab is
// processed in parts: its two pieces of K, each for at most 96 tokens at a time, so that only so many tokens' fragments
// are in registers. This is a software pipeline: while a part's MFMAs run, the next part's tokens are read from LDS and
// the next piece's weights are decoded. Weights are requested two to three slabs ahead.
//
// While an MFMA runs, the wave has several issue slots for other instructions, and does all else in them. So what
// touches memory or LDS has its place behind one MFMA or another (`beside`), where the scheduler leaves it; it only
// moves arithmetic.
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

template <class Weights, int WAVES, int S, int TERMS, bool INDEXED> struct Tile {
  enum : int {
    THREADS = WAVES * WAVE,
    SPLITS = (S + 5) / 6, PART_S = (S + SPLITS - 1) / SPLITS, PARTS = TERMS * 2 * SPLITS,
    STAGED = (S * TOKENS * 8 + THREADS - 1) / THREADS,   // 16-byte pieces per thread and term
    TERM = STAGED * THREADS, BUFFER = TERMS * TERM,      // pieces in LDS
    // A piece is decoded during the first MFMAs after the last use of the one before, or, where MFMAs leave fewer issue
    // slots, in two parts: each has one run of 16 rows.
    DECODE_PARTS = PIECE_MFMAS == 1 && SPLITS >= 2 ? 2 : 1, DECODE_PART = PARTS - SPLITS,
    // Weights that are decoded free their registers in the middle of a slab, 16-bit ones only with the slab's last
    // MFMA.
    DECODES = Weights::DECODE_VALU > 0, LEAD = DECODES ? 3 : 2,
    // Tokens go from registers to LDS and others from memory to registers between the first and the last part, in parts
    // without decoding where there are enough. Weights are requested in the last part.
    TOKEN_PART = SPLITS > DECODE_PARTS ? DECODE_PARTS : 0,
    TOKEN_END = TERMS == 1 && SPLITS > DECODE_PARTS ? SPLITS : PARTS - 1,
    TOKEN_ITEMS = 2 * TERMS * STAGED + 1,   // a store and a load of each piece, and the step to the next slab
  };
  static_assert(TERMS == 1 || SPLITS == 1, "float64 sums of more than 64 tokens do not fit");
  typedef typename Weights::Raw Raw;

  int slabs, buffer = 0, next_tokens = 0;
  Global weights, tokens, token_base, weight_base;
  i64 slab_bytes, term_bytes;
  u32v4* lds;
  typename Weights::Place weight_at;
  u32 token_at[INDEXED ? STAGED : 1];
  int fragment_at[2];
  Raw raw[3];
  Operand operand[2];
  u32v4 staged[TERMS][STAGED], fragments[2][PART_S];
  Sums<S, TERMS> sums;

  // A part's term, piece of K, steps of 16 tokens, and MFMAs.
  static DEV constexpr int term_of(int part) { return TERMS - 1 - part / (2 * SPLITS); }
  static DEV constexpr int piece_of(int part) { return part / SPLITS % 2; }
  static DEV constexpr int first_step(int split) { return (S * split + SPLITS - 1) / SPLITS; }
  static DEV constexpr int step_of(int part, int j) { return first_step(part % SPLITS) + j; }
  static DEV constexpr int steps_of(int part) { return first_step(part % SPLITS + 1) - first_step(part % SPLITS); }
  static DEV constexpr int mfmas_of(int part) { return 2 * PIECE_MFMAS * steps_of(part); }

  // Reads of the next part's fragments stand behind a part's first MFMAs, one behind each; whatever else a part has is
  // spread over the places behind these: so many of them come before MFMA m.
  static DEV constexpr int reads_in(int part) { return steps_of((part + 1) % PARTS); }
  static DEV constexpr int places_before(int part, int m) {
    const int first = reads_in(part) < mfmas_of(part) ? reads_in(part) : mfmas_of(part) - 1;
    return m > first ? m - first : 0;
  }
  // Of `items` so many stand in the first `places` of all.
  static DEV constexpr int items_before(int items, int places, int all) { return (places * items + all - 1) / all; }
  static DEV constexpr int token_places_before(int part, int m) {
    int places = places_before(part, m);
    for (int p = TOKEN_PART; p < part; p++) places += places_before(p, mfmas_of(p));
    return places;
  }
  static DEV constexpr int token_items_before(int part, int m) {
    if (part < TOKEN_PART || part >= TOKEN_END) return 0;
    const int all = token_places_before(TOKEN_END - 1, mfmas_of(TOKEN_END - 1));
    return items_before(TOKEN_ITEMS, token_places_before(part, m), all);
  }
  // Stores to LDS among them, and in a part.
  static DEV constexpr int stores_among(int items) { return (items < TOKEN_ITEMS - 1 ? items + 1 : items) / 2; }
  static DEV constexpr int stores_in(int part) {
    return stores_among(token_items_before(part, mfmas_of(part))) - stores_among(token_items_before(part, 0));
  }
  static DEV constexpr int loads_before(int m) {
    const int all = places_before(PARTS - 1, mfmas_of(PARTS - 1));
    return items_before(Weights::LOADS, places_before(PARTS - 1, m), all);
  }

  // Beyond the last token that one again.
  DEV void place_tokens(const GemmArgs& a, const Work& work) {
    token_at[0] = TID * 16;
    if (!INDEXED) return;
    int rows[STAGED];
    for (int j = 0; j < STAGED; j++) {
      const int token = (j * THREADS + TID) / 8;
      rows[j] = a.slot_rows[work.first + (token < work.count ? token : work.count - 1)];
    }
    for (int j = 0; j < STAGED; j++) {
      const int token = (j * THREADS + TID) / 8;
      token_at[j] = rows[j] * (SLAB * 2) + (TID % 8 ^ token % 8 ^ rows[j] % 8) * 16;
    }
  }
  DEV int clamped(int c) const { return c < slabs ? c : slabs - 1; }
  // Two pieces share a base: an instruction's own offset reaches one before and one behind it.
  DEV void load_token(int piece) {
    const int term = piece / STAGED, j = piece % STAGED;
    if (INDEXED) {
      VECTOR(token_at[j]);
      staged[term][j] = load<u32v4>(tokens + token_at[j]);
      return;
    }
    if (j % 2 == 0) {
      token_base = tokens + term * term_bytes + (j + 1) * (THREADS * 16);
      SCALAR(token_base);
    }
    VECTOR(token_at[0]);
    staged[term][j] = load<u32v4>(token_base + token_at[0] + (j % 2 - 1) * (THREADS * 16));
  }
  // After the last slab that one again.
  DEV void next_slab() { if (++next_tokens < slabs) tokens += slab_bytes; }
  DEV void load_tokens() {
    for (int piece = 0; piece < TERMS * STAGED; piece++) load_token(piece);
    next_slab();
  }
  DEV void store_token(int to, int piece) { lds[to + piece * THREADS + TID] = staged[piece / STAGED][piece % STAGED]; }
  DEV void store_tokens(int to) { for (int piece = 0; piece < TERMS * STAGED; piece++) store_token(to, piece); }
  DEV void load_weights(int c, int into, int from, int to) {
    if (from == 0 && to > 0) {
      weight_base = weights + (u32)clamped(c) * (u32)Weights::SLAB_BYTES;
      SCALAR(weight_base);
    }
    for (int i = from; i < to; i++) Weights::load_part(raw[into], weight_base, weight_at, i);
  }
  DEV void load_weights(int c, int into) { load_weights(c, into, 0, Weights::LOADS); }
  DEV void read_fragment(int from, int part, int j) {
    fragments[part % 2][j] =
        lds[from + term_of(part) * TERM + fragment_at[piece_of(part)] + step_of(part, j) * TOKENS * 8];
  }
  // What stands behind MFMA number M of a part, beside decoding.
  template <int PART, int M> DEV void beside(int c, int b) {
    constexpr bool LAST = PART == PARTS - 1;
    const int other = buffer ^ BUFFER;
    if (M < reads_in(PART)) read_fragment(LAST ? other : buffer, (PART + 1) % PARTS, M);
    constexpr int TO = token_items_before(PART, M + 1);
    for (int item = token_items_before(PART, M); item < TO; item++) {
      if (item == TOKEN_ITEMS - 1) next_slab();
      else if (item % 2 == 0) store_token(other, item / 2);
      else load_token(item / 2);
    }
    if (LAST) load_weights(c + LEAD, (b + LEAD) % 3, loads_before(M), loads_before(M + 1));
  }
  template <int PART, int M = 0> DEV void multiply(int c, int b) {
    if constexpr (M < mfmas_of(PART)) {
      constexpr int STEPS = steps_of(PART), R = M / STEPS / PIECE_MFMAS, I = M / STEPS % PIECE_MFMAS, J = M % STEPS;
      const Operand& w = operand[piece_of(PART)];
      const u32v4 f = fragments[PART % 2][J];
      f32v4& sum = sums.slab[R][step_of(PART, J)];
      if constexpr (PIECE_MFMAS == 1)
        sum = mfma_of_piece<Weights::FORMAT>(w.of[R][0], w.of[R][1], u32v2{f[0], f[1]}, u32v2{f[2], f[3]}, sum);
      else sum = mfma<Weights::FORMAT>(w.of[R][I], u32v2{f[2 * I], f[2 * I + 1]}, sum);
      beside<PART, M>(c, b);
      SCHEDULE_PIN();
      multiply<PART, M + 1>(c, b);
    }
  }
  // Shares the decoding out to a part's MFMAs. Short parts have more of it than slots, and it begins at once. In longer
  // ones two additions of addresses in LDS are counted, too, and where it does not come out even the last MFMAs have
  // more, as reads stand behind the first.
  template <int PART> static DEV void weave() {
    if (PART >= DECODE_PARTS && (PART < DECODE_PART || PART >= DECODE_PART + DECODE_PARTS)) return;
    constexpr int MFMAS = mfmas_of(PART);
    constexpr bool LONG = MFMAS > (MFMA_SLOTS == 4 ? 8 : 12);
    constexpr int WORK = Weights::DECODE_VALU / DECODE_PARTS + (LONG ? 2 : 0), SHARE = (WORK + MFMAS - 1) / MFMAS;
    constexpr int FEWER = LONG ? SHARE * MFMAS - WORK : 0;
#pragma unroll
    for (int i = 0; i < FEWER; i++) { SCHEDULE(MFMA, 1); SCHEDULE(VALU, SHARE - 1); }
#pragma unroll
    for (int i = FEWER; i < MFMAS; i++) { SCHEDULE(MFMA, 1); SCHEDULE(VALU, SHARE); }
  }
  // Decodes a piece from run FIRST on, or that run alone where two parts have one each.
  template <int FIRST> DEV void decode(const Raw& from, int piece) {
    for (int r = FIRST; r < (DECODE_PARTS == 2 ? FIRST + 1 : 2); r++) Weights::decode(from, piece, r, operand[piece]);
  }
  // Computes a slab. Its weights are in raw[b], its first piece is decoded, its first tokens are in registers.
  DEV void slab(int c, int b) {
    parts<0>(c, b);
    SCHEDULE_FENCE();
    sums.end_slab();
    buffer ^= BUFFER;
  }
  template <int PART> DEV void parts(int c, int b) {
    if constexpr (PART < PARTS) {
      // The part's fragments are there, all by one wait: only stores were queued after their reads.
      SCHEDULE_FENCE();
      wait_for_lds<(PART > 0 ? stores_in(PART - 1) : 0)>();
      if (PART == PARTS - 1) barrier();
      SCHEDULE_FENCE();
      if (PART > 0 && term_of(PART) != term_of(PART - 1)) sums.template next_term<Weights::FORMAT>();
      multiply<PART>(c, b);
      if (PART == 0) decode<0>(raw[b], 1);
      if (PART == DECODE_PART) decode<0>(raw[(b + 1) % 3], 0);
      if (DECODE_PARTS == 2 && PART == 1) decode<1>(raw[b], 1);
      if (DECODE_PARTS == 2 && PART == DECODE_PART + 1) decode<1>(raw[(b + 1) % 3], 0);
      if (DECODES) weave<PART>();
      parts<PART + 1>(c, b);
    }
  }
  DEV void run(const GemmArgs& a, const Work& work, const Wave& wave, u32v4* shared) {
    const int n = LANE % 16, g = LANE / 16;
    slabs = a.k_blocks, lds = shared;
    weights = slabs_of<Weights>(a, work, wave);
    tokens = (Global)a.input + (INDEXED ? 0 : (i64)work.first * (SLAB * 2));
    slab_bytes = (i64)a.in_rows * (SLAB * 2), term_bytes = a.in_term * 2;
    for (int piece = 0; piece < 2; piece++) fragment_at[piece] = n * 8 + ((g * 2 + piece) ^ (n % 8));
    place_tokens(a, work);
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
    for (int j = 0; j < steps_of(0); j++) read_fragment(0, 0, j);
    for (int r = 0; r < 2; r++) Weights::decode(raw[0], 0, r, operand[0]);
    int c = 0;
    for (; c + 3 <= slabs; c += 3) {
      // Tokens are requested a few MFMAs after those before them were stored.
      loads_in_flight_for<TERMS * S * SLAB_MFMAS * 3 / 4>();
      slab(c, 0), slab(c + 1, 1), slab(c + 2, 2);
    }
    if (c < slabs) slab(c, 0);
    if (c + 1 < slabs) slab(c + 1, 1);
  }
};
