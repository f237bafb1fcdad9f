//! Which tokens of which requests go into the next step.
//!
//! Continuous batching over a paged KV cache: requests wait in one queue, start as soon as a slot and blocks are
//! free, and end at an end token or their last position. Each step feeds one token of every decoding sequence, then
//! as many prompt tokens as fit the rest of the step, first come, first served (chunked prefill).
//!
//! A sequence starts with the blocks of its prompt and of its windowed layers, or goes on behind the beginning of
//! another one, whose blocks it shares (`kv_cache.rs`). It gives back those of the windowed layers that only its prompt
//! needs, gets blocks of the full layers as it grows, and keeps them to its end. It may have to wait for a block, but
//! only while older ones advance (`lending.rs` has the rules): there is no deadlock.
//! [`Limits::check`] requires a row and a logits row for each running sequence of a step, so that every decoding
//! sequence that has its block, and the oldest one in its prompt, advances in each round of steps: there is no
//! starvation.
//!
//! Where answers become longer than those before, the youngest sequence may be *preempted*: it gives its blocks back,
//! and waits again in front of all others. It keeps its tokens. When it starts again they are fed as they were before,
//! those of its answer one a step, so that its keys and values are the same to the bit also where decoding has a
//! kernel of its own; nothing is sampled, scored or recorded a second time.
//!
//! The scheduler touches no device. A step is [`Scheduler::plan`], the replica's `submit`, [`Scheduler::begin`], the
//! replica's `collect`, sampling, and [`Scheduler::commit`]. Until `begin` a plan changes nothing but who holds blocks.
//!
//! Up to [`Limits::depth`] steps are in flight, so that the device computes one while the host prepares the next. A
//! step is then planned before the tokens of the previous step are known, in one of two ways ([`Limits::plans_ahead`]):
//!
//! - The device samples and keeps the token; the plan refers to it instead of naming it. The host learns one step late
//!   that it was an end token, and discards the row planned meanwhile. A token that the device had to leave to the host
//!   ([`Scheduler::mend`]) is handled alike: the row planned meanwhile was fed a wrong token and is discarded. The
//!   sequence's next row has the same position, and overwrites the wrong keys and values before it attends to them.
//! - The host samples: sequences whose token is still to be sampled are left out of the step. A step takes at most half
//!   of the sequences, so that the device computes one half while the host samples the other. When sequences start or
//!   end, the halves are equal again one round later, because no step takes more than half of all sequences.
//!
//! With a depth of more than two the device computes `depth - 1` steps at once, one behind the other in stages, and one
//! more waits. A sequence's next row can begin only when its last one has passed all stages. So its tokens may be on
//! the device, but the sequences take turns all the same: of the steps computed at once each has sequences of its own.
//! Only where nobody else has anything to do is a sequence planned before its turn.

mod blocks;
#[cfg(test)]
mod comparison;
mod ends;
mod growing;
mod inspect;
mod kv_cache;
mod lending;
mod limits;
mod planning;
mod sequence;
mod spread;
mod starting;

pub use kv_cache::Holdings;
pub use limits::{FULL_TABLES, Limits, steps_at_once};
pub use sequence::Tables;
pub use spread::Ahead;

use crate::batch::StepPlan;
use crate::error::{Error, Result};
use crate::grammar::Matcher;
use crate::memory::{self, Purpose};
use crate::request::{Answer, Request, Sampled, Sampling};
use lending::{Growing, Lending};
use sequence::{RESERVED_TOKENS, Sequence};
use spread::{Pace, Room};
use std::collections::VecDeque;

/// The matcher of a request's grammar, behind the tokens of its answer that are part of its prompt.
fn matcher(request: &Request) -> Option<Box<dyn Matcher>> {
    let mut matcher = request.grammar.as_ref()?.matcher();
    let first = request.prompt.len().saturating_sub(request.answered);
    request.prompt[first..].iter().for_each(|&token| matcher.take(token));
    Some(matcher)
}

