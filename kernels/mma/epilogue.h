// Epilogues, one struct per operation. store() takes accumulators of 16 weight rows a warp. Thread (warp, g = lane / 4,
// q = lane % 4) has four accumulators for each j: {row of token t, row of token t + 1, row + 1 of token t, row + 1 of
// token t + 1}, where t is 8j + 2q.
//
//   Args     the kernel's arguments, of which product_of() are the product's
//   AHEAD    store_tokens() takes the place of store(): it needs Tokens, too, which are loaded before the product
//   GREEDY   fused argmax: of all logits that a block computes for a token, the largest one is stored
#pragma once
#include "../gpu/gated.h"
#include "../gpu/math.h"
#include "registers.h"
#include "w16.h"

// A chunk: token rows of one group, weight units of its matrix.
struct Chunk { int group, row, rows, unit, units; };

// What a thread's accumulators belong to.
struct Place {
  const Chunk& chunk;
  int row;                       // the first of two matrix rows, even
  int q;
  float2 bias;                   // the rows', where the operation has one
  float* best;                   // GREEDY: the warp's running argmax of each token of the tile
  int* best_index;
};

DEV float2 bias_pair(const GemmArgs& a, int group, int row) {
  return row < a.n ? *(const float2*)(a.bias + (i64)group * a.n + row) : make_float2(0.f, 0.f);
}

// Calls f(at, first value, second value) for the thread's two weight rows and each of its tokens that exists; `at` is
// the first value's index in a matrix [rows][n]. a.n is even.
template <int N, class F> DEV void for_each_pair(const GemmArgs& a, const Place& p, const float* acc, F f) {
  if (p.row >= a.n) return;
  const i64 first = (i64)(p.chunk.row + 2 * p.q) * a.n + p.row;
  const int rows = p.chunk.rows - 2 * p.q;
#pragma unroll
  for (int j = 0; j < N / 8; j++)
#pragma unroll
    for (int t = 0; t < 2; t++)
      if (8 * j + t < rows)
        f(first + (i64)(8 * j + t) * a.n, acc[4 * j + t] * a.scale, acc[4 * j + 2 + t] * a.scale);
}

struct Plain {
  using Args = GemmArgs;
  enum : bool { GREEDY = false, AHEAD = false };
  DEV static const GemmArgs& product_of(const Args& a) { return a; }
  DEV static float2 bias(const GemmArgs& a, int group, int row) { return bias_pair(a, group, row); }
  template <int J> struct Tokens {
    DEV void load(const GemmArgs&, const Place&) {}
  };
};
struct Unembedding : Plain {
  DEV static float2 bias(const GemmArgs&, int, int) { return make_float2(0.f, 0.f); }
};

struct Qkv : Plain {
  // Rows in pairs half a head apart (w16.h) keep that order; a.half is 0 where rows are in their own.
  DEV static float2 bias(const GemmArgs& a, int group, int row) {
    if (a.half == 0 || row >= a.n) return bias_pair(a, group, row);
    const int first = W16::matrix_row(row / W16::UNIT_ROWS * W16::UNIT_ROWS + LANE / 4, a.half);
    return make_float2(a.bias[first], a.bias[first + a.half]);
  }
  template <int N, int FORMAT, int TERMS>
  DEV static void store(const GemmArgs& a, const Place& p, const float* acc) {
    const float2 bias = p.bias;
    for_each_pair<N>(a, p, acc, [&](i64 at, float v0, float v1) {
      *(float2*)(a.out + at) = make_float2(v0 + bias.x, v1 + bias.y);
    });
  }
};

// Adds to two floats in the L2.
DEV void add_pair(float* at, float v0, float v1) {
#if __CUDA_ARCH__ >= 900
  asm volatile("red.relaxed.gpu.global.add.v2.f32 [%0], {%1, %2};" ::"l"(at), "f"(v0), "f"(v1) : "memory");
#else
  asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(at), "f"(v0) : "memory");
  asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(at + 1), "f"(v1) : "memory");
#endif
}

