//! Plans of steps of several sequences, with KV blocks anywhere in the cache.

#![allow(dead_code)] // each test uses a part of it

use getp::batch::{Chunk, Draw, LogitsRow, StepPlan};
use getp::config::ModelConfig;
use getp::kv_blocks::KvBlocks;
use rand::seq::SliceRandom;
use rand_chacha::ChaCha8Rng;
use std::ops::Range;

/// A step in which `rows` sequences decode at the same position. Each has `full` and `window` blocks of its own.
pub fn decoding(rows: usize, position: usize, blocks: [usize; 2], token: impl Fn(usize) -> i32) -> StepPlan {
    StepPlan {
        decode_chunks: rows,
        ..chunks(&vec![1; rows], position, blocks, token)
    }
}

/// A step with so many rows of each of some prompts, from the same position on, that asks for the logits of all rows.
/// Each has `full` and `window` blocks of its own.
pub fn chunks(
    rows: &[usize],
    first_position: usize,
    [full, window]: [usize; 2],
    token: impl Fn(usize) -> i32,
) -> StepPlan {
    let mut plan = StepPlan::default();
    let each = full + window;
    let blocks = |slot: usize| (slot * each..(slot + 1) * each).map(|block| block as u32);
    for (slot, &rows) in rows.iter().enumerate() {
        let (start, first_row) = (plan.tables.len(), plan.tokens.len());
        plan.tables.extend(blocks(slot));
        plan.chunks.push(Chunk {
            slot,
            first_row,
            rows,
            first_position,
            full: start..start + full,
            window: start + full..plan.tables.len(),
        });
        for (row, position) in (first_row..).zip(first_position..first_position + rows) {
            plan.tokens.push(token(row));
            plan.positions.push(position as u32);
            plan.logits.push(greedy(row, slot, position));
        }
    }
    plan
}

/// A row whose most probable token is sampled.
fn greedy(row: usize, slot: usize, position: usize) -> LogitsRow {
    LogitsRow {
        row,
        slot,
        position,
        sample: true,
        draw: Draw::GREEDY,
        score: None,
        second_coin: None,
    }
}

/// The same step, in which tokens are drawn: those of logits row `row` by `draw(row)`.
pub fn drawing(mut plan: StepPlan, draw: impl Fn(usize) -> Draw) -> StepPlan {
    let rows = plan.logits.iter_mut().enumerate();
    rows.for_each(|(row, wanted)| wanted.draw = draw(row));
    plan
}

/// Sequences that are computed step by step.
pub struct Sequences {
    tables: Vec<[Vec<u32>; 2]>,
    lengths: Vec<usize>,
    next: Vec<usize>,
    max_chunk: usize,
    pub blocks: KvBlocks,
}

impl Sequences {
    /// Sequences of `lengths` positions, with at most `max_chunk` rows of each in a step, and blocks of `block_tokens`
    /// positions. Blocks are allocated in a random order. Rings are as short as possible, so that one block less fails.
    pub fn new(
        rng: &mut ChaCha8Rng,
        config: &ModelConfig,
        block_tokens: usize,
        lengths: &[usize],
        max_chunk: usize,
    ) -> Self {
        // The most blocks that hold the positions needed in one step, wherever those begin in a block.
        let ring = match config.sliding_window {
            0 => 0,
            window => (window + max_chunk - 2).div_ceil(block_tokens) + 1,
        };
        let full: Vec<usize> = lengths.iter().map(|n| n.div_ceil(block_tokens)).collect();
        let blocks = KvBlocks {
            tokens: block_tokens,
            count: full.iter().sum::<usize>() + ring * lengths.len(),
        };
        let mut all: Vec<u32> = (0..blocks.count as u32).collect();
        all.shuffle(rng);
        let table = |n| [all.drain(..n).collect(), all.drain(..ring).collect()];
        Self {
            tables: full.into_iter().map(table).collect(),
            lengths: lengths.to_vec(),
            next: vec![0; lengths.len()],
            max_chunk,
            blocks,
        }
    }

    /// A step with the next tokens of some sequences, which asks for the logits of all rows.
    pub fn plan(&mut self, work: &[(usize, &[u32])]) -> StepPlan {
        let mut plan = StepPlan::default();
        for &(sequence, tokens) in work {
            assert!(tokens.len() <= self.max_chunk, "the rings are too short for this");
            let first_position = self.next[sequence];
            let first_row = plan.tokens.len();
            let [full, window] = &self.tables[sequence];
            let mut append = |table: &[u32]| -> Range<usize> {
                let start = plan.tables.len();
                plan.tables.extend_from_slice(table);
                start..plan.tables.len()
            };
            plan.chunks.push(Chunk {
                slot: sequence,
                first_row,
                rows: tokens.len(),
                first_position,
                full: append(full),
                window: append(window),
            });
            for (i, &token) in tokens.iter().enumerate() {
                let position = first_position + i;
                plan.tokens.push(token.cast_signed());
                plan.positions.push(position as u32);
                plan.logits.push(greedy(first_row + i, sequence, position));
            }
            self.next[sequence] += tokens.len();
        }
        plan
    }

    /// The sequences of step number `step` in order, each with its number of rows: the maximum for the first sequence,
    /// and varying numbers for the others. The order differs from step to step. Empty when all sequences are complete.
    pub fn turn(&self, step: usize) -> Vec<(usize, usize)> {
        let n = self.next.len();
        let rows = |sequence: usize| {
            let left = self.lengths[sequence] - self.next[sequence];
            let most = if sequence == 0 {
                self.max_chunk
            } else {
                (3 * step + 4 * sequence) % self.max_chunk + 1
            };
            (sequence, left.min(most))
        };
        let all = (0..n).map(|i| rows((i + step) % n));
        all.filter(|&(_, rows)| rows > 0).collect()
    }

    /// The next position of a sequence.
    pub fn next(&self, sequence: usize) -> usize {
        self.next[sequence]
    }
}
