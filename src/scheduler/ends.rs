//! How long answers go on, learned from those of this run.
//!
//! It is known of each sequence how many blocks it has come to hold beyond those of its prompt, and of some that they
//! ended there, before their limit. Those that still run, or ended at their limit, or were cancelled, say only that
//! they came so far. From both follows the share that goes on from each number of blocks to the next; the product of
//! these shares is the share that comes to any number. (It is the product-limit estimator of E. L. Kaplan and P.
//! Meier, "Nonparametric Estimation from Incomplete Observations", Journal of the American Statistical Association
//! 53, 1958.)
//!
//! No distribution is assumed. If one were, for example that as many end at every length, a run of which half the
//! answers are short and the others go on to their limits would be filled with sequences when the short ones have
//! ended, and hardly any would have room to go on. Here a sequence that has outlived the short ones is expected to go
//! on.
//!
//! Of lengths that few have reached nothing is known yet. As many are taken to end there as at the last length before
//! them: a run of long answers would else have few sequences until the first of these have ended.
//!
//! In doubt answers are expected to be longer:
//!
//! - A running sequence counts as having reached its length as soon as it has the block, and one more than have counts.
//! - So many ends are left out as their number may differ by chance: the square root of it.
//!
//! What comes later in a run may have other lengths, and a queue may be open for days: the more have left since, the
//! less one weighs.

use crate::error::Result;
use crate::memory::{self, Purpose};

/// So many sequences that have reached a length are few.
const FEW: f64 = 3.0;

/// The least share of sequences that is told from none.
const LEAST: f64 = 1e-9;

/// When so many more sequences have left, those before weigh half.
const RECENT: usize = 2048;

/// What has been seen of the lengths of answers. They are counted in blocks beyond those of the prompt.
#[derive(Debug)]
pub(super) struct Ends {
    /// By length: the weight of the sequences that left there, and of those of them that ended early.
    left: Vec<(f64, f64)>,
    /// How many have left with their full weight.
    recent: usize,
    /// No sequence has been seen at a greater length.
    longest: usize,
    /// By length: the sequences that have reached it, also those that run.
    reached: Vec<f64>,
    /// By length: the share of sequences that reaches it.
    shares: Vec<f64>,
    /// The share that reaches this length reaches all greater ones.
    last: usize,
    /// Whether an answer has ended early.
    any: bool,
}

impl Ends {
    /// Nothing has been seen yet of sequences with at most so many blocks.
    pub(super) fn new(blocks: usize) -> Result<Self> {
        Ok(Self {
            left: memory::filled((0.0, 0.0), blocks + 1, Purpose::Schedule)?,
            recent: 0,
            longest: 0,
            reached: memory::filled(0.0, blocks + 1, Purpose::Schedule)?,
            shares: memory::filled(1.0, blocks + 1, Purpose::Schedule)?,
            last: 0,
            any: false,
        })
    }

    /// A sequence has left at this length, because its answer ended early or for another reason.
    pub(super) fn leave(&mut self, length: usize, early: bool) {
        self.longest = self.longest.max(length);
        self.any |= early;
        self.recent += 1;
        if self.recent > RECENT {
            self.recent = 1;
            for left in &mut self.left[..=self.longest] {
                *left = (left.0 / 2.0, left.1 / 2.0);
            }
        }
        self.left[length].0 += 1.0;
        self.left[length].1 += f64::from(early);
    }

    /// Learns from those that have left, and from the lengths of those that run; `false` if no answer has ended early.
    pub(super) fn learn(&mut self, running: impl Iterator<Item = usize>) -> bool {
        if !self.any {
            return false;
        }
        self.reached[..=self.longest].fill(0.0);
        for length in running {
            self.reached[length] += 1.0;
            self.longest = self.longest.max(length);
        }
        let mut reached = 0.0;
        for length in (0..=self.longest).rev() {
            reached += self.reached[length] + self.left[length].0;
            self.reached[length] = reached;
        }
        // Few end at a single length: the last quarter of the way to it is taken together.
        let (mut first, mut reached, mut early) = (0, 0.0, 0.0);
        self.last = 0;
        for length in 0..(self.longest + 1).min(self.shares.len() - 1) {
            if self.reached[length] <= FEW {
                break;
            }
            (reached, early) = (reached + self.reached[length], early + self.left[length].1);
            while first < length - length / 4 {
                (reached, early) = (reached - self.reached[first], early - self.left[first].1);
                first += 1;
            }
            let surely = (early - early.max(0.0).sqrt()).max(0.0);
            self.last = length + 1;
            self.shares[self.last] = (self.shares[length] * (1.0 - surely / (reached + 1.0))).max(LEAST);
        }
        self.go_on();
        true
    }

