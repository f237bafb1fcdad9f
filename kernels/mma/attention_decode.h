// attention_decode: split-KV attention of decoding rows: head_dim 64, 8 query heads per kv head (GQA), FP16
// or BF16 cache. Memory-bound: every key and value is read once, and the structure serves to keep enough reads in
// flight.
//
// Work    The host lists work items (AttentionItem in args.h), longest first: a row and a run of its units of 128 keys.
//         An item times a kv head is one job. The kernel is persistent: warp w of block b takes job w * GRID + b and
//         every (GRID * WARPS)-th one after it. A warp works alone, with its own ring buffer of tiles, whose copies
//         run ahead across jobs. Warps of a block never wait for each other. (On Hopper long rows may come whole, and
//         a block's warps share them out instead: attention_by_blocks.h there.)
// MMA     mma.sync m16n8k16 with 16 keys on M and the group's 8 heads on N, so nothing is padding: S = K q, then O =
//         V^T P. K lies in memory as the first product's A operand; a transposing ldmatrix makes V^T the second's; S
//         becomes P, the second's B operand, by a transposition in registers (movmatrix).
// Sums    Each unit of 128 keys is summed on its own, and the units' sums are folded as attention_tree.h says, with the
//         same arithmetic wherever it happens. If one item has the whole row, a warp or team folds all. Otherwise each
//         item stores the sum of its unit, group or span in `partials`, and the row's last item to finish folds them,
//         one after the other: a row of 131,072 keys has 64. So a row's bits depend on its own keys alone.
// Team    With the fewest rows latency is the limit, and there are fewer jobs than warps. TEAM warps then take a job
//         together and share its units out; each brings its units' sums to shared memory, and all fold them, each
//         warp its part of the dims. A row's partial sums come to shared memory, too: as many at once as a warp's ring
//         buffer has room for, if the row's last team has no other job, or else a few. `team` has teams of four warps;
//         `pair` has two warps, as many as there are units in most windows, and more blocks fit on a multiprocessor.
//         A block may have several teams: one computes while another waits for a job's sums to be stored and folded.
// Early   Of a row's pages this step writes only the last one. The copies of the others do not wait for the
//         predecessor.
// Kernels  Each has a ring buffer (Config::Ring) and numbers of warps and tiles of its own: see the families'
//         attention_decode.hip.
#pragma once
#include "../attention_tree.h"
#include "../gpu/early.h"
#include "async_copy.h"
#include "attention.h"
#include "registers.h"
#include "warp.h"

// A block has WARPS warps, and TILES tiles for their ring buffers; TEAM warps take a job together. Ring: a warp's ring
// buffer, the family's own.
template <int FORMAT_, int TILES_, int WARPS_, int TEAM_, template <int, int> class Ring_> struct Config {
  using Ring = Ring_<TILES_, WARPS_>;
  static constexpr int FORMAT = FORMAT_, TILES = TILES_, WARPS = WARPS_, TEAM = TEAM_, TEAMS = WARPS / TEAM;
  static constexpr bool TOGETHER = TEAM > 1;
  static_assert(WARPS % TEAM == 0 && TILES >= WARPS, "whole teams, and a tile for each warp");
};
// The number of a warp's team, and the warp's own in it.
template <class C> DEV int team_of() { return C::TEAMS > 1 ? TID / (C::TEAM * WAVE) : 0; }
template <class C> DEV int warp_of() { return TID / WAVE - team_of<C>() * C::TEAM; }

// What a warp's ring buffer has of the block's tiles: `stages`, from tile `first` on.
struct Tiles { int first, stages; };

enum : int {
  BLOCKS = KV_PAGE / 16,                 // blocks of 16 keys in a tile, and of 16 dims in a row
  UNIT_PAGES = ATTENTION_UNIT / KV_PAGE,
};
static_assert(ITEM_PAGES <= WAVE, "a lane has the number of one page of an item");
static_assert(PARTIAL_FLOATS == GROUP_HEADS * (HEAD_DIM + 2), "values, maxima and sums");

// ---- one job

// The same in all lanes of the warp, except for `page`.
struct Job {
  int index;                             // of the job; its kv head is index % kv_heads
  int row;
  int first, last;                       // the job's keys, by absolute position
  int row_first, row_last;               // keys that the row sees
  int row_items, run, partial;           // see AttentionItem
  int page;                              // number of page first / KV_PAGE + LANE of the sequence
  bool any;                              // false: there are no more jobs
};

