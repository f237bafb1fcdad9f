//! Attention over the paged KV cache: one query row and one KV head at a time, with all query heads of that KV head
//! together, so that each key and value is loaded once for all of them.
//!
//! The scores of the whole context, `[heads][positions]`, are computed before the softmax. So the softmax knows its
//! maximum and its sum before the first value is weighted, and sums run in the order of positions.

use super::kv::BLOCK_TOKENS;
use super::kv::{Element, KvCache};
use crate::batch::{Chunk, StepPlan};
use crate::options::Precision;
use crate::simd::{LANES, Simd, VectorCode};
use std::ops::Range;

/// Number of query heads whose accumulators fit into the registers together.
const HEADS: usize = 4;

/// One row's attention for one KV head.
pub struct Attend<'a, E> {
    pub kv: &'a KvCache,
    pub plan: &'a StepPlan,
    /// The row's chunk of the plan.
    pub chunk: &'a Chunk,
    pub layer: usize,
    /// The KV head.
    pub head: usize,
    /// The positions that the row attends to; the last is its own.
    pub positions: Range<usize>,
    /// Rotated queries of the KV head's query heads, `[heads, D]`.
    pub queries: &'a [f32],
    /// The query heads' sinks, `[heads]`.
    pub sinks: &'a [f32],
    /// D.
    pub head_dim: usize,
    /// Scores `[heads, positions of the blocks that hold `positions`]`, then sums `[heads, D rounded up to 16]`.
    pub scratch: &'a mut [f32],
    /// `[heads, D]`
    pub out: &'a mut [f32],
    pub precision: Precision,
    /// The type of the cache's elements.
    pub element: std::marker::PhantomData<E>,
}

/// Number of positions in the blocks that hold `positions`.
fn touched(positions: &Range<usize>) -> usize {
    (positions.end.div_ceil(BLOCK_TOKENS) - positions.start / BLOCK_TOKENS) * BLOCK_TOKENS
}

/// Length of [`Attend::scratch`].
pub fn scratch_values(heads: usize, positions: &Range<usize>, head_dim: usize) -> usize {
    heads * (touched(positions) + head_dim.next_multiple_of(LANES))
}

impl<E: Element> VectorCode for Attend<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, _: S) {
        let heads = self.sinks.len();
        let first_block = self.positions.start / BLOCK_TOKENS;
        let width = touched(&self.positions);
        let padded_dim = self.head_dim.next_multiple_of(LANES);
        let (scores, sums) = std::mem::take(&mut self.scratch).split_at_mut(heads * width);
        // SAFETY: under `VectorCode::run`; scores hold `width` positions a head, sums `padded_dim` columns.
        unsafe {
            let mut h = 0;
            while h < heads {
                let n = if heads - h >= HEADS { HEADS } else { 1 };
                let scores = &mut scores[h * width..(h + n) * width];
                if n == HEADS {
                    self.scores::<S, HEADS>(h, width, scores)
                } else {
                    self.scores::<S, 1>(h, width, scores)
                }
                for (i, scores) in scores.chunks_exact_mut(width).enumerate() {
                    let seen = self.positions.start - first_block * BLOCK_TOKENS
                        ..self.positions.end - first_block * BLOCK_TOKENS;
                    match self.precision {
                        Precision::Exact => softmax_in_f64(&mut scores[seen], self.sinks[h + i]),
                        Precision::Fast => softmax::<S>(&mut scores[seen], self.sinks[h + i]),
                    }
                }
                let sums = &mut sums[h * padded_dim..(h + n) * padded_dim];
                if n == HEADS {
                    self.weigh::<S, HEADS>(width, scores, padded_dim, sums);
                } else {
                    self.weigh::<S, 1>(width, scores, padded_dim, sums);
                }
                h += n;
            }
        }
        for (out, sums) in self
            .out
            .chunks_exact_mut(self.head_dim)
            .zip(sums.chunks_exact(padded_dim))
        {
            out.copy_from_slice(&sums[..self.head_dim]);
        }
    }
}

