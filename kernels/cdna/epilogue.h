// Epilogues, one struct per operation. A lane has 8 consecutive outputs of one token: `sums` are outputs o .. o + 7 of
// row `row` of the input buffer, already multiplied by the weights' scale. Mlp2's EXACT and terms above one round as
// the float32 baseline does.
#pragma once
#include "../gpu/gated.h"
#include "../rope_pairs.h"
#include "weights.h"

struct Place { int group; int row; int o; };

// Within one launch a product's arguments are a command's.
DEV const LayerCommand& command_of(const GemmArgs& a) {
  return *(const LayerCommand*)((const u8*)&a - __builtin_offsetof(LayerCommand, args));
}

// The bias; 0 for padding rows of the last row block, which have none.
DEV float bias_of(const GemmArgs& a, const Place& p, int i) {
  return p.o + i < a.n ? a.bias[(i64)p.group * a.n + p.o + i] : 0.f;
}

DEV void store_floats(float* row, int o, int n, const float* v) {
  if (n % 8 == 0) {
    if (o >= n) return;
    hand_on((f32v4*)(row + o), f32v4{v[0], v[1], v[2], v[3]});
    hand_on((f32v4*)(row + o + 4), f32v4{v[4], v[5], v[6], v[7]});
    return;
  }
  for (int i = 0; i < 8; i++) if (o + i < n) row[o + i] = v[i];
}

struct Qkv {
  // Rows in pairs half a head apart (weights.h) keep that order; their number is a multiple of 8.
  static DEV void add_bias(const GemmArgs& a, const Place& p, float* sums) {
    if (a.half == 0) {
      for (int i = 0; i < 8; i++) sums[i] = add_rn(sums[i], bias_of(a, p, i));
      return;
    }
    if (p.o >= a.n) return;
    const float* bias = a.bias + matrix_row(p.o, a.half);
    const f32v4 first = *(const f32v4*)bias, second = *(const f32v4*)(bias + a.half);
    for (int i = 0; i < 8; i++) sums[i] = add_rn(sums[i], i % 2 ? second[i / 2] : first[i / 2]);
  }
  static DEV void store(const GemmArgs& a, const Place& p, float* sums) {
    add_bias(a, p, sums);
    store_floats(a.out + (i64)p.row * a.n, p.o, a.n, sums);
  }
};

// Queries, keys and values as attention reads them: Qkv and rope_store at once, to the bit. A lane has four pairs of
// one head.
template <int FORMAT> struct QkvStore {
  static DEV void store(const GemmArgs& a, const Place& p, float* sums) {
    if (p.o >= a.n) return;
    const RopeStoreArgs& s = ((const QkvStoreArgs&)a).store;        // the kernel's arguments begin with the product's
    Qkv::add_bias(a, p, sums);
    const RowPlace place = row_place(s, p.row);
    const int head = p.o / s.head_dim, element = (p.o - head * s.head_dim) / 2;
    const bool query = head < s.heads, value = head >= s.heads + s.kv_heads;
    const i64 angle = (i64)place.position * (s.head_dim / 2) + element;
    const f32v4 cos = *(const f32v4*)(s.cos + angle), sin = *(const f32v4*)(s.sin + angle);
    const float scale = query ? query_scale(s.head_dim) : 1.f;
    float x[4], y[4];
    for (int j = 0; j < 4; j++) {
      x[j] = sums[2 * j], y[j] = sums[2 * j + 1];
      if (value) continue;
      rotate(x[j], y[j], cos[j], sin[j]);
      x[j] = mul_rn(x[j], scale), y[j] = mul_rn(y[j], scale);
    }
    store_pairs<FORMAT>(s, place, head, element, x, y);
    if constexpr (WITHIN_LAUNCH) {
      if (query) return;
      // Attention takes them from here, as nobody polls the cache.
      u16* newest = command_of(a).newest + ((i64)p.row * 2 * s.kv_heads + head - s.heads) * s.head_dim + element;
      hand_on4<FORMAT>(newest, 0, x);
      hand_on4<FORMAT>(newest, s.head_dim / 2, y);
    }
  }
};

