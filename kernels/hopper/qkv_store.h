// Epilogues that rotate queries and keys, and store them and values where attention reads them: QkvStore for few
// tokens, QkvStoreTile for a tile of many.
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

  template <int J, int FORMAT>
  DEV static void store_tokens(const GemmArgs& a, const Place& p, const float* acc, const Tokens<J>& tokens) {
    const RopeStoreArgs& s = store_of(a);
    const Unit unit(s, p.row);
    const float scale = unit.query ? query_scale(s.head_dim) : 1.f;
    const auto pack = [](const float (&v)[2]) {
      return FORMAT == FORMAT_F16 ? pack_f16(v[0], v[1]) : pack_bf16(v[0], v[1]);
    };
#pragma unroll
    for (int j = 0; j < J; j++) {
      float x[2], y[2];
#pragma unroll
      for (int t = 0; t < 2; t++) {
        x[t] = acc[4 * j + t] * a.scale + p.bias.x, y[t] = acc[4 * j + 2 + t] * a.scale + p.bias.y;
        if (unit.value) continue;
        rotate(x[t], y[t], tokens.cos[j][t], tokens.sin[j][t]);
        x[t] = mul_rn(x[t], scale), y[t] = mul_rn(y[t], scale);
      }
      const u32 low = transpose8(pack(x)), high = transpose8(pack(y));
      if (tokens.to[j] == nullptr) continue;
      *(u32*)tokens.to[j] = low;
      *(u32*)(tokens.to[j] + tokens.further[j]) = high;
    }
  }
};

// Stores four 8 x 8 matrices of 16 bits, transposed: lane l gives the address of row l % 8 of matrix l / 8.
DEV void store_matrices_transposed(u32 at, const u32 (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};"
               ::"r"(at), "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]) : "memory");
}

