// attention_shared: the part of decode attention that several rows have in common, keys in pages that all of them see,
// read once for up to 16 rows: head_dim 64, 8 query heads per kv head, FP16 or BF16 cache. (For the idea see J.
// Juravsky et al., "Hydragen: High-Throughput LLM Inference with Shared Prefixes", 2024.)
//
// Work    An item (SharedItem in args.h) is a group or span of units of 128 keys, with up to 16 rows that see it. An
//         item times a kv head is one job; the kernel is persistent, and block b takes job b and every GRID-th one
//         after it. Each of two warpgroups has eight of the rows: 64 rows of scores, row 8 r + h being head h of row r.
// Copies  A warp of a third warpgroup brings the keys and values of the block's jobs in tiles of one page, a bulk copy
//         each, through a ring buffer that both warpgroups read. They were written before this step, so it waits for no
//         predecessor.
// MMA     wgmma m64n64k16: S = Q K^T with Q in registers, O += P V with P in registers and V transposed by its
//         descriptor. The scores of a unit's two tiles are in registers. Behind each tile's P V the S of the tile in
//         its place in the next unit is issued; both run while the other tile is exponentiated.
// Sums    To the bit those of ../mma/attention_decode.h, whose kernel is launched behind this one, sums the keys that
//         each row has alone, and folds the parts of both. A score is the same chain of products. A lane has the keys
//         of two residues modulo 8, and adds each one's weights as that kernel's lanes add theirs, two of 16 keys at a
//         time; then residues are added as its lanes are. All heads of a row move their maxima when one of them has to.
// Budget  A tile of eight rows takes the special function units 256 cycles of four warps, and the matrix cores as long.
//         Registers: 32 O, 64 S, 16 P, 16 Q, and 36 each for the sums of a group and a span; the warpgroup that copies
//         gives up the difference to its own 32.
#include "../attention_tree.h"
#include "attention.h"
#include "attention_products.h"

enum : int {
  GROUP_ROWS = 8,                        // rows per warpgroup
  GROUPS = ATTENTION_SHARED_PER_BLOCK / GROUP_ROWS,
  THREADS = ATTENTION_SHARED_THREADS,
  STAGES = ATTENTION_SHARED_SHARED_BYTES / (TILE_BYTES + 16),
  UNIT_PAGES = ATTENTION_UNIT / KV_PAGE,
  PIECE_DIMS = 16,                       // of a partial sum, for all heads
};
static_assert(THREADS == (GROUPS + 1) * 128, "warpgroups that compute, and one that copies");
static_assert(ATTENTION_SPAN * UNIT_PAGES <= WAVE, "a lane has the number of one page of an item");
static_assert(UNIT_PAGES == 2, "a unit's second tile is rescaled, its first one begins");
typedef RingPlace<STAGES> Tiles;

// ---- jobs

struct Job {
  SharedItem item;
  int kv_head;
  bool any;                              // false: there are no more jobs
};
DEV Job load_job(const AttentionArgs& a, int index, int jobs) {
  Job job = {};
  job.any = index < jobs;
  if (!job.any) return job;
  const int* item = (const int*)(a.step.shared_items + index / a.kv_heads);
  job.item = {__ldg(item), __ldg(item + 1), __ldg(item + 2), __ldg(item + 3), __ldg(item + 4)};
  job.kv_head = index % a.kv_heads;
  return job;
}