struct AttnOut {
  static DEV void store(const GemmArgs& a, const Place& p, float* sums) {
    float* x = a.out + (i64)p.row * a.n;
    if constexpr (WITHIN_LAUNCH) {
      if (p.o >= a.n) return;
      const float* from = command_of(a).from + (i64)p.row * a.n + p.o;
      const f32v4 low = take((const f32v4*)from), high = take((const f32v4*)(from + 4));
      for (int i = 0; i < 8; i++) sums[i] = add_rn(i < 4 ? low[i] : high[i - 4], add_rn(sums[i], bias_of(a, p, i)));
      store_floats(x, p.o, a.n, sums);
      if (float* later = command_of(a).to) {
        f32v4* at = (f32v4*)(later + (i64)p.row * a.n + p.o);
        at[0] = f32v4{sums[0], sums[1], sums[2], sums[3]}, at[1] = f32v4{sums[4], sums[5], sums[6], sums[7]};
      }
      return;
    }
    for (int i = 0; i < 8; i++)
      sums[i] = p.o + i < a.n ? add_rn(x[p.o + i], add_rn(sums[i], bias_of(a, p, i))) : 0.f;
    store_floats(x, p.o, a.n, sums);
  }
};

struct Logits {
  static DEV void store(const GemmArgs& a, const Place& p, float* sums) {
    store_floats(a.out + (i64)p.row * a.n, p.o, a.n, sums);
  }
};

// Outputs alternate gate and up, so a lane has four activations: half a piece of the next product's input. Columns
// after the last one, up to the slab's end, become zeros, since their weights and biases are zeros.
template <int FORMAT, int TERMS> struct Mlp1 {
  static DEV float gated(float gate, float up, float limit) {
    return gated_unit(gate, up, limit, TERMS > 1, [](float x) { return __builtin_expf(x); });
  }
  static DEV void store(const GemmArgs& a, const Place& p, float* sums) {
    for (int i = 0; i < 8; i++) sums[i] = add_rn(sums[i], bias_of(a, p, i));
    u16* at = a.tiled + tiled_index(p.row, p.o / 2, a.tiled_rows);
    float v[4];
    for (int i = 0; i < 4; i++) v[i] = gated(sums[2 * i], sums[2 * i + 1], a.limit);
    for (int term = 0; term < TERMS; term++) store_term(at + term * a.tiled_term, v);
  }
  static DEV void store_zeros(const GemmArgs& a, int row, int o) {
    for (int term = 0; term < TERMS; term++)
      hand_on((u32v2*)(a.tiled + term * a.tiled_term + tiled_index(row, o / 2, a.tiled_rows)), u32v2{0, 0});
  }
  // Stores the leading term of v and leaves the remainder in v, as store_terms does.
  static DEV void store_term(u16* at, float* v) {
    const float up = FORMAT == FORMAT_F16 ? (float)(1 << TERM_SHIFT) : 1.f;
    u16 t[4];
    for (int i = 0; i < 4; i++) {
      t[i] = leading_term<FORMAT>(v[i]);
      v[i] = (v[i] - from_16<FORMAT>(t[i])) * up;
    }
    hand_on((u32v2*)at, u32v2{(u32)t[1] << 16 | t[0], (u32)t[3] << 16 | t[2]});
  }
};

template <bool EXACT> struct Mlp2 {
  static DEV void store(const GemmArgs& a, const Place& p, float* sums) {
    for (int i = 0; i < 8; i++) sums[i] = add_rn(sums[i], bias_of(a, p, i));
    if (EXACT) return store_floats((float*)a.y + (i64)p.row * a.n, p.o, a.n, sums);
    u16* y = (u16*)a.y + (i64)p.row * a.n;
    if (a.n % 8 == 0) {
      if (p.o < a.n)
        hand_on((u32v4*)(y + p.o), u32v4{pack_f16(sums[0], sums[1]), pack_f16(sums[2], sums[3]),
                                         pack_f16(sums[4], sums[5]), pack_f16(sums[6], sums[7])});
      return;
    }
    for (int i = 0; i < 8; i++) if (p.o + i < a.n) y[p.o + i] = to_f16(sums[i]);
  }
};
