//! What is fused into matrix products, computed from their sums: bias, residual, SwiGLU, the weighted sum over experts,
//! argmax and logits.

use super::gemm::{At, Epilogue};
use super::shared::Shared;
use super::tiles::{Sums, TILE};
use crate::batch::Greedy;
use crate::error::Result;
use crate::memory::{self, Purpose};
use crate::options::Precision;
use crate::simd::{LANES, Simd};
use std::sync::{Mutex, PoisonError};

/// `out = sums + bias`, or `out += sums + bias` if `onto`.
pub struct AddBias<'a> {
    pub bias: &'a [f32],
    pub out: Shared<'a, f32>,
    pub onto: bool,
}

impl Epilogue for AddBias<'_> {
    type State = ();

    fn begin(&self) -> Result<()> {
        Ok(())
    }

    #[inline(always)]
    unsafe fn finish<S: Simd>(&self, (): &mut (), at: At, sums: &Sums) {
        let width = self.bias.len();
        let first = at.tile * TILE;
        let bias = &self.bias[first..width.min(first + TILE)];
        // SAFETY: no other worker has this tile of this row.
        let out = unsafe { self.out.slice(at.row * width + first, bias.len()) };
        for ((out, sum), bias) in out.iter_mut().zip(sums).zip(bias) {
            let v = sum + bias;
            *out = if self.onto { *out + v } else { v };
        }
    }

    fn end(&self, (): ()) -> Result<()> {
        Ok(())
    }
}

/// SwiGLU: `out = gate * sigmoid(1.702 gate) * (up + 1)`, with sixteen gates in the tile's first vector and their ups
/// in the second.
pub struct SwiGlu<'a> {
    /// `[E, 2 I]`, alternating gate and up.
    pub bias: &'a [f32],
    pub limit: f32,
    pub precision: Precision,
    /// `I`
    pub width: usize,
    pub out: Shared<'a, f32>,
}

impl Epilogue for SwiGlu<'_> {
    type State = ();

    fn begin(&self) -> Result<()> {
        Ok(())
    }

    #[inline(always)]
    unsafe fn finish<S: Simd>(&self, (): &mut (), at: At, sums: &Sums) {
        let first = at.tile * LANES;
        let n = LANES.min(self.width - first);
        let bias = &self.bias[2 * (at.member * self.width + first)..][..2 * n];
        let (mut gates, mut ups) = ([0.0_f32; LANES], [0.0_f32; LANES]);
        for i in 0..n {
            // A comparison and not `min`, which would turn NaN into the limit.
            let gate = sums[i] + bias[2 * i];
            let up = sums[LANES + i] + bias[2 * i + 1];
            gates[i] = if gate > self.limit { self.limit } else { gate };
            ups[i] = up.clamp(-self.limit, self.limit);
        }
        let mut y = [0.0; LANES];
        match self.precision {
            Precision::Exact => {
                for i in 0..n {
                    let sigmoid = 1.0 / (1.0 + (-1.702 * gates[i]).exp());
                    y[i] = gates[i] * sigmoid * (ups[i] + 1.0);
                }
            }
            // SAFETY: under `VectorCode::run`; the arrays have sixteen elements.
            Precision::Fast => unsafe {
                let gate = S::load(gates.as_ptr());
                let e = S::exp(S::mul(gate, S::splat(-1.702)));
                let silu = S::div(gate, S::add(S::splat(1.0), e));
                S::store(y.as_mut_ptr(), S::fma(silu, S::load(ups.as_ptr()), silu));
            },
        }
        // SAFETY: no other worker has this tile of this pick.
        unsafe { self.out.slice(at.input * self.width + first, n) }.copy_from_slice(&y[..n]);
    }

    fn end(&self, (): ()) -> Result<()> {
        Ok(())
    }
}

/// The weighted sum over experts: `out += share * (sums + bias)`, for the experts in their order.
pub struct Combine<'a> {
    /// `[E, H]`
    pub bias: &'a [f32],
    pub shares: &'a [f32],
    pub rows: &'a [u32],
    /// `H`
    pub width: usize,
    pub out: Shared<'a, f32>,
}

