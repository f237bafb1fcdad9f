//! Kernels of Hopper's matrix cores (`kernels/hopper`): which one a product gets, and how it is launched.
//!
//! Every kernel is persistent: one block a multiprocessor with all of its shared memory, whose parts of the work follow from
//! the rows' counts on the device. An element's sum is the same in every tile, so tiles are chosen by speed alone. A tile
//! `n` takes up to `n` tokens of one group past the weights at once:
//!
//! * Too narrow, and a second tile decodes the same weights again (they come from L2, not from DRAM).
//! * Too wide, and the accumulators leave no registers for several weight blocks a warpgroup, so copies get small and fewer
//!   warps hide each other's decoding; wgmma also multiplies columns that nobody wants.
//!
//! A step's rows are only known up to its bucket. Tiles that must hold all rows follow the bucket, the others the rows a step
//! of it is likely to have: 890 rows come as 1024, and a tile fit for 1024 costs them a quarter more time.

use super::super::args::{self, PackArgs};
use super::super::context::Grid;
use super::super::target::{GemmLaunch, GemmShape, PackedShape, Product};
use super::super::weights::Kind;
use super::kernel_name;

/// Exponents of MXFP4 scales that decode to FP16 exactly: the largest scale times 2^14 is FP16's largest power of two, half
/// the smallest is its smallest subnormal, with which wgmma computes.
pub const MXFP4_F16_SCALES: (i32, i32) = (-23, 1);

/// Weight rows of a row block, wgmma's height.
const BLOCK_ROWS: usize = 64;
/// Threads of a warpgroup.
const WARPGROUP: usize = 128;
/// All the shared memory a block can have: whatever the tile leaves is pipeline.
const SHARED_BYTES: usize = 227 * 1024;
/// That of a tile that holds all rows: the small kernel before it finds room beside it, whose time the weights' way hides in.
const SINGLE_SHARED_BYTES: usize = 204 * 1024;
/// Blocks a multiprocessor that packs can hold, and a few rounds of them.
const PACK_BLOCKS: usize = 132 * 16;

/// A packed matrix.
pub fn packed(kind: Kind, rows: usize, cols: usize) -> PackedShape {
    super::packed(kind, rows, cols, BLOCK_ROWS)
}

/// The kernel that packs it.
pub fn pack_kernel(kind: Kind, args: &PackArgs) -> (&'static str, Grid) {
    let blocks = args.members as usize * args.row_blocks as usize * args.k_blocks as usize;
    (super::pack_name(kind), Grid::new(blocks.min(PACK_BLOCKS), WARPGROUP))
}

/// A tile: its tokens, and the consumer warpgroups of its block.
type Tile = (usize, usize);

/// Steps in which the tiles for many rows multiply: what is left of one is multiplied in vain.
const WIDTH_STEP: usize = 32;

/// The kernel of a product.
pub fn gemm(shape: &GemmShape, multiprocessors: usize) -> GemmLaunch {
    let (tokens, warpgroups) = tile(shape, multiprocessors);
    let shared_bytes = if holds_all_rows(shape, tokens) {
        SINGLE_SHARED_BYTES
    } else {
        SHARED_BYTES
    };
    GemmLaunch {
        kernel: kernel_name(shape, tokens),
        grid: Grid::new(multiprocessors, (warpgroups + 1) * WARPGROUP).with_shared(shared_bytes),
        candidates: match shape.product {
            Product::Greedy => multiprocessors, // a block keeps one candidate for all rows of the matrix it meets
            _ => 0,
        },
    }
}

/// The narrowest tile of a list that holds so many tokens, or the widest one.
fn narrowest(tiles: &[Tile], tokens: usize) -> Tile {
    let widest = tiles[tiles.len() - 1];
    tiles.iter().copied().find(|tile| tile.0 >= tokens).unwrap_or(widest)
}

