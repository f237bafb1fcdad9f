// The matrix products on Hopper: one persistent, warp-specialized kernel template, made from an operation (epilogue.h),
// a kind of weights (mxfp4.h, w16.h), the activations' format and number of terms, a tile, and a loop that multiplies.
// This file has the frame, in the order in which a kernel runs: the table of the groups' rows, the producer, which
// fills stages, and the consumers, which take chunks. How they multiply and store is in a file for each way:
//
//   kernels                                        loop             producers   chunks found by   stored by
//   qkv, attn_out: up to 32 rows, FP16             by_warps.h       up to 4     each role         OwnEpilogue
//                  up to 64 rows (BF16: 16)        w16_loop.h       up to 4     each role         OwnEpilogue
//                  from 65 rows, while few, FP16   tokens_first.h   1           each role         TokensFirst
//                  more                            w16_loop.h       1           the producer      OwnEpilogue
//   qkv_store:     up to 8 rows                    by_warps.h       up to 4     each role         OwnEpilogue
//                  many                            w16_loop.h       1           the producer      StoredTile
//   unembedding                                    w16_loop.h       1           each role         OwnEpilogue
//   mlp1, mlp2:    MXFP4, up to 16 tokens, FP16    by_warps.h       up to 4     each role         OwnEpilogue
//                  MXFP4, more: mlp1               codes_loop.h     1           the producer      OneEpilogue
//                               mlp2               codes_loop.h     1           the producer      OwnEpilogue
//                  16-bit weights                  w16_loop.h       1           the producer      OwnEpilogue
//   `exact`:       qkv, attn_out, up to 8 rows     exact_loop.h     up to 4     each role         OwnEpilogue
//                  unembedding                     exact_loop.h     1           each role         OwnEpilogue
//                  all others                      exact_loop.h     1           the producer      OwnEpilogue
//
// The catalogue (catalogue.rs) says for each tile which loop it has, and why; the rest follows below ("who does what").
//
// The operands are swapped: 64 weight rows are wgmma's A, decoded in registers or read from shared memory, and up to N
// tokens are B. So few tokens are not padded to 64: wgmma's N goes down to 8. With 16-bit weights it can also be the
// other way round (tokens_first.h).
//
//   One block per multiprocessor: `warpgroups` consumer warpgroups, and a producer whose threads issue bulk copies.
//   A stage of the pipeline is a slab of 64 along K, or several: the tile's tokens (one contiguous run of rows of a
//     slab of the tiled layout, which already has wgmma's swizzle) and the chunk's weight units (contiguous, too); of
//     several slabs all tokens come first. All shared memory but Control is stages: DRAM's latency times its bandwidth
//     is 33 KB per multiprocessor.
//   Warpgroup w has the blocks w, w + warpgroups, .. of the chunk's blocks of 64 weight rows, over all of K, in
//     registers; where tokens come first, all of the chunk's rows for its 64 tokens.
//
// Sums: `fast` (one term) has one float32 accumulator per element, k16 step after k16 step. `exact` sums each slab of
// 64, of MXFP4 each two, in fresh accumulators, low terms first, and adds up these sums in float32 (Hopper converts to
// float64 slowly, and float32 additions round to nearest, as wgmma's do not), of 16-bit weights SLABS_TOGETHER at a
// time. In both an element's sum depends on nothing but its row and its column.
//
// How exact that is, by an emulation of wgmma's additions (groups of 16 along K, cut off 25 bits below the largest;
// `cargo bench --bench gpu --features cuda -- sums`), in units of 2^-24 of the sums' root mean square:
//
//   order of additions                          MXFP4   16-bit weights
//   this one                                      1.8              2.2
//   each slab's sums added exactly                0.9              1.8
//   one float32 sum in order                       16               16
//
// PDL (programmatic dependent launch): a block lets the successor start only after its own predecessor has ended. So
// what the predecessor's predecessor and earlier kernels wrote is visible to a kernel from its start. mlp2, whose
// predecessor is mlp1, therefore knows at once how many rows each expert has, and the dense products have their number
// of rows from the plan: both fill the pipeline with weights before they wait. Only mlp1 has to wait for the router; of
// a single row it waits for the row and its picks alone, and not for that kernel's end. Of a single
// row each block knows its share of the work before it knows which experts were picked.
#pragma once
#include "block_argmax.h"
#include "by_warps.h"
#include "chunk.h"
#include "codes_loop.h"
#include "../mma/epilogue.h"
#include "exact_loop.h"
#include "qkv_store.h"
#include "schedule.h"
#include "tokens_first.h"