// A warp's two rows, and the A fragments of their queries: a lane has head lane / 4 of both.
struct Queries {
  int row[2], partial[2];                // row -1: none
  u32 v[K16S][4];
};
DEV Queries load_queries(const AttentionArgs& a, const Job& job, int warp) {
  Queries q = {};
  UNROLL for (int r = 0; r < 2; r++) {
    const int sharer = warp * 2 + r;
    q.row[r] = -1;
    if (!job.any || sharer >= job.item.sharers) continue;
    const int2 of = __ldg((const int2*)(a.step.sharers + job.item.first_sharer + sharer));
    q.row[r] = of.x, q.partial[r] = of.y + job.item.part;
    const i64 head = (i64)of.x * a.heads + job.kv_head * GROUP_HEADS + LANE / 4;
    const u32* from = (const u32*)a.q + head * (HEAD_DIM / 2) + LANE % 4;
    UNROLL for (int k = 0; k < K16S; k++)
      q.v[k][r] = __ldg(from + 8 * k), q.v[k][2 + r] = __ldg(from + 8 * k + 4);
  }
  return q;
}

// ---- the warp that copies

DEV void copy_jobs(const AttentionArgs& a, Tiles ring, int jobs) {
  const u64 policy = evict_normal();     // other blocks read these pages for other rows
  for (int index = BID; index < jobs; index += GRID) {
    const Job job = load_job(a, index, jobs);
    const int number = LANE < job.item.pages ? __ldg(a.step.tables + job.item.table + LANE) : 0;
    for (int page = 0; page < job.item.pages; page++, ring.advance()) {
      const u8* from = a.kv + (i64)shfl(number, page) * a.page_bytes + (i64)job.kv_head * a.head_bytes;
      ring.wait_empty();
      if (LANE == 0)
        copy_tile(shared_address(DYNAMIC_SHARED) + ring.place * TILE_BYTES, from, 0, KV_PAGE - 1, ring.full(), policy);
      __syncwarp();
    }
  }
}

// ---- a warpgroup

// A lane's sums of its two rows; element 4 i + 2 r + e of o is row r and dim 8 i + 2 (lane % 4) + e.
struct Sums { float o[32], m[2], sum[2]; };

// a += b, both rescaled to the larger maximum, as in ../mma/attention_decode.h.
DEV void fold(Sums& a, const Sums& b) {
  float fa[2], fb[2];
  UNROLL for (int r = 0; r < 2; r++) {
    const float m = max_of(a.m[r], b.m[r]);
    fa[r] = exp2_fast(a.m[r] - m), fb[r] = exp2_fast(b.m[r] - m);
    a.m[r] = m, a.sum[r] = fma_rn(a.sum[r], fa[r], mul_rn(b.sum[r], fb[r]));
  }
  UNROLL for (int i = 0; i < 32; i++) a.o[i] = fma_rn(a.o[i], fa[i / 2 % 2], mul_rn(b.o[i], fb[i / 2 % 2]));
}

// A unit's maxima and sums of weights, so far: of row r and keys 2 (lane % 4) + e modulo 8.
struct Weights { float m[2], sum[2][2]; };
DEV Weights no_weights() { return {{NEGATIVE_INFINITY, NEGATIVE_INFINITY}, {}}; }

// Turns scores into weights, and adds them. What O is to be rescaled by is left in f, since wgmma may still write O.
template <int FORMAT> DEV void weigh(float* s, Weights& w, float* f) {
  UNROLL for (int r = 0; r < 2; r++) {
    float top = max_of(s[2 * r], s[2 * r + 1]);
    UNROLL for (int i = 1; i < 8; i++) top = max_of(top, max_of(s[4 * i + 2 * r], s[4 * i + 2 * r + 1]));
    f[r] = 1;
    if (!wave_any(top > w.m[r] + SLACK<FORMAT>)) continue;
    top = max_of(top, shfl_xor(top, 1)), top = max_of(top, shfl_xor(top, 2));
    const float m = max_of(w.m[r], top);
    f[r] = exp2_fast(w.m[r] - m);
    w.m[r] = m;
    UNROLL for (int e = 0; e < 2; e++) w.sum[r][e] = mul_rn(w.sum[r][e], f[r]);
  }
  UNROLL for (int i = 0; i < 32; i++) s[i] = exp2_fast(s[i] - w.m[i / 2 % 2]);
  UNROLL for (int b = 0; b < KV_PAGE / 16; b++)
    UNROLL for (int r = 0; r < 2; r++)
      UNROLL for (int e = 0; e < 2; e++) w.sum[r][e] += s[8 * b + 2 * r + e] + s[8 * b + 4 + 2 * r + e];
}