// Chunks of one row come first: number `row`.
DEV const ChunkInfo& chunk_of(const AttentionArgs& a, const Job& job) { return a.step.chunks[job.row]; }
DEV void load_page(const AttentionArgs& a, const ChunkInfo& chunk, Job& job) {
  const int page = job.first / KV_PAGE + LANE;
  if (page <= job.last / KV_PAGE) job.page = page_number(page_table(a, chunk), page);
}
template <bool WITH_PAGE = true> DEV Job load_job(const AttentionArgs& a, int index, int jobs) {
  Job job = {};
  job.index = index, job.any = index < jobs;
  if (!job.any) return job;
  const AttentionItem* items = a.windowed ? a.step.window_items : a.step.full_items;
  const int4 head = __ldg((const int4*)(items + index / a.kv_heads));
  const int2 tail = __ldg((const int2*)(items + index / a.kv_heads) + 2);
  job.row = head.x, job.row_items = head.w, job.partial = tail.x, job.run = tail.y;
  const ChunkInfo& chunk = chunk_of(a, job);
  job.row_last = __ldg(&chunk.first_position);
  job.row_first = first_visible_key(a, job.row_last);
  job.first = max(job.row_first, head.y * ATTENTION_UNIT), job.last = job.first + head.z - 1;
  if (WITH_PAGE) load_page(a, chunk, job);
  return job;
}

// A lane's B fragments of q: dims 16 i + 2 (lane % 4) + {0, 1, 8, 9} of head lane / 4.
struct Query { u32 v[2 * BLOCKS]; };
DEV Query load_query(const AttentionArgs& a, const Job& job) {
  Query q = {};
  if (!job.any) return q;
  const i64 head = (i64)job.row * a.heads + job.index % a.kv_heads * GROUP_HEADS + LANE / 4;
  const u32* from = (const u32*)a.q + head * (HEAD_DIM / 2) + LANE % 4;
  UNROLL for (int i = 0; i < 2 * BLOCKS; i++) q.v[i] = __ldg(from + 4 * i);
  return q;
}

// A page's keys and values, by its number.
DEV const u8* tile_of(const AttentionArgs& a, const Job& job, int number) {
  return a.kv + (i64)number * a.page_bytes + (i64)(job.index % a.kv_heads) * a.head_bytes;
}

// ---- a warp's copies, which run ahead of its arithmetic

// The first of a job's pages that a warp takes, and the next one after a page. They may be beyond the job's.
template <class C> DEV int first_page(const Job& job) {
  const int page = job.first / KV_PAGE;
  const int warp = warp_of<C>();
  return warp > 0 ? (job.first / ATTENTION_UNIT + warp) * UNIT_PAGES : page;
}
template <class C> DEV int page_after(int page) {
  page++;
  return page % UNIT_PAGES == 0 ? page + (C::TEAM - 1) * UNIT_PAGES : page;
}

// Every so many-th job.
struct Strided {
  using Job = ::Job;
  const AttentionArgs& a;
  int jobs, stride;

  DEV Job at(int index) const { return load_job(a, index, jobs); }
  DEV Job after(const Job& job) const { return at(job.index + stride); }
};

// Jobs_: which job comes after another.
template <class C, class Jobs_> struct Copies {
  using Config = C;
  using Jobs = Jobs_;
  using Job = typename Jobs::Job;
  const AttentionArgs& a;
  typename C::Ring ring;
  Jobs jobs;
  Job job, next;
  int page;                              // the job's next page to be copied

  // Goes on to the next job where this one has no more pages.
  DEV void advance() {
    while (job.any && page > job.last / KV_PAGE) {
      job = next, page = first_page<C>(job);
      next = jobs.after(job);
    }
  }
  // Only the page of a row's newest key is written by this step.
  DEV bool old() const { return job.any && page < job.row_last / KV_PAGE; }
  DEV void start(int stage) {
    if (!job.any) return ring.copy_nothing();
    const int number = shfl(job.page, page - job.first / KV_PAGE);
    ring.copy(a, job, page, number, stage);
    page = page_after<C>(page);
    advance();
  }
};

// ---- tiles

