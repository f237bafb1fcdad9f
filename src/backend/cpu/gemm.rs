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

use super::shared::Shared;
use super::tiles::{TILE, Tiles};
use crate::dtype::MXFP4_BLOCK;
use crate::options::Precision;
use crate::simd::{Kernel, LANES, Level, Simd};
use crate::weights::{Format, Packed};
use rayon::prelude::*;
use std::ops::Range;

/// The most tokens in a block.
const MAX_TOKENS: usize = 12;

/// How activations are given to a kernel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Encoding {
    /// A float32 for each column.
    #[default]
    F32,
    /// Two bfloat16 for each column pair, the first in the low half.
    Bf16Pairs,
    /// Two 16-bit integers for each column pair, and a scale for each token.
    I16Pairs,
}

impl Encoding {
    fn words(self, cols: usize) -> usize {
        if self == Encoding::F32 { cols } else { cols / 2 }
    }
}

/// Tokens that go through a kernel together.
#[derive(Clone, Copy, Debug)]
struct Block {
    /// The first of them, an index into all inputs.
    first: usize,
    tokens: usize,
}

/// Activations, encoded and interleaved by blocks: `[block][word][tokens of the block]`.
#[derive(Default)]
pub struct Inputs {
    /// What the words are: not always what the matrix's format would have.
    encoding: Encoding,
    words: Vec<u32>,
    scales: Vec<f32>,
    words_per_token: usize,
    blocks: Vec<Block>,
    /// The source row of each input.
    rows: Vec<u32>,
    /// Blocks of each group, in order.
    groups: Vec<Range<usize>>,
}

impl Inputs {
    /// Encodes rows of `source[.., cols]` for a matrix in `format`: for each group (an expert) the rows it lists. For
    /// [`Format::F32`] they suit a matrix in any format.
    ///
    /// Columns are filled up with zeros to a multiple of 32, so that kernels need no tail.
    pub fn encode<'a>(
        &mut self,
        engine: Engine,
        format: Format,
        source: &[f32],
        cols: usize,
        groups: impl Iterator<Item = &'a [u32]>,
    ) {
        let encoding = engine.encoding(format);
        self.encoding = encoding;
        self.words_per_token = encoding.words(cols.next_multiple_of(MXFP4_BLOCK));
        self.plan_blocks(engine.max_tokens(), groups);
        let len = self.rows.len() * self.words_per_token;
        if self.words.len() < len {
            self.words.resize(len, 0);
        }
        if self.scales.len() < self.rows.len() {
            self.scales.resize(self.rows.len(), 0.0);
        }
        let (words, scales) = (Shared::new(&mut self.words), Shared::new(&mut self.scales));
        self.blocks.par_iter().for_each(|block| {
            // SAFETY: blocks hold different inputs.
            let (words, scales) = unsafe {
                (
                    words.slice(block.first * self.words_per_token, block.tokens * self.words_per_token),
                    scales.slice(block.first, block.tokens),
                )
            };
            let rows = &self.rows[block.first..block.first + block.tokens];
            engine.level.run(EncodeBlock {
                encoding,
                source,
                cols,
                rows,
                words,
                scales,
            });
        });
    }

    /// Inputs in the order of the groups, each group cut into blocks of nearly equal size.
    fn plan_blocks<'a>(&mut self, max_tokens: usize, groups: impl Iterator<Item = &'a [u32]>) {
        self.blocks.clear();
        self.groups.clear();
        self.rows.clear();
        for group in groups {
            let first_block = self.blocks.len();
            let mut first = self.rows.len();
            let mut left = group.len();
            self.rows.extend_from_slice(group);
            while left > 0 {
                let tokens = left.div_ceil(left.div_ceil(max_tokens));
                self.blocks.push(Block { first, tokens });
                first += tokens;
                left -= tokens;
            }
            self.groups.push(first_block..self.blocks.len());
        }
    }
}

/// Encodes one block's rows.
struct EncodeBlock<'a> {
    encoding: Encoding,
    source: &'a [f32],
    cols: usize,
    rows: &'a [u32],
    words: &'a mut [u32],
    scales: &'a mut [f32],
}

/// Columns encoded at a time: few enough that the words of all the block's tokens stay in the first cache.
const RUN: usize = 64;

