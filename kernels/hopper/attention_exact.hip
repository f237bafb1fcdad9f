// attention_exact: attention of `exact` over a float32 cache: head_dim 64, 8 query heads per kv head, decoding and
// prompt rows alike. Scores and weighted values are float64 products on the matrix cores (mma m8n8k4, whose 8 rows are
// the heads). Scores are rounded to float32, exponentials are float32, their sum is float64.
//
// A block computes one row and one kv head. Octet o is the keys at positions 8 o to 8 o + 7; warp w takes the visible
// octets o with o % WARPS = w. Warps meet only to merge their sums. An octet takes 16 MMAs for the scores and 16 for
// the values. Of each lane's operands:
//   keys     lane 4 n + c has the 16-byte pieces c, c + 4, .. of key n; MMA (j, e) contracts dims 16 j + 4 c + e, c = 0
//            .. 3
//   scores   lane 4 h + c has head h's scores of keys 2 c and 2 c + 1: A operands of the value MMAs, one for even and
//            one for odd keys
//   values   lane 4 n + c has pieces n and n + 8 of the values of keys 2 c and 2 c + 1; column n of output tile (i, e)
//            is dim 32 i + 4 n + e
// A row's result depends on its position and its keys alone: not on its chunk, the rows beside it, or the batch.
//
// Ring    Each warp has a ring buffer of STAGES octets, keys and values, that bulk copies fill. With the query in
//         shared memory, too, registers hold only the sums and what is being multiplied, and so many blocks fit on a
//         multiprocessor that some read while others start or end. A warp's sums take its ring's place at the end.
// Early   A step writes the pages of its chunks from the first position on. Copies of older ones do not wait for the
//         predecessor.
// Budget  An octet's 4 KB are 215 cycles of an H200 multiprocessor's share of memory bandwidth; its MMAs take 64
//         cycles, its conversions 70, its exponentials 20 (counted, not measured). Shared memory takes 128: the copies
//         32, the query 32, and keys and values 64 instead of 32, because lanes read them in pairs of the same banks.
// Launch  One block per row and kv head; WARPS * STAGES * (STAGE_BYTES + 8) bytes of dynamic shared memory, the 8 for
//         an mbarrier, QUERY_BYTES for the query, and ZEROS_BYTES of zeros, which are read in place of the values of
//         invisible keys.
#include "attention.h"

enum : int {
  THREADS = ATTENTION_EXACT_THREADS,
  WARPS = THREADS / WAVE,
  OCTET = 8,                             // keys
  PAGE_OCTETS = KV_PAGE / OCTET,
  PIECE = 4,                             // dims
  PIECES = 4,                            // of a lane
  OCTET_PIECES = HEAD_DIM / PIECE,
  KEYS_BYTES = OCTET * HEAD_DIM * 4,     // of an octet; its values are as many
  STAGE_BYTES = 2 * KEYS_BYTES,
  QUERY_BYTES = GROUP_HEADS * HEAD_DIM * 8,
  ZEROS_BYTES = HEAD_DIM * 4,
  STAGES = (ATTENTION_EXACT_SHARED_BYTES - QUERY_BYTES - ZEROS_BYTES) / (WARPS * (STAGE_BYTES + 8)),
  RING_BYTES = STAGES * STAGE_BYTES,
  QUERY_AT = WARPS * RING_BYTES,         // in shared memory
  ZEROS_AT = QUERY_AT + QUERY_BYTES,
  BARRIERS_AT = ZEROS_AT + ZEROS_BYTES,
  VALUES_AT = KV_PAGE * HEAD_DIM * 4,    // from an octet's keys in a page to its values
};

// d += a b: a is 8 x 4 (lane 4 m + k), b is 4 x 8 (lane 4 n + k); lane 4 m + k has row m, columns 2 k and 2 k + 1 of d.
DEV void mma_f64(double* d, double a, double b) {
  asm("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%0, %1}, {%2}, {%3}, {%0, %1};"
      : "+d"(d[0]), "+d"(d[1]) : "d"(a), "d"(b));
}

