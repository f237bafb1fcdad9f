//! The argmax of `exact` without computing most of its logits.
//!
//! A float32 product estimates all logits. The error of each estimate is bounded by the norms of the unembedding's row
//! and of the input. Only rows whose estimate plus its bound reaches the largest estimate minus its bound can hold the
//! largest logit: a handful of 200,000. The logits of these rows are summed in float64.

use super::buffers::Buffer;
use super::epilogue::NOTHING;
use super::gemm::{At, Epilogue, MAX_ESTIMATE_COLUMNS, estimate_error};
use super::inputs::Inputs;
use super::mode::ComputeMode;
use super::products::exact_dot;
use super::tiles::{Sums, TILE};
use crate::batch::Greedy;
use crate::error::Result;
use crate::memory::{self, Purpose};
use crate::simd::Simd;
use crate::weights::Packed;
use rayon::prelude::*;
use std::sync::{Mutex, PoisonError};

/// Finds the argmax of each row of `t[.., H] w^T`, with the arithmetic of `exact`. `rows` is 0, 1, 2, ..., one for each
/// row of `t`. Gives `false`, without a result, if the error of the estimate cannot be bounded.
pub fn exact_greedy(
    mode: ComputeMode,
    inputs: &mut Inputs,
    t: &Buffer,
    rows: &[u32],
    w: &Packed,
    greedy: &mut [Greedy],
) -> Result<bool> {
    let norm = |x: &[f32]| x.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>().sqrt() as f32;
    let bound = estimate_error(w.cols);
    let errors = t.values.chunks_exact(t.width).map(|x| norm(x) * bound);
    let errors: Vec<f32> = memory::collect(errors, Purpose::Step)?;
    if w.cols > MAX_ESTIMATE_COLUMNS || !errors.iter().all(|e| e.is_finite()) {
        return Ok(false);
    }
    let screen = Screen {
        vocab: w.rows,
        norms: w.row_norms.get_or_try_init(|| mode.row_norms(w))?,
        errors: &errors,
        all: Mutex::new(memory::collect(
            (0..t.rows()).map(|_| Candidates::new(f32::NEG_INFINITY)),
            Purpose::Step,
        )?),
    };
    mode.estimate(w, inputs, &t.values, rows, &screen)?;
    let all = screen.all.into_inner().unwrap_or_else(PoisonError::into_inner);
    let inputs = t.values.par_chunks_exact(t.width).zip(all);
    inputs.zip(greedy).for_each(|((x, mut candidates), greedy)| {
        candidates.prune();
        candidates.rows.sort_unstable_by_key(|&(row, _)| row);
        for (row, _) in candidates.rows {
            let logit = exact_dot(w, row as usize, x);
            if logit > greedy.logit || greedy.token == NOTHING.token && logit == greedy.logit {
                *greedy = Greedy { token: row, logit };
            }
        }
    });
    Ok(true)
}

/// The rows of the unembedding whose logits may be an input's largest.
struct Candidates {
    /// Lower bound of the largest logit.
    least: f32,
    /// Rows of the unembedding, each with the upper bound of its logit.
    rows: Vec<(u32, f32)>,
    /// If there was no memory for a row: how many rows need some. Else 0.
    lacking: usize,
}

impl Candidates {
    /// No rows yet, with a lower bound of the largest logit.
    fn new(least: f32) -> Self {
        Self {
            least,
            rows: Vec::new(),
            lacking: 0,
        }
    }

    /// Each time the number of rows reaches a multiple of this, rows below the lower bound are removed.
    const MANY: usize = 64;

    /// Adds a row whose logit is at most `most`; NaN if there is no bound.
    fn add(&mut self, row: u32, most: f32) {
        if memory::push(&mut self.rows, (row, most), Purpose::Step).is_err() {
            self.lacking = self.rows.len() + 1;
        }
        if self.rows.len().is_multiple_of(Self::MANY) {
            self.prune();
        }
    }

    fn prune(&mut self) {
        let least = self.least;
        self.rows.retain(|&(_, most)| !is_less(most, least));
    }
}

/// Whether a row with the upper bound `most` cannot hold the largest logit. `false` for NaN, a row without a bound.
fn is_less(most: f32, least: f32) -> bool {
    most < least
}

/// With an error bound as large as this, sums may have overflowed, and it is no bound.
const BOUNDLESS: f32 = 1e29;

/// An epilogue that collects the candidates of each input.
struct Screen<'a> {
    vocab: usize,
    /// The norms of the unembedding's rows.
    norms: &'a [Sums],
    /// For each input the bound of the estimate's error for a row of norm 1.
    errors: &'a [f32],
    all: Mutex<Vec<Candidates>>,
}

impl Epilogue for Screen<'_> {
    type State = Vec<Candidates>;

    fn begin(&self) -> Result<Vec<Candidates>> {
        // Starting from the lower bounds that other workers have found, this one collects fewer candidates.
        let all = self.all.lock().unwrap_or_else(PoisonError::into_inner);
        memory::collect(all.iter().map(|found| Candidates::new(found.least)), Purpose::Step)
    }

    #[inline(always)]
    unsafe fn finish<S: Simd>(&self, state: &mut Vec<Candidates>, at: At, sums: &Sums) {
        let candidates = &mut state[at.input];
        let (norms, error, least) = (&self.norms[at.tile], self.errors[at.input], candidates.least);
        // The relative bound does not hold for products that underflow; this covers them.
        let error = |norm: f32| norm * error + f32::MIN_POSITIVE;
        let behind = |sum: f32, error: f32| (sum + error < least) & (error < BOUNDLESS);
        let mut ahead = 0;
        for i in 0..TILE {
            ahead |= u32::from(!behind(sums[i], error(norms[i])));
        }
        if ahead == 0 {
            return;
        }
        let first = at.tile * TILE;
        let rows = 0..TILE.min(self.vocab - first);
        for i in rows.clone() {
            let error = error(norms[i]);
            if error < BOUNDLESS && sums[i] - error > candidates.least {
                candidates.least = sums[i] - error;
            }
        }
        for i in rows {
            let error = error(norms[i]);
            let most = if error < BOUNDLESS { sums[i] + error } else { f32::NAN };
            if !is_less(most, candidates.least) {
                candidates.add((first + i) as u32, most);
            }
        }
    }

    fn end(&self, state: Vec<Candidates>) -> Result<()> {
        let mut all = self.all.lock().unwrap_or_else(PoisonError::into_inner);
        for (all, mine) in all.iter_mut().zip(state) {
            all.least = all.least.max(mine.least);
            if mine.lacking > 0 {
                return Err(memory::lacking::<(u32, f32)>(mine.lacking, Purpose::Step));
            }
            memory::extend(&mut all.rows, mine.rows, Purpose::Step)?;
        }
        Ok(())
    }
}
