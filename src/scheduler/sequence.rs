//! A running or waiting request.

use super::lending::Growing;
use crate::batch::{Draw, RowScore};
use crate::error::Result;
use crate::grammar::Matcher;
use crate::memory::{self, Purpose};
use crate::random::{coin, next_state, request_seed, state_after};
use crate::request::{Answer, End, Outlet, Request, Sampling};

/// The most tokens to reserve memory for when a sequence starts; longer answers reallocate.
pub(super) const RESERVED_TOKENS: usize = 1 << 16;

/// Empty block tables of a sequence, with room for all blocks that it may have.
#[derive(Debug)]
pub struct Tables {
    pub(super) full: Vec<u32>,
    /// Blocks of the full layers for the prompt, and the most there may be.
    pub(super) first_full: usize,
    pub(super) most_full: usize,
    pub(super) window: Vec<u32>,
    /// Behind the tokens of the answer that are in the prompt.
    pub(super) matcher: Option<Box<dyn Matcher>>,
}

/// A request's tokens, how many of them the model has been fed, and its blocks.
#[derive(Debug)]
pub(super) struct Sequence {
    /// Without its prompt, which is in `tokens`.
    request: Request,
    /// The prompt, then what was sampled: the token fed at position `p` is `tokens[p]`.
    pub(super) tokens: Vec<u32>,
    n_prompt: usize,
    /// The state of the random number generator before the next token to be sampled.
    rng_state: u64,
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
    /// The first so many rows were committed, or were others' that it shared, before it was preempted. What it does not
    /// share now is computed again, for its keys and values alone.
    recomputed: usize,
    /// How many blocks of the full layers it had when it was preempted: it is taken to come to as many again.
    had_blocks: usize,
    /// Block table of the full layers, with room for all it may have; empty while waiting.
    pub(super) full: Vec<u32>,
    /// How many blocks that table begins with, and the most that it can have.
    pub(super) first_full: usize,
    pub(super) most_full: usize,
    /// Block table of the windowed layers, a ring of blocks, with room for all it will have; empty while waiting.
    pub(super) window: Vec<u32>,
    /// The first so many blocks of the full layers are nodes of the tree of beginnings.
    pub(super) nodes: usize,
    /// The first so many nodes were there when it started.
    pub(super) found: usize,
    /// The first so many nodes it does not compute: all that were there, but those whose windows are gone.
    pub(super) shared: usize,
    /// The first so many of these are held by younger sequences, too, and are free only when those have ended.
    pub(super) elsewhere: usize,
    /// Whether it waits for another sequence to compute the blocks that it shares.
    pub(super) awaits_beginning: bool,
    /// How far the answer has come in its grammar, if it has one.
    pub(super) matcher: Option<Box<dyn Matcher>>,
}

impl Sequence {
    /// A sequence that waits.
    pub(super) fn new(mut request: Request, tables: Tables) -> Self {
        let tokens = std::mem::take(&mut request.prompt);
        Self {
            n_prompt: tokens.len(),
            tokens,
            rng_state: request.sampling.rng_state,
            request,
            position: 0,
            planned: 0,
            last_step: 0,
            on_device: false,
            wrong_steps: 0,
            recomputed: 0,
            had_blocks: 0,
            full: tables.full,
            first_full: tables.first_full,
            most_full: tables.most_full,
            window: tables.window,
            nodes: 0,
            found: 0,
            shared: 0,
            elsewhere: 0,
            awaits_beginning: false,
            matcher: tables.matcher,
        }
    }

    /// What the request's answer is known by.
    pub(super) fn number(&self) -> usize {
        self.request.number
    }

    pub(super) fn sampling(&self) -> &Sampling {
        &self.request.sampling
    }

    pub(super) fn max_positions(&self) -> usize {
        self.request.max_positions
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
        self.planned < self.request.max_positions
    }

    /// How many blocks of the full layers it does not have yet.
    pub(super) fn may_ask_for(&self) -> usize {
        self.most_full - self.full.len()
    }

    /// How many blocks are free for others when it and all older ones have ended.
    pub(super) fn frees(&self) -> usize {
        self.full.len() - self.elsewhere + self.window.len()
    }

    /// As lending sees it.
    pub(super) fn growing(&self) -> Growing {
        Growing {
            held: self.frees(),
            length: self.length(),
            more: self.may_ask_for(),
            certain: self.had_blocks.saturating_sub(self.full.len()),
        }
    }

    /// As lending sees it when it starts with a ring of so many blocks.
    pub(super) fn starting(&self, ring: usize) -> Growing {
        Growing {
            length: self.had_blocks.saturating_sub(self.first_full),
            certain: self.had_blocks.saturating_sub(self.first_full),
            ..Growing::starting(self.first_full + ring, self.most_full + ring)
        }
    }

    /// How many blocks of the full layers it has, or has had, beyond those of its prompt.
    pub(super) fn length(&self) -> usize {
        self.full.len().max(self.had_blocks) - self.first_full
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
        position + 1 >= self.tokens.len()
    }