// One row and kv head.
struct Work {
  const u8* kv;                          // the kv head's K in page 0
  PageTable pages;
  int first, last;                       // visible positions
  int written;                           // the first page that this step writes
  bool alone;                            // no other row of the step reads the keys
};

struct ChunkWords { int4 v[2]; };         // a ChunkInfo, for two loads of 16 bytes
DEV Work work_of(const AttentionArgs& a, int kv_head, int index, int position) {
  const int4* at = (const int4*)(a.step.chunks + index);
  const ChunkInfo chunk = __builtin_bit_cast(ChunkInfo, ChunkWords{__ldg(at), __ldg(at + 1)});
  Work w;
  w.kv = a.kv + (i64)kv_head * a.head_bytes;
  w.pages = page_table(a, chunk);
  w.last = position, w.first = first_visible_key(a, position);
  w.written = chunk.first_position / KV_PAGE, w.alone = chunk.rows == 1;
  return w;
}

// A lane's pieces of an octet: of key LANE / 4, or of the values of keys 2 c and 2 c + 1, where c is LANE % 4.
struct Pieces { float4 v[PIECES]; };
DEV float element(const float4& v, int e) { return e == 0 ? v.x : e == 1 ? v.y : e == 2 ? v.z : v.w; }

// A lane's first piece of an octet's keys, and of its values, in bytes. The swizzle makes an exclusive or of the way to
// the others.
DEV u32 key_piece() { return kv_index(LANE / 4, LANE % 4 * PIECE, HEAD_DIM) * 4; }
DEV u32 value_piece() { return kv_index(LANE % 4 * 2, LANE / 4 * PIECE, HEAD_DIM) * 4; }

DEV float4 read_shared(u32 at) { return *(const float4*)__cvta_shared_to_generic(at); }
// Reads invisible keys, too: add_octet() masks their scores. The lane's first piece is at `at`.
DEV Pieces read_keys(u32 at) {
  Pieces k;
  UNROLL for (int j = 0; j < PIECES; j++) k.v[j] = read_shared(at ^ j * 64);
  return k;
}
// Reads the values of keys 2 c (v[0], v[1]) and 2 c + 1 (v[2], v[3]). An invisible key's may be anything, and 0 times
// NaN is NaN: zeros are read instead.
DEV Pieces read_values(const Work& w, u32 at, u32 zeros, int octet) {
  Pieces v;
  UNROLL for (int i = 0; i < 2; i++) {
    const int position = octet * OCTET + LANE % 4 * 2 + i;
    const u32 from = position >= w.first && position <= w.last ? at ^ i * (HEAD_DIM * 4 + 32) : zeros;
    v.v[2 * i] = read_shared(from), v.v[2 * i + 1] = read_shared(from ^ 128);
  }
  return v;
}

// A warp's copies, which run ahead of its arithmetic.
struct Copies {
  const AttentionArgs& a;
  const Work& w;
  u32 ring, barriers;
  u64 policy;
  int end;                               // of the octets
  int octet;                             // the next one
  int base, page;                        // the number of page base + LANE of the sequence

  DEV void load_pages(int first) {
    base = first;
    if (base + LANE <= w.last / KV_PAGE) page = page_number(w.pages, base + LANE);
  }
  // Whether the octet was written before this step.
  DEV bool old() const { return octet < end && octet / PAGE_OCTETS < w.written; }
  DEV void start(int stage) {
    if (octet >= end) return;
    const int index = (u32)octet / PAGE_OCTETS;
    if (index - base >= WAVE) load_pages(index);
    const u8* keys = w.kv + shfl(page, index - base) * a.page_bytes + (u32)octet % PAGE_OCTETS * KEYS_BYTES;
    octet += WARPS;
    if (LANE != 0) return;
    const u32 to = ring + stage * STAGE_BYTES, barrier = barriers + 8 * stage;
    barrier_arrive_expect(barrier, STAGE_BYTES);
    bulk_copy(to, keys, KEYS_BYTES, barrier, policy);
    bulk_copy(to + KEYS_BYTES, keys + VALUES_AT, KEYS_BYTES, barrier, policy);
  }
};

