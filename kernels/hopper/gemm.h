// The matrix products on Hopper: one persistent, warp-specialized kernel template. This file has its frame: a tile,
// what lies where in shared memory, how a stage is copied, and who does what. A kernel is a row of the catalogue
// (catalogue.rs), which names what it is made of; `cargo bench --bench gpu -- kernel` lists all with that:
//
//   an operation       its epilogue: ../mma/epilogue.h, operation.h
//   weights            ../mma/mxfp4.h, ../mma/w16.h
//   activations        their format and number of terms
//   a tile             Tile below; TokenTile (tokens_first.h)
//   a way to run       who fills stages, and who finds chunks: the producer, and the consumer where it is its own
//     Turns              few tokens: several producers take turns; each role finds its chunks (turns.h)
//     HandedByLanes      up to 64 tokens: the producer finds chunks and hands them over (handed.h)
//     HandedByThread     more tokens
//     RasterByLanes      the unembedding: each role walks down the weights (raster.h)
//     RasterByThread     the same for more tokens
//     TokensFirst        65 to 256 rows of a layer's own matrices: tokens are wgmma's rows (tokens_first.h)
//   a loop             OfWarps (by_warps.h), OfW16 (w16_loop.h), OfCodes (codes_loop.h), OfTerms (exact_loop.h)
//   a consumer         OwnEpilogue, EarlyEpilogue, SharedIfLong, StoredTile (consumers.h)
//
// Each refuses, by static_assert, what it does not go with.
//
// The operands are swapped: 64 weight rows are wgmma's A, decoded in registers or read from shared memory, and up to N
// tokens are B. So few tokens are not padded to 64: wgmma's N goes down to 8. TokensFirst has it the other way round.
//
//   One block per multiprocessor: `warpgroups` consumer warpgroups, and a producer whose threads issue bulk copies.
//   A stage of the pipeline is a slab of 64 along K, or several: the tile's tokens (one contiguous run of rows of a
//     slab of the tiled layout, which already has wgmma's swizzle) and the chunk's weight units (contiguous, too); of
//     several slabs all tokens come first. All shared memory but Control and a consumer's is stages: DRAM's latency
//     times its bandwidth is 33 KB per multiprocessor.
//   Warpgroup w has the blocks w, w + warpgroups, .. of the chunk's blocks of 64 weight rows, over all of K, in
//     registers; where tokens come first, all of the chunk's rows for its 64 tokens.
//
// Sums: `fast` (one term) has one float32 accumulator per element, k16 after k16. `exact` sums each slab of
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
// a single row it waits for the row and its picks alone, and not for that kernel's end. Of a single row each block
// knows its share of the work before it knows which experts were picked.
#pragma once
#include <type_traits>
#include "../mma/mxfp4.h"
#include "by_warps.h"
#include "codes_loop.h"
#include "consumers.h"
#include "exact_loop.h"
#include "handed.h"
#include "operation.h"
#include "raster.h"
#include "schedule.h"
#include "tokens_first.h"
#include "turns.h"

// A tile of up to N tokens. wgmma's width is the least of WIDTHS (schedule.h) that holds them; each width has code of
// its own. BLOCKS: blocks of 64 weight rows per warpgroup. MOST_ROWS: in all; 0: any number.
template <int N_, int MOST_ROWS, u32 WIDTHS_, int WARPGROUPS_, int BLOCKS_> struct Tile {
  enum : int { N = N_, LEAST = width_of(WIDTHS_, 1), WARPGROUPS = WARPGROUPS_, BLOCKS = BLOCKS_ };
  enum : u32 { WIDTHS = WIDTHS_ };
  // SINGLE: all rows are one tile. SHIFTS_REGISTERS: a single consumer warpgroup has enough without.
  enum : bool { SINGLE = MOST_ROWS == N_, SHIFTS_REGISTERS = WARPGROUPS_ > 1 };
  static_assert(width_of(WIDTHS_, N_) == N_, "the widest is the tile's");
  static_assert(MOST_ROWS == 0 || SINGLE, "one tile or any number of them");
  static constexpr int chunk(int block_units) { return WARPGROUPS * BLOCKS * block_units; }
  static DEV void enter_rows(GroupTable& table, const GemmArgs& a) {
    if constexpr ((int)LEAST == (int)N) fill_table<N>(table, a);
    else fill_table_by_width<N, WIDTHS>(table, a);
  }
  // A warpgroup's tokens and weights in a stage.
  static DEV int own_tokens() { return 0; }
  template <int BLOCK_BYTES> static DEV int own_weights() { return TID / 128 * BLOCK_BYTES; }
};

