//! Which sequences get blocks of the full layers, and when one more may start.
//!
//! A sequence starts with the blocks of its prompt and gets others as it grows, so more sequences run than would have
//! room at their longest. Three rules:
//!
//! 1. *Nobody waits for ever.* What a running sequence may still ask for is never more than the free blocks and those
//!    of the sequences that started before it. So the oldest one always gets what it asks for; when it ends, the next
//!    oldest does. A block that would break this is not lent.
//! 2. *Where blocks are scarce, many end soon.* Free blocks are kept for the oldest quarter of the sequences, up to all
//!    that these may ask for. If younger ones got them, nearly all would stop one block short of their end, and a few
//!    at a time would end. Where starts are spread (`spread.rs`) and there is enough for all that run, none are kept: they
//!    would be missing for the plan.
//! 3. *A sequence starts if, as all grow, there are nearly enough blocks at any time.* In the forecast no answer ends
//!    early, and all grow at the same pace. A sequence's blocks are free from its end on, so sequences that started at
//!    different times have room where as many of the same age would not. An eighth more than there are may be asked
//!    for: where it comes to that, the youngest wait for a short time, and otherwise these requests would run alone
//!    behind all others.

//!
//! A block that several sequences hold is free when the last of them has ended. So it is counted for the youngest: what
//! older ones then give back is only what nobody else has. A sequence that would begin behind blocks of others starts only
//! if rule 1 holds for all with these counted anew.

use crate::error::Result;
use crate::memory::{self, Purpose};

/// The oldest of so many running sequences for which blocks are kept.
pub(super) fn oldest(running: usize) -> usize {
    running.div_ceil(4)
}

/// Blocks lent and free, as the rules see them. The running sequences are counted oldest first.
#[derive(Debug)]
pub(super) struct Lending {
    /// All blocks.
    blocks: usize,
    free: usize,
    /// Of the free ones: what the oldest sequences may still ask for.
    kept: usize,
    /// Of the free ones: how many may be lent by rule 1 to sequences younger than those counted.
    spare: usize,
    /// Blocks that the sequences counted hold.
    held: usize,
    /// By how many more blocks sequences may ask for: their number, and the blocks that they hold.
    growing: Vec<(usize, usize)>,
    /// The most that one of them may ask for.
    longest: usize,
    /// Whether one of them could wait for ever.
    is_stuck: bool,
}

impl Lending {
    /// No sequence is running.
    pub(super) fn new(blocks: usize) -> Result<Self> {
        Ok(Self {
            blocks,
            free: blocks,
            kept: 0,
            spare: usize::MAX,
            held: 0,
            growing: memory::filled((0, 0), blocks + 1, Purpose::Schedule)?,
            longest: 0,
            is_stuck: false,
        })
    }

    /// Begins to count anew. The oldest sequences may still ask for `kept` blocks.
    pub(super) fn recount(&mut self, free: usize, kept: usize) {
        self.growing[..=self.longest].fill((0, 0));
        (self.free, self.kept, self.spare) = (free, kept, usize::MAX);
        (self.held, self.longest, self.is_stuck) = (0, 0, false);
    }

    /// Lends a block to the sequence that is counted next, if it may have one.
    pub(super) fn lend(&mut self, is_old: bool) -> bool {
        let may = self.spare > 0 && self.free > if is_old { 0 } else { self.kept };
        if may {
            self.take(1);
            self.kept = self.kept.saturating_sub(usize::from(is_old));
        }
        may
    }

    fn take(&mut self, blocks: usize) {
        self.free -= blocks;
        self.spare -= blocks;
    }

    /// Counts a sequence that holds `held` blocks of the `need` that it may have in all.
    pub(super) fn count(&mut self, held: usize, need: usize) {
        let more = need - held;
        self.is_stuck |= self.free + self.held < more;
        self.spare = self.spare.min((self.free + self.held).saturating_sub(more));
        self.held += held;
        self.growing[more].0 += 1;
        self.growing[more].1 += held;
        self.longest = self.longest.max(more);
    }

    /// Whether one of the sequences counted could wait for ever.
    pub(super) fn is_stuck(&self) -> bool {
        self.is_stuck
    }

    /// Whether a sequence may start that takes `first` of the free blocks, then holds `held`, and may have `need` in all.
    pub(super) fn may_start(&self, first: usize, held: usize, need: usize) -> bool {
        need <= self.blocks
            && first <= self.spare.min(self.free.saturating_sub(self.kept))
            && self.most_asked_for(held, need) <= self.blocks + self.blocks / 8
    }

