//! Kernels of CDNA's matrix cores (`kernels/cdna`): which one a product gets, and how it is launched.
//!
//! A wave does 32 weight rows times a tile of tokens. A token's sum is the same in every tile, so tiles are chosen by speed
//! alone:
//!
//! * `n16` streams weights past up to 16 tokens, without LDS: reading weights is all the work.
//! * `n64` and `n128` keep tokens in LDS. The larger the tile, the fewer instructions decode weights beside each MFMA, and the
//!   fewer waves a SIMD holds to hide latency.
//! * A block is four waves side by side (128 weight rows share a tile of tokens); of dense products with few rows fewer,
//!   as their 90 to 160 row blocks would otherwise leave compute units without work.
//! * qkv and attn_out have `n80`, `n96` and `n112` beside these. They make few blocks, of which the last round fills the device
//!   only in part: the size is chosen by how long all rounds take.

use super::super::args::{PackArgs, WIRE_ROWS};
use super::super::context::Grid;
use super::super::target::{GemmLaunch, GemmShape, PackedShape, Product};
use super::super::weights::Kind;
use super::kernel_name;

/// Exponents of MXFP4 scales that decode to FP16: from where half of it is normal (MI200's MFMA flushes subnormals) to
/// where six times it is finite.
pub const MXFP4_F16_SCALES: (i32, i32) = (-13, 13);

/// Tiles of dense products with many rows: tokens, and waves of a block.
const DENSE_TILES: [(usize, usize); 5] = [(128, 4), (112, 4), (96, 4), (80, 4), (64, 2)];
/// Waves that a compute unit works on at once: two a SIMD, as registers or LDS allow.
const WAVES_AT_ONCE: usize = 8;

/// Lanes of a wave.
const WAVE: usize = 64;
/// Weight rows of a wave, a tile of the wire.
const BLOCK_ROWS: usize = WIRE_ROWS;
/// Threads of a block that packs; each makes what one lane reads of a chunk.
const PACK_THREADS: usize = 256;
/// More blocks than these would only queue.
const PACK_BLOCKS: usize = 4096;

/// A packed matrix.
pub fn packed(kind: Kind, rows: usize, cols: usize) -> PackedShape {
    super::packed(kind, rows, cols, BLOCK_ROWS)
}

/// The kernel that packs it.
pub fn pack_kernel(kind: Kind, args: &PackArgs) -> (&'static str, Grid) {
    let lanes = args.members as usize * args.row_blocks as usize * args.k_blocks as usize * WAVE;
    (
        super::pack_name(kind),
        Grid::new(lanes.div_ceil(PACK_THREADS).min(PACK_BLOCKS), PACK_THREADS),
    )
}

/// The kernel of a product.
pub fn gemm(shape: &GemmShape, compute_units: usize) -> GemmLaunch {
    let tile = tile(shape, compute_units);
    let waves = waves(shape, tile);
    let spans = shape.row_blocks.div_ceil(waves);
    GemmLaunch {
        kernel: kernel_name(shape, tile),
        grid: Grid::new(tiles(shape, tile) * spans, waves * WAVE),
        candidates: match shape.product {
            Product::Greedy => spans,
            _ => 0,
        },
    }
}

fn experts(shape: &GemmShape) -> bool {
    matches!(shape.product, Product::Mlp1 | Product::Mlp2)
}

/// Tokens of the largest tile. Experts get few of a step's rows each: their mean counts, and any count works.
fn tile(shape: &GemmShape, compute_units: usize) -> usize {
    let rows = if experts(shape) {
        shape.rows.div_ceil(shape.groups)
    } else {
        shape.rows
    };
    match rows {
        // A second tile of 16 finds the weights in L2; a mean of 12 rarely needs one.
        0..=12 => 16,
        13..=16 if !experts(shape) => 16,
        // Float64 sums of more than 64 tokens would not fit the registers.
        _ if shape.terms > 1 => 64,
        13..=48 => 64,
        49..=64 if !experts(shape) => 64,
        _ if matches!(shape.product, Product::Qkv | Product::AttnOut) => dense_tile(shape, compute_units),
        _ => 128,
    }
}

