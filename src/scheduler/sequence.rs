//! A running or waiting request.

use super::END_TOKENS;
use crate::error::Result;
use crate::memory::{self, Purpose};

/// The most tokens to reserve memory for when a sequence starts; longer answers reallocate.
pub(super) const RESERVED_TOKENS: usize = 1 << 16;

/// A request's tokens, how many of them the model has been fed, and its blocks.
#[derive(Debug)]
pub(super) struct Sequence {
    pub(super) request: usize,
    /// The prompt, then what was sampled: the token fed at position `p` is `tokens[p]`.
    pub(super) tokens: Vec<u32>,
    n_prompt: usize,
    pub(super) max_positions: usize,
    /// Positions of committed steps.
    pub(super) position: usize,
    /// The next position to plan. Positions from `position` to it are in steps in flight; when it is computed, the KV
    /// cache holds all positions before it.
    pub(super) planned: usize,
    /// The step it was in last, counted from 1; 0 before the first.
    pub(super) last_step: u64,
    /// Whether the device samples the token of the last step in flight, and keeps it.
    pub(super) on_device: bool,
    /// How many of the oldest steps in flight have a row of this sequence that is discarded.
    pub(super) wrong_steps: usize,
    /// Block table of the full layers, with room for all it may have; empty while waiting.
    pub(super) full: Vec<u32>,
    /// The most blocks that table can have.
    most_full: usize,
    /// Block table of the windowed layers, a ring of blocks, with room for all it will have; empty while waiting.
    pub(super) window: Vec<u32>,
}

impl Sequence {
    /// A sequence that waits; its tables are empty. It may have `most_full` blocks of the full layers.
    pub(super) fn new(
        request: usize,
        prompt: Vec<u32>,
        max_positions: usize,
        most_full: usize,
        [full, window]: [Vec<u32>; 2],
    ) -> Self {
        Self {
            request,
            n_prompt: prompt.len(),
            tokens: prompt,
            max_positions,
            position: 0,
            planned: 0,
            last_step: 0,
            on_device: false,
            wrong_steps: 0,
            full,
            most_full,
            window,
        }
    }

    pub(super) fn n_prompt(&self) -> usize {
        self.n_prompt
    }

    /// Whether the whole prompt has been planned.
    pub(super) fn is_decoding(&self) -> bool {
        self.planned >= self.n_prompt
    }

    /// How many tokens of the prompt are not planned yet.
    pub(super) fn prompt_left(&self) -> usize {
        self.n_prompt - self.planned
    }

    /// Whether there is a position left to plan. The last one ends the answer whatever is sampled there.
    pub(super) fn has_next(&self) -> bool {
        self.planned < self.max_positions
    }

    /// How many blocks of the full layers it does not have yet.
    pub(super) fn may_ask_for(&self) -> usize {
        self.most_full - self.full.len()
    }

    /// Whether it has no block for the next position to plan.
    pub(super) fn lacks_block(&self, block_tokens: usize) -> bool {
        self.may_ask_for() > 0 && self.has_next() && self.planned / block_tokens >= self.full.len()
    }

    /// Whether the next token to feed is still to be sampled, by a step in flight.
    pub(super) fn awaits_token(&self) -> bool {
        self.planned >= self.tokens.len()
    }

    /// Whether the logits at `position` give the next token.
    pub(super) fn samples_at(&self, position: usize) -> bool {
        position + 1 >= self.n_prompt
    }

    /// Stores the token sampled at the last committed position; returns whether the answer is complete: by an end
    /// token, unless these are ignored, or at the last position.
    pub(super) fn store(&mut self, token: u32, ignore_end: bool) -> Result<bool> {
        memory::push(&mut self.tokens, token, Purpose::Requests)?;
        Ok(!ignore_end && END_TOKENS.contains(&token) || self.position == self.max_positions)
    }

    /// The answer.
    pub(super) fn into_answer(mut self) -> Vec<u32> {
        self.tokens.drain(..self.n_prompt);
        self.tokens
    }

    /// The prompt as it was submitted.
    pub(super) fn into_prompt(mut self) -> Vec<u32> {
        self.tokens.truncate(self.n_prompt);
        self.tokens
    }
}
