//! Grids of the kernels that every target has. Their head comments say why they are so; a block beyond the step's rows
//! returns at once.

use super::args::WIRE_ROWS;
use super::context::Grid;
use super::target::{GemmLaunch, GemmShape, Product, Target};

/// Waves of a block of `route`.
const ROUTE_WAVES: usize = 8;
/// Rows a block of `gather` takes of one slab.
const GATHER_ROWS: usize = 32;
/// The most rows of `sort_gather`: each of its blocks sorts them all, and a launch is saved.
const SORT_GATHER_ROWS: usize = 128;
/// The most experts a row of it has.
const SORT_GATHER_EXPERTS: usize = 8;
/// Rows a block of `argmax` takes.
const ARGMAX_ROWS: usize = 8;

/// `upload`: enough blocks that a thread copies one or two pieces of a plan of 100 KB.
pub fn upload() -> Grid {
    Grid::new(8, 1024)
}

/// `embed`
pub fn embed(rows: usize) -> Grid {
    Grid::new(rows, 256)
}

/// `rmsnorm`
pub fn rmsnorm(rows: usize) -> Grid {
    Grid::new(rows, 384)
}

/// `rope_store`
pub fn rope_store(rows: usize) -> Grid {
    Grid::new(rows, 256)
}

/// `route`
pub fn route(rows: usize, target: &Target) -> Grid {
    Grid::new(rows.div_ceil(target.route_rows()), ROUTE_WAVES * target.wave())
}

/// `norm_route`, for rows of which each can have a multiprocessor.
pub fn norm_route(rows: usize, target: &Target) -> Option<Grid> {
    (rows <= target.multiprocessors).then(|| rmsnorm(rows))
}

/// `sort`
pub fn sort() -> Grid {
    Grid::new(1, 1024)
}

/// `gather`
pub fn gather(rows: usize, k_blocks: usize) -> Grid {
    Grid::new(rows.div_ceil(GATHER_ROWS) * k_blocks, GATHER_ROWS * 8)
}

/// `sort_gather`, if it does for so many rows.
pub fn sort_gather(rows: usize, experts_per_token: usize, k_blocks: usize) -> Option<Grid> {
    let few = rows <= SORT_GATHER_ROWS && experts_per_token <= SORT_GATHER_EXPERTS;
    few.then(|| gather(rows, k_blocks))
}

/// Query heads a block of `attention_plain_*` takes.
const PLAIN_HEADS: usize = 8;

/// `attention_plain_*`: query heads that share a kv head share a block.
pub fn attention_plain(rows: usize, heads: usize, kv_heads: usize) -> Grid {
    Grid::new(rows * kv_heads * (heads / kv_heads).div_ceil(PLAIN_HEADS), 256)
}

/// `argmax`
pub fn argmax(rows: usize) -> Grid {
    Grid::new(rows.div_ceil(ARGMAX_ROWS), 1024)
}

/// `argmax_logits`
pub fn argmax_logits(rows: usize) -> Grid {
    Grid::new(rows, 1024)
}

/// `draw`
pub fn draw(rows: usize) -> Grid {
    Grid::new(rows, 256)
}

/// `plain_*`: products of weights on the wire's form. A block takes 32 outputs; where that fills the device too little,
/// several share them.
pub fn plain_gemm(shape: &GemmShape, target: &Target) -> GemmLaunch {
    let tiles = shape.n.div_ceil(WIRE_ROWS) * shape.groups;
    let splits = (4 * target.multiprocessors).div_ceil(tiles).min(shape.rows.max(1));
    let kernel = match shape.product {
        Product::Qkv => "plain_qkv",
        Product::AttnOut => "plain_attn_out",
        Product::Mlp1 => "plain_mlp1",
        Product::Mlp2 => "plain_mlp2",
        Product::Greedy | Product::Logits => "plain_logits",
    };
    GemmLaunch {
        kernel: kernel.into(),
        grid: Grid::new(tiles * splits, 8 * target.wave()),
        candidates: shape.n,
    }
}
