//! A step's plan, that is, which tokens of which sequences go through the model together, and a step's output.
//!
//! The scheduler writes the plan, and the replica reads it. It consists of flat arrays, so that it can be copied to a
//! device. `B` below is the number of positions in a KV block, which the replica chooses.

mod output;

pub use output::{FoundScore, Greedy, Logits, StepOutput, Want};

use std::ops::Range;

/// Consecutive tokens of one sequence within a step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Chunk {
    /// The scheduler's handle of the sequence.
    pub slot: usize,
    /// The chunk's first row in the step.
    pub first_row: usize,
    /// Number of rows.
    pub rows: usize,
    /// The position of the first row's token; the KV cache holds all positions before it.
    pub first_position: usize,
    /// The sequence's block table of the full layers, in [`StepPlan::tables`]: position `p` is in block
    /// `tables[full.start + p / B]`. Sequences that begin alike share blocks that are full, and write to none of them.
    pub full: Range<usize>,
    /// The sequence's block table of the sliding-window layers, used as a ring, in [`StepPlan::tables`]: position `p`
    /// is in block `tables[window.start + p / B % window.len()]`. Empty if the model has no such layers.
    pub window: Range<usize>,
}

/// How a row's token is sampled.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Draw {
    /// 0 is greedy: the token of the largest logit, whatever the other fields are.
    pub temperature: f32,
    /// Within (0, 1): top-p (nucleus) sampling. Any other value: all tokens can be sampled.
    pub topp: f32,
    /// The random number in [0, 1) that decides.
    pub coin: f32,
}

impl Draw {
    /// The token of the largest logit.
    pub const GREEDY: Self = Self {
        temperature: 0.0,
        topp: 0.0,
        coin: 0.0,
    };

    /// Whether the token is the argmax of its logits.
    pub fn is_greedy(&self) -> bool {
        self.temperature == 0.0
    }
}

/// A row whose logits are computed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LogitsRow {
    /// The row in the step.
    pub row: usize,
    /// The scheduler's handle of the row's sequence.
    pub slot: usize,
    /// The position of the row's token.
    pub position: usize,
    /// Whether the next token is sampled from the row. If not, its logits are only recorded or scored.
    pub sample: bool,
    /// How it is sampled.
    pub draw: Draw,
    /// Whether the log-probability of the next token is wanted.
    pub score: Option<RowScore>,
    /// The random number with which the host samples again if a grammar forbids the token; `None` without a grammar.
    pub second_coin: Option<f32>,
}

/// The most of a row's most probable tokens that can be asked for: as many as `top_logprobs` of OpenAI's API.
pub const MOST_TOP: usize = 20;

/// What is wanted of a row that is scored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowScore {
    /// The next token, where that is the prompt's; otherwise it is the one sampled.
    pub next: Option<u32>,
    /// How many of the most probable tokens are wanted, too.
    pub top: usize,
}

impl LogitsRow {
    /// Whether the host may have to sample the next token, if the replica does not sample itself.
    pub fn is_for_host(&self) -> bool {
        self.is_drawn() || self.sample && self.second_coin.is_some()
    }

    /// Whether the next token is sampled with a random number.
    pub fn is_drawn(&self) -> bool {
        self.sample && !self.draw.is_greedy()
    }
}

/// The plan of a step.
#[derive(Clone, Debug, Default)]
pub struct StepPlan {
    /// The token of each row. If negative it is `-1 - slot`: the token that was sampled last in that slot, which the
    /// device keeps and the host may not know yet.
    pub tokens: Vec<i32>,
    /// The position of each row's token in its sequence.
    pub positions: Vec<u32>,
    /// The rows of each sequence, in order; together they cover all rows.
    pub chunks: Vec<Chunk>,
    /// The first `decode_chunks` chunks are of decoding sequences, with one row each. The others are prompt chunks, of
    /// one or more rows.
    pub decode_chunks: usize,
    /// The block tables of all chunks.
    pub tables: Vec<u32>,
    /// The rows whose logits are computed, in order of rows.
    pub logits: Vec<LogitsRow>,
    /// How many tokens may be sampled: those below. The logits of the others are computed, recorded and scored, and
    /// neither the argmax nor a random number finds them. `None`: all may be.
    pub drawable: Option<usize>,
}

impl StepPlan {
    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.tokens.len()
    }

    /// Empties the plan and keeps its memory.
    pub fn clear(&mut self) {
        self.tokens.clear();
        self.positions.clear();
        self.chunks.clear();
        self.decode_chunks = 0;
        self.tables.clear();
        self.logits.clear();
        self.drawable = None;
    }

    /// How many of `vocab` tokens may be sampled.
    pub fn drawable_of(&self, vocab: usize) -> usize {
        self.drawable.map_or(vocab, |drawable| drawable.min(vocab))
    }

    /// The rows in `logits` whose token is sampled with a random number.
    pub fn drawn(&self) -> impl Iterator<Item = usize> {
        (0..self.logits.len()).filter(|&row| self.logits[row].is_drawn())
    }

    /// Whether there are such rows.
    pub fn draws(&self) -> bool {
        self.drawn().next().is_some()
    }

    /// Whether a grammar may forbid the token of any row.
    pub fn has_grammars(&self) -> bool {
        self.logits.iter().any(|row| row.sample && row.second_coin.is_some())
    }

    /// Whether log-probabilities are wanted of any row.
    pub fn is_scored(&self) -> bool {
        self.logits.iter().any(|row| row.score.is_some())
    }
}
