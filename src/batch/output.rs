//! A step's output.

use super::{MOST_TOP, StepPlan};
use std::ops::Deref;
use std::sync::Arc;

/// What the host needs of each of the plan's logits rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Want {
    /// The argmax. Of the rows [drawn](super::LogitsRow::is_drawn) also the token sampled, if the replica samples; else
    /// their logits. Their temperatures are above 0 and finite. Of the rows that have
    /// [a grammar](super::LogitsRow::second_coin) also the logits, which from a replica that samples must be
    /// [fetched](crate::replica::Replica::fetch). Of the rows that are [scored](super::RowScore) what their
    /// log-probabilities take, which not every replica gives.
    Tokens,
    /// The argmax, and the logits of all rows.
    Logits,
}

impl Want {
    /// Whether a replica that samples does it in this step.
    pub fn draws(self, plan: &StepPlan) -> bool {
        self == Self::Tokens && plan.draws()
    }

    /// Whether a replica that samples keeps logits in this step since a grammar may forbid what it has sampled.
    pub fn keeps_logits(self, plan: &StepPlan) -> bool {
        self == Self::Tokens && plan.has_grammars()
    }

    /// Whether a replica that scores does it in this step.
    pub fn scores(self, plan: &StepPlan) -> bool {
        self == Self::Tokens && plan.is_scored()
    }
}

/// A row's argmax.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Greedy {
    /// The lowest index among the largest logits; 0 if all are NaN.
    pub token: u32,
    /// The largest logit.
    pub logit: f32,
}

/// What the log-probabilities of a row's tokens are computed from.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct FoundScore {
    /// The token that the replica took for the next one.
    pub token: u32,
    /// Its logit.
    pub logit: f32,
    /// The row's largest logit.
    pub largest: f32,
    /// The sum of `e^(logit - largest)` over the row; NaN: whole rows must be
    /// [fetched](crate::replica::Replica::fetch).
    pub sum: f64,
    /// As many of the most probable tokens as are wanted, with their logits, of equal ones the lowest first.
    pub top: [(u32, f32); MOST_TOP],
}

/// A step's output, in the order of the plan's logits rows.
#[derive(Clone, Debug, Default)]
pub struct StepOutput {
    /// The argmax of each row.
    pub greedy: Vec<Greedy>,
    /// The token sampled from each row; `None` if that is left to the host, and anything for rows that are not drawn.
    /// Empty unless the replica samples, rows are drawn, and [`Want::Tokens`] was asked for.
    pub drawn: Vec<Option<u32>>,
    /// Of each row, where it is scored, and anything for the others. Empty unless rows are, the replica
    /// [scores](crate::replica::Replica::scores), and [`Want::Tokens`] was asked for.
    pub scores: Vec<FoundScore>,
    /// `[rows, vocab]`: with [`Want::Logits`] all rows; with [`Want::Tokens`] those that are
    /// [for the host](super::LogitsRow::is_for_host), if the replica does not sample.
    pub logits: Logits,
}

/// Whole rows of logits. They may be in the replica's memory, so that hundreds of megabytes a step are not copied
/// again.
#[derive(Clone)]
pub enum Logits {
    /// In a vector.
    Own(Vec<f32>),
    /// In the replica's memory, which it does not write to until the last clone is dropped.
    Lent(Arc<dyn AsRef<[f32]> + Send + Sync>),
}

impl Logits {
    /// Drops a reference to the replica's memory. Values in a vector stay.
    pub fn give_back(&mut self) {
        if let Self::Lent(_) = self {
            *self = Self::default();
        }
    }

    /// A vector to write to. Drops a reference to the replica's memory.
    pub fn own(&mut self) -> &mut Vec<f32> {
        self.give_back();
        match self {
            Self::Own(values) => values,
            Self::Lent(_) => unreachable!("given back above"),
        }
    }

    /// Removes all values. Drops a reference to the replica's memory.
    pub fn clear(&mut self) {
        self.own().clear();
    }
}

impl Default for Logits {
    fn default() -> Self {
        Self::Own(Vec::new())
    }
}

impl Deref for Logits {
    type Target = [f32];

    fn deref(&self) -> &[f32] {
        match self {
            Self::Own(values) => values,
            Self::Lent(values) => (**values).as_ref(),
        }
    }
}

impl std::fmt::Debug for Logits {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let whose = if matches!(self, Self::Own(_)) { "own" } else { "lent" };
        write!(f, "{} {whose} values", self.len())
    }
}