// SHARED_BYTES: the block's dynamic shared memory: stages, the consumer's, and Control.
template <class Op_, class Weights, int FORMAT, int TERMS_, class T_, class Way, class Loop_, class Consumer_,
          int SHARED_BYTES>
struct Gemm {
  using Op = OnHopper<Op_>;
  using T = T_;
  using Loop = Loop_;
  using Consumer = Consumer_;
  enum : bool { IS_W16 = std::is_same_v<Weights, W16>, EARLY = Op::EARLY };
  static_assert(EARLY || !T::SINGLE, "a single tile's work is known early");

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
    SLABS = Loop::SLABS,                                   // of a stage
    WEIGHT_BYTES = CHUNK * UNIT_BYTES,
    STAGE_BYTES = (SLABS * (TOKEN_BYTES + WEIGHT_BYTES) + 1023) / 1024 * 1024,
    BEST_WARPS = Op::GREEDY ? T::WARPGROUPS * 4 : 0,
  };
  struct Control {
    u64 full[MAX_STAGES], empty[MAX_STAGES];
    GroupTable table;
    Chunk chunks[MAX_STAGES + 1];  // Handed: in turn. The producer is at most as many ahead as it has stages
    alignas(8) float best[BEST_WARPS + 1][T::N];
    int best_index[BEST_WARPS + 1][T::N];
  };
  enum : int {
    STORE_BYTES = Consumer::shared_bytes(T::WARPGROUPS),
    FITTING = (SHARED_BYTES - (int)sizeof(Control) - STORE_BYTES) / STAGE_BYTES,
    STAGES = FITTING < MAX_STAGES ? FITTING : MAX_STAGES,
    PRODUCERS = Way::MOST_PRODUCERS < STAGES ? Way::MOST_PRODUCERS : STAGES,
    EARLY_SLABS = Op::early_slabs(T::N)
  };
  static_assert(STAGES >= 3, "a pipeline needs stages");
  static DEV u8* behind_stages() { return DYNAMIC_SHARED + STAGES * STAGE_BYTES; }
  static DEV Control& control() { return *(Control*)(behind_stages() + STORE_BYTES); }
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

  // -------------------------------------------------------------------------------------------- who does what, when
  // setmaxnreg: the producer gives up the registers that consumers gain.
  enum : int {
    PRODUCER_REGISTERS = Loop::producer_registers(T::WARPGROUPS),
    CONSUMER_REGISTERS = Loop::consumer_registers(T::WARPGROUPS)
  };
  static DEV void run(const GemmArgs& a) {
    using Mine = typename Way::template Of<Gemm>;
    if (!EARLY && !by_picks(a)) after_predecessor();
    Pipe p = {shared_address(DYNAMIC_SHARED), shared_address(control().full), shared_address(control().empty), 0, 0};
    Mine::prepare(a, p);
    barrier();
    if (TID >= CONSUMERS) {
      if constexpr (T::SHIFTS_REGISTERS)
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"((int)PRODUCER_REGISTERS));
      if (TID < CONSUMERS + (Way::ONE_THREAD ? 1 : PRODUCERS * WAVE)) Mine::produce(a, Work(control().table), p);
    } else {
      if constexpr (T::SHIFTS_REGISTERS)
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"((int)CONSUMER_REGISTERS));
      Mine::consume(a, Work(control().table), p);
    }
  }

  // The table by one warp, which asks for the picks, too, and the mbarriers by another.
  static DEV void prepare_by_two_warps(const GemmArgs& a, const Pipe& p) {
    if (TID < WAVE) {
      make_table(a);
      if (by_picks(a)) enter_picks(control().table, a);
    } else if (TID / WAVE == 1) {
      make_barriers(p, LANE);
    }
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

  // ------------------------------------------------------------------------------------------------------ producers
  static DEV int producer() { return PRODUCERS == 1 ? 0 : TID / WAVE - CONSUMERS / WAVE; }
  // Where a producer's first stage is that it has to wait for: that of this K tile of the first chunk.
  static DEV void begin_at(Pipe& p, int k_tile) {
    p.stage = k_tile % STAGES;
    p.phase = k_tile / STAGES % 2 ^ 1;                     // the parity of `empty`: the first round does not wait
  }
  static DEV void wait_empty(const Pipe& p) { barrier_wait(p.empty + 8 * p.stage, p.phase); }
  // To the producer's next stage.
  static DEV void produced(Pipe& p) {
    p.stage += PRODUCERS;
    if (p.stage >= STAGES) p.stage -= STAGES, p.phase ^= 1;
  }

  // A chunk's K tiles, each of which fills a stage, and the slabs of one of them.
  static DEV int k_tiles_of(const GemmArgs& a) { return (a.k_blocks + SLABS - 1) / SLABS; }
  static DEV int slabs_of(const GemmArgs& a, int k_tile) {
    return SLABS == 1 ? 1 : min((int)SLABS, a.k_blocks - k_tile * SLABS);
  }
  static DEV void request_weights(const GemmArgs& a, const Pipe& p, int stage, const Chunk& c, int k_tile) {
    expect_weights(a, p, stage, c, k_tile);
    copy_weights(a, p, stage, c, k_tile);
  }
  // One thread's work where each role finds its chunks: all stages in turn, of which EARLY_STAGES get the first chunk's
  // weights before the predecessor ends.
  template <int EARLY_STAGES> static DEV void produce_by_thread(const GemmArgs& a, Work work, Pipe p) {
    Chunk c;
    bool some = work.template next<false>(c);
    const int k_tiles = k_tiles_of(a);
    int early = 0;                                         // the first chunk's K tiles whose weights are under way
    for (; some && early < min(EARLY_STAGES, k_tiles); early++) request_weights(a, p, early, c, early);
    after_predecessor();
    const int rows = T::SINGLE ? rows_to_copy(a) : 0;
    begin_at(p, 0);
    for (; some; some = work.template next<false>(c), early = 0) {
      if (T::SINGLE) c.rows = rows;
      for (int k_tile = 0; k_tile < k_tiles; k_tile++) {
        wait_empty(p);
        if (k_tile >= early) request_weights(a, p, p.stage, c, k_tile);
        copy_tokens(a, p, c, k_tile);
        produced(p);
      }
    }
  }
  static DEV void expect_weights(const GemmArgs& a, const Pipe& p, int stage, const Chunk& c, int k_tile) {
    barrier_expect(p.full + 8 * stage, slabs_of(a, k_tile) * c.units * UNIT_BYTES);
  }
  static DEV void copy_weights(const GemmArgs& a, const Pipe& p, int stage, const Chunk& c, int k_tile) {
    const u32 bytes = c.units * UNIT_BYTES, bar = p.full + 8 * stage;
    const u32 to = p.base + stage * STAGE_BYTES + SLABS * TOKEN_BYTES;
    const i64 slab = (i64)a.row_blocks * BLOCK_BYTES;
    const u8* from = a.weights + ((i64)c.group * a.k_blocks + k_tile * SLABS) * slab + c.unit * UNIT_BYTES;
    for (int i = 0; i < slabs_of(a, k_tile); i++, from += slab)
      bulk_copy(to + i * WEIGHT_BYTES, from, bytes, bar, Loop::READ_AGAIN ? evict_normal() : evict_first());
  }

  // Copies rows up to a multiple of 8. Those beyond the tile's own are other tiles' or experts'; what they yield is not
  // stored.
  static DEV void copy_tokens(const GemmArgs& a, const Pipe& p, const Chunk& c, int k_tile) {
    const u32 bytes = (c.rows + 7) / 8 * 8 * SLAB * 2, bar = p.full + 8 * p.stage;
    const int slabs = slabs_of(a, k_tile), row = Op::OF_ROUTER && a.picks ? 0 : c.row;
    barrier_arrive_expect(bar, slabs * bytes * TERMS);
    if (bytes == 0) return;
    for (int i = 0; i < slabs; i++)
      for (int term = 0; term < TERMS; term++)
        bulk_copy(p.base + p.stage * STAGE_BYTES + i * TOKEN_BYTES + term * TERM_BYTES,
                  a.input + term * a.in_term + ((i64)(k_tile * SLABS + i) * a.in_rows + row) * SLAB,
                  bytes, bar, evict_last());
  }

  // ------------------------------------------------------------------------------------------------------ consumers
  static DEV void follow(const GemmArgs& a) {
    if (EARLY || by_picks(a)) after_predecessor();
    let_successor_start();
  }

  // Of a warpgroup's weight blocks of a stage: the m-th one's descriptor, the first one's address.
  static DEV u64 block_of(u64 descriptor, int m) { return descriptor + m * NEXT_BLOCK / 16; }
  static DEV u32 first_block(const Pipe& p) {
    return p.base + SLABS * TOKEN_BYTES + T::template own_weights<BLOCK_BYTES>();
  }
  // The first of a warpgroup's tokens in stage 0.
  static DEV u32 first_token(const Pipe& p) { return p.base + T::own_tokens(); }

  static DEV void consumers_barrier() { asm volatile("bar.sync 1, %0;" ::"n"((int)CONSUMERS) : "memory"); }
};

