// attention_prefill: attention of chunks of several rows on Hopper, after FlashAttention: head_dim 64, 8 query heads
// per kv head, FP16 or BF16 cache.
//
// Work    An item is one tile of at most 32 query rows (PrefillTile in args.h) for one kv head: 256 rows of scores, row
//         8 q + h being head h of query q. Item i is tile i / kv_heads and kv head i % kv_heads. The kernel is
//         persistent: blocks take items in order from a counter. Each of four warpgroups computes 8 query rows.
// Copies  A fifth warpgroup fetches. One of its warps takes items and brings their K and V in tiles of one page, a bulk
//         copy each, through a ring buffer that all warpgroups read; the others bring the items' queries. Both run
//         ahead of the computing ones, across items. Tiles that no row sees are skipped.
// MMA     wgmma m64n64k16: S = Q K^T with both operands in shared memory, O += P V with P in registers (accumulators of
//         S have the layout of the next product's A fragment) and V transposed by its descriptor.
// Softmax Online, over tiles of absolute positions. Each row has its own maximum, over visible keys only. An invisible
//         key weighs exactly 0, and a tile without visible keys changes neither maximum nor sums. So a row's bits
//         depend neither on the other rows of its tile nor on how the prompt was cut into chunks.
// Budget  At head_dim 64 a warpgroup's tile keeps the special function units busy as long as the matrix cores, 256
//         cycles each. Of four warpgroups some multiply while others exponentiate. Within a warpgroup the next tile's S
//         is issued before this tile's P V, which runs while that S is exponentiated. Registers: 32 O, 32 S, 16 P of
//         112; the fetching warpgroup gives up the difference to its own 32.
// Memory  All of a multiprocessor's shared memory: STAGES tiles, the queries of ITEMS items, mbarriers.
#include "attention.h"
#include "attention_products.h"
#include "bulk_store.h"

enum : int {
  TILE_ROWS = ATTENTION_PREFILL_PER_BLOCK,    // query rows of an item
  GROUP_ROWS = 8,                        // query rows per warpgroup
  GROUPS = TILE_ROWS / GROUP_ROWS,       // warpgroups that compute
  THREADS = ATTENTION_PREFILL_THREADS,
  LOADERS = 3 * WAVE,                    // threads that load queries
  ITEMS = 3,                             // items under way
  GROUP_BYTES = GROUP_ROWS * GROUP_HEADS * KEY_BYTES,
  QUERY_BYTES = GROUPS * GROUP_BYTES,
  STAGES = 8,
};

// ---- items

typedef RingPlace<STAGES> Tiles;
typedef RingPlace<ITEMS> Items;

// The mbarriers, and the items in their ring buffer: `known` when an item is there, `full` with its queries.
struct Control {
  u64 tiles[2 * STAGES], items[2 * ITEMS], known[ITEMS];
  Item item[ITEMS];
};
enum : int { QUERIES_AT = STAGES * TILE_BYTES, CONTROL_AT = QUERIES_AT + ITEMS * QUERY_BYTES };
static_assert(CONTROL_AT + sizeof(Control) <= ATTENTION_PREFILL_SHARED_BYTES, "shared memory");
static_assert(THREADS == GROUPS * 128 + WAVE + LOADERS, "warpgroups that compute, and one that fetches");
DEV Control& control() { return *(Control*)(DYNAMIC_SHARED + CONTROL_AT); }

// ---- the warp that hands out items and copies their keys and values

// Zeroes V outside first .. last. No query sees these positions, their memory may hold anything, and a weight of 0
// times NaN is NaN.
DEV void clear_values(u8* values, int first, int last) {
  const u32x4 zero = {};
  ROLLED for (int i = LANE; i < HALF_TILE / 16; i += WAVE) {
    const int row = i / (KEY_BYTES / 16);
    if (row < first || row > last) ((u32x4*)values)[i] = zero;
  }
  async_proxy_fence();
  __syncwarp();
}