impl Kernel for EncodeBlock<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self) {
        let tokens = self.rows.len();
        let row = |t: usize| &self.source[self.rows[t] as usize * self.cols..][..self.cols];
        let mut inverses = [0.0; MAX_TOKENS];
        if self.encoding == Encoding::I16Pairs {
            for (t, inverse) in inverses.iter_mut().enumerate().take(tokens) {
                (self.scales[t], *inverse) = i16_scale(row(t));
            }
        }
        let run_words = self.encoding.words(RUN);
        for (run, words) in self.words.chunks_mut(run_words * tokens).enumerate() {
            for (t, &inverse) in inverses.iter().enumerate().take(tokens) {
                let mut values = [0.0; RUN];
                let from = (run * RUN).min(self.cols);
                let some = &row(t)[from..self.cols.min(from + RUN)];
                values[..some.len()].copy_from_slice(some);
                match self.encoding {
                    Encoding::F32 => spread(&values.map(f32::to_bits), words, tokens, t),
                    Encoding::Bf16Pairs => spread(&pairs(values.map(bf16)), words, tokens, t),
                    Encoding::I16Pairs => spread(&pairs(values.map(|v| i16_bits(v * inverse))), words, tokens, t),
                }
            }
        }
    }
}

/// Writes a token's words among those of its block.
#[inline(always)]
fn spread(source: &[u32], words: &mut [u32], tokens: usize, t: usize) {
    for (word, &source) in words[t..].iter_mut().step_by(tokens).zip(source) {
        *word = source;
    }
}

/// Two columns in a word, the first in the low half.
#[inline(always)]
fn pairs(halves: [u16; RUN]) -> [u32; RUN / 2] {
    std::array::from_fn(|i| u32::from(halves[2 * i]) | u32::from(halves[2 * i + 1]) << 16)
}

/// bfloat16, rounded to nearest even; NaN stays NaN.
#[inline(always)]
fn bf16(v: f32) -> u16 {
    let bits = v.to_bits();
    let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16;
    (if v.is_nan() { bits >> 16 | 0x40 } else { rounded }) as u16
}

/// What a token's 16-bit integers are multiplied by, and its values before they are rounded to them: the largest
/// becomes 32767. Half of the scale, for weights come as twice their E2M1 value. An infinity or NaN becomes the scale,
/// and so all the token's sums.
#[inline(always)]
fn i16_scale(values: &[f32]) -> (f32, f32) {
    // Magnitudes order as their bits do, NaN above all.
    let largest = f32::from_bits(values.iter().fold(0, |m, v| m.max(v.to_bits() & 0x7fff_ffff)));
    let inverse = 32767.0 / largest;
    (largest / 65534.0, if inverse.is_finite() { inverse } else { 0.0 })
}

