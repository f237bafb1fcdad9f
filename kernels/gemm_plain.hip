// plain_qkv, plain_attn_out, plain_mlp1, plain_mlp2, plain_logits: matrix products without matrix cores, for weights
// and shapes that a family's own kernels do not support, and for families that have none. Weights are in the wire
// format (wire.h): BF16 or float32, the experts' also MXFP4.
//
// A block computes one wire tile, a wave OUT of its rows and IN input rows at a time; its lanes split K in pieces of
// eight, with 8 loads of 16 bytes (BF16) for 128 products. Every weight is exact in float32. With one term sums are in
// float32; with more (`exact`) each product is rounded to float32, summed in float64 and rounded once. The order of
// additions depends on K alone.
//
// Grid: ceil(n / WIRE_ROWS) * groups * splits; `splits` blocks share the input rows of a tile (any number; chosen to
// fill the device). Threads: 8 waves.
#include "catalogue.h"
#include "gpu/gated.h"
#include "gpu/math.h"
#include "wire.h"

enum { OUT = 4, IN = 4, THREADS = GEMM_PLAIN_THREADS, WAVES = THREADS / WAVE };
static_assert(OUT * WAVES == WIRE_ROWS && OUT * IN <= WAVE, "a block takes a tile, a lane one result");

// A wave's job: OUT weight rows times up to IN input rows.
struct Job {
  int group;
  int out;           // the first of the weight rows, within the matrix
  int row;           // the first input row, counted from the buffer's start
  int rows;          // at most IN
};

// N elements of a row of tiled activations, all terms together.
template <int N> DEV void load_input(const GemmArgs& a, int row, int k, float* v) {
  const i64 first = tiled_index(row, k, a.in_rows);
  UNROLL for (int i = 0; i < N; i++) v[i] = 0;
  for (int term = a.terms - 1; term >= 0; term--) {
    float t[N];
    if (a.format == FORMAT_F16) {
      load_some<FORMAT_F16, N>(a.input, first + term * a.in_term, t);
      UNROLL for (int i = 0; i < N; i++) v[i] *= 1.f / (1 << TERM_SHIFT);
    } else {
      load_some<FORMAT_BF16, N>(a.input, first + term * a.in_term, t);
    }
    UNROLL for (int i = 0; i < N; i++) v[i] += t[i];
  }
}

// E2M1: a sign and 0, 0.5, 1, 1.5, 2, 3, 4 or 6. Magnitudes from 1 on are float32's with another bias.
DEV float e2m1(u32 code) {
  const float normal = __builtin_bit_cast(float, ((code & 7) << 22) + 0x3f000000);
  const float magnitude = (code & 7) < 2 ? 2 * normal - 1 : normal;
  return code & 8 ? -magnitude : magnitude;
}
// 2^(code - 127), of which the least is subnormal; 255 is NaN.
DEV float e8m0(u32 code) {
  return __builtin_bit_cast(float, code == 0 ? 0x00400000u : code == 255 ? 0x7fc00000u : code << 23);
}
// N weights from column k on of row `out` of `group`. Eight of MXFP4 share a scale.
template <int WEIGHTS, int N> DEV void load_weights(const GemmArgs& a, int group, int out, int k, float* w) {
  const i64 first = (i64)group * wire_rows(a.n) + out;
  if constexpr (WEIGHTS == FORMAT_MXFP4) {
    const WireCodes tile{a.cols};
    const u8* at = a.weights + first / WIRE_ROWS * tile.tile_bytes();
    const u32 codes = *(const u32*)(at + (u32)tile.code(out % WIRE_ROWS, k));
    const float scale = e8m0(at[(u32)tile.scale(out % WIRE_ROWS, k)]);
    UNROLL for (int i = 0; i < N; i++) w[i] = e2m1(codes >> 4 * i) * scale;
  } else {
    load_some<WEIGHTS, N>(a.weights, first * a.cols + k, w);
  }
}

// Lane out * IN + in returns the product of weight row `out` and input row `in`; lanes take N elements of K at a time.
// Rows beyond the last one are computed as the last one.
template <class Sum, int WEIGHTS, int N> DEV float multiply(const GemmArgs& a, const Job& job) {
  Sum sums[OUT * IN] = {};
  ROLLED for (int k = LANE * N; k < a.cols; k += WAVE * N) {
    float w[OUT][N];
    UNROLL for (int o = 0; o < OUT; o++) load_weights<WEIGHTS, N>(a, job.group, job.out + o, k, w[o]);
    UNROLL for (int i = 0; i < IN; i++) {
      float x[N];
      load_input<N>(a, job.row + (i < job.rows ? i : job.rows - 1), k, x);
      UNROLL for (int o = 0; o < OUT; o++)
        UNROLL for (int j = 0; j < N; j++) sums[o * IN + i] += (Sum)mul_rn(w[o][j], x[j]);
    }
  }
  return (float)wave_sums<OUT * IN>(sums) * a.scale;
}
template <int WEIGHTS> DEV float multiply(const GemmArgs& a, const Job& job) {
  if constexpr (WEIGHTS != FORMAT_MXFP4)
    if (a.cols % 8) return multiply<double, WEIGHTS, 1>(a, job);
  return a.terms == 1 ? multiply<float, WEIGHTS, 8>(a, job) : multiply<double, WEIGHTS, 8>(a, job);
}
template <bool EXPERTS> DEV float product(const GemmArgs& a, const Job& job) {
  if (EXPERTS && a.weight_format == FORMAT_MXFP4) return multiply<FORMAT_MXFP4>(a, job);
  return a.weight_format == FORMAT_F32 ? multiply<FORMAT_F32>(a, job) : multiply<FORMAT_BF16>(a, job);
}

