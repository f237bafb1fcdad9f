//! Hopper's kernels: NVIDIA's sm_90, with wgmma and bulk copies.

use super::mma::{CACHE_TILE_BYTES, PAIR_ROWS, PARTIAL_BYTES, TEAM_ROWS, WARP};
use super::{
    Cut, Dimension, Elements, ExactSums, Kernel, Limit, MATRIX_HEADS, Op, PackedFormat, Parameters, Platform, SHARED,
    Table, Tile, Toolchain, Workers, card, kernels_of, shared, with, with_tiles,
};
use Elements::{Bf16, F16};
use PackedFormat::{Mxfp4, W16};

/// The family.
pub static TABLE: Table = Table {
    name: "hopper",
    platforms: &[Platform {
        toolchain: Toolchain::Cuda,
        architectures: &["sm_90a"],
        devices: &["sm_9"],
    }],
    cards: &[card("H100", 80, 81_559, 132), card("H200", 141, 143_771, 132)],
    wave: WARP,
    overlaps: true,
    term_shift: 0,
    cuts_experts: false,
    // 16 products and what they are added to are cut off at a common place, 2^-25 of the largest (arXiv:2512.07004).
    sum_error: [2.0, 16.0],
    exact_sums: Some(ExactSums {
        chained: SLABS_CHAINED,
        together: SLABS_TOGETHER,
    }),
    kernels: &KERNELS,
};

/// [`ExactSums::chained`]; the kernels have it from `catalogue.h`.
pub const SLABS_CHAINED: usize = 2;
/// [`ExactSums::together`], likewise.
pub const SLABS_TOGETHER: usize = 8;

const WARPGROUP: usize = 128;

static KERNELS: [Kernel; SHARED + WRITTEN.len() + kernels_of(TILES)] = with_tiles(
    with::<SHARED, { WRITTEN.len() }, { SHARED + WRITTEN.len() }>(shared(WARP), WRITTEN),
    TILES,
    // Tables of the groups' rows lie in shared memory.
    &[Limit::AtMost(Dimension::Experts, 128)],
);

const BARRIER_BYTES: usize = 8;
/// Query rows of an item of prefill attention, eight a warpgroup.
const PREFILL_ROWS: usize = 32;
/// Rows of an item of keys that several rows see, eight a warpgroup, and cache tiles on the way.
const SHARED_ROWS: usize = 16;
const SHARED_STAGES: usize = 8;
/// Octets of keys in the ring buffer of a warp of exact attention, and bytes of an octet: keys and values, in float32.
/// So six blocks of four warps fit on a multiprocessor, each with its query (eight heads of 64 dims in float64) and a
/// row of zeros.
const EXACT_STAGES: usize = 2;
const EXACT_STAGE_BYTES: usize = 2 * 8 * 64 * 4;
const EXACT_QUERY_BYTES: usize = 8 * 64 * 8;
const EXACT_ZEROS_BYTES: usize = 64 * 4;

/// Elements and experts of a row that is normed in shared memory, and its bytes there.
const NORM_HIDDEN: usize = 3072;
const NORM_EXPERTS: usize = 4;
const NORM_BYTES: usize = NORM_HIDDEN * 4;
const NORM_ROWS: Limit = Limit::AtMost(Dimension::Hidden, NORM_HIDDEN);
/// Rows of 16-byte pieces.
const NORM_PIECES: Limit = Limit::MultipleOf(Dimension::Hidden, 8);
/// From so many rows on the norm was faster than the one for a row a block.
const NORM_FROM_ROWS: usize = 512;
/// Up to so many rows norm and router have a cluster of blocks for a row.
const FEW_ROWS: usize = 64;

