//! CDNA's kernels: AMD's gfx9 with MFMA, and the CPU that emulates one.

use super::{
    Cut, Dimension, Elements, FLUSHING_TERM_SHIFT, Kernel, Limit, MATRIX_HEADS, NORM_THREADS, Op, PackedFormat,
    Parameters, Platform, SHARED, Table, Tile, Toolchain, card, kernels_of, shared, with, with_tiles,
};
use Elements::{Bf16, F16};
use PackedFormat::{Mxfp4, W16};

/// The family.
pub static TABLE: Table = Table {
    name: "cdna",
    platforms: &[Platform {
        toolchain: Toolchain::Hip,
        architectures: &["gfx90a", "gfx942", "gfx950"],
        devices: &["gfx9", "simt"],
    }],
    cards: &[
        card("MI250, a device", 64, 65_536, 104),
        card("MI300X", 192, 196_608, 304),
    ],
    wave: WAVE,
    // For the SIMT machine, which checks that every thread waits. HIP has no such launches, and its driver ignores it.
    overlaps: true,
    term_shift: FLUSHING_TERM_SHIFT,
    cuts_experts: true,
    // The matrix cores round several times less often than once per product.
    sum_error: [16.0, 6.0],
    exact_sums: None,
    kernels: &KERNELS,
};

const WAVE: usize = 64;
/// Weight rows of a wave.
const WAVE_ROWS: usize = 32;

static KERNELS: [Kernel; SHARED + WRITTEN.len() + kernels_of(TILES)] = with_tiles(
    with::<SHARED, { WRITTEN.len() }, { SHARED + WRITTEN.len() }>(shared(WAVE), WRITTEN),
    TILES,
    &[],
);

/// Elements of a row that is normed by the threads of the norm, a piece each, and kept for the router.
const KEPT_HIDDEN: usize = 3072;

const WRITTEN: [Kernel; 12] = [
    Kernel::written(Op::NormRoute, "cdna/norm_route_rows.hip", 8 * WAVE)
        .variant("rows")
        .per_block(4)
        .limits(&[
            Limit::AtMost(Dimension::Hidden, KEPT_HIDDEN),
            Limit::MultipleOf(Dimension::Hidden, 8),
            Limit::AtMost(Dimension::Experts, 256),
            Limit::AtMost(Dimension::ExpertsPerToken, 8),
        ]),
    decode(F16),
    decode(Bf16),
    prefill(F16),
    prefill(Bf16),
    pack(W16),
    pack(Mxfp4),
    Kernel::written(Op::MatrixPeak, "cdna/matrix_peak.hip", 4 * WAVE),
    one_launch(Mxfp4, F16),
    one_launch(Mxfp4, Bf16),
    one_launch(W16, F16),
    one_launch(W16, Bf16),
];

/// Of experts in this format. Its limits are those of the kernels whose functions it calls.
const fn one_launch(weights: PackedFormat, elements: Elements) -> Kernel {
    Kernel::written(Op::OneLaunch, "cdna/one_launch.hip", 8 * WAVE)
        .weights(weights)
        .elements(elements)
        .products_of(16)
        .most_rows(8)
        .limits(&[
            Limit::AtMost(Dimension::Hidden, NORM_THREADS * 8),
            Limit::MultipleOf(Dimension::Hidden, 8),
            Limit::AtMost(Dimension::Experts, 256),
            Limit::AtMost(Dimension::ExpertsPerToken, 4),
            Limit::Exactly(Dimension::HeadDim, 64),
            Limit::Exactly(Dimension::HeadsPerKvHead, 8),
        ])
}

/// One wave per work item.
const fn decode(elements: Elements) -> Kernel {
    Kernel::written(Op::AttentionDecode, "cdna/attention_decode.hip", WAVE)
        .elements(elements)
        .limits(MATRIX_HEADS)
}

/// Four waves of eight query rows.
const fn prefill(elements: Elements) -> Kernel {
    Kernel::written(Op::AttentionPrefill, "cdna/attention_prefill.hip", 4 * WAVE)
        .elements(elements)
        .per_block(32)
        .limits(MATRIX_HEADS)
}

