//! The argmax of `exact` without computing most of its logits.
//!
//! A float32 product estimates all logits. The error of each estimate is bounded by the norms of the unembedding's row
//! and of the input. Only rows whose estimate plus its bound reaches the largest estimate minus its bound can hold the
//! largest logit: a handful of 200,000. The tiles of these rows are summed in float64, one by one. Where too many rows
//! are left for that (equal logits, or all of them subnormal), the input is left to the product of all rows.

use super::buffers::Buffer;
use super::epilogue::{NOTHING, first_largest};
use super::gemm::{At, Epilogue, MAX_ESTIMATE_COLUMNS, estimate_error};
use super::inputs::Inputs;
use super::mode::ComputeMode;
use super::tiles::{Sums, TILE};
use crate::batch::Greedy;
use crate::error::Result;
use crate::memory::{self, Purpose};
use crate::simd::Simd;
use crate::weights::Packed;
use rayon::prelude::*;
use std::sync::{Mutex, PoisonError};

/// Finds the argmax of each row of `t[.., H] w^T`, with the arithmetic of `exact`, among the first `drawable` tokens.
/// `rows` is 0, 1, 2, ..., one for each row of `t`. Returns the rows for which it has none, since the estimate's error
/// cannot be bounded or excludes too little: for these the product of all rows is cheaper.
pub fn exact_greedy(
    mode: ComputeMode,
    inputs: &mut Inputs,
    t: &Buffer,
    rows: &[u32],
    w: &Packed,
    drawable: usize,
    greedy: &mut [Greedy],
) -> Result<Vec<u32>> {
    if w.cols > MAX_ESTIMATE_COLUMNS {
        return memory::collect(rows.iter().copied(), Purpose::Step);
    }
    let norm = |x: &[f32]| x.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>().sqrt() as f32;
    let bound = estimate_error(w.cols);
    let errors = t.values.chunks_exact(t.width).map(|x| norm(x) * bound);
    let errors: Vec<f32> = memory::collect(errors, Purpose::Step)?;
    let candidates = errors.iter().map(|error| Candidates {
        left_out: !error.is_finite(),
        ..Candidates::new(f32::NEG_INFINITY)
    });
    let all = Mutex::new(memory::collect(candidates, Purpose::Step)?);
    let screen = Screen {
        drawable,
        norms: w.row_norms.get_or_try_init(|| mode.row_norms(w))?,
        errors: &errors,
        most: most_candidates(w.rows),
        all,
    };
    mode.estimate(w, inputs, &t.values, rows, &screen)?;
    let mut all = screen.all.into_inner().unwrap_or_else(PoisonError::into_inner);
    inputs.encode(mode, w.format, &t.values, w.cols, rows.chunks(1))?;
    let found = all.par_iter_mut().zip(greedy).enumerate();
    found.for_each(|(input, (candidates, greedy))| {
        candidates.prune();
        candidates.rows.sort_unstable_by_key(|&(row, _)| row);
        let tile = |&(row, _): &(u32, f32)| row as usize / TILE;
        let of_tile = |rows: &[(u32, f32)]| {
            let sums = mode.tile_sums(w, tile(&rows[0]), inputs, input);
            let logits = rows.iter().map(|&(token, _)| Greedy {
                token,
                logit: sums[token as usize % TILE],
            });
            // NaN cannot be the largest logit.
            let numbers = logits.filter(|found| !found.logit.is_nan());
            numbers.fold(NOTHING, first_largest)
        };
        let tiles = candidates.rows.par_chunk_by(|a, b| tile(a) == tile(b));
        *greedy = tiles.map(of_tile).reduce(|| NOTHING, first_largest);
    });
    let left_out = rows.iter().zip(&all).filter(|(_, candidates)| candidates.left_out);
    memory::collect(left_out.map(|(&row, _)| row), Purpose::Step)
}

/// The most candidates of an input: with more, the product of all rows may be cheaper. Each may be in a tile of its
/// own, and a tile for one input takes up to twice the time that an input of a whole block has for a tile.
fn most_candidates(vocab: usize) -> usize {
    vocab / (2 * TILE)
}

/// How many steps compute all rows without an estimate after one in which that excluded too little for most inputs:
/// logits that are tied in one step are in the next. Estimates in vain then take a seventeenth of what one in each step
/// would.
const STEPS_WITHOUT: usize = 16;

/// Whether estimates are worth their time.
#[derive(Default)]
pub struct Worth {
    steps_without: usize,
}

impl Worth {
    /// Whether the next step, of one or more inputs, is to begin with an estimate.
    pub fn estimates(&mut self) -> bool {
        let estimates = self.steps_without == 0;
        self.steps_without = self.steps_without.saturating_sub(1);
        estimates
    }