// A warp's running sums of the online softmax. A lane has head LANE / 4: output dim 32 i + 8 c + e in o[i * 4 + e][0]
// and dim 32 i + 8 c + 4 + e in o[i * 4 + e][1], where c is LANE % 4.
struct Sums {
  double o[OCTET_PIECES / 2][2];
  double sum;                            // of the weights of this lane's keys
  float most;
};

// A block's query in shared memory, as A operands: of lane 4 h + c dims 16 j + 4 c + 2 e and the next of head h in
// v[2 j + e]. In registers it would take as much as the sums.
struct Query { double2 v[OCTET_PIECES / 2][WAVE]; };
static_assert(WARPS == PIECES, "a warp has a piece of each lane");
DEV void load_query(const AttentionArgs& a, int row, int kv_head) {
  const int warp = TID / WAVE, head = kv_head * GROUP_HEADS + LANE / 4;
  const float4 v = *(const float4*)((const float*)a.q + ((i64)row * a.heads + head) * HEAD_DIM + warp * 16 +
                                    LANE % 4 * PIECE);
  Query& q = *(Query*)(DYNAMIC_SHARED + QUERY_AT);
  q.v[2 * warp][LANE] = make_double2(v.x, v.y), q.v[2 * warp + 1][LANE] = make_double2(v.z, v.w);
}

DEV void add_octet(Sums& s, const Work& w, int octet, u32 keys_at, u32 values_at, u32 zeros) {
  const Pieces keys = read_keys(keys_at);
  double scores[2][2] = {};              // two accumulators: MMAs on one would wait for each other
  UNROLL for (int j = 0; j < PIECES; j++)
    UNROLL for (int i = 0; i < 2; i++) {
      const double2 q = ((const Query*)(DYNAMIC_SHARED + QUERY_AT))->v[2 * j + i][LANE];
      mma_f64(scores[0], q.x, (double)element(keys.v[j], 2 * i));
      mma_f64(scores[1], q.y, (double)element(keys.v[j], 2 * i + 1));
    }
  float score[2];
  UNROLL for (int i = 0; i < 2; i++) {
    const int position = octet * OCTET + LANE % 4 * 2 + i;
    const bool seen = position >= w.first && position <= w.last;
    score[i] = seen ? (float)((scores[0][i] + scores[1][i]) * 0.125) : NEGATIVE_INFINITY;
  }
  float most = max_of(score[0], score[1]);
  most = max_of(most, shfl_xor(most, 1));
  most = max_of(most, shfl_xor(most, 2));
  if (wave_any(most > s.most)) {
    const float largest = max_of(s.most, most);
    const double factor = exp_f64(s.most - largest);
    s.most = largest, s.sum *= factor;
    UNROLL for (int t = 0; t < OCTET_PIECES / 2; t++) s.o[t][0] *= factor, s.o[t][1] *= factor;
  }
  const Pieces values = read_values(w, values_at, zeros, octet);
  UNROLL for (int i = 0; i < 2; i++) {
    const double e = (double)exp_f32(score[i] - s.most);
    s.sum += e;
    UNROLL for (int t = 0; t < OCTET_PIECES / 2; t++)
      mma_f64(s.o[t], e, (double)element(values.v[i * 2 + t / 4], t % 4));
  }
}

// A warp's sums, where its ring was. Lanes' o lie side by side, so that no two are in the same banks.
struct HandedIn {
  double2 o[OCTET_PIECES / 2][WAVE];
  double sum[GROUP_HEADS];
  float most[GROUP_HEADS];
};
static_assert((int)sizeof(HandedIn) <= RING_BYTES, "they take its place");
DEV HandedIn& handed_in(int warp) { return *(HandedIn*)(DYNAMIC_SHARED + warp * RING_BYTES); }

DEV void hand_in(Sums& s) {
  s.sum += shfl_xor(s.sum, 1);
  s.sum += shfl_xor(s.sum, 2);
  HandedIn& to = handed_in(TID / WAVE);
  const int head = LANE / 4;
  __syncwarp();                                                  // all lanes have read the last stage
  if (LANE % 4 == 0) to.sum[head] = s.sum, to.most[head] = s.most;
  UNROLL for (int t = 0; t < OCTET_PIECES / 2; t++) to.o[t][LANE] = make_double2(s.o[t][0], s.o[t][1]);
}

