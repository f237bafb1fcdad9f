// attention_plain_*: attention without matrix cores, for shapes that the kernels for matrix cores do not support: any
// head_dim (a multiple of 8 up to 128), any number of query heads per kv head, any cache format, decoding rows and
// prompt rows. With a float32 cache it is `exact`: scores in float64 rounded to float32, float32 exponentials and their
// float64 sum. 16-bit caches use float32 and 2^x (q is already scaled by log2(e) / sqrt(head_dim)).
//
// A block computes one row and one kv head, whose query heads (up to eight per block) share each key and value read.
// Keys are processed in units of UNIT positions, counted from position 0, each in three phases by all threads:
//   scores   four lanes per key; a lane multiplies every fourth piece of eight dims with all heads, then the lanes
//            exchange partial sums so that each has two heads' sums. K is loaded to registers, 32-byte sectors per
//            lane.
//   softmax  online; a thread has one head and every 32nd key: maximum, exponentials, sum. The running maximum starts
//            with the sink, which adds to the sum but has no value.
//   values   a lane has four dims of all heads; a wave processes 64 (32) / (head_dim / 4) keys at a time.
// The order of a row's sums depends on its position alone: not on its chunk or the other rows of the batch.
//
// Grid: rows of the bucket * kv_heads * (heads / kv_heads / 8, rounded up). Kernels: attention_plain_f32, _f16, _bf16,
// by the format of q and the cache.
#include "catalogue.h"
#include "gpu/math.h"

enum {
  THREADS = ATTENTION_PLAIN_THREADS,
  WAVES = THREADS / WAVE,
  UNIT = 256,
  HEADS = ATTENTION_PLAIN_PER_BLOCK,
  MAX_DIM = ATTENTION_PLAIN_MOST_HEAD_DIM,
  KEY_LANES = 4,                       // lanes that share a key's score
  KEYS = THREADS / KEY_LANES,
  AT_ONCE = 1,                         // keys that a lane multiplies at once; registers limit it
  // elements; the 16 bytes beyond 8 per head keep four lanes' pieces in different LDS banks
  QUERY_PIECE = HEADS * 8 + 2,
  VALUES_AT_ONCE = 4,                  // keys whose values a lane has in flight
  MERGED_HEADS = 4,
};

template <int FORMAT> struct Arithmetic { typedef float Sum; };
template <> struct Arithmetic<FORMAT_F32> { typedef double Sum; };
template <int FORMAT> using Sum = typename Arithmetic<FORMAT>::Sum;

template <int FORMAT> DEV Sum<FORMAT> exponential(float x) {
  return FORMAT == FORMAT_F32 ? (Sum<FORMAT>)exp_f64(x) : (Sum<FORMAT>)exp2_fast(x);
}

// What a block works on.
struct Task {
  const u8* kv;          // the kv head's K in page 0
  const int* pages;      // the sequence's
  u32 ring;              // length of the page table if it is a ring buffer (windowed layer), else 0
  int row;
  int first_head;        // of at most HEADS query heads
  int heads;
  int first_key;         // positions the row sees: first_key to position
  int position;
  DEV bool sees(int key) const { return key >= first_key && key <= position; }
};

struct Shared {
  double* query;         // [head_dim / 8] pieces of QUERY_PIECE
  float* scores;         // [UNIT][HEADS]: scores, then exponentials
  float* merged;         // [WAVES][MERGED_HEADS][MAX_DIM], overlaps query and scores
  float* wave_largest;   // [WAVES][HEADS]
  double* wave_sums;     // [WAVES][HEADS]
  float* factors;        // [HEADS]: rescales earlier sums to the unit's new maximum
  double* totals;        // [HEADS]
};

template <int FORMAT> struct Cache {
  const AttentionArgs& a;
  const Task& task;
  DEV const u8* page(int key) const {
    const u32 page = (u32)key / KV_PAGE;
    return task.kv + task.pages[task.ring ? page % task.ring : page] * a.page_bytes;
  }
  DEV void key_piece(const u8* page, int key, int piece, float* v) const {
    load8_aligned<FORMAT>(page, kv_index(key, piece * 8, a.head_dim), v);
  }
  DEV void value_quad(const u8* page, int key, int d, float* v) const {
    const int at = KV_PAGE * a.head_dim + kv_index(key, d, a.head_dim);
    if (FORMAT == FORMAT_F32) {
      const f32x4 quad = *(const f32x4*)((const float*)page + at);
      UNROLL for (int i = 0; i < 4; i++) v[i] = quad[i];
    } else {
      const u32x2 quad = *(const u32x2*)((const u16*)page + at);
      UNROLL for (int i = 0; i < 4; i++) v[i] = from_16<FORMAT>((u16)(quad[i / 2] >> i % 2 * 16));
    }
  }
};