// Kernels, from rows of the catalogue: a macro for each loop, whose own parameters are those behind MOST_ROWS.
#define PRODUCT(NAME, THREADS, Op, ...)                                                                                \
  KERNEL(NAME, Op::Args, THREADS, 1, 0) { Gemm<Op, __VA_ARGS__>::run(Op::product_of(a)); }

#define PRODUCT_BY_WARPS(NAME, THREADS, SHARED_BYTES, Op, Weights, FORMAT, TERMS, N, MOST_ROWS, WAY, CONSUMER, WIDTHS, \
                         BLOCKS, SLABS)                                                                                \
  PRODUCT(NAME, THREADS, Op, Weights, FORMAT, TERMS, Tile<N, MOST_ROWS, WIDTHS, THREADS / 128 - 1, BLOCKS>, WAY,       \
          OfWarps<SLABS>, CONSUMER, SHARED_BYTES)
#define PRODUCT_OF_W16(NAME, THREADS, SHARED_BYTES, Op, Weights, FORMAT, TERMS, N, MOST_ROWS, WAY, CONSUMER, WIDTHS,   \
                       BLOCKS)                                                                                         \
  PRODUCT(NAME, THREADS, Op, Weights, FORMAT, TERMS, Tile<N, MOST_ROWS, WIDTHS, THREADS / 128 - 1, BLOCKS>, WAY,       \
          OfW16, CONSUMER, SHARED_BYTES)
