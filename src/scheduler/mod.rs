//! Which tokens of which requests go into the next step.
//!
//! Continuous batching over a paged KV cache: requests wait in one queue, start as soon as a slot and blocks are
//! free, and leave at their end token or last position. Each step feeds one token of every decoding sequence, then
//! as much of the others' prompts as the rest of the step holds, first come, first served.
//!
//! A sequence starts only when all blocks it can ever use are free, and keeps them to its end. Nothing is thus ever
//! preempted, and nobody waits for a block while holding one: there is no deadlock. As [`Limits::check`] asks for a
//! row and a logits row for each running sequence whose turn it is, every decoding sequence moves in every round of
//! turns, and so does the oldest one still in its prompt: nobody starves.
//!
//! The scheduler touches no device. The way round is [`Scheduler::plan`], the replica's `submit`,
//! [`Scheduler::begin`], the replica's `collect`, the sampler, and [`Scheduler::commit`]. A plan leaves no trace before
//! it begins.
//!
//! Up to [`Limits::depth`] steps are under way, so that the device computes one while the host prepares the next. A
//! plan is then made before the tokens of the step before it are known, in one of two ways ([`Limits::speculate`]):
//!
//! - The device finds the token itself and still has it: the plan says so instead of naming it. Whether it was an end
//!   token shows one step late; the row planned meanwhile is passed over when it comes back. So it is with a token that
//!   the device had to leave to the host ([`Scheduler::mend`]): the row planned meanwhile was fed another one. The
//!   sequence's next row is fed at the same position, and writes its keys and values over the wrong ones before it
//!   attends to them.
//! - The host samples: sequences with a token to be sampled sit out, and the others go. A step takes at most its
//!   share of the sequences, so that half of them compute while the other half is sampled. Whoever joins or leaves,
//!   the halves are even again one round later, because no step takes more than half of all there are.
//!
//! With a depth of more than two the device computes `depth - 1` steps at once, one behind the other in stages, and one
//! more waits. A sequence's next row can begin only when its last one has passed all stages. So its tokens may be on the
//! device, but the sequences take turns all the same: of the steps computed at once each has sequences of its own. Only
//! where nobody else has anything to do is a sequence planned before its turn.

mod blocks;
mod limits;
mod sequence;

pub use blocks::BlockCounts;
pub use limits::{Limits, steps_at_once};

use crate::batch::{Chunk, LogitsRow, StepPlan};
use crate::error::{Error, Result};
use crate::memory::{self, Purpose};
use blocks::BlockPool;
use sequence::{RESERVED_TOKENS, Sequence};
use std::collections::VecDeque;
use std::ops::Range;

/// Tokens that end an answer; they are stored and counted as its last.
pub const END_TOKENS: [u32; 2] = [199_999, 200_002];

/// A request with its whole answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finished {
    /// The request's index.
    pub request: usize,
    /// The tokens sampled, with the end token if there was one.
    pub tokens: Vec<u32>,
}

/// A request given back without an answer, as it was submitted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unfinished {
    /// The request's index.
    pub request: usize,
    /// Its prompt.
    pub prompt: Vec<u32>,
    /// The most positions it may be fed.
    pub max_positions: usize,
}

/// Sequences, their blocks, and the order in which they are served.
#[derive(Debug)]
pub struct Scheduler {
    limits: Limits,
    full: BlockPool,
    window: BlockPool,
    waiting: VecDeque<Sequence>,
    /// The running sequences by their handle.
    slots: Vec<Option<Sequence>>,
    free_slots: Vec<usize>,
    /// Steps under way with a row of the slot's sequence, the one that has left included.
    under_way: Vec<usize>,
    /// Steps begun so far.
    steps: u64,
    /// Handles in the order in which their sequences started.
    running: Vec<usize>,
    /// Empty, with room for all sequences there are: a device that fails leaves no time to ask for memory.
    unfinished: Vec<Unfinished>,
}