template <int FORMAT> DEV void load_query(const AttentionArgs& a, const Task& task, Sum<FORMAT>* query) {
  const i64 first = ((i64)task.row * a.heads + task.first_head) * a.head_dim;
  const int d = TID % MAX_DIM;
  if (d >= a.head_dim) return;
  for (int head = TID / MAX_DIM; head < HEADS; head += THREADS / MAX_DIM) {
    const i64 at = first + head * a.head_dim + d;
    float v = 0;
    if (head < task.heads) v = FORMAT == FORMAT_F32 ? ((const float*)a.q)[at] : from_16<FORMAT>(((const u16*)a.q)[at]);
    query[d / 8 * QUERY_PIECE + head * 8 + d % 8] = v;
  }
}

// Scores of AT_ONCE * KEYS keys from `first` on.
template <int FORMAT>
DEV void score_keys(const AttentionArgs& a, const Task& task, const Sum<FORMAT>* query, int unit, int first,
                    float* scores) {
  const Cache<FORMAT> cache{a, task};
  int key[AT_ONCE];
  const u8* page[AT_ONCE];
  Sum<FORMAT> sums[AT_ONCE][HEADS] = {};
  UNROLL for (int i = 0; i < AT_ONCE; i++) {
    // Keys outside the row's range are replaced by the row's own key, which exists.
    key[i] = first + i * KEYS + TID / KEY_LANES;
    if (!task.sees(key[i])) key[i] = task.position;
    page[i] = cache.page(key[i]);
  }
  for (int piece = TID % KEY_LANES; piece < a.head_dim >> 3; piece += KEY_LANES) {
    float k[AT_ONCE][8];
    UNROLL for (int i = 0; i < AT_ONCE; i++) cache.key_piece(page[i], key[i], piece, k[i]);
    const Sum<FORMAT>* q = query + piece * QUERY_PIECE;
    UNROLL for (int head = 0; head < HEADS; head++)
      UNROLL for (int d = 0; d < 8; d++)
        UNROLL for (int i = 0; i < AT_ONCE; i++) sums[i][head] += q[head * 8 + d] * k[i][d];
  }
  const Sum<FORMAT> one = 1, scale = FORMAT == FORMAT_F32 ? one / (Sum<FORMAT>)sqrt_rn((float)a.head_dim) : one;
  UNROLL for (int i = 0; i < AT_ONCE; i++) {
    deal_sums<HEADS, KEY_LANES>(sums[i]);
    float* at = scores + (first - unit + i * KEYS + TID / KEY_LANES) * HEADS + TID % KEY_LANES * 2;
    at[0] = (float)(sums[i][0] * scale);
    at[1] = (float)(sums[i][1] * scale);
  }
}

// One head's running maximum and sum, the same in every thread of the head (TID % HEADS).
template <int FORMAT> struct Softmax {
  float largest;
  Sum<FORMAT> total;

  DEV void begin(float sink) {
    largest = FORMAT == FORMAT_F32 ? sink : sink * LOG2E;
    total = 1;
  }
  // Turns a unit's scores into exponentials; ends with a barrier.
  DEV void add(const Task& task, int unit, const Shared& shared) {
    float most = largest;
    ROLLED for (int i = TID; i < UNIT * HEADS; i += THREADS) {
      if (task.sees(unit + i / HEADS)) most = shared.scores[i] > most ? shared.scores[i] : most;
      else shared.scores[i] = -__builtin_inff();                  // becomes an exponential of 0
    }
    for (int o = HEADS; o < WAVE; o *= 2) {
      const float other = shfl_xor(most, o);
      most = other > most ? other : most;
    }
    if (LANE < HEADS) shared.wave_largest[TID / WAVE * HEADS + LANE] = most;
    barrier();
    UNROLL for (int w = 0; w < WAVES; w++) {
      const float other = shared.wave_largest[w * HEADS + TID % HEADS];
      most = other > most ? other : most;
    }
    const Sum<FORMAT> factor = exponential<FORMAT>(largest - most);
    Sum<FORMAT> sum = 0;
    ROLLED for (int i = TID; i < UNIT * HEADS; i += THREADS) {
      const float e = (float)exponential<FORMAT>(shared.scores[i] - most);
      shared.scores[i] = e;
      sum += e;
    }
    for (int o = HEADS; o < WAVE; o *= 2) sum += shfl_xor(sum, o);
    if (LANE < HEADS) shared.wave_sums[TID / WAVE * HEADS + LANE] = sum;
    if (TID < HEADS) shared.factors[TID] = (float)factor;
    barrier();
    sum = 0;
    UNROLL for (int w = 0; w < WAVES; w++) sum += (Sum<FORMAT>)shared.wave_sums[w * HEADS + TID % HEADS];
    total = total * factor + sum;
    largest = most;
  }
};