impl Epilogue for Combine<'_> {
    type State = ();

    fn begin(&self) -> Result<()> {
        Ok(())
    }

    #[inline(always)]
    unsafe fn finish<S: Simd>(&self, (): &mut (), at: At, sums: &Sums) {
        let first = at.tile * TILE;
        let n = TILE.min(self.width - first);
        let bias = &self.bias[at.member * self.width + first..][..n];
        let (row, share) = (self.rows[at.input] as usize, self.shares[at.input]);
        // SAFETY: no other worker has these columns.
        let out = unsafe { self.out.slice(row * self.width + first, n) };
        let mut y = [0.0_f32; TILE];
        for ((y, sum), bias) in y.iter_mut().zip(sums).zip(bias) {
            *y = sum + bias;
        }
        let mut agg = [0.0_f32; TILE];
        agg[..n].copy_from_slice(out);
        for half in [0, LANES] {
            // SAFETY: under `VectorCode::run`; the arrays have two vectors.
            unsafe {
                let sum = S::fma(
                    S::splat(share),
                    S::load(y[half..].as_ptr()),
                    S::load(agg[half..].as_ptr()),
                );
                S::store(agg[half..].as_mut_ptr(), sum);
            }
        }
        out.copy_from_slice(&agg[..n]);
    }

    fn end(&self, (): ()) -> Result<()> {
        Ok(())
    }
}

/// A row's argmax before its first logit.
pub const NOTHING: Greedy = Greedy {
    token: u32::MAX,
    logit: f32::NEG_INFINITY,
};

/// Of two rows' argmax the one with the larger logit, the lower index on a tie. Neither logit is NaN.
pub fn first_largest(a: Greedy, b: Greedy) -> Greedy {
    let second = b.logit > a.logit || b.logit == a.logit && b.token < a.token;
    if second { b } else { a }
}

/// Each row's argmax, and the logits of rows that have a place.
pub struct Unembed<'a> {
    pub vocab: usize,
    /// How many of them can be the argmax.
    pub drawable: usize,
    /// For each row the place in `logits` where its logits are stored, if they are; `[rows]`
    pub places: &'a [Option<usize>],
    /// `[.., vocab]`
    pub logits: Shared<'a, f32>,
    /// `[rows]`
    pub greedy: Mutex<&'a mut Vec<Greedy>>,
}

impl Epilogue for Unembed<'_> {
    type State = Vec<Greedy>;

    fn begin(&self) -> Result<Vec<Greedy>> {
        memory::filled(NOTHING, self.places.len(), Purpose::Step)
    }

    #[inline(always)]
    unsafe fn finish<S: Simd>(&self, best: &mut Vec<Greedy>, at: At, sums: &Sums) {
        let first = at.tile * TILE;
        let sums = &sums[..TILE.min(self.vocab - first)];
        let drawable = &sums[..sums.len().min(self.drawable.saturating_sub(first))];
        let largest = drawable
            .iter()
            .fold(f32::NEG_INFINITY, |m, &s| if s > m { s } else { m });
        let best = &mut best[at.row];
        // -inf can be the largest logit, NaN cannot.
        if (largest > best.logit || best.token == NOTHING.token)
            && let Some(i) = drawable.iter().position(|&s| s == largest)
        {
            *best = Greedy {
                token: (first + i) as u32,
                logit: largest,
            };
        }
        if let Some(place) = self.places[at.row] {
            // SAFETY: no other worker has this tile of this row, and each row has a place of its own.
            unsafe { self.logits.slice(place * self.vocab + first, sums.len()) }.copy_from_slice(sums);
        }
    }

    fn end(&self, state: Vec<Greedy>) -> Result<()> {
        let mut all = self.greedy.lock().unwrap_or_else(PoisonError::into_inner);
        for (all, mine) in all.iter_mut().zip(state) {
            // Workers end in any order.
            *all = first_largest(*all, mine);
        }
        Ok(())
    }
}
