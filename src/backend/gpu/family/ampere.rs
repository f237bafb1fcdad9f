//! Ampere and what came after it (`kernels/ampere`): which kernel a product gets, and how it is launched.
//!
//! A block does a tile of tokens for a span of weight rows, several units of 16. A token's sum is the same in every
//! tile, so tiles are chosen by speed alone: by the rows from which each is the fastest.

use super::{Family, blocks_of_tiles, largest_tile, most_tiles};
use crate::backend::gpu::catalogue::ampere::TEAM_ROWS;
use crate::backend::gpu::catalogue::{self, Kernel};
use crate::backend::gpu::launch::Launch;
use crate::backend::gpu::shapes::{DecodeShape, GemmLaunch, GemmShape, Product};

/// See the module.
#[derive(Debug)]
pub struct Ampere;

/// Lanes of a warp.
const WARP: usize = 32;
/// Weight rows of a block of packed weights, of which 16 are a unit.
const BLOCK_ROWS: usize = 64;
const UNIT_ROWS: usize = 16;
/// Blocks of decode attention a multiprocessor, as many as an H100's shared memory holds: those of four warps, and those
/// of two.
const BLOCKS: usize = 2;
const PAIRS: usize = 5;

impl Family for Ampere {
    fn table(&self) -> &'static catalogue::Family {
        &catalogue::ampere::FAMILY
    }

    /// Persistent blocks. With the fewest rows, and with few windows, their warps work together, else each alone.
    fn attention_decode(&self, kernels: &[&'static Kernel], shape: &DecodeShape) -> Launch {
        let by_threads = |kernel: &&&Kernel| kernel.threads;
        let together = kernels.iter().filter(|kernel| shape.rows <= kernel.most_rows);
        if let Some(kernel) = together.max_by_key(by_threads) {
            if shape.rows <= TEAM_ROWS {
                return Launch::new(kernel, BLOCKS * shape.multiprocessors);
            }
            if shape.windowed {
                return Launch::new(kernel, PAIRS * shape.multiprocessors);
            }
        }
        let alone = kernels.iter().find(|kernel| kernel.most_rows == 0);
        Launch::new(alone.unwrap_or(&kernels[0]), BLOCKS * shape.multiprocessors)
    }

    fn team_rows(&self) -> usize {
        TEAM_ROWS
    }

    /// Persistent blocks do not care how many there are.
    fn decode_items(&self, items: usize) -> usize {
        items.min(1)
    }

    /// The largest scale times 2^14 is FP16's largest power of two, half the smallest is its smallest subnormal, with
    /// which mma.sync computes.
    fn mxfp4_f16_scales(&self) -> (i32, i32) {
        (-23, 1)
    }

    /// Outputs are stored in pairs.
    fn holds(&self, _product: Product, rows: usize) -> bool {
        rows.is_multiple_of(2)
    }

    /// A unit of weights, 16 rows, is eight pairs of one head.
    fn pairs_heads(&self, head_dim: usize) -> bool {
        head_dim.is_multiple_of(16)
    }

    fn block_rows(&self) -> usize {
        BLOCK_ROWS
    }

    fn product(&self, shape: &GemmShape, kernels: &[&'static Kernel], _multiprocessors: usize) -> GemmLaunch {
        let kernel = largest_tile(shape, kernels);
        let rows = kernel.threads / WARP * kernel.parameter("UNITS").unwrap_or(1) * UNIT_ROWS;
        let spans = (shape.row_blocks * BLOCK_ROWS).div_ceil(rows);
        blocks_of_tiles(shape, kernel, most_tiles(shape, kernel), spans)
    }
}