    /// So many of a step's inputs were left to the product of all rows.
    pub fn judge(&mut self, inputs: usize, left_out: usize) {
        if 2 * left_out > inputs {
            self.steps_without = STEPS_WITHOUT;
        }
    }
}

/// The rows of the unembedding whose logits may be an input's largest.
struct Candidates {
    /// Lower bound of the largest logit.
    least: f32,
    /// Rows of the unembedding, each with the upper bound of its logit.
    rows: Vec<(u32, f32)>,
    /// Whether the input is left to the product of all rows. Then there are no candidates.
    left_out: bool,
    /// If there was no memory for a row: how many rows need some. Else 0.
    lacking: usize,
}

impl Candidates {
    /// No rows yet, with a lower bound of the largest logit.
    fn new(least: f32) -> Self {
        Self {
            least,
            rows: Vec::new(),
            left_out: false,
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

    /// Adds what another worker has found, and leaves the input out if it has more than `most` candidates.
    fn merge(&mut self, other: Self, most: usize) -> Result<()> {
        self.left_out |= other.left_out;
        self.least = self.least.max(other.least);
        if !self.left_out {
            memory::extend(&mut self.rows, other.rows, Purpose::Step)?;
            if self.rows.len() > most {
                self.prune();
                // If just a few could be removed, they would have to be looked through again at once.
                self.left_out = self.rows.len() > most / 2;
            }
        }
        if self.left_out {
            self.rows = Vec::new();
        }
        Ok(())
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
    /// How many of the unembedding's rows can hold the largest logit.
    drawable: usize,
    /// The norms of the unembedding's rows.
    norms: &'a [Sums],
    /// For each input the bound of the estimate's error for a row of norm 1.
    errors: &'a [f32],
    /// The most candidates of an input.
    most: usize,
    all: Mutex<Vec<Candidates>>,
}

impl Epilogue for Screen<'_> {
    type State = Vec<Candidates>;

    fn is_done(&self) -> bool {
        let all = self.all.lock().unwrap_or_else(PoisonError::into_inner);
        all.iter().all(|candidates| candidates.left_out)
    }

    fn begin(&self) -> Result<Vec<Candidates>> {
        // Starting from the lower bounds that other workers have found, this one collects fewer candidates.
        let all = self.all.lock().unwrap_or_else(PoisonError::into_inner);
        let state = all.iter().map(|found| Candidates {
            left_out: found.left_out,
            ..Candidates::new(found.least)
        });
        memory::collect(state, Purpose::Step)
    }

    #[inline(always)]
    unsafe fn finish<S: Simd>(&self, state: &mut Vec<Candidates>, at: At, sums: &Sums) {
        let candidates = &mut state[at.input];
        if candidates.left_out {
            return;
        }
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
        let rows = 0..TILE.min(self.drawable.saturating_sub(first));
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
            if mine.lacking > 0 {
                return Err(memory::lacking::<(u32, f32)>(mine.lacking, Purpose::Step));
            }
            all.merge(mine, self.most)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::cpu::Tiles;
    use crate::checkpoint::{Part, Tensor, Values};
    use crate::simd::Level;
    use crate::weights::{WeightFormat, pack};

    const VOCAB: usize = 4096;
    const NAN: f32 = f32::NAN;

    /// What is left out of a batch of inputs, and the argmax of all inputs. Token `i` has the row `[column(i), i]`.
    fn screened(level: Level, column: impl Fn(usize) -> f32, inputs: &[[f32; 2]]) -> (Vec<u32>, Vec<Greedy>) {
        let values = (0..VOCAB).flat_map(|i| [column(i), i as f32]);
        let bytes: Vec<u8> = values.flat_map(f32::to_le_bytes).collect();
        let part = Part {
            rows: VOCAB,
            values: Values::F32(&bytes),
        };
        let tensor = Tensor {
            rows: VOCAB,
            cols: 2,
            parts: vec![part],
        };
        let w = pack(&[tensor], WeightFormat::F32, &Tiles { gated: false }).unwrap();
        let mut t = Buffer::new(inputs.len(), 2).unwrap();
        t.set_rows(inputs.len()).unwrap();
        t.values_mut().copy_from_slice(inputs.as_flattened());
        let mode = ComputeMode {
            level,
            precision: crate::options::Precision::Exact,
        };
        let rows: Vec<u32> = (0..inputs.len() as u32).collect();
        let mut greedy = vec![NOTHING; inputs.len()];
        let left_out = exact_greedy(mode, &mut Inputs::default(), &t, &rows, &w, VOCAB, &mut greedy).unwrap();
        (left_out, greedy)
    }

    #[test]
    fn inputs_whose_logits_are_tied_are_left_to_the_product_of_all_rows() {
        let ties: [&dyn Fn(usize) -> f32; 5] = [
            &|_| 0.0,
            &|_| 1e-40,
            &|i| if i % 2 == 0 { 1.0 } else { -1.0 },
            &|i| if i / 300 == 7 { 1.0 } else { 0.0 },
            &|i| if i > VOCAB / 2 { NAN } else { 0.0 },
        ];
        for level in Level::available() {
            for (i, ties) in ties.iter().enumerate() {
                // Only the second column, and nothing that has a bound, between two inputs that see the first.
                let (left_out, greedy) = screened(level, ties, &[[1.0, 0.0], [0.0, 2.0], [NAN, 1.0], [-2.0, 0.0]]);
                let (token, logit) = (VOCAB as u32 - 1, 2.0 * (VOCAB - 1) as f32);
                let expected = if i < 4 { Greedy { token, logit } } else { NOTHING };
                assert_eq!(greedy[1], expected, "{level:?}, ties {i}");
                assert_eq!(left_out.contains(&1), i == 4, "{level:?}, ties {i}: {left_out:?}");
                for row in [0, 2] {
                    assert!(left_out.contains(&row), "{level:?}, ties {i}: {left_out:?}");
                    assert_eq!(greedy[row as usize], NOTHING, "{level:?}, ties {i}");
                }
            }
        }
    }

    #[test]
    fn a_few_tied_logits_are_summed_one_by_one() {
        for level in Level::available() {
            let few = |i: usize| if i % 256 == 255 { 1.0 } else { 0.5 };
            let (left_out, greedy) = screened(level, few, &[[1.0, 0.0], [1.0, 0.0]]);
            assert_eq!(left_out, [0; 0], "{level:?}");
            assert_eq!(greedy, [Greedy { token: 255, logit: 1.0 }; 2], "{level:?}");
        }
    }

    /// Their tiles are at most half of all.
    #[test]
    fn the_most_candidates_take_no_longer_than_all_rows() {
        assert_eq!([0, 63, 64, 4096, 201_088].map(most_candidates), [0, 0, 1, 64, 3142]);
    }

    #[test]
    fn steps_without_an_estimate_follow_one_that_excluded_too_little() {
        let mut worth = Worth::default();
        for (left_out, without) in [(0, 0), (2, 0), (3, STEPS_WITHOUT), (4, STEPS_WITHOUT), (1, 0)] {
            assert!(worth.estimates());
            worth.judge(4, left_out);
            assert!((0..without).all(|_| !worth.estimates()));
        }
        assert!(worth.estimates());
    }

    fn candidates(least: f32, rows: &[(u32, f32)]) -> Candidates {
        Candidates {
            rows: rows.to_vec(),
            ..Candidates::new(least)
        }
    }

    #[test]
    fn rows_below_the_bound_do_not_count_as_candidates() {
        let mut all = candidates(0.0, &[(0, 0.5), (1, 0.5), (2, 1.5)]);
        all.merge(candidates(1.0, &[(3, 1.5)]), 3).unwrap();
        assert!(all.left_out, "two of four are left, more than half of the three");
        let mut all = candidates(0.0, &[(0, 0.5), (1, 0.5), (2, 0.7)]);
        all.merge(candidates(1.0, &[(3, 1.5)]), 3).unwrap();
        assert_eq!((all.left_out, &all.rows[..]), (false, &[(3, 1.5)][..]));
        all.merge(candidates(0.0, &[(4, NAN), (5, 2.0)]), 3).unwrap();
        assert_eq!((all.left_out, all.rows.len(), all.least), (false, 3, 1.0));
    }

    #[test]
    fn the_estimate_is_done_when_all_inputs_are_left_out() {
        let screen = Screen {
            drawable: VOCAB,
            norms: &[],
            errors: &[],
            most: 3,
            all: Mutex::new(vec![candidates(0.0, &[]), candidates(0.0, &[])]),
        };
        let many = || candidates(0.0, &[(0, 1.0); 4]);
        screen.end(vec![many(), candidates(0.0, &[])]).unwrap();
        assert!(!screen.is_done());
        assert!(screen.begin().unwrap()[0].left_out);
        screen.end(vec![candidates(0.0, &[]), many()]).unwrap();
        assert!(screen.is_done());
        assert!(screen.all.lock().unwrap().iter().all(|all| all.rows.is_empty()));
    }
}
