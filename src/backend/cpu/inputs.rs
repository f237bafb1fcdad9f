//! Activations on their way into the products: encoded as the weights' format asks, a block of tokens side by side.

use super::buffers::OVERFLOW;
use super::gemm::Engine;
use super::shared::Shared;
use crate::dtype::MXFP4_BLOCK;
use crate::error::Result;
use crate::memory::{self, Purpose};
use crate::simd::{Kernel, Simd};
use crate::weights::Format;
use rayon::prelude::*;
use std::ops::Range;

/// The most tokens in a block.
pub const MAX_TOKENS: usize = 12;

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
    pub fn words(self, cols: usize) -> usize {
        if self == Encoding::F32 { cols } else { cols / 2 }
    }
}

/// Tokens that go through a kernel together.
#[derive(Clone, Copy, Debug)]
pub struct Block {
    /// The first of them, an index into all inputs.
    pub first: usize,
    /// How many.
    pub tokens: usize,
}

/// Activations, encoded and interleaved by blocks: `[block][word][tokens of the block]`.
#[derive(Default)]
pub struct Inputs {
    /// What the words are: not always what the matrix's format would have.
    pub(super) encoding: Encoding,
    pub(super) words: Vec<u32>,
    pub(super) scales: Vec<f32>,
    pub(super) words_per_token: usize,
    pub(super) blocks: Vec<Block>,
    /// The source row of each input.
    pub(super) rows: Vec<u32>,
    /// Blocks of each group, in order.
    pub(super) groups: Vec<Range<usize>>,
}

impl Inputs {
    /// Makes room for so many inputs of at most `cols` columns, in as many groups.
    pub fn make_room(&mut self, inputs: usize, cols: usize, groups: usize) -> Result<()> {
        let words = inputs.checked_mul(cols.next_multiple_of(MXFP4_BLOCK));
        let words = words.ok_or(OVERFLOW)?;
        memory::reserve(&mut self.words, words, Purpose::Step)?;
        memory::reserve(&mut self.scales, inputs, Purpose::Step)?;
        memory::reserve(&mut self.rows, inputs, Purpose::Step)?;
        memory::reserve(&mut self.blocks, inputs, Purpose::Step)?;
        memory::reserve(&mut self.groups, groups, Purpose::Step)
    }

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
    ) -> Result<()> {
        let encoding = engine.encoding(format);
        self.encoding = encoding;
        self.words_per_token = encoding.words(cols.next_multiple_of(MXFP4_BLOCK));
        self.plan_blocks(engine.max_tokens(), groups)?;
        let len = self.rows.len() * self.words_per_token;
        if self.words.len() < len {
            memory::resize(&mut self.words, len, 0, Purpose::Step)?;
        }
        if self.scales.len() < self.rows.len() {
            memory::resize(&mut self.scales, self.rows.len(), 0.0, Purpose::Step)?;
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
        Ok(())
    }

    /// Inputs in the order of the groups, each group cut into blocks of nearly equal size.
    fn plan_blocks<'a>(&mut self, max_tokens: usize, groups: impl Iterator<Item = &'a [u32]>) -> Result<()> {
        self.blocks.clear();
        self.groups.clear();
        self.rows.clear();
        for group in groups {
            let first_block = self.blocks.len();
            let mut first = self.rows.len();
            let mut left = group.len();
            memory::append(&mut self.rows, group, Purpose::Step)?;
            while left > 0 {
                let tokens = left.div_ceil(left.div_ceil(max_tokens));
                memory::push(&mut self.blocks, Block { first, tokens }, Purpose::Step)?;
                first += tokens;
                left -= tokens;
            }
            memory::push(&mut self.groups, first_block..self.blocks.len(), Purpose::Step)?;
        }
        Ok(())
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
    fn run<S: Simd>(self, _: S) {
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
