// attention_exact: attention of `exact` over a float32 cache: head_dim 64, 8 query heads per kv head, decoding and
// prompt rows alike. Scores and weighted values are float64 products on the tensor cores (mma m8n8k4, whose 8 rows are
// the heads). Scores are rounded to float32, exponentials are float32, their sum is float64.
//
// A block computes one row and one kv head. Octet o is the keys at positions 8 o to 8 o + 7; warp w takes the visible
// octets o with o % WARPS = w. Warps meet only to merge their sums. An octet takes 16 MMAs for the scores and 16 for
// the values. Keys and values go straight from global memory to registers, keys one octet ahead:
//   keys     lane 4 n + c has the 16-byte chunks c, c + 4, .. of key n; MMA (j, e) contracts dims 16 j + 4 c + e, c = 0
//            .. 3
//   scores   lane 4 h + c has head h's scores of keys 2 c and 2 c + 1: A operands of the value MMAs, one for even and
//            one for odd keys
//   values   lane 4 n + c has chunks n and n + 8 of the values of keys 2 c and 2 c + 1; column n of output tile (i, e)
//            is dim 32 i + 4 n + e
// A row's result depends on its position and its keys alone: not on its chunk, the rows beside it, or the batch.
// Budget (H200, counted, not measured): an octet's 4 KB are 215 cycles of a multiprocessor's share of memory bandwidth;
// its MMAs take 64 cycles, its conversions 70, its exponentials 20.
#include "attention.h"

enum : int {
  THREADS = ATTENTION_EXACT_THREADS,
  WARPS = THREADS / WAVE,
  OCTET = 8,                             // keys
  CHUNK = 4,                             // dims
  CHUNKS = 4,                            // of a lane
  OCTET_CHUNKS = HEAD_DIM / CHUNK,
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
  int row, kv_head;
  int first, last;                       // visible positions
};

DEV Work work_of(const AttentionArgs& a) {
  Work w;
  w.row = (u32)BID / (u32)a.kv_heads, w.kv_head = (u32)BID % (u32)a.kv_heads;
  w.kv = a.kv + (i64)w.kv_head * a.head_bytes;
  w.pages = page_table(a, a.step.chunks[a.step.row_chunk[w.row]]);
  w.last = a.step.positions[w.row];
  w.first = first_visible_key(a, w.last);
  return w;
}

// A lane's chunks of an octet: of key LANE / 4, or of the values of keys 2 c and 2 c + 1, where c is LANE % 4.
struct Chunks { float4 v[CHUNKS]; };
DEV float element(const float4& v, int e) { return e == 0 ? v.x : e == 1 ? v.y : e == 2 ? v.z : v.w; }

DEV const float* page_of(const AttentionArgs& a, const Work& w, int octet) {
  return (const float*)(w.kv + page_number(w.pages, octet / (KV_PAGE / OCTET)) * a.page_bytes);
}
// Loads invisible keys of the octet, too: add_octet() masks their scores.
DEV Chunks load_keys(const float* page, int octet) {
  Chunks k;
  UNROLL for (int j = 0; j < CHUNKS; j++)
    k.v[j] = __ldg((const float4*)(page + kv_index(octet * OCTET + LANE / 4, j * 16 + LANE % 4 * CHUNK, HEAD_DIM)));
  return k;
}
// Loads the values of keys 2 c (v[0], v[1]) and 2 c + 1 (v[2], v[3]); zeros where a key is invisible.
DEV Chunks load_values(const Work& w, const float* page, int octet) {
  Chunks v;
  UNROLL for (int i = 0; i < CHUNKS; i++) {
    const int position = octet * OCTET + LANE % 4 * 2 + i / 2;
    const float* at = page + KV_PAGE * HEAD_DIM + kv_index(position, i % 2 * 32 + LANE / 4 * CHUNK, HEAD_DIM);
    v.v[i] = position >= w.first && position <= w.last ? __ldg((const float4*)at) : make_float4(0, 0, 0, 0);
  }
  return v;
}

// A warp's running sums of the online softmax. A lane has head LANE / 4: output dim 32 i + 8 c + e in o[i * 4 + e][0]
// and dim 32 i + 8 c + 4 + e in o[i * 4 + e][1], where c is LANE % 4.
struct Sums {
  double o[OCTET_CHUNKS / 2][2];
  double sum;                            // of the weights of this lane's keys
  float most;
};