// The same for a tile of N tokens, by a warpgroup. A thread has one pair of a head in all of its blocks of 64 rows
// (where heads' width divides 128; else it loads again), so it loads the tokens' angles once, while the first slab is
// multiplied. PASS tokens of a block at a time go through shared memory, so that a thread stores 16 bytes, and eight
// of them 128.
template <int N> struct QkvStoreTile {
  enum : int { PASS = 64, TOKEN_BYTES = 128 };
  static_assert(N % PASS == 0 && N == 128, "whole passes, and a thread for each token's place");
  using Unit = QkvStore::Unit;
  // A warpgroup's shared memory.
  struct alignas(16) Shared {
    u8 pieces[PASS * TOKEN_BYTES];
    int places[N];               // of tokens in the cache: the page, times KV_PAGE, and the place in it
  };
  Shared& shared;
  const float scale;
  float cos[N / 8][2], sin[N / 8][2];

  DEV QkvStoreTile(const RopeStoreArgs& s, Shared& shared) : shared(shared), scale(query_scale(s.head_dim)) {}

  // `first`: the first unit of the block whose angles are loaded. `last`: the warpgroup's last unit.
  DEV void load(const RopeStoreArgs& s, const Chunk& c, int first, int last) {
    const auto position_of = [&](int token) { return token < c.rows ? s.step.positions[c.row + token] : 0; };
    int positions[N / WAVE];
#pragma unroll
    for (int i = 0; i < N / WAVE; i++) positions[i] = position_of(i * WAVE + LANE);
    const int element = Unit(s, (first + TID / WAVE % 4) * W16::UNIT_ROWS).element + LANE / 4;
#pragma unroll
    for (int j = 0; j < N / 8; j++)
#pragma unroll
      for (int t = 0; t < 2; t++) {
        const int at = shfl(positions[j / 4], j % 4 * 8 + LANE % 4 * 2 + t) * (s.head_dim / 2) + element;
        cos[j][t] = s.cos[at], sin[j][t] = s.sin[at];
      }
    const int token = TID % N;
    if (Unit(s, last * W16::UNIT_ROWS).query || token >= c.rows) return;
    const int position = position_of(token);
    const int page = kv_page(s.step, s.step.chunks[s.step.row_chunk[c.row + token]], position, s.windowed);
    shared.places[token] = page * KV_PAGE + position % KV_PAGE;
  }

  // A block, from unit `first` on, of which `units` exist.
  template <int FORMAT>
  DEV void store(const GemmArgs& a, const Place& p, int first, int units, const float* acc) const {
    const RopeStoreArgs& s = QkvStore::store_of(a);
    const Unit mine(s, p.row);
    const float factor = mine.query ? scale : 1.f;
    const auto pack = [](const float (&v)[2]) {
      return FORMAT == FORMAT_F16 ? pack_f16(v[0], v[1]) : pack_bf16(v[0], v[1]);
    };
    // Of a token in shared memory there are eight pieces: first halves of the four units' heads, then second halves.
    const auto in_shared = [&](int token, int piece) { return token * TOKEN_BYTES + (piece ^ token % 8) * 16; };
    int thread = TID % 128;      // opaque to the compiler, which would keep what follows from it for all chunks
    asm volatile("" : "+r"(thread));
    const u32 to = shared_address(shared.pieces) +
                   in_shared(thread % WAVE / 16 * 8 + thread % 8, thread / WAVE + thread / 8 % 2 * 4);
    const int taken = thread / 8, piece = thread % 8;      // what this thread takes from there: of each 16th token
    const int unit = first + piece % 4;
    const Unit its(s, unit * W16::UNIT_ROWS);
    const int rows = piece % 4 < units && unit * W16::UNIT_ROWS < a.n ? p.chunk.rows - taken : 0;
    const int d = its.element + piece / 4 * (s.head_dim / 2), row_bytes = s.heads * s.head_dim * 2;
    u8* const base = its.query ? (u8*)s.q + (i64)(p.chunk.row + taken) * row_bytes + (its.head * s.head_dim + d) * 2
                               : s.kv + (i64)(its.head - s.heads - (its.value ? s.kv_heads : 0)) * s.head_bytes +
                                     (its.value ? KV_PAGE * s.head_dim * 2 : 0);
#pragma unroll
    for (int pass = 0; pass < N / PASS; pass++) {
#pragma unroll
      for (int both = 0; both < PASS / 16; both++) {       // eight tokens and the next eight
        u32 r[4];
#pragma unroll
        for (int i = 0; i < 2; i++) {
          const int j = pass * (PASS / 8) + both * 2 + i;
          float x[2], y[2];
#pragma unroll
          for (int t = 0; t < 2; t++) {
            x[t] = acc[4 * j + t] * a.scale + p.bias.x, y[t] = acc[4 * j + 2 + t] * a.scale + p.bias.y;
            if (mine.value) continue;
            rotate(x[t], y[t], cos[j][t], sin[j][t]);
            x[t] = mul_rn(x[t], factor), y[t] = mul_rn(y[t], factor);
          }
          r[2 * i] = pack(x), r[2 * i + 1] = pack(y);
        }
        store_matrices_transposed(to + both * 16 * TOKEN_BYTES, r);
      }
      warpgroup_barrier();
      Piece v[PASS / 16];
#pragma unroll
      for (int i = 0; i < PASS / 16; i++) v[i] = *(const Piece*)(shared.pieces + in_shared(i * 16 + taken, piece));
#pragma unroll
      for (int i = 0; i < PASS / 16; i++) {
        const int token = pass * PASS + i * 16;
        if (token >= rows) continue;
        u8* at = base + (i64)token * row_bytes;
        if (!its.query) {
          const int place = shared.places[token + taken];
          at = base + (i64)(place / KV_PAGE) * s.page_bytes + kv_index(place, d, s.head_dim) * 2;
        }
        *(Piece*)at = v[i];
      }
      warpgroup_barrier();
    }
  }
  DEV static void warpgroup_barrier() { asm volatile("bar.sync %0, 128;" ::"r"(2 + TID / 128) : "memory"); }
};
