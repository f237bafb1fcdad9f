//! What goes into a step: which rows of the running sequences.

use super::Scheduler;
use super::sequence::Sequence;
use crate::batch::{Chunk, LogitsRow, StepPlan};
use std::ops::Range;

impl Scheduler {
    /// One row for each decoding sequence that was in no step after `last_step`, at most the step's share of them.
    pub(super) fn plan_decoding(&self, plan: &mut StepPlan, last_step: u64) {
        let its_turn = self.ready().filter(|(_, sequence)| sequence.last_step <= last_step);
        for (slot, sequence) in its_turn.take(self.limits.share(self.decoding().count())) {
            self.plan_chunk(plan, slot, sequence, 1);
        }
        plan.decode_chunks = plan.chunks.len();
    }

    /// Sequences in steps behind this one are computed at the same time as the step planned next.
    pub(super) fn last_step_of_turn(&self) -> u64 {
        if self.limits.plans_ahead {
            (self.steps + 1).saturating_sub(self.limits.turns() as u64)
        } else {
            self.steps
        }
    }

    /// Decoding sequences that have the block of their next position.
    fn decoding(&self) -> impl Iterator<Item = (usize, &Sequence)> {
        let has_block = |sequence: &Sequence| !sequence.lacks_block(self.limits.block_tokens);
        self.in_order()
            .filter(move |(_, sequence)| sequence.is_decoding() && has_block(sequence))
    }

    /// Decoding sequences that may be planned.
    pub(super) fn ready(&self) -> impl Iterator<Item = (usize, &Sequence)> {
        self.decoding().filter(|(_, sequence)| self.is_ready(sequence))
    }

    /// Whether a decoding sequence may be planned.
    fn is_ready(&self, sequence: &Sequence) -> bool {
        sequence.has_next()
            && (self.limits.plans_ahead && sequence.on_device || !sequence.awaits_token())
            && !self.awaits_ring(sequence)
    }

    /// Whether the next row of a decoding sequence takes a block out of its ring that a row in flight may still need,
    /// if that is computed again because its token was wrong: then those in flight come first.
    fn awaits_ring(&self, sequence: &Sequence) -> bool {
        let next = sequence.planned;
        next.is_multiple_of(self.limits.block_tokens)
            && next > sequence.position.max(sequence.n_prompt())
            && self.cache.renews(sequence, next / self.limits.block_tokens)
    }

    /// Adds chunks of prompts, in order, while the step has room. With a prompt's last row a sequence begins to decode:
    /// if the step's share of decoding sequences is used up, that chunk waits for the next step.
    pub(super) fn plan_prefill(&self, plan: &mut StepPlan) {
        let mut turns_left = self.limits.share(self.running.len()) - plan.decode_chunks;
        let in_prompt = |sequence: &Sequence| !sequence.is_decoding() && !sequence.awaits_beginning;
        for (slot, sequence) in self.in_order().filter(|(_, sequence)| in_prompt(sequence)) {
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

    /// Prompt rows that fit the rest of the step. The oldest prompt always has a logits row left, as there are at least
    /// as many as sequences take their turn together, and each decoding one takes one.
    fn chunk_rows(&self, plan: &StepPlan, sequence: &Sequence) -> usize {
        let limits = &self.limits;
        let rows = sequence
            .prompt_left()
            .min(limits.chunk_tokens)
            .min(limits.step_tokens - plan.rows());
        let logits_rows = limits.max_logits_rows - plan.logits.len();
        if limits.record_all || sequence.scores_prompt() {
            rows.min(logits_rows)
        } else if logits_rows == 0 && rows == sequence.prompt_left() {
            rows - 1
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
            let score = sequence.score(position);
            let is_wanted = sample || score.is_some() || self.limits.record_all;
            if is_wanted && !sequence.is_recomputed(position) {
                plan.logits.push(LogitsRow {
                    row,
                    slot,
                    position,
                    sample,
                    draw: sequence.draw(position),
                    score,
                    second_coin: sequence.second_coin(position),
                });
            }
        }
        let full_blocks = positions
            .end
            .div_ceil(self.limits.block_tokens)
            .min(sequence.full.len());
        plan.chunks.push(Chunk {
            slot,
            first_row,
            rows,
            first_position: positions.start,
            full: append(&mut plan.tables, &sequence.full[..full_blocks]),
            window: append(&mut plan.tables, &sequence.window),
        });
    }
}

/// Appends a sequence's blocks to the tables; returns their range.
fn append(tables: &mut Vec<u32>, blocks: &[u32]) -> Range<usize> {
    let start = tables.len();
    tables.extend_from_slice(blocks);
    start..tables.len()
}