const WRITTEN: [Kernel; 25] = [
    Kernel::written(Op::Norm, "hopper/norm_rows.hip", 4 * WARP)
        .variant("rows")
        .least_rows(NORM_FROM_ROWS)
        .shared_bytes(NORM_BYTES + NORM_EXPERTS * NORM_BYTES / 2 + BARRIER_BYTES + NORM_HIDDEN / 256 * 4)
        .limits(&[
            NORM_ROWS,
            NORM_PIECES,
            Limit::AtMost(Dimension::ExpertsPerToken, NORM_EXPERTS),
        ]),
    // Of two for as many rows the host takes the later one that takes the model.
    norm_route_rows::<128>("hopper/norm_route_32x128.hip", "32x128", 32, 1),
    norm_route_rows::<32>("hopper/norm_route_32x32.hip", "32x32", 32, 1),
    norm_route_rows::<32>("hopper/norm_route_16x32.hip", "16x32", 16, 1024),
    norm_route_cluster::<4, 8>("hopper/norm_route_cluster4.hip", "cluster4"),
    norm_route_cluster::<8, 16>("hopper/norm_route_cluster8.hip", "cluster8"),
    team(F16),
    pair(F16),
    decode(F16, "few", 6, 12),
    decode(F16, "many", 8, 8),
    by_blocks(F16),
    team(Bf16),
    pair(Bf16),
    decode(Bf16, "few", 6, 12),
    decode(Bf16, "many", 8, 8),
    by_blocks(Bf16),
    shared_keys(F16),
    shared_keys(Bf16),
    prefill(F16),
    prefill(Bf16),
    Kernel::written(Op::AttentionExact, "hopper/attention_exact.hip", 128)
        .shared_bytes(4 * EXACT_STAGES * (EXACT_STAGE_BYTES + BARRIER_BYTES) + EXACT_QUERY_BYTES + EXACT_ZEROS_BYTES)
        .limits(MATRIX_HEADS),
    pack(W16),
    pack(Mxfp4),
    Kernel::written(Op::MatrixPeak, "hopper/matrix_peak.hip", 128),
    Kernel::written(Op::AttentionPeak, "hopper/attention_peak.hip", 4 * WARPGROUP),
];

/// Norm and router of many rows by clusters of four blocks that have `rows` together, each a quarter of K of them.
/// Shared memory: the rows as three BF16 terms, sums of each wave's part of K for 32 experts, logits of the block's own
/// rows in quarters, squares, the norm's weights, and the router's bias.
const fn norm_route_rows<const EXPERTS: usize>(
    file: &'static str,
    variant: &'static str,
    rows: usize,
    least_rows: usize,
) -> Kernel {
    let (waves, blocks, group) = (8, 4, 32);
    let sums = waves * rows * (group + 8) * 4;
    let logits = rows * EXPERTS * 4;
    let squares = rows * (NORM_HIDDEN / 256) * 4;
    Kernel::written(Op::NormRoute, file, waves * WARP)
        .variant(variant)
        .cluster(blocks)
        .least_rows(least_rows)
        .per_block(rows / blocks)
        .shared_bytes(rows * NORM_HIDDEN / blocks * 6 + sums + logits + squares + NORM_BYTES / blocks + EXPERTS * 4)
        .limits(
            const {
                &[
                    NORM_ROWS,
                    NORM_PIECES,
                    Limit::AtMost(Dimension::Experts, EXPERTS),
                    Limit::AtMost(Dimension::ExpertsPerToken, 8),
                ]
            },
        )
}

/// Norm and router by clusters of blocks, which have an expert for each wave.
const fn norm_route_cluster<const BLOCKS: usize, const WAVES: usize>(
    file: &'static str,
    variant: &'static str,
) -> Kernel {
    Kernel::written(Op::NormRoute, file, WAVES * WARP)
        .variant(variant)
        .cluster(BLOCKS)
        .most_rows(FEW_ROWS)
        .tells_picks()
        .limits(
            const {
                &[
                    NORM_ROWS,
                    NORM_PIECES,
                    Limit::AtMost(Dimension::Experts, BLOCKS * WAVES),
                    Limit::AtMost(Dimension::ExpertsPerToken, 8),
                ]
            },
        )
}

/// Persistent blocks of warps, with cache tiles and their mbarriers for the warps' ring buffers, and two partial sums a
/// warp. Where warps work alone: two tiles a warp with few rows, one with many, as more warps fit then.
const fn decode(elements: Elements, variant: &'static str, warps: usize, tiles: usize) -> Kernel {
    Kernel::written(Op::AttentionDecode, "hopper/attention_decode.hip", warps * WARP)
        .elements(elements)
        .variant(variant)
        .shared_bytes(tiles * (CACHE_TILE_BYTES + BARRIER_BYTES) + warps * 2 * PARTIAL_BYTES)
        .limits(MATRIX_HEADS)
}

