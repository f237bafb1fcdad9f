//! When requests start, where more wait than have room.
//!
//! A sequence holds little while it is young and most at its end. Sequences that start together need their last block
//! together, and until then half of the KV cache is empty on average; of sequences of all ages nearly twice as many
//! have room. So starts are spread, by a timetable made ahead from what is known then: the lengths of the prompts, the
//! limits, and how many wait.
//!
//! *The best timetable is that of the fewest steps, whatever a step costs*, if its time is a fixed part and parts in
//! proportion to its rows, the keys that these read and its prompt tokens. All timetables feed the same tokens at the
//! same positions, so only the fixed part differs. Hence nothing is measured. Where more rows cost less than in
//! proportion, uneven steps are cheaper yet, and a timetable gains more than its steps say.
//!
//! *Few steps are found from the end.* In forward order a sequence that fits now may have no room later. Backward it
//! holds its most at once and ever less after that: it fits where there is room for its most, and the cache is full
//! nearly all of the time. So from the last request to the first each starts as late as it can. What comes of it, for
//! requests alike: an even pace, then a thinner one, then as many together as have room at their longest, and nothing
//! is left behind them. Then, from the first to the last, each starts as early as these places allow, so that a long
//! answer among short ones is not left to the end. Nobody waits for a block in a timetable.
//!
//! *A timetable is kept only if it pays*: if the rules of `lending.rs` alone take a twentieth more rounds. Where all
//! have room, or lengths are mixed well, they do not.
//!
//! A timetable delays starts and no more: who may start and who gets blocks is decided by these rules as before.

use super::lending::{Growing, Lending, oldest};
use crate::error::Result;
use crate::kv_blocks::blocks_for;
use crate::memory::{self, Purpose};

/// The longest sequence has so many rounds in a timetable: fine enough for the shape of its growth, and one for
/// thousands of requests takes milliseconds.
const ROUNDS: usize = 64;

/// Answers that ended before their limit and tell nothing yet.
const FEW: usize = 1;

/// A request that waits.
#[derive(Clone, Copy, Debug)]
pub struct Ahead {
    /// Tokens of its prompt.
    pub n_prompt: usize,
    /// The most positions it may be fed.
    pub max_positions: usize,
}

/// Room for sequences.
#[derive(Clone, Copy, Debug)]
pub(super) struct Room {
    /// Positions in a block.
    pub(super) block_tokens: usize,
    /// Blocks, for full layers or for windowed ones.
    pub(super) blocks: usize,
    /// Blocks of a sequence in windowed layers while it decodes.
    pub(super) ring: usize,
    /// The most sequences at once.
    pub(super) sequences: usize,
    /// The most rows of a prompt in a step.
    pub(super) chunk_tokens: usize,
}

impl Room {
    /// Steps that compute its prompt; the last one gives the first token.
    fn chunks(&self, request: Ahead) -> usize {
        request.n_prompt.div_ceil(self.chunk_tokens)
    }

    /// Steps from its start to its end.
    fn steps(&self, request: Ahead) -> usize {
        self.chunks(request) + request.max_positions.saturating_sub(request.n_prompt)
    }

    /// The most blocks that it holds in its first `steps` steps.
    fn held(&self, request: Ahead, steps: usize) -> usize {
        let sampled = steps.saturating_sub(self.chunks(request));
        self.blocks_of((request.n_prompt + sampled).min(request.max_positions))
    }

    /// The blocks of a sequence with so many positions.
    fn blocks_of(&self, positions: usize) -> usize {
        blocks_for(self.block_tokens, positions) + self.ring
    }
}

/// The rounds of a timetable, and who is there in each.
struct Rounds {
    room: Room,
    /// Steps in a round.
    steps: usize,
    /// By round: blocks held, and sequences.
    taken: Vec<(usize, usize)>,
}

impl Rounds {
    /// Reads what a request holds in each of its rounds into `held`.
    fn shape(&self, request: Ahead, held: &mut Vec<usize>) -> Result<()> {
        held.clear();
        let rounds = self.room.steps(request).div_ceil(self.steps).max(1);
        let blocks = (1..=rounds).map(|round| self.room.held(request, round * self.steps));
        memory::extend(held, blocks, Purpose::Schedule)
    }

    /// Whether there is room from the round `start` on for what holds so much in each round.
    fn fits(&self, start: usize, mut held: impl DoubleEndedIterator<Item = usize> + ExactSizeIterator) -> bool {
        let taken = &self.taken[start..start + held.len()];
        let fits = |(taken, held): (&(usize, usize), usize)| {
            taken.0 + held <= self.room.blocks && taken.1 < self.room.sequences
        };
        taken.iter().zip(&mut held).all(fits)
    }