DEV void add_octet(Sums& s, const Work& w, int octet, const double* q, const Chunks& keys, const Chunks& values) {
  double scores[2][2] = {};              // two accumulators: MMAs on one would wait for each other
  UNROLL for (int j = 0; j < CHUNKS; j++)
    UNROLL for (int e = 0; e < CHUNK; e++) mma_f64(scores[e % 2], q[j * 4 + e], (double)element(keys.v[j], e));
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
    UNROLL for (int t = 0; t < OCTET_CHUNKS / 2; t++) s.o[t][0] *= factor, s.o[t][1] *= factor;
  }
  UNROLL for (int i = 0; i < 2; i++) {
    const double e = (double)exp_f32(score[i] - s.most);
    s.sum += e;
    UNROLL for (int t = 0; t < OCTET_CHUNKS / 2; t++)
      mma_f64(s.o[t], e, (double)element(values.v[i * 2 + t / 4], t % 4));
  }
}

// The query's A operands: head LANE / 4, dims 16 j + 4 (LANE % 4) + e.
DEV void load_query(const AttentionArgs& a, const Work& w, double* q) {
  const int head = w.kv_head * GROUP_HEADS + LANE / 4;
  const float* at = (const float*)a.q + ((i64)w.row * a.heads + head) * HEAD_DIM + LANE % 4 * CHUNK;
  UNROLL for (int j = 0; j < CHUNKS; j++) {
    const float4 v = *(const float4*)(at + j * 16);
    UNROLL for (int e = 0; e < CHUNK; e++) q[j * 4 + e] = element(v, e);
  }
}

struct Shared {
  double o[WARPS][GROUP_HEADS][HEAD_DIM];
  double sum[WARPS][GROUP_HEADS];
  float most[WARPS][GROUP_HEADS];
};

DEV void hand_in(Shared& shared, Sums& s) {
  s.sum += shfl_xor(s.sum, 1);
  s.sum += shfl_xor(s.sum, 2);
  const int warp = TID / WAVE, head = LANE / 4;
  if (LANE % 4 == 0) shared.sum[warp][head] = s.sum, shared.most[warp][head] = s.most;
  UNROLL for (int t = 0; t < OCTET_CHUNKS / 2; t++)
    UNROLL for (int i = 0; i < 2; i++) shared.o[warp][head][t / 4 * 32 + LANE % 4 * 8 + i * CHUNK + t % 4] = s.o[t][i];
}

// Adds the warps' sums in the order of the warps. A thread stores eight dims at a time.
DEV void merge(const AttentionArgs& a, const Work& w, const Shared& shared) {
  constexpr int EIGHTS = HEAD_DIM / 8;
  for (int i = TID; i < GROUP_HEADS * EIGHTS; i += THREADS) {
    const int head = i / EIGHTS, dim = i % EIGHTS * 8;
    const float sink = a.sinks[w.kv_head * GROUP_HEADS + head];
    float most = sink;
    UNROLL for (int warp = 0; warp < WARPS; warp++) most = max_of(most, shared.most[warp][head]);
    double total = exp_f64(sink - most), o[8] = {};
    UNROLL for (int warp = 0; warp < WARPS; warp++) {
      const double factor = exp_f64(shared.most[warp][head] - most);
      total += shared.sum[warp][head] * factor;
      UNROLL for (int d = 0; d < 8; d++) o[d] += shared.o[warp][head][dim + d] * factor;
    }
    float v[8];
    UNROLL for (int d = 0; d < 8; d++) v[d] = (float)(o[d] / total);
    u16* at = a.out + tiled_index(w.row, (w.kv_head * GROUP_HEADS + head) * HEAD_DIM + dim, a.out_rows);
    if (a.format == FORMAT_F16) store_terms8<FORMAT_F16>(at, a.out_term, a.terms, v);
    else store_terms8<FORMAT_BF16>(at, a.out_term, a.terms, v);
  }
}

KERNEL(attention_exact, AttentionArgs, THREADS, 3, 1) {
  SHARED Shared shared;
  let_successor_start();
  after_predecessor();
  if ((int)((u32)BID / (u32)a.kv_heads) >= a.step.header->rows) return;
  const Work w = work_of(a);
  double q[OCTET_CHUNKS];
  load_query(a, w, q);
  Sums s = {};
  s.most = NEGATIVE_INFINITY;
  const int first = w.first / OCTET, end = w.last / OCTET + 1;
  int octet = first + (TID / WAVE - first % WARPS + WARPS) % WARPS;
  if (octet < end) {
    const float* page = page_of(a, w, octet);
    Chunks keys = load_keys(page, octet);
    while (true) {
      const Chunks values = load_values(w, page, octet);
      const int next = octet + WARPS;
      const bool more = next < end;
      if (more) page = page_of(a, w, next);
      const Chunks ahead = more ? load_keys(page, next) : keys;
      add_octet(s, w, octet, q, keys, values);
      if (!more) break;
      keys = ahead, octet = next;
    }
  }
  hand_in(shared, s);
  barrier();
  merge(a, w, shared);
}
