//! Allocation of the KV cache's blocks to sequences.

use crate::error::Result;
use crate::memory::{self, Purpose};

/// No block.
pub(super) const NONE: u32 = u32::MAX;

/// Allocates the blocks that are in use for one kind of layers. A block is held by the sequences whose tables have it,
/// several if they begin alike. One whose content is known stays as it is when nobody holds it any more, until there is
/// no other block to lend: then the one given back longest ago is lent. Blocks that nobody holds may come from the pool
/// of the other kind of layers, and go there.
#[derive(Debug)]
pub(super) struct BlockPool {
    /// Blocks of this pool, free or not.
    blocks: usize,
    /// Blocks that nobody holds and whose content is not known.
    free: Vec<u32>,
    /// Blocks that nobody holds and whose content is known.
    idle: Idle,
    /// By block: how many sequences hold it.
    holders: Vec<u32>,
    /// By block: whether its content is known.
    known: Vec<bool>,
    /// Tables freed, whose memory is reused.
    spare: Vec<Vec<u32>>,
}

impl BlockPool {
    /// A pool of the first `blocks` of `all` blocks, and with room for all, for at most `tables` sequences at once.
    pub(super) fn new(blocks: usize, all: usize, tables: usize) -> Result<Self> {
        let mut free = memory::room(all, Purpose::Schedule)?;
        free.extend((0..blocks as u32).rev());
        Ok(Self {
            blocks,
            free,
            idle: Idle::new(all)?,
            holders: memory::filled(0, all, Purpose::Schedule)?,
            known: memory::filled(false, all, Purpose::Schedule)?,
            spare: memory::room(tables, Purpose::Schedule)?,
        })
    }

    /// Its blocks, free or not.
    pub(super) fn blocks(&self) -> usize {
        self.blocks
    }

    /// Whether a block for this pool should come from another one: it has none that can be lent without loss, and the
    /// other one has, or has more whose content is known.
    pub(super) fn should_take_from(&self, other: &Self) -> bool {
        self.free.is_empty() && (!other.free.is_empty() || other.idle.count > self.idle.count)
    }

    /// Takes a block that nobody holds out of the pool. `forget` is told if its content was known.
    pub(super) fn give(&mut self, forget: impl FnOnce(u32)) -> u32 {
        self.blocks -= 1;
        self.pick(forget)
    }

    /// Adds a block that nobody holds.
    pub(super) fn add(&mut self, block: u32) {
        self.blocks += 1;
        self.free.push(block);
    }

    /// The block that nobody holds and is missed least.
    fn pick(&mut self, forget: impl FnOnce(u32)) -> u32 {
        if let Some(block) = self.free.pop() {
            return block;
        }
        let block = self.idle.take_first();
        self.known[block as usize] = false;
        forget(block);
        block
    }

    /// Makes room for the tables of so many sequences.
    pub(super) fn make_room(&mut self, tables: usize) -> Result<()> {
        memory::reserve(&mut self.spare, tables, Purpose::Schedule)
    }

    /// Blocks that nobody holds.
    pub(super) fn free(&self) -> usize {
        self.free.len() + self.idle.count
    }

    /// How many sequences hold a block.
    pub(super) fn holders(&self, block: u32) -> u32 {
        self.holders[block as usize]
    }

    /// Whether a block's content is known.
    pub(super) fn is_known(&self, block: u32) -> bool {
        self.known[block as usize]
    }

    /// An empty table with room for `blocks` blocks.
    pub(super) fn table(&mut self, blocks: usize) -> Result<Vec<u32>> {
        let mut table = self.spare.pop().unwrap_or_default();
        memory::reserve(&mut table, blocks, Purpose::Schedule)?;
        Ok(table)
    }

    /// A block for one holder; the caller has checked that one is free. `forget` is told if its content was known.
    pub(super) fn lend(&mut self, forget: impl FnOnce(u32)) -> u32 {
        let block = self.pick(forget);
        self.holders[block as usize] = 1;
        block
    }

    /// One more sequence holds a block whose content is known.
    pub(super) fn hold(&mut self, block: u32) -> u32 {
        let holders = &mut self.holders[block as usize];
        if *holders == 0 {
            self.idle.remove(block);
        }
        *holders += 1;
        block
    }

    /// A sequence does not hold a block any more.
    pub(super) fn let_go(&mut self, block: u32) {
        let holders = &mut self.holders[block as usize];
        *holders -= 1;
        if *holders > 0 {
            return;
        }
        if self.known[block as usize] {
            self.idle.add(block);
        } else {
            self.free.push(block);
        }
    }

    /// Lets go of a table's blocks, the last one first.
    pub(super) fn empty(&mut self, table: &mut Vec<u32>) {
        while let Some(block) = table.pop() {
            self.let_go(block);
        }
    }

    /// Makes a longer ring one of `blocks` blocks from the sequence's block `first` on. The sequence lets go of the
    /// others; returns how many these are.
    pub(super) fn shorten_ring(&mut self, ring: &mut Vec<u32>, first: usize, blocks: usize) -> usize {
        let others = ring.len().saturating_sub(blocks);
        if others == 0 {
            return 0;
        }
        let of_first = first % ring.len();
        ring.rotate_left(of_first);
        while ring.len() > blocks
            && let Some(block) = ring.pop()
        {
            self.let_go(block);
        }
        ring.rotate_right(first % blocks);
        others
    }

    /// Keeps the memory of an empty table for another one.
    pub(super) fn keep(&mut self, table: Vec<u32>) {
        if self.spare.len() < self.spare.capacity() {
            self.spare.push(table);
        }
    }

