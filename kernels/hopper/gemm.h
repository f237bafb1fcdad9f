// The matrix products on Hopper: one persistent, warp-specialized kernel template, made from an operation (epilogue.h),
// a kind of weights (mxfp4.h, w16.h), the activations' format and number of terms, and a tile.
//
// The operands are swapped: 64 weight rows are wgmma's A, decoded in registers or read from shared memory, and up to N
// tokens are B. So few tokens are not padded to 64: wgmma's N goes down to 8. With 16-bit weights it can also be the
// other way round (TOKENS_FIRST): 64 tokens are A, and a chunk's units B. So a few units are not padded to 64 rows.
//
//   One block per multiprocessor: `warpgroups` consumer warpgroups, and a producer whose threads issue bulk copies.
//   A stage of the pipeline is a slab of 64 along K, or several: the tile's tokens (one contiguous run of rows of a
//     slab of the tiled layout, which already has wgmma's swizzle) and the chunk's weight units (contiguous, too); of
//     several slabs all tokens come first. All shared memory but Control is stages: DRAM's latency times its bandwidth
//     is 33 KB per multiprocessor.
//   Warpgroup w has the blocks w, w + warpgroups, .. of the chunk's blocks of 64 weight rows, over all of K, in
//     registers; of TOKENS_FIRST, all of the chunk's rows for its 64 tokens.
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
// a single row it waits for the row and its picks alone, and not for that kernel's end. What a block does with a single
// row's experts it finds before it knows which they are.
#pragma once
#include "block_argmax.h"
#include "by_warps.h"
#include "codes_loop.h"
#include "epilogue.h"
#include "exact_loop.h"
#include "qkv_store.h"
#include "schedule.h"
#include "tokens_first.h"

// A tile of up to N tokens. wgmma's width is the least of WIDTHS (schedule.h) that holds them; each width has code of its
// own. BLOCKS: blocks of 64 weight rows per warpgroup. MXFP4: K16S k16 steps make a group of wgmma, of which a warpgroup
// has IN_FLIGHT in flight. BY_WARPS (K16S is 0): each warp multiplies by itself (by_warps.h), and a stage is IN_FLIGHT
// slabs. SINGLE: launched for at most N rows in all, which are one tile. TOKENS_FIRST (WIDTHS is 0): a warpgroup for
// each 64 tokens, and BLOCKS units of weights in a chunk.
template <int N_, u32 WIDTHS_, int WARPGROUPS_, int BLOCKS_, int K16S_, int IN_FLIGHT_, bool SINGLE_>
struct Tile {
  enum : int {
    N = N_, LEAST = width_of(WIDTHS_, 1), WARPGROUPS = WARPGROUPS_, BLOCKS = BLOCKS_, K16S = K16S_,
    IN_FLIGHT = IN_FLIGHT_
  };
  enum : u32 { WIDTHS = WIDTHS_ };
  enum : bool { SINGLE = SINGLE_, BY_WARPS = K16S_ == 0, TOKENS_FIRST = WIDTHS_ == 0 };
  static_assert(TOKENS_FIRST || width_of(WIDTHS_, N_) == N_, "the widest is the tile's");
};

enum : int { MAX_STAGES = 32 };
// Producer threads, each in a warp of its own.
enum : int { MOST_PRODUCERS = 4 };

