//! A step's activations.

use crate::config::ModelConfig;
use crate::error::{Error, Result};
use crate::memory::{self, Purpose};

/// Activations `[rows, width]` in float32.
#[derive(Clone, Debug)]
pub struct Buffer {
    pub(super) width: usize,
    pub(super) values: Vec<f32>,
}

impl Buffer {
    /// Allocates memory for `max_rows` rows. The buffer has no rows yet.
    pub fn new(max_rows: usize, width: usize) -> Result<Self> {
        Ok(Self {
            width,
            values: room(max_rows, width)?,
        })
    }

    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.values.len() / self.width
    }

    /// `[rows, width]`
    pub fn values(&self) -> &[f32] {
        &self.values
    }

    /// `[rows, width]`
    pub fn values_mut(&mut self) -> &mut [f32] {
        &mut self.values
    }

    /// Sets the number of rows. The values of the rows are unspecified.
    pub fn set_rows(&mut self, rows: usize) -> Result<()> {
        memory::resize(&mut self.values, rows * self.width, 0.0, Purpose::Step)
    }

    pub(super) fn row(&self, row: usize) -> &[f32] {
        &self.values[row * self.width..][..self.width]
    }
}

/// Memory of the residual stream and of its rows' experts.
#[derive(Clone, Debug)]
pub struct ResidualMemory {
    /// `[T, H]`
    pub x: Buffer,
    /// The rows' experts in the latest layer.
    pub routes: Routes,
}

impl ResidualMemory {
    /// Allocates memory for `max_rows` rows of a model.
    pub fn new(config: &ModelConfig, max_rows: usize) -> Result<Self> {
        Ok(Self {
            x: Buffer::new(max_rows, config.hidden_dim)?,
            routes: Routes::new(config, max_rows)?,
        })
    }
}

/// The residual stream after the router: its rows, their experts, and the experts' inputs.
#[derive(Debug)]
pub struct Routed<'x, 't> {
    /// The residual stream, and each row's experts.
    pub memory: &'x mut ResidualMemory,
    /// The experts' inputs `[T, H]`.
    pub t: &'t Buffer,
}

/// Rotated queries.
#[derive(Clone, Copy, Debug)]
pub struct Queries<'m> {
    /// `[T, D * (Nq + 2 Nkv)]`, the queries first in each row.
    pub(super) qkv: &'m Buffer,
    /// The layer in whose KV cache the keys and values are.
    pub(super) layer: usize,
}

/// The error when the size of an activation overflows.
pub(super) const OVERFLOW: Error = Error::Overflow("a step's activations");

/// An empty vector with the capacity for `[rows, width]`.
fn room<T>(rows: usize, width: usize) -> Result<Vec<T>> {
    memory::room(rows.checked_mul(width).ok_or(OVERFLOW)?, Purpose::Step)
}

/// The experts of each row, grouped by expert.
#[derive(Clone, Debug)]
pub struct Routes {
    /// The experts of each row, the largest weight first: `[rows, K]`.
    pub experts: Vec<u32>,
    /// The weights of these experts (softmax over the selected ones), `[rows, K]`.
    pub shares: Vec<f32>,
    /// A *pick* is a pair of a row and one of its experts. Picks are grouped by expert; those of expert e are
    /// `offsets[e]..offsets[e + 1]`, in the order of rows. `[E + 1]`
    pub(super) offsets: Vec<usize>,
    /// The row of each pick.
    pub(super) rows: Vec<u32>,
    /// The weight of each pick.
    pub(super) pick_shares: Vec<f32>,
    /// 0, 1, 2, ...: each pick's row in the experts' inner activations.
    pub(super) picks: Vec<u32>,
    pub(super) logits: Buffer,
}

impl Routes {
    /// Allocates memory for `max_rows` rows of a model.
    pub fn new(config: &ModelConfig, max_rows: usize) -> Result<Self> {
        let k = config.experts_per_token;
        let n = max_rows.checked_mul(k).and_then(|picks| u32::try_from(picks).ok());
        let picks = memory::collect(0..n.ok_or(OVERFLOW)?, Purpose::Step)?;
        Ok(Self {
            experts: room(max_rows, k)?,
            shares: room(max_rows, k)?,
            offsets: memory::filled(0, config.n_experts + 1, Purpose::Step)?,
            rows: room(max_rows, k)?,
            pick_shares: room(max_rows, k)?,
            picks,
            logits: Buffer::new(max_rows, config.n_experts)?,
        })
    }

    /// Removes all rows, and allocates memory for `picks` picks.
    pub(super) fn begin(&mut self, picks: usize) -> Result<()> {
        self.experts.clear();
        self.shares.clear();
        memory::reserve(&mut self.experts, picks, Purpose::Step)?;
        memory::reserve(&mut self.shares, picks, Purpose::Step)
    }

    /// Groups the picks in `experts` and `shares` by expert (a counting sort).
    pub fn group(&mut self, experts_per_token: usize) -> Result<()> {
        self.offsets.fill(0);
        for &e in &self.experts {
            self.offsets[e as usize + 1] += 1;
        }
        for e in 1..self.offsets.len() {
            self.offsets[e] += self.offsets[e - 1];
        }
        memory::resize(&mut self.rows, self.experts.len(), 0, Purpose::Step)?;
        memory::resize(&mut self.pick_shares, self.experts.len(), 0.0, Purpose::Step)?;
        // Here `offsets[e]` is the start of expert e's picks, and moves to their end, the start of the next expert's.
        for (i, (&e, &share)) in self.experts.iter().zip(&self.shares).enumerate() {
            let at = &mut self.offsets[e as usize];
            self.rows[*at] = (i / experts_per_token) as u32;
            self.pick_shares[*at] = share;
            *at += 1;
        }
        self.offsets.rotate_right(1);
        self.offsets[0] = 0;
        Ok(())
    }

    pub(super) fn groups<'a>(&'a self, of: &'a [u32]) -> impl Iterator<Item = &'a [u32]> {
        self.offsets.windows(2).map(|w| &of[w[0]..w[1]])
    }

    pub(super) fn experts_used(&self) -> usize {
        self.offsets.windows(2).filter(|w| w[1] > w[0]).count()
    }
}