// A tile of up to N tokens. wgmma's width is the least of WIDTHS (schedule.h) that holds them; each width has code of
// its own. BLOCKS: blocks of 64 weight rows per warpgroup. SINGLE: launched for at most N rows in all, which are one
// tile.
template <int N_, u32 WIDTHS_, int WARPGROUPS_, int BLOCKS_, bool SINGLE_> struct Tile {
  enum : int { N = N_, LEAST = width_of(WIDTHS_, 1), WARPGROUPS = WARPGROUPS_, BLOCKS = BLOCKS_ };
  enum : u32 { WIDTHS = WIDTHS_ };
  enum : bool { SINGLE = SINGLE_, TOKENS_FIRST = false };
  static_assert(width_of(WIDTHS_, N_) == N_, "the widest is the tile's");
  static constexpr int chunk(int block_units) { return WARPGROUPS * BLOCKS * block_units; }
  static DEV void enter_rows(GroupTable& table, const GemmArgs& a) {
    if constexpr ((int)LEAST == (int)N) fill_table<N>(table, a);
    else fill_table_by_width<N, WIDTHS>(table, a);
  }
};
// The same with tokens as wgmma's rows (tokens_first.h): chunks of at most UNITS units of weights.
template <int N_, int WARPGROUPS_, int UNITS_, bool SINGLE_> struct TokenTile {
  enum : int { N = N_, WARPGROUPS = WARPGROUPS_, UNITS = UNITS_ };
  enum : bool { SINGLE = SINGLE_, TOKENS_FIRST = true };
  static_assert(N_ == WARPGROUPS_ * 64, "a warpgroup for each 64 tokens");
  static constexpr int chunk(int) { return UNITS; }
  static DEV void enter_rows(GroupTable& table, const GemmArgs& a) { fill_table_by_width<N, 0>(table, a); }
};

// The loops. SLABS: of a stage. BY_WARPS: each warp multiplies by itself.
template <int SLABS_> struct OfWarps {
  enum : int { SLABS = SLABS_ };
  enum : bool { BY_WARPS = true };
  template <class G, int N, int M> using Loop = ByWarps<G, N, M>;
};
struct OfWarpgroups {
  enum : int { SLABS = 1 };
  enum : bool { BY_WARPS = false };
};
struct OfW16 : OfWarpgroups {
  template <class G, int N, int M> using Loop = W16Loop<G, N, M>;
};
template <int K16S, int IN_FLIGHT> struct OfCodes : OfWarpgroups {
  template <class G, int N, int M> using Loop = CodesLoop<G, K16S, IN_FLIGHT, N, M>;
};
struct OfTerms : OfWarpgroups {
  template <class G, int N, int M> using Loop = ExactLoop<G, N, M>;
};

enum : int { MAX_STAGES = 32 };
// Producer threads, each in a warp of its own.
enum : int { MOST_PRODUCERS = 4 };