/// Persistent blocks whose warps share a job's units, with their sums of two rounds: a multiprocessor has one of two
/// teams of four warps, with all the tiles that fit, or three of two warps.
const fn team(elements: Elements) -> Kernel {
    decode(elements, "team", 8, 12)
        .most_rows(TEAM_ROWS)
        .workers(Workers::Team)
}
const fn pair(elements: Elements) -> Kernel {
    decode(elements, "pair", 2, 4)
        .most_rows(PAIR_ROWS)
        .workers(Workers::Pair)
}

/// Persistent blocks whose warps share out rows, with a cache tile each: places where they hand sums over, a word for
/// each, a sum for each warp, notes of four parts that it has drawn, and the counter that they draw from, in 16 bytes.
const fn by_blocks(elements: Elements) -> Kernel {
    const WARPS: usize = 8;
    const JOINTS: usize = 16;
    const NOTE_BYTES: usize = 64;
    let tiles = WARPS * (CACHE_TILE_BYTES + BARRIER_BYTES);
    let joints = JOINTS * (2 * PARTIAL_BYTES + 4);
    Kernel::written(Op::AttentionDecode, "hopper/attention_decode.hip", WARPS * WARP)
        .elements(elements)
        .variant("block")
        .shared_bytes(tiles + joints + WARPS * (PARTIAL_BYTES + 4 * NOTE_BYTES) + 16)
        .workers(Workers::Block)
        .limits(MATRIX_HEADS)
}

/// Persistent blocks: two warpgroups compute, and a third one fetches `SHARED_STAGES` cache tiles ahead, with two
/// mbarriers each.
const fn shared_keys(elements: Elements) -> Kernel {
    Kernel::written(
        Op::AttentionShared,
        "hopper/attention_shared.hip",
        (SHARED_ROWS / 8 + 1) * WARPGROUP,
    )
    .elements(elements)
    .shared_bytes(SHARED_STAGES * (CACHE_TILE_BYTES + 2 * BARRIER_BYTES))
    .per_block(SHARED_ROWS)
    .limits(MATRIX_HEADS)
}

/// Persistent blocks, each with all the shared memory that there is: four warpgroups compute, and one fetches.
const fn prefill(elements: Elements) -> Kernel {
    Kernel::written(
        Op::AttentionPrefill,
        "hopper/attention_prefill.hip",
        (PREFILL_ROWS / 8 + 1) * WARPGROUP,
    )
    .elements(elements)
    .shared_bytes(ALL_SHARED)
    .per_block(PREFILL_ROWS)
    .limits(MATRIX_HEADS)
}

const fn pack(weights: PackedFormat) -> Kernel {
    Kernel::written(Op::Pack, "hopper/pack.hip", 128)
        .weights(weights)
        .per_block(1)
}

/// All the shared memory that a block can have: what the tile leaves is stages of the pipeline.
const ALL_SHARED: usize = 227 * 1024;
/// Shared memory of a tile for at most its tokens in all: it leaves room for a block of the small kernel before it, so
/// that the tile's weights are in flight while that kernel runs.
const SINGLE_SHARED: usize = 204 * 1024;

type Ops = &'static [(Op, &'static str)];
type Activations = &'static [(Elements, usize)];

/// Widths as schedule.h has them: a bit for each multiple of 8.
const fn bits_of(list: &[usize]) -> usize {
    let (mut bits, mut i) = (0, 0);
    while i < list.len() {
        assert!(list[i].is_multiple_of(8), "wgmma's widths are multiples of 8");
        bits |= 1 << (list[i] / 8 - 1);
        i += 1;
    }
    bits
}

/// How a product runs: who fills stages, and who finds chunks (gemm.h).
#[derive(Clone, Copy)]
enum Way {
    /// Several producers take turns, and each role finds its chunks (turns.h).
    Turns,
    /// The producer finds chunks and hands them over (handed.h). Lanes of its warp fill the first stages.
    HandedByLanes,
    /// The same; one thread fills all.
    HandedByThread,
    /// Each role walks down the unembedding's weights (raster.h). Lanes of the producer's warp fill the first stages.
    RasterByLanes,
    /// The same; one thread fills all.
    RasterByThread,
    /// Tokens are wgmma's rows; each role finds its chunks (tokens_first.h).
    TokensFirst,
}
use Way::{HandedByLanes, HandedByThread, RasterByLanes, RasterByThread, TokensFirst, Turns};