impl Scheduler {
    /// A scheduler with nothing to do yet.
    pub fn new(limits: Limits) -> Result<Self> {
        let limits = limits.check()?;
        let slots = limits.max_batch;
        Ok(Self {
            full: BlockPool::new(limits.full_blocks as u32, slots)?,
            window: BlockPool::new(limits.window_blocks as u32, slots)?,
            waiting: VecDeque::new(),
            slots: memory::collect((0..slots).map(|_| None), Purpose::Schedule)?,
            free_slots: memory::collect((0..slots).rev(), Purpose::Schedule)?,
            under_way: memory::filled(0, slots, Purpose::Schedule)?,
            steps: 0,
            running: memory::room(slots, Purpose::Schedule)?,
            unfinished: Vec::new(),
            limits,
        })
    }

    /// Queues a request: positions `0..max_positions` are fed, first the prompt's tokens, then the sampled ones.
    /// Refuses one that could not run even with the KV cache to itself.
    pub fn submit(&mut self, request: usize, prompt: Vec<u32>, max_positions: usize) -> Result<()> {
        let n_prompt = prompt.len();
        self.check(request, n_prompt, max_positions)?;
        let mut prompt = prompt;
        self.make_room(&mut prompt, max_positions)?;
        let need = self.limits.need(n_prompt, max_positions);
        let tables = [self.full.table(need.full)?, self.window.table(need.window)?];
        self.waiting
            .push_back(Sequence::new(request, prompt, max_positions, tables));
        Ok(())
    }

    /// Asks for the memory that [`Self::submit`] will take for this prompt, so that it takes it only if it is there:
    /// for the answer, behind the prompt, and for the tables.
    pub fn make_room(&mut self, prompt: &mut Vec<u32>, max_positions: usize) -> Result<()> {
        // The token sampled at the last position is stored too, though never fed.
        let answer = (max_positions + 1).saturating_sub(prompt.len());
        memory::reserve(prompt, answer.min(RESERVED_TOKENS), Purpose::Requests)?;
        let need = self.limits.need(prompt.len(), max_positions);
        let tables = (self.full.table(need.full)?, self.window.table(need.window)?);
        self.full.give_back(tables.0);
        self.window.give_back(tables.1);
        let sequences = self.running.len() + self.waiting.len() + 1;
        memory::reserve(&mut self.unfinished, sequences, Purpose::Schedule)?;
        let more = self.waiting.try_reserve(1);
        more.map_err(|_| memory::lacking::<Sequence>(self.waiting.len() + 1, Purpose::Schedule))
    }

    /// Refuses a request that could not run even with the KV cache to itself.
    pub fn check(&self, request: usize, n_prompt: usize, max_positions: usize) -> Result<()> {
        self.limits.check_sequence(request, n_prompt, max_positions)
    }

    /// Whether a slot is free; only then may there be room.
    pub fn has_free_slot(&self) -> bool {
        !self.free_slots.is_empty()
    }

    /// Whether one more sequence could start at once, behind those submitted before.
    pub fn has_room(&mut self, n_prompt: usize, max_positions: usize) -> bool {
        self.admit();
        self.waiting.is_empty() && self.fits(n_prompt, max_positions)
    }

    /// From now on plans may name tokens that only the device knows, or not: see [`Limits::speculate`].
    pub fn speculate(&mut self, speculate: bool) {
        self.limits.speculate = speculate;
    }

    /// Gives a plan the memory of the largest step there can be: a block is in at most one table, and a sequence has at
    /// most one chunk.
    pub fn make_room_to_plan(&self, plan: &mut StepPlan) -> Result<()> {
        let limits = &self.limits;
        let logits_rows = limits.max_logits_rows.min(limits.step_tokens);
        plan.clear();
        memory::reserve(&mut plan.tokens, limits.step_tokens, Purpose::Step)?;
        memory::reserve(&mut plan.positions, limits.step_tokens, Purpose::Step)?;
        memory::reserve(&mut plan.chunks, limits.max_batch, Purpose::Step)?;
        memory::reserve(
            &mut plan.tables,
            limits.full_blocks + limits.window_blocks,
            Purpose::Step,
        )?;
        memory::reserve(&mut plan.logits, logits_rows, Purpose::Step)?;
        memory::reserve(&mut plan.coins, logits_rows, Purpose::Step)
    }

