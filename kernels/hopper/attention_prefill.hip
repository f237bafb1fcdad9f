// attention_prefill: attention of chunks of several rows on Hopper, after FlashAttention: head_dim 64, 8 query heads
// per kv head, FP16 or BF16 cache.
//
// Work    A block takes one tile of at most 16 query rows (PrefillTile in args.h; longest contexts first) for one kv
//         head: 128 rows of scores, row 8 q + h being head h of query q. Block b takes tile b / kv_heads and kv head b
//         % kv_heads; blocks beyond the step's tiles return. Each of two warpgroups has 8 query rows.
// Copies  K and V come in tiles of one page, a bulk copy each, through a ring buffer of STAGES that both warpgroups
//         read. The block's first warp issues the copies between its MMAs, two tiles or more ahead of P V (a producer
//         warp would cost the others registers). Tiles that no row sees are skipped.
// MMA     wgmma m64n64k16: S = Q K^T with both operands in shared memory, O += P V with P in registers (accumulators of
//         S have the layout of the next product's A fragment) and V transposed by its descriptor.
// Softmax Online, over tiles of absolute positions. Each row has its own maximum, over visible keys only. An invisible
//         key weighs exactly 0, and a tile without visible keys changes neither maximum nor sums. So a row's bits
//         depend neither on the other rows of its tile nor on how the prompt was cut into chunks.
// Budget  At head_dim 64 a tile's 8192 exponentials occupy the special function units as long as its MMAs occupy the
//         tensor cores, about 512 cycles. Two blocks share a multiprocessor, so that of four warpgroups some multiply
//         while others exponentiate. Within a warpgroup the next tile's S is issued before this tile's P V, which runs
//         while that S is exponentiated. Registers: 32 O, 32 S, 16 P of 128.
// Memory  QUERY_BYTES + STAGES * (TILE_BYTES + 16) bytes of dynamic shared memory, the 16 for two mbarriers.
#include "attention.h"
#include "bulk_store.h"

enum : int {
  TILE_ROWS = ATTENTION_PREFILL_PER_BLOCK,    // query rows per block
  GROUP_ROWS = TILE_ROWS / 2,            // query rows per warpgroup
  THREADS = ATTENTION_PREFILL_THREADS,
  QUERY_BYTES = TILE_ROWS * GROUP_HEADS * ROW_BYTES,
  STAGES = ((int)ATTENTION_PREFILL_SHARED_BYTES - QUERY_BYTES) / (TILE_BYTES + 16),
  STEPS = 4,                             // k16 steps in 64
};

// ---- wgmma

DEV void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEV void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING> DEV void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// wgmma writes accumulators asynchronously, which the compiler does not know: keeps it from moving them across this
// point.
DEV void pin(float* v) { UNROLL for (int i = 0; i < 32; i++) asm volatile("" : "+f"(v[i])::"memory"); }

// The descriptor of an operand of 128-byte rows in the 128-byte swizzle, 8 rows per 1024 bytes. Rows hold head dims,
// which are the contracted dimension of Q and K (K-major), but not of V (MN-major).
DEV u64 operand(u32 at) { return (u64)(at >> 4) | (u64)(1024 >> 4) << 16 | (u64)(1024 >> 4) << 32 | 1ull << 62; }
// of k16, in a descriptor's units of 16 bytes
constexpr u32 STEP_ALONG_ROWS = 32 >> 4, STEP_DOWN_ROWS = 16 * ROW_BYTES >> 4;

#define ACCUMULATORS \
  "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15," \
  "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}"
#define FOUR(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define THIRTY_TWO(d) \
  FOUR(d, 0), FOUR(d, 4), FOUR(d, 8), FOUR(d, 12), FOUR(d, 16), FOUR(d, 20), FOUR(d, 24), FOUR(d, 28)
#define WGMMA_SHARED(types) \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n" \
               "wgmma.mma_async.sync.aligned.m64n64k16.f32." types " " ACCUMULATORS ", %32, %33, p, 1, 1, 0, 0;\n}" \
               : THIRTY_TWO(d) : "l"(a), "l"(b), "r"(add))
#define WGMMA_REGISTERS(types) \
  asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32." types " " ACCUMULATORS \
               ", {%32,%33,%34,%35}, %36, 1, 1, 1, 1;" \
               : THIRTY_TWO(d) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))

