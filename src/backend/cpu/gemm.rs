//! Matrix products: a tile of 32 rows of weights times a block of tokens.
//!
//! Weights stream through the registers once for each block of tokens and are decoded there; the block's
//! activations lie side by side for each column, so a kernel reads both as one stream each, and every weight vector
//! meets every token of the block before the next is loaded. A lane is a row: its sum runs over the columns in their
//! order, whatever the block's size, so a token's result does not depend on its company.
//!
//! | activations | weights | products and sums |
//! | --- | --- | --- |
//! | float32, `exact` | any | each product rounded to float32, summed in float64, as the eval program does |
//! | float32 | any | float32 multiply-add |
//! | bfloat16 pairs | BF16 | the hardware's dot product of pairs, float32 sums |
//! | 16-bit integers, one scale a token | MXFP4 | the hardware's dot product of pairs: 32-bit integer sums within a block of 32 columns (exact), then float32 |
//!
//! Integers beside MXFP4: twice an E2M1 value is an integer up to 12, so the block's sum is exact, and sixteen bits
//! for the activation are eight more than bfloat16 has, at the same rate.
//!
//! Budget (AVX-512, 12 tokens): 24 accumulators, 2 weight vectors; for each column pair 2 loads of weights and 24 dot
//! products with broadcast operands: the dot product's rate is the limit. With one token, memory is.

use super::inputs::{Encoding, Inputs, MAX_TOKENS};
use super::products::{Args, Product, RowNorms};
use super::tiles::TILE;
use crate::error::Result;
use crate::memory::{self, Purpose};
use crate::options::Precision;
use crate::simd::{Kernel, Level, Simd};
use crate::weights::{Format, Packed};
use rayon::prelude::*;
use std::ops::Range;

/// A token's sums for a tile's rows, in lane order.
pub type Sums = [f32; TILE];

/// Which sums an epilogue is given.
#[derive(Clone, Copy, Debug)]
pub struct At {
    /// The matrix among its members.
    pub member: usize,
    /// The tile of 32 rows.
    pub tile: usize,
    /// The input, over all groups.
    pub input: usize,
    /// The input's row in the source.
    pub row: usize,
}

/// What becomes of a token's sums.
pub trait Epilogue: Sync {
    /// What a worker gathers over its tiles.
    type State;
    /// At a worker's begin.
    fn begin(&self) -> Result<Self::State>;
    /// Takes the sums of one tile for one input. No two workers get the same tile of the same input.
    ///
    /// # Safety
    /// As for [`Simd`].
    unsafe fn finish<S: Simd>(&self, state: &mut Self::State, at: At, sums: &Sums);
    /// At a worker's end.
    fn end(&self, state: Self::State) -> Result<()>;
}

/// Instruction set and precision: what chooses the kernel.
#[derive(Clone, Copy, Debug)]
pub struct Engine {
    /// The instruction set.
    pub level: Level,
    /// The precision.
    pub precision: Precision,
}

impl Engine {
    /// What the kernels for `format` read.
    pub fn encoding(self, format: Format) -> Encoding {
        match (self.precision, self.level, format) {
            (Precision::Fast, Level::Avx512(_), Format::Bf16) => Encoding::Bf16Pairs,
            (Precision::Fast, Level::Avx512(_), Format::Mxfp4) => Encoding::I16Pairs,
            _ => Encoding::F32,
        }
    }

    /// The largest block; `exact` has two registers for each sum and takes the tile's vectors in turn.
    pub fn max_tokens(self) -> usize {
        match (self.level, self.precision) {
            (Level::Avx512(_), Precision::Fast) => MAX_TOKENS,
            (Level::Avx512(_), Precision::Exact) => 8,
            _ => 2,
        }
    }

    /// All inputs of group `i` times member `i` of the matrix, for all groups.
    pub fn multiply<E: Epilogue>(self, matrix: &Packed, inputs: &Inputs, epilogue: &E) -> Result<()> {
        let tasks = tasks(matrix, inputs, rayon::current_num_threads())?;
        tasks
            .into_par_iter()
            .try_for_each(|task| self.run(matrix, inputs, epilogue, task))
    }

    /// The same, but each worker takes its tiles through all members in their order, so that an epilogue may sum
    /// over members.
    pub fn multiply_in_order<E: Epilogue>(self, matrix: &Packed, inputs: &Inputs, epilogue: &E) -> Result<()> {
        let run = tile_run(matrix);
        (0..matrix.tiles.div_ceil(run)).into_par_iter().try_for_each(|i| {
            let tiles = i * run..((i + 1) * run).min(matrix.tiles);
            inputs.groups.iter().enumerate().try_for_each(|(member, blocks)| {
                let task = Task {
                    member,
                    tiles: tiles.clone(),
                    blocks: blocks.clone(),
                };
                self.run(matrix, inputs, epilogue, task)
            })
        })
    }

    fn run<E: Epilogue>(self, matrix: &Packed, inputs: &Inputs, epilogue: &E, task: Task) -> Result<()> {
        self.level.run(Run {
            engine: self,
            matrix,
            inputs,
            epilogue,
            task,
        })
    }