// Offsets of a lane's ldmatrix rows within a tile, for each 16 dims; those of the next 16 keys are 16 rows further on.
struct Offsets { u32 k[BLOCKS], v[BLOCKS]; };
DEV Offsets offsets() {
  Offsets o;
  UNROLL for (int i = 0; i < BLOCKS; i++) {
    o.k[i] = LANE % 16 * KEY_BYTES + ((2 * i + LANE / 16) ^ LANE % 8) * 16;
    o.v[i] = HALF_TILE + (LANE % 8 + LANE / 16 * 8) * KEY_BYTES + ((2 * i + LANE / 8 % 2) ^ LANE % 8) * 16;
  }
  return o;
}

// Running sums of the online softmax. A lane has heads h = 2 (lane % 4) and h + 1. Of their output it has dims 16 i +
// lane / 4 (o[i][0] for head h, o[i][1] for h + 1) and 16 i + lane / 4 + 8 (o[i][2] and o[i][3]). Of what a team folds
// each warp has COUNT blocks of 16 dims.
template <int COUNT> struct alignas(16) Sums { float o[COUNT][4], m[2], sum[2]; };
typedef Sums<BLOCKS> State;

DEV State nothing() {
  State s = {};
  s.m[0] = s.m[1] = NEGATIVE_INFINITY;
  return s;
}

// a += b, both rescaled to the larger maximum. Each has at least one key, so no maximum is -inf.
template <int COUNT> DEV void fold(Sums<COUNT>& a, const Sums<COUNT>& b) {
  float fa[2], fb[2];
  UNROLL for (int h = 0; h < 2; h++) {
    const float m = max_of(a.m[h], b.m[h]);
    fa[h] = exp2_fast(a.m[h] - m), fb[h] = exp2_fast(b.m[h] - m);
    a.m[h] = m, a.sum[h] = fma_rn(a.sum[h], fa[h], mul_rn(b.sum[h], fb[h]));
  }
  UNROLL for (int i = 0; i < COUNT; i++)
    UNROLL for (int j = 0; j < 4; j++) a.o[i][j] = fma_rn(a.o[i][j], fa[j % 2], mul_rn(b.o[i][j], fb[j % 2]));
}

DEV float max_over_keys(float v) { UNROLL for (int o = 4; o < 32; o *= 2) v = max_of(v, shfl_xor(v, o)); return v; }
DEV float sum_over_keys(float v) { UNROLL for (int o = 4; o < 32; o *= 2) v += shfl_xor(v, o); return v; }

// A tile in registers. Scores s[b][0] and s[b][1] are heads h and h + 1 of key 16 b + lane / 4; s[b][2] and s[b][3] are
// those of key 16 b + lane / 4 + 8. v holds A fragments of V^T.
struct Tile { float s[BLOCKS][4]; u32 v[BLOCKS][BLOCKS][4]; };

template <int FORMAT> DEV void read_tile(Tile& t, u32 at, const Offsets& o, const Query& q) {
  UNROLL for (int b = 0; b < BLOCKS; b++) {
    t.s[b][0] = t.s[b][1] = t.s[b][2] = t.s[b][3] = 0;
    UNROLL for (int i = 0; i < BLOCKS; i++) {
      u32 k[4];
      load_matrices(k, at + o.k[i] + b * 16 * KEY_BYTES);
      mma<FORMAT>(t.s[b], k, q.v[2 * i], q.v[2 * i + 1]);
    }
  }
  UNROLL for (int b = 0; b < BLOCKS; b++)
    UNROLL for (int i = 0; i < BLOCKS; i++) load_transposed(t.v[b][i], at + o.v[i] + b * 16 * KEY_BYTES);
}

// Masks the tile's keys outside first .. last: their scores become -inf. Their values become 0, since the stage may
// hold anything there and 0 times NaN is NaN.
DEV void mask_tile(Tile& t, int first, int last) {
  UNROLL for (int b = 0; b < BLOCKS; b++) UNROLL for (int half = 0; half < 2; half++) {
    const int score_key = 16 * b + 8 * half + LANE / 4, value_key = 16 * b + 8 * half + LANE % 4 * 2;
    if (score_key < first || score_key > last) t.s[b][2 * half] = t.s[b][2 * half + 1] = NEGATIVE_INFINITY;
    const u32 keep = (value_key >= first && value_key <= last ? 0xffffu : 0) |
                     (value_key + 1 >= first && value_key + 1 <= last ? 0xffff0000u : 0);
    UNROLL for (int i = 0; i < BLOCKS; i++) t.v[b][i][2 * half] &= keep, t.v[b][i][2 * half + 1] &= keep;
  }
}

