// Split-KV attention of decoding rows, one query row per sequence: head_dim 64, 8 query heads per kv head, paged 16-bit
// KV cache, sinks, window. attention.h says how operands lie in lanes; a row's 8 heads fill half of the 16 columns.
//
// Work.     The host lists work items (AttentionItem in args.h), longest first: a row and a run of its units of 128
//           keys. A block is one wave and takes one item for one kv head. The grid has room for all; blocks without an
//           item return.
// Two rows. An item may be of two rows that see the same keys: the second one's heads are the columns that idle
//           otherwise, and keys are read once for both.
// Sum.      Each unit is summed on its own, and units are folded as attention_tree.h says, with the same arithmetic
//           wherever it happens. Either one wave has the whole row, or several waves store the sum of a unit, group or
//           span each, and the row's last wave to finish folds them. So a row's bits depend on the row alone.
// Memory.   One or two half pages (32 keys: 8 KB) are in flight while another is worked on; page numbers are loaded a
//           page ahead. Twelve waves keep 96 KB or more per compute unit in flight, 10 MB on an MI250's 104; 1.6 TB/s
//           at a loaded latency of 2,400 clocks need 2.3 MB. A SIMD takes 1,300 clocks per page (modelled), which is
//           50 bytes a clock per compute unit; memory delivers 9. So half of the columns may be idle.
#pragma once
#include "../attention_tree.h"
#include "attention.h"

enum : int {
  TILE = 32,                     // keys worked on at once
  PAGE_TILES = KV_PAGE / TILE,
  UNIT_PAGES = ATTENTION_UNIT / KV_PAGE,
};
static_assert(PARTIAL_FLOATS == GROUP_HEADS * (HEAD_DIM + 2), "O as lanes hold it, m and l");
static_assert(PAGE_TILES == 2, "the loop has one buffer for each half of a page");

struct Tile { u32v4 k[4]; u32v2 v[8]; };

// A wave's work item; the same in all lanes.
struct Item {
  int row, kv_head;
  int first_key, last_key;       // keys that the row sees
  int row_unit, row_end;         // the row's units
  int unit, end;                 // the item's
  int row_items, run, partial;   // see AttentionItem
  int second, second_partial;    // see AttentionItem
  Pages pages;
};

DEV Item item_of(const AttentionArgs& a, int index) {
  const AttentionItem* item = (a.windowed ? a.step.window_items : a.step.full_items) + index / a.kv_heads;
  Item w;
  w.row = uniform(item->row), w.kv_head = index % a.kv_heads;
  w.row_items = uniform(item->row_items), w.run = uniform(item->run), w.partial = uniform(item->partial);
  w.second = uniform(item->second), w.second_partial = uniform(item->second_partial);
  w.last_key = uniform(a.step.positions[w.row]), w.first_key = first_visible(a, w.last_key);
  w.row_unit = w.first_key / ATTENTION_UNIT, w.row_end = w.last_key / ATTENTION_UNIT + 1;
  w.unit = w.row_unit, w.end = w.row_end;
  if (w.row_items > 1) {
    w.unit = uniform(item->first_unit);
    w.end = min_of(w.end, w.unit + (uniform(item->tokens) + ATTENTION_UNIT - 1) / ATTENTION_UNIT);
  }
  w.pages = pages_of(a, a.step.chunks[uniform(a.step.row_chunk[w.row])]);
  return w;
}

// The same for its second row, which sees keys from position 0 on.
DEV Item of_second(const AttentionArgs& a, const Item& w) {
  Item other = w;
  other.row = w.second, other.partial = w.second_partial;
  other.last_key = uniform(a.step.positions[w.second]), other.row_end = other.last_key / ATTENTION_UNIT + 1;
  other.row_items = part_of(other.row_end - 1, 0, w.run) + 1;
  return other;
}

