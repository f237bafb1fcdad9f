//! What a step's operations hand to each other.

use crate::model::ModelConfig;

/// Activations `[rows, width]` in float32.
#[derive(Clone, Debug)]
pub struct Buffer {
    pub(super) width: usize,
    pub(super) values: Vec<f32>,
}

impl Buffer {
    /// Room for `max_rows` rows, none of them there yet.
    pub fn new(max_rows: usize, width: usize) -> Self {
        Self {
            width,
            values: Vec::with_capacity(max_rows * width),
        }
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
    pub fn set_rows(&mut self, rows: usize) {
        self.values.resize(rows * self.width, 0.0);
    }

    pub(super) fn row(&self, row: usize) -> &[f32] {
        &self.values[row * self.width..][..self.width]
    }
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
    pub fn new(config: &ModelConfig, max_rows: usize) -> Self {
        let picks = max_rows * config.experts_per_token;
        Self {
            experts: Vec::with_capacity(picks),
            shares: Vec::with_capacity(picks),
            offsets: vec![0; config.n_experts + 1],
            rows: Vec::with_capacity(picks),
            pick_shares: Vec::with_capacity(picks),
            picks: (0..picks as u32).collect(),
            logits: Buffer::new(max_rows, config.n_experts),
        }
    }

    /// Groups `experts` and `shares` by expert.
    pub fn group(&mut self, experts_per_token: usize) {
        self.offsets.fill(0);
        for &e in &self.experts {
            self.offsets[e as usize + 1] += 1;
        }
        for e in 1..self.offsets.len() {
            self.offsets[e] += self.offsets[e - 1];
        }
        self.rows.resize(self.experts.len(), 0);
        self.pick_shares.resize(self.experts.len(), 0.0);
        // Filling moves each expert's offset to its end, which is the next one's begin.
        for (i, (&e, &share)) in self.experts.iter().zip(&self.shares).enumerate() {
            let at = &mut self.offsets[e as usize];
            self.rows[*at] = (i / experts_per_token) as u32;
            self.pick_shares[*at] = share;
            *at += 1;
        }
        self.offsets.rotate_right(1);
        self.offsets[0] = 0;
    }

    pub(super) fn groups<'a>(&'a self, of: &'a [u32]) -> impl Iterator<Item = &'a [u32]> {
        self.offsets.windows(2).map(|w| &of[w[0]..w[1]])
    }

    pub(super) fn experts_used(&self) -> usize {
        self.offsets.windows(2).filter(|w| w[1] > w[0]).count()
    }
}
