//! What one step gives.

use std::ops::Deref;
use std::sync::Arc;

/// What of each wanted row the host needs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Want {
    /// The largest logit and its lowest index.
    Greedy,
    /// The same, and tokens drawn by the plan's coins, if the replica draws; else whole rows.
    Draws {
        /// Above 0, and finite.
        temperature: f32,
        /// The mass of the nucleus; outside of (0, 1) all tokens are drawn from.
        topp: f32,
    },
    /// The largest logit, its lowest index, and the whole row.
    Logits,
}

/// A row's largest logit.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Greedy {
    /// The lowest index among the largest logits; 0 if all are NaN.
    pub token: u32,
    /// Its logit.
    pub logit: f32,
}

/// What one step gave, in the order of the plan's logits rows.
#[derive(Clone, Debug, Default)]
pub struct StepOutput {
    /// One a row.
    pub greedy: Vec<Greedy>,
    /// The token drawn from each row; `None` where that is left to the host. Empty if [`Want::Draws`] was not asked for,
    /// or made whole rows.
    pub drawn: Vec<Option<u32>>,
    /// `[rows, vocab]`, or empty if only [`Want::Greedy`] was asked for, or tokens are drawn.
    pub logits: Logits,
}

/// Whole rows of logits, read where the replica left them: hundreds of megabytes a step are not copied once more.
#[derive(Clone)]
pub enum Logits {
    /// In memory of their own.
    Own(Vec<f32>),
    /// In memory of the replica, which does not write to it before the last clone of this is gone.
    Lent(Arc<dyn AsRef<[f32]> + Send + Sync>),
}

impl Logits {
    /// Gives back what was lent. Values in memory of their own stay.
    pub fn give_back(&mut self) {
        if let Self::Lent(_) = self {
            *self = Self::default();
        }
    }

    /// Memory to write to; what was lent is given back.
    pub fn own(&mut self) -> &mut Vec<f32> {
        self.give_back();
        match self {
            Self::Own(values) => values,
            Self::Lent(_) => unreachable!("given back above"),
        }
    }

    /// No values; what was lent is given back.
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