/// A wave makes a slab of a row block.
const fn pack(weights: PackedFormat) -> Kernel {
    Kernel::written(Op::Pack, "cdna/pack.hip", 4 * WAVE)
        .weights(weights)
        .per_block(4)
}

type Ops = &'static [(Op, &'static str)];

const STORE: Ops = &[(Op::QkvStore, "cdna/dense.hip")];
const LAYERS: Ops = &[(Op::Qkv, "cdna/dense.hip"), (Op::AttnOut, "cdna/dense.hip")];
const SORT: Ops = &[(Op::SortMlp1, "cdna/mlp1.hip")];
const EXPERTS: Ops = &[(Op::Mlp1, "cdna/mlp1.hip"), (Op::Mlp2, "cdna/mlp2.hip")];
const UNEMBED: Ops = &[(Op::Logits, "cdna/unembed.hip"), (Op::GreedyLogits, "cdna/unembed.hip")];
const LAYERS_EXACT: Ops = &[(Op::Qkv, "cdna/exact.hip"), (Op::AttnOut, "cdna/exact.hip")];
const EXPERTS_EXACT: Ops = &[(Op::Mlp1, "cdna/exact.hip"), (Op::Mlp2, "cdna/exact.hip")];
const UNEMBED_EXACT: Ops = &[(Op::Logits, "cdna/exact.hip"), (Op::GreedyLogits, "cdna/exact.hip")];

/// A tile whose block is `waves` waves side by side. The first parameter is the occupancy to compile for, in waves per
/// SIMD, the second one TILED's step.
const fn tile(ops: Ops, maker: &'static str, tokens: usize, waves: usize, parameters: &'static [usize]) -> Tile {
    let parameters = match *parameters {
        [occupancy] => Parameters::of(&[("OCCUPANCY", occupancy)]),
        [occupancy, step] => Parameters::of(&[("OCCUPANCY", occupancy), ("STEP", step)]),
        _ => panic!("one or two"),
    };
    Tile {
        ops,
        weights: &[W16],
        activations: &[(F16, 1), (Bf16, 1)],
        tokens,
        threads: waves * WAVE,
        shared_bytes: 0,
        least_rows: 0,
        most_rows: None,
        cut: Cut::rows(waves * WAVE_ROWS),
        variant: "",
        maker,
        parameters,
    }
}
const fn from(least_rows: usize, tile: Tile) -> Tile {
    Tile { least_rows, ..tile }
}
const fn up_to(most_rows: usize, tile: Tile) -> Tile {
    Tile {
        most_rows: Some(most_rows),
        ..tile
    }
}
/// A step's rows are spread over all tiles of the grid.
const fn spread(tile: Tile) -> Tile {
    Tile {
        cut: Cut {
            spreads: true,
            ..tile.cut
        },
        ..tile
    }
}
/// MXFP4 weights, FP16 activations.
const fn mxfp4(tile: Tile) -> Tile {
    Tile {
        weights: &[Mxfp4],
        activations: &[(F16, 1)],
        ..tile
    }
}
/// MXFP4 weights, BF16 activations: for models whose values do not fit FP16.
const fn mxfp4_bf16(tile: Tile) -> Tile {
    Tile {
        weights: &[Mxfp4],
        activations: &[(Bf16, 1)],
        ..tile
    }
}
/// `exact`: two FP16 or three BF16 terms, slabs of K summed in float64.
const fn exact(tile: Tile) -> Tile {
    Tile {
        activations: &[(F16, 2), (Bf16, 3)],
        ..tile
    }
}
const fn exact_f16(tile: Tile) -> Tile {
    Tile {
        activations: &[(F16, 2)],
        ..tile
    }
}
const fn exact_bf16(tile: Tile) -> Tile {
    Tile {
        activations: &[(Bf16, 3)],
        ..tile
    }
}
const fn both(tile: Tile) -> Tile {
    Tile {
        weights: &[Mxfp4, W16],
        ..tile
    }
}