    fn take(&mut self, start: usize, held: impl Iterator<Item = usize>) {
        for (taken, held) in self.taken[start..].iter_mut().zip(held) {
            *taken = (taken.0 + held, taken.1 + 1);
        }
    }

    fn leave(&mut self, start: usize, held: &[usize]) {
        for (taken, held) in self.taken[start..].iter_mut().zip(held) {
            *taken = (taken.0 - held, taken.1 - 1);
        }
    }
}

/// The rounds in which the requests start, in order, and how many rounds they take in all. Each could run alone.
fn starts(ahead: &[Ahead], rounds: &mut Rounds) -> Result<(Vec<usize>, usize)> {
    let mut starts = memory::filled(0, ahead.len(), Purpose::Schedule)?;
    let mut held = Vec::new();
    // Rounds are counted from the end here: it ends with the round `end` of this order.
    let mut all = 0;
    for (start, &request) in starts.iter_mut().zip(ahead).rev() {
        rounds.shape(request, &mut held)?;
        all = all.max(held.len());
        loop {
            memory::resize(&mut rounds.taken, all, (0, 0), Purpose::Schedule)?;
            if rounds.fits(all - held.len(), held.iter().rev().copied()) {
                break;
            }
            all += 1;
        }
        rounds.take(all - held.len(), held.iter().rev().copied());
        *start = all;
    }
    rounds.taken.reverse();
    starts.iter_mut().for_each(|start| *start = all - *start);
    let (mut earliest, mut end) = (0, 0);
    for (start, &request) in starts.iter_mut().zip(ahead) {
        rounds.shape(request, &mut held)?;
        rounds.leave(*start, &held);
        while earliest < *start && !rounds.fits(earliest, held.iter().copied()) {
            earliest += 1;
        }
        rounds.take(earliest, held.iter().copied());
        *start = earliest;
        end = end.max(earliest + held.len());
    }
    Ok((starts, end))
}

/// In how many rounds of so many steps the requests end by the rules of `lending.rs`, if in at most `most`; with
/// `starts`, none starts before its round there.
fn rounds_taken(
    ahead: &[Ahead],
    room: Room,
    steps: usize,
    most: usize,
    starts: Option<&[usize]>,
) -> Result<Option<usize>> {
    struct Running {
        request: Ahead,
        steps: usize,
        held: usize,
        need: usize,
    }
    let mut lending = Lending::new(room.blocks, room.sequences.min(ahead.len()))?;
    let mut running: Vec<Running> = memory::room(room.sequences.min(ahead.len()), Purpose::Schedule)?;
    let earliest = |place: usize| starts.map_or(0, |starts| starts[place]);
    let mut waiting = ahead.iter().copied().enumerate();
    let mut next = waiting.next();
    let mut free = room.blocks;
    for round in 0..most {
        let old = oldest(running.len());
        lending.recount(free, running[..old].iter().map(|one| one.need - one.held).sum());
        for (place, one) in running.iter_mut().enumerate() {
            let wanted = room.held(one.request, one.steps + steps);
            while one.held < wanted && lending.lend(place < old) {
                one.held += 1;
                free -= 1;
            }
            lending.count(Growing {
                held: one.held,
                length: one.held - room.held(one.request, 0),
                more: one.need - one.held,
                certain: 0,
            });
        }
        let may_begin = |place: usize, running: usize| running < room.sequences && earliest(place) <= round;
        while let Some((_, request)) = next.filter(|(place, _)| may_begin(*place, running.len())) {
            let held = room.held(request, 0);
            let need = room.blocks_of(request.max_positions);
            let starting = Growing::starting(held, need);
            if !lending.may_start(held, starting) {
                break;
            }
            lending.start(held, starting);
            free -= held;
            running.push(Running {
                request,
                steps: 0,
                held,
                need,
            });
            next = waiting.next();
        }
        for one in &mut running {
            let beyond_prompt = (one.held * room.block_tokens).saturating_sub(one.request.n_prompt);
            let has_blocks_for = room.chunks(one.request) + beyond_prompt;
            one.steps += steps;
            if one.held < one.need {
                one.steps = one.steps.min(has_blocks_for);
            }
        }
        running.retain(|one| {
            let ended = one.steps >= room.steps(one.request);
            free += if ended { one.held } else { 0 };
            !ended
        });
        if running.is_empty() && next.is_none() {
            return Ok(Some(round + 1));
        }
    }
    Ok(None)
}