impl Way {
    const fn word(self) -> &'static str {
        match self {
            Turns => "Turns",
            HandedByLanes => "HandedByLanes",
            HandedByThread => "HandedByThread",
            RasterByLanes => "RasterByLanes",
            RasterByThread => "RasterByThread",
            TokensFirst => "TokensFirst",
        }
    }
}

/// What a consumer does with a chunk: how often there is code for the operation's epilogue (consumers.h).
#[derive(Clone, Copy)]
enum Consumer {
    /// For each of wgmma's widths and numbers of blocks.
    Own,
    /// The same; what the epilogue needs is loaded before the predecessor ends.
    Early,
    /// Once, if it is long: in mlp1. In mlp2, whose rows are the same, as often as [`Own`].
    IfLong,
    /// There is one width, of queries, keys and values that are rotated and stored through shared memory.
    Stored,
}
use Consumer::{Early, IfLong, Own, Stored};

impl Consumer {
    const fn word(self) -> &'static str {
        match self {
            Own => "OwnEpilogue",
            Early => "EarlyEpilogue",
            IfLong => "SharedIfLong",
            Stored => "StoredTile",
        }
    }
}

/// How often weights are read.
#[derive(Clone, Copy)]
enum Read {
    /// By one token tile.
    Once,
    /// Experts have several, and those of a later round read the same weights, from the L2.
    Again,
}
use Read::{Again, Once};