DEV void copy_keys(const AttentionArgs& a, const Item& item, const PageTable& table, Tiles& ring, u64 policy) {
  const int first_key = first_visible_key(a, item.position), last_key = item.position + item.rows - 1;
  int numbers = 0;                       // this lane's of 32 page numbers
  for (int page = first_key / KV_PAGE, i = 0; page <= last_key / KV_PAGE; page++, i++, ring.advance()) {
    if (i % WAVE == 0) numbers = page_number(table, min(page + LANE, last_key / KV_PAGE));
    const u8* from = a.kv + (i64)shfl(numbers, i % WAVE) * a.page_bytes + (i64)item.kv_head * a.head_bytes;
    const int first = max(first_key - page * KV_PAGE, 0), last = min(last_key - page * KV_PAGE, KV_PAGE - 1);
    ring.wait_empty();
    u8* tile = DYNAMIC_SHARED + ring.place * TILE_BYTES;
    if (last - first < KV_PAGE - 1) clear_values(tile + HALF_TILE, first, last);
    if (LANE == 0) copy_tile(shared_address(tile), from, first, last, ring.full(), policy);
    __syncwarp();
  }
}

// Items are handed out in order, by the first of the counters that `arrived` has. The last block to find none left
// resets it.
DEV void hand_out(const AttentionArgs& a, Tiles tiles, Items items) {
  const u64 policy = evict_normal();     // other tiles of the chunk read these pages, too
  const int count = a.step.header->prefill_tiles * a.kv_heads;
  for (bool left = true; left; items.advance()) {
    int i = 0;
    if (LANE == 0) {
      i = atomic_add(a.arrived, 1);
      if (i == count + GRID - 1) *a.arrived = 0;
    }
    i = shfl(i, 0);
    left = i < count;
    Item item = {};
    PageTable table = {};
    if (left) {
      const PrefillTile& tile = a.step.prefill_tiles[i / a.kv_heads];
      const ChunkInfo& chunk = a.step.chunks[tile.chunk];
      item = {chunk.first_row + tile.first, tile.rows, chunk.first_position + tile.first, i % a.kv_heads};
      table = page_table(a, chunk);
    }
    items.wait_empty();
    if (LANE == 0) {
      control().item[items.place] = item;
      barrier_arrive(shared_address(control().known + items.place));
    }
    __syncwarp();
    if (left) copy_keys(a, item, table, tiles, policy);
  }
}

// ---- the warps that load queries

// Beyond the item's rows there are zeros.
DEV void load_queries(const AttentionArgs& a, Items items) {
  const int thread = TID - (THREADS - LOADERS);
  for (;; items.advance()) {
    barrier_wait(shared_address(control().known + items.place), items.parity);
    const Item item = control().item[items.place];
    const u32 to = shared_address(DYNAMIC_SHARED) + QUERIES_AT + items.place * QUERY_BYTES;
    if (item.rows == 0) {
      barrier_arrive(items.full());
      return;
    }
    ROLLED for (int i = thread; i < QUERY_BYTES / 16; i += LOADERS) {
      const int query = i / 64, head = i / 8 % 8, piece = i % 8;
      const i64 from = (i64)(item.row + min(query, item.rows - 1)) * a.heads + item.kv_head * GROUP_HEADS + head;
      const u16* at = (const u16*)a.q + from * HEAD_DIM + piece * 8;
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to + (i - piece + (piece ^ head)) * 16),
                   "l"(at), "r"(query < item.rows ? 16 : 0) : "memory");
    }
    asm volatile("cp.async.wait_all;" ::: "memory");
    async_proxy_fence();
    barrier_arrive(items.full());
  }
}

// ---- a warpgroup

// Releases tiles that only other warpgroups need.
DEV void skip(Tiles& ring, int tiles) {
  for (int i = 0; i < tiles; i++, ring.advance()) ring.wait_full(), ring.release();
}

