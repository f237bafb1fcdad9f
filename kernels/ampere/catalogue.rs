//! Ampere's kernels: NVIDIA since sm_80, with mma.sync and cp.async.

use super::mma::{CACHE_TILE_BYTES, PAIR_ROWS, PARTIAL_BYTES, TEAM_ROWS, WARP};
use super::{
    Cut, Dimension, Elements, ExactSums, Kernel, Limit, MATRIX_HEADS, NORM_FEW, NORM_THREADS, Op, PackedFormat,
    Parameters, Platform, SHARED, Table, Tile, Toolchain, Workers, card, kernels_of, shared, with, with_tiles,
};
use Elements::{Bf16, F16};
use PackedFormat::{Mxfp4, W16};

/// The family.
pub static TABLE: Table = Table {
    name: "ampere",
    platforms: &[Platform {
        toolchain: Toolchain::Cuda,
        // A text that the driver compiles for the device.
        architectures: &["compute_80"],
        devices: &["sm_8", "sm_9", "sm_1", "compute_8", "compute_9", "compute_1"],
    }],
    cards: &[card("A100", 80, 81_920, 108), card("RTX 4090", 24, 24_564, 128)],
    wave: WARP,
    // Before sm_90 kernels cannot wait by themselves.
    overlaps: false,
    term_shift: 0,
    cuts_experts: false,
    // Of all its generations: 4 products and what they are added to are cut off at a common place, 2^-23 of the
    // largest, and so is their sum. Later ones add more at once, and keep more bits.
    sum_error: [0.3, 16.0],
    exact_sums: Some(ExactSums {
        chained: 2,
        together: 8,
    }),
    kernels: &KERNELS,
};

static KERNELS: [Kernel; SHARED + WRITTEN.len() + kernels_of(TILES)] = with_tiles(
    with::<SHARED, { WRITTEN.len() }, { SHARED + WRITTEN.len() }>(shared(WARP), WRITTEN),
    TILES,
    &[],
);

/// Query rows of an item of prefill attention, four a warp, and its stages.
const PREFILL_ROWS: usize = 16;
const PREFILL_STAGES: usize = 3;

/// Elements and experts of a row that is normed and routed by little code.
const LEAN_HIDDEN: usize = 3072;
const LEAN_EXPERTS: usize = 32;

/// Warps of the norm that a product computes by itself, warps that multiply, and stages of each: what an RTX 4090's
/// shared memory holds beside the row.
const NORM_WARPS: usize = NORM_THREADS / WARP;
const QKV_WARPS: usize = 3;
const QKV_STAGES: usize = 15;