fn tile(shape: &GemmShape, multiprocessors: usize) -> Tile {
    let f16 = shape.format == args::Format::F16;
    let fast = shape.terms == 1;
    match shape.product {
        Product::Mlp1 | Product::Mlp2 => expert_tile(shape, fast, f16),
        // A warpgroup is enough where a multiprocessor gets some 48 rows of weights; up to 128 rows of tokens are one tile,
        // whose weights are on their way before the tokens are there.
        Product::Qkv | Product::AttnOut => match (fast, f16) {
            (true, true) => match (shape.product, shape.rows) {
                (_, ..=8) => (8, 1),
                (_, ..=128) => narrowest(&[(32, 1), (64, 1), (128, 1)], shape.rows),
                _ => least_work(&[(192, 3), (256, 2)], shape, multiprocessors),
            },
            (true, false) => narrowest(&[(16, 1), (256, 2)], shape.rows),
            _ => narrowest(&[(8, 1), (64, 3)], shape.rows),
        },
        Product::Greedy | Product::Logits => {
            let tiles: &[Tile] = match (fast, f16) {
                (true, true) => &[(8, 2), (32, 2), (64, 2), (128, 2), (256, 2)],
                (true, false) => &[(16, 2), (256, 2)],
                _ => &[(8, 2), (64, 3)],
            };
            narrowest(tiles, shape.rows)
        }
    }
}

/// Whether a kernel is made for rows of one tile.
fn holds_all_rows(shape: &GemmShape, tokens: usize) -> bool {
    let experts = matches!(shape.product, Product::Mlp1 | Product::Mlp2);
    !experts && tokens <= if shape.terms == 1 { 128 } else { 8 }
}

fn expert_tile(shape: &GemmShape, fast: bool, f16: bool) -> Tile {
    let busiest = busiest(shape);
    let tiles: &[Tile] = match shape.kind {
        // Experts of more rows have several tiles of any kind, and three warpgroups decode faster than two.
        Kind::Mxfp4 if fast && f16 && busiest > 256 => &[(192, 3)],
        Kind::Mxfp4 if fast && f16 => &[(8, 3), (16, 3), (32, 3), (48, 3), (64, 3), (96, 3), (128, 3), (256, 2)],
        Kind::Mxfp4 if fast => &[(16, 3), (64, 3), (256, 2)],
        // Three tiles of 8 take less than one of 64, which multiplies and adds what nobody wants.
        Kind::Mxfp4 if busiest <= 20 => &[(8, 3)],
        Kind::Mxfp4 => &[(64, 3)],
        _ if fast => &[(16, 2), (256, 2)],
        _ => &[(64, 3)],
    };
    narrowest(tiles, busiest)
}

/// The rows that a step of a bucket is likely to have: between two thirds or three quarters of it and all.
fn likely(rows: usize) -> usize {
    rows - rows / 8
}

/// The tokens of a busy expert: the mean and one and a half standard deviations of an even routing, so that few experts need
/// a second tile.
fn busiest(shape: &GemmShape) -> usize {
    let mean = likely(shape.rows) as f64 / shape.groups as f64;
    ((mean + 1.5 * mean.sqrt()) as usize).clamp(1, shape.rows.max(1))
}

/// The tile, of those for many rows, whose busiest multiprocessor multiplies least: rounds of chunks, each of so many row
/// blocks and as wide as the tile's even share of the rows. Of equals the one with fewer tiles, then the first.
fn least_work(tiles: &[Tile], shape: &GemmShape, multiprocessors: usize) -> Tile {
    let rows = likely(shape.rows).max(1);
    let work = |&(tokens, warpgroups): &Tile| {
        let count = rows.div_ceil(tokens);
        let rounds = (count * shape.row_blocks.div_ceil(warpgroups)).div_ceil(multiprocessors);
        let blocks = (count * shape.row_blocks).div_ceil(rounds * multiprocessors);
        let width = rows.div_ceil(count).next_multiple_of(WIDTH_STEP);
        (rounds * blocks * width, count)
    };
    tiles.iter().copied().min_by_key(work).unwrap_or(tiles[0])
}

#[cfg(test)]
mod tests {
    use super::*;

    const PRODUCTS: [Product; 6] = [
        Product::Qkv,
        Product::AttnOut,
        Product::Mlp1,
        Product::Mlp2,
        Product::Greedy,
        Product::Logits,
    ];