template <int FORMAT> DEV void wgmma(float* d, u64 a, u64 b, int add) {
  if (FORMAT == FORMAT_F16) WGMMA_SHARED("f16.f16");
  else WGMMA_SHARED("bf16.bf16");
}
// A from registers, B transposed.
template <int FORMAT> DEV void wgmma(float* d, const u32* a, u64 b) {
  if (FORMAT == FORMAT_F16) WGMMA_REGISTERS("f16.f16");
  else WGMMA_REGISTERS("bf16.bf16");
}

// ---- a block's work

struct Work {
  int row;                               // of the tile's first row, within the step
  int rows;
  int position;                          // of the first row
  int kv_head;
  int first, last;                       // keys that any row sees
  PageTable table;
};

DEV Work load_work(const AttentionArgs& a) {
  const PrefillTile& tile = a.step.prefill_tiles[BID / a.kv_heads];
  const ChunkInfo& chunk = a.step.chunks[tile.chunk];
  Work w;
  w.row = chunk.first_row + tile.first, w.rows = tile.rows, w.position = chunk.first_position + tile.first;
  w.kv_head = BID % a.kv_heads;
  w.first = first_visible_key(a, w.position), w.last = w.position + w.rows - 1;
  w.table = page_table(a, chunk);
  return w;
}

// The ring buffer of K and V. Shared memory holds Q, the ring's tiles, then the mbarriers `full` and `empty` of each
// stage.
struct Ring {
  u32 tiles, barriers;
  int stage = 0;
  u32 parity = 0;

  DEV u32 tile() const { return tiles + stage * TILE_BYTES; }
  DEV u32 full() const { return barriers + 16 * stage; }
  DEV u32 empty() const { return barriers + 16 * stage + 8; }
  DEV void advance() { if (++stage == STAGES) stage = 0, parity ^= 1; }
};

// ---- copies; all lanes of a warp call these

// Zeroes V outside first .. last. No query sees these positions, their memory may hold anything, and a weight of 0
// times NaN is NaN.
DEV void clear_values(u8* values, int first, int last) {
  const u32x4 zero = {};
  for (int i = LANE; i < HALF_TILE / 16; i += WAVE) {
    const int row = i / (ROW_BYTES / 16);
    if (row < first || row > last) ((u32x4*)values)[i] = zero;
  }
  async_proxy_fence();
  __syncwarp();
}

struct Copies {
  const AttentionArgs& a;
  const Work& w;
  Ring ring;
  u64 policy;
  int page;                              // to be copied next
  int numbers;                           // this lane's of 32 page numbers

  DEV bool left() const { return page <= w.last / KV_PAGE; }
  DEV void start() {
    const int lane = (page - w.first / KV_PAGE) % WAVE;
    if (lane == 0) numbers = page_number(w.table, min(page + LANE, w.last / KV_PAGE));
    const u8* from = a.kv + (i64)shfl(numbers, lane) * a.page_bytes + (i64)w.kv_head * a.head_bytes;
    const int first = max(w.first - page * KV_PAGE, 0), last = min(w.last - page * KV_PAGE, KV_PAGE - 1);
    barrier_wait(ring.empty(), ring.parity ^ 1);
    if (last - first < KV_PAGE - 1)
      clear_values(DYNAMIC_SHARED + QUERY_BYTES + ring.stage * TILE_BYTES + HALF_TILE, first, last);
    if (LANE == 0) copy_tile(ring.tile(), from, first, last, ring.full(), policy);
    __syncwarp();
    ring.advance();
    page++;
  }
};

DEV Copies start_copies(const AttentionArgs& a, const Work& w, const Ring& ring) {
  Copies copies = {a, w, ring, evict_normal(), w.first / KV_PAGE, 0};  // other tiles of the chunk read these pages, too
  for (int s = 0; s < STAGES && copies.left(); s++) copies.start();
  return copies;
}

// ---- queries, softmax, result

// Loads the tile's queries to shared memory; beyond its rows there are zeros.
DEV void load_queries(const AttentionArgs& a, const Work& w) {
  for (int i = TID; i < QUERY_BYTES / 16; i += THREADS) {
    const int query = i / 64, head = i / 8 % 8, piece = i % 8;
    u32x4 v = {};
    if (query < w.rows) {
      const i64 from = (i64)(w.row + query) * a.heads + w.kv_head * GROUP_HEADS + head;
      v = *(const u32x4*)((const u16*)a.q + from * HEAD_DIM + piece * 8);
    }
    ((u32x4*)DYNAMIC_SHARED)[i - piece + (piece ^ head)] = v;
  }
  async_proxy_fence();
}