#[rustfmt::skip]
const TILES: &[Tile] = &[
    // Columns: operations, maker, tokens, waves, parameters
    //
    // STREAMED: up to 16 tokens; weights are streamed past them (STREAMED_STORE: and what comes of it is rotated and
    // stored; STREAMED_SORT: which are found among up to 64). ONE_SIZE: tokens in LDS, code for one size of tile.
    // TILED: tokens in LDS, code for each size of tile that is a multiple of 16 times the second parameter. SPREAD: for
    // each multiple of 16, and a step's rows are spread over all tiles of the grid (SPREAD_STORE: and what comes of it
    // is rotated and stored).
    //
    // qkv and attn_out. Up to 16 rows a block is one wave, so that few row blocks still spread over all compute units.
    // With more there are few blocks for a device, too: the host chooses the number of tiles that leaves the fewest
    // compute units idle in the last round.
   up_to(16, tile(STORE,  "STREAMED_STORE", 16, 1, &[2])),
             tile(LAYERS, "STREAMED",  16, 1, &[2]),
    from(17, spread(tile(STORE,  "SPREAD_STORE",   64, 2, &[2]))),
    from(17, spread(tile(LAYERS, "SPREAD",    64, 2, &[2]))),
    from(65, spread(tile(STORE,  "SPREAD_STORE",  128, 4, &[2]))),
    from(65, spread(tile(LAYERS, "SPREAD",   128, 4, &[2]))),
    // mlp1 that sorts the rows by expert.
   up_to(64, mxfp4(tile(SORT, "STREAMED_SORT", 16, 4, &[3]))),
   up_to(64, mxfp4_bf16(tile(SORT, "STREAMED_SORT", 16, 4, &[3]))),
   up_to(64, tile(SORT, "STREAMED_SORT", 16, 4, &[3])),
    // The experts. Where an expert has a second tile of 16, its weights come from L2; with a mean of 12 rows it rarely
    // has.
             mxfp4(tile(EXPERTS, "STREAMED", 16, 4, &[3])),
    from(13, mxfp4(tile(EXPERTS, "TILED",    64, 4, &[3, 1]))),
    from(49, mxfp4(tile(EXPERTS, "TILED",   128, 4, &[2, 1]))),
    // Fallbacks: half as many sizes of tile to compile.
             mxfp4_bf16(tile(EXPERTS, "STREAMED", 16, 4, &[3])),
    from(13, mxfp4_bf16(tile(EXPERTS, "TILED",    64, 4, &[3, 2]))),
    from(49, mxfp4_bf16(tile(EXPERTS, "TILED",   128, 4, &[2, 2]))),
             tile(EXPERTS, "STREAMED", 16, 4, &[3]),
    from(13, tile(EXPERTS, "TILED",    64, 4, &[3, 2])),
    from(49, tile(EXPERTS, "TILED",   128, 4, &[2, 2])),
    // The unembedding.
             tile(UNEMBED, "STREAMED", 16, 4, &[2]),
    from(17, tile(UNEMBED, "TILED",    64, 4, &[2, 1])),
    from(65, tile(UNEMBED, "TILED",   128, 4, &[2, 2])),
    // `exact`. Float64 sums of more than 64 tokens would not fit the registers; three terms of 64 tokens take so much
    // LDS that a SIMD has one wave.
             exact(tile(LAYERS_EXACT, "ONE_SIZE", 16, 1, &[2])),
    from(17, exact_f16(tile(LAYERS_EXACT, "ONE_SIZE", 64, 4, &[2]))),
    from(17, exact_bf16(tile(LAYERS_EXACT, "ONE_SIZE", 64, 4, &[1]))),
             both(exact(tile(EXPERTS_EXACT, "ONE_SIZE", 16, 4, &[2]))),
    from(13, both(exact_f16(tile(EXPERTS_EXACT, "ONE_SIZE", 64, 4, &[2])))),
    from(13, both(exact_bf16(tile(EXPERTS_EXACT, "ONE_SIZE", 64, 4, &[1])))),
             exact(tile(UNEMBED_EXACT, "ONE_SIZE", 16, 4, &[2])),
    from(17, exact_f16(tile(UNEMBED_EXACT, "ONE_SIZE", 64, 4, &[2]))),
    from(17, exact_bf16(tile(UNEMBED_EXACT, "ONE_SIZE", 64, 4, &[1]))),
];