/// Sequences, their blocks, and the order in which they are served.
#[derive(Debug)]
pub struct Scheduler {
    limits: Limits,
    cache: Holdings,
    /// Blocks that the rings of running sequences may need, each by itself.
    rings: usize,
    /// Running sequences that wait for their beginning.
    awaiting: usize,
    /// Tokens of prompts that were not computed, since a sequence has shared them.
    shared_tokens: u64,
    /// Who may have blocks.
    lending: Lending,
    /// Whether blocks were freed, or sequences have grown, since `lending` was counted.
    stale: bool,
    /// Rows that sequences have missed as they waited for blocks, since one was preempted last.
    missed: usize,
    /// Running sequences that wait for a block.
    lacking: usize,
    /// Rows computed again, since their sequences had been preempted.
    recomputed: u64,
    /// When requests may start.
    pace: Pace,
    waiting: VecDeque<Sequence>,
    /// The running sequences by their handle.
    slots: Vec<Option<Sequence>>,
    free_slots: Vec<usize>,
    /// Steps in flight with a row of this slot, also of a sequence that has ended.
    under_way: Vec<usize>,
    /// Steps begun so far.
    steps: u64,
    /// Handles in the order in which their sequences started.
    running: Vec<usize>,
    /// Tokens of requests whose answers are handed over token by token, since [`Self::take_sampled`].
    sampled: Vec<Sampled>,
    /// Empty, with room for all sequences: memory must not be lacking when a device has failed.
    unfinished: Vec<Request>,
}

impl Scheduler {
    /// A scheduler with nothing to do yet.
    pub fn new(limits: Limits) -> Result<Self> {
        let limits = limits.check()?;
        let cache = Holdings::new(&limits)?;
        Self::with_cache(limits, cache)
    }

    /// A scheduler with nothing to do yet, for a cache that another one has left.
    pub fn with_cache(limits: Limits, cache: Holdings) -> Result<Self> {
        let limits = limits.check()?;
        let slots = limits.max_batch;
        Ok(Self {
            cache: cache.fit(&limits)?,
            rings: 0,
            awaiting: 0,
            shared_tokens: 0,
            lending: Lending::new(limits.blocks, slots)?,
            stale: false,
            missed: 0,
            lacking: 0,
            recomputed: 0,
            pace: Pace::default(),
            waiting: VecDeque::new(),
            slots: memory::collect((0..slots).map(|_| None), Purpose::Schedule)?,
            free_slots: memory::collect((0..slots).rev(), Purpose::Schedule)?,
            under_way: memory::filled(0, slots, Purpose::Schedule)?,
            steps: 0,
            running: memory::room(slots, Purpose::Schedule)?,
            sampled: Vec::new(),
            unfinished: Vec::new(),
            limits,
        })
    }

    /// Queues a request, if it could run alone.
    pub fn submit(&mut self, mut request: Request) -> Result<()> {
        self.limits.check_request(&request)?;
        let tables = self.make_room(&mut request)?;
        self.enqueue(request, tables);
        Ok(())
    }

    /// Reserves the memory that a request needs which could run alone: for the answer, which is appended to its prompt,
    /// and for its block tables.
    pub fn make_room(&mut self, request: &mut Request) -> Result<Tables> {
        // The token sampled at the last position is stored too, though never fed.
        let answer = (request.max_positions + 1).saturating_sub(request.prompt.len());
        memory::reserve(&mut request.prompt, answer.min(RESERVED_TOKENS), Purpose::Requests)?;
        let sequences = self.running.len() + self.waiting.len() + 1;
        memory::reserve(&mut self.unfinished, sequences, Purpose::Schedule)?;
        // One that waits for a beginning may have to wait here again.
        let more = self.waiting.try_reserve(self.running.len() + 1);
        more.map_err(|_| memory::lacking::<Sequence>(sequences, Purpose::Schedule))?;
        let need = self.limits.need(request.prompt.len(), request.max_positions);
        let full = self.cache.full.table(need.full)?;
        let window = self.cache.window.table(need.window)?;
        Ok(Tables {
            full,
            first_full: self.limits.need(request.prompt.len(), request.prompt.len()).full,
            most_full: need.full,
            window,
            matcher: matcher(request),
        })
    }

    /// Queues a request that could run alone, with the tables that [`Self::make_room`] made for it last.
    pub fn enqueue(&mut self, request: Request, tables: Tables) {
        self.waiting.push_back(Sequence::new(request, tables));
    }

    /// The cache, with the beginnings that are in it; `None` if sequences run or steps are in flight.
    pub fn into_cache(self) -> Option<Holdings> {
        let is_idle = self.running.is_empty() && self.under_way.iter().all(|&steps| steps == 0);
        is_idle.then_some(self.cache)
    }