// Adds a unit, number `unit` of the item, to its group, and a group that ends with it to its span.
DEV void end_unit(const float* o, const Weights& w, int unit, Sums& group, Sums& span) {
  Sums u;
  UNROLL for (int i = 0; i < 32; i++) u.o[i] = o[i];
  UNROLL for (int r = 0; r < 2; r++) {
    float sum = w.sum[r][0] + w.sum[r][1];
    sum += shfl_xor(sum, 1), sum += shfl_xor(sum, 2);
    u.m[r] = w.m[r], u.sum[r] = sum;
  }
  if (begins(unit, 0, 1, ATTENTION_GROUP)) group = u;
  else fold(group, u);
  if (!ends(unit, ATTENTION_GROUP, false)) return;
  if (begins(unit, 0, ATTENTION_GROUP, ATTENTION_SPAN)) span = group;
  else fold(span, group);
}

// Stores a row's sum as ../mma/attention_decode.h has partial sums: for each 16 dims and each lane there, of heads 2
// (lane % 4) and the next, dim lane / 4 and the one 8 behind it; then maxima and sums. Lanes of two heads exchange what
// makes both's 16 bytes.
DEV void store_part(float* to, const Sums& s, int r) {
  const bool odd = LANE / 4 % 2;
  UNROLL for (int i = 0; i < HEAD_DIM / PIECE_DIMS; i++) {
    float kept[2], got[2];
    UNROLL for (int j = 0; j < 2; j++) {
      const float* v = s.o + 4 * (2 * i + j) + 2 * r;
      kept[j] = odd ? v[1] : v[0], got[j] = shfl_xor(odd ? v[0] : v[1], 4);
    }
    const int lane = (LANE % 4 * 2 + odd) * 4 + LANE / 8;
    __stcg((float4*)to + i * WAVE + lane, odd ? make_float4(got[0], kept[0], got[1], kept[1])
                                              : make_float4(kept[0], got[0], kept[1], got[1]));
  }
  if (LANE % 4) return;
  float* last = to + GROUP_HEADS * HEAD_DIM + LANE / 8 * 4 + odd;
  __stcg(last, s.m[r]), __stcg(last + 2, s.sum[r]);
}

// Stores the rows' parts, and counts them: with the rows' last items the kernel behind this one folds all.
DEV void store_parts(const AttentionArgs& a, const Job& job, const Queries& q, const Sums& s) {
  UNROLL for (int r = 0; r < 2; r++) {
    if (q.row[r] < 0) continue;
    store_part(a.partials + ((i64)q.partial[r] * a.kv_heads + job.kv_head) * PARTIAL_FLOATS, s, r);
    if (LANE == 0) atomic_add(a.arrived + (i64)q.row[r] * a.kv_heads + job.kv_head, 1);
  }
}

template <int FORMAT> DEV void issue_scores(float* s, const Queries& q, u32 tile) {
  UNROLL for (int k = 0; k < K16S; k++)
    Wgmma<FORMAT, KV_PAGE>::a16(s, q.v[k], operand(tile) + k * K16_ALONG_ROWS, k > 0);
}

// A warpgroup's place in the ring buffer, and that of the tile whose scores are issued next.
struct Reader {
  Tiles ring, ahead;
  int tiles;                             // the job's whose scores have not been issued
  u32 base = shared_address(DYNAMIC_SHARED);

