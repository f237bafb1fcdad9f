//! Blocks of the KV cache: counting them, lending them, and how long a windowed sequence's ring must be.

use crate::error::Result;
use crate::memory::{self, Purpose};

/// Blocks of both kinds of layers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BlockCounts {
    /// Of the full layers.
    pub full: usize,
    /// Of the windowed layers.
    pub window: usize,
}

/// Blocks that hold the positions `0..positions`.
pub(super) fn blocks_for(block_tokens: usize, positions: usize) -> usize {
    positions.div_ceil(block_tokens)
}

/// The most blocks that `positions` consecutive positions (at least one) can touch: the first may be the last of
/// its block.
fn span_blocks(block_tokens: usize, positions: usize) -> usize {
    (positions - 1).div_ceil(block_tokens) + 1
}

/// Blocks of `block_tokens` positions in the ring of a sequence with `n_prompt` prompt tokens and `max_positions`
/// positions, whose prompt comes in chunks of at most `chunk_rows`.
///
/// A step writes a chunk's positions `s..s + c` before it attends, and the row at `s` attends to the positions
/// after `s - window`. So `max(0, s + 1 - window)..s + c` must all be in the ring at once; they are when the blocks
/// they touch are no more than the ring has, for block `b` lies in slot `b % ring`. Those are
///
/// - while decoding, `c = 1`: at most `window` positions anywhere;
/// - during prefill, `c <= min(chunk_rows, n_prompt)`: at most `window - 1 + c` positions anywhere, and never
///   past the prompt's last block, as `s + c <= n_prompt`;
/// - always no more than the blocks of all positions.
///
/// While decoding, the ring has room for at least `block_tokens - 1` positions more than the window. So steps under way
/// may have written as many positions behind the one that is fed anew after a wrong token.
pub fn ring_blocks(
    block_tokens: usize,
    window: usize,
    chunk_rows: usize,
    n_prompt: usize,
    max_positions: usize,
) -> usize {
    let decoding = span_blocks(block_tokens, window);
    let widest = (window - 1).saturating_add(chunk_rows.min(n_prompt));
    let prefill = span_blocks(block_tokens, widest).min(blocks_for(block_tokens, n_prompt));
    prefill.max(decoding).min(blocks_for(block_tokens, max_positions))
}

/// Lends the blocks of one kind. Each is with exactly one sequence or free.
#[derive(Debug)]
pub(super) struct BlockPool {
    free: Vec<u32>,
    /// Tables given back, kept for their memory.
    spare: Vec<Vec<u32>>,
}

impl BlockPool {
    /// A pool of the blocks `0..blocks`, lent to at most `tables` sequences at once.
    pub(super) fn new(blocks: u32, tables: usize) -> Result<Self> {
        Ok(Self {
            free: memory::collect((0..blocks).rev(), Purpose::Schedule)?,
            spare: memory::room(tables, Purpose::Schedule)?,
        })
    }

    /// Blocks not lent.
    pub(super) fn free(&self) -> usize {
        self.free.len()
    }

    /// An empty table with room for `blocks` blocks.
    pub(super) fn table(&mut self, blocks: usize) -> Result<Vec<u32>> {
        let mut table = self.spare.pop().unwrap_or_default();
        memory::reserve(&mut table, blocks, Purpose::Schedule)?;
        Ok(table)
    }

    /// Lends `blocks` blocks to a table with room for them; the caller has seen that so many are free.
    pub(super) fn lend(&mut self, blocks: usize, table: &mut Vec<u32>) {
        let kept = self.free.len() - blocks;
        table.extend(self.free.drain(kept..).rev());
    }