/// How a tile multiplies. `widths` are those of wgmma that have code, `blocks` the blocks of 64 weight rows per
/// warpgroup.
#[derive(Clone, Copy)]
enum Loop {
    /// Each warp multiplies by itself (by_warps.h). `slabs`: in a stage, two or four.
    OfWarps {
        widths: &'static [usize],
        blocks: usize,
        slabs: usize,
    },
    /// 16-bit weights from shared memory (w16_loop.h).
    OfW16 { widths: &'static [usize], blocks: usize },
    /// MXFP4 weights, decoded in registers (codes_loop.h): `k16s` times 16 along K make a group of wgmma, of which
    /// `in_flight` are in flight.
    OfCodes {
        widths: &'static [usize],
        blocks: usize,
        k16s: usize,
        in_flight: usize,
        read: Read,
    },
    /// Activations of several terms (exact_loop.h).
    OfTerms { widths: &'static [usize], blocks: usize },
}
use Loop::{OfCodes, OfTerms, OfW16, OfWarps};

/// See [`OfCodes`].
const fn codes(widths: &'static [usize], blocks: usize, k16s: usize, in_flight: usize, read: Read) -> Loop {
    OfCodes {
        widths,
        blocks,
        k16s,
        in_flight,
        read,
    }
}

/// Weight rows that wgmma multiplies at once, of which 16-bit weights have four units.
const BLOCK_ROWS: usize = 64;
const UNIT_ROWS: usize = 16;

type How = (Way, Loop, Consumer);

/// A tile of `warpgroups` consumer warpgroups and a producer.
const fn tile(
    ops: Ops,
    weights: &'static [PackedFormat],
    activations: Activations,
    tokens: usize,
    warpgroups: usize,
    (way, by, consumer): How,
) -> Tile {
    let words = Parameters::words(&[("WAY", way.word()), ("CONSUMER", consumer.word())]);
    let (maker, widths, blocks, own) = match by {
        OfWarps { widths, blocks, slabs } => ("PRODUCT_BY_WARPS", widths, blocks, Parameters::of(&[("SLABS", slabs)])),
        OfW16 { widths, blocks } => ("PRODUCT_OF_W16", widths, blocks, Parameters::of(&[])),
        OfCodes {
            widths,
            blocks,
            k16s,
            in_flight,
            read,
        } => (
            "PRODUCT_OF_CODES",
            widths,
            blocks,
            Parameters::of(&[
                ("K16S", k16s),
                ("IN_FLIGHT", in_flight),
                ("READ_AGAIN", matches!(read, Again) as usize),
            ]),
        ),
        OfTerms { widths, blocks } => ("PRODUCT_OF_TERMS", widths, blocks, Parameters::of(&[])),
    };
    let numbers = Parameters::of(&[("WIDTHS", bits_of(widths)), ("BLOCKS", blocks)]);
    Tile {
        ops,
        weights,
        activations,
        tokens,
        threads: (warpgroups + 1) * WARPGROUP,
        shared_bytes: ALL_SHARED,
        least_rows: 0,
        most_rows: None,
        cut: Cut {
            multiple: BLOCK_ROWS,
            ..Cut::rows(warpgroups * blocks * BLOCK_ROWS)
        },
        variant: "",
        maker,
        parameters: words.and(numbers).and(own),
    }
}
/// A tile for at most its tokens in all: its weights are in flight before the tokens are known.
const fn single(ops: Ops, activations: Activations, tokens: usize, warpgroups: usize, how: How) -> Tile {
    Tile {
        most_rows: Some(tokens),
        shared_bytes: SINGLE_SHARED,
        ..tile(ops, &[W16], activations, tokens, warpgroups, how)
    }
}
/// A tile of a layer's own matrices for any number of rows, in 16 bits. One width: there is a tile for each.
const fn many(
    ops: Ops,
    tokens: usize,
    warpgroups: usize,
    widths: &'static [usize; 1],
    blocks: usize,
    consumer: Consumer,
) -> Tile {
    let by = OfW16 { widths, blocks };
    Tile {
        variant: "many",
        ..tile(
            ops,
            &[W16],
            FAST_F16,
            tokens,
            warpgroups,
            (HandedByThread, by, consumer),
        )
    }
}
/// The same with tokens as wgmma's rows, a warpgroup for each 64, and `units` of weights in a chunk (tokens_first.h):
/// no weights but these are multiplied, and a thread stores four outputs of a token. It has few registers, and shared
/// memory that leaves room for a block of the small kernel before it.
const fn tokens_first(ops: Ops, tokens: usize, variant: &'static str, units: usize) -> Tile {
    Tile {
        ops,
        weights: &[W16],
        activations: FAST_F16,
        tokens,
        threads: (tokens / 64 + 1) * WARPGROUP,
        shared_bytes: SINGLE_SHARED,
        least_rows: 0,
        most_rows: None,
        cut: Cut {
            multiple: UNIT_ROWS,
            outputs: 4,
            ..Cut::rows(units * UNIT_ROWS)
        },
        variant,
        maker: "PRODUCT_TOKENS_FIRST",
        parameters: Parameters::words(&[("WAY", TokensFirst.word())]).and(Parameters::of(&[("UNITS", units)])),
    }
}
/// A tile for at least so many rows per expert.
const fn from(least_rows: usize, tile: Tile) -> Tile {
    Tile { least_rows, ..tile }
}
/// A tile with so few blocks that it leaves multiprocessors to the kernels beside it. Where attention's blocks have a
/// job each, these hold some multiprocessors until they end, and blocks there would end last; the router starts early
/// where there is no block.
const fn fewest_blocks(tile: Tile) -> Tile {
    Tile {
        cut: Cut {
            fewest_blocks: true,
            ..tile.cut
        },
        ..tile
    }
}

/// The operations with kernels in a file.
const fn layers(file: &'static str) -> [(Op, &'static str); 2] {
    [(Op::Qkv, file), (Op::AttnOut, file)]
}
const fn unembed(file: &'static str) -> [(Op, &'static str); 2] {
    [(Op::GreedyLogits, file), (Op::Logits, file)]
}
const fn experts(file: &'static str) -> [(Op, &'static str); 2] {
    [(Op::Mlp1, file), (Op::Mlp2, file)]
}