  // Behind the job's last tile any scores.
  template <int FORMAT> DEV void issue_next_scores(float* s, const Queries& q) {
    const bool is_there = tiles-- > 0;
    if (is_there) ahead.wait_full();
    pin(s);
    wgmma_fence();
    issue_scores<FORMAT>(s, q, base + ahead.place * TILE_BYTES);
    if (is_there) ahead.advance();
  }
  // O += P V, and behind it the scores of the tile after the next.
  template <int FORMAT> DEV void issue(float* o, const u32 (*p)[4], float* s, const Queries& q) {
    pin(o);
    wgmma_fence();
    issue_values<FORMAT>(o, p, base + ring.place * TILE_BYTES);
    issue_next_scores<FORMAT>(s, q);
    wgmma_commit();
  }
  DEV void wait(float* o) {
    wgmma_wait<0>();
    pin(o);
    ring.release();
    ring.advance();
  }
};

template <int FORMAT>
DEV void compute(const AttentionArgs& a, const Job& job, const Queries& q, Tiles& ring, int warp) {
  if (warp / 4 * GROUP_ROWS >= job.item.sharers) {               // tiles that only the other warpgroup needs
    for (int page = 0; page < job.item.pages; page++, ring.advance()) {
      ring.wait_full();
      __syncwarp();
      ring.release();
    }
    return;
  }
  float s[UNIT_PAGES][32], f[2];
  u32 p[K16S][4];
  Sums group, span;
  Reader reader = {ring, ring, job.item.pages};
  UNROLL for (int i = 0; i < UNIT_PAGES; i++) reader.issue_next_scores<FORMAT>(s[i], q);
  wgmma_commit();
  wgmma_wait<0>();
  for (int unit = 0; unit < job.item.pages / UNIT_PAGES; unit++) {
    float o[32] = {};
    Weights w = no_weights();
    pin(s[0]);
    weigh<FORMAT>(s[0], w, f);                                   // O is empty: nothing to rescale
    pack<FORMAT>(s[0], p);
    reader.issue<FORMAT>(o, p, s[0], q);
    pin(s[1]);
    weigh<FORMAT>(s[1], w, f);
    reader.wait(o);
    UNROLL for (int i = 0; i < 32; i++) o[i] *= f[i / 2 % 2];
    pack<FORMAT>(s[1], p);
    reader.issue<FORMAT>(o, p, s[1], q);
    reader.wait(o);                                              // ptxas wants none under way at a loop's end
    end_unit(o, w, unit, group, span);
  }
  ring = reader.ring;
  store_parts(a, job, q, span);
}

template <int FORMAT> DEV void compute_jobs(const AttentionArgs& a, Tiles ring, int jobs, int warp) {
  Job job = load_job(a, BID, jobs), next = load_job(a, BID + GRID, jobs);
  Queries q = load_queries(a, job, warp);
  for (int index = BID; job.any; index += GRID) {
    compute<FORMAT>(a, job, q, ring, warp);
    job = next, next = load_job(a, index + 2 * GRID, jobs);
    q = load_queries(a, job, warp);
  }
}

template <int FORMAT> DEV void attend(const AttentionArgs& a) {
  const Tiles ring = {shared_address(DYNAMIC_SHARED) + STAGES * TILE_BYTES};
  let_successor_start();
  if (TID == 0) {
    for (Tiles r = ring; r.parity == 0; r.advance()) barrier_init(r.full(), 1), barrier_init(r.empty(), 4 * GROUPS);
    barrier_init_done();
  }
  barrier();
  const int jobs = load_fresh(&a.step.header->shared_items) * a.kv_heads;
  const int warp = shfl(TID / WAVE, 0);                          // in a register the compiler knows to be uniform
  if (warp / 4 < GROUPS) {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    after_predecessor();
    compute_jobs<FORMAT>(a, ring, jobs, warp);
  } else {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 32;");
    if (warp == 4 * GROUPS) copy_jobs(a, ring, jobs);            // the plan was there before, see early.h
  }
}

KERNEL(attention_shared_f16, AttentionArgs, THREADS, 1, 1) { attend<FORMAT_F16>(a); }
KERNEL(attention_shared_bf16, AttentionArgs, THREADS, 1, 1) { attend<FORMAT_BF16>(a); }