    /// Takes as many to end at each length behind the last known one as there.
    fn go_on(&mut self) {
        let Some(before) = self.last.checked_sub(1) else {
            return;
        };
        let goes_on = self.shares[self.last] / self.shares[before];
        while goes_on < 1.0 && self.shares[self.last] > LEAST && self.last + 1 < self.shares.len() {
            self.shares[self.last + 1] = (self.shares[self.last] * goes_on).max(LEAST);
            self.last += 1;
        }
    }

    /// Of the sequences that have reached a length, the share that reaches one `more` blocks greater.
    pub(super) fn share(&self, length: usize, more: usize) -> f64 {
        let share = |length: usize| self.shares[length.min(self.last)];
        share(length + more) / share(length)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Of so many sequences that have come to each of these lengths, so many have ended there; the others run.
    fn ends(seen: &[(usize, usize)]) -> (Ends, Vec<usize>) {
        let mut ends = Ends::new(99).unwrap();
        let mut running = Vec::new();
        for (length, &(reached, ended)) in seen.iter().enumerate() {
            let further = seen.get(length + 1).map_or(0, |next| next.0);
            (0..ended).for_each(|_| ends.leave(length, true));
            running.extend((further + ended..reached).map(|_| length));
        }
        (ends, running)
    }

    fn is(found: f64, expected: f64) -> bool {
        (found - expected).abs() < 1e-12
    }

    #[test]
    fn shares_are_those_of_sequences_that_went_on() {
        // Of 36 ends 30 are sure, of 99 and one more; of 4 at the next length 2, of 15 and one more.
        let (mut ends, running) = ends(&[(99, 36), (15, 4), (3, 0)]);
        assert!(ends.learn(running.into_iter()));
        assert!(is(ends.share(0, 0), 1.0) && is(ends.share(0, 1), 0.7));
        assert!(is(ends.share(1, 1), 0.875) && is(ends.share(0, 2), 0.7 * 0.875));
        // Few have come further.
        assert!(is(ends.share(2, 3), 0.875f64.powi(3)) && is(ends.share(50, 9), 0.875f64.powi(9)));
    }

    #[test]
    fn nothing_is_known_before_several_have_ended_where_several_have_come() {
        let (mut none, running) = ends(&[(99, 0), (80, 0)]);
        assert!(!none.learn(running.into_iter()));
        for seen in [[(99, 1), (80, 0)], [(3, 3), (0, 0)]] {
            let (mut ends, running) = ends(&seen);
            assert!(ends.learn(running.into_iter()));
            assert!(is(ends.share(0, 50), 1.0), "{seen:?}");
        }
    }

    #[test]
    fn sequences_without_blocks_have_one_length() {
        let mut ends = Ends::new(0).unwrap();
        (0..9).for_each(|_| ends.leave(0, true));
        assert!(ends.learn([0; 9].into_iter()));
        assert!(is(ends.share(0, 0), 1.0));
    }

    /// Half of the answers are short; one that has outlived them goes on to its limit.
    #[test]
    fn those_that_have_outlived_the_short_ones_go_on() {
        let mut seen = vec![(100, 25), (75, 25)];
        seen.extend([(50, 0); 40]);
        let (mut ends, running) = ends(&seen);
        assert!(ends.learn(running.into_iter()));
        assert!(ends.share(0, 40) < 0.6);
        assert!(is(ends.share(2, 1), ends.share(2, 90)) && ends.share(4, 90) == 1.0);
    }

    /// Answers were short, and are long now. What was seen long ago counts less and less.
    #[test]
    fn what_was_long_ago_is_forgotten() {
        let mut ends = Ends::new(99).unwrap();
        let mut share_after = |sequences: usize, length, early| {
            (0..sequences).for_each(|_| ends.leave(length, early));
            assert!(ends.learn(std::iter::empty()));
            ends.share(0, 1)
        };
        assert!(share_after(100_000, 0, true) < 0.1);
        assert!(share_after(4 * RECENT, 9, false) > 0.9, "{RECENT} say nothing any more");
    }

    /// Those cancelled have not ended.
    #[test]
    fn sequences_that_leave_for_another_reason_say_how_far_they_came() {
        let mut ends = Ends::new(99).unwrap();
        (0..50).for_each(|_| ends.leave(3, false));
        assert!(!ends.learn(std::iter::empty()));
        (0..9).for_each(|_| ends.leave(1, true));
        assert!(ends.learn(std::iter::empty()));
        // Of 9 ends 6 are sure, among 59 and one more.
        assert!(is(ends.share(0, 1), 1.0) && is(ends.share(1, 1), 1.0 - 6.0 / 60.0) && is(ends.share(2, 9), 1.0));
    }
}