// A wave's work: OUT weight rows of a group, and of its input rows runs of IN, `stride` rows apart.
struct WaveWork {
  int group;
  int out;
  int first;         // the group's first row
  int count;         // the group's rows; 0 if there is nothing to do
  int row;           // first input row of the work, within the group
  int stride;
};
DEV WaveWork begin(const GemmArgs& a) {
  after_predecessor();
  let_successor_start();
  const u32 tiles = (u32)(a.n + WIRE_ROWS - 1) / WIRE_ROWS, all = tiles * a.groups, splits = GRID / all;
  const int group = BID % all / tiles, out = BID % tiles * WIRE_ROWS + TID / WAVE * OUT;
  const bool idle = (u32)BID >= splits * all || out >= a.n;
  const int first = a.offsets ? a.offsets[group] : 0, count = idle ? 0 : a.rows[group];
  return WaveWork{group, out, first, count, (int)(BID / all) * IN, (int)splits * IN};
}

// Calls finish(n, row, sum + bias) in each lane for each of its results; `row` is below 0 for padding. Weights of
// EXPERTS may be MXFP4.
template <bool EXPERTS = false, class Finish> DEV void run(const GemmArgs& a, const WaveWork& work, Finish finish) {
  for (int row = work.row; row < work.count; row += work.stride) {
    const Job job{work.group, work.out, work.first + row, work.count - row < IN ? work.count - row : IN};
    const int n = work.out + LANE / IN, i = LANE % IN;
    const bool wanted = LANE < OUT * IN && n < a.n && i < job.rows;
    const float bias = a.bias && wanted ? a.bias[(i64)work.group * a.n + n] : 0.f;
    finish(n, wanted ? job.row + i : -1, add_rn(product<EXPERTS>(a, job), bias));
  }
}

struct StoreRows {
  const GemmArgs& a;
  DEV void operator()(int n, int row, float v) const {
    if (row >= 0) a.out[(i64)row * a.n + n] = v;
  }
};
struct AddToRows {
  const GemmArgs& a;
  DEV void operator()(int n, int row, float v) const {
    if (row >= 0) a.out[(i64)row * a.n + n] = add_rn(a.out[(i64)row * a.n + n], v);
  }
};
struct StoreExperts {
  const GemmArgs& a;
  DEV void operator()(int n, int row, float v) const {
    if (row < 0) return;
    if (a.terms == 1) ((u16*)a.y)[(i64)row * a.n + n] = to_f16(v);
    else ((float*)a.y)[(i64)row * a.n + n] = v;
  }
};

// Outputs alternate gate and up, so the lane with a gate finds its up IN lanes further on.
struct GatedUnit {
  const GemmArgs& a;
  DEV void store(int row, int k, float v) const {
    u16* at = a.tiled + tiled_index(row, k, a.tiled_rows);
    store_terms(a.format, at, a.tiled_term, a.terms, v);
  }
  DEV void operator()(int n, int row, float v) const {
    const float other = shfl_xor(v, IN);
    const float gated = gated_unit(v, other, a.limit, true, [](float x) { return exp_f32(x); });
    if (row >= 0 && n % 2 == 0) store(row, n >> 1, gated);
  }
};
// Fills the tiled output with zeros from the last column to the end of its slab; the wave with the last column does it.
DEV void fill_up(const GemmArgs& a, const WaveWork& work) {
  if (work.out + OUT < a.n) return;
  const int width = (int)((u32)a.n / 2), padding = -width & (SLAB - 1);
  for (int row = work.row; row < work.count; row += work.stride)
    for (int i = LANE; i < padding * IN; i += WAVE) {
      if (row + i % IN >= work.count) continue;
      u16* at = a.tiled + tiled_index(work.first + row + i % IN, width + i / IN, a.tiled_rows);
      for (int term = 0; term < a.terms; term++) at[term * a.tiled_term] = 0;
    }
}

KERNEL(plain_qkv, GemmArgs, THREADS, 1, 2) { run(a, begin(a), StoreRows{a}); }
KERNEL(plain_attn_out, GemmArgs, THREADS, 1, 2) { run(a, begin(a), AddToRows{a}); }
KERNEL(plain_mlp1, GemmArgs, THREADS, 1, 2) {
  const WaveWork work = begin(a);
  fill_up(a, work);
  run<true>(a, work, GatedUnit{a});
}
KERNEL(plain_mlp2, GemmArgs, THREADS, 1, 2) { run<true>(a, begin(a), StoreExperts{a}); }
KERNEL(plain_logits, GemmArgs, THREADS, 1, 2) { run(a, begin(a), StoreRows{a}); }
