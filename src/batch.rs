//! The plan of one step: which tokens of which sequences go through the model together; and what the step gives.
//!
//! The scheduler writes the plan, the replica reads it. It is flat on purpose, so that a device can take it as it is. How
//! many positions a KV block has is the replica's choice, here `B`.

mod output;

pub use output::{Greedy, Logits, StepOutput, Want};

use std::ops::Range;

/// Consecutive tokens of one sequence within a step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Chunk {
    /// The scheduler's handle of the sequence.
    pub sequence: usize,
    /// Its first row in the step.
    pub first_row: usize,
    /// How many rows.
    pub rows: usize,
    /// The position of the first row's token; the KV cache holds all positions before it.
    pub first_position: usize,
    /// The sequence's block table of the full layers, in [`StepPlan::tables`]: position `p` lies in the block
    /// `tables[full.start + p / B]`.
    pub full: Range<usize>,
    /// The sequence's ring of the windowed layers, in [`StepPlan::tables`]: position `p` lies in the block
    /// `tables[window.start + p / B % window.len()]`. Empty if the model has no windowed layer.
    pub window: Range<usize>,
}

/// A row whose logits are wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LogitsRow {
    /// The row within the step.
    pub row: usize,
    /// The scheduler's handle of its sequence.
    pub sequence: usize,
    /// The position of the row's token.
    pub position: usize,
    /// Whether the next token is to be sampled from it (else the logits are wanted for recording only).
    pub sample: bool,
}

/// One step.
#[derive(Clone, Debug, Default)]
pub struct StepPlan {
    /// The token of each row; below zero: `-1 - sequence`, the token sampled last in that sequence's slot, which the
    /// device still has.
    pub tokens: Vec<i32>,
    /// The position of each row's token in its sequence.
    pub positions: Vec<u32>,
    /// The sequences the rows belong to, in order of their rows; together they cover all rows.
    pub chunks: Vec<Chunk>,
    /// How many of the chunks, the first ones, belong to sequences past their prompt; they have one row each. It is
    /// the sequence's own state that counts: a prompt's chunk of one row is not among them.
    pub decode_chunks: usize,
    /// Block tables, as the chunks point to them.
    pub tables: Vec<u32>,
    /// The rows whose logits are wanted, in order of rows.
    pub logits: Vec<LogitsRow>,
    /// The number in [0, 1) that the token of each such row is drawn by; empty unless the replica draws.
    pub coins: Vec<f32>,
}

impl StepPlan {
    /// Rows in the step.
    pub fn rows(&self) -> usize {
        self.tokens.len()
    }

    /// Forgets everything but the memory.
    pub fn clear(&mut self) {
        self.tokens.clear();
        self.positions.clear();
        self.chunks.clear();
        self.decode_chunks = 0;
        self.tables.clear();
        self.logits.clear();
        self.coins.clear();
    }
}
