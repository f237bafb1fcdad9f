// The epilogue that rotates queries and keys, and stores them and values where attention reads them, for many tokens.
#pragma once
#include "../mma/qkv_store.h"

// Stores four 8 x 8 matrices of 16 bits, transposed: lane l gives the address of row l % 8 of matrix l / 8.
DEV void store_matrices_transposed(u32 at, const u32 (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};"
               ::"r"(at), "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]) : "memory");
}

// What QkvStore (../mma/qkv_store.h) does, for a tile of N tokens, by a warpgroup. A thread has one pair of a head in
// all of its blocks of 64 rows (where heads' width divides 128; else it loads again), so it loads the tokens' angles
// once, while the first slab is multiplied. PASS tokens of a block at a time go through shared memory, so that a thread
// stores 16 bytes, and eight of them 128.
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