    /// The tokens of prompts that were not computed since the last call, since a sequence has shared them.
    pub fn take_shared_tokens(&mut self) -> u64 {
        std::mem::take(&mut self.shared_tokens)
    }

    /// The rows that were computed again since the last call, since their sequences had been preempted or their
    /// replica had failed.
    pub fn take_recomputed(&mut self) -> u64 {
        std::mem::take(&mut self.recomputed)
    }

    /// The limits of steps and of the KV cache.
    pub fn limits(&self) -> &Limits {
        &self.limits
    }

    /// Whether a slot is free; only then may there be room.
    pub fn has_free_slot(&self) -> bool {
        !self.free_slots.is_empty()
    }

    /// About how many more sequences of up to `max_positions` positions could start at once, if their prompts are
    /// short; not 0 if one can.
    pub fn room(&mut self, max_positions: usize) -> usize {
        let max_positions = max_positions.max(1);
        if !self.could_start(1, max_positions, &[], 0) {
            return 0;
        }
        let (first, need) = (self.limits.need(1, 1).full, self.limits.need(1, max_positions));
        // Each begins with a block and its ring, and there are blocks for so many if all grow to the end, whoever runs
        // already.
        let begin = self.cache.free(self.rings) / (first + need.window);
        let end = (self.limits.blocks / need.all()).saturating_sub(self.running());
        self.free_slots.len().min(begin).min(end).max(1)
    }

    /// The sampling of each request that waits or runs here.
    pub fn samplings(&self) -> impl Iterator<Item = &Sampling> {
        let running = self.in_order().map(|(_, sequence)| sequence);
        running.chain(&self.waiting).map(Sequence::sampling)
    }

    /// Whether a request that waits or runs here asks for log-probabilities.
    pub fn is_scored(&self) -> bool {
        let running = self.in_order().map(|(_, sequence)| sequence);
        running.chain(&self.waiting).any(Sequence::is_scored)
    }

    /// Whether one more sequence could start at once, after those submitted before.
    pub fn has_room(&mut self, request: &Request) -> bool {
        let n_prompt = request.prompt.len();
        let most = self.limits.beginning(n_prompt, request.logprobs.prompt);
        self.could_start(n_prompt, request.max_positions, &request.prompt, most)
    }

    /// Whether a sequence could start at once, behind a beginning of these tokens of at most `most` blocks.
    fn could_start(&mut self, n_prompt: usize, max_positions: usize, tokens: &[u32], most: usize) -> bool {
        self.lend();
        self.admit();
        if !self.waiting.is_empty() {
            return false;
        }
        let found = self.cache.find(tokens, most);
        let need = self.limits.need(n_prompt, max_positions);
        let first = self.limits.need(n_prompt, n_prompt).full + need.window;
        self.fits(Growing::starting(first, need.all()), found)
    }

    /// Tells of the requests that will be submitted, so that their starts are spread where more wait than have room.
    /// To be called whenever one may start: if they were told of before, nothing happens.
    pub fn look_ahead(&mut self, ahead: impl ExactSizeIterator<Item = Ahead>) {
        // Of what comes while others run it is not known when there will be room.
        if !self.limits.has_full_layers || self.running() > 0 || self.pace.knows(ahead.len()) {
            return;
        }
        // Without the memory for it all start as there is room.
        let ahead = memory::collect(ahead, Purpose::Schedule).unwrap_or_default();
        // The rings of those that decode.
        let rings = ahead.iter().map(|one| self.limits.need(1, one.max_positions).window);
        let room = Room {
            block_tokens: self.limits.block_tokens,
            blocks: self.limits.blocks,
            ring: rings.max().unwrap_or(0),
            sequences: self.limits.max_batch,
            chunk_tokens: self.limits.chunk_tokens,
        };
        self.pace.make(&ahead, room);
    }

    /// Sets [`Limits::plans_ahead`] for the next plans.
    pub fn plan_ahead(&mut self, plans_ahead: bool) {
        self.limits.plans_ahead = plans_ahead;
    }