/// The tile whose rounds take least, at a step's most rows and at an eighth less: counts of rows are known by their bucket
/// alone. Of equals the largest, which reads weights least often.
fn dense_tile(shape: &GemmShape, compute_units: usize) -> usize {
    let cost = |&tile: &(usize, usize)| {
        let rows = [shape.rows, shape.rows - shape.rows / 8];
        rows.iter()
            .map(|&rows| rounds_cost(rows, shape.row_blocks, tile, compute_units))
            .sum::<usize>()
    };
    DENSE_TILES
        .iter()
        .min_by_key(|tile| cost(tile))
        .map_or(128, |tile| tile.0)
}

/// Blocks go to the device in rounds of as many as it has places for. In a round a wave multiplies 16 tokens after 16, and
/// spends three quarters of such a step beside its MFMAs (`kernels/cdna/mca.py`); in quarters of a step.
fn rounds_cost(rows: usize, row_blocks: usize, (tokens, waves): (usize, usize), compute_units: usize) -> usize {
    let blocks = rows.div_ceil(tokens) * row_blocks.div_ceil(waves);
    let places = compute_units * WAVES_AT_ONCE / waves;
    blocks.div_ceil(places) * (tokens / 4 + 3)
}

/// Waves of a block.
fn waves(shape: &GemmShape, tile: usize) -> usize {
    match (shape.product, tile) {
        // One wave a block spreads 90 to 160 row blocks over all compute units; two do where the tokens' way through LDS
        // is worth sharing.
        (Product::Qkv | Product::AttnOut, 16) => 1,
        (Product::Qkv | Product::AttnOut, 64) if shape.terms == 1 => 2,
        // mlp1: the zeros behind the last column are filled in by slabs of 64, which four waves write.
        _ => 4,
    }
}