DEV Tile load_tile(Global keys) {
  const int n = LANE % 16, g = LANE / 16;
  SCALAR(keys);
  Tile tile;
  for (int z = 0; z < 2; z++) {
    u32 at = n * KV_ROW + ((z * 4 + g) ^ n % 8) * 16;
    VECTOR(at);
    for (int t = 0; t < 2; t++) tile.k[t * 2 + z] = load<u32v4>(keys + at + t * 16 * KV_ROW);
  }
  for (int j = 0; j < 4; j++) {
    u32 at = V_OFFSET + (4 * g + j) * KV_ROW + ((n / 2) ^ (4 * g + j) % 8) * 16 + n % 2 * 8;
    VECTOR(at);
    for (int t = 0; t < 2; t++) tile.v[t * 4 + j] = load<u32v2>(keys + at + t * 16 * KV_ROW);
  }
  return tile;
}
// Masks keys that the row does not see, at either end of the tile; memory may hold anything there.
DEV void mask(Acc* s, Tile& tile, int first_key, int last_key) {
  for (int t = 0; t < 2; t++) for (int i = 0; i < 4; i++) {
    const int key = t * 16 + LANE / 16 * 4 + i;
    if (key < first_key || key > last_key) s[t][i] = -__builtin_inff(), tile.v[t * 4 + i] = u32v2{0, 0};
  }
}
// Within one launch the row's newest key and value are handed on beside the cache: [row][keys of all kv heads, their
// values][dim]. They take their places in the tile, where they are key `key`.
DEV void take_newest(const u16* newest, const AttentionArgs& a, const Item& w, int key, Tile& tile) {
  const int n = LANE % 16, g = LANE / 16;
  const u16* at = newest + ((i64)w.row * 2 * a.kv_heads + w.kv_head) * HEAD_DIM;
  for (int t = 0; t < 2; t++) if (key == t * 16 + n)
    for (int z = 0; z < 2; z++) tile.k[t * 2 + z] = take((const u32v4*)(at + (z * 4 + g) * 8));
  at += a.kv_heads * HEAD_DIM;
  for (int t = 0; t < 2; t++) for (int j = 0; j < 4; j++)
    if (key == t * 16 + 4 * g + j) tile.v[t * 4 + j] = take((const u32v2*)(at + 4 * n));
}
// Adds a tile of keys. first_key, last_key: the row's visible keys, relative to the tile's first.
template <int FORMAT> DEV void add_tile(Sums& u, Tile& tile, const u32v2 (*q)[4], int first_key, int last_key) {
  Acc s[2];
  for (int t = 0; t < 2; t++) score<FORMAT, 1>(s + t, tile.k[t * 2], tile.k[t * 2 + 1], q);
  if (first_key > 0 || last_key < TILE - 1) mask(s, tile, first_key, last_key);
  const float top = max_of(largest(s[0]), largest(s[1]));
  if (wave_any(rises(u, top))) raise(u, top);
  u32v2 p[2];
  for (int t = 0; t < 2; t++) p[t] = weigh<FORMAT>(u, s[t]);
  if constexpr (PIECE_MFMAS == 1) {
    for (int d = 0; d < 4; d++)
      u.o[d] = mfma_of_piece<FORMAT>(value_operand(tile.v, d), value_operand(tile.v + 4, d), p[0], p[1], u.o[d]);
  } else {
    for (int t = 0; t < 2; t++)
      for (int d = 0; d < 4; d++) u.o[d] = mfma<FORMAT>(value_operand(tile.v + t * 4, d), p[t], u.o[d]);
  }
}

// a += b. mul_rn and fma_rn fix the roundings: this is compiled in several places that must agree.
DEV void fold(Sums& a, const Sums& b) {
  const float m = max_of(a.m, b.m), fa = exp2_fast(a.m - m), fb = exp2_fast(b.m - m);
  a.m = m, a.l = fma_rn(a.l, fa, mul_rn(b.l, fb));
  for (int d = 0; d < 4; d++) for (int i = 0; i < 4; i++) a.o[d][i] = fma_rn(a.o[d][i], fa, mul_rn(b.o[d][i], fb));
}