    /// Reserves a plan's memory for the largest step: a sequence has at most one chunk.
    pub fn make_room_to_plan(&self, plan: &mut StepPlan) -> Result<()> {
        let limits = &self.limits;
        let logits_rows = limits.max_logits_rows.min(limits.step_tokens);
        plan.clear();
        memory::reserve(&mut plan.tokens, limits.step_tokens, Purpose::Step)?;
        memory::reserve(&mut plan.positions, limits.step_tokens, Purpose::Step)?;
        memory::reserve(&mut plan.chunks, limits.max_batch, Purpose::Step)?;
        memory::reserve(&mut plan.tables, limits.most_table_blocks(), Purpose::Step)?;
        memory::reserve(&mut plan.logits, logits_rows, Purpose::Step)
    }

    /// Plans the next step, into a plan with room for it; `false` if there is nothing to do, or nothing before a step
    /// in flight has been committed.
    pub fn plan(&mut self, plan: &mut StepPlan) -> bool {
        self.lend();
        self.admit();
        plan.clear();
        self.plan_decoding(plan, self.last_step_of_turn());
        self.plan_prefill(plan);
        if plan.rows() == 0
            && let Some(longest_ago) = self.ready().map(|(_, sequence)| sequence.last_step).min()
        {
            self.plan_decoding(plan, longest_ago);
        }
        self.renew_rings(plan);
        plan.rows() > 0
    }

    /// Where the steps' rows come round to a block of their ring that others may need, they get another one.
    fn renew_rings(&mut self, plan: &mut StepPlan) {
        if !self.limits.shares() || self.limits.sliding_window == 0 {
            return;
        }
        let block_tokens = self.limits.block_tokens;
        for chunk in &plan.chunks {
            let Some(sequence) = &mut self.slots[chunk.slot] else {
                continue;
            };
            let behind = chunk.first_position + chunk.rows;
            for block in chunk.first_position.div_ceil(block_tokens)..behind.div_ceil(block_tokens) {
                let place = block % sequence.window.len();
                let own = self.cache.renew(sequence.window[place]);
                sequence.window[place] = own;
                plan.tables[chunk.window.start + place] = own;
            }
        }
    }

    /// Notes that the step planned last is in flight; the next plan continues after it.
    pub fn begin(&mut self, plan: &StepPlan) {
        self.steps += 1;
        self.stale = true;
        self.missed += self.lacking;
        for chunk in &plan.chunks {
            self.under_way[chunk.slot] += 1;
            if let Some(sequence) = &mut self.slots[chunk.slot] {
                sequence.planned = chunk.first_position + chunk.rows;
                sequence.last_step = self.steps;
                sequence.on_device = self.limits.plans_ahead;
                self.recomputed += sequence.rows_recomputed(chunk.first_position) as u64;
                self.cache.write_prompt(sequence, chunk.first_position);
                let ends_prompt = chunk.first_position < sequence.n_prompt() && sequence.is_decoding();
                if ends_prompt {
                    let ring = self.limits.need(1, sequence.max_positions()).window;
                    let first = (sequence.planned / self.limits.block_tokens + 1).saturating_sub(ring);
                    self.rings -= self.cache.window.shorten_ring(&mut sequence.window, first, ring);
                }
            }
        }
        if self.awaiting > 0 {
            self.hand_over();
        }
    }

    /// Takes the tokens of the oldest step in flight: `sampled` has one for each of its logits rows with `sample`, in
    /// order. Answers that are handed over as a whole are appended to `finished` when they are complete. Rows for which
    /// [`Self::drawing`] is `None` are ignored.
    pub fn commit(&mut self, plan: &StepPlan, sampled: &[u32], finished: &mut Vec<Answer>) -> Result<()> {
        self.check_commit(plan, sampled)?;
        memory::reserve(finished, sampled.len(), Purpose::Requests)?;
        memory::reserve(&mut self.sampled, sampled.len(), Purpose::Requests)?;
        for chunk in &plan.chunks {
            self.under_way[chunk.slot] -= 1;
            match &mut self.slots[chunk.slot] {
                Some(sequence) if sequence.wrong_steps > 0 => sequence.wrong_steps -= 1,
                Some(sequence) => sequence.position += chunk.rows,
                None => self.free_slot(chunk.slot),
            }
        }
        for (row, &token) in plan.logits.iter().filter(|row| row.sample).zip(sampled) {
            let end = match &mut self.slots[row.slot] {
                // A discarded row does not advance its sequence.
                Some(sequence) if sequence.position == row.position + 1 => {
                    let end = sequence.store(token)?;
                    self.pace.sample();
                    if sequence.hands_over_tokens() {
                        let number = sequence.number();
                        self.sampled.push(Sampled { number, token, end });
                    }
                    end
                }
                _ => None,
            };
            if end.is_some()
                && let Some(sequence) = self.end(row.slot, true)
                && !sequence.hands_over_tokens()
            {
                finished.push(sequence.into_answer());
            }
        }
        Ok(())
    }