// Adds to the residual stream: in `fast` in the L2, for which an epilogue need not wait. A launch adds to an element
// once, so nothing depends on an order. (Subnormal numbers become zeros there.) In `exact` old values are loaded in
// batches: for all the compiler knows a store may alias the next load, so loads one at a time would each wait for the
// store before.
struct AttnOut : Plain {
  template <int N, int FORMAT, int TERMS>
  DEV static void store(const GemmArgs& a, const Place& p, const float* acc) {
    if constexpr (TERMS == 1) {
      for_each_pair<N>(a, p, acc, [&](i64 at, float v0, float v1) {
        add_pair(a.out + at, v0 + p.bias.x, v1 + p.bias.y);
      });
      return;
    }
    constexpr int PAIRS = N / 4, BATCH = N > 96 ? 3 : 8;   // of wide tiles what registers there are
    if (p.row >= a.n) return;
    const float2 bias = p.bias;
    const i64 first = (i64)(p.chunk.row + 2 * p.q) * a.n + p.row;
    const int rows = p.chunk.rows - 2 * p.q;
    const auto token = [](int pair) { return pair / 2 * 8 + pair % 2; };
#pragma unroll
    for (int batch = 0; batch < PAIRS; batch += BATCH) {
      float2 old[BATCH];
#pragma unroll
      for (int i = 0; i < BATCH; i++) {
        const int pair = batch + i;
        if (pair < PAIRS && token(pair) < rows) old[i] = *(const float2*)(a.out + first + (i64)token(pair) * a.n);
      }
#pragma unroll
      for (int i = 0; i < BATCH; i++) {
        const int pair = batch + i;
        const float* sum = acc + pair / 2 * 4 + pair % 2;
        if (pair < PAIRS && token(pair) < rows)
          *(float2*)(a.out + first + (i64)token(pair) * a.n) =
              make_float2(old[i].x + (sum[0] * a.scale + bias.x),
                          old[i].y + (sum[2] * a.scale + bias.y));
      }
    }
  }
};

// Stores where i < bound, by a predicate: the compiler makes a branch of each condition.
DEV void store_below(int bound, int i, void* at, u32 v) {
  asm volatile("{ .reg .pred p; setp.lt.s32 p, %1, %0; @p st.global.b32 [%2], %3; }"
               ::"r"(bound), "r"(i), "l"(at), "r"(v) : "memory");
}

// An expert's sums are infinite only where finite products overflow float32, so pack_finite() serves it.
struct Mlp2 : Plain {
  template <int N, int FORMAT, int TERMS>
  DEV static void store(const GemmArgs& a, const Place& p, const float* acc) {
    const float2 bias = p.bias;
    if constexpr (TERMS == 1) {
      if (p.row >= a.n) return;
      const int rows = p.chunk.rows - 2 * p.q;
      u16* at = (u16*)a.y + (i64)(p.chunk.row + 2 * p.q) * a.n + p.row;
#pragma unroll
      for (int j = 0; j < N / 8; j++, at += 8 * (i64)a.n)
#pragma unroll
        for (int t = 0; t < 2; t++) {
          const float v0 = acc[4 * j + t] * a.scale, v1 = acc[4 * j + 2 + t] * a.scale;
          store_below(rows, 8 * j + t, at + t * a.n, pack_finite(v0 + bias.x, v1 + bias.y));
        }
    } else {
      for_each_pair<N>(a, p, acc, [&](i64 at, float v0, float v1) {
        *(float2*)((float*)a.y + at) = make_float2(v0 + bias.x, v1 + bias.y);
      });
    }
  }
};

