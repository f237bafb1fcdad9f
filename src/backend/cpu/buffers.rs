//! What a step's operations hand to each other.

use crate::error::{Error, Result};
use crate::memory::{self, Purpose};
use crate::model::ModelConfig;

/// Activations `[rows, width]` in float32.
#[derive(Clone, Debug)]
pub struct Buffer {
    pub(super) width: usize,
    pub(super) values: Vec<f32>,
}

impl Buffer {
    /// Room for `max_rows` rows, none of them there yet.
    pub fn new(max_rows: usize, width: usize) -> Result<Self> {
        Ok(Self {
            width,
            values: room(max_rows, width)?,
        })
    }

    /// Rows there are.
    pub fn rows(&self) -> usize {
        self.values.len() / self.width
    }

    /// `[rows, width]`
    pub fn values(&self) -> &[f32] {
        &self.values
    }

    /// The values, to be written.
    pub fn values_mut(&mut self) -> &mut [f32] {
        &mut self.values
    }

    /// Makes it hold so many rows; their values are whatever they were.
    pub fn set_rows(&mut self, rows: usize) -> Result<()> {
        memory::resize(&mut self.values, rows * self.width, 0.0, Purpose::Step)
    }

    pub(super) fn row(&self, row: usize) -> &[f32] {
        &self.values[row * self.width..][..self.width]
    }
}

/// Memory of the residual stream, and of the experts that its rows are sent to.
#[derive(Clone, Debug)]
pub struct ResidualMemory {
    /// `[T, H]`
    pub x: Buffer,
    /// Of the layer that ran last.
    pub routes: Routes,
}

impl ResidualMemory {
    /// Room for `max_rows` rows of a model.
    pub fn new(config: &ModelConfig, max_rows: usize) -> Result<Self> {
        Ok(Self {
            x: Buffer::new(max_rows, config.hidden_dim)?,
            routes: Routes::new(config, max_rows)?,
        })
    }
}

/// Rows of the residual stream with their experts.
#[derive(Debug)]
pub struct Routed<'x, 't> {
    /// The stream, and each row's experts.
    pub memory: &'x mut ResidualMemory,
    /// The experts' inputs `[T, H]`.
    pub t: &'t Buffer,
}

/// Rotated queries.
#[derive(Clone, Copy, Debug)]
pub struct Queries<'m> {
    /// `[T, D * (Nq + 2 Nkv)]`, the queries first in each row.
    pub(super) qkv: &'m Buffer,
    /// The layer whose cache has their keys and values.
    pub(super) layer: usize,
}

/// Where sizes of activations cannot be counted.
pub(super) const OVERFLOW: Error = Error::Overflow("a step's activations");

/// Room for `[rows, width]`.
fn room<T>(rows: usize, width: usize) -> Result<Vec<T>> {
    memory::room(rows.checked_mul(width).ok_or(OVERFLOW)?, Purpose::Step)
}

/// The experts of each row, grouped by expert.
#[derive(Clone, Debug)]
pub struct Routes {
    /// For each row its experts, the largest share first: `[rows, K]`.
    pub experts: Vec<u32>,
    /// Their shares, `[rows, K]`.
    pub shares: Vec<f32>,
    /// Where each expert's picks begin, and their end: `[E + 1]`.
    pub(super) offsets: Vec<usize>,
    /// The row of each pick, grouped by expert, rows in order.
    pub(super) rows: Vec<u32>,
    /// The share of each pick.
    pub(super) pick_shares: Vec<f32>,
    /// 0, 1, 2, ...: the picks as rows of the experts' inner activations.
    pub(super) picks: Vec<u32>,
    pub(super) logits: Buffer,
}

impl Routes {
    /// Room for `max_rows` rows of a model.
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

    /// Forgets all rows and makes room for so many picks.
    pub(super) fn begin(&mut self, picks: usize) -> Result<()> {
        self.experts.clear();
        self.shares.clear();
        memory::reserve(&mut self.experts, picks, Purpose::Step)?;
        memory::reserve(&mut self.shares, picks, Purpose::Step)
    }

    /// Groups `experts` and `shares` by expert.
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
        // Filling moves each expert's offset to its end, which is the next one's begin.
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
