//! Blocks of the full layers for running sequences as they grow, by lending's rules (`lending.rs`), and from whom they
//! are taken where there are none.

use super::Scheduler;
use super::lending::oldest;
use super::sequence::Sequence;

impl Scheduler {
    /// Takes its blocks from a sequence, which waits again.
    pub(super) fn preempt(&mut self, slot: usize) {
        self.give_up_rows(slot);
        self.take_back(slot);
    }

    /// Notes that a sequence's rows will be computed again.
    pub(super) fn give_up_rows(&mut self, slot: usize) {
        if let Some(sequence) = &mut self.slots[slot] {
            self.recomputed += sequence.give_up_rows() as u64;
        }
    }

    /// Puts a sequence back to where it came from.
    pub(super) fn take_back(&mut self, slot: usize) {
        let Some(mut sequence) = self.release(slot) else {
            return;
        };
        self.pace.take_back();
        sequence.take_back();
        self.waiting.push_front(sequence);
    }

    /// Gives running sequences the blocks that they lack, as far as they may have them, and takes them from the
    /// youngest where lending's rules say so.
    pub(super) fn lend(&mut self) {
        if !self.stale {
            return;
        }
        let running = self.running.iter().filter_map(|&slot| self.slots[slot].as_ref());
        self.lending.learn(running.map(Sequence::length));
        self.lend_blocks();
        while self.lacking > 0
            && let Some(&youngest) = self.running.last()
            && let Some(sequence) = &self.slots[youngest]
            // A sequence that waits is counted in each step, and would have a row in one of so many.
            && self.lending.preempts(self.missed, sequence.fed() * self.limits.turns())
        {
            self.missed = 0;
            self.preempt(youngest);
            self.lend_blocks();
        }
        self.stale = false;
    }

    /// Lends one block to each running sequence that lacks it and may have it, and counts those that may not.
    fn lend_blocks(&mut self) {
        let (old, kept) = self.kept();
        self.lending.recount(self.cache.free(self.rings), kept);
        self.lacking = 0;
        for (place, &slot) in self.running.iter().enumerate() {
            let Some(sequence) = &mut self.slots[slot] else {
                continue;
            };
            if sequence.lacks_block(self.limits.block_tokens) {
                if self.lending.lend(place < old) {
                    let block = self.cache.lend_full();
                    sequence.full.push(block);
                } else {
                    self.lacking += 1;
                }
            }
            self.lending.count(sequence.growing());
        }
        debug_assert!(!self.lending.is_stuck(), "a sequence could wait for ever");
    }

    /// Counts the running sequences as they are.
    pub(super) fn count_anew(&mut self) {
        let (_, kept) = self.kept();
        self.recount(kept);
    }

    fn recount(&mut self, kept: usize) {
        self.lending.recount(self.cache.free(self.rings), kept);
        for sequence in self.running.iter().filter_map(|&slot| self.slots[slot].as_ref()) {
            self.lending.count(sequence.growing());
        }
    }

    /// For how many of the oldest sequences blocks are kept, and how many.
    fn kept(&mut self) -> (usize, usize) {
        let (learned, old) = (self.lending.has_learned(), oldest(self.running.len()));
        if learned || self.pace.is_kept() {
            self.recount(0);
        }
        if self.lending.is_crowded() || self.pace.is_kept() && self.lending.suffices() {
            return (old, 0);
        }
        let running = self.running[..old].iter();
        let running = running.filter_map(|&slot| self.slots[slot].as_ref());
        (old, running.map(Sequence::may_ask_for).sum())
    }
}