    /// A product of the 20b at `rows` rows of a step.
    fn shape_20b(product: Product, rows: usize, format: args::Format, terms: usize) -> GemmShape {
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
            format,
            terms,
            rows,
            groups,
            n,
            row_blocks: n.div_ceil(BLOCK_ROWS),
        }
    }

    #[test]
    fn tiles_grow_with_rows() {
        let lines: Vec<_> = [1, 32, 256, 1024, 1536, 4096]
            .iter()
            .flat_map(|&rows| PRODUCTS[..5].iter().map(move |&product| (product, rows)))
            .map(|(product, rows)| {
                let launch = gemm(&shape_20b(product, rows, args::Format::F16, 1), 132);
                format!("{rows} {} {}", launch.kernel, launch.grid.threads)
            })
            .collect();
        assert_eq!(
            lines,
            [
                "1 qkv_dense_f16x1_n8 256",
                "1 attn_out_dense_f16x1_n8 256",
                "1 mlp1_mxfp4_f16x1_n8 512",
                "1 mlp2_mxfp4_f16x1_n8 512",
                "1 unembed_greedy_dense_f16x1_n8 384",
                "32 qkv_dense_f16x1_n32 256",
                "32 attn_out_dense_f16x1_n32 256",
                "32 mlp1_mxfp4_f16x1_n8 512",
                "32 mlp2_mxfp4_f16x1_n8 512",
                "32 unembed_greedy_dense_f16x1_n32 384",
                "256 qkv_dense_f16x1_n256 384",
                "256 attn_out_dense_f16x1_n192 512",
                "256 mlp1_mxfp4_f16x1_n48 512",
                "256 mlp2_mxfp4_f16x1_n48 512",
                "256 unembed_greedy_dense_f16x1_n256 384",
                "1024 qkv_dense_f16x1_n192 512",
                "1024 attn_out_dense_f16x1_n192 512",
                "1024 mlp1_mxfp4_f16x1_n128 512",
                "1024 mlp2_mxfp4_f16x1_n128 512",
                "1024 unembed_greedy_dense_f16x1_n256 384",
                "1536 qkv_dense_f16x1_n256 384",
                "1536 attn_out_dense_f16x1_n192 512",
                "1536 mlp1_mxfp4_f16x1_n256 384",
                "1536 mlp2_mxfp4_f16x1_n256 384",
                "1536 unembed_greedy_dense_f16x1_n256 384",
                "4096 qkv_dense_f16x1_n192 512",
                "4096 attn_out_dense_f16x1_n256 384",
                "4096 mlp1_mxfp4_f16x1_n192 512",
                "4096 mlp2_mxfp4_f16x1_n192 512",
                "4096 unembed_greedy_dense_f16x1_n256 384",
            ]
        );
    }

    /// Kernels made for rows of one tile never meet more.
    #[test]
    fn single_tiles_hold_all_rows() {
        for format in [args::Format::F16, args::Format::Bf16] {
            for terms in [1, 2, 3] {
                for rows in 0..600 {
                    for product in [Product::Qkv, Product::AttnOut, Product::Greedy, Product::Logits] {
                        let shape = shape_20b(product, rows, format, terms);
                        let tokens = tile(&shape, 132).0;
                        assert!(tokens >= rows || !holds_all_rows(&shape, tokens), "{product:?} {rows}");
                    }
                }
            }
        }
    }

    /// Exact products of few rows an expert stay with the narrow tile a little longer.
    #[test]
    fn exact_experts_change_tiles_at_twenty_rows() {
        let tokens = |rows| tile(&shape_20b(Product::Mlp1, rows, args::Format::F16, 2), 132).0;
        assert_eq!([1, 64, 128, 192, 1024].map(tokens), [8, 8, 8, 64, 64]);
    }

    #[test]
    fn matrices_are_filled_up_to_whole_blocks() {
        assert_eq!(packed(Kind::Mxfp4, 5760, 2880).bytes, 90 * 45 * 2176);
        assert_eq!(
            packed(Kind::Dense, 201_088, 32),
            PackedShape {
                row_blocks: 3142,
                bytes: 3142 * 8192
            }
        );
    }
}