/// A value of at most 32767 in magnitude, rounded to nearest even: adding 1.5 * 2^23 leaves the integer in the low bits.
#[inline(always)]
fn i16_bits(v: f32) -> u16 {
    (v + 12_582_912.0).to_bits() as u16
}

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
    fn begin(&self) -> Self::State;
    /// Takes the sums of one tile for one input. No two workers get the same tile of the same input.
    ///
    /// # Safety
    /// As for [`Simd`].
    unsafe fn finish<S: Simd>(&self, state: &mut Self::State, at: At, sums: &Sums);
    /// At a worker's end.
    fn end(&self, state: Self::State);
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
    fn encoding(self, format: Format) -> Encoding {
        match (self.precision, self.level, format) {
            (Precision::Fast, Level::Avx512, Format::Bf16) => Encoding::Bf16Pairs,
            (Precision::Fast, Level::Avx512, Format::Mxfp4) => Encoding::I16Pairs,
            _ => Encoding::F32,
        }
    }

    /// The largest block; `exact` has two registers for each sum and takes the tile's vectors in turn.
    fn max_tokens(self) -> usize {
        match (self.level, self.precision) {
            (Level::Avx512, Precision::Fast) => MAX_TOKENS,
            (Level::Avx512, Precision::Exact) => 8,
            _ => 2,
        }
    }

    /// All inputs of group `i` times member `i` of the matrix, for all groups.
    pub fn multiply<E: Epilogue>(self, matrix: &Packed, inputs: &Inputs, epilogue: &E) {
        let tasks = tasks(matrix, inputs, rayon::current_num_threads());
        tasks.into_par_iter().for_each(|task| {
            self.level.run(Run {
                engine: self,
                matrix,
                inputs,
                epilogue,
                task,
            })
        });
    }

    /// Float32 sums of float32 products, whatever the precision: for `exact`, an estimate within
    /// [`estimate_error`] of its own sums, at several times the speed.
    pub fn estimate<E: Epilogue>(
        self,
        matrix: &Packed,
        inputs: &mut Inputs,
        source: &[f32],
        rows: &[u32],
        epilogue: &E,
    ) {
        let engine = Self {
            precision: Precision::Fast,
            ..self
        };
        inputs.encode(engine, Format::F32, source, matrix.cols, std::iter::once(rows));
        engine.multiply(matrix, inputs, epilogue);
    }

    /// Norms of the first member's rows, rounded up: a tile's in its lanes.
    pub fn row_norms(self, matrix: &Packed) -> Vec<Sums> {
        let norms = (0..matrix.tiles).into_par_iter().map(|tile| {
            let args = Args {
                weights: matrix.tile(0, tile),
                cols: matrix.cols,
                words: &[],
                scales: &[],
            };
            self.level.run(RowNorms {
                args,
                format: matrix.format,
            })
        });
        norms.collect()
    }

    /// The same, but each worker takes its tiles through all members in their order, so that an epilogue may sum
    /// over members.
    pub fn multiply_in_order<E: Epilogue>(self, matrix: &Packed, inputs: &Inputs, epilogue: &E) {
        let run = tile_run(matrix);
        (0..matrix.tiles.div_ceil(run)).into_par_iter().for_each(|i| {
            let tiles = i * run..((i + 1) * run).min(matrix.tiles);
            for (member, blocks) in inputs.groups.iter().enumerate() {
                let task = Task {
                    member,
                    tiles: tiles.clone(),
                    blocks: blocks.clone(),
                };
                self.level.run(Run {
                    engine: self,
                    matrix,
                    inputs,
                    epilogue,
                    task,
                });
            }
        });
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
fn tasks(matrix: &Packed, inputs: &Inputs, threads: usize) -> Vec<Task> {
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
                tasks.push(Task {
                    member,
                    tiles: tile..(tile + run).min(matrix.tiles),
                    blocks: block..(block + step).min(blocks.end),
                });
            }
        }
    }
    tasks
}

struct Run<'a, E> {
    engine: Engine,
    matrix: &'a Packed,
    inputs: &'a Inputs,
    epilogue: &'a E,
    task: Task,
}

impl<E: Epilogue> Kernel for Run<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self) {
        let Self {
            engine,
            matrix,
            inputs,
            epilogue,
            task,
        } = self;
        let mut state = epilogue.begin();
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
                // SAFETY: this runs under `Level::run`, so the instruction set is there.
                unsafe { S::vectorize(product) };
                for (t, sums) in sums.iter().enumerate().take(block.tokens) {
                    let input = block.first + t;
                    let at = At {
                        member: task.member,
                        tile,
                        input,
                        row: inputs.rows[input] as usize,
                    };
                    // SAFETY: as above.
                    unsafe { epilogue.finish::<S>(&mut state, at, sums) };
                }
            }
        }
        epilogue.end(state);
    }
}

/// One tile times one block: a function of its own for each instruction set, whatever the epilogue.
struct Product<'a> {
    engine: Engine,
    encoding: Encoding,
    format: Format,
    args: Args<'a>,
    sums: &'a mut [Sums; MAX_TOKENS],
}

impl Kernel for Product<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self) {
        macro_rules! by_tokens {
            ($($t:literal)*) => {
                match self.args.scales.len() {
                    // SAFETY: `args` holds a tile and a block as the kernels read them, `sums` room for a block.
                    $($t if const { $t <= S::TOKENS } => unsafe {
                        let sums = product::<S, $t>(self.engine.precision, self.encoding, self.format, self.args);
                        for (out, sums) in self.sums.iter_mut().zip(sums) {
                            S::store(out.as_mut_ptr(), sums[0]);
                            S::store(out.as_mut_ptr().add(LANES), sums[1]);
                        }
                    },)*
                    _ => unreachable!("blocks have at most {MAX_TOKENS} tokens"),
                }
            };
        }
        by_tokens!(1 2 3 4 5 6 7 8 9 10 11 12);
    }
}