// SHARED_BYTES: the block's dynamic shared memory, stages and Control.
template <class Op_, class Weights, int FORMAT, int TERMS_, class T_, class By, int SHARED_BYTES> struct Gemm {
  using Op = Op_;
  using T = T_;
  template <int N, int M> using Loop = typename By::template Loop<Gemm, N, M>;
  enum : bool {
    IS_W16 = (int)Weights::UNIT_ROWS == (int)W16::UNIT_ROWS,
    TOKENS_FIRST = T::TOKENS_FIRST,
    BY_WARPS = By::BY_WARPS
  };

  // -------------------------------------------------------------------------------------- shared memory: stages
  enum : int {
    ELEMENTS = FORMAT,
    TERMS = TERMS_,
    UNIT_ROWS = Weights::UNIT_ROWS,
    BLOCK_UNITS = 64 / UNIT_ROWS,
    CHUNK = T::chunk(BLOCK_UNITS),
    CONSUMERS = T::WARPGROUPS * 128,
    TERM_BYTES = T::N * SLAB * 2,
    TOKEN_BYTES = TERMS * TERM_BYTES,
    UNIT_BYTES = Weights::UNIT_BYTES,
    BLOCK_BYTES = BLOCK_UNITS * UNIT_BYTES,
    NEXT_BLOCK = T::WARPGROUPS * BLOCK_BYTES,              // from a warpgroup's block to its next
    SLABS = By::SLABS,                                     // of a stage
    WEIGHT_BYTES = CHUNK * UNIT_BYTES,
    STAGE_BYTES = (SLABS * (TOKEN_BYTES + WEIGHT_BYTES) + 1023) / 1024 * 1024,
    BEST_WARPS = Op::GREEDY ? T::WARPGROUPS * 4 : 0,
  };
  struct Control {
    u64 full[MAX_STAGES], empty[MAX_STAGES];
    GroupTable table;
    Chunk chunks[MAX_STAGES + 1];  // FOUND: the block's in turn. The producer is at most as many ahead as it has stages
    alignas(8) float best[BEST_WARPS + 1][T::N];
    int best_index[BEST_WARPS + 1][T::N];
  };
  // Queries, keys and values of many tokens are stored through shared memory, between stages and Control.
  enum : bool { STORED_TILE = Op::AHEAD && !BY_WARPS };
  enum : int {
    STORE_BYTES = STORED_TILE ? T::WARPGROUPS * (int)sizeof(QkvStoreTile<128>::Shared) : 0,
    FITTING = (SHARED_BYTES - (int)sizeof(Control) - STORE_BYTES) / STAGE_BYTES,
    STAGES = FITTING < MAX_STAGES ? FITTING : MAX_STAGES
  };
  static_assert(STAGES >= 3, "a pipeline needs stages");
  static DEV u8* behind_stages() { return DYNAMIC_SHARED + STAGES * STAGE_BYTES; }
  static DEV Control& control() { return *(Control*)(behind_stages() + STORE_BYTES); }

  // ---------------------------------------------------------------------------------- who does what, when
  // Where rows are few each of the first stages is filled by a lane of its own.
  enum : bool { FILLED = (int)T::N <= 64 };
  // Where a few tokens are multiplied sooner than one thread can request the next stage, several threads take turns.
  enum : bool { SEVERAL = BY_WARPS || (FILLED && T::SINGLE && (int)T::WARPGROUPS == 1) };
  static_assert(FILLED || !SEVERAL, "the first stages are filled by lanes of one warp");
  enum : int { PRODUCERS = !SEVERAL ? 1 : STAGES < MOST_PRODUCERS ? STAGES : MOST_PRODUCERS };
  // Whether experts have several token tiles: those of a later round read the same weights again, from the L2.
  enum : bool { READ_AGAIN = !IS_W16 && (int)T::N > 128 };

  // Whether weights are requested before the predecessor ends.
  enum : bool { EARLY = Op::EARLY || T::SINGLE };
  // An operation's own number was measured with the tile of 8 tokens alone; wider ones have what suits all operations.
  enum : int { EARLY_SLABS = (int)T::N == 8 ? (int)Op::EARLY_SLABS : (int)Plain::EARLY_SLABS };
  // Stages whose weights are requested early where rows are not few: 20 to 60 KB were alike, all stages slower.
  enum : int {
    IN_40_KB = 40 * 1024 / WEIGHT_BYTES,
    WEIGHTS_FIRST = TOKENS_FIRST && IN_40_KB < STAGES ? IN_40_KB : STAGES
  };
  // Whether what the epilogue needs is loaded before the predecessor ends: it follows from the plan and from weights,
  // by a chain of loads that takes longer than the first stage.
  enum : bool { PLANNED = Op::EARLY && T::SINGLE && BY_WARPS };

  // Whether the producer finds the consumers' chunks, too: they read the next one when its first stage is full.
  enum : bool { FOUND = !SEVERAL && !T::SINGLE && !TOKENS_FIRST && !Op::GREEDY };
  // Whether all widths and numbers of blocks share one epilogue: the code of mlp1's takes as long to come from memory
  // as to run.
  enum : bool { JOINED = Op::JOINED && FOUND && !IS_W16 && TERMS == 1 };
  // What a consumer warpgroup does with a chunk.
  using Way = std::conditional_t<TOKENS_FIRST, TokensFirst<Gemm>,
              std::conditional_t<STORED_TILE, StoredTile<Gemm>,
              std::conditional_t<JOINED, OneEpilogue<Gemm>, OwnEpilogue<Gemm>>>>;

  // setmaxnreg: the producer gives up the registers that consumers gain. A single consumer warpgroup has enough
  // without, and so have those of 64 tokens.
  enum : bool { SHIFTED = (int)T::WARPGROUPS > 1 && !TOKENS_FIRST };
  enum : int {
    PRODUCER_REGISTERS = BY_WARPS ? 56 : T::WARPGROUPS == 3 ? 32 : 24,
    CONSUMER_REGISTERS = BY_WARPS ? 144 : T::WARPGROUPS == 2 ? 240 : T::WARPGROUPS == 3 ? 160 : 112
  };
  using Work = typename Op::template Schedule<T::N, CHUNK>;

  static DEV void advance(Pipe& p) { if (++p.stage == STAGES) p.stage = 0, p.phase ^= 1; }
  static DEV void wait_full(const Pipe& p) { barrier_wait(p.full + 8 * p.stage, p.phase); }
  // Releases a stage: one arrival from each consumer warp. The machine does not hold it back until loads from the stage
  // are done, so what they load has to be used before.
  static DEV void release(const Pipe& p, int stage) { if (LANE == 0) barrier_arrive(p.empty + 8 * stage); }
  static DEV void release(const Pipe& p, int first, int count) {
    const int stage = first + LANE;
    if (LANE < count) barrier_arrive(p.empty + 8 * (stage < STAGES ? stage : stage - STAGES));
  }

  static DEV int rows_of_single(const GemmArgs& a) { return min(load_fresh(a.rows), (int)T::N); }
  // At least eight rows are copied, so the producer of a tile of eight need not wait for their number.
  static DEV int rows_to_copy(const GemmArgs& a) { return (int)T::N == 8 ? 8 : rows_of_single(a); }

  // Whether the work follows from the router's picks of a single row, see GemmArgs.
  static DEV bool by_picks(const GemmArgs& a) { return Op::OF_EXPERTS && a.picks; }

  static DEV void run(const GemmArgs& a) {
    if (!EARLY && !by_picks(a)) after_predecessor();
    Pipe p = {shared_address(DYNAMIC_SHARED), shared_address(control().full), shared_address(control().empty), 0, 0};
    if (!SEVERAL) prepare(a, p);
    else if (TID >= CONSUMERS && TID < CONSUMERS + PRODUCERS * WAVE) prepare_producer(a, p);
    barrier();
    if (TID >= CONSUMERS) {
      if constexpr (SHIFTED) asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"((int)PRODUCER_REGISTERS));
      if (TID < CONSUMERS + (FILLED ? PRODUCERS * WAVE : 1)) produce(a, Work(control().table), p);
    } else {
      if constexpr (SHIFTED) asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"((int)CONSUMER_REGISTERS));
      consume(a, Work(control().table), p);
    }
  }

  static DEV void prepare(const GemmArgs& a, const Pipe& p) {
    if (TID < WAVE) {
      make_table(a);
      if (by_picks(a)) enter_picks(control().table, a);
    } else if (TID / WAVE == 1) {
      make_barriers(p, LANE);
    }
  }
  // Where there are several, each producer's warp makes the table, all the same one, and requests what its first stages
  // take: so none waits for another before the first copies are on their way.
  static DEV void prepare_producer(const GemmArgs& a, const Pipe& p) {
    make_barriers(p, first_stage());
    make_table(a);
    Chunk c;
    if (!Work(control().table).template next<true>(c)) return;
    if (by_picks(a)) {
      enter_picks(control().table, a);
      if (control().table.chunks == 0) return;
      c.group = picked_group(control().table, c);
    }
    fill_early(a, p, c);
    if (EARLY) return;
    if (by_picks(a)) global_proxy_fence();                 // for the row, while weights are on their way
    fill(a, p, c);
  }
  static DEV void make_barriers(const Pipe& p, int stage) {
    if (stage < STAGES) barrier_init(p.full + 8 * stage, 1), barrier_init(p.empty + 8 * stage, CONSUMERS / WAVE);
    barrier_init_done();
  }
  static DEV void make_table(const GemmArgs& a) {
    GroupTable& table = control().table;
    if (by_picks(a)) fill_table_of_row(table, a);
    else if (T::SINGLE) single_tile(table);
    else T::enter_rows(table, a);
    __syncwarp();
    Work::plan(table, a.row_blocks * BLOCK_UNITS);
    __syncwarp();
  }

  // The number of rows is not known yet, but a single tile is distributed alike for any number.
  static DEV void single_tile(GroupTable& t) {
    t.rows[0] = T::N, t.offsets[0] = t.group[0] = t.first_tile[0] = 0;
    t.first_tile[1] = t.groups = t.tiles = 1;
  }

  // ------------------------------------------------------------------------------------------------------ producer
  // A chunk's stages along K, its steps, and the slabs of one of them.
  static DEV int steps_of(const GemmArgs& a) { return (a.k_blocks + SLABS - 1) / SLABS; }
  static DEV int slabs_of(const GemmArgs& a, int step) {
    return SLABS == 1 ? 1 : min((int)SLABS, a.k_blocks - step * SLABS);
  }
  static DEV void expect_weights(const GemmArgs& a, const Pipe& p, int stage, const Chunk& c, int step) {
    barrier_expect(p.full + 8 * stage, slabs_of(a, step) * c.units * UNIT_BYTES);
  }
  static DEV void copy_weights(const GemmArgs& a, const Pipe& p, int stage, const Chunk& c, int step) {
    const u32 bytes = c.units * UNIT_BYTES, bar = p.full + 8 * stage;
    const u32 to = p.base + stage * STAGE_BYTES + SLABS * TOKEN_BYTES;
    const i64 slab = (i64)a.row_blocks * BLOCK_BYTES;
    const u8* from = a.weights + ((i64)c.group * a.k_blocks + step * SLABS) * slab + c.unit * UNIT_BYTES;
    for (int i = 0; i < slabs_of(a, step); i++, from += slab)
      bulk_copy(to + i * WEIGHT_BYTES, from, bytes, bar, READ_AGAIN ? evict_normal() : evict_first());
  }

  // Copies rows up to a multiple of 8. Those beyond the tile's own are other tiles' or experts'; what they yield is not
  // stored.
  static DEV void copy_tokens(const GemmArgs& a, const Pipe& p, const Chunk& c, int step) {
    const u32 bytes = (c.rows + 7) / 8 * 8 * SLAB * 2, bar = p.full + 8 * p.stage;
    const int slabs = slabs_of(a, step), row = Op::OF_ROUTER && a.picks ? 0 : c.row;
    barrier_arrive_expect(bar, slabs * bytes * TERMS);
    if (bytes == 0) return;
    for (int i = 0; i < slabs; i++)
      for (int term = 0; term < TERMS; term++)
        bulk_copy(p.base + p.stage * STAGE_BYTES + i * TOKEN_BYTES + term * TERM_BYTES,
                  a.input + term * a.in_term + ((i64)(step * SLABS + i) * a.in_rows + row) * SLAB,
                  bytes, bar, evict_last());
  }

  // Where rows are few (FILLED), each of the first stages is filled by a lane of its own: one lane would issue the
  // copies one after the other. Only early stages get their weights first; in the others weights would delay the
  // tokens.
  static DEV int producer() { return PRODUCERS == 1 ? 0 : TID / WAVE - CONSUMERS / WAVE; }
  static DEV int first_stage() { return producer() + PRODUCERS * LANE; }
  static DEV int filled(const GemmArgs& a) { return min((int)STAGES, steps_of(a)); }
  static DEV bool is_early(const GemmArgs& a, int stage) {
    return (EARLY || by_picks(a)) && stage < EARLY_SLABS / SLABS;
  }
  static DEV void fill_early(const GemmArgs& a, const Pipe& p, const Chunk& c) {
    const int stage = first_stage();
    if (stage >= filled(a)) return;
    expect_weights(a, p, stage, c, stage);
    if (is_early(a, stage)) copy_weights(a, p, stage, c, stage);
  }
  static DEV void fill(const GemmArgs& a, Pipe p, const Chunk& c) {
    const int stage = p.stage = first_stage();
    if (stage >= filled(a)) return;
    if (FOUND && stage == 0) control().chunks[0] = c;
    copy_tokens(a, p, c, stage);
    if (!is_early(a, stage)) copy_weights(a, p, stage, c, stage);
  }

  // The producers take turns at the steps behind the first stages.
  static DEV void produce(const GemmArgs& a, Work work, Pipe p) {
    Chunk c;
    bool some = work.template next<SEVERAL>(c);
    if (!SEVERAL && by_picks(a)) global_proxy_fence();
    const int steps = steps_of(a);
    int rows = 0;
    int first = 0, early = 0;                              // steps of the first chunk in flight; with weights alone
    if constexpr (FILLED) {
      if (some) first = filled(a);
      if (!SEVERAL && some) fill_early(a, p, c);
      if (EARLY) after_predecessor();
      if (T::SINGLE) c.rows = rows = rows_to_copy(a);
      if ((EARLY || !SEVERAL) && some) fill(a, p, c);
      if (LANE > 0) return;
    } else if (EARLY) {
      for (; some && early < min((int)WEIGHTS_FIRST, steps); early++)
        expect_weights(a, p, early, c, early), copy_weights(a, p, early, c, early);
      after_predecessor();
      if (T::SINGLE) rows = rows_to_copy(a);
    }
    int step = first + producer();
    p.stage = step % STAGES;
    p.phase = step / STAGES % 2 ^ 1;                       // the parity of `empty`: the first round does not wait
    int place = 0;
    for (; some; some = work.template next<false>(c), step = PRODUCERS == 1 ? 0 : step - steps, early = 0) {
      if (T::SINGLE) c.rows = rows;
      for (; step < steps; step += PRODUCERS) {
        barrier_wait(p.empty + 8 * p.stage, p.phase);
        if (FOUND && step == 0) control().chunks[place] = c;
        if (step >= early) expect_weights(a, p, p.stage, c, step), copy_weights(a, p, p.stage, c, step);
        copy_tokens(a, p, c, step);
        p.stage += PRODUCERS;
        if (p.stage >= STAGES) p.stage -= STAGES, p.phase ^= 1;
      }
      if (FOUND) place = next_place(place);
    }
    if constexpr (FOUND) {                                 // a stage without copies, and no units: the end
      barrier_wait(p.empty + 8 * p.stage, p.phase);
      control().chunks[place].units = 0;
      barrier_arrive(p.full + 8 * p.stage);
    }
  }
  static DEV int next_place(int place) { return place < MAX_STAGES ? place + 1 : 0; }

  // ------------------------------------------------------------------------------------------------------ consumers
  static DEV void follow(const GemmArgs& a) {
    if (EARLY || by_picks(a)) after_predecessor();
    let_successor_start();
  }
  static DEV void consume(const GemmArgs& a, Work work, Pipe& p) {
    if (!PLANNED) follow(a);
    if constexpr (FOUND) consume_found(a, p);
    else consume_sought(a, work, p);
  }
  static DEV void consume_found(const GemmArgs& a, Pipe& p) {
    for (int place = 0;; place = next_place(place)) {
      wait_full(p);
      const Chunk& c = control().chunks[place];            // read again where it takes no registers meanwhile
      if (c.units == 0) return;
      Way::compute(a, p, c);
    }
  }
  static DEV void consume_sought(const GemmArgs& a, Work& work, Pipe& p) {
    const int rows = T::SINGLE ? rows_of_single(a) : 0;
    bool fresh = true;
    for (Chunk c; work.template next<SEVERAL>(c);) {
      if (T::SINGLE) c.rows = rows;
      if (Op::GREEDY && fresh) BlockArgmax<Gemm>::reset();
      Way::compute(a, p, c);
      if constexpr (Op::GREEDY) {
        fresh = work.tile_done();
        if (fresh) BlockArgmax<Gemm>::write(a, c, work);
      }
    }
    if (PLANNED) follow(a);              // warps without weights, too
  }

  // Of a warpgroup's weight blocks of a stage: the m-th one's descriptor, the first one's address.
  static DEV u64 block_of(u64 descriptor, int m) { return descriptor + m * NEXT_BLOCK / 16; }
  static DEV u32 first_block(const Pipe& p) {
    return p.base + SLABS * TOKEN_BYTES + (TOKENS_FIRST ? 0 : TID / 128 * BLOCK_BYTES);
  }
  // The first of a warpgroup's tokens in stage 0.
  static DEV u32 first_token(const Pipe& p) { return p.base + (TOKENS_FIRST ? TID / 128 * 64 * SLAB * 2 : 0); }

  static DEV void consumers_barrier() { asm volatile("bar.sync 1, %0;" ::"n"((int)CONSUMERS) : "memory"); }
};