// A partial sum is O [4][lane of 32][4], m [8], l [8]. `second`: whose columns are stored, the item's second row's or
// its first one's; lanes of the others store nothing. All load: those of both columns what the row left.
DEV float* partial_at(const AttentionArgs& a, const Item& w, int index) {
  return a.partials + ((i64)(w.partial + index) * a.kv_heads + w.kv_head) * PARTIAL_FLOATS;
}
template <bool HANDED> DEV void leave(float* to, const Sums& s, bool second) {
  const int n = LANE % GROUP_HEADS, lane = LANE / 16 * GROUP_HEADS + n;
  if ((LANE % 16 >= GROUP_HEADS) != second) return;
  const auto store = [](auto* at, auto v) {
    if (HANDED) leave_as_is(at, v);
    else *at = v;
  };
  for (int d = 0; d < 4; d++) store((Acc*)(to + (d * 32 + lane) * 4), s.o[d]);
  to += GROUP_HEADS * HEAD_DIM;
  if (LANE < 16) store(to + n, s.m), store(to + GROUP_HEADS + n, s.l);
}
template <bool HANDED> DEV Sums left_at(const float* from) {
  const int n = LANE % GROUP_HEADS, lane = LANE / 16 * GROUP_HEADS + n;
  Sums s;
  const auto load = [](const auto* at) { return HANDED ? peek(at) : *at; };
  for (int d = 0; d < 4; d++) s.o[d] = load((const Acc*)(from + (d * 32 + lane) * 4));
  from += GROUP_HEADS * HEAD_DIM;
  s.m = load(from + n), s.l = load(from + GROUP_HEADS + n);
  return s;
}

// In the wave's LDS: a sum is kept once every lane has read what was there.
DEV void keep(float* to, const Sums& s) {
  wave_any(true);
  leave<false>(to, s, false);
}
DEV void fold_kept(Sums& s, const float* from) {
  Sums before = left_at<false>(from);
  fold(before, s);
  s = before;
}

// Whether this wave is the last one of the row's parts to finish. If so, it sees the others' partial sums, and the
// counter is 0 again. Within one launch no fence writes the caches back, as what is left is past them already; it is
// there before the counter says so, and the counter is 0 before the row's output is there.
DEV bool arrives_last(const AttentionArgs& a, const Item& w) {
  int* counter = a.arrived + (i64)w.row * a.kv_heads + w.kv_head;
  if (WITHIN_LAUNCH) wait_for_stores();
  else fence_device();
  wave_any(true);                // every lane's partial is written before lane 0 says so
  int before = 0;
  if (LANE == 0) before = atomic_add(counter, 1);
  const bool last = uniform(shfl(before, 0)) == w.row_items - 1;
  if (!WITHIN_LAUNCH) fence_device();
  if (last && LANE == 0) leave_as_is(counter, 0);
  wait_for_stores();
  return last;
}
DEV Sums fold_partials(const AttentionArgs& a, const Item& w) {
  Tree<Sums> tree;
  tree.first = w.row_unit;
  Sums next = left_at<true>(partial_at(a, w, 0));
  for (int i = 0; i < w.row_items; i++) {
    const Sums part = next;
    next = left_at<true>(partial_at(a, w, min_of(i + 1, w.row_items - 1)));
    const int unit = last_of_part(i, w.row_unit, w.row_end - 1, w.run);
    tree.add(part, unit, w.run, unit == w.row_end - 1);
  }
  return tree.total;
}

// Divides a row's total by the sum of its weights and the sink's, and stores it.
template <int FORMAT> DEV void finish(const AttentionArgs& a, const Item& w, const Sums& total) {
  const int n = LANE % 16, head = w.kv_head * GROUP_HEADS + n % GROUP_HEADS;
  const float sum = total.l + exp2_fast(a.sinks[head] * LOG2E - total.m);
  if (n < GROUP_HEADS) store_column<FORMAT>(a, w.row, head, total.o, rcp_fast(sum));
}