const WRITTEN: [Kernel; 15] = [
    Kernel {
        cut: Cut::rows(QKV_WARPS * 16),
        ..Kernel::written(Op::NormQkv, "ampere/norm_qkv.hip", (NORM_WARPS + QKV_WARPS) * WARP)
            .shared_bytes(QKV_WARPS * QKV_STAGES * 2048)
            .elements(F16)
            .most_rows(1)
            .limits(NORM_FEW)
    },
    Kernel::written(Op::NormRoute, "ampere/norm_route_lean.hip", LEAN_EXPERTS / 2 * WARP)
        .variant("lean")
        .limits(&[
            Limit::AtMost(Dimension::Hidden, LEAN_HIDDEN),
            Limit::MultipleOf(Dimension::Hidden, 8),
            Limit::AtMost(Dimension::Experts, LEAN_EXPERTS),
            Limit::AtMost(Dimension::ExpertsPerToken, 8),
        ]),
    decode(F16, "team", 4).most_rows(TEAM_ROWS).workers(Workers::Team),
    decode(F16, "pair", 2).most_rows(PAIR_ROWS).workers(Workers::Pair),
    decode(F16, "many", 4),
    decode(Bf16, "team", 4).most_rows(TEAM_ROWS).workers(Workers::Team),
    decode(Bf16, "pair", 2).most_rows(PAIR_ROWS).workers(Workers::Pair),
    decode(Bf16, "many", 4),
    prefill(F16),
    prefill(Bf16),
    pack(W16),
    pack(Mxfp4),
    Kernel::written(Op::MatrixPeak, "ampere/matrix_peak.hip", 4 * WARP),
    Kernel::written(Op::AttentionPeak, "ampere/attention_peak.hip", 4 * WARP),
    Kernel::written(
        Op::OneLaunch,
        "ampere/one_launch.hip",
        (NORM_WARPS + DENSE_WARPS) * WARP,
    )
    .weights(Mxfp4)
    .elements(F16)
    .shared_bytes(NORM_WARPS * EXPERT_RING + 2 * (QKV_RING + OUT_RING))
    .products_of(8)
    .workers(Workers::Team)
    .most_rows(1)
    .limits(&[
        Limit::AtMost(Dimension::Hidden, LEAN_HIDDEN),
        Limit::MultipleOf(Dimension::Hidden, 8),
        Limit::AtMost(Dimension::Experts, 128),
        Limit::AtMost(Dimension::ExpertsPerToken, 4),
        Limit::Exactly(Dimension::HeadDim, 64),
        Limit::Exactly(Dimension::HeadsPerKvHead, 8),
    ]),
];

/// Of one launch: warps that multiply for qkv and attn_out, the ring buffers of two of them and of the others, and
/// those of warps that multiply for the experts.
const DENSE_WARPS: usize = 4;
const QKV_RING: usize = 5 * 2 * 2048;
const OUT_RING: usize = 9 * 2 * 2048;
const EXPERT_RING: usize = 4 * 3 * 544;

/// Persistent blocks whose warps have a cache tile and two partial sums each. Those for at most so many rows share a
/// job's units.
const fn decode(elements: Elements, variant: &'static str, warps: usize) -> Kernel {
    Kernel::written(Op::AttentionDecode, "ampere/attention_decode.hip", warps * WARP)
        .elements(elements)
        .variant(variant)
        .shared_bytes(warps * (CACHE_TILE_BYTES + 2 * PARTIAL_BYTES))
        .limits(MATRIX_HEADS)
}

const fn prefill(elements: Elements) -> Kernel {
    Kernel::written(
        Op::AttentionPrefill,
        "ampere/attention_prefill.hip",
        PREFILL_ROWS / 4 * WARP,
    )
    .elements(elements)
    .shared_bytes(PREFILL_STAGES * CACHE_TILE_BYTES)
    .per_block(PREFILL_ROWS)
    .limits(MATRIX_HEADS)
}

const fn pack(weights: PackedFormat) -> Kernel {
    Kernel::written(Op::Pack, "ampere/pack.hip", 128)
        .weights(weights)
        .per_block(1)
}