    /// Float32 sums of float32 products, whatever the precision: for `exact`, an estimate within
    /// `estimate_error` of its own sums, at several times the speed.
    pub fn estimate<E: Epilogue>(
        self,
        matrix: &Packed,
        inputs: &mut Inputs,
        source: &[f32],
        rows: &[u32],
        epilogue: &E,
    ) -> Result<()> {
        let engine = Self {
            precision: Precision::Fast,
            ..self
        };
        inputs.encode(engine, Format::F32, source, matrix.cols, std::iter::once(rows))?;
        engine.multiply(matrix, inputs, epilogue)
    }

    /// Norms of the first member's rows, rounded up: a tile's in its lanes.
    pub fn row_norms(self, matrix: &Packed) -> Result<Vec<Sums>> {
        let mut norms = memory::filled([0.0; TILE], matrix.tiles, Purpose::Weights)?;
        norms.par_iter_mut().enumerate().for_each(|(tile, norms)| {
            let args = Args {
                weights: matrix.tile(0, tile),
                cols: matrix.cols,
                words: &[],
                scales: &[],
            };
            *norms = self.level.run(RowNorms {
                args,
                format: matrix.format,
            });
        });
        Ok(norms)
    }
}

/// The most columns for which the bound of an estimate holds.
pub const MAX_ESTIMATE_COLUMNS: usize = 1 << 14;

/// How far [`Engine::estimate`] and `exact` can be apart, relative to the product of the norms of row and input.
///
/// With `u = 2^-24` and `n` columns, the estimate's sum is off by at most `n u / (1 - n u)` times the sum of the
/// products' magnitudes, `exact`'s by `u` for the products, next to nothing for the float64 sum, and `u` for its
/// rounding; and that sum is at most the product of the norms (Cauchy-Schwarz). The slack covers what is left, up to
/// [`MAX_ESTIMATE_COLUMNS`].
pub fn estimate_error(cols: usize) -> f32 {
    1.01 * (cols + 8) as f32 * (f32::EPSILON / 2.0)
}

/// A worker's share of a product.
struct Task {
    member: usize,
    tiles: Range<usize>,
    blocks: Range<usize>,
}

/// Tiles that make a stream long enough for the prefetcher and a task long enough to be worth its hand-over.
fn tile_run(matrix: &Packed) -> usize {
    const STREAM_BYTES: usize = 64 << 10;
    STREAM_BYTES.div_ceil(matrix.tile_bytes).min(matrix.tiles)
}

/// Runs of tiles; where they are too few for the threads (the router), the blocks are divided as well.
fn tasks(matrix: &Packed, inputs: &Inputs, threads: usize) -> Result<Vec<Task>> {
    let run = tile_run(matrix);
    let runs = matrix.tiles.div_ceil(run);
    let mut tasks = Vec::new();
    for (member, blocks) in inputs.groups.iter().enumerate() {
        if blocks.is_empty() {
            continue;
        }
        let parts = if runs * matrix.members < 4 * threads {
            (4 * threads).div_ceil(runs)
        } else {
            1
        };
        let step = blocks.len().div_ceil(parts);
        for tile in (0..matrix.tiles).step_by(run) {
            for block in blocks.clone().step_by(step) {
                let task = Task {
                    member,
                    tiles: tile..(tile + run).min(matrix.tiles),
                    blocks: block..(block + step).min(blocks.end),
                };
                memory::push(&mut tasks, task, Purpose::Step)?;
            }
        }
    }
    Ok(tasks)
}

struct Run<'a, E> {
    engine: Engine,
    matrix: &'a Packed,
    inputs: &'a Inputs,
    epilogue: &'a E,
    task: Task,
}

impl<E: Epilogue> Kernel for Run<'_, E> {
    type Output = Result<()>;

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) -> Result<()> {
        let Self {
            engine,
            matrix,
            inputs,
            epilogue,
            task,
        } = self;
        let mut state = epilogue.begin()?;
        let mut sums = [[0.0; TILE]; MAX_TOKENS];
        for tile in task.tiles {
            let weights = matrix.tile(task.member, tile);
            for block in &inputs.blocks[task.blocks.clone()] {
                let words =
                    &inputs.words[block.first * inputs.words_per_token..][..block.tokens * inputs.words_per_token];
                let scales = &inputs.scales[block.first..][..block.tokens];
                let args = Args {
                    weights,
                    cols: matrix.cols,
                    words,
                    scales,
                };
                let product = Product {
                    engine,
                    encoding: inputs.encoding,
                    format: matrix.format,
                    args,
                    sums: &mut sums,
                };
                simd.vectorize(product);
                for (t, sums) in sums.iter().enumerate().take(block.tokens) {
                    let input = block.first + t;
                    let at = At {
                        member: task.member,
                        tile,
                        input,
                        row: inputs.rows[input] as usize,
                    };
                    // SAFETY: `simd` proves that the instructions are there, and no other worker has this tile of this
                    // input.
                    unsafe { epilogue.finish::<S>(&mut state, at, sums) };
                }
            }
        }
        epilogue.end(state)
    }
}