// Lanes that share a key's value row, four dims each: head_dim / 4 rounded up to a power of two.
DEV int value_lanes(int head_dim) {
  int lanes = 2;
  while (lanes * 4 < head_dim) lanes *= 2;
  return lanes;
}

// sums[head][..] += exponentials times values, for a unit's keys.
template <int FORMAT>
DEV void weigh_values(const AttentionArgs& a, const Task& task, int unit, const Shared& shared, float (*sums)[4]) {
  const Cache<FORMAT> cache{a, task};
  const int lanes = value_lanes(a.head_dim), d = TID % lanes * 4, stride = THREADS / lanes;
  UNROLL for (int head = 0; head < HEADS; head++)
    UNROLL for (int j = 0; j < 4; j++) sums[head][j] *= shared.factors[head];
  if (d >= a.head_dim) return;
  const int end = task.position + 1 - unit < UNIT ? task.position + 1 - unit : UNIT;
  ROLLED for (int i = TID / lanes; i < end; i += stride * VALUES_AT_ONCE) {
    float v[VALUES_AT_ONCE][4] = {};
    UNROLL for (int n = 0; n < VALUES_AT_ONCE; n++) {
      const int key = unit + i + n * stride;
      if (i + n * stride < UNIT && task.sees(key)) cache.value_quad(cache.page(key), key, d, v[n]);
    }
    UNROLL for (int n = 0; n < VALUES_AT_ONCE; n++) {
      // Keys outside the row's range have values of zero, so their weights do not matter.
      const f32x4* e = (const f32x4*)(shared.scores + (i + n * stride) % UNIT * HEADS);
      const f32x4 low = e[0], high = e[1];
      UNROLL for (int j = 0; j < 4; j++)
        UNROLL for (int head = 0; head < 4; head++) {
          sums[head][j] = fma_rn(low[head], v[n][j], sums[head][j]);
          sums[4 + head][j] = fma_rn(high[head], v[n][j], sums[4 + head][j]);
        }
    }
  }
}

DEV void store_result(const AttentionArgs& a, int row, int k, float v) {
  u16* at = a.out + tiled_index(row, k, a.out_rows);
  store_terms(a.format, at, a.out_term, a.terms, v);
}

// Reduces sums over lanes and waves, divides by the totals, and stores: four heads at a time, as many as fit in the
// memory of query and scores.
DEV void merge(const AttentionArgs& a, const Task& task, const Shared& shared, float (*sums)[4]) {
  const int lanes = value_lanes(a.head_dim), d = LANE % lanes * 4;
  UNROLL for (int head = 0; head < HEADS; head++)
    UNROLL for (int j = 0; j < 4; j++)
      for (int o = lanes; o < WAVE; o *= 2) sums[head][j] += shfl_xor(sums[head][j], o);
  UNROLL for (int half = 0; half < HEADS; half += MERGED_HEADS) {
    barrier();
    if (LANE < lanes && d < a.head_dim)
      UNROLL for (int head = 0; head < MERGED_HEADS; head++)
        UNROLL for (int j = 0; j < 4; j++)
          shared.merged[(TID / WAVE * MERGED_HEADS + head) * MAX_DIM + d + j] =
              half ? sums[MERGED_HEADS + head][j] : sums[head][j];
    barrier();
    const int dim = TID % MAX_DIM;
    for (int head = TID / MAX_DIM; head < MERGED_HEADS && half + head < task.heads; head += THREADS / MAX_DIM) {
      if (dim >= a.head_dim) break;
      double sum = 0;
      for (int w = 0; w < WAVES; w++) sum += shared.merged[(w * MERGED_HEADS + head) * MAX_DIM + dim];
      const int k = (task.first_head + half + head) * a.head_dim + dim;
      store_result(a, task.row, k, (float)(sum / shared.totals[half + head]));
    }
  }
  barrier();
}