type InFile = (Op, &'static str);
type Ops = &'static [InFile];
type Activations = &'static [(Elements, usize)];

/// How a block multiplies (gemm.h).
#[derive(Clone, Copy)]
struct Shape {
    /// Warps side by side.
    warps: usize,
    /// Units of 16 weight rows of each.
    units: usize,
    /// Slabs of a stage.
    slabs: usize,
    /// Stages.
    stages: usize,
    /// There is code for each multiple of so many tokens.
    width: usize,
    /// Blocks of a multiprocessor that registers leave room for.
    blocks: usize,
}

const fn shape(warps: usize, units: usize, slabs: usize, stages: usize, width: usize, blocks: usize) -> Shape {
    Shape {
        warps,
        units,
        slabs,
        stages,
        width,
        blocks,
    }
}

/// A tile of one kind of weights, and of activations of so many terms.
const fn tile(
    least_rows: usize,
    ops: Ops,
    weights: &'static [PackedFormat; 1],
    activations: Activations,
    tokens: usize,
    by: Shape,
) -> Tile {
    // Bytes of a slab: of 16 weight rows, and of a token.
    let (unit, token) = match weights[0] {
        W16 => (2048, 128),
        Mxfp4 => (544, 128),
    };
    let slab = by.warps * by.units * unit + activations[0].1 * tokens * token;
    Tile {
        ops,
        weights,
        activations,
        tokens,
        threads: by.warps * WARP,
        shared_bytes: by.stages * by.slabs * slab,
        least_rows,
        most_rows: None,
        cut: Cut::rows(by.warps * by.units * 16),
        variant: "",
        maker: "PRODUCT",
        parameters: Parameters::of(&[
            ("UNITS", by.units),
            ("SLABS", by.slabs),
            ("WIDTH", by.width),
            ("BLOCKS", by.blocks),
        ]),
    }
}
const fn up_to(most_rows: usize, tile: Tile) -> Tile {
    Tile {
        most_rows: Some(most_rows),
        ..tile
    }
}

const STORE: Ops = &[(Op::QkvStore, "ampere/layers.hip")];
const LAYERS: Ops = &[(Op::Qkv, "ampere/layers.hip"), (Op::AttnOut, "ampere/layers.hip")];
const UNEMBED: Ops = &unembed("ampere/unembed.hip");
const EXPERTS: Ops = &[(Op::Mlp1, "ampere/mlp1.hip"), (Op::Mlp2, "ampere/mlp2.hip")];
const EXPERTS_W16: Ops = &experts("ampere/experts_w16.hip");
const DENSE_BF16: Ops = &dense("ampere/dense_bf16.hip");
const EXPERTS_BF16: Ops = &experts("ampere/experts_bf16.hip");
const DENSE_EXACT: Ops = &dense("ampere/dense_exact.hip");
const EXPERTS_EXACT: Ops = &experts("ampere/experts_exact.hip");

const fn unembed(file: &'static str) -> [InFile; 2] {
    [(Op::GreedyLogits, file), (Op::Logits, file)]
}
const fn experts(file: &'static str) -> [InFile; 2] {
    [(Op::Mlp1, file), (Op::Mlp2, file)]
}
/// All but the experts.
const fn dense(file: &'static str) -> [InFile; 4] {
    let [greedy, logits] = unembed(file);
    [(Op::Qkv, file), (Op::AttnOut, file), greedy, logits]
}

const FAST_F16: Activations = &[(F16, 1)];
const FAST_BF16: Activations = &[(Bf16, 1)];
const FAST: Activations = &[(F16, 1), (Bf16, 1)];
const EXACT_F16: Activations = &[(F16, 2)];
const EXACT_BF16: Activations = &[(Bf16, 3)];

#[rustfmt::skip]
const TILES: &[Tile] = &[
    // Columns: the rows from which it may be taken, and the parameters of `tile`; those of `shape` are warps, units
    // of weights of each, slabs of a stage, stages, tokens of whose multiples there is code, and blocks of a
    // multiprocessor.
    //
    // qkv and attn_out. With few rows their 80 and 45 blocks of 64 weight rows would leave multiprocessors idle: blocks
    // are small. Up to 32 rows qkv rotates and stores.
    up_to(8, tile(0, STORE, &[W16], FAST_F16, 8, shape(1, 1, 1, 16, 8, 4))),
    tile(  0, LAYERS,       &[W16],   FAST_F16,    8, shape(1, 1, 1, 16, 8, 4)),
    up_to(32, tile(9, STORE, &[W16], FAST_F16, 32, shape(2, 1, 2, 6, 16, 2))),
    tile(  9, LAYERS,       &[W16],   FAST_F16,   32, shape(2, 1, 2, 6, 16, 2)),
    tile( 33, LAYERS,       &[W16],   FAST_F16,   64, shape(4, 2, 1, 3, 16, 3)),
    tile( 65, LAYERS,       &[W16],   FAST_F16,  128, shape(4, 2, 1, 3, 16, 2)),
    // The unembedding.
    tile(  0, UNEMBED,      &[W16],   FAST_F16,    8, shape(4, 1, 1, 6,  8, 4)),
    tile(  9, UNEMBED,      &[W16],   FAST_F16,   32, shape(4, 2, 1, 3, 16, 3)),
    tile( 33, UNEMBED,      &[W16],   FAST_F16,   64, shape(4, 2, 1, 3, 32, 3)),
    tile( 65, UNEMBED,      &[W16],   FAST_F16,  128, shape(4, 2, 1, 3, 32, 2)),
    // The experts, by the rows of each on average.
    tile(  0, EXPERTS,      &[Mxfp4], FAST_F16,    8, shape(4, 1, 1, 16, 8, 4)),
    tile(  5, EXPERTS,      &[Mxfp4], FAST_F16,   16, shape(4, 1, 4, 3,  8, 4)),
    tile( 11, EXPERTS,      &[Mxfp4], FAST_F16,   32, shape(4, 2, 2, 3, 16, 4)),
    tile( 25, EXPERTS,      &[Mxfp4], FAST_F16,   64, shape(4, 2, 1, 4, 16, 3)),
    tile( 51, EXPERTS,      &[Mxfp4], FAST_F16,  128, shape(4, 2, 1, 3, 16, 2)),
    // BF16 activations: for models whose values do not fit FP16.
    tile(  0, DENSE_BF16,   &[W16],   FAST_BF16,  16, shape(4, 1, 2, 3, 16, 4)),
    tile( 17, DENSE_BF16,   &[W16],   FAST_BF16, 128, shape(4, 2, 1, 3, 32, 2)),
    tile(  0, EXPERTS_BF16, &[Mxfp4], FAST_BF16,  16, shape(4, 1, 4, 3, 16, 4)),
    tile( 17, EXPERTS_BF16, &[Mxfp4], FAST_BF16, 128, shape(4, 2, 1, 3, 32, 2)),
    // Experts that are not MXFP4 in the checkpoint: 16-bit weights.
    tile(  0, EXPERTS_W16,  &[W16],   FAST,       16, shape(4, 1, 2, 3, 16, 4)),
    tile( 17, EXPERTS_W16,  &[W16],   FAST,      128, shape(4, 2, 1, 3, 32, 2)),
    // `exact`: two FP16 or three BF16 terms.
    tile(  0, DENSE_EXACT,  &[W16],   EXACT_F16,   8, shape(4, 1, 2, 4,  8, 3)),
    tile(  9, DENSE_EXACT,  &[W16],   EXACT_F16,  64, shape(4, 1, 1, 3, 32, 3)),
    tile(  0, DENSE_EXACT,  &[W16],   EXACT_BF16,  8, shape(4, 1, 2, 4,  8, 3)),
    tile(  9, DENSE_EXACT,  &[W16],   EXACT_BF16, 64, shape(4, 1, 1, 3, 32, 2)),
    tile(  0, EXPERTS_EXACT, &[Mxfp4], EXACT_F16,  8, shape(4, 1, 2, 4,  8, 4)),
    tile(  9, EXPERTS_EXACT, &[Mxfp4], EXACT_F16, 32, shape(4, 2, 2, 2, 16, 2)),
    tile(  0, EXPERTS_EXACT, &[Mxfp4], EXACT_BF16, 8, shape(4, 1, 2, 4,  8, 4)),
    tile(  9, EXPERTS_EXACT, &[Mxfp4], EXACT_BF16, 32, shape(4, 2, 2, 2, 16, 2)),
    tile(  0, EXPERTS_EXACT, &[W16],  EXACT_F16,  64, shape(4, 1, 1, 3, 32, 3)),
    tile(  0, EXPERTS_EXACT, &[W16],  EXACT_BF16, 64, shape(4, 1, 1, 3, 32, 2)),
];