// Raises the running maxima where a tile's scores exceed them by more than SLACK.
template <int FORMAT> DEV void raise(State& u, const float (&s)[BLOCKS][4]) {
  float top[2];
  UNROLL for (int h = 0; h < 2; h++) {
    top[h] = max_of(s[0][h], s[0][2 + h]);
    UNROLL for (int b = 1; b < BLOCKS; b++) top[h] = max_of(top[h], max_of(s[b][h], s[b][2 + h]));
  }
  if (wave_any(top[0] > u.m[0] + SLACK<FORMAT> || top[1] > u.m[1] + SLACK<FORMAT>)) {
    UNROLL for (int h = 0; h < 2; h++) {
      const float m = max_of(u.m[h], max_over_keys(top[h])), f = exp2_fast(u.m[h] - m);
      u.m[h] = m, u.sum[h] *= f;
      UNROLL for (int i = 0; i < BLOCKS; i++) u.o[i][h] *= f, u.o[i][2 + h] *= f;
    }
  }
}

template <int FORMAT> DEV void add_tile(State& u, const Tile& t) {
  raise<FORMAT>(u, t.s);
  UNROLL for (int b = 0; b < BLOCKS; b++) {
    float w[4];
    UNROLL for (int j = 0; j < 4; j++) w[j] = exp2_fast(t.s[b][j] - u.m[j % 2]);
    u.sum[0] += w[0] + w[2], u.sum[1] += w[1] + w[3];
    const u32 p0 = transpose8(pack_weights<FORMAT>(w[0], w[1])), p1 = transpose8(pack_weights<FORMAT>(w[2], w[3]));
    UNROLL for (int i = 0; i < BLOCKS; i++) mma<FORMAT>(u.o[i], t.v[b][i], p0, p1);
  }
}

// ---- partial sums of a row

// Partial sum `n` of the job's row: o of every lane, then m and sum of lanes 0 to 3, which have all 8 heads.
DEV float* partial_of(const AttentionArgs& a, const Job& job, int n) {
  return a.partials + ((i64)(job.partial + n) * a.kv_heads + job.index % a.kv_heads) * PARTIAL_FLOATS;
}
// Of blocks `block` .. of a row's dims. GLOBAL: in global memory, which other blocks read and write.
template <bool GLOBAL, int COUNT> DEV void store_partial(float* to, const Sums<COUNT>& s, int block) {
  const auto store = [&](int i, float4 v) {
    if (GLOBAL) __stcg((float4*)to + i, v);
    else ((float4*)to)[i] = v;
  };
  UNROLL for (int i = 0; i < COUNT; i++)
    store((block + i) * 32 + LANE, make_float4(s.o[i][0], s.o[i][1], s.o[i][2], s.o[i][3]));
  if (block == 0 && LANE < 4) store(BLOCKS * 32 + LANE, make_float4(s.m[0], s.m[1], s.sum[0], s.sum[1]));
}
// The same of a partial sum that has so many blocks.
template <bool GLOBAL, int COUNT>
DEV void load_partial(Sums<COUNT>& s, const float* from, int block, int blocks = BLOCKS) {
  const auto load = [&](int i) { return GLOBAL ? __ldcg((const float4*)from + i) : ((const float4*)from)[i]; };
  UNROLL for (int i = 0; i < COUNT; i++) *(float4*)s.o[i] = load((block + i) * 32 + LANE);
  *(float4*)s.m = load(blocks * 32 + LANE % 4);
}

// Counts the jobs of a row and kv head that have stored their partial sums. True for the last one, which then sees the
// partial sums of all. Called by one warp.
DEV bool arrive_last(const AttentionArgs& a, const Job& job) {
  int before = 0;
  int* count = a.arrived + (i64)job.row * a.kv_heads + job.index % a.kv_heads;
  __syncwarp();
  if (LANE == 0) {
    asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], 1;" : "=r"(before) : "l"(count) : "memory");
    if (before == job.row_items - 1) *count = 0;
  }
  __syncwarp();
  return shfl(before, 0) == job.row_items - 1;
}