template <int FORMAT>
DEV void compute(const AttentionArgs& a, const Item& w, Tiles& ring, u32 queries, int warp) {
  const int group = warp / 4;
  const int begin = first_page(a, w), end = last_page(w) + 1;
  if (group * GROUP_ROWS >= w.rows) return skip(ring, end - begin);
  const int first_query = warp * 2;
  Rows r = {};
  UNROLL for (int row = 0; row < 2; row++) {
    const int position = w.position + min(first_query + row, w.rows - 1);
    r.m[row] = NEGATIVE_INFINITY;
    r.first[row] = first_visible_key(a, position), r.last[row] = position;
  }
  // The tiles that this warpgroup needs.
  const int first = first_visible_key(a, w.position + group * GROUP_ROWS) / KV_PAGE;
  const int last = (w.position + min(w.rows, (group + 1) * GROUP_ROWS) - 1) / KV_PAGE;
  skip(ring, first - begin);

  const u32 tiles = shared_address(DYNAMIC_SHARED);
  float s[32];
  u32 p[K16S][4];
  ring.wait_full();
  pin(s);
  wgmma_fence();
  issue_scores<FORMAT>(s, queries, tiles + ring.place * TILE_BYTES);
  wgmma_commit();
  wgmma_wait<0>();
  float f[2];
  const auto weigh = [&](int page) {
    pin(s);
    if (!all_visible(r, page * KV_PAGE)) mask(s, r, page * KV_PAGE);
    softmax<FORMAT>(s, r, f);
  };
  weigh(first);
  pack<FORMAT>(s, p);                                            // O is empty: nothing to rescale
  for (int page = first + 1; page <= last; page++) {
    const Tiles before = ring;
    ring.advance();
    ring.wait_full();
    pin(s), pin(r.o);
    wgmma_fence();
    issue_scores<FORMAT>(s, queries, tiles + ring.place * TILE_BYTES);
    wgmma_commit();
    issue_values<FORMAT>(r.o, p, tiles + before.place * TILE_BYTES);
    wgmma_commit();
    wgmma_wait<1>();
    weigh(page);
    wgmma_wait<0>();
    pin(r.o);
    before.release();
    __syncwarp();
    rescale(r, f);
    pack<FORMAT>(s, p);
  }
  pin(r.o);
  wgmma_fence();
  issue_values<FORMAT>(r.o, p, tiles + ring.place * TILE_BYTES);
  wgmma_commit();
  wgmma_wait<0>();
  pin(r.o);
  ring.release();
  ring.advance();
  store_rows<FORMAT>(a, w, r, first_query);
  skip(ring, end - 1 - last);
}

template <int FORMAT> DEV void compute_items(const AttentionArgs& a, Tiles tiles, Items items, int warp) {
  for (;; items.advance()) {
    items.wait_full();
    const Item in = control().item[items.place];
    const Item item = {shfl(in.row, 0), shfl(in.rows, 0), shfl(in.position, 0), shfl(in.kv_head, 0)};
    if (item.rows == 0) return;
    const u32 queries = shared_address(DYNAMIC_SHARED) + QUERIES_AT + items.place * QUERY_BYTES;
    compute<FORMAT>(a, item, tiles, queries + warp / 4 * GROUP_BYTES, warp);
    items.release();
  }
}

template <int FORMAT> DEV void attend(const AttentionArgs& a) {
  const Tiles tiles = {shared_address(control().tiles)};
  const Items items = {shared_address(control().items)};
  let_successor_start();
  if (TID == 0) {
    for (Tiles r = tiles; r.parity == 0; r.advance()) barrier_init(r.full(), 1), barrier_init(r.empty(), 4 * GROUPS);
    for (Items r = items; r.parity == 0; r.advance()) {
      barrier_init(r.full(), LOADERS), barrier_init(r.empty(), 4 * GROUPS);
      barrier_init(shared_address(control().known + r.place), 1);
    }
    barrier_init_done();
  }
  barrier();
  after_predecessor();
  const int warp = shfl(TID / WAVE, 0);                          // in a register the compiler knows to be uniform
  if (warp / 4 < GROUPS) {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 112;");
    compute_items<FORMAT>(a, tiles, items, warp);
  } else {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 32;");
    if (warp == 4 * GROUPS) hand_out(a, tiles, items);
    else load_queries(a, items);
  }
}

KERNEL(attention_prefill_f16, AttentionArgs, THREADS, 1, 1) { attend<FORMAT_F16>(a); }
KERNEL(attention_prefill_bf16, AttentionArgs, THREADS, 1, 1) { attend<FORMAT_BF16>(a); }
