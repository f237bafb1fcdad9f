// The matrix products by mma.sync: a kernel for each tile, made from an operation (epilogue.h), a kind of weights
// (weights.h), the activations' format and number of terms.
//
// 16 weight rows are mma.sync's A, decoded in registers or read from shared memory, and 8 tokens are its B: so few
// tokens are hardly padded. A block is WARPS warps side by side, each with UNITS units of 16 weight rows, and all with
// the same tile of up to N tokens (work.h).
//
// Stages  Weights and tokens come into a ring buffer of stages by cp.async, each stage SLABS slabs of 64 along K. One
//         barrier a stage: behind it all of the stage is there, and the stage before is free, which is filled again.
// Sums    `fast` (one term) has one float32 accumulator per element, k16 after k16. `exact` sums each slab of
//         64, of MXFP4 each two, in fresh accumulators, low terms first, and adds up these sums in float32, which
//         rounds to nearest as mma.sync does not; of 16-bit weights SLABS_TOGETHER at a time. In both an element's sum
//         depends on nothing but its row and its column.
#pragma once
#include "catalogue.h"
#include "../mma/async_copy.h"
#include "../mma/epilogue.h"
#include "../mma/qkv_store.h"
#include "few.h"
#include "operands.h"
#include "weights.h"
#include "work.h"

// SHARED_BYTES: the block's dynamic shared memory. WIDTH: there is code for each multiple of so many tokens up to N.
template <class Op, class Weights, int FORMAT, int TERMS, int N, int WARPS, int UNITS, int SLABS, int WIDTH,
          int SHARED_BYTES>
struct Gemm {
  enum : bool { IS_W16 = (int)Weights::UNIT_ROWS == (int)W16::UNIT_ROWS, FEW = N == 8 && TERMS == 1 };
  enum : int {
    ELEMENTS = FORMAT,
    THREADS = WARPS * WAVE,
    ALL_UNITS = WARPS * UNITS,
    TERM_BYTES = N * ROW_BYTES,
    TOKEN_BYTES = TERMS * TERM_BYTES,                      // of a slab
    BLOCK_BYTES = 64 / Weights::UNIT_ROWS * Weights::UNIT_BYTES,  // of 64 weight rows, whose four units are as large
    WEIGHT_BYTES = ALL_UNITS * BLOCK_BYTES / 4,
    STAGE_BYTES = SLABS * (TOKEN_BYTES + WEIGHT_BYTES),    // all tokens come first
    STAGES = SHARED_BYTES / STAGE_BYTES,
    CHAINED = IS_W16 ? 1 : SLABS_CHAINED,                  // slabs of fresh accumulators
  };
  static_assert(STAGES >= 2, "a stage is filled while another one is multiplied");
  static_assert(TERMS == 1 || SLABS % CHAINED == 0, "chains do not cross stages");
  static_assert(!FEW || (UNITS == 1 && SLABS == 1), "few.h has a unit a warp, and a slab a stage");
  static_assert(WEIGHT_BYTES % 128 == 0, "rows of tokens and weights are aligned to 128 bytes");
  using Mine = Units<Weights, FORMAT, UNITS>;

  // ---- copies

  struct ManySource : Operands {
    i64 term;                                              // bytes from one to the next
    int k_blocks;

    DEV ManySource(const GemmArgs& a, const Chunk& c)
        : Operands(a, c, BLOCK_BYTES), term(a.in_term * 2), k_blocks(a.k_blocks) {}
    DEV void start(u32 shared) const {
#pragma unroll
      for (int stage = 0; stage < STAGES - 1; stage++) {
        copy(shared + stage * STAGE_BYTES, stage);
        commit_copies();
      }
    }
    // K tile number `k_tile`, of SLABS slabs.
    DEV void copy(u32 to, int k_tile) const {
#pragma unroll
      for (int i = 0; i < SLABS; i++) {
        const int k = k_tile * SLABS + i;
        if (k >= k_blocks) break;
        copy_pieces<WEIGHT_BYTES / 16, THREADS>(to + SLABS * TOKEN_BYTES + i * WEIGHT_BYTES, weights + k * weight_slab,
                                                weight_pieces);
#pragma unroll
        for (int t = 0; t < TERMS; t++)
          copy_pieces<TERM_BYTES / 16, THREADS>(to + i * TOKEN_BYTES + t * TERM_BYTES,
                                                tokens + t * term + k * token_slab, token_pieces);
      }
    }
  };
  using Source = std::conditional_t<FEW, typename Few<Gemm>::Source, ManySource>;

