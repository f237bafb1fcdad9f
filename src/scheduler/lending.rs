//! Which sequences get blocks, and when one more may start.
//!
//! A sequence starts with the blocks of its prompt and those of its ring, and gets others for full layers as it grows.
//! So more sequences run than would have room at their longest. Four rules:
//!
//! 1. *Nobody waits for ever.* What a running sequence may still ask for is never more than the free blocks and those
//!    of the sequences that started before it. So the oldest one always gets what it asks for; when it ends, the next
//!    oldest does. A block that would break this is not lent.
//! 2. *Where blocks are scarce, many end soon.* Free blocks are kept for the oldest quarter of the sequences, up to all
//!    that these may ask for. If younger ones got them, nearly all would stop one block short of their end, and a few
//!    at a time would end. There are two exceptions. Where starts are spread (`spread.rs`) and there is enough for all
//!    that run, none are kept: the timetable counts on them. And none are kept where more run than would if none ended
//!    early: there the fourth rule is better.
//! 3. *A sequence starts if, as all grow, there are nearly enough blocks at any time.* In the forecast no answer ends
//!    early, and all grow at the same pace. A sequence's blocks are free from its end on, so sequences that started at
//!    different times have room where as many of the same age would not. An eighth more than there are may be asked
//!    for: where it comes to that, the youngest wait for a short time, and otherwise these requests would run alone
//!    behind all others.
//!
//!    *Or if, from what is known of this run, a twentieth of the blocks is likely to be left at any time*: in a second
//!    forecast each sequence goes on as far as others did (`ends.rs`), and holds at any time what is expected of it;
//!    the blocks that all hold may be more by their standard deviation.
//! 4. *Where the second forecast was wrong, the youngest makes way.* If more run than would if none ended early, and
//!    answers become longer than they were, sequences wait for blocks, and hold theirs in vain. The rows that they miss
//!    are counted. When these are more than the youngest sequence has been fed, it is preempted, and its blocks are
//!    lent. So fewer rows are computed again than were missed, and at most twice as many are lost as if all had been
//!    known. (A. R. Karlin, M. S. Manasse, L. Rudolph and D. D. Sleator, "Competitive Snoopy Caching", Algorithmica 3,
//!    1988.) The youngest has the least to compute again. `comparison.rs` has what the rules cost and gain.
//!
//! A block that several sequences hold is free when the last of them has ended. So it is counted for the youngest: what
//! older ones then give back is only what nobody else has. A sequence that would begin behind blocks of others starts
//! only if rule 1 holds for all with these counted anew.

use super::ends::Ends;
use crate::error::Result;
use crate::memory::{self, Purpose};

/// The times of a forecast of what is likely are so many, from now until all have ended.
const TIMES: usize = 32;

/// One of so many blocks is likely to be left where more sequences run than would if none ended early.
const LEFT: usize = 20;

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
    /// How long answers of this run go on.
    pub(super) ends: Ends,
    /// Whether anything is known of that.
    learned: bool,
    /// The sequences counted.
    counted: Vec<Growing>,
    likely: Likely,
}

/// A sequence that is counted.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Growing {
    /// The blocks that are free when it has ended.
    pub(super) held: usize,
    /// Its blocks beyond those of its prompt, or those that it has had.
    pub(super) length: usize,
    /// How many more it may ask for.
    pub(super) more: usize,
    /// How many of these it will ask for: it was preempted, and has had them.
    pub(super) certain: usize,
}

impl Growing {
    /// One that starts with `first` of its `need` blocks.
    pub(super) fn starting(first: usize, need: usize) -> Self {
        Self {
            held: first,
            length: 0,
            more: need - first,
            certain: 0,
        }
    }

    fn need(self) -> usize {
        self.held + self.more
    }
}

/// What sequences are likely to hold at each time of a forecast.
#[derive(Clone, Copy, Debug)]
struct Likely {
    /// Blocks by which sequences grow from one time to the next.
    step: usize,
    /// How many of the sequences counted are in it.
    sequences: usize,
    /// The expected number of blocks, and its variance.
    blocks: [(f64, f64); TIMES + 1],
}

impl Likely {
    fn new(step: usize) -> Self {
        Self {
            step,
            sequences: 0,
            blocks: [(0.0, 0.0); TIMES + 1],
        }
    }

    fn add(&mut self, one: Growing, ends: &Ends) {
        let times = one.more.div_ceil(self.step);
        for (time, blocks) in self.blocks[..=times].iter_mut().enumerate() {
            let grown = (time * self.step).min(one.more);
            let (held, share) = (
                (one.held + grown) as f64,
                ends.share(one.length, grown.saturating_sub(one.certain)),
            );
            blocks.0 += held * share;
            blocks.1 += held * held * share * (1.0 - share);
        }
    }
}