#define PRODUCT_TOKENS_FIRST(NAME, THREADS, SHARED_BYTES, Op, Weights, FORMAT, TERMS, N, MOST_ROWS, WAY, UNITS)        \
  PRODUCT(NAME, THREADS, Op, Weights, FORMAT, TERMS, TokenTile<N, MOST_ROWS, THREADS / 128 - 1, UNITS>, WAY,           \
          OfW16, InRegisters, SHARED_BYTES)
#define PRODUCT_OF_CODES(NAME, THREADS, SHARED_BYTES, Op, Weights, FORMAT, TERMS, N, MOST_ROWS, WAY, CONSUMER, WIDTHS, \
                         BLOCKS, K16S, IN_FLIGHT, READ_AGAIN)                                                          \
  PRODUCT(NAME, THREADS, Op, Weights, FORMAT, TERMS, Tile<N, MOST_ROWS, WIDTHS, THREADS / 128 - 1, BLOCKS>, WAY,       \
          OfCodes<K16S, IN_FLIGHT, READ_AGAIN>, CONSUMER, SHARED_BYTES)
#define PRODUCT_OF_TERMS(NAME, THREADS, SHARED_BYTES, Op, Weights, FORMAT, TERMS, N, MOST_ROWS, WAY, CONSUMER, WIDTHS, \
                         BLOCKS)                                                                                       \
  PRODUCT(NAME, THREADS, Op, Weights, FORMAT, TERMS, Tile<N, MOST_ROWS, WIDTHS, THREADS / 128 - 1, BLOCKS>, WAY,       \
          OfTerms, CONSUMER, SHARED_BYTES)