/// How many steps after the one before it each of these requests is to start; `None` if starts need not be spread, or
/// if one could not even run alone. It is made where nothing runs.
fn timetable(ahead: &[Ahead], room: Room) -> Result<Option<Vec<usize>>> {
    let longest = ahead.iter().map(|&request| room.steps(request)).max();
    let fits = |request: &Ahead| room.blocks_of(request.max_positions) <= room.blocks;
    let Some(longest) = longest.filter(|_| room.sequences > 0 && ahead.iter().all(fits)) else {
        return Ok(None);
    };
    let steps = longest.div_ceil(ROUNDS).max(1);
    let mut rounds = Rounds {
        room,
        steps,
        taken: Vec::new(),
    };
    let (mut starts, end) = starts(ahead, &mut rounds)?;
    let without = rounds_taken(ahead, room, steps, 2 * end, None)?.unwrap_or(2 * end + 1);
    // The rules may hold up one that a timetable starts: by them, too, it has to take less.
    let pays = || Ok(rounds_taken(ahead, room, steps, without - 1, Some(&starts))?.is_some());
    if without <= end + end / 20 || !pays()? {
        return Ok(None);
    }
    let mut before = 0;
    for start in &mut starts {
        let gap = (*start - before) * steps;
        before = std::mem::replace(start, gap);
    }
    Ok(Some(starts))
}

/// The timetable of a scheduler, and how far it is kept.
#[derive(Debug, Default)]
pub(super) struct Pace {
    /// Steps between starts; empty if starts need not be spread.
    gaps: Vec<usize>,
    /// Requests of which it was told, and how many of them have started.
    told: usize,
    started: usize,
    /// The step before which one started last.
    last_start: u64,
    /// Tokens sampled so far, answers that ended before their limit, and the tokens that they had left.
    tokens: usize,
    early: usize,
    left: usize,
}

impl Pace {
    /// Whether it was told of about as many requests as wait. With several replicas each has its share, and not all are
    /// equally fast.
    pub(super) fn knows(&self, waiting: usize) -> bool {
        let known = self.told.saturating_sub(self.started);
        waiting <= known + known / 8
    }

    /// Makes one for the requests that wait. Where memory for it is lacking there is none.
    pub(super) fn make(&mut self, ahead: &[Ahead], room: Room) {
        *self = Self {
            gaps: timetable(ahead, room).ok().flatten().unwrap_or_default(),
            told: ahead.len(),
            ..Self::default()
        };
    }

    /// Whether it is kept. It is not where answers end before their limits and leave an eighth as many tokens as
    /// were sampled: then there is more room than was foreseen, and ages differ by themselves.
    pub(super) fn is_kept(&self) -> bool {
        !self.gaps.is_empty() && (self.early <= FEW || self.left <= self.tokens / 8)
    }

    /// Whether the next request may start before the step after so many.
    pub(super) fn may_start(&self, steps: u64, turns: usize) -> bool {
        let gap = self.gaps.get(self.started).map_or(0, |gap| gap * turns);
        !self.is_kept() || steps >= self.last_start + gap as u64
    }

    /// A request starts after so many steps.
    pub(super) fn start(&mut self, steps: u64) {
        self.last_start = steps;
        self.started += 1;
    }

    /// The request that started last has not, after all, or one was preempted and has to start again.
    pub(super) fn take_back(&mut self) {
        self.started = self.started.saturating_sub(1);
    }

    /// A token was stored.
    pub(super) fn sample(&mut self) {
        self.tokens += 1;
    }

