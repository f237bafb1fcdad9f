//! Allocation of the KV cache's blocks to sequences.

use crate::error::Result;
use crate::memory::{self, Purpose};

/// The blocks of full and of windowed layers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BlockCounts {
    /// Of the full layers.
    pub full: usize,
    /// Of the windowed layers.
    pub window: usize,
}

/// Allocates the blocks of one kind of layers. Each block belongs to one sequence or is free.
#[derive(Debug)]
pub(super) struct BlockPool {
    free: Vec<u32>,
    /// Tables freed, whose memory is reused.
    spare: Vec<Vec<u32>>,
}

impl BlockPool {
    /// A pool of the blocks `0..blocks` for at most `tables` sequences at once.
    pub(super) fn new(blocks: u32, tables: usize) -> Result<Self> {
        Ok(Self {
            free: memory::collect((0..blocks).rev(), Purpose::Schedule)?,
            spare: memory::room(tables, Purpose::Schedule)?,
        })
    }

    /// Free blocks.
    pub(super) fn free(&self) -> usize {
        self.free.len()
    }

    /// An empty table with room for `blocks` blocks.
    pub(super) fn table(&mut self, blocks: usize) -> Result<Vec<u32>> {
        let mut table = self.spare.pop().unwrap_or_default();
        memory::reserve(&mut table, blocks, Purpose::Schedule)?;
        Ok(table)
    }

    /// Appends `blocks` blocks to a table with room for them; the caller has checked that so many are free.
    pub(super) fn lend(&mut self, blocks: usize, table: &mut Vec<u32>) {
        let kept = self.free.len() - blocks;
        table.extend(self.free.drain(kept..).rev());
    }

    /// Frees a table's blocks.
    pub(super) fn give_back(&mut self, mut table: Vec<u32>) {
        self.free.extend(table.drain(..).rev());
        self.spare.push(table);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