    /// Whether the row at `position` was committed before.
    pub(super) fn is_recomputed(&self, position: usize) -> bool {
        position < self.recomputed
    }

    /// How many of its first rows had been computed or shared before it started last, here or by a replica that failed.
    fn known(&self) -> usize {
        self.recomputed.max(self.request.lost)
    }

    /// How many of its rows from `position` to the next one to plan were known before.
    pub(super) fn rows_recomputed(&self, position: usize) -> usize {
        self.known().min(self.planned).saturating_sub(position)
    }

    /// The tokens of its prompt that it does not compute, and did not when it started before.
    pub(super) fn newly_shared(&self) -> usize {
        self.position.saturating_sub(self.known())
    }

    /// Its committed rows will be computed again, and of those that it shares what it will not share then. Gives how
    /// many others are in flight, which nobody will commit.
    pub(super) fn give_up_rows(&mut self) -> usize {
        if !self.awaits_beginning {
            self.recomputed = self.recomputed.max(self.position);
        }
        self.had_blocks = self.had_blocks.max(self.full.len());
        self.planned.saturating_sub(self.position.max(self.known()))
    }

    /// It waits again, with the tokens that it has.
    pub(super) fn take_back(&mut self) {
        (self.position, self.planned) = (0, 0);
        (self.wrong_steps, self.on_device) = (0, false);
    }

    /// How many rows it has been planned to be fed, its whole prompt among them.
    pub(super) fn fed(&self) -> usize {
        self.planned.max(self.n_prompt)
    }

    /// Whether it is asked for log-probabilities.
    pub(super) fn is_scored(&self) -> bool {
        self.request.logprobs.answer || self.request.logprobs.prompt
    }

    /// Whether the logits of all rows of its prompt are wanted.
    pub(super) fn scores_prompt(&self) -> bool {
        self.request.logprobs.prompt
    }

    /// What is wanted of the logits at `position`, which is planned, beside the next token.
    pub(super) fn score(&self, position: usize) -> Option<RowScore> {
        let logprobs = self.request.logprobs;
        let next = position + 1;
        // The answer's tokens in the prompt have their scores from where they were sampled.
        let is_prompt = next + self.request.answered < self.n_prompt;
        let is_wanted = if is_prompt {
            logprobs.prompt
        } else {
            logprobs.answer && self.samples_at(position)
        };
        is_wanted.then(|| RowScore {
            next: self.tokens.get(next).copied().filter(|_| is_prompt),
            top: logprobs.top,
        })
    }

    /// How the token behind `position`, which is planned, is sampled. Steps in flight may still sample tokens before
    /// it.
    pub(super) fn draw(&self, position: usize) -> Draw {
        let Sampling { temperature, topp, .. } = self.request.sampling;
        if self.request.sampling.is_greedy() || !self.samples_at(position) {
            return Draw::GREEDY;
        }
        Draw {
            temperature,
            topp,
            coin: coin(self.rng_state, self.ahead(position)),
        }
    }

    /// The random number with which it is sampled again if a grammar forbids it; `None` without a grammar.
    pub(super) fn second_coin(&self, position: usize) -> Option<f32> {
        self.request.grammar.as_ref()?;
        let state = state_after(self.rng_state, self.ahead(position));
        Some(coin(request_seed(state, 1), 0))
    }

    /// How many tokens are still to be sampled before the one behind `position`.
    fn ahead(&self, position: usize) -> usize {
        (position + 1).saturating_sub(self.tokens.len())
    }

    /// Stores the token sampled at the last committed position; gives how the answer ends with it, if it does.
    pub(super) fn store(&mut self, token: u32) -> Result<Option<End>> {
        memory::push(&mut self.tokens, token, Purpose::Requests)?;
        if let Some(matcher) = &mut self.matcher {
            matcher.take(token);
        }
        if !self.request.sampling.is_greedy() {
            self.rng_state = next_state(self.rng_state);
        }
        let answered = self.tokens.len() - self.n_prompt + self.request.answered;
        let end = self.request.ends.end(token);
        let end = end.filter(|_| answered >= self.request.min_tokens);
        Ok(end.or((self.position == self.request.max_positions).then_some(End::Length)))
    }

    /// Whether its tokens are handed over one by one.
    pub(super) fn hands_over_tokens(&self) -> bool {
        self.request.outlet == Outlet::Tokens
    }

    /// The answer.
    pub(super) fn into_answer(mut self) -> Answer {
        self.tokens.drain(..self.n_prompt);
        Answer {
            number: self.request.number,
            tokens: self.tokens,
            rng_state: self.rng_state,
        }
    }

    /// The request as it is to start again: as it was submitted, but behind the tokens that have been handed over.
    pub(super) fn into_request(mut self) -> Request {
        self.request.lost = self.known();
        if self.hands_over_tokens() {
            self.request.answered += self.tokens.len() - self.n_prompt;
            self.request.sampling.rng_state = self.rng_state;
        } else {
            self.tokens.truncate(self.n_prompt);
        }
        self.request.prompt = self.tokens;
        self.request
    }
}