// A lane has two rows: head lane / 4 of two queries. Element 4 i + 2 r + e of an accumulator is row r and key (S) or
// dim (O) 8 i + 2 (lane % 4) + e.
struct Rows {
  float o[32], m[2], sum[2];
  int first[2], last[2];                 // keys that the rows see
};

DEV bool all_visible(const Rows& r, int key) { return key >= r.first[1] && key + KV_PAGE - 1 <= r.last[0]; }

// Masks invisible keys of a tile. `key` is the tile's first key.
DEV void mask(float* s, const Rows& r, int key) {
  const int lane_key = key + LANE % 4 * 2;
  UNROLL for (int i = 0; i < 8; i++) UNROLL for (int j = 0; j < 4; j++) {
    const int k = lane_key + 8 * i + j % 2;
    if (k < r.first[j / 2] || k > r.last[j / 2]) s[4 * i + j] = NEGATIVE_INFINITY;
  }
}

// Updates a row's maximum m if a score exceeds it by more than `slack`. Returns the factor that rescales the row's
// sums. Other rows have no influence.
DEV float move_maximum(const float* s, int row, float& m, float slack) {
  float top = max_of(s[2 * row], s[2 * row + 1]);
  UNROLL for (int i = 1; i < 8; i++) top = max_of(top, max_of(s[4 * i + 2 * row], s[4 * i + 2 * row + 1]));
  top = max_of(top, shfl_xor(top, 1)), top = max_of(top, shfl_xor(top, 2));
  if (!(top > m + slack)) return 1;
  const float f = exp2_fast(m - top);
  m = top;
  return f;
}

// Turns scores into weights and rescales the rows' sums of weights. The factor for O is left in f, since wgmma may
// still be writing O.
template <int FORMAT> DEV void softmax(float* s, Rows& r, float* f) {
  float m[2];
  UNROLL for (int row = 0; row < 2; row++) {
    f[row] = move_maximum(s, row, r.m[row], SLACK<FORMAT>);
    m[row] = r.m[row] == NEGATIVE_INFINITY ? 0 : r.m[row];       // no visible key so far: all weights become 0
  }
  UNROLL for (int row = 0; row < 2; row++) r.sum[row] = mul_rn(r.sum[row], f[row]);
  UNROLL for (int i = 0; i < 8; i++) {
    UNROLL for (int j = 0; j < 4; j++) s[4 * i + j] = exp2_fast(s[4 * i + j] - m[j / 2]);
    UNROLL for (int row = 0; row < 2; row++) r.sum[row] += s[4 * i + 2 * row] + s[4 * i + 2 * row + 1];
  }
}

DEV void rescale(Rows& r, const float* f) {
  if (wave_any(f[0] != 1 || f[1] != 1)) UNROLL for (int i = 0; i < 32; i++) r.o[i] *= f[i / 2 % 2];
}

// Packs weights as the A fragment of the next product.
template <int FORMAT> DEV void pack(const float* s, u32 (*p)[4]) {
  UNROLL for (int i = 0; i < 8; i++)
    UNROLL for (int row = 0; row < 2; row++)
      p[i / 2][i % 2 * 2 + row] = pack_weights<FORMAT>(s[4 * i + 2 * row], s[4 * i + 2 * row + 1]);
}

// ---- a warpgroup

template <int FORMAT> DEV void issue_scores(float* s, u32 queries, u32 tile) {
  UNROLL for (int k = 0; k < STEPS; k++)
    wgmma<FORMAT>(s, operand(queries) + k * STEP_ALONG_ROWS, operand(tile) + k * STEP_ALONG_ROWS, k > 0);
}
template <int FORMAT> DEV void issue_values(float* o, const u32 (*p)[4], u32 tile) {
  UNROLL for (int k = 0; k < STEPS; k++) wgmma<FORMAT>(o, p[k], operand(tile + HALF_TILE) + k * STEP_DOWN_ROWS);
}