// Adds the warps' sums in the order of the warps: a thread those of eight dims, which lane TID % WAVE of each warp had
// in o[4 i] to o[4 i + 3], where i is TID / WAVE.
DEV void merge(const AttentionArgs& a, int row, int kv_head, float sink) {
  const int head = LANE / 4, dim = TID / WAVE * 32 + LANE % 4 * 8;
  if (dim >= HEAD_DIM) return;
  float most = sink;
  UNROLL for (int warp = 0; warp < WARPS; warp++) most = max_of(most, handed_in(warp).most[head]);
  double total = exp_f64(sink - most), o[8] = {};
  UNROLL for (int warp = 0; warp < WARPS; warp++) {
    const HandedIn& from = handed_in(warp);
    const double factor = exp_f64(from.most[head] - most);
    total += from.sum[head] * factor;
    UNROLL for (int e = 0; e < PIECE; e++) {
      const double2 both = from.o[TID / WAVE * PIECE + e][LANE];
      o[e] += both.x * factor, o[PIECE + e] += both.y * factor;
    }
  }
  float v[8];
  UNROLL for (int d = 0; d < 8; d++) v[d] = (float)(o[d] / total);
  u16* at = a.out + tiled_index(row, (kv_head * GROUP_HEADS + head) * HEAD_DIM + dim, a.out_rows);
  store_terms8(a.format, at, a.out_term, a.terms, v);
}

KERNEL(attention_exact, AttentionArgs, THREADS, 6, 1) {
  let_successor_start();
  const int warp = TID / WAVE, row = (u32)BID / (u32)a.kv_heads, kv_head = (u32)BID % (u32)a.kv_heads;
  // The plan was there before, see early.h. Beyond the step's rows it has room and anything.
  const int rows = load_fresh(&a.step.header->rows), chunk = load_fresh(a.step.row_chunk + row);
  const int position = load_fresh(a.step.positions + row);
  const float sink = __ldg(a.sinks + kv_head * GROUP_HEADS + LANE / 4);
  const u32 shared = shared_address(DYNAMIC_SHARED), ring = shared + warp * RING_BYTES, zeros = shared + ZEROS_AT;
  const u32 barriers = shared + BARRIERS_AT + warp * STAGES * 8;
  ((u64*)(DYNAMIC_SHARED + ZEROS_AT))[LANE] = 0;                 // every warp for itself
  if (LANE == 0) {
    for (int s = 0; s < STAGES; s++) barrier_init(barriers + 8 * s, 1);
    barrier_init_done();
  }
  __syncwarp();
  if (row >= rows) {
    after_predecessor();
    return;
  }
  const Work w = work_of(a, kv_head, chunk, position);
  const int first = w.first / OCTET, end = w.last / OCTET + 1;
  int octet = first + (warp - first % WARPS + WARPS) % WARPS;
  // Keys that only this row reads do not stay in the L2.
  Copies copies = {a, w, ring, barriers, w.alone ? evict_first() : evict_normal(), end, octet};
  copies.load_pages(w.first / KV_PAGE);
  int started = 0;
  ROLLED while (started < STAGES && copies.old()) copies.start(started++);
  after_predecessor();
  ROLLED while (started < STAGES) copies.start(started++);
  load_query(a, row, kv_head);
  barrier();
  Sums s = {};
  s.most = NEGATIVE_INFINITY;
  const u32 keys_at = ring + key_piece(), values_at = ring + KEYS_BYTES + value_piece();
  int stage = 0;
  u32 parity = 0;
  for (; octet < end; octet += WARPS) {
    barrier_wait(barriers + 8 * stage, parity);
    add_octet(s, w, octet, keys_at + stage * STAGE_BYTES, values_at + stage * STAGE_BYTES, zeros);
    __syncwarp();
    copies.start(stage);
    if (++stage == STAGES) stage = 0, parity ^= 1;
  }
  hand_in(s);
  barrier();
  merge(a, row, kv_head, sink);
}
