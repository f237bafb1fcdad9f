// attention_prefill: attention of prompts, after FlashAttention 2. A block takes a tile of up to 32 query rows of a
// chunk for one kv head (8 query heads). attention.h says how operands lie in lanes. The grid has room for all tiles
// times kv heads; blocks without a tile return.
//
// Columns.  A wave has 8 rows x 8 heads = 64 columns, four blocks of 16; K and V come from LDS once for all of them.
// Pages.    K and V of 64 keys are one page of the cache: 16 KB of contiguous memory, copied to LDS unchanged (the
//           cache's swizzle avoids bank conflicts). LDS is double-buffered: while one page is worked on, the next is in
//           flight to registers; one barrier per page. 32 KB per block, two blocks per compute unit, 256 registers per
//           lane.
// Sum.      Pages, and steps of 16 keys in them, are counted from position 0, and each column decides alone when to
//           rescale. Keys that a row does not see weigh exactly 0. So neither the other rows of the tile nor the way a
//           prompt was cut into chunks changes a bit. Steps that no row of the wave sees are skipped.
// Budget.   On gfx90a a page costs a wave 128 MFMAs of 32 clocks, 4,096 clocks, and about 3,000 clocks of vector
//           instructions, 64 exponentials of 16 clocks among them. So the next step's scores are computed while the
//           last step's become weights, and the SIMD's other wave fills the gaps: a model of the issue has the matrix
//           cores 80 % busy. LDS is read 16 KB per page and wave: 512 of 5,100 clocks for all four waves.
#include "attention.h"

enum : int {
  THREADS = ATTENTION_PREFILL_THREADS,
  WAVES = THREADS / WAVE,
  TILE_ROWS = ATTENTION_PREFILL_PER_BLOCK,
  WAVE_ROWS = TILE_ROWS / WAVES,
  BLOCKS = 4,                    // of 16 columns, two rows each
  PAGE_BYTES = 2 * V_OFFSET,     // K and V of one head
  COPY_BYTES = WAVES * WAVE * 16,
};

// The pieces of a page that a thread copies.
struct Pieces { u32v4 v[PAGE_BYTES / COPY_BYTES]; };

DEV Pieces load_page(Global page) {
  Pieces p;
  u32 at = TID * 16;
  SCALAR(page);
  VECTOR(at);
  for (int i = 0; i < PAGE_BYTES / COPY_BYTES; i++) p.v[i] = load<u32v4>(page + at + i * COPY_BYTES);
  return p;
}
// Stores a page to LDS. V beyond `last_slot` becomes zero: memory may hold anything there, and 0 times NaN is not 0.
DEV void store_page(u8* lds, Pieces& p, int last_slot) {
  for (int i = 0; i < PAGE_BYTES / COPY_BYTES; i++) {
    const int at = TID * 16 + i * COPY_BYTES;
    if (at >= V_OFFSET && (at - V_OFFSET) / KV_ROW > last_slot) p.v[i] = u32v4{0, 0, 0, 0};
    *(u32v4*)(lds + at) = p.v[i];
  }
}

// A wave's rows, by position. Beyond the tile's rows, its last one is repeated and not stored.
struct Rows {
  int count;                     // 0: none
  int first, last;               // positions, the same in all lanes
  int own[BLOCKS];               // positions of this lane's columns
  int window;                    // keys that a row sees; a large number in full layers
};
DEV bool sees_all(const Rows& r, int key) { return key + STEP - 1 <= r.first && key > r.last - r.window; }