// Kernels, from rows of the catalogue: a macro for each loop, whose own parameters are those behind MOST_ROWS. A kernel
// whose MOST_ROWS is its N is SINGLE.
#define PRODUCT(NAME, THREADS, Op, ...) \
  KERNEL(NAME, Op::Args, THREADS, 1, 0) { Gemm<Op, __VA_ARGS__>::run(Op::product_of(a)); }

#define PRODUCT_BY_WARPS(NAME, THREADS, SHARED_BYTES, Op, Weights, FORMAT, TERMS, N, MOST_ROWS, WIDTHS, BLOCKS, SLABS) \
  PRODUCT(NAME, THREADS, Op, Weights, FORMAT, TERMS, Tile<N, WIDTHS, THREADS / 128 - 1, BLOCKS, MOST_ROWS == N>,       \
          OfWarps<SLABS>, SHARED_BYTES)
#define PRODUCT_OF_W16(NAME, THREADS, SHARED_BYTES, Op, Weights, FORMAT, TERMS, N, MOST_ROWS, WIDTHS, BLOCKS)    \
  PRODUCT(NAME, THREADS, Op, Weights, FORMAT, TERMS, Tile<N, WIDTHS, THREADS / 128 - 1, BLOCKS, MOST_ROWS == N>, \
          OfW16, SHARED_BYTES)