    /// The device holds another token than the one just committed as a sequence's last. Rows of this sequence in flight
    /// depend on the wrong token: they are discarded, and the sequence is planned again from here.
    pub fn mend(&mut self, slot: usize) {
        if let Some(mended) = &mut self.slots[slot] {
            mended.planned = mended.position;
            mended.wrong_steps = self.under_way[slot];
        }
    }

    /// The request for which the oldest step in flight samples in this slot; `None` if its row is discarded: the
    /// sequence has ended since the plan, by an end token or cancelled, or the row was fed a wrong token.
    pub fn drawing(&self, slot: usize) -> Option<usize> {
        let sequence = self.slots.get(slot)?.as_ref()?;
        (sequence.wrong_steps == 0).then(|| sequence.number())
    }

    /// Lends the matcher of a slot's answer, if it follows a grammar.
    pub fn lend_matcher(&mut self, slot: usize) -> Option<Box<dyn Matcher>> {
        self.slots.get_mut(slot)?.as_mut()?.matcher.take()
    }

    /// Takes it back.
    pub fn return_matcher(&mut self, slot: usize, matcher: Box<dyn Matcher>) {
        if let Some(Some(sequence)) = self.slots.get_mut(slot) {
            sequence.matcher = Some(matcher);
        }
    }

    /// What [`Self::take_sampled`] will take.
    pub fn sampled(&self) -> &[Sampled] {
        &self.sampled
    }

    /// The tokens that steps have brought to requests whose answers are handed over token by token.
    pub fn take_sampled(&mut self) -> impl Iterator<Item = Sampled> {
        self.sampled.drain(..)
    }

    /// Drops the requests, waiting or running, that are cancelled by their number; returns how many.
    pub fn cancel(&mut self, mut is_cancelled: impl FnMut(usize) -> bool) -> usize {
        let before = self.waiting.len() + self.running.len();
        self.waiting.retain(|sequence| !is_cancelled(sequence.number()));
        for place in (0..self.running.len()).rev() {
            let slot = self.running[place];
            if self.request(slot).is_some_and(&mut is_cancelled) {
                self.end(slot, false);
            }
        }
        before - self.waiting.len() - self.running.len()
    }

    /// Removes and returns all requests without an answer, in the order of their submission, after a device has failed.
    /// No step is in flight then. Partial answers are dropped: the requests start again where they are submitted next.
    pub fn take_unfinished(&mut self) -> Vec<Request> {
        let mut unfinished = std::mem::take(&mut self.unfinished);
        // The youngest first: it may wait for the beginning that an older one computes.
        while let Some(&slot) = self.running.last() {
            self.give_up_rows(slot);
            unfinished.extend(self.leave(slot).map(Sequence::into_request));
        }
        unfinished.reverse();
        self.cache.forget_all();
        unfinished.extend(self.waiting.drain(..).map(Sequence::into_request));
        self.under_way.fill(0);
        self.free_slots.clear();
        self.free_slots.extend((0..self.slots.len()).rev());
        unfinished
    }

    /// The request of a slot of the current plan; `None` once its sequence has ended.
    pub fn request(&self, slot: usize) -> Option<usize> {
        self.slots.get(slot)?.as_ref().map(Sequence::number)
    }

    /// Sequences running.
    pub fn running(&self) -> usize {
        self.running.len()
    }

    /// Requests waiting to start.
    pub fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// Running sequences with their handles, oldest first.
    fn in_order(&self) -> impl Iterator<Item = (usize, &Sequence)> {
        self.running
            .iter()
            .filter_map(|&slot| Some((slot, self.slots[slot].as_ref()?)))
    }