/// A tile and a block of tokens.
#[derive(Clone, Copy)]
struct Args<'a> {
    weights: &'a [u8],
    cols: usize,
    words: &'a [u32],
    scales: &'a [f32],
}

/// The sums of the tile's rows for `T` tokens.
#[inline(always)]
unsafe fn product<S: Simd, const T: usize>(
    precision: Precision,
    encoding: Encoding,
    format: Format,
    args: Args<'_>,
) -> [[S::F; 2]; T] {
    // SAFETY: handed on.
    unsafe {
        match (precision, encoding, format) {
            (Precision::Fast, Encoding::Bf16Pairs, _) => dot_bf16::<S, T>(args),
            (Precision::Fast, Encoding::I16Pairs, _) => dot_mxfp4::<S, T>(args),
            (Precision::Fast, Encoding::F32, Format::F32) => multiply_add::<S, ColumnF32, T>(args),
            (Precision::Fast, Encoding::F32, Format::Bf16) => multiply_add::<S, ColumnsBf16, T>(args),
            (Precision::Fast, Encoding::F32, Format::Mxfp4) => multiply_add::<S, ColumnsMxfp4, T>(args),
            (Precision::Exact, _, Format::F32) => sum_in_f64::<S, ColumnF32, T>(args),
            (Precision::Exact, _, Format::Bf16) => sum_in_f64::<S, ColumnsBf16, T>(args),
            (Precision::Exact, _, Format::Mxfp4) => sum_in_f64::<S, ColumnsMxfp4, T>(args),
        }
    }
}

/// How far ahead of the dot products weights are asked for, into the second cache: far enough for a DRAM latency at a
/// core's share of the bandwidth, within the same or the next tile.
const PREFETCH_BYTES: usize = 16 << 10;

/// Asks for what lies that far behind `w`, which may be past the matrix's end.
#[inline(always)]
unsafe fn prefetch<S: Simd>(w: *const u32) {
    // SAFETY: an address is only asked for, never read.
    unsafe { S::prefetch(w.cast::<u8>().wrapping_add(PREFETCH_BYTES)) }
}

#[inline(always)]
unsafe fn dot_bf16<S: Simd, const T: usize>(args: Args<'_>) -> [[S::F; 2]; T] {
    // SAFETY: a tile has two vectors for each column pair, the block a word for each pair and token.
    unsafe {
        let mut sums = [[S::splat(0.0); 2]; T];
        let (mut w, mut x) = (args.weights.as_ptr().cast::<u32>(), args.words.as_ptr());
        for _ in 0..args.cols.div_ceil(2) {
            let (w0, w1) = (S::i_load(w), S::i_load(w.add(LANES)));
            // With fewer tokens there is nothing to hide: the memory is the limit, and asking twice disturbs it.
            if T > 2 {
                prefetch::<S>(w);
                prefetch::<S>(w.wrapping_add(LANES));
            }
            for (t, sums) in sums.iter_mut().enumerate() {
                sums[0] = S::dot_bf16(sums[0], w0, x.add(t));
                sums[1] = S::dot_bf16(sums[1], w1, x.add(t));
            }
            w = w.add(TILE);
            x = x.add(T);
        }
        sums
    }
}

#[inline(always)]
unsafe fn dot_mxfp4<S: Simd, const T: usize>(args: Args<'_>) -> [[S::F; 2]; T] {
    // SAFETY: handed on.
    unsafe {
        let mut out = [[S::splat(0.0); 2]; T];
        // Few tokens: both vectors side by side, and more chains of sums than accumulators need, to hide the dot
        // product's latency. Many: their integer and float sums fill the registers for one vector.
        match T {
            1 | 2 => dot_mxfp4_vectors::<S, T, 2, 4>(args, 0, &mut out),
            3 | 4 => dot_mxfp4_vectors::<S, T, 2, 2>(args, 0, &mut out),
            5 | 6 => dot_mxfp4_vectors::<S, T, 2, 1>(args, 0, &mut out),
            _ => {
                dot_mxfp4_vectors::<S, T, 1, 1>(args, 0, &mut out);
                dot_mxfp4_vectors::<S, T, 1, 1>(args, 1, &mut out);
            }
        }
        out
    }
}