// Folds all partial sums of a row, of blocks `block` .. of its dims. AHEAD partial sums are loaded at once, so that the
// latency of memory is paid less often; with more there are not enough registers, or the code takes long to be fetched.
template <int COUNT>
DEV void fold_partials(const AttentionArgs& a, const Job& job, Tree<Sums<COUNT>>& tree, int block) {
  constexpr int AHEAD = COUNT == BLOCKS ? 2 : 4;
  const int last = job.row_last / ATTENTION_UNIT;
  tree.first = job.row_first / ATTENTION_UNIT;
  for (int n = 0; n < job.row_items; n += AHEAD) {
    Sums<COUNT> s[AHEAD];
    UNROLL for (int i = 0; i < AHEAD; i++)
      load_partial<true>(s[i], partial_of(a, job, min(n + i, job.row_items - 1)), block);
    UNROLL for (int i = 0; i < AHEAD; i++) if (n + i < job.row_items) {
      const int unit = last_of_part(n + i, tree.first, last, job.run);
      tree.add(s[i], unit, job.run, unit == last);
    }
  }
}

// What a warp copies of a partial sum, for lanes that have COUNT blocks of 16 dims each: these, maxima and sums.
template <int COUNT> constexpr int STAGED_FLOATS = COUNT * 128 + 16;

// The same as fold_partials() by way of shared memory, `room` for `most` partial sums at a time.
template <int COUNT>
DEV void fold_staged(const AttentionArgs& a, const Job& job, Tree<Sums<COUNT>>& tree, int block, float* room,
                     int most) {
  constexpr int FLOATS = STAGED_FLOATS<COUNT>;
  const auto load = [&](Sums<COUNT>& s, int i) { load_partial<false>(s, room + i * FLOATS, 0, COUNT); };
  const int last = job.row_last / ATTENTION_UNIT;
  tree.first = job.row_first / ATTENTION_UNIT;
  for (int begin = 0; begin < job.row_items; begin += most) {
    const int count = min(most, job.row_items - begin);
    __syncwarp();                                                // all lanes have read what was there
    const float* from = partial_of(a, job, begin) + LANE * 4;
    u32 to = shared_address(room) + LANE * 16;
#pragma unroll 4
    for (int i = 0; i < count; i++, from += a.kv_heads * PARTIAL_FLOATS, to += FLOATS * 4) {
      UNROLL for (int j = 0; j < COUNT; j++) copy16(to + j * 512, from + (block + j) * 128);
      if (LANE < 4) copy16(to + COUNT * 512, from + BLOCKS * 128);
    }
    commit_copies();
    wait_copies<0>();
    __syncwarp();
    const int first_run = tree.first / job.run + begin;          // runs are numbered by position
    const auto last_unit = [&](int i) { return last_of_part(begin + i, tree.first, last, job.run); };
    for (int n = 0; n < count;) {
      if (n + 4 <= count && (job.run == ATTENTION_SPAN || (first_run + n) % 4 == 0)) {
        Sums<COUNT> s[4];
        UNROLL for (int i = 0; i < 4; i++) load(s[i], n + i);
        n += 4;
        const int unit = last_unit(n - 1);
        tree.add_four(s, unit, job.run, unit == last);
      } else {
        Sums<COUNT> s;
        load(s, n++);
        const int unit = last_unit(n - 1);
        tree.add(s, unit, job.run, unit == last);
      }
    }
  }
}

// A lane's sinks: of heads 2 (lane % 4) and the next.
DEV float2 load_sinks(const AttentionArgs& a, const Job& job) {
  return __ldg((const float2*)(a.sinks + job.index % a.kv_heads * GROUP_HEADS) + LANE % 4);
}

// Stores blocks `block` .. of a row's dims.
template <int FORMAT, int COUNT>
DEV void store_row(const AttentionArgs& a, const Job& job, const Sums<COUNT>& s, float2 sinks, int block) {
  const float f[2] = {normalizer(s.m[0], s.sum[0], sinks.x * LOG2E), normalizer(s.m[1], s.sum[1], sinks.y * LOG2E)};
  // of what transpose8() gives this lane
  const int k = (job.index % a.kv_heads * GROUP_HEADS + LANE / 4) * HEAD_DIM + block * 16 + LANE % 4 * 2;
  UNROLL for (int i = 0; i < COUNT; i++) UNROLL for (int half = 0; half < 2; half++) {
    const u32 v = transpose8(pack_output<FORMAT>(s.o[i][2 * half] * f[0], s.o[i][2 * half + 1] * f[1]));
    hand_on((u32*)(a.out + tiled_index(job.row, k + 16 * i + 8 * half, a.out_rows)), v);
  }
}