    /// Refuses, before anything has changed, tokens that are not of the oldest step in flight.
    fn check_commit(&self, plan: &StepPlan, sampled: &[u32]) -> Result<()> {
        let wanted = plan.logits.iter().filter(|row| row.sample).count();
        if sampled.len() != wanted {
            return Err(Error::Internal(format!(
                "a step that samples {wanted} rows came back with {} tokens",
                sampled.len()
            )));
        }
        for chunk in &plan.chunks {
            let is_under_way = self.under_way.get(chunk.slot).is_some_and(|&steps| steps > 0);
            let is_next = |sequence: &Sequence| sequence.wrong_steps > 0 || sequence.position == chunk.first_position;
            if !is_under_way || !self.slots[chunk.slot].as_ref().is_none_or(is_next) {
                return Err(Error::Internal(format!(
                    "a step came back that is not the oldest under way: slot {} is not at position {}",
                    chunk.slot, chunk.first_position
                )));
            }
        }
        Ok(())
    }

    /// Ends a sequence, maybe before its limit: its answer is complete, or it was cancelled.
    fn end(&mut self, slot: usize, is_complete: bool) -> Option<Sequence> {
        let length = self.slots[slot].as_ref().map_or(0, Sequence::length);
        let sequence = self.leave(slot)?;
        let left = sequence.max_positions() - sequence.position;
        self.pace.end(left);
        self.lending.ends.leave(length, is_complete && left > 0);
        Some(sequence)
    }

    /// Takes a sequence out for good.
    fn leave(&mut self, slot: usize) -> Option<Sequence> {
        let mut sequence = self.release(slot)?;
        self.cache.full.keep(std::mem::take(&mut sequence.full));
        self.cache.window.keep(std::mem::take(&mut sequence.window));
        Some(sequence)
    }

    /// Takes a sequence out and frees its blocks. A step in flight may still write and read them; they can be allocated
    /// again at once, because the device runs steps in order: the next owner runs later and reads only what it has
    /// written. The slot is reused only when no step in flight has a row of it.
    fn release(&mut self, slot: usize) -> Option<Sequence> {
        let mut sequence = self.slots[slot].take()?;
        self.stale = true;
        self.awaiting -= usize::from(std::mem::take(&mut sequence.awaits_beginning));
        if let Some(place) = self.running.iter().position(|&running| running == slot) {
            self.running.remove(place);
            let (older, nodes) = (&self.running[..place], &sequence.full[..sequence.nodes]);
            let covered = sequence.elsewhere;
            for_youngest_holders(&mut self.slots, older, nodes, covered, |elsewhere, more| {
                *elsewhere -= more
            });
        }
        self.rings -= sequence.window.len();
        if let Some(lost) = self.cache.first_not_computed(&sequence) {
            self.take_back_those_behind(lost, sequence.full[lost]);
            self.cache.forget(&mut sequence, lost);
        } else {
            self.cache.add_answer(&mut sequence, self.limits.depth);
        }
        self.cache.end(&mut sequence);
        self.free_slot(slot);
        Some(sequence)
    }

    /// Takes back the sequences that wait for a node at this place of their beginning.
    fn take_back_those_behind(&mut self, place: usize, node: u32) {
        for at in (0..self.running.len()).rev() {
            let slot = self.running[at];
            let sequence = self.slots[slot].as_ref();
            let waits = |sequence: &Sequence| sequence.awaits_beginning && place < sequence.shared;
            if sequence.is_some_and(|sequence| waits(sequence) && sequence.full[place] == node) {
                self.take_back(slot);
            }
        }
    }

    /// Frees an empty slot once no step in flight has rows of it.
    fn free_slot(&mut self, slot: usize) {
        if self.under_way[slot] == 0 {
            self.free_slots.push(slot);
        }
    }
}

/// Of `nodes`, the first ones of a sequence's tree, those behind the first `covered`: for each sequence of `older` that
/// is the youngest to hold some of them, calls `change` with its count of nodes that are held by younger ones, and with
/// how many these are.
fn for_youngest_holders(
    slots: &mut [Option<Sequence>],
    older: &[usize],
    nodes: &[u32],
    mut covered: usize,
    mut change: impl FnMut(&mut usize, usize),
) {
    for &slot in older.iter().rev() {
        if covered == nodes.len() {
            return;
        }
        let Some(sequence) = &mut slots[slot] else {
            continue;
        };
        // Equal nodes have equal parents, so what is in front of them is equal, too.
        let its = sequence.full[..sequence.nodes].iter().skip(covered);
        let more = its.zip(&nodes[covered..]).take_while(|(its, node)| its == node).count();
        if more > 0 {
            change(&mut sequence.elsewhere, more);
            covered += more;
        }
    }
}