    /// Writes the next step, into a plan with room for it; `false` if there is nothing to do before one under way comes back, or at all.
    pub fn plan(&mut self, plan: &mut StepPlan) -> bool {
        self.admit();
        plan.clear();
        self.plan_decoding(plan, self.last_step_of_turn());
        self.plan_prefill(plan);
        if plan.rows() == 0
            && let Some(longest_ago) = self.ready().map(|(_, sequence)| sequence.last_step).min()
        {
            self.plan_decoding(plan, longest_ago);
        }
        plan.rows() > 0
    }

    /// Notes that the step planned last is under way; the next plan goes on behind it.
    pub fn begin(&mut self, plan: &StepPlan) {
        self.steps += 1;
        for chunk in &plan.chunks {
            self.under_way[chunk.sequence] += 1;
            if let Some(sequence) = &mut self.slots[chunk.sequence] {
                sequence.planned = chunk.first_position + chunk.rows;
                sequence.last_step = self.steps;
                sequence.on_device = self.limits.speculate;
            }
        }
    }

    /// Takes the outcome of the oldest step under way: `sampled` has one token for each of its logits rows with
    /// `sample`, in their order. Answers that are complete go to the end of `finished`. Rows that [`Self::drawing`] has
    /// no request for are passed over.
    pub fn commit(&mut self, plan: &StepPlan, sampled: &[u32], finished: &mut Vec<Finished>) -> Result<()> {
        self.check_commit(plan, sampled)?;
        memory::reserve(finished, sampled.len(), Purpose::Requests)?;
        for chunk in &plan.chunks {
            self.under_way[chunk.sequence] -= 1;
            match &mut self.slots[chunk.sequence] {
                Some(sequence) if sequence.wrong_steps > 0 => sequence.wrong_steps -= 1,
                Some(sequence) => sequence.position += chunk.rows,
                None => self.free_slot(chunk.sequence),
            }
        }
        for (row, &token) in plan.logits.iter().filter(|row| row.sample).zip(sampled) {
            let complete = match &mut self.slots[row.sequence] {
                // A row that is passed over has not moved its sequence.
                Some(sequence) if sequence.position == row.position + 1 => {
                    sequence.store(token, self.limits.ignore_end)?
                }
                _ => false,
            };
            if complete && let Some(sequence) = self.release(row.sequence) {
                finished.push(Finished {
                    request: sequence.request,
                    tokens: sequence.into_answer(),
                });
            }
        }
        Ok(())
    }

    /// Tells that the device has another token than the one just committed as a sequence's last. Rows of the sequence
    /// under way were fed with what followed from that: they are passed over, and it is planned anew.
    pub fn mend(&mut self, sequence: usize) {
        if let Some(mended) = &mut self.slots[sequence] {
            mended.planned = mended.position;
            mended.wrong_steps = self.under_way[sequence];
        }
    }

    /// The request for which the oldest step under way samples in this slot; `None` if its row there is passed over:
    /// its sequence has left since the plan, at an end token or cancelled, or was fed a wrong token.
    pub fn drawing(&self, sequence: usize) -> Option<usize> {
        let sequence = self.slots.get(sequence)?.as_ref()?;
        (sequence.wrong_steps == 0).then_some(sequence.request)
    }

    /// The request that a row of the step planned last samples for, and how many of its tokens come before that one but
    /// are not known yet.
    pub fn draws_ahead(&self, row: &LogitsRow) -> Option<(usize, usize)> {
        let sequence = self.slots.get(row.sequence)?.as_ref()?;
        let ahead = (row.position + 1).saturating_sub(sequence.tokens.len());
        Some((sequence.request, ahead))
    }

    /// Drops a request, waiting or running; `false` if it is neither.
    pub fn cancel(&mut self, request: usize) -> bool {
        let is_it = |sequence: &Sequence| sequence.request == request;
        if let Some(place) = self.waiting.iter().position(is_it) {
            return self.waiting.remove(place).is_some();
        }
        let slot = self.slots.iter().position(|slot| slot.as_ref().is_some_and(is_it));
        slot.is_some_and(|slot| self.release(slot).is_some())
    }

    /// Gives back all requests without an answer, in the order in which they came, and is then idle, with no step
    /// under way: for a device that failed. Their answers so far are dropped; they start again wherever they are
    /// submitted next.
    pub fn take_unfinished(&mut self) -> Vec<Unfinished> {
        let mut unfinished = std::mem::take(&mut self.unfinished);
        while let Some(&slot) = self.running.first() {
            unfinished.extend(self.release(slot).map(give_back));
        }
        unfinished.extend(self.waiting.drain(..).map(give_back));
        self.under_way.fill(0);
        self.free_slots.clear();
        self.free_slots.extend((0..self.slots.len()).rev());
        unfinished
    }