impl Lending {
    /// No sequence is running; at most so many will.
    pub(super) fn new(blocks: usize, sequences: usize) -> Result<Self> {
        Ok(Self {
            blocks,
            free: blocks,
            kept: 0,
            spare: usize::MAX,
            held: 0,
            growing: memory::filled((0, 0), blocks + 1, Purpose::Schedule)?,
            longest: 0,
            is_stuck: false,
            ends: Ends::new(blocks)?,
            learned: false,
            counted: memory::room(sequences, Purpose::Schedule)?,
            likely: Likely::new(1),
        })
    }

    /// Learns from the answers that have ended, and from the lengths of those that run.
    pub(super) fn learn(&mut self, running: impl Iterator<Item = usize>) {
        self.learned = self.ends.learn(running);
    }

    /// Begins to count anew. The oldest sequences may still ask for `kept` blocks.
    pub(super) fn recount(&mut self, free: usize, kept: usize) {
        self.growing[..=self.longest].fill((0, 0));
        (self.free, self.kept, self.spare) = (free, kept, usize::MAX);
        (self.held, self.longest, self.is_stuck) = (0, 0, false);
        self.counted.clear();
        self.likely = Likely::new(1);
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

    /// Counts a sequence.
    pub(super) fn count(&mut self, one: Growing) {
        let Growing { held, more, .. } = one;
        self.is_stuck |= self.free + self.held < more;
        self.spare = self.spare.min((self.free + self.held).saturating_sub(more));
        self.held += held;
        self.growing[more].0 += 1;
        self.growing[more].1 += held;
        self.longest = self.longest.max(more);
        self.counted.push(one);
    }

    /// Whether one of the sequences counted could wait for ever.
    pub(super) fn is_stuck(&self) -> bool {
        self.is_stuck
    }

    /// Whether such a sequence may start, which takes `first` of the free blocks.
    pub(super) fn may_start(&mut self, first: usize, one: Growing) -> bool {
        one.need() <= self.blocks
            && first <= self.spare.min(self.free.saturating_sub(self.kept))
            && (self.nearly_suffices(one) || self.is_likely_to_do(one))
    }

    /// Whether answers have ended early.
    pub(super) fn has_learned(&self) -> bool {
        self.learned
    }

    /// Whether more sequences run than would if nothing were known of how long they go on.
    pub(super) fn is_crowded(&self) -> bool {
        self.learned && !self.nearly_suffices(Growing::default())
    }

    /// Whether the youngest sequence is preempted, which has been fed so many rows, when others have missed so many.
    pub(super) fn preempts(&self, missed: usize, fed: usize) -> bool {
        self.is_crowded() && missed > fed
    }

    /// Whether there is enough for all sequences counted, as they grow at the same pace.
    pub(super) fn suffices(&self) -> bool {
        self.most_asked_for(Growing::default()) <= self.blocks
    }

    /// Whether at most an eighth more than there are is ever asked for, one more sequence among them, if none ends
    /// early.
    fn nearly_suffices(&self, one: Growing) -> bool {
        self.most_asked_for(one) <= self.blocks + self.blocks / 8
    }

    /// Whether a twentieth of the blocks is likely to be left at any time, with one more sequence.
    fn is_likely_to_do(&mut self, one: Growing) -> bool {
        if !self.learned {
            return false;
        }
        let mut likely = self.foresee(one.more);
        likely.add(one, &self.ends);
        let most = (self.blocks - self.blocks / LEFT) as f64;
        let mut times = likely.blocks.iter();
        times.all(|(expected, variance)| expected + variance.sqrt() <= most)
    }

    /// What the sequences counted are likely to hold until all have ended, also one that may ask for `more`.
    fn foresee(&mut self, more: usize) -> Likely {
        let step = self.longest.max(more).div_ceil(TIMES).max(1);
        if step != self.likely.step {
            self.likely = Likely::new(step);
        }
        for &one in &self.counted[self.likely.sequences..] {
            self.likely.add(one, &self.ends);
        }
        self.likely.sequences = self.counted.len();
        self.likely
    }

    /// Starts it, and counts it.
    pub(super) fn start(&mut self, first: usize, one: Growing) {
        self.take(first);
        self.count(one);
    }

    /// The most blocks that all sequences ask for at the same time, one more among them.
    fn most_asked_for(&self, one: Growing) -> usize {
        let (mut sequences, mut held, mut most) = (0, 0, 0);
        for more in (0..=self.longest.max(one.more)).rev() {
            let its = usize::from(more == one.more);
            sequences += self.growing[more].0 + its;
            held += self.growing[more].1 + its * one.held;
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
    use std::iter;

    fn starting(first: usize, need: usize) -> Growing {
        Growing::starting(first, need)
    }

    /// One that began with `first` of its `need` blocks and holds `held`.
    fn grown(first: usize, held: usize, need: usize) -> Growing {
        Growing {
            held,
            length: held - first,
            more: need - held,
            certain: 0,
        }
    }

    #[test]
    fn blocks_are_asked_for_until_a_sequence_ends() {
        let mut lending = Lending::new(100, 9).unwrap();
        lending.start(1, starting(1, 4));
        // Of the same age both want four at the end; one that ends two blocks earlier has left by then.
        assert_eq!(lending.most_asked_for(starting(1, 4)), 8);
        assert_eq!(lending.most_asked_for(starting(1, 2)), 4);
        // One block later they hold 2 + 6 + 3, then the first one alone grows to 4.
        lending.start(5, starting(5, 6));
        assert_eq!(lending.most_asked_for(starting(2, 3)), 11);
    }

    #[test]
    fn an_eighth_more_may_start_than_has_room_at_its_longest() {
        let most = |blocks: usize| {
            let mut lending = Lending::new(blocks, 99).unwrap();
            let mut started = 0;
            while lending.may_start(1, starting(1, 4)) {
                lending.start(1, starting(1, 4));
                started += 1;
            }
            started
        };
        assert_eq!((most(160), most(32), most(31), most(4)), (45, 9, 8, 1));
        // The blocks of its prompt must be there.
        let mut lending = Lending::new(7, 1).unwrap();
        assert!(lending.may_start(7, starting(7, 7)) && !lending.may_start(8, starting(8, 8)));
    }

    #[test]
    fn young_sequences_leave_the_oldest_what_these_ask_for() {
        // Eight sequences hold two blocks of four each; five are free, of which two sequences may ask for four.
        let mut lending = Lending::new(21, 8).unwrap();
        lending.recount(5, 4);
        let lent: Vec<_> = (0..8)
            .map(|place| {
                let lent = lending.lend(place < oldest(8));
                lending.count(grown(1, 2 + usize::from(lent), 4));
                lent
            })
            .collect();
        assert_eq!(lent, [true, true, true, false, false, false, false, false]);
    }

    /// As many start as ever may if none ends early; of answers of which most end soon, more.
    #[test]
    fn more_start_where_answers_end_early() {
        let most = |early: usize| {
            let mut lending = Lending::new(1000, 999).unwrap();
            (0..400).for_each(|place| lending.ends.leave(if place < early { 1 } else { 9 }, place < early));
            lending.learn(iter::empty());
            assert_eq!(lending.has_learned(), early > 0);
            let mut started = 0;
            while lending.may_start(1, starting(1, 10)) {
                lending.start(1, starting(1, 10));
                started += 1;
            }
            started
        };
        assert_eq!([0, 1, 40, 200, 360].map(most), [112, 112, 112, 165, 475]);
    }

    /// Half of the answers end one block behind the sixth: of sequences that are certain to have six more fewer start.
    #[test]
    fn what_a_preempted_sequence_has_had_is_certain() {
        let most = |certain: usize| {
            let mut lending = Lending::new(1000, 999).unwrap();
            (0..400).for_each(|place| lending.ends.leave([9, 2, 7, 7][place % 4], place % 4 > 0));
            lending.learn(iter::empty());
            assert!(lending.has_learned());
            // Both have come to six blocks beyond their prompts; of one it is certain that it will again.
            let one = Growing {
                length: 6,
                certain,
                ..starting(1, 10)
            };
            let mut started = 0;
            while lending.may_start(1, one) {
                lending.start(1, one);
                started += 1;
            }
            started
        };
        assert!(10 * most(0) > 11 * most(6), "{} and {}", most(0), most(6));
    }

    /// Sequences of random needs ask for blocks in a random order, whatever was learned of how long they go on: someone
    /// always gets one, until all have ended.
    #[test]
    fn nobody_waits_for_ever() {
        for seed in 0..3000 {
            let rng = &mut ChaCha8Rng::seed_from_u64(seed);
            let blocks = rng.random_range(1..40);
            let early = [0.0, 0.02, 0.3][rng.random_range(0..3)];
            let mut lending = Lending::new(blocks, 99).unwrap();
            let mut running: Vec<[usize; 3]> = Vec::new();
            let (mut to_start, mut idle) = (30, 0);
            while to_start > 0 || !running.is_empty() {
                let free = blocks - running.iter().map(|[_, held, _]| held).sum::<usize>();
                lending.learn(running.iter().map(|[first, held, _]| held - first));
                let old = rng.random_range(0..=running.len());
                lending.recount(free, rng.random_range(0..=free));
                idle += 1;
                for (place, [first, held, need]) in running.iter_mut().enumerate() {
                    let asks = held < need && (place == 0 || rng.random_bool(0.5));
                    if asks && lending.lend(place < old) {
                        *held += 1;
                        idle = 0;
                    }
                    lending.count(grown(*first, *held, *need));
                }
                while to_start > 0 {
                    let need = rng.random_range(1..=blocks);
                    let first = rng.random_range(1..=need);
                    if !lending.may_start(first, starting(first, need)) {
                        break;
                    }
                    lending.start(first, starting(first, need));
                    running.push([first, first, need]);
                    to_start -= 1;
                }
                running.retain(|&[first, held, need]| {
                    let ends = rng.random_bool(if held < need { early } else { 0.3 });
                    if ends {
                        lending.ends.leave(held - first, held < need);
                    }
                    !ends
                });
                assert!(idle < 200, "seed {seed}: {running:?} of {blocks} wait");
            }
        }
    }
}