/// `V` vectors from `first` on, the sums within a block of 32 columns in `C` chains: integers, so that it makes no
/// difference to the result.
#[inline(always)]
unsafe fn dot_mxfp4_vectors<S: Simd, const T: usize, const V: usize, const C: usize>(
    args: Args<'_>,
    first: usize,
    out: &mut [[S::F; 2]; T],
) {
    // SAFETY: a tile has four column groups of two vectors for each block of 32 columns, then the scales; the block
    // of tokens has a word for each column pair and token.
    unsafe {
        let mut sums = [[S::splat(0.0); V]; T];
        let mut w = args.weights.as_ptr().cast::<u32>().add(first * LANES);
        let mut x = args.words.as_ptr();
        let mut scales = args.weights.as_ptr().add(args.cols / 8 * TILE * 4 + first * LANES);
        for _ in 0..args.cols / MXFP4_BLOCK {
            let mut block = [[[S::i_zero(); C]; V]; T];
            for _ in 0..4 {
                let words: [S::I; V] = std::array::from_fn(|v| S::i_load(w.add(v * LANES)));
                for v in 0..V {
                    prefetch::<S>(w.wrapping_add(v * LANES));
                }
                macro_rules! pair {
                    ($index:literal) => {
                        for v in 0..V {
                            let d = S::e2m1_words::<{ 4 * $index }>(words[v]);
                            for t in 0..T {
                                block[t][v][$index % C] = S::dot_i16(block[t][v][$index % C], d, x.add($index * T + t));
                            }
                        }
                    };
                }
                pair!(0);
                pair!(1);
                pair!(2);
                pair!(3);
                w = w.add(TILE);
                x = x.add(4 * T);
            }
            for v in 0..V {
                let scale = S::scales(scales.add(v * LANES));
                for t in 0..T {
                    let mut sum = block[t][v][0];
                    for &chain in &block[t][v][1..] {
                        sum = S::i_add(sum, chain);
                    }
                    sums[t][v] = S::fma(S::i_to_f(sum), scale, sums[t][v]);
                }
            }
            scales = scales.add(TILE);
        }
        for (t, sums) in sums.into_iter().enumerate() {
            for (v, sum) in sums.into_iter().enumerate() {
                out[t][first + v] = S::mul(sum, S::splat(args.scales[t]));
            }
        }
    }
}

/// A format's words, decoded to float32.
trait Columns {
    /// Columns in a word.
    const COLUMNS: usize;
    /// One vector of column group `group`: the columns' values, then nothing of meaning.
    unsafe fn decode<S: Simd>(args: &Args<'_>, group: usize, vector: usize) -> [S::F; 8];
}

#[inline(always)]
unsafe fn word(args: &Args<'_>, group: usize, vector: usize) -> *const u32 {
    // SAFETY: the caller's group and vector lie in the tile.
    unsafe { args.weights.as_ptr().cast::<u32>().add(group * TILE + vector * LANES) }
}

struct ColumnF32;
struct ColumnsBf16;
struct ColumnsMxfp4;

impl Columns for ColumnF32 {
    const COLUMNS: usize = 1;
    #[inline(always)]
    unsafe fn decode<S: Simd>(args: &Args<'_>, group: usize, vector: usize) -> [S::F; 8] {
        // SAFETY: handed on.
        unsafe { [S::load(word(args, group, vector).cast()); 8] }
    }
}

impl Columns for ColumnsBf16 {
    const COLUMNS: usize = 2;
    #[inline(always)]
    unsafe fn decode<S: Simd>(args: &Args<'_>, group: usize, vector: usize) -> [S::F; 8] {
        // SAFETY: handed on.
        unsafe {
            let w = S::i_load(word(args, group, vector));
            let (low, high) = (S::bf16_low(w), S::bf16_high(w));
            [low, high, low, high, low, high, low, high]
        }
    }
}

impl Columns for ColumnsMxfp4 {
    const COLUMNS: usize = 8;
    #[inline(always)]
    unsafe fn decode<S: Simd>(args: &Args<'_>, group: usize, vector: usize) -> [S::F; 8] {
        // SAFETY: handed on; the scales of a block of four groups follow the words.
        unsafe {
            let w = S::i_load(word(args, group, vector));
            let scales = args
                .weights
                .as_ptr()
                .add(args.cols / 8 * TILE * 4 + group / 4 * TILE + vector * LANES);
            let scale = S::scales(scales);
            [
                S::mul(S::e2m1::<0>(w), scale),
                S::mul(S::e2m1::<16>(w), scale),
                S::mul(S::e2m1::<4>(w), scale),
                S::mul(S::e2m1::<20>(w), scale),
                S::mul(S::e2m1::<8>(w), scale),
                S::mul(S::e2m1::<24>(w), scale),
                S::mul(S::e2m1::<12>(w), scale),
                S::mul(S::e2m1::<28>(w), scale),
            ]
        }
    }
}

/// The norms of a tile's rows.
struct RowNorms<'a> {
    args: Args<'a>,
    format: Format,
}