    /// The content of a block that is held is known from now on.
    pub(super) fn know(&mut self, block: u32) {
        self.known[block as usize] = true;
    }

    /// Nobody needs a block's content any more.
    pub(super) fn forget(&mut self, block: u32) {
        let known = std::mem::take(&mut self.known[block as usize]);
        if known && self.holders[block as usize] == 0 {
            self.idle.remove(block);
            self.free.push(block);
        }
    }
}

/// Blocks in the order in which they were added: a list through the array of all blocks, so that each can leave at
/// once.
#[derive(Debug)]
struct Idle {
    /// By block: the one added before it, and the one behind it.
    links: Vec<(u32, u32)>,
    first: u32,
    last: u32,
    count: usize,
}

impl Idle {
    fn new(blocks: usize) -> Result<Self> {
        Ok(Self {
            links: memory::filled((NONE, NONE), blocks, Purpose::Schedule)?,
            first: NONE,
            last: NONE,
            count: 0,
        })
    }

    fn add(&mut self, block: u32) {
        self.links[block as usize] = (self.last, NONE);
        match self.last {
            NONE => self.first = block,
            last => self.links[last as usize].1 = block,
        }
        self.last = block;
        self.count += 1;
    }

    fn remove(&mut self, block: u32) {
        let (before, behind) = self.links[block as usize];
        match before {
            NONE => self.first = behind,
            before => self.links[before as usize].1 = behind,
        }
        match behind {
            NONE => self.last = before,
            behind => self.links[behind as usize].0 = before,
        }
        self.count -= 1;
    }

    /// There is one.
    fn take_first(&mut self) -> u32 {
        let first = self.first;
        self.remove(first);
        first
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lend(pool: &mut BlockPool, blocks: usize) -> Vec<u32> {
        (0..blocks)
            .map(|_| pool.lend(|block| panic!("{block} was known")))
            .collect()
    }

    #[test]
    fn pool_lends_each_block_once() {
        let mut pool = BlockPool::new(5, 5, 2).unwrap();
        let (a, b) = (lend(&mut pool, 2), lend(&mut pool, 3));
        assert_eq!(
            (a.as_slice(), b.as_slice(), pool.free()),
            (&[0, 1][..], &[2, 3, 4][..], 0)
        );
        [a, b].iter_mut().for_each(|table| pool.empty(table));
        let mut all = lend(&mut pool, 5);
        all.sort_unstable();
        assert_eq!(all, [0, 1, 2, 3, 4]);
    }

    #[test]
    fn what_is_known_is_lent_last_and_the_oldest_first() {
        let mut pool = BlockPool::new(4, 4, 1).unwrap();
        let mut table = lend(&mut pool, 3);
        assert_eq!(table, [0, 1, 2]);
        table.iter().for_each(|&block| pool.know(block));
        // Another sequence has the first block, too.
        pool.hold(0);
        pool.empty(&mut table);
        assert_eq!(pool.free(), 3, "two that are known and one that is not");
        pool.let_go(0);
        pool.hold(1);
        assert_eq!(lend(&mut pool, 1), [3]);
        let mut forgotten = Vec::new();
        let lent = [(); 2].map(|()| pool.lend(|block| forgotten.push(block)));
        assert_eq!((lent, forgotten.as_slice(), pool.free()), ([2, 0], &[2, 0][..], 0));
        pool.let_go(1);
        pool.forget(1);
        assert_eq!(lend(&mut pool, 1), [1]);
    }

    /// A pool takes blocks that nobody knows while there are any, wherever, and then from the pool that has more whose
    /// content is known.
    #[test]
    fn pools_give_each_other_blocks() {
        let new = |blocks| BlockPool::new(blocks, 4, 1).unwrap();
        let (mut a, mut b) = (new(4), new(0));
        let known = |pool: &mut BlockPool, blocks: usize| {
            let mut table = lend(pool, blocks);
            table.iter().for_each(|&block| pool.know(block));
            pool.empty(&mut table);
        };
        assert!(b.should_take_from(&a) && !a.should_take_from(&b));
        b.add(a.give(|block| panic!("{block} was known")));
        assert_eq!((a.blocks(), b.blocks(), a.free(), b.free()), (3, 1, 3, 1));
        known(&mut b, 1);
        known(&mut a, 2);
        assert!(b.should_take_from(&a), "it has a free one");
        known(&mut a, 1);
        assert!(
            b.should_take_from(&a) && !a.should_take_from(&b),
            "three idle ones and one"
        );
        let mut forgotten = Vec::new();
        b.add(a.give(|block| forgotten.push(block)));
        assert_eq!((forgotten.len(), a.free(), b.free()), (1, 2, 2));
        known(&mut b, 1);
        assert!(!b.should_take_from(&a) && !a.should_take_from(&b), "two idle ones each");
    }

    #[test]
    fn shorter_rings_have_the_same_blocks_in_their_places() {
        let mut pool = BlockPool::new(5, 5, 1).unwrap();
        let mut ring = lend(&mut pool, 5);
        // The sequence's blocks 7, 8 and 9 are 2, 3 and 4.
        assert_eq!(pool.shorten_ring(&mut ring, 7, 3), 2);
        assert_eq!((ring.as_slice(), pool.free()), (&[4, 2, 3][..], 2));
        assert_eq!(pool.shorten_ring(&mut ring, 7, 3), 0);
        pool.empty(&mut ring);
        assert_eq!(pool.free(), 5);
    }
}