DEV void mask(Acc* s, const Rows& r, int key) {
  for (int c = 0; c < BLOCKS; c++) for (int i = 0; i < 4; i++) {
    const int back = r.own[c] - (key + LANE / 16 * 4 + i);
    if ((u32)back >= (u32)r.window) s[c][i] = -__builtin_inff();       // after the row, or outside of its window
  }
}
// A lane's two pieces of K of 16 keys.
struct Keys { u32v4 piece[2]; };
DEV Keys load_keys(const u8* lds) {
  const int n = LANE % 16, g = LANE / 16;
  const u8* row = lds + n * KV_ROW;
  return {{*(const u32v4*)(row + (g ^ n % 8) * 16), *(const u32v4*)(row + ((4 + g) ^ n % 8) * 16)}};
}
DEV void load_values(u32v2* v, const u8* lds) {
  const int n = LANE % 16, g = LANE / 16;
  for (int j = 0; j < 4; j++) {
    const int key = 4 * g + j;
    v[j] = *(const u32v2*)(lds + V_OFFSET + key * KV_ROW + ((n / 2) ^ key % 8) * 16 + n % 2 * 8);
  }
}
// Adds 16 keys, whose scores are `s`. If there are MORE, it also computes the next 16 keys' scores into `s`: a software
// pipeline, in which the matrix cores make scores while the vector unit turns the last ones into weights.
template <int FORMAT, bool MORE>
DEV void add_step(Sums* u, Acc* s, const u32v2 (*q)[4], const Rows& r, const u8* lds, int key) {
  u32v2 p[BLOCKS], v[4];
  Keys keys;
  if (MORE) keys = load_keys(lds + STEP * KV_ROW);
  load_values(v, lds);
  if (!sees_all(r, key)) mask(s, r, key);
  float top[BLOCKS];
  bool any = false;
  for (int c = 0; c < BLOCKS; c++) top[c] = largest(s[c]), any |= rises(u[c], top[c]);
  if (wave_any(any)) for (int c = 0; c < BLOCKS; c++) raise(u[c], top[c]);
  Acc next[BLOCKS];
  if (MORE) score<FORMAT, BLOCKS>(next, keys.piece[0], keys.piece[1], q);
  for (int c = 0; c < BLOCKS; c++) p[c] = weigh<FORMAT>(u[c], s[c]);
  for (int d = 0; d < 4; d++) {
    const u32v2 operand = value_operand(v, d);
    for (int c = 0; c < BLOCKS; c++) u[c].o[d] = mfma<FORMAT>(operand, p[c], u[c].o[d]);
  }
  if (MORE) {
    for (int c = 0; c < BLOCKS; c++) s[c] = next[c];
    constexpr int SCORES = SCORE_MFMAS * BLOCKS;
    for (int i = 0; i < SCORES; i++)
      SCHEDULE(MFMA, 1), SCHEDULE(TRANSCENDENTAL, 16 / SCORES), SCHEDULE(VALU, 64 / SCORES);
    for (int i = 0; i < 16; i++) SCHEDULE(MFMA, 1), SCHEDULE(VALU, 1);
  }
}
// Adds the keys that the wave sees of a page, which is in LDS and begins at position `key`.
template <int FORMAT> DEV void add_page(Sums* u, const u32v2 (*q)[4], const Rows& r, const u8* lds, int key) {
  int step = max_of(r.first - r.window + 1 - key, 0) / STEP;
  const int last = min_of(r.last - key, KV_PAGE - 1) / STEP;
  if (r.count == 0 || key > r.last || step > last) return;
  Acc s[BLOCKS];
  const Keys keys = load_keys(lds + step * STEP * KV_ROW);
  score<FORMAT, BLOCKS>(s, keys.piece[0], keys.piece[1], q);
#pragma unroll 1
  for (; step < last; step++) add_step<FORMAT, true>(u, s, q, r, lds + step * STEP * KV_ROW, key + step * STEP);
  add_step<FORMAT, false>(u, s, q, r, lds + last * STEP * KV_ROW, key + last * STEP);
}

template <int FORMAT>
DEV void attend(const AttentionArgs& a, const PrefillTile* tile, int kv_head, u8 (*lds)[PAGE_BYTES]) {
  const ChunkInfo& chunk = a.step.chunks[uniform(tile->chunk)];
  const Pages pages = pages_of(a, chunk);
  const int first = uniform(tile->first), count = uniform(tile->rows);
  const int position = uniform(chunk.first_position) + first, row = uniform(chunk.first_row) + first;
  const int wave = uniform(TID / WAVE), head = kv_head * GROUP_HEADS + LANE % GROUP_HEADS;

  Rows r;
  r.count = max_of(0, min_of(WAVE_ROWS, count - wave * WAVE_ROWS));
  r.first = position + wave * WAVE_ROWS, r.last = r.first + r.count - 1;
  r.window = a.windowed ? a.window : 1 << 30;
  Sums sums[BLOCKS];
  u32v2 q[BLOCKS][4];
  const auto row_of = [&](int c) { return wave * WAVE_ROWS + c * 2 + LANE % 16 / GROUP_HEADS; };     // within the tile
  for (int c = 0; c < BLOCKS; c++) {
    const int own = min_of(row_of(c), count - 1);
    r.own[c] = position + own;
    load_query(q[c], (const u16*)a.q + ((i64)(row + own) * a.heads + head) * HEAD_DIM, LANE / 16);
    sums[c] = {UNSET, 0, {}};
  }

  const int last_key = position + count - 1, last_page = last_key / KV_PAGE;
  int page = first_visible(a, position) / KV_PAGE;
  const auto number_of = [&](int i) { return page_number(pages, min_of(i, last_page)); };
  Pieces pieces = load_page(head_of_page(a, uniform(number_of(page)), kv_head));
  int next = number_of(page + 1);
  for (; page <= last_page; page++) {
    u8* now = lds[page % 2];
    store_page(now, pieces, last_key - page * KV_PAGE);
    barrier();
    pieces = load_page(head_of_page(a, uniform(next), kv_head));       // after the last page: that page again
    next = number_of(page + 2);
    SCHEDULE_FENCE();
    loads_in_flight_for<(SCORE_MFMAS + 4) * BLOCKS>();                      // a page has one step or more
    add_page<FORMAT>(sums, q, r, now, page * KV_PAGE);
  }

  const float sink = a.sinks[head] * LOG2E;
  for (int c = 0; c < BLOCKS; c++) {
    const float sum = column_sum(sums[c].l) + exp2_fast(sink - sums[c].m);
    if (row_of(c) < count) store_column<FORMAT>(a, row + row_of(c), head, sums[c].o, rcp_fast(sum));
  }
}

template <int FORMAT> DEV void attention_prefill(const AttentionArgs& a) {
  alignas(16) SHARED u8 lds[2][PAGE_BYTES];
  let_successor_start();
  after_predecessor();
  if (BID >= a.step.header->prefill_tiles * a.kv_heads) return;
  attend<FORMAT>(a, a.step.prefill_tiles + BID / a.kv_heads, BID % a.kv_heads, lds);
}

KERNEL(attention_prefill_f16, AttentionArgs, THREADS, 1, 2) { attention_prefill<FORMAT_F16>(a); }
KERNEL(attention_prefill_bf16, AttentionArgs, THREADS, 1, 2) { attention_prefill<FORMAT_BF16>(a); }