// `sums`: the wave's own LDS, room for two sums, which add_unit() keeps. `newest`: see take_newest().
template <int FORMAT> DEV void attend(const AttentionArgs& a, const Item& w, float* sums, const u16* newest) {
  u32v2 q[1][4] = {};
  const int row = LANE % 16 < GROUP_HEADS ? w.row : w.second;
  if (row >= 0) {
    const i64 head = (i64)row * a.heads + w.kv_head * GROUP_HEADS + LANE % GROUP_HEADS;
    load_query(q[0], (const u16*)a.q + head * HEAD_DIM, LANE / 16);
  }
  const int first = max_of(w.unit * ATTENTION_UNIT, w.first_key) / TILE;
  const int last = min_of(w.end * ATTENTION_UNIT - 1, w.last_key) / TILE;
  const int last_page = last / PAGE_TILES;
  // Instead of a half page that the item does not see, its visible neighbour, which is in flight already, is loaded
  // again.
  auto half = [&](int number, int tile) {
    return head_of_page(a, number, w.kv_head) + min_of(max_of(tile, first), last) % PAGE_TILES * (TILE * KV_ROW);
  };
  auto number_of = [&](int page) { return page_number(w.pages, min_of(page, last_page)); };

  auto newest_in = [&](Tile& keys, int tile) {
    if constexpr (WITHIN_LAUNCH)
      if (tile == w.last_key / TILE) take_newest(newest, a, w, w.last_key % TILE, keys);
  };

  int page = first / PAGE_TILES, number = uniform(number_of(page)), next_number = uniform(number_of(page + 1));
  Tile even = load_tile(half(number, page * PAGE_TILES)), odd;
  Sums unit = {UNSET, 0, {}}, sum;
  for (;; page++) {
    loads_in_flight_for<TILE / STEP * SCORE_MFMAS + 4 * PIECE_MFMAS>();
    const int after_next = number_of(page + 2), tile = page * PAGE_TILES;
    odd = load_tile(half(number, tile + 1));
    SCHEDULE_FENCE();
    newest_in(even, tile);
    if (tile >= first) add_tile<FORMAT>(unit, even, q, w.first_key - tile * TILE, w.last_key - tile * TILE);
    SCHEDULE_FENCE();
    even = load_tile(half(next_number, tile + PAGE_TILES));
    SCHEDULE_FENCE();
    if (tile < last) newest_in(odd, tile + 1);
    if (tile < last) add_tile<FORMAT>(unit, odd, q, w.first_key - (tile + 1) * TILE, w.last_key - (tile + 1) * TILE);
    SCHEDULE_FENCE();
    // has arrived: it was requested before the half page just used
    number = next_number, next_number = uniform(after_next);

    const bool end = page == last_page;
    if (!end && page % UNIT_PAGES != UNIT_PAGES - 1) continue;
    unit.l = column_sum(unit.l);
    add_unit(sum, unit, page / UNIT_PAGES, w.unit, end, sums, sums + PARTIAL_FLOATS);
    if (end) break;
    unit = {UNSET, 0, {}};
  }
  if (w.row_items == 1) return finish<FORMAT>(a, w, sum);
  for (int i = 0; i < (w.second < 0 ? 1 : 2); i++) {
    const Item of = i == 0 ? w : of_second(a, w);
    leave<true>(partial_at(a, of, part_of(w.unit, w.row_unit, w.run)), sum, i == 1);
    if (arrives_last(a, of)) finish<FORMAT>(a, of, fold_partials(a, of));
  }
}

// Number `index` of the step's items and kv heads, if there are as many.
template <int FORMAT>
DEV void attention_decode(const AttentionArgs& a, int index, float* sums, const u16* newest) {
  const int items = a.windowed ? a.step.header->window_items : a.step.header->full_items;
  if (index < items * a.kv_heads) attend<FORMAT>(a, item_of(a, index), sums, newest);
}