// Gate and up meet in one thread, which so has one feature of two tokens. A 16-byte piece of the tiled output is eight
// features of one token, from eight lanes. After a transposition a thread has two features of one token, and four lanes
// write a piece. Features beyond n / 2 come out as zeros, since their weights are zeros. Where the last row block
// covers only the first half of a slab, it also fills the second half with zeros.
struct Mlp1 : Plain {
  enum : int { AT_ONCE = 4 };    // times eight tokens, before it is seen whether there are more
  template <int N, int FORMAT, int TERMS>
  DEV static void store(const GemmArgs& a, const Place& p, const float* acc) {
    const float2 bias = p.bias;
    const int token = LANE / 4, feature = p.row / 16 * 8 + 2 * p.q;   // after the transposition
    u16* first = a.tiled + tiled_index(p.chunk.row + token, feature, a.tiled_rows);
#pragma unroll
    for (int j = 0; j < N / 8; j++) {
      if (TERMS == 1 && j > 0 && j % AT_ONCE == 0 && p.chunk.rows <= 8 * j) break;
      float v[2];
      for (int t = 0; t < 2; t++)
        v[t] = gated_unit(acc[4 * j + t] * a.scale + bias.x, acc[4 * j + 2 + t] * a.scale + bias.y,
                          a.limit, TERMS > 1, [](float x) { return expf(x); });
      u16* at = first + 8 * j * SLAB;                      // the swizzle repeats every eight rows
#pragma unroll
      for (int term = 0; term < TERMS; term++) {
        const u32 both = FORMAT == FORMAT_F16 ? pack_finite(v[0], v[1]) : pack_bf16(v[0], v[1]);
        const u32 turned = transpose8(both);
        store_below(p.chunk.rows - token, 8 * j, at + term * a.tiled_term, turned);
        v[0] -= from_16<FORMAT>((u16)both), v[1] -= from_16<FORMAT>((u16)(both >> 16));
      }
    }
    if (p.row / 64 == a.row_blocks - 1 && a.row_blocks % 2) fill_slab(a, p, TERMS);
  }
  static DEV void fill_slab(const GemmArgs& a, const Place& p, int terms) {
    const int feature = p.row / 16 * 8 + 2 * p.q + 32;
    for (int term = 0; term < terms; term++)
      for (int token = LANE / 4; token < p.chunk.rows; token += 8)
        *(u32*)(a.tiled + term * a.tiled_term + tiled_index(p.chunk.row + token, feature, a.tiled_rows)) = 0;
  }
};

// Running argmax. A block visits the weight rows of one token tile in ascending order, so only a larger logit replaces
// the running maximum, which is rare after the first few chunks. Lanes first vote whether one of them has a larger
// logit, and reduce only then.
struct GreedyLogits : Unembedding {
  enum : bool { GREEDY = true };
  template <int N, int FORMAT, int TERMS>
  DEV static void store(const GemmArgs& a, const Place& p, const float* acc) {
    const bool exists = p.row < a.n;
#pragma unroll
    for (int j = 0; j < N / 8; j++) {
      const int token = 8 * j + 2 * p.q;
      const float2 best = *(const float2*)(p.best + token);
      float v[2];
      int index[2];
      for (int t = 0; t < 2; t++) {
        const float first = acc[4 * j + t] * a.scale, second = acc[4 * j + 2 + t] * a.scale;
        const bool later = second > first || first != first;
        v[t] = exists ? (later ? second : first) : -INFINITY;
        index[t] = p.row + later;
      }
      if (!wave_any(v[0] > best.x || v[1] > best.y)) continue;
      __syncwarp();                                        // all lanes have read before one writes
      for (int t = 0; t < 2; t++) {
        for (int o = 4; o < WAVE; o *= 2) take_larger(v[t], index[t], shfl_xor(v[t], o), shfl_xor(index[t], o));
        if (LANE < 4 && v[t] > (t ? best.y : best.x)) p.best[token + t] = v[t], p.best_index[token + t] = index[t];
      }
      __syncwarp();
    }
  }
  // Keeps the larger value, of equal ones the one with the lower index; NaN loses.
  static DEV void take_larger(float& v, int& index, float other, int other_index) {
    if (other > v || (other == v && other_index < index) || v != v) v = other, index = other_index;
  }
};

// All logits, and the argmax of GreedyLogits.
struct Logits : GreedyLogits {
  template <int N, int FORMAT, int TERMS>
  DEV static void store(const GemmArgs& a, const Place& p, const float* acc) {
    for_each_pair<N>(a, p, acc, [&](i64 at, float v0, float v1) {
      *(float2*)(a.out + at) = make_float2(v0, v1);
    });
    GreedyLogits::store<N, FORMAT, TERMS>(a, p, acc);
  }
};
