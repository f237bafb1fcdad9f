// The epilogue that rotates queries and keys, and stores them and values where attention reads them, for few tokens.
#pragma once
#include "../rope.h"
#include "epilogue.h"
#include "registers.h"

// Queries, keys and values as attention reads them: Qkv and rope_store at once, to the bit, for few tokens. A thread's
// two rows are elements i and i + head_dim / 2 of one head (w16.h), which it rotates for two tokens. After a
// transposition, as in Mlp1, it stores two elements of one token, and two half a head further.
struct QkvStore : Qkv {
  using Args = QkvStoreArgs;
  enum : bool { AHEAD = true };
  DEV static const GemmArgs& product_of(const Args& a) { return a.product; }
  // The kernel's arguments begin with the product's.
  DEV static const RopeStoreArgs& store_of(const GemmArgs& a) { return ((const Args&)a).store; }

  // A warp's 16 rows: eight pairs of a head.
  struct Unit {
    int head, element;           // of the first pair
    bool query, value;
    DEV Unit(const RopeStoreArgs& s, int row) {
      const int unit = row / W16::UNIT_ROWS, units = s.head_dim / W16::UNIT_ROWS;
      head = quotient(unit, units), element = (unit - head * units) * 8;
      query = head < s.heads, value = head >= s.heads + s.kv_heads;
    }
  };

  // Of each eight of 8 J tokens: the angles of the two that the thread rotates, and where the one that it stores goes.
  template <int J> struct Tokens {
    float cos[J][2], sin[J][2];
    u16* to[J];                  // NULL: there is no such token
    int further[J];              // from there to half a head further

    DEV void load(const GemmArgs& a, const Place& p) {
      const RopeStoreArgs& s = store_of(a);
      const Unit unit(s, p.row);
#pragma unroll
      for (int j = 0; j < J; j++) {
#pragma unroll
        for (int t = 0; t < 2; t++) {
          const int token = 8 * j + 2 * p.q + t;
          cos[j][t] = 1.f, sin[j][t] = 0.f;
          if (unit.value || token >= p.chunk.rows) continue;
          const i64 position = s.step.positions[p.chunk.row + token];
          const i64 angle = position * (s.head_dim / 2) + unit.element + LANE / 4;
          cos[j][t] = s.cos[angle], sin[j][t] = s.sin[angle];
        }
        to[j] = nullptr;
        const int token = 8 * j + LANE / 4;
        if (p.row < a.n && token < p.chunk.rows) find(s, unit, p.chunk.row + token, to[j], further[j]);
      }
    }
    DEV static void find(const RopeStoreArgs& s, const Unit& unit, int row, u16*& to, int& further) {
      const int element = unit.element + LANE % 4 * 2, half = s.head_dim / 2;
      if (unit.query) {
        to = (u16*)s.q + ((i64)row * s.heads + unit.head) * s.head_dim + element, further = half;
        return;
      }
      const int position = s.step.positions[row], kv_head = unit.head - s.heads - (unit.value ? s.kv_heads : 0);
      const i64 page = kv_page(s.step, s.step.chunks[s.step.row_chunk[row]], position, s.windowed);
      const int at = kv_index(position, element, s.head_dim);
      to = (u16*)(s.kv + page * s.page_bytes + (i64)kv_head * s.head_bytes) + at;
      if (unit.value) to += KV_PAGE * s.head_dim;
      further = kv_index(position, element + half, s.head_dim) - at;
    }
  };

  DEV static float scale_of(const RopeStoreArgs& s, const Unit& unit) {
    return unit.query ? query_scale(s.head_dim) : 1.f;
  }
  // What a thread stores of eight tokens: two elements of one, and the two half a head further.
  template <int FORMAT>
  DEV static void finish(const GemmArgs& a, const Place& p, const Unit& unit, float scale, const float* acc,
                         const float (&cos)[2], const float (&sin)[2], u32& low, u32& high) {
    const auto pack = [](const float (&v)[2]) {
      return FORMAT == FORMAT_F16 ? pack_f16(v[0], v[1]) : pack_bf16(v[0], v[1]);
    };
    float x[2], y[2];
#pragma unroll
    for (int t = 0; t < 2; t++) {
      x[t] = acc[t] * a.scale + p.bias.x, y[t] = acc[2 + t] * a.scale + p.bias.y;
      if (unit.value) continue;
      rotate(x[t], y[t], cos[t], sin[t]);
      x[t] = mul_rn(x[t], scale), y[t] = mul_rn(y[t], scale);
    }
    low = transpose8(pack(x)), high = transpose8(pack(y));
  }

  template <int J, int FORMAT>
  DEV static void store_tokens(const GemmArgs& a, const Place& p, const float* acc, const Tokens<J>& tokens) {
    const RopeStoreArgs& s = store_of(a);
    const Unit unit(s, p.row);
    const float scale = scale_of(s, unit);
#pragma unroll
    for (int j = 0; j < J; j++) {
      u32 low, high;
      finish<FORMAT>(a, p, unit, scale, acc + 4 * j, tokens.cos[j], tokens.sin[j], low, high);
      if (tokens.to[j] == nullptr) continue;
      *(u32*)tokens.to[j] = low;
      *(u32*)(tokens.to[j] + tokens.further[j]) = high;
    }
  }
};
