//! Matrix products: a tile of 32 rows of weights times a block of tokens.
//!
//! For each block of tokens the weights are loaded once and decoded in registers, and each weight vector is multiplied
//! by all tokens of the block before the next is loaded. The block's activations are interleaved by column, so weights
//! and activations are one sequential stream each. Each lane is a row of the matrix, and adds over the columns in
//! order, whatever the block's size; so a token's result does not depend on the other tokens.
//!
//! | activations | weights | products and sums |
//! | --- | --- | --- |
//! | float32, `exact` | any | each product rounded to float32, summed in float64, as the eval program does |
//! | float32 | any | float32 multiply-add |
//! | bfloat16 pairs | BF16 | the hardware's dot product of pairs, float32 sums |
//! | 16-bit integers, one scale a token | MXFP4 | dot products of pairs, exact in 32 bits for 32 columns, then float32 |
//!
//! MXFP4 is multiplied as integers, since twice an E2M1 value is an integer up to 12: so the sum over a block of 32
//! columns is exact, and the activations have 16 bits where bfloat16 has 8, at the same rate.
//!
//! Registers for BF16 weights on AVX-512 with 12 tokens: 24 accumulators and 2 weight vectors. Each column pair takes 2
//! loads of weights and 24 dot products with broadcast operands, so the dot product's rate is the limit. With one token
//! it is memory bandwidth.

use super::inputs::Inputs;
use super::mode::{ComputeMode, MAX_TOKENS};
use super::products::{Args, Product, RowNorms};
use super::tiles::{Sums, TILE};
use crate::error::Result;
use crate::memory::{self, Purpose};
use crate::options::Precision;
use crate::simd::{Simd, VectorCode};
use crate::weights::{Packed, WeightFormat};
use rayon::prelude::*;
use std::ops::Range;

/// The place of sums in the product's result.
#[derive(Clone, Copy, Debug)]
pub struct At {
    /// Which member of the matrix: the expert, or 0.
    pub member: usize,
    /// Which tile of 32 rows of the member.
    pub tile: usize,
    /// Which input, counted over all groups.
    pub input: usize,
    /// The input's row in the activations that were encoded.
    pub row: usize,
}

/// What is computed from a product's sums.
pub trait Epilogue: Sync {
    /// What a worker accumulates over the tiles of a task.
    type State;
    /// Whether nothing needs the sums of the tiles that are left. Asked once a task.
    fn is_done(&self) -> bool {
        false
    }
    /// Called once a task, before its first tile.
    fn begin(&self) -> Result<Self::State>;
    /// Takes the sums of one tile for one input. No two workers get the same tile of the same input.
    ///
    /// # Safety
    /// Same requirements as the methods of [`Simd`].
    unsafe fn finish<S: Simd>(&self, state: &mut Self::State, at: At, sums: &Sums);
    /// Called once a task, after its last tile.
    fn end(&self, state: Self::State) -> Result<()>;
}

impl ComputeMode {
    /// Multiplies all inputs of group `i` by member `i` of the matrix, for all groups.
    pub fn multiply<E: Epilogue>(self, matrix: &Packed, inputs: &Inputs, epilogue: &E) -> Result<()> {
        let tasks = tasks(matrix, inputs, rayon::current_num_threads())?;
        tasks
            .into_par_iter()
            .try_for_each(|task| self.run(matrix, inputs, epilogue, task))
    }

    /// [`ComputeMode::multiply`] with a fixed order of members: a worker computes its tiles of all members, one member
    /// after the other, so that an epilogue may add over members.
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
            mode: self,
            matrix,
            inputs,
            epilogue,
            task,
        })
    }

    /// Multiplies in float32, whatever the precision. The sums are within `estimate_error` of those of `exact`, at
    /// several times the speed.
    pub fn estimate<E: Epilogue>(
        self,
        matrix: &Packed,
        inputs: &mut Inputs,
        source: &[f32],
        rows: &[u32],
        epilogue: &E,
    ) -> Result<()> {
        let mode = Self {
            precision: Precision::Fast,
            ..self
        };
        inputs.encode(mode, WeightFormat::F32, source, matrix.cols, std::iter::once(rows))?;
        mode.multiply(matrix, inputs, epilogue)
    }

    /// The sums of one tile of the first member for one input, which is alone in its block.
    pub fn tile_sums(self, matrix: &Packed, tile: usize, inputs: &Inputs, input: usize) -> Sums {
        let mut sums = [[0.0; TILE]; MAX_TOKENS];
        self.level.run(Product {
            mode: self,
            encoding: inputs.encoding,
            format: matrix.format,
            args: Args {
                weights: matrix.tile(0, tile),
                cols: matrix.cols,
                words: &inputs.words[input * inputs.words_per_token..][..inputs.words_per_token],
                scales: &inputs.scales[input..=input],
            },
            sums: &mut sums,
        });
        sums[0]
    }

    /// The Euclidean norms of the first member's rows, rounded up: for each tile, in the order of its lanes.
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

/// The most columns for which [`estimate_error`] is a bound.
pub const MAX_ESTIMATE_COLUMNS: usize = 1 << 14;

/// Bound of the difference between [`ComputeMode::estimate`] and `exact`, relative to the product of the norms of the
/// matrix's row and the input.
///
/// Let `u = 2^-24`, `n` the number of columns and `p` the sum of the products' magnitudes. The estimate's error is at
/// most `p n u / (1 - n u)`. The error of `exact` is at most `p u` for rounding the products, far less for the float64
/// sum, and `p u` for rounding the result to float32. `p` is at most the product of the norms (Cauchy-Schwarz). The
/// factor 1.01 and the 8 cover the other terms for up to [`MAX_ESTIMATE_COLUMNS`] columns.
pub fn estimate_error(cols: usize) -> f32 {
    1.01 * (cols + 8) as f32 * (f32::EPSILON / 2.0)
}

/// A part of a product, computed by one worker.
struct Task {
    member: usize,
    tiles: Range<usize>,
    blocks: Range<usize>,
}

/// Number of consecutive tiles in a task: enough for the hardware prefetcher, and to outweigh the cost of scheduling
/// it.
fn tile_run(matrix: &Packed) -> usize {
    const STREAM_BYTES: usize = 64 << 10;
    STREAM_BYTES.div_ceil(matrix.tile_bytes).min(matrix.tiles)
}

/// Divides a product into tasks by runs of tiles. If those are too few for the threads (the router), also by blocks.
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
    mode: ComputeMode,
    matrix: &'a Packed,
    inputs: &'a Inputs,
    epilogue: &'a E,
    task: Task,
}

impl<E: Epilogue> VectorCode for Run<'_, E> {
    type Output = Result<()>;

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) -> Result<()> {
        let Self {
            mode,
            matrix,
            inputs,
            epilogue,
            task,
        } = self;
        if epilogue.is_done() {
            return Ok(());
        }
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
                    mode,
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
                    // SAFETY: `simd` proves that the machine has the instructions, and no other worker has this tile of
                    // this input.
                    unsafe { epilogue.finish::<S>(&mut state, at, sums) };
                }
            }
        }
        epilogue.end(state)
    }
}