// SHARED_BYTES: the block's dynamic shared memory, stages and Control.
template <class Op_, class Weights, int FORMAT, int TERMS_, class T, int SHARED_BYTES> struct Gemm {
  using Op = Op_;
  enum : bool { IS_W16 = (int)Weights::UNIT_ROWS == (int)W16::UNIT_ROWS, TOKENS_FIRST = T::TOKENS_FIRST };
  enum : int {
    MOST_TOKENS = T::N,
    WARPGROUPS = T::WARPGROUPS,
    TERMS = TERMS_,
    BLOCK_UNITS = 64 / Weights::UNIT_ROWS,
    CHUNK = T::TOKENS_FIRST ? (int)T::BLOCKS : T::WARPGROUPS * T::BLOCKS * BLOCK_UNITS,
    CONSUMERS = T::WARPGROUPS * 128,
    TERM_BYTES = T::N * SLAB * 2,
    TOKEN_BYTES = TERMS * TERM_BYTES,
    UNIT_BYTES = Weights::UNIT_BYTES,
    BLOCK_BYTES = BLOCK_UNITS * UNIT_BYTES,
    NEXT_BLOCK = T::WARPGROUPS * BLOCK_BYTES,              // from a warpgroup's block to its next
    ELEMENTS = FORMAT,
    SLABS = T::BY_WARPS ? (int)T::IN_FLIGHT : 1,           // of a stage
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
  enum : bool { STORED_TILE = Op::AHEAD && !T::BY_WARPS };
  enum : int {
    STORE_BYTES = STORED_TILE ? T::WARPGROUPS * (int)sizeof(QkvStoreTile<128>::Shared) : 0,
    FITTING = (SHARED_BYTES - (int)sizeof(Control) - STORE_BYTES) / STAGE_BYTES,
    STAGES = FITTING < MAX_STAGES ? FITTING : MAX_STAGES
  };
  static_assert(STAGES >= 3, "a pipeline needs stages");
  enum : bool { FILLED = (int)T::N <= 64 };
  // Where a few tokens are multiplied sooner than one thread can request the next stage, several threads take turns.
  enum : bool { SEVERAL = T::BY_WARPS || (FILLED && T::SINGLE && (int)T::WARPGROUPS == 1) };
  static_assert(FILLED || !SEVERAL, "the first stages are filled by lanes of one warp");
  static_assert(!T::TOKENS_FIRST || (int)T::N == T::WARPGROUPS * 64, "a warpgroup for each 64 tokens");
  enum : int { PRODUCERS = !SEVERAL ? 1 : STAGES < MOST_PRODUCERS ? STAGES : MOST_PRODUCERS };
  // An operation's own number was measured with the tile of 8 tokens alone; wider ones have what suits all operations.
  enum : int { EARLY_SLABS = (int)T::N == 8 ? (int)Op::EARLY_SLABS : (int)Plain::EARLY_SLABS };
  // Stages whose weights are requested early where rows are not few: 20 to 60 KB were alike, all stages slower.
  enum : int {
    IN_40_KB = 40 * 1024 / WEIGHT_BYTES,
    WEIGHTS_FIRST = T::TOKENS_FIRST && IN_40_KB < STAGES ? IN_40_KB : STAGES
  };
  enum : bool { EARLY = Op::EARLY || T::SINGLE };
  // Whether experts have several token tiles: those of a later round read the same weights again, from the L2.
  enum : bool { READ_AGAIN = !IS_W16 && (int)T::N > 128 };
  // Whether the producer finds the consumers' chunks, too: they read the next one when its first stage is full.
  enum : bool { FOUND = !SEVERAL && !T::SINGLE && !T::TOKENS_FIRST && !Op::GREEDY };
  // Whether all widths and numbers of blocks share one epilogue: the code of mlp1's takes as long to come from memory as
  // to run.
  enum : bool { JOINED = Op::JOINED && FOUND && !IS_W16 && TERMS == 1 };
  // Whether what the epilogue needs is loaded before the predecessor ends: it follows from the plan and from weights, by a
  // chain of loads that takes longer than the first stage.
  enum : bool { PLANNED = Op::EARLY && T::SINGLE && T::BY_WARPS };
  // setmaxnreg: the producer gives up the registers that consumers gain. A single consumer warpgroup has enough
  // without, and so have those of 64 tokens.
  enum : bool { SHIFTED = (int)T::WARPGROUPS > 1 && !T::TOKENS_FIRST };
  enum : int {
    PRODUCER_REGISTERS = T::BY_WARPS ? 56 : T::WARPGROUPS == 3 ? 32 : 24,
    CONSUMER_REGISTERS = T::BY_WARPS ? 144 : T::WARPGROUPS == 2 ? 240 : T::WARPGROUPS == 3 ? 160 : 112
  };
  using Work = typename Op::template Schedule<T::N, CHUNK>;
  template <int N, int M>
  using Loop = std::conditional_t<
      (TERMS > 1), ExactLoop<Gemm, N, M>,
      std::conditional_t<T::BY_WARPS, ByWarps<Gemm, N, M>,
                         std::conditional_t<IS_W16, W16Loop<Gemm, N, M>,
                                            CodesLoop<Gemm, T::K16S, T::IN_FLIGHT, N, M>>>>;

  static DEV Control& control() { return *(Control*)(DYNAMIC_SHARED + STAGES * STAGE_BYTES + STORE_BYTES); }

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
    else if constexpr ((int)T::LEAST == (int)T::N) fill_table<T::N>(table, a);
    else fill_table_by_width<T::N, T::WIDTHS>(table, a);
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
      if constexpr (JOINED) compute_joined(a, p, c);
      else pick_tokens<T::LEAST>(a, p, c);
    }
  }
  static DEV void consume_sought(const GemmArgs& a, Work& work, Pipe& p) {
    const int rows = T::SINGLE ? rows_of_single(a) : 0;
    bool fresh = true;
    for (Chunk c; work.template next<SEVERAL>(c);) {
      if (T::SINGLE) c.rows = rows;
      if (Op::GREEDY && fresh) BlockArgmax<Gemm>::reset();
      if constexpr (T::TOKENS_FIRST) TokensFirst<Gemm>::template compute<CHUNK>(a, p, c);
      else pick_tokens<T::LEAST>(a, p, c);
      if constexpr (Op::GREEDY) {
        fresh = work.tile_done();
        if (fresh) BlockArgmax<Gemm>::write(a, c, work);
      }
    }
    if (PLANNED) follow(a);              // warps without weights, too
  }

  // The chunk's blocks of 64 weight rows that this warpgroup has.
  static DEV int blocks_of(const Chunk& c) {
    const int blocks = (c.units + BLOCK_UNITS - 1) / BLOCK_UNITS;
    return (blocks - TID / 128 + T::WARPGROUPS - 1) / T::WARPGROUPS;
  }
  // Picks wgmma's width, the least that holds the chunk's tokens.
  template <int N> static DEV void pick_tokens(const GemmArgs& a, Pipe& p, const Chunk& c) {
    if constexpr (N < T::N)
      if (c.rows > N) return pick_tokens<width_of(T::WIDTHS, N + 1)>(a, p, c);
    int mine = blocks_of(c);
    if (T::BY_WARPS && IS_W16) mine = (c.units - TID / WAVE + T::WARPGROUPS * 4 - 1) / (T::WARPGROUPS * 4);
    pick_blocks<N, T::BLOCKS>(a, p, c, mine);
  }
  // Picks the number of blocks: those that this warpgroup has.
  template <int N, int M> static DEV void pick_blocks(const GemmArgs& a, Pipe& p, const Chunk& c, int mine) {
    if (mine == M) compute<N, M>(a, p, c);
    else if constexpr (M > 1) pick_blocks<N, M - 1>(a, p, c, mine);
    else skip(a, p);
  }
  static DEV void skip(const GemmArgs& a, Pipe& p) {
    for (int step = 0; step < steps_of(a); step++, advance(p)) wait_full(p), release(p, p.stage);
  }

  template <int N, int M> static DEV void compute(const GemmArgs& a, Pipe& p, const Chunk& c) {
    float sum[M][N / 2];
    clear(sum);
    if constexpr (STORED_TILE) {
      multiply_and_store<N, M>(a, p, c, sum);
    } else {
      Ahead<N> ahead[M];
      const auto load_ahead = [&] {
#pragma unroll
        for (int m = 0; m < M; m++) ahead[m].load(a, c, m);
      };
      if (TERMS == 1) load_ahead();                        // `exact` has no registers for it during the product
      if (PLANNED) follow(a);                              // a second time returns at once
      Loop<N, M>::multiply(a, p, sum);
      if (TERMS > 1) load_ahead();
      store_all<N, M>(a, c, sum, ahead);
    }
  }

  // JOINED: the same for any width and number of blocks, whose products use parts of the largest one's registers.
  static DEV void compute_joined(const GemmArgs& a, Pipe& p, const Chunk& c) {
    float sum[T::BLOCKS][T::N / 2];
    Ahead<T::N> ahead[T::BLOCKS];
#pragma unroll
    for (int m = 0; m < T::BLOCKS; m++) ahead[m].load(a, c, m);
    multiply_tokens<T::LEAST>(a, p, c, sum);
    store_all<T::N, T::BLOCKS>(a, c, sum, ahead);
  }
  template <int N, class Sums> static DEV void multiply_tokens(const GemmArgs& a, Pipe& p, const Chunk& c, Sums& sum) {
    if constexpr (N < T::N)
      if (c.rows > N) return multiply_tokens<width_of(T::WIDTHS, N + 1)>(a, p, c, sum);
    multiply_blocks<N, T::BLOCKS>(a, p, blocks_of(c), sum);
  }
  template <int N, int M, class Sums> static DEV void multiply_blocks(const GemmArgs& a, Pipe& p, int mine, Sums& sum) {
    if (mine == M) Loop<N, M>::multiply(a, p, sum);
    else if constexpr (M > 1) multiply_blocks<N, M - 1>(a, p, mine, sum);
    else skip(a, p);
  }

  // The first of this thread's two rows in its warpgroup's m-th block.
  static DEV int row_of(const Chunk& c, int m) {
    const int block = TID / 128 + m * T::WARPGROUPS;
    return c.unit * Weights::UNIT_ROWS + block * 64 + TID / WAVE % 4 * 16 + LANE / 4 * 2;
  }
  static DEV Place place_of(const Chunk& c, int m, float2 bias) {
    return {c, row_of(c, m), LANE % 4, bias, nullptr, nullptr};
  }
  // What the epilogue needs, in `fast` loaded before the product, which hides the way from memory.
  template <int N> struct Ahead {
    float2 bias;
    typename Op::template Tokens<N / 8> tokens;
    DEV void load(const GemmArgs& a, const Chunk& c, int m) {
      bias = Op::bias(a, c.group, row_of(c, m));
      tokens.load(a, place_of(c, m, bias));
    }
  };
  // Where the epilogue has a tile's tokens together: what it needs of them is loaded behind the first slab's wgmmas.
  template <int N, int M>
  static DEV void multiply_and_store(const GemmArgs& a, Pipe& p, const Chunk& c, float (&sum)[M][N / 2]) {
    const auto before = [&](int m) { return (TID / 128 + m * T::WARPGROUPS) * BLOCK_UNITS; };  // units of the chunk
    const RopeStoreArgs& s = Op::store_of(a);
    QkvStoreTile<N> tile(s, ((typename QkvStoreTile<N>::Shared*)(DYNAMIC_SHARED + STAGES * STAGE_BYTES))[TID / 128]);
    float2 bias[M];
#pragma unroll
    for (int m = 0; m < M; m++) bias[m] = Op::bias(a, c.group, row_of(c, m));
    const int last = min(c.unit + before(M - 1) + BLOCK_UNITS, c.unit + c.units) - 1;
    W16Loop<Gemm, N, M>::template multiply_while<true>(a, p, sum, [&] { tile.load(s, c, c.unit + before(0), last); });
#pragma unroll
    for (int m = 0; m < M; m++) {
      if (m > 0 && T::WARPGROUPS * 64 % s.head_dim != 0) tile.load(s, c, c.unit + before(m), last);
      tile.template store<FORMAT>(a, place_of(c, m, bias[m]), c.unit + before(m), c.units - before(m), sum[m]);
    }
  }

  template <int N, int M>
  static DEV void store_all(const GemmArgs& a, const Chunk& c, const float (&sum)[M][N / 2], const Ahead<N> (&ahead)[M]) {
    const int wg = TID / 128, warp = TID / WAVE % 4;
#pragma unroll
    for (int m = 0; m < M; m++) {
      const int block = wg + m * T::WARPGROUPS;
      if (JOINED && block * BLOCK_UNITS >= c.units) return;
      if (IS_W16 && block * BLOCK_UNITS + warp >= c.units) continue;
      Place place = place_of(c, m, ahead[m].bias);
      if (Op::GREEDY) place.best = control().best[TID / WAVE], place.best_index = control().best_index[TID / WAVE];
      if constexpr (Op::AHEAD) Op::template store_tokens<N / 8, FORMAT>(a, place, sum[m], ahead[m].tokens);
      else Op::template store<N, FORMAT, TERMS>(a, place, sum[m]);
    }
  }

  // Of a warpgroup's weight blocks of a stage: the m-th one's descriptor, the first one's address.
  static DEV u64 block_of(u64 descriptor, int m) { return descriptor + m * NEXT_BLOCK / 16; }
  static DEV u32 first_block(const Pipe& p) {
    return p.base + SLABS * TOKEN_BYTES + (T::TOKENS_FIRST ? 0 : TID / 128 * BLOCK_BYTES);
  }
  // The first of a warpgroup's tokens in stage 0.
  static DEV u32 first_token(const Pipe& p) { return p.base + (T::TOKENS_FIRST ? TID / 128 * 64 * SLAB * 2 : 0); }

  static DEV void consumers_barrier() { asm volatile("bar.sync 1, %0;" ::"n"((int)CONSUMERS) : "memory"); }
};

// Defines a kernel, from a row of the catalogue, whose parameters are those from WIDTHS on. A kernel whose MOST_ROWS is
// its N is SINGLE.
#define PRODUCT(NAME, THREADS, SHARED_BYTES, Op, Weights, FORMAT, TERMS, N, MOST_ROWS, WIDTHS, BLOCKS, K16S, IN_FLIGHT) \
  KERNEL(NAME, Op::Args, THREADS, 1, 0) {                                                                               \
    using T = Tile<N, WIDTHS, THREADS / 128 - 1, BLOCKS, K16S, IN_FLIGHT, MOST_ROWS == N>;                              \
    Gemm<Op, Weights, FORMAT, TERMS, T, SHARED_BYTES>::run(Op::product_of(a));                                          \
  }
