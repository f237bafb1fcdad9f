//! Steps of several sequences whose blocks lie anywhere in the cache.

#![allow(dead_code)] // each includer uses its own part

use getp::batch::{Chunk, LogitsRow, StepPlan};
use getp::model::ModelConfig;
use getp::replica::KvBlocks;
use rand::seq::SliceRandom;
use rand_chacha::ChaCha8Rng;
use std::ops::Range;

/// A step in which `rows` sequences that have come to the same position decode, each with so many blocks of its own.
pub fn decoding(rows: usize, position: usize, [full, window]: [usize; 2], token: impl Fn(usize) -> i32) -> StepPlan {
    let mut plan = StepPlan {
        decode_chunks: rows,
        ..StepPlan::default()
    };
    let blocks = |of: usize, row: usize| (row * of..(row + 1) * of).map(|block| block as u32);
    for row in 0..rows {
        let start = plan.tables.len();
        plan.tables.extend(blocks(full, row));
        plan.tables.extend(blocks(window, row));
        plan.chunks.push(Chunk {
            sequence: row,
            first_row: row,
            rows: 1,
            first_position: position,
            full: start..start + full,
            window: start + full..plan.tables.len(),
        });
        plan.tokens.push(token(row));
        plan.positions.push(position as u32);
        plan.logits.push(LogitsRow {
            row,
            sequence: row,
            position,
            sample: true,
        });
    }
    plan
}

/// Sequences that are fed by steps.
pub struct Sequences {
    tables: Vec<[Vec<u32>; 2]>,
    lengths: Vec<usize>,
    next: Vec<usize>,
    max_chunk: usize,
    pub blocks: KvBlocks,
}

impl Sequences {
    /// Sequences of so many positions, fed at most `max_chunk` rows at once, in blocks of so many positions. Blocks are
    /// dealt in shuffled order, and rings are as short as they may be, so that one block less would show.
    pub fn new(
        rng: &mut ChaCha8Rng,
        config: &ModelConfig,
        block_tokens: usize,
        lengths: &[usize],
        max_chunk: usize,
    ) -> Self {
        // The positions a step needs at once touch no more blocks than this, wherever they begin.
        let ring = match config.sliding_window {
            0 => 0,
            window => (window + max_chunk - 2).div_ceil(block_tokens) + 1,
        };
        let full: Vec<usize> = lengths.iter().map(|n| n.div_ceil(block_tokens)).collect();
        let blocks = KvBlocks {
            tokens: block_tokens,
            full: full.iter().sum(),
            window: ring * lengths.len(),
        };
        let mut deal = |n: usize| {
            let mut all: Vec<u32> = (0..n as u32).collect();
            all.shuffle(rng);
            all
        };
        let (mut full_blocks, mut window_blocks) = (deal(blocks.full), deal(blocks.window));
        let table = |n| [full_blocks.drain(..n).collect(), window_blocks.drain(..ring).collect()];
        Self {
            tables: full.into_iter().map(table).collect(),
            lengths: lengths.to_vec(),
            next: vec![0; lengths.len()],
            max_chunk,
            blocks,
        }
    }

    /// The next rows of some sequences; all their logits are wanted.
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
                sequence,
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
                plan.logits.push(LogitsRow {
                    row: first_row + i,
                    sequence,
                    position,
                    sample: true,
                });
            }
            self.next[sequence] += tokens.len();
        }
        plan
    }

    /// How many rows of each sequence the next step takes: the first as many as it may, the others fewer by turns,
    /// in another order each time. Empty when all are done.
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