// ---- the kernel

// A warp's side of the copies: where the next tile comes, and how it is added to a unit's sums.
template <class Copies> struct Reader {
  Copies& copies;
  const Offsets at = offsets();
  int stage = 0;
  u32 parity = 0;

  DEV void add_page(State& unit, const Job& job, int page, const Query& q) {
    Tile tile;
    copies.ring.wait(stage, parity);
    read_tile<Copies::Config::FORMAT>(tile, copies.ring.base + stage * TILE_BYTES, at, q);
    __syncwarp();
    copies.start(stage);                                         // the tile is in registers: its stage is free
    if (++stage == copies.ring.stages) stage = 0, parity ^= 1;
    const int first = job.first - page * KV_PAGE, last = job.last - page * KV_PAGE;
    if (first > 0 || last < KV_PAGE - 1) mask_tile(tile, first, last);
    add_tile<Copies::Config::FORMAT>(unit, tile);
  }
};

DEV void sum_lanes(State& unit) { UNROLL for (int h = 0; h < 2; h++) unit.sum[h] = sum_over_keys(unit.sum[h]); }

// Stores the sum of a part of a row.
template <int COUNT> DEV void store_part(const AttentionArgs& a, const Job& job, const Sums<COUNT>& s, int block) {
  const int part = part_of(job.first / ATTENTION_UNIT, job.row_first / ATTENTION_UNIT, job.run);
  store_partial<true>(partial_of(a, job, part), s, block);
}

// What a warp keeps in shared memory, for which there are not enough registers.
DEV void fold_kept(State& s, const float* kept) {
  State before;
  load_partial<false>(before, kept, 0);
  fold(before, s);
  s = before;
}
DEV void keep(float* to, const State& s) {
  __syncwarp();                                                  // all lanes have read what was kept
  store_partial<false>(to, s, 0);
  __syncwarp();
}

// What one warp does with the sum of a job's keys.
template <int FORMAT> DEV void finish_alone(const AttentionArgs& a, const Job& job, State sum) {
  if (job.row_items > 1) {
    store_part(a, job, sum, 0);
    if (!arrive_last(a, job)) return;
    Tree<State> tree;
    fold_partials(a, job, tree, 0);
    sum = tree.total;
  }
  store_row<FORMAT>(a, job, sum, load_sinks(a, job), 0);
}

// A job of one warp. `span`: room for two sums, which add_unit() keeps.
template <class Reader> DEV State attend_alone(const Job& job, const Query& q, Reader& reader, float* span) {
  const int first = job.first / ATTENTION_UNIT, last = job.last / KV_PAGE;
  State u = nothing(), sum;
  for (int page = job.first / KV_PAGE; page <= last; page++) {
    reader.add_page(u, job, page, q);
    if (page < last && (page + 1) % UNIT_PAGES) continue;
    sum_lanes(u);
    add_unit(sum, u, page / UNIT_PAGES, first, page == last, span, span + PARTIAL_FLOATS);
    u = nothing();
  }
  return sum;
}

