// attention_prefill: attention of chunks of several rows by mma.sync, after FlashAttention: head_dim 64, 8 query heads
// per kv head, FP16 or BF16 cache.
//
// Work    A block does an item: a tile of at most 16 query rows (PrefillTile in args.h) for one kv head, 128 rows of
//         scores. Item i is tile i / kv_heads and kv head i % kv_heads. Each of four warps has four query rows, in two
//         strips of 16 rows of scores: row 8 q + h of a strip is head h of its query q.
// Copies  K and V come in tiles of one page, by cp.async, into a ring buffer that all warps read. A warp skips tiles
//         that none of its rows sees.
// MMA     S = Q K^T with queries in registers, then O += P V: accumulators of S have the layout of the next product's A
//         fragment, and ldmatrix transposes V. Both strips share each load of keys and values.
// Softmax Online, over tiles of absolute positions. Each row has its own maximum, over visible keys only. An invisible
//         key weighs exactly 0, and a tile without visible keys changes neither maximum nor sums. So a row's bits
//         depend on its position and its keys alone, not on its tile or the batch.
// Grid    A block for each item.
#include "../mma/async_copy.h"
#include "attention_products.h"

enum : int {
  THREADS = ATTENTION_PREFILL_THREADS,
  WARP_ROWS = 2 * STRIPS,                // query rows
  STAGES = ATTENTION_PREFILL_SHARED_BYTES / TILE_BYTES,
};
static_assert(THREADS / WAVE * WARP_ROWS == ATTENTION_PREFILL_PER_BLOCK, "each warp has its rows");
static_assert(STAGES >= 2, "a tile is fetched while another one is multiplied");

// A page's keys and values; zeros in place of those that no query sees, whose memory may hold anything: a weight of 0
// times NaN is NaN.
DEV void copy_tile(u32 to, const u8* from, int first, int last) {
  UNROLL for (int i = 0; i < TILE_BYTES / 16; i += THREADS) {
    const int piece = i + TID, row = piece / (KEY_BYTES / 16) % KV_PAGE;
    copy16_or_zeros(to + piece * 16, from + piece * 16, row >= first && row <= last);
  }
}

DEV Queries load_queries(const AttentionArgs& a, const Item& item, int query) {
  Queries q;
  UNROLL for (int row = 0; row < 2; row++) {
    const i64 of = (i64)(item.row + min(query + row, item.rows - 1)) * a.heads + item.kv_head * GROUP_HEADS + LANE / 4;
    const u32* from = (const u32*)a.q + of * (HEAD_DIM / 2) + LANE % 4;
    UNROLL for (int s = 0; s < K16S; s++) q.v[s][row] = __ldg(from + 8 * s), q.v[s][2 + row] = __ldg(from + 8 * s + 4);
  }
  return q;
}

template <int FORMAT> DEV void attend(const AttentionArgs& a) {
  let_successor_start();
  after_predecessor();
  const int number = quotient(BID, a.kv_heads);
  if (number >= a.step.header->prefill_tiles) return;
  const PrefillTile& tile = a.step.prefill_tiles[number];
  const ChunkInfo& chunk = a.step.chunks[tile.chunk];
  const Item item = {chunk.first_row + tile.first, tile.rows, chunk.first_position + tile.first,
                     BID - number * a.kv_heads};
  const PageTable table = page_table(a, chunk);
  const int first_key = first_visible_key(a, item.position), last_key = item.position + item.rows - 1;
  const int begin = first_page(a, item), end = last_page(item) + 1;
  const u32 ring = shared_address(DYNAMIC_SHARED);
  const u8* kv = a.kv + (i64)item.kv_head * a.head_bytes;
  const auto copy = [&](int page) {
    if (page < end)
      copy_tile(ring + (page - begin) % STAGES * TILE_BYTES, kv + (i64)page_number(table, page) * a.page_bytes,
                first_key - page * KV_PAGE, last_key - page * KV_PAGE);
    commit_copies();
  };
  UNROLL for (int i = 0; i < STAGES - 1; i++) copy(begin + i);

  const int first_query = TID / WAVE * WARP_ROWS;
  Queries q[STRIPS];
  Rows r[STRIPS] = {};
  UNROLL for (int u = 0; u < STRIPS; u++) {
    q[u] = load_queries(a, item, first_query + 2 * u);
    UNROLL for (int row = 0; row < 2; row++) {
      const int position = item.position + min(first_query + 2 * u + row, item.rows - 1);
      r[u].m[row] = NEGATIVE_INFINITY;
      r[u].first[row] = first_visible_key(a, position), r[u].last[row] = position;
    }
  }
  // The pages that this warp needs.
  const int first = first_query < item.rows ? r[0].first[0] / KV_PAGE : end, last = r[STRIPS - 1].last[1] / KV_PAGE;
  for (int page = begin; page < end; page++) {
    wait_copies<STAGES - 2>();
    barrier();
    copy(page + STAGES - 1);
    if (page < first || page > last) continue;
    const u32 at = ring + (page - begin) % STAGES * TILE_BYTES;
    float s[STRIPS][32];
    u32 p[STRIPS][K16S][4];
    multiply_keys<FORMAT>(s, q, at);
    UNROLL for (int u = 0; u < STRIPS; u++) {
      float f[2];
      if (!all_visible(r[u], page * KV_PAGE)) mask(s[u], r[u], page * KV_PAGE);
      softmax<FORMAT>(s[u], r[u], f);
      rescale(r[u], f);
      pack<FORMAT>(s[u], p[u]);
    }
    multiply_values<FORMAT>(r, p, at + HALF_TILE);
  }
  UNROLL for (int u = 0; u < STRIPS; u++) store_rows<FORMAT>(a, item, r[u], first_query + 2 * u);
}

KERNEL(attention_prefill_f16, AttentionArgs, THREADS, 2, 1) { attend<FORMAT_F16>(a); }
KERNEL(attention_prefill_bf16, AttentionArgs, THREADS, 2, 1) { attend<FORMAT_BF16>(a); }