    /// The request behind a handle of the current plan; `None` once its sequence has left.
    pub fn request(&self, sequence: usize) -> Option<usize> {
        self.slots.get(sequence)?.as_ref().map(|sequence| sequence.request)
    }

    /// Sequences running.
    pub fn running(&self) -> usize {
        self.running.len()
    }

    /// Requests waiting to start.
    pub fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// Blocks of the KV cache that no sequence holds.
    pub fn free_blocks(&self) -> BlockCounts {
        BlockCounts {
            full: self.full.free(),
            window: self.window.free(),
        }
    }

    /// Starts waiting sequences while there is room. The first one that does not fit holds up those behind it, or a
    /// long one could wait for ever.
    fn admit(&mut self) {
        while let Some(first) = self.waiting.front() {
            let (n_prompt, max_positions) = (first.n_prompt(), first.max_positions);
            if !self.fits(n_prompt, max_positions) {
                return;
            }
            let (Some(mut sequence), Some(slot)) = (self.waiting.pop_front(), self.free_slots.pop()) else {
                return;
            };
            let need = self.limits.need(n_prompt, max_positions);
            self.full.lend(need.full, &mut sequence.full);
            self.window.lend(need.window, &mut sequence.window);
            self.slots[slot] = Some(sequence);
            self.running.push(slot);
        }
    }

    /// Whether a slot and all blocks such a sequence can ever use are free.
    fn fits(&self, n_prompt: usize, max_positions: usize) -> bool {
        let need = self.limits.need(n_prompt, max_positions);
        !self.free_slots.is_empty() && need.full <= self.full.free() && need.window <= self.window.free()
    }

    /// One row for each sequence past its prompt that was in no step behind `last_step`, or for the step's share of them.
    fn plan_decoding(&self, plan: &mut StepPlan, last_step: u64) {
        let its_turn = self.ready().filter(|(_, sequence)| sequence.last_step <= last_step);
        for (slot, sequence) in its_turn.take(self.limits.share(self.decoding().count())) {
            self.plan_chunk(plan, slot, sequence, 1);
        }
        plan.decode_chunks = plan.chunks.len();
    }

    /// Sequences in steps behind this one are computed at the same time as the step planned next.
    fn last_step_of_turn(&self) -> u64 {
        if self.limits.speculate {
            (self.steps + 1).saturating_sub(self.limits.turns() as u64)
        } else {
            self.steps
        }
    }

    /// Sequences past their prompt.
    fn decoding(&self) -> impl Iterator<Item = (usize, &Sequence)> {
        self.in_order().filter(|(_, sequence)| sequence.is_decoding())
    }

    /// Those of them that may be planned.
    fn ready(&self) -> impl Iterator<Item = (usize, &Sequence)> {
        self.decoding().filter(|(_, sequence)| self.is_ready(sequence))
    }

    /// Whether a sequence past its prompt may be planned.
    fn is_ready(&self, sequence: &Sequence) -> bool {
        sequence.has_next() && (self.limits.speculate && sequence.on_device || !sequence.awaits_token())
    }

    /// Prompts, in order, into what is left of the step. A prompt's end joins the sequences that take turns: one for
    /// which the step's share has no room waits for the next step.
    fn plan_prefill(&self, plan: &mut StepPlan) {
        let mut turns_left = self.limits.share(self.running.len()) - plan.decode_chunks;
        for (slot, sequence) in self.in_order().filter(|(_, sequence)| !sequence.is_decoding()) {
            let rows = self.chunk_rows(plan, sequence);
            if rows == 0 {
                return;
            }
            if rows == sequence.prompt_left() {
                if turns_left == 0 {
                    continue;
                }
                turns_left -= 1;
            }
            self.plan_chunk(plan, slot, sequence, rows);
        }
    }

    /// Running sequences with their handles, oldest first.
    fn in_order(&self) -> impl Iterator<Item = (usize, &Sequence)> {
        self.running
            .iter()
            .filter_map(|&slot| Some((slot, self.slots[slot].as_ref()?)))
    }