impl<E: Element> Attend<'_, E> {
    /// `q . k / sqrt(D)` for heads `h..h + N` and every position of the blocks that hold `positions`.
    #[inline(always)]
    unsafe fn scores<S: Simd, const N: usize>(&self, h: usize, width: usize, scores: &mut [f32]) {
        let d = self.head_dim;
        let root = (d as f32).sqrt();
        let first_block = self.positions.start / BLOCK_TOKENS;
        for b in 0..width / BLOCK_TOKENS {
            let block = self
                .kv
                .block(self.plan, self.chunk, self.layer, (first_block + b) * BLOCK_TOKENS);
            let (keys, _) = self.kv.head::<E>(self.layer, block, self.head);
            // SAFETY: a block has sixteen keys a column; queries have D columns a head.
            unsafe {
                let query = |n: usize, c: usize| *self.queries.get_unchecked((h + n) * d + c);
                match self.precision {
                    Precision::Exact => {
                        let mut sums = [S::d_zero(); N];
                        for c in 0..d {
                            let k = E::load::<S>(keys.as_ptr().add(c * BLOCK_TOKENS));
                            for (n, sum) in sums.iter_mut().enumerate() {
                                *sum = S::d_add_product(*sum, k, query(n, c));
                            }
                        }
                        for (n, sum) in sums.into_iter().enumerate() {
                            let mut wide = [0.0; LANES];
                            S::d_store(wide.as_mut_ptr(), sum);
                            for (score, sum) in scores[n * width + b * BLOCK_TOKENS..].iter_mut().zip(wide) {
                                *score = (sum / f64::from(root)) as f32;
                            }
                        }
                    }
                    Precision::Fast => {
                        let mut sums = [S::splat(0.0); N];
                        for c in 0..d {
                            let k = E::load::<S>(keys.as_ptr().add(c * BLOCK_TOKENS));
                            for (n, sum) in sums.iter_mut().enumerate() {
                                *sum = S::fma(S::splat(query(n, c)), k, *sum);
                            }
                        }
                        let scale = S::splat(1.0 / root);
                        for (n, sum) in sums.into_iter().enumerate() {
                            S::store(scores[n * width + b * BLOCK_TOKENS..].as_mut_ptr(), S::mul(sum, scale));
                        }
                    }
                }
            }
        }
    }

    /// The weighted sum of values for `N` heads, in the order of positions.
    #[inline(always)]
    unsafe fn weigh<S: Simd, const N: usize>(
        &self,
        width: usize,
        weights: &[f32],
        padded_dim: usize,
        sums: &mut [f32],
    ) {
        let first_block = self.positions.start / BLOCK_TOKENS;
        // Four vectors of columns at a time: with four heads, sixteen accumulators.
        let mut column = 0;
        while column < padded_dim {
            let vectors = ((padded_dim - column) / LANES).min(4);
            // SAFETY: guaranteed by our caller.
            unsafe {
                match vectors {
                    4 => self.weigh_columns::<S, N, 4>(first_block, column, width, weights, padded_dim, sums),
                    3 => self.weigh_columns::<S, N, 3>(first_block, column, width, weights, padded_dim, sums),
                    2 => self.weigh_columns::<S, N, 2>(first_block, column, width, weights, padded_dim, sums),
                    _ => self.weigh_columns::<S, N, 1>(first_block, column, width, weights, padded_dim, sums),
                }
            }
            column += vectors * LANES;
        }
    }

    #[inline(always)]
    unsafe fn weigh_columns<S: Simd, const N: usize, const V: usize>(
        &self,
        first_block: usize,
        column: usize,
        width: usize,
        weights: &[f32],
        padded_dim: usize,
        sums: &mut [f32],
    ) {
        // SAFETY: values have `padded_dim` columns a position, weights `width` positions a head.
        unsafe {
            let mut acc = [[S::splat(0.0); V]; N];
            let mut position = self.positions.start;
            while position < self.positions.end {
                let block = self.kv.block(self.plan, self.chunk, self.layer, position);
                let (_, values) = self.kv.head::<E>(self.layer, block, self.head);
                let end = self.positions.end.min((position / BLOCK_TOKENS + 1) * BLOCK_TOKENS);
                for p in position..end {
                    let row = values.as_ptr().add(p % BLOCK_TOKENS * padded_dim + column);
                    let v: [S::F; V] = std::array::from_fn(|i| E::load::<S>(row.add(i * LANES)));
                    for (n, acc) in acc.iter_mut().enumerate() {
                        let weight = S::splat(*weights.get_unchecked(n * width + p - first_block * BLOCK_TOKENS));
                        for (acc, &v) in acc.iter_mut().zip(&v) {
                            *acc = S::fma(weight, v, *acc);
                        }
                    }
                }
                position = end;
            }
            for (n, acc) in acc.into_iter().enumerate() {
                for (i, acc) in acc.into_iter().enumerate() {
                    S::store(sums[n * padded_dim + column + i * LANES..].as_mut_ptr(), acc);
                }
            }
        }
    }
}

/// Softmax as the eval program computes it. The sink counts in the maximum and in the sum.
#[inline(always)]
fn softmax_in_f64(scores: &mut [f32], sink: f32) {
    let max = f64::from(scores.iter().fold(sink, |m, &s| if s > m { s } else { m }));
    let exp = |s: f32| ((f64::from(s) - max) as f32).exp();
    let mut sum = 0.0_f64;
    for s in scores.iter_mut() {
        *s = exp(*s);
        sum += f64::from(*s);
    }
    // The sink is the last of the softmax's inputs.
    sum += f64::from(exp(sink));
    for s in scores {
        *s = (f64::from(*s) / sum) as f32;
    }
}

/// Softmax in float32, with one partial sum a lane. The sink counts in the maximum and in the sum.
#[inline(always)]
unsafe fn softmax<S: Simd>(scores: &mut [f32], sink: f32) {
    let max = scores.iter().fold(sink, |m, &s| if s > m { s } else { m });
    // SAFETY: under `VectorCode::run`; chunks have sixteen elements.
    unsafe {
        let mut sums = S::splat(0.0);
        let (chunks, tail) = scores.as_chunks_mut::<LANES>();
        for chunk in chunks {
            let e = S::exp(S::sub(S::load(chunk.as_ptr()), S::splat(max)));
            S::store(chunk.as_mut_ptr(), e);
            sums = S::add(sums, e);
        }
        let mut last = [f32::NEG_INFINITY; LANES];
        last[..tail.len()].copy_from_slice(tail);
        last[tail.len()] = sink;
        let e = S::exp(S::sub(S::load(last.as_ptr()), S::splat(max)));
        S::store(last.as_mut_ptr(), e);
        tail.copy_from_slice(&last[..tail.len()]);
        let mut lanes = [0.0; LANES];
        // The lanes after the sink hold e^-87.5, which does not change a sum that contains the maximum's 1.
        S::store(lanes.as_mut_ptr(), S::add(sums, e));
        let inverse = 1.0 / lanes.iter().sum::<f32>();
        for s in scores {
            *s *= inverse;
        }
    }
}