// A job of a team. Its units come in rounds of one a warp, whose sums go through shared memory: `sums` has room for two
// rounds of each of its warps, and `round` is the one to be used next. `more`: whether the team has another job, whose
// tiles are on their way into the ring buffers.
template <class C, class Reader>
DEV void attend_together(const AttentionArgs& a, const Job& job, const Query& q, Reader& reader, float* sums,
                         int& round, bool more) {
  constexpr int COUNT = BLOCKS / C::TEAM, THREADS = C::TEAM * WAVE;  // COUNT blocks of 16 dims a warp folds
  const int team = team_of<C>(), warp = warp_of<C>();
  const int block = warp * COUNT, last = job.last / ATTENTION_UNIT;
  const float2 sinks = load_sinks(a, job);
  Tree<Sums<COUNT>> tree;
  tree.first = job.first / ATTENTION_UNIT;
  for (int base = tree.first; base <= last; base += C::TEAM, round ^= 1) {
    const auto sum_of = [&](int warp) { return sums + (2 * warp + round) * PARTIAL_FLOATS; };
    const int mine = base + warp;
    if (mine <= last) {
      State u = nothing();
      const int end = min(job.last / KV_PAGE, mine * UNIT_PAGES + UNIT_PAGES - 1);
      for (int page = max(job.first / KV_PAGE, mine * UNIT_PAGES); page <= end; page++)
        reader.add_page(u, job, page, q);
      sum_lanes(u);
      store_partial<false>(sum_of(warp), u, 0);
    }
    meet(team, THREADS);
    if (C::TEAM == ATTENTION_GROUP && base % ATTENTION_GROUP == 0 && base + ATTENTION_GROUP - 1 <= last) {
      Sums<COUNT> u[ATTENTION_GROUP];
      UNROLL for (int i = 0; i < ATTENTION_GROUP; i++) load_partial<false>(u[i], sum_of(i), block);
      const int unit = base + ATTENTION_GROUP - 1;
      tree.add_four(u, unit, 1, unit == last);
    } else {
      for (int unit = base; unit < base + C::TEAM && unit <= last; unit++) {
        Sums<COUNT> u;
        load_partial<false>(u, sum_of(unit - base), block);
        tree.add(u, unit, 1, unit == last);
      }
    }
  }
  if (job.row_items > 1) {
    store_part(a, job, tree.total, block);
    meet(team, THREADS);                                         // all its warps have stored
    if (!meet_any(team, THREADS, warp == 0 && arrive_last(a, job))) return;
    // Room of the warp's own: for its two sums, or its ring buffer. Rounds of a multiple of four leave the four groups
    // of a span together.
    const typename C::Ring& ring = reader.copies.ring;
    float* room = more ? sums + 2 * warp * PARTIAL_FLOATS
                       : (float*)(DYNAMIC_SHARED + (ring.base - shared_address(DYNAMIC_SHARED)));
    const int most = (more ? 2 * PARTIAL_FLOATS : ring.stages * TILE_BYTES / 4) / STAGED_FLOATS<COUNT>;
    fold_staged(a, job, tree, block, room, most < 4 ? most : most / 4 * 4);
  }
  store_row<C::FORMAT>(a, job, tree.total, sinks, block);
}

// How a block's tiles are shared out, for so many jobs of all blocks. The first of two teams has all of them where the
// block has no more than one job. Tiles that are left over go to the first warps, as long as teams have two jobs at
// most: a team with more tiles is faster, and of many jobs it would end long before the other.
template <class C> DEV Tiles share_of(int jobs) {
  const int warp = TID / WAVE;
  if (C::TEAMS > 1 && C::TOGETHER && jobs <= GRID + BID) {
    constexpr int ALL = C::TILES / C::TEAM;
    return {ALL * warp, warp < C::TEAM ? ALL : 0};
  }
  constexpr int EACH = C::TILES / C::WARPS, LEFT = C::TILES % C::WARPS;
  const int more = LEFT > 0 && jobs <= 2 * C::TEAMS * GRID ? LEFT : 0;
  return {EACH * warp + min(warp, more), EACH + (warp < more)};
}

// Starts a warp's first copies: those of old pages before the predecessor has ended.
template <class Copies> DEV void start_copies(Copies& copies) {
  copies.advance();
  int started = 0;
  while (started < copies.ring.stages && copies.old()) copies.start(started++);
  after_predecessor();                                           // the plan was there before, see early.h
  while (started < copies.ring.stages) copies.start(started++);
}

DEV int load_items(const AttentionArgs& a) {
  return load_fresh(a.windowed ? &a.step.header->window_items : &a.step.header->full_items);
}

template <class C> DEV void attend(const AttentionArgs& a) {
  const int team = team_of<C>();
  let_successor_start();
  const int jobs = load_items(a) * a.kv_heads;
  const typename C::Ring ring(share_of<C>(jobs));
  const Strided every = {a, jobs, GRID * C::TEAMS};
  Job job = every.at(team * GRID + BID), next = every.after(job);
  Copies<C, Strided> copies = {a, ring, every, job, next, first_page<C>(job)};
  start_copies(copies);
  Query q = load_query(a, job), next_q = load_query(a, next);
  Reader<Copies<C, Strided>> reader = {copies};
  int round = 0;
  while (job.any) {
    float* sums = (float*)(DYNAMIC_SHARED + C::Ring::ALL_BYTES) + team * C::TEAM * 2 * PARTIAL_FLOATS;
    if constexpr (C::TOGETHER) {
      attend_together<C>(a, job, q, reader, sums, round, next.any);
    } else {
      finish_alone<C::FORMAT>(a, job, attend_alone(job, q, reader, sums));
    }
    job = next, next = every.after(job);
    q = next_q, next_q = load_query(a, next);
  }
}