#define PRODUCT_TOKENS_FIRST(NAME, THREADS, SHARED_BYTES, Op, Weights, FORMAT, TERMS, N, MOST_ROWS, UNITS)   \
  PRODUCT(NAME, THREADS, Op, Weights, FORMAT, TERMS, TokenTile<N, THREADS / 128 - 1, UNITS, MOST_ROWS == N>, \
          OfW16, SHARED_BYTES)
#define PRODUCT_OF_CODES(NAME, THREADS, SHARED_BYTES, Op, Weights, FORMAT, TERMS, N, MOST_ROWS, WIDTHS, BLOCKS, K16S, \
                         IN_FLIGHT)                                                                                   \
  PRODUCT(NAME, THREADS, Op, Weights, FORMAT, TERMS, Tile<N, WIDTHS, THREADS / 128 - 1, BLOCKS, MOST_ROWS == N>,      \
          OfCodes<K16S, IN_FLIGHT>, SHARED_BYTES)
#define PRODUCT_OF_TERMS(NAME, THREADS, SHARED_BYTES, Op, Weights, FORMAT, TERMS, N, MOST_ROWS, WIDTHS, BLOCKS)  \
  PRODUCT(NAME, THREADS, Op, Weights, FORMAT, TERMS, Tile<N, WIDTHS, THREADS / 128 - 1, BLOCKS, MOST_ROWS == N>, \
          OfTerms, SHARED_BYTES)