    /// Takes a table back.
    pub(super) fn give_back(&mut self, mut table: Vec<u32>) {
        self.free.extend(table.drain(..).rev());
        self.spare.push(table);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Positions in a block: those of the backends, and one that is no power of two.
    const BLOCK_TOKENS: [usize; 3] = [16, 64, 5];

    /// Blocks touched at once, the worst over every place a chunk can have.
    fn worst_touched(
        block_tokens: usize,
        window: usize,
        chunk_rows: usize,
        n_prompt: usize,
        max_positions: usize,
    ) -> usize {
        let touched =
            |s: usize, c: usize| (s + c - 1) / block_tokens - (s + 1).saturating_sub(window) / block_tokens + 1;
        let prefill = (0..n_prompt).map(|s| touched(s, chunk_rows.min(n_prompt - s)));
        let decoding = (n_prompt..max_positions).map(|s| touched(s, 1));
        prefill.chain(decoding).max().unwrap()
    }

    #[test]
    fn ring_holds_what_any_chunk_touches() {
        for block in BLOCK_TOKENS {
            ring_holds_what_any_chunk_of_blocks_touches(block);
        }
    }

    fn ring_holds_what_any_chunk_of_blocks_touches(block: usize) {
        for window in [1, 2, 15, 16, 17, 18, 31, 32, 33, 128] {
            for chunk_rows in [1, 2, 3, 15, 16, 17, 18, 33, 64, 300] {
                for n_prompt in [1, 2, 15, 16, 17, 33, 100, 159, 160, 161] {
                    for outputs in [0, 1, 15, 40] {
                        let max_positions = n_prompt + outputs;
                        let ring = ring_blocks(block, window, chunk_rows, n_prompt, max_positions);
                        let worst = worst_touched(block, window, chunk_rows, n_prompt, max_positions);
                        assert!(
                            ring >= worst,
                            "blocks of {block}, window {window}, chunk {chunk_rows}, prompt {n_prompt}, positions \
                             {max_positions}: {worst} blocks touched, ring of {ring}"
                        );
                    }
                }
            }
        }
    }

    #[test]
    fn ring_of_a_long_sequence_is_no_longer_than_needed() {
        for window in [1, 2, 15, 16, 17, 18, 31, 128] {
            for chunk_rows in [1, 2, 15, 16, 17, 18, 64, 300] {
                for block in BLOCK_TOKENS {
                    let n_prompt = window + chunk_rows + 3 * block;
                    assert_eq!(
                        ring_blocks(block, window, chunk_rows, n_prompt, n_prompt + 100),
                        worst_touched(block, window, chunk_rows, n_prompt, n_prompt + 100),
                        "blocks of {block}, window {window}, chunk {chunk_rows}"
                    );
                }
            }
        }
    }

    #[test]
    fn ring_of_the_released_models() {
        assert_eq!(ring_blocks(16, 128, 1, 1, 2048), 9);
        assert_eq!(ring_blocks(16, 128, 512, 1500, 2048), 41);
        assert_eq!(ring_blocks(16, 128, 512, 100, 2048), 9);
        assert_eq!(ring_blocks(16, 128, 512, 20, 64), 4);
        assert_eq!(ring_blocks(16, usize::MAX / 2, usize::MAX, 20, 64), 4);
        assert_eq!(ring_blocks(64, 128, 1, 1, 2048), 3);
        assert_eq!(ring_blocks(64, 128, 512, 1500, 2048), 11);
    }

    #[test]
    fn pool_lends_each_block_once() {
        let mut pool = BlockPool::new(5, 2).unwrap();
        let lend = |pool: &mut BlockPool, blocks| {
            let mut table = pool.table(blocks).unwrap();
            pool.lend(blocks, &mut table);
            table
        };
        let (a, b) = (lend(&mut pool, 2), lend(&mut pool, 3));
        assert_eq!(
            (a.as_slice(), b.as_slice(), pool.free()),
            (&[0, 1][..], &[2, 3, 4][..], 0)
        );
        pool.give_back(a);
        pool.give_back(b);
        let mut all = lend(&mut pool, 5);
        all.sort_unstable();
        assert_eq!(all, [0, 1, 2, 3, 4]);
    }
}