    /// Prompt rows that fit the rest of the step. When not every row's logits are wanted, those of a prompt's last
    /// row always fit, as there are at least `max_batch` logits rows.
    fn chunk_rows(&self, plan: &StepPlan, sequence: &Sequence) -> usize {
        let limits = &self.limits;
        let rows = sequence
            .prompt_left()
            .min(limits.chunk_tokens)
            .min(limits.step_tokens - plan.rows());
        if limits.record_all {
            rows.min(limits.max_logits_rows - plan.logits.len())
        } else {
            rows
        }
    }

    /// Adds the next `rows` tokens of a sequence.
    fn plan_chunk(&self, plan: &mut StepPlan, slot: usize, sequence: &Sequence, rows: usize) {
        let first_row = plan.rows();
        let positions = sequence.planned..sequence.planned + rows;
        let on_device = -1 - slot as i32;
        let tokens = positions.clone().map(|position| sequence.tokens.get(position));
        plan.tokens
            .extend(tokens.map(|token| token.map_or(on_device, |token| token.cast_signed())));
        plan.positions.extend(positions.clone().map(|position| position as u32));
        for (row, position) in (first_row..).zip(positions.clone()) {
            let sample = sequence.samples_at(position);
            if sample || self.limits.record_all {
                plan.logits.push(LogitsRow {
                    row,
                    sequence: slot,
                    position,
                    sample,
                });
            }
        }
        let full_blocks = positions
            .end
            .div_ceil(self.limits.block_tokens)
            .min(sequence.full.len());
        plan.chunks.push(Chunk {
            sequence: slot,
            first_row,
            rows,
            first_position: positions.start,
            full: append(&mut plan.tables, &sequence.full[..full_blocks]),
            window: append(&mut plan.tables, &sequence.window),
        });
    }

    /// Refuses an outcome that is not that of the oldest step under way, before anything has changed.
    fn check_commit(&self, plan: &StepPlan, sampled: &[u32]) -> Result<()> {
        let wanted = plan.logits.iter().filter(|row| row.sample).count();
        if sampled.len() != wanted {
            return Err(Error::Internal(format!(
                "a step that samples {wanted} rows came back with {} tokens",
                sampled.len()
            )));
        }
        for chunk in &plan.chunks {
            let is_under_way = self.under_way.get(chunk.sequence).is_some_and(|&steps| steps > 0);
            let is_next = |sequence: &Sequence| sequence.wrong_steps > 0 || sequence.position == chunk.first_position;
            if !is_under_way || !self.slots[chunk.sequence].as_ref().is_none_or(is_next) {
                return Err(Error::Internal(format!(
                    "a step came back that is not the oldest under way: sequence {} is not at position {}",
                    chunk.sequence, chunk.first_position
                )));
            }
        }
        Ok(())
    }

    /// Takes a sequence out of its slot and its blocks back. A step under way may still write to these blocks and
    /// read them; they can be lent again at once all the same, because the device runs steps in order: who gets them
    /// is planned later, runs later, and reads nothing it has not written. The slot itself waits, for the rows under
    /// way are known by it.
    fn release(&mut self, slot: usize) -> Option<Sequence> {
        let mut sequence = self.slots[slot].take()?;
        self.full.give_back(std::mem::take(&mut sequence.full));
        self.window.give_back(std::mem::take(&mut sequence.window));
        self.running.retain(|&running| running != slot);
        self.free_slot(slot);
        Some(sequence)
    }

    /// Hands out an empty slot again, once no step under way has rows of it.
    fn free_slot(&mut self, slot: usize) {
        if self.under_way[slot] == 0 {
            self.free_slots.push(slot);
        }
    }
}

/// A sequence as it was submitted.
fn give_back(sequence: Sequence) -> Unfinished {
    Unfinished {
        request: sequence.request,
        max_positions: sequence.max_positions,
        prompt: sequence.into_prompt(),
    }
}

/// Copies a sequence's blocks behind the tables so far and says where they are.
fn append(tables: &mut Vec<u32>, blocks: &[u32]) -> Range<usize> {
    let start = tables.len();
    tables.extend_from_slice(blocks);
    start..tables.len()
}