const LAYERS: Ops = &layers("hopper/layers_f16.hip");
const QKV: Ops = &[LAYERS[0]];
const ATTN_OUT: Ops = &[LAYERS[1]];
const STORE: Ops = &[(Op::QkvStore, LAYERS[0].1)];
const UNEMBED: Ops = &unembed("hopper/unembed_f16.hip");
const EXPERTS: Ops = &[
    (Op::Mlp1, "hopper/mlp1_mxfp4_f16.hip"),
    (Op::Mlp2, "hopper/mlp2_mxfp4_f16.hip"),
];
const MLP1: Ops = &[EXPERTS[0]];
const MLP2: Ops = &[EXPERTS[1]];
const EXPERTS_BF16: Ops = &experts("hopper/experts_mxfp4_bf16.hip");
const EXPERTS_EXACT: Ops = &experts("hopper/experts_mxfp4_exact.hip");
const EXPERTS_W16: Ops = &experts("hopper/experts_w16.hip");
const LAYERS_BF16: Ops = &layers("hopper/dense_bf16.hip");
const UNEMBED_BF16: Ops = &unembed("hopper/dense_bf16.hip");
const LAYERS_EXACT: Ops = &layers("hopper/dense_exact.hip");
const QKV_EXACT: Ops = &[LAYERS_EXACT[0]];
const ATTN_OUT_EXACT: Ops = &[LAYERS_EXACT[1]];
const UNEMBED_EXACT: Ops = &unembed("hopper/dense_exact.hip");

const FAST_F16: Activations = &[(F16, 1)];
const FAST_BF16: Activations = &[(Bf16, 1)];
const FAST: Activations = &[(F16, 1), (Bf16, 1)];
/// Two FP16 or three BF16 terms.
const EXACT: Activations = &[(F16, 2), (Bf16, 3)];

/// Widths of tiles that have many.
const BY_64: &[usize] = &[64, 128, 192, 256];
const BY_32: &[usize] = &[32, 64, 96, 128, 160, 192, 224, 256];
const UNEVEN: &[usize] = &[40, 72, 112, 128];
const TO_56: &[usize] = &[8, 16, 24, 32, 40, 48, 56];
const TO_64: &[usize] = &[24, 32, 40, 48, 56, 64];
const TO_128: &[usize] = &[40, 56, 72, 80, 88, 96, 104, 112, 128];
const TO_160: &[usize] = &[112, 120, 128, 136, 144, 152, 160];
const TO_184: &[usize] = &[160, 168, 176, 184];
const TO_192: &[usize] = &[128, 144, 160, 176, 192];