/// At most so many tiles: a group's rows in tiles, and one more for each group that is not a multiple.
fn tiles(shape: &GemmShape, tile: usize) -> usize {
    match experts(shape) {
        true => shape.rows.min(shape.groups) + shape.rows / tile,
        false => shape.rows.div_ceil(tile),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::gpu::args;

    const PRODUCTS: [Product; 6] = [
        Product::Qkv,
        Product::AttnOut,
        Product::Mlp1,
        Product::Mlp2,
        Product::Greedy,
        Product::Logits,
    ];

    /// A product of the 20b at `rows` rows of a step.
    fn shape_20b(product: Product, rows: usize, terms: usize) -> GemmShape {
        let (n, groups, rows) = match product {
            Product::Qkv => (5120, 1, rows),
            Product::AttnOut => (2880, 1, rows),
            Product::Mlp1 => (5760, 32, 4 * rows),
            Product::Mlp2 => (2880, 32, 4 * rows),
            Product::Greedy | Product::Logits => (201_088, 1, rows),
        };
        GemmShape {
            product,
            kind: if groups > 1 { Kind::Mxfp4 } else { Kind::Dense },
            format: args::Format::F16,
            terms,
            rows,
            groups,
            n,
            row_blocks: n.div_ceil(BLOCK_ROWS),
        }
    }

    #[test]
    fn tiles_grow_with_rows() {
        let lines: Vec<_> = [1, 32, 256, 1536]
            .iter()
            .flat_map(|&rows| PRODUCTS[..5].iter().map(move |&product| (product, rows)))
            .map(|(product, rows)| {
                let launch = gemm(&shape_20b(product, rows, 1), 104);
                format!(
                    "{rows} {} {}x{}",
                    launch.kernel, launch.grid.blocks, launch.grid.threads
                )
            })
            .collect();
        assert_eq!(
            lines,
            [
                "1 qkv_dense_f16x1_n16 160x64",
                "1 attn_out_dense_f16x1_n16 90x64",
                "1 mlp1_mxfp4_f16x1_n16 180x256",
                "1 mlp2_mxfp4_f16x1_n16 92x256",
                "1 unembed_greedy_dense_f16x1_n16 1571x256",
                "32 qkv_dense_f16x1_n64 80x128",
                "32 attn_out_dense_f16x1_n64 45x128",
                "32 mlp1_mxfp4_f16x1_n16 1800x256",
                "32 mlp2_mxfp4_f16x1_n16 920x256",
                "32 unembed_greedy_dense_f16x1_n64 1571x256",
                "256 qkv_dense_f16x1_n64 320x128",
                "256 attn_out_dense_f16x1_n64 180x128",
                "256 mlp1_mxfp4_f16x1_n64 2160x256",
                "256 mlp2_mxfp4_f16x1_n64 1104x256",
                "256 unembed_greedy_dense_f16x1_n128 3142x256",
                "1536 qkv_dense_f16x1_n80 800x256",
                "1536 attn_out_dense_f16x1_n96 368x256",
                "1536 mlp1_mxfp4_f16x1_n128 3600x256",
                "1536 mlp2_mxfp4_f16x1_n128 1840x256",
                "1536 unembed_greedy_dense_f16x1_n128 18852x256",
            ]
        );
    }

    /// However the rows fall on the experts, the grid has a block for every tile.
    #[test]
    fn grids_cover_the_worst_routing() {
        for rows in [0, 1, 3, 31, 64, 200, 890] {
            let shape = shape_20b(Product::Mlp1, rows, 1);
            let (tile, blocks) = (tile(&shape, 104), gemm(&shape, 104).grid.blocks);
            let cut = |counts: &[usize]| counts.iter().map(|c| c.div_ceil(tile)).sum::<usize>() * 45;
            let mut one_over = vec![0; 32];
            for i in 0..shape.rows {
                // Each expert gets one row, then tiles are filled one after another.
                let at = if i < 32 { i } else { (i - 32) / tile % 32 };
                one_over[at] += 1;
                assert!(cut(&one_over) <= blocks, "{rows} rows, {i}");
            }
            assert!(cut(&[shape.rows]) <= blocks);
        }
    }

    #[test]
    fn few_rows_reach_every_compute_unit() {
        for product in [Product::Qkv, Product::AttnOut] {
            assert!(gemm(&shape_20b(product, 1, 1), 104).grid.blocks >= 90);
        }
    }

    /// Of the places of all rounds so many have a wave with rows to multiply, padding counted as none.
    fn filled(product: Product, bucket: usize, rows: usize) -> f64 {
        let shape = shape_20b(product, bucket, 1);
        let tokens = tile(&shape, 104);
        let waves = waves(&shape, tokens);
        let blocks = rows.div_ceil(tokens) * shape.row_blocks.div_ceil(waves);
        let places = 104 * WAVES_AT_ONCE / waves;
        let steps = blocks.div_ceil(places) * places * waves * tokens;
        (rows * shape.row_blocks) as f64 / steps as f64
    }

    #[test]
    fn dense_products_of_many_rows_fill_the_device() {
        // 890 rows are a step of the bucket of 1024.
        let cases = [
            (1024, 890, 0.74),
            (1024, 1024, 0.86),
            (1536, 1536, 0.86),
            (2048, 2048, 0.86),
        ];
        for (bucket, rows, least) in cases {
            for product in [Product::Qkv, Product::AttnOut] {
                let filled = filled(product, bucket, rows);
                assert!(filled >= least, "{product:?} of {rows} rows: {filled:.3}");
            }
        }
    }

    #[test]
    fn matrices_are_filled_up_to_whole_chunks() {
        assert_eq!(packed(Kind::Mxfp4, 5760, 2880).bytes, 180 * 45 * 1088);
        assert_eq!(
            packed(Kind::Dense, 201_088, 32),
            PackedShape {
                row_blocks: 6284,
                bytes: 6284 * 4096
            }
        );
    }
}