template <int FORMAT> DEV void store_rows(const AttentionArgs& a, const Work& w, const Rows& r, int first_query) {
  const int head = w.kv_head * GROUP_HEADS + LANE / 4;
  const float sink = __ldg(a.sinks + head) * LOG2E;
  UNROLL for (int row = 0; row < 2; row++) {
    float sum = r.sum[row];
    sum += shfl_xor(sum, 1), sum += shfl_xor(sum, 2);
    const float f = normalizer(r.m[row], sum, sink);
    if (first_query + row >= w.rows) continue;
    UNROLL for (int i = 0; i < 8; i++) {
      const int k = head * HEAD_DIM + 8 * i + LANE % 4 * 2;
      *(u32*)(a.out + tiled_index(w.row + first_query + row, k, a.out_rows)) =
          pack_output<FORMAT>(r.o[4 * i + 2 * row] * f, r.o[4 * i + 2 * row + 1] * f);
    }
  }
}

template <int FORMAT>
DEV void compute(const AttentionArgs& a, const Work& w, Ring ring, int group, bool copying, Copies& copies) {
  const u32 queries = shared_address(DYNAMIC_SHARED) + group * (QUERY_BYTES / 2);
  const int first_query = group * GROUP_ROWS + TID / WAVE % 4 * 2;
  Rows r = {};
  UNROLL for (int row = 0; row < 2; row++) {
    const int position = w.position + min(first_query + row, w.rows - 1);
    r.m[row] = NEGATIVE_INFINITY;
    r.first[row] = first_visible_key(a, position), r.last[row] = position;
  }
  // The tiles that this warpgroup needs. It releases the tiles before them, which only the other one needs, unread.
  const int first = first_visible_key(a, w.position + group * GROUP_ROWS) / KV_PAGE;
  const int last = min(w.last, w.position + group * GROUP_ROWS + GROUP_ROWS - 1) / KV_PAGE;
  for (int page = w.first / KV_PAGE; page < first; page++, ring.advance()) {
    barrier_wait(ring.full(), ring.parity);
    if (LANE == 0) barrier_arrive(ring.empty());
  }

  float s[32];
  u32 p[STEPS][4];
  barrier_wait(ring.full(), ring.parity);
  pin(s);
  wgmma_fence();
  issue_scores<FORMAT>(s, queries, ring.tile());
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
    const u32 tile = ring.tile(), empty = ring.empty();
    ring.advance();
    barrier_wait(ring.full(), ring.parity);
    pin(s), pin(r.o);
    wgmma_fence();
    issue_scores<FORMAT>(s, queries, ring.tile());
    wgmma_commit();
    issue_values<FORMAT>(r.o, p, tile);
    wgmma_commit();
    // Goes into the stage of tile page - 3, which the other warpgroup has nearly always released by now.
    if (copying && copies.left() && copies.page <= page + STAGES - 3) copies.start();
    wgmma_wait<1>();
    weigh(page);
    wgmma_wait<0>();
    pin(r.o);
    if (LANE == 0) barrier_arrive(empty);
    __syncwarp();
    rescale(r, f);
    pack<FORMAT>(s, p);
  }
  pin(r.o);
  wgmma_fence();
  issue_values<FORMAT>(r.o, p, ring.tile());
  wgmma_commit();
  wgmma_wait<0>();
  pin(r.o);
  store_rows<FORMAT>(a, w, r, first_query);
}

template <int FORMAT> DEV void attend(const AttentionArgs& a) {
  const u32 base = shared_address(DYNAMIC_SHARED);
  const Ring ring = {base + QUERY_BYTES, base + QUERY_BYTES + STAGES * TILE_BYTES};
  let_successor_start();
  after_predecessor();
  if (BID / a.kv_heads >= a.step.header->prefill_tiles) return;
  const Work w = load_work(a);
  const int groups = w.rows > GROUP_ROWS ? 2 : 1;
  if (TID == 0) {
    for (Ring r = ring; r.parity == 0; r.advance()) {
      barrier_init(r.full(), 1);
      barrier_init(r.empty(), 4 * groups);                      // an arrival of each computing warp
    }
    barrier_init_done();
  }
  __syncwarp();
  const int warp = shfl(TID / WAVE, 0);                          // in a register the compiler knows to be uniform
  Copies copies = warp == 0 ? start_copies(a, w, ring) : Copies{a, w, ring};
  load_queries(a, w);
  barrier();
  if (warp / 4 >= groups) return;
  compute<FORMAT>(a, w, ring, warp / 4, warp == 0, copies);
}

KERNEL(attention_prefill_f16, AttentionArgs, THREADS, 2, 1) { attend<FORMAT_F16>(a); }
KERNEL(attention_prefill_bf16, AttentionArgs, THREADS, 2, 1) { attend<FORMAT_BF16>(a); }
