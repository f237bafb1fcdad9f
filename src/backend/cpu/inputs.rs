//! Activations that enter matrix products: encoded as the kernels for the weights' format need them, and interleaved by
//! blocks of tokens.

use super::buffers::OVERFLOW;
use super::mode::{ComputeMode, Encoding, MAX_TOKENS};
use super::shared::Shared;
use crate::dtype::MXFP4_BLOCK;
use crate::error::Result;
use crate::memory::{self, Purpose};
use crate::simd::{Simd, VectorCode};
use crate::weights::WeightFormat;
use rayon::prelude::*;
use std::ops::Range;

/// Consecutive inputs that a kernel multiplies together.
#[derive(Clone, Copy, Debug)]
pub struct Block {
    /// Index of the first input.
    pub first: usize,
    /// Number of inputs.
    pub tokens: usize,
}

/// Activations, encoded and interleaved by blocks: `[block][word][tokens of the block]`.
#[derive(Default)]
pub struct Inputs {
    /// The encoding of `words`. For [`ComputeMode::estimate`] it is F32, whatever the matrix's format.
    pub(super) encoding: Encoding,
    pub(super) words: Vec<u32>,
    pub(super) scales: Vec<f32>,
    pub(super) words_per_token: usize,
    pub(super) blocks: Vec<Block>,
    /// Each input's row in the source.
    pub(super) rows: Vec<u32>,
    /// Each group's range in `blocks`.
    pub(super) groups: Vec<Range<usize>>,
}

impl Inputs {
    /// Allocates memory for `inputs` inputs of at most `cols` columns, in `groups` groups.
    pub fn make_room(&mut self, inputs: usize, cols: usize, groups: usize) -> Result<()> {
        let words = inputs.checked_mul(cols.next_multiple_of(MXFP4_BLOCK));
        let words = words.ok_or(OVERFLOW)?;
        memory::reserve(&mut self.words, words, Purpose::Step)?;
        memory::reserve(&mut self.scales, inputs, Purpose::Step)?;
        memory::reserve(&mut self.rows, inputs, Purpose::Step)?;
        memory::reserve(&mut self.blocks, inputs, Purpose::Step)?;
        memory::reserve(&mut self.groups, groups, Purpose::Step)
    }

    /// Encodes rows of `source[.., cols]` for a matrix in `format`: for each group (an expert) the rows that it lists.
    /// With [`WeightFormat::F32`] the result can be multiplied by a matrix in any format.
    ///
    /// Columns are padded with zeros to a multiple of 32, so that kernels need no remainder loop.
    pub fn encode<'a>(
        &mut self,
        mode: ComputeMode,
        format: WeightFormat,
        source: &[f32],
        cols: usize,
        groups: impl Iterator<Item = &'a [u32]>,
    ) -> Result<()> {
        let encoding = mode.encoding(format);
        self.encoding = encoding;
        self.words_per_token = encoding.words(cols.next_multiple_of(MXFP4_BLOCK));
        self.plan_blocks(mode.max_tokens(), groups)?;
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
            mode.level.run(EncodeBlock {
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

    /// Orders the inputs by group, and cuts each group into blocks of nearly equal size.
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

/// Columns encoded at a time: few enough that the words of all tokens of the block stay in the L1 cache.
const RUN: usize = 64;

impl VectorCode for EncodeBlock<'_> {
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

/// Writes the words of token `t` into the interleaved words of its block.
#[inline(always)]
fn spread(source: &[u32], words: &mut [u32], tokens: usize, t: usize) {
    for (word, &source) in words[t..].iter_mut().step_by(tokens).zip(source) {
        *word = source;
    }
}

/// Packs two columns into each word, the first in the low half.
#[inline(always)]
fn pairs(halves: [u16; RUN]) -> [u32; RUN / 2] {
    std::array::from_fn(|i| u32::from(halves[2 * i]) | u32::from(halves[2 * i + 1]) << 16)
}

/// Rounds to bfloat16, to nearest even; NaN stays NaN.
#[inline(always)]
fn bf16(v: f32) -> u16 {
    let bits = v.to_bits();
    let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16;
    (if v.is_nan() { bits >> 16 | 0x40 } else { rounded }) as u16
}

/// The scale of a token's 16-bit integers, and the factor that its values are multiplied by before they are rounded to
/// integers: the largest magnitude becomes 32767. The scale is halved, since the kernels multiply by twice the E2M1
/// values. If a value is infinite or NaN, so is the scale, and all sums of the token become NaN.
#[inline(always)]
fn i16_scale(values: &[f32]) -> (f32, f32) {
    // Magnitudes order as their bits do, NaN above all.
    let largest = f32::from_bits(values.iter().fold(0, |m, v| m.max(v.to_bits() & 0x7fff_ffff)));
    let inverse = 32767.0 / largest;
    (largest / 65534.0, if inverse.is_finite() { inverse } else { 0.0 })
}

/// Rounds a value of at most 32767 in magnitude to an integer, to nearest even: adding 1.5 * 2^23 leaves it in the low
/// bits.
#[inline(always)]
fn i16_bits(v: f32) -> u16 {
    (v + 12_582_912.0).to_bits() as u16
}