    /// An answer ended so many tokens before its limit.
    pub(super) fn end(&mut self, left: usize) {
        self.early += usize::from(left > 0);
        self.left += left;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::{Rng, SeedableRng};
    use rand_chacha::ChaCha8Rng;

    const ROOM: Room = Room {
        block_tokens: 64,
        blocks: 304 * 16,
        ring: 0,
        sequences: 2000,
        chunk_tokens: 512,
    };

    fn alike(requests: usize, n_prompt: usize, output: usize) -> Vec<Ahead> {
        let one = Ahead {
            n_prompt,
            max_positions: n_prompt + output - 1,
        };
        vec![one; requests]
    }

    /// The step in which each starts.
    fn steps(ahead: &[Ahead], room: Room) -> Option<Vec<usize>> {
        let gaps = timetable(ahead, room).unwrap()?;
        let mut step = 0;
        let add = |gap: &usize| {
            step += gap;
            step
        };
        Some(gaps.iter().map(add).collect())
    }

    /// 890 requests would be three waves of 992 steps; 304 have room at their longest.
    #[test]
    fn starts_are_even_then_thin_and_the_last_are_a_whole_wave() {
        let starts = steps(&alike(890, 32, 992), ROOM).unwrap();
        assert!(starts[586..].iter().all(|&start| start == 1216));
        let within = |steps: std::ops::Range<usize>| starts.iter().filter(|&start| steps.contains(start)).count();
        let by_quarters = [0, 1, 2, 3, 4].map(|quarter| within(248 * quarter..(248 * (quarter + 1)).min(1216)));
        assert_eq!(by_quarters, [136, 163, 127, 100, 60]);
    }

    #[test]
    fn starts_are_not_spread_where_all_have_room() {
        for requests in [1, 200, 304, 330] {
            assert_eq!(steps(&alike(requests, 32, 992), ROOM), None);
        }
        assert!(steps(&alike(350, 32, 992), ROOM).is_some());
        let one_too_long = Ahead {
            n_prompt: 1,
            max_positions: 64 * ROOM.blocks + 1,
        };
        assert_eq!(steps(&[alike(350, 32, 992), vec![one_too_long]].concat(), ROOM), None);
    }

    /// With as many sequences as may run there is room for all blocks.
    #[test]
    fn no_more_start_than_may_run() {
        let room = Room { sequences: 300, ..ROOM };
        assert_eq!(steps(&alike(900, 32, 992), room), None);
    }

    /// In no round of a timetable more is held than there is, and it takes few rounds more than the best one, which is
    /// searched for among all.
    #[test]
    fn timetables_are_nearly_as_short_as_the_best() {
        let (mut all, mut best_of_all) = (0, 0);
        for seed in 0..400 {
            let rng = &mut ChaCha8Rng::seed_from_u64(seed);
            let ring = rng.random_range(0..3);
            let room = Room {
                block_tokens: 1,
                blocks: rng.random_range(4..14) + ring,
                ring,
                sequences: rng.random_range(1..6),
                chunk_tokens: 8,
            };
            let longest = rng.random_range(1..=(room.blocks - ring).min(6));
            let one = |rng: &mut ChaCha8Rng| {
                let max_positions = rng.random_range(1..=longest);
                let n_prompt = rng.random_range(1..=max_positions);
                Ahead {
                    n_prompt,
                    max_positions,
                }
            };
            let first = one(rng);
            let is_alike = rng.random_bool(0.5);
            let requests = rng.random_range(1..7);
            let ahead: Vec<_> = (0..requests).map(|_| if is_alike { first } else { one(rng) }).collect();
            let mut rounds = Rounds {
                room,
                steps: 1,
                taken: Vec::new(),
            };
            let (starts, end) = starts(&ahead, &mut rounds).unwrap();
            assert!(starts.is_sorted(), "seed {seed}");
            let taken = |round: usize| {
                let there = starts.iter().zip(&ahead).filter_map(|(&start, &request)| {
                    let there = (start..start + room.steps(request)).contains(&round);
                    there.then(|| room.held(request, round - start + 1))
                });
                there.fold((0, 0), |(blocks, sequences), held| (blocks + held, sequences + 1))
            };
            for round in 0..end {
                let (blocks, sequences) = taken(round);
                assert!(blocks <= room.blocks && sequences <= room.sequences, "seed {seed}");
            }
            let best = (1..=end).find(|&end| ends_in(&ahead, room, end)).unwrap();
            assert!(end <= best + 2, "seed {seed}: {end} rounds, {best} are enough");
            (all, best_of_all) = (all + end, best_of_all + best);
        }
        assert!(100 * all <= 104 * best_of_all, "{all} rounds, {best_of_all} are enough");
    }

    /// Whether there are places for all that end in so many rounds, by trying each.
    fn ends_in(ahead: &[Ahead], room: Room, end: usize) -> bool {
        fn place(ahead: &[Ahead], rounds: &mut Rounds, earliest: usize) -> bool {
            let Some((&request, others)) = ahead.split_first() else {
                return true;
            };
            let mut held = Vec::new();
            rounds.shape(request, &mut held).unwrap();
            for start in earliest..=rounds.taken.len().saturating_sub(held.len()) {
                if start + held.len() > rounds.taken.len() || !rounds.fits(start, held.iter().copied()) {
                    continue;
                }
                rounds.take(start, held.iter().copied());
                if place(others, rounds, start) {
                    return true;
                }
                rounds.leave(start, &held);
            }
            false
        }
        let mut rounds = Rounds {
            room,
            steps: 1,
            taken: vec![(0, 0); end],
        };
        place(ahead, &mut rounds, 0)
    }

    #[test]
    fn a_timetable_is_given_up_where_answers_end_early() {
        let mut pace = Pace::default();
        pace.make(&alike(890, 32, 992), ROOM);
        let at_once = pace.gaps.iter().take_while(|&&gap| gap == 0).count();
        (0..at_once).for_each(|_| pace.start(0));
        let gap = pace.gaps[at_once] as u64;
        assert!(pace.is_kept() && !pace.may_start(gap - 1, 1) && pace.may_start(gap, 1));
        assert!(
            !pace.may_start(2 * gap - 1, 2) && pace.may_start(2 * gap, 2),
            "every other step is its own"
        );
        (0..80).for_each(|_| pace.sample());
        pace.end(900);
        assert!(pace.is_kept(), "one says little");
        pace.end(900);
        assert!(!pace.is_kept() && pace.may_start(0, 1));
        (0..20_000).for_each(|_| pace.sample());
        assert!(pace.is_kept(), "few of many");
    }
}