  // ---- a tile whose code is for W tokens

  template <int W> struct Tile {
    enum : int { PAIRS = W / 16, SINGLES = W / 8 % 2 };    // of 8 tokens
    enum : bool { OVERLAPS = !IS_W16 && TERMS == 1 && SLABS == 1 && (int)STAGES >= 3 };
    float sum[UNITS][W / 2];

    static DEV void clear(float (&sum)[UNITS][W / 2]) {
#pragma unroll
      for (int m = 0; m < UNITS; m++)
#pragma unroll
        for (int i = 0; i < W / 2; i++) sum[m][i] = 0.f;
    }
    static DEV void add(float (&sum)[UNITS][W / 2], const float (&more)[UNITS][W / 2]) {
#pragma unroll
      for (int m = 0; m < UNITS; m++)
#pragma unroll
        for (int i = 0; i < W / 2; i++) sum[m][i] = add_rn(sum[m][i], more[m][i]);
    }

    // sum += a k16's weights times its tokens. `tokens`: the slab's.
    static DEV void multiply_k16(float (&sum)[UNITS][W / 2], const u32 (&a)[UNITS][4], u32 tokens, int k16) {
      // Rows LANE % 8, and of pairs of 8 tokens LANE / 16 * 8 more; pieces are swizzled.
      const u32 pair = tokens + (LANE % 8 + LANE / 16 * 8) * ROW_BYTES + (LANE / 8 % 2 ^ LANE % 8) * 16;
#pragma unroll
      for (int j = 0; j < PAIRS; j++) {
        u32 b[4];
        load_matrices(b, (pair ^ k16 * 32) + j * 16 * ROW_BYTES);
#pragma unroll
        for (int m = 0; m < UNITS; m++) {
          mma<FORMAT>(sum[m] + 8 * j, a[m], b[0], b[1]);
          mma<FORMAT>(sum[m] + 8 * j + 4, a[m], b[2], b[3]);
        }
      }
      if constexpr (SINGLES) {
        u32 b[2];
        load_two_matrices(b, (pair_of_one(tokens) ^ k16 * 32) + PAIRS * 16 * ROW_BYTES);
#pragma unroll
        for (int m = 0; m < UNITS; m++) mma<FORMAT>(sum[m] + 8 * PAIRS, a[m], b[0], b[1]);
      }
    }
    // sum += a slab's weights times one term of its tokens.
    static DEV void multiply_slab(float (&sum)[UNITS][W / 2], const Mine& mine, u32 tokens) {
#pragma unroll
      for (int k16 = 0; k16 < 4; k16++) {
        u32 a[UNITS][4];
        mine.fragment(k16, a);
        multiply_k16(sum, a, tokens, k16);
      }
    }
    static DEV u32 pair_of_one(u32 tokens) {
      return tokens + LANE % 8 * ROW_BYTES + (LANE / 8 % 2 ^ LANE % 8) * 16;
    }
    static DEV void load_two_matrices(u32 (&r)[2], u32 at) {
      asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1}, [%2];"
                   : "=r"(r[0]), "=r"(r[1]) : "r"(at) : "memory");
    }

    // COUNT slabs of a stage from slab `first` on, in fresh accumulators.
    template <int COUNT>
    static DEV void multiply_chain(float (&sum)[UNITS][W / 2], u32 stage, int first, const typename Mine::At& at) {
      float part[UNITS][W / 2];
      clear(part);
#pragma unroll
      for (int term = TERMS - 1; term >= 0; term--)
#pragma unroll
        for (int i = first; i < first + COUNT; i++) {
          Mine mine;
          mine.load(stage + SLABS * TOKEN_BYTES + i * WEIGHT_BYTES, at);
          multiply_slab(part, mine, stage + i * TOKEN_BYTES + term * TERM_BYTES);
        }
      add(sum, part);
    }

    DEV void multiply_stage(u32 stage, int slabs, const typename Mine::At& at) {
#pragma unroll
      for (int i = 0; i < SLABS; i += CHAINED) {
        if (i >= slabs) break;
        if constexpr (TERMS == 1) {
#pragma unroll
          for (int j = i; j < i + CHAINED && j < SLABS; j++) {
            if (j >= slabs) break;
            Mine mine;
            mine.load(stage + SLABS * TOKEN_BYTES + j * WEIGHT_BYTES, at);
            multiply_slab(sum, mine, stage + j * TOKEN_BYTES);
          }
        } else if (CHAINED == 1 || i + CHAINED <= slabs) {
          multiply_chain<CHAINED>(sum, stage, i, at);
        } else {
          multiply_chain<1>(sum, stage, i, at);
        }
      }
    }

    // MXFP4 in stages of one slab: a k16's weights are decoded before the one ahead of it is multiplied, also
    // over the wait for a stage. (16-bit weights, of which there are more to load, take longer so.)
    DEV void multiply_ahead(int k_blocks, const Source& source, u32 shared, const typename Mine::At& at) {
      wait_copies<STAGES - 2>();
      barrier();
      Mine mine;
      mine.load(shared + TOKEN_BYTES, at);
      u32 fragment[2][UNITS][4];
      mine.fragment(0, fragment[0]);
      int stage = 0, fill = STAGES - 1;
      for (int k = 0; k < k_blocks; k++) {
        const u32 tokens = shared + stage * STAGE_BYTES;
#pragma unroll
        for (int k16 = 0; k16 < 3; k16++) {
          mine.fragment(k16 + 1, fragment[(k16 + 1) % 2]);
          multiply_k16(sum, fragment[k16 % 2], tokens, k16);
        }
        if (++stage == STAGES) stage = 0;
        wait_copies<STAGES - 3>();
        barrier();
        if (k + STAGES - 1 < k_blocks) source.copy(shared + fill * STAGE_BYTES, k + STAGES - 1);
        commit_copies();
        if (++fill == STAGES) fill = 0;
        mine.load(shared + stage * STAGE_BYTES + TOKEN_BYTES, at);  // behind the last slab anything
        mine.fragment(0, fragment[0]);
        multiply_k16(sum, fragment[1], tokens, 3);
      }
    }

    DEV void multiply(const GemmArgs& a, Source& source) {
      clear(sum);
      if constexpr (FEW)
        Few<Gemm>::multiply(shared_address(DYNAMIC_SHARED), TID / WAVE, a.k_blocks, source, sum);
      else if constexpr (OVERLAPS) multiply_ahead(a.k_blocks, source, shared_address(DYNAMIC_SHARED), Mine::locate());
      else multiply_in_turn(a, source);
    }
    DEV void multiply_in_turn(const GemmArgs& a, const Source& source) {
      const int k_tiles = (a.k_blocks + SLABS - 1) / SLABS;
      const u32 shared = shared_address(DYNAMIC_SHARED);
      const typename Mine::At at = Mine::locate();
      float total[IS_W16 && TERMS > 1 ? UNITS : 1][W / 2];
      if constexpr (IS_W16 && TERMS > 1) clear(total);
      int fill = STAGES - 1, stage = 0;                    // where the next K tile goes, and where this one is
      for (int k_tile = 0; k_tile < k_tiles; k_tile++) {
        wait_copies<STAGES - 2>();
        barrier();
        if (k_tile + STAGES - 1 < k_tiles) source.copy(shared + fill * STAGE_BYTES, k_tile + STAGES - 1);
        commit_copies();
        if constexpr (IS_W16 && TERMS > 1) {
          static_assert(SLABS_TOGETHER % SLABS == 0, "sums of slabs do not cross stages");
          if (k_tile > 0 && k_tile % (SLABS_TOGETHER / SLABS) == 0) add(total, sum), clear(sum);
        }
        multiply_stage(shared + stage * STAGE_BYTES, min((int)SLABS, a.k_blocks - k_tile * SLABS), at);
        if (++stage == STAGES) stage = 0;
        if (++fill == STAGES) fill = 0;
      }
      if constexpr (IS_W16 && TERMS > 1) {
        add(total, sum);
#pragma unroll
        for (int m = 0; m < UNITS; m++)
#pragma unroll
          for (int i = 0; i < W / 2; i++) sum[m][i] = total[m][i];
      }
    }
  };

  // ---- the argmax of each token of the tile over the block's rows, in shared memory

  struct Best {
    float best[WARPS][N];
    int index[WARPS][N];
  };
  static_assert(!Op::GREEDY || (int)sizeof(Best) <= SHARED_BYTES, "it takes the stages' place");
  static DEV Best& best() { return *(Best*)DYNAMIC_SHARED; }
  static DEV void reset_best() {
    barrier();                                             // all warps have read the last stage
    for (int i = LANE; i < N; i += WAVE) best().best[TID / WAVE][i] = -INFINITY, best().index[TID / WAVE][i] = 0;
    __syncwarp();
  }
  static DEV void store_best(const GemmArgs& a, const Chunk& c) {
    barrier();
    for (int token = TID; token < c.rows; token += THREADS) {
      float v = best().best[0][token];
      int index = best().index[0][token];
      for (int w = 1; w < WARPS; w++)
        GreedyLogits::take_larger(v, index, best().best[w][token], best().index[w][token]);
      const i64 at = (i64)(c.unit / ALL_UNITS) * a.best_rows + c.row + token;
      a.best[at] = v, a.best_index[at] = index;
    }
  }

  // ---- the kernel

  static DEV Place place_of(const Chunk& c, int m, float2 bias) {
    const int unit = c.unit + TID / WAVE * UNITS + m;
    return {c, unit * 16 + LANE / 4 * 2, LANE % 4, bias, best().best[TID / WAVE], best().index[TID / WAVE]};
  }

  template <int W> static DEV void run_tile(const GemmArgs& a, const Chunk& c, Source& source) {
    float2 bias[UNITS];
    typename Op::template Tokens<W / 8> tokens[Op::AHEAD ? UNITS : 1];
    const auto load_ahead = [&] {
#pragma unroll
      for (int m = 0; m < UNITS; m++) {
        const Place place = place_of(c, m, {});
        bias[m] = Op::bias(a, c.group, place.row);
        if constexpr (Op::AHEAD) tokens[m].load(a, place);
      }
    };
    constexpr bool AHEAD = TERMS == 1 && UNITS * W <= 128;  // larger ones have no registers for it during the product
    if (AHEAD) load_ahead();
    Tile<W> tile;
    tile.multiply(a, source);
    if (!AHEAD) load_ahead();
    if constexpr (Op::GREEDY) reset_best();
#pragma unroll
    for (int m = 0; m < UNITS; m++) {
      if (TID / WAVE * UNITS + m >= c.units) break;
      const Place place = place_of(c, m, bias[m]);
      if constexpr (Op::AHEAD) Op::template store_tokens<W / 8, FORMAT>(a, place, tile.sum[m], tokens[m]);
      else Op::template store<W, FORMAT, TERMS>(a, place, tile.sum[m]);
    }
    if constexpr (Op::GREEDY) store_best(a, c);
  }
  template <int W> static DEV void pick(const GemmArgs& a, const Chunk& c, Source& source) {
    if constexpr (W < N)
      if (c.rows > W) return pick<(W + WIDTH < N ? W + WIDTH : N)>(a, c, source);
    run_tile<W>(a, c, source);
  }

  static DEV void run(const GemmArgs& a) {
    let_successor_start();
    after_predecessor();
    const Chunk c = find_work<N, ALL_UNITS>(a);
    if (c.rows == 0) return;
    Source source(a, c);
    source.start(shared_address(DYNAMIC_SHARED));
    pick<WIDTH>(a, c, source);
  }
};

// The maker. BLOCKS: of a multiprocessor, to compile for.
#define PRODUCT(NAME, THREADS, SHARED_BYTES, OP, WEIGHTS, FORMAT, TERMS, N, MOST_ROWS, UNITS, SLABS, WIDTH, BLOCKS)\
  KERNEL(NAME, OP::Args, THREADS, BLOCKS, 1) {                                                                     \
    Gemm<OP, WEIGHTS, FORMAT, TERMS, N, THREADS / WAVE, UNITS, SLABS, WIDTH, SHARED_BYTES>::run(                   \
        OP::product_of(a));                                                                                        \
  }