#[rustfmt::skip]
const TILES: &[Tile] = &[
    // Columns: the parameters of `tile`, `single`, `many` or `tokens_first`. Few tokens (up to 64) have each of the
    // first stages filled by a lane. Where they are multiplied sooner than one thread can request the next stage, that
    // is by warps or by one warpgroup, producers take turns.
    //
    // qkv and attn_out. With few rows each multiprocessor has about three units of weights (48 rows): one warpgroup is
    // enough, and nearly all of shared memory is copies in flight. Up to 32 rows each warp multiplies by itself.
    // Up to 8 rows qkv rotates and stores; with 32 that gains nothing.
    single(STORE, FAST_F16, 8, 1, (Turns, OfWarps { widths: &[8], blocks: 1, slabs: 4 }, Early)),
    single(QKV, FAST_F16, 8, 1, (Turns, OfWarps { widths: &[8], blocks: 1, slabs: 4 }, Early)),
    fewest_blocks(single(ATTN_OUT, FAST_F16, 8, 1, (Turns, OfWarps { widths: &[8], blocks: 1, slabs: 4 }, Early))),
    single(LAYERS, FAST_F16, 32, 1, (Turns, OfWarps { widths: &[32], blocks: 1, slabs: 4 }, Early)),
    single(LAYERS, FAST_F16, 64, 1, (Turns, OfW16 { widths: &[64], blocks: 1 }, Own)),
    // From 65 rows on a multiprocessor's two to five units would leave much of wgmma's 64 rows empty, so tokens are
    // these rows: 128 of them for one token tile or, up to 256 rows, two. Attention has all registers: attn_out, which
    // cannot start beside it, has all shared memory where that is faster.
    Tile { most_rows: Some(128), ..tokens_first(QKV, 128, "", 3) },
    Tile { most_rows: Some(128), ..tokens_first(ATTN_OUT, 128, "", 2) },
    tokens_first(QKV, 128, "tall", 5),
    Tile { shared_bytes: ALL_SHARED, ..tokens_first(ATTN_OUT, 128, "tall", 3) },
    // With many rows a chunk's row blocks and tokens are what cuts the rows at hand into whole rounds of chunks.
    many(QKV, 112, 2, &[112], 3, Own),
    many(QKV, 128, 2, &[128], 2, Own),
    many(QKV, 160, 2, &[160], 2, Own),
    many(QKV, 176, 2, &[176], 2, Own),
    // It rotates and stores: with 128 tokens a thread has registers for their angles.
    many(STORE, 128, 2, &[128], 2, Stored),
    many(ATTN_OUT, 96, 3, &[96], 1, Own),
    many(ATTN_OUT, 112, 3, &[112], 1, Own),
    many(ATTN_OUT, 128, 3, &[128], 1, Own),
    many(ATTN_OUT, 192, 3, &[192], 1, Own),
    // The unembedding. Its weights are 1.2 GB: each 256 rows are a column of blocks, see RasterSchedule.
    single(UNEMBED, FAST_F16, 8, 2, (RasterByLanes, OfW16 { widths: &[8], blocks: 2 }, Own)),
    single(UNEMBED, FAST_F16, 32, 2, (RasterByLanes, OfW16 { widths: &[32], blocks: 2 }, Own)),
    single(UNEMBED, FAST_F16, 64, 2, (RasterByLanes, OfW16 { widths: &[64], blocks: 2 }, Own)),
    single(UNEMBED, FAST_F16, 128, 2, (RasterByThread, OfW16 { widths: &[128], blocks: 2 }, Own)),
    tile(UNEMBED, &[W16], FAST_F16, 256, 2, (RasterByThread, OfW16 { widths: BY_32, blocks: 1 }, Own)),
    // The experts. Up to 56 tokens the limit is DRAM, and decoding: many weight blocks per chunk make large copies, and
    // few chunks. Up to 16 each warp multiplies by itself; of 8 tokens stages of four slabs, of fewer blocks, are
    // waited for less often. From 64 on the limit is registers: fewer blocks, and two groups in flight, so that
    // decoding overlaps with wgmma. Experts' rows are uneven, so tiles have several widths. That of 56 begins with 8,
    // since of 128 experts that are chosen unevenly most have few rows, and ends where registers do: the widest experts
    // then have fewer tiles. A tile of 128 is shared by four warpgroups: chunks of four row blocks and of three leave
    // fewer of them idle than those of three and of two, and fetch fewer tokens. Their registers hold four widths: 72
    // is the half of an expert just too large for one tile, and 40 is for small ones, of which there are many where
    // others are large.
    tile(EXPERTS, &[Mxfp4], FAST_F16, 8, 3, (Turns, OfWarps { widths: &[8], blocks: 2, slabs: 4 }, Own)),
    tile(EXPERTS, &[Mxfp4], FAST_F16, 16, 3, (Turns, OfWarps { widths: &[8, 16], blocks: 3, slabs: 2 }, Own)),
    tile(EXPERTS, &[Mxfp4], FAST_F16, 32, 3, (HandedByLanes, codes(&[32], 3, 2, 1, Once), IfLong)),
    tile(EXPERTS, &[Mxfp4], FAST_F16, 56, 3, (HandedByLanes, codes(TO_56, 3, 2, 1, Once), IfLong)),
    tile(EXPERTS, &[Mxfp4], FAST_F16, 64, 3, (HandedByLanes, codes(&[64], 2, 2, 2, Once), IfLong)),
    tile(EXPERTS, &[Mxfp4], FAST_F16, 96, 3, (HandedByThread, codes(&[48, 64, 80, 96], 1, 2, 2, Once), IfLong)),
    tile(EXPERTS, &[Mxfp4], FAST_F16, 128, 4, (HandedByThread, codes(UNEVEN, 1, 1, 2, Once), IfLong)),
    // Experts with more rows have one tile or several, as narrow as they can be: three warpgroups decode and multiply
    // faster than two with tiles of 256. mlp2 has registers for fewer widths.
    from(129, tile(MLP1, &[Mxfp4], FAST_F16, 192, 3, (HandedByThread, codes(TO_192, 1, 1, 2, Again), IfLong))),
    from(217, tile(MLP1, &[Mxfp4], FAST_F16, 160, 3, (HandedByThread, codes(TO_160, 1, 1, 2, Again), IfLong))),
    from(129, tile(MLP2, &[Mxfp4], FAST_F16, 160, 3, (HandedByThread, codes(TO_160, 1, 1, 2, Again), IfLong))),
    from(641, tile(EXPERTS, &[Mxfp4], FAST_F16, 184, 3, (HandedByThread, codes(TO_184, 1, 1, 2, Again), IfLong))),
    // BF16 activations: for models whose values do not fit FP16.
    single(LAYERS_BF16, FAST_BF16, 16, 1, (Turns, OfW16 { widths: &[16], blocks: 1 }, Own)),
    single(UNEMBED_BF16, FAST_BF16, 16, 2, (RasterByLanes, OfW16 { widths: &[16], blocks: 2 }, Own)),
    tile(LAYERS_BF16, &[W16], FAST_BF16, 256, 2, (HandedByThread, OfW16 { widths: BY_64, blocks: 1 }, Own)),
    tile(UNEMBED_BF16, &[W16], FAST_BF16, 256, 2, (RasterByThread, OfW16 { widths: BY_64, blocks: 1 }, Own)),
    tile(EXPERTS_BF16, &[Mxfp4], FAST_BF16, 16, 3, (HandedByLanes, codes(&[16], 4, 2, 1, Once), IfLong)),
    tile(EXPERTS_BF16, &[Mxfp4], FAST_BF16, 64, 3, (HandedByLanes, codes(&[64], 2, 2, 1, Once), IfLong)),
    tile(EXPERTS_BF16, &[Mxfp4], FAST_BF16, 256, 2, (HandedByThread, codes(BY_64, 1, 1, 2, Again), IfLong)),
    // `exact`. Experts: two tiles of 8 take longer than a width of 24. With ten rows on average, 14 for the busiest,
    // most experts still have one of 8. Wide tiles have registers for half of their tokens' accumulators at once; 120
    // tokens, whose halves differ, would take more. attn_out of 890 rows is one round of chunks with 112 tokens.
    single(QKV_EXACT, EXACT, 8, 1, (Turns, OfTerms { widths: &[8], blocks: 1 }, Own)),
    fewest_blocks(single(ATTN_OUT_EXACT, EXACT, 8, 1, (Turns, OfTerms { widths: &[8], blocks: 1 }, Own))),
    single(UNEMBED_EXACT, EXACT, 8, 2, (RasterByLanes, OfTerms { widths: &[8], blocks: 2 }, Own)),
    tile(LAYERS_EXACT, &[W16], EXACT, 64, 3, (HandedByLanes, OfTerms { widths: &[64], blocks: 1 }, Own)),
    tile(LAYERS_EXACT, &[W16], EXACT, 112, 3, (HandedByThread, OfTerms { widths: &[112], blocks: 1 }, Own)),
    tile(UNEMBED_EXACT, &[W16], EXACT, 128, 2, (RasterByThread, OfTerms { widths: &[64, 128], blocks: 1 }, Own)),
    tile(EXPERTS_EXACT, &[Mxfp4], EXACT, 8, 3, (HandedByLanes, OfTerms { widths: &[8], blocks: 2 }, Own)),
    from(15, tile(EXPERTS_EXACT, &[Mxfp4], EXACT, 64, 3, (HandedByLanes, OfTerms { widths: TO_64, blocks: 1 }, Own))),
    from(65, tile(EXPERTS_EXACT, &[Mxfp4], EXACT, 128, 3, (HandedByThread, OfTerms { widths: TO_128, blocks: 1 }, Own))),
    // Experts that are not MXFP4 in the checkpoint: 16-bit weights.
    tile(EXPERTS_W16, &[W16], FAST, 16, 2, (HandedByLanes, OfW16 { widths: &[16], blocks: 2 }, Own)),
    tile(EXPERTS_W16, &[W16], FAST, 256, 2, (HandedByThread, OfW16 { widths: BY_64, blocks: 1 }, Own)),
    tile(EXPERTS_W16, &[W16], EXACT, 64, 3, (HandedByLanes, OfTerms { widths: &[64], blocks: 1 }, Own)),
];