template <int FORMAT> DEV void attend(const AttentionArgs& a, const Task& task, const Shared& shared) {
  Sum<FORMAT>* query = (Sum<FORMAT>*)shared.query;
  load_query<FORMAT>(a, task, query);
  Softmax<FORMAT> softmax;
  softmax.begin(TID % HEADS < task.heads ? a.sinks[task.first_head + TID % HEADS] : 0.f);
  float sums[HEADS][4] = {};
  for (int unit = task.first_key / UNIT * UNIT; unit <= task.position; unit += UNIT) {
    barrier();
    for (int first = unit; first < unit + UNIT && first <= task.position; first += AT_ONCE * KEYS)
      if (first + AT_ONCE * KEYS > task.first_key) score_keys<FORMAT>(a, task, query, unit, first, shared.scores);
    barrier();
    softmax.add(task, unit, shared);
    weigh_values<FORMAT>(a, task, unit, shared, sums);
  }
  if (TID < HEADS) shared.totals[TID] = (double)softmax.total;
  merge(a, task, shared, sums);
}

// Writes zeros from the last head to the slab's end.
DEV void fill_up(const AttentionArgs& a, int row) {
  const int width = a.heads * a.head_dim, padded = (width + SLAB - 1) / SLAB * SLAB;
  for (int k = width + TID; k < padded; k += THREADS) store_result(a, row, k, 0.f);
}

// Offsets of results and sums in shared memory.
enum { QUERY_BYTES = MAX_DIM / 8 * QUERY_PIECE * 8, MERGED_BYTES = WAVES * MERGED_HEADS * MAX_DIM * 4 };
static_assert(MERGED_BYTES <= QUERY_BYTES + UNIT * HEADS * 4, "merged results lie over queries and scores");

// One kernel per format: together they would need too many registers.
template <int FORMAT> DEV void attend_row(const AttentionArgs& a, const Shared& shared) {
  let_successor_start();
  after_predecessor();
  const u32 group = (u32)a.heads / (u32)a.kv_heads, parts = (group + HEADS - 1) / HEADS;
  const u32 row = (u32)BID / (a.kv_heads * parts), part = (u32)BID % (a.kv_heads * parts), kv_head = part / parts;
  const u32 head = part % parts * HEADS;
  if ((int)row >= a.step.header->rows) return;
  if (part == 0) fill_up(a, row);
  const int position = a.step.positions[row];
  const ChunkInfo& chunk = a.step.chunks[a.step.row_chunk[row]];
  Task task;
  task.kv = a.kv + (i64)kv_head * a.head_bytes;
  task.pages = a.step.tables + (a.windowed ? chunk.window : chunk.full);
  task.ring = a.windowed ? chunk.window_pages : 0;
  task.row = row;
  task.first_head = kv_head * group + head;
  task.heads = group - head < HEADS ? (int)(group - head) : (int)HEADS;
  task.first_key = a.windowed && position >= a.window ? position - a.window + 1 : 0;
  task.position = position;
  attend<FORMAT>(a, task, shared);
}

#define ATTENTION_PLAIN(name, FORMAT, blocks)                                                                          \
  KERNEL(name, AttentionArgs, THREADS, blocks, 2) {                                                                    \
    SHARED f32x4 buffer[(QUERY_BYTES + UNIT * HEADS * 4) / 16];                                                        \
    SHARED double wave_sums[WAVES * HEADS];                                                                            \
    SHARED double totals[HEADS];                                                                                       \
    SHARED float wave_largest[WAVES * HEADS];                                                                          \
    SHARED float factors[HEADS];                                                                                       \
    attend_row<FORMAT>(a, Shared{(double*)buffer, (float*)buffer + QUERY_BYTES / 4, (float*)buffer, wave_largest,      \
                                 wave_sums, factors, totals});                                                         \
  }
// With two blocks per multiprocessor the float64 sums of eight heads would spill on sm_90a.
ATTENTION_PLAIN(attention_plain_f32, FORMAT_F32, 1)
ATTENTION_PLAIN(attention_plain_f16, FORMAT_F16, 2)
ATTENTION_PLAIN(attention_plain_bf16, FORMAT_BF16, 2)