impl Kernel for RowNorms<'_> {
    type Output = Sums;

    #[inline(always)]
    fn run<S: Simd>(self) -> Sums {
        // SAFETY: `args` holds a tile of this format.
        unsafe {
            match self.format {
                Format::F32 => row_norms::<S, ColumnF32>(self.args),
                Format::Bf16 => row_norms::<S, ColumnsBf16>(self.args),
                Format::Mxfp4 => row_norms::<S, ColumnsMxfp4>(self.args),
            }
        }
    }
}

#[inline(always)]
unsafe fn row_norms<S: Simd, C: Columns>(args: Args<'_>) -> Sums {
    let mut norms = [0.0_f32; TILE];
    // SAFETY: handed on; the norms are two vectors.
    unsafe {
        let mut sums = [S::splat(0.0); 2];
        for group in 0..args.cols.div_ceil(C::COLUMNS) {
            for (vector, sum) in sums.iter_mut().enumerate() {
                for &w in C::decode::<S>(&args, group, vector).iter().take(C::COLUMNS) {
                    *sum = S::fma(w, w, *sum);
                }
            }
        }
        S::store(norms.as_mut_ptr(), sums[0]);
        S::store(norms.as_mut_ptr().add(LANES), sums[1]);
    }
    norms.map(|square| square.sqrt() * 1.001)
}

/// One row's product with one input as `exact` has it.
pub fn exact_dot(matrix: &Packed, row: usize, x: &[f32]) -> f32 {
    let tile = matrix.tile(0, row / TILE);
    let weight = |column| Tiles { gated: false }.value(matrix.format, matrix.cols, tile, row % TILE, column);
    let products = x.iter().enumerate().map(|(column, x)| f64::from(weight(column) * x));
    products.fold(0.0, |sum, product| sum + product) as f32
}

#[inline(always)]
unsafe fn multiply_add<S: Simd, C: Columns, const T: usize>(args: Args<'_>) -> [[S::F; 2]; T] {
    // SAFETY: the tile has all groups, the block of tokens a word for each column and token.
    unsafe {
        let mut sums = [[S::splat(0.0); 2]; T];
        for group in 0..args.cols.div_ceil(C::COLUMNS) {
            let (w0, w1) = (C::decode::<S>(&args, group, 0), C::decode::<S>(&args, group, 1));
            let x = args.words.as_ptr().cast::<f32>().add(group * C::COLUMNS * T);
            for c in 0..C::COLUMNS {
                for (t, sums) in sums.iter_mut().enumerate() {
                    let x = S::splat(x.add(c * T + t).read());
                    sums[0] = S::fma(w0[c], x, sums[0]);
                    sums[1] = S::fma(w1[c], x, sums[1]);
                }
            }
        }
        sums
    }
}

#[inline(always)]
unsafe fn sum_in_f64<S: Simd, C: Columns, const T: usize>(args: Args<'_>) -> [[S::F; 2]; T] {
    // SAFETY: as in `multiply_add`.
    unsafe {
        let mut out = [[S::splat(0.0); 2]; T];
        for vector in 0..2 {
            let mut sums = [S::d_zero(); T];
            for group in 0..args.cols.div_ceil(C::COLUMNS) {
                let w = C::decode::<S>(&args, group, vector);
                let x = args.words.as_ptr().cast::<f32>().add(group * C::COLUMNS * T);
                for (c, &w) in w.iter().enumerate().take(C::COLUMNS) {
                    for (t, sum) in sums.iter_mut().enumerate() {
                        *sum = S::d_add_product(*sum, w, x.add(c * T + t).read());
                    }
                }
            }
            for (out, sum) in out.iter_mut().zip(sums) {
                out[vector] = S::d_round(sum);
            }
        }
        out
    }
}