    /// Whether there is enough for all sequences counted, as they grow at the same pace.
    pub(super) fn suffices(&self) -> bool {
        self.most_asked_for(0, 0) <= self.blocks
    }

    /// Starts it, and counts it.
    pub(super) fn start(&mut self, first: usize, held: usize, need: usize) {
        self.take(first);
        self.count(held, need);
    }

    /// The most blocks that all sequences ask for at the same time, one more with `first` of its `need` among them.
    fn most_asked_for(&self, first: usize, need: usize) -> usize {
        let (mut sequences, mut held, mut most) = (0, 0, 0);
        for more in (0..=self.longest.max(need - first)).rev() {
            let one = usize::from(more == need - first);
            sequences += self.growing[more].0 + one;
            held += self.growing[more].1 + one * first;
            most = most.max(held + sequences * more);
        }
        most
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::{Rng, SeedableRng};
    use rand_chacha::ChaCha8Rng;

    #[test]
    fn blocks_are_asked_for_until_a_sequence_ends() {
        let mut lending = Lending::new(100).unwrap();
        lending.start(1, 1, 4);
        // Of the same age both want four at the end; one that ends two blocks earlier has left by then.
        assert_eq!(lending.most_asked_for(1, 4), 8);
        assert_eq!(lending.most_asked_for(1, 2), 4);
        // One block later they hold 2 + 6 + 3, then the first one alone grows to 4.
        lending.start(5, 5, 6);
        assert_eq!(lending.most_asked_for(2, 3), 11);
    }

    #[test]
    fn an_eighth_more_may_start_than_has_room_at_its_longest() {
        let most = |blocks: usize| {
            let mut lending = Lending::new(blocks).unwrap();
            let mut started = 0;
            while lending.may_start(1, 1, 4) {
                lending.start(1, 1, 4);
                started += 1;
            }
            started
        };
        assert_eq!((most(160), most(32), most(31), most(4)), (45, 9, 8, 1));
        // The blocks of its prompt must be there.
        let lending = Lending::new(7).unwrap();
        assert!(lending.may_start(7, 7, 7) && !lending.may_start(8, 8, 8));
    }

    #[test]
    fn young_sequences_leave_the_oldest_what_these_ask_for() {
        // Eight sequences hold two blocks of four each; five are free, of which two sequences may ask for four.
        let mut lending = Lending::new(21).unwrap();
        lending.recount(5, 4);
        let lent: Vec<_> = (0..8)
            .map(|place| {
                let lent = lending.lend(place < oldest(8));
                lending.count(2 + usize::from(lent), 4);
                lent
            })
            .collect();
        assert_eq!(lent, [true, true, true, false, false, false, false, false]);
    }

    /// Sequences of random needs ask for blocks in a random order: someone always gets one, until all have ended.
    #[test]
    fn nobody_waits_for_ever() {
        for seed in 0..3000 {
            let rng = &mut ChaCha8Rng::seed_from_u64(seed);
            let blocks = rng.random_range(1..40);
            let mut lending = Lending::new(blocks).unwrap();
            let mut running: Vec<[usize; 2]> = Vec::new();
            let (mut to_start, mut idle) = (30, 0);
            while to_start > 0 || !running.is_empty() {
                let free = blocks - running.iter().map(|[held, _]| held).sum::<usize>();
                let kept = running[..oldest(running.len())]
                    .iter()
                    .map(|[held, need]| need - held)
                    .sum();
                lending.recount(free, kept);
                let old = oldest(running.len());
                idle += 1;
                for (place, [held, need]) in running.iter_mut().enumerate() {
                    let asks = held < need && (place == 0 || rng.random_bool(0.5));
                    if asks && lending.lend(place < old) {
                        *held += 1;
                        idle = 0;
                    }
                    lending.count(*held, *need);
                }
                while to_start > 0 {
                    let need = rng.random_range(1..=blocks);
                    let first = rng.random_range(1..=need);
                    if !lending.may_start(first, first, need) {
                        break;
                    }
                    lending.start(first, first, need);
                    running.push([first, need]);
                    to_start -= 1;
                }
                running.retain(|[held, need]| held < need || rng.random_bool(0.3));
                assert!(idle < 200, "seed {seed}: {running:?} of {blocks} wait");
            }
        }
    }
}
