//! Into which runs of units the rows of a step's decode attention are cut.
//!
//! Decode attention is bound by memory bandwidth: all multiprocessors should read all the time and finish together. A
//! row's keys form a fixed tree of units, groups and spans (`AttentionItem` in `args.rs`), so that a row can be split
//! at any of them (split-K) without changing a bit of its result. Partial sums of split rows cost memory traffic, and
//! time at the end, when one block folds them all; so the longest runs of keys are taken that still balance.

use super::args::{ATTENTION_GROUP, ATTENTION_SPAN, ATTENTION_UNIT, ITEM_PAGES, KV_PAGE};
use super::shared_keys::GROUP_KEYS;
use std::fmt;

/// Units of a split row's items, largest first.
const RUNS: [usize; 3] = [ATTENTION_SPAN, ATTENTION_GROUP, 1];

/// What the items of decode attention are to fill, and where their partial sums have room.
#[derive(Clone, Copy, Debug)]
pub struct Load {
    /// An item has a block for each KV head.
    pub kv_heads: usize,
    /// So many blocks run at once, each of which has an even share of the load.
    pub at_once: usize,
    /// No row is split into runs of less than so many units.
    pub least_run: usize,
    /// There is room for so many partial sums; [`max_partials`] at least.
    pub most_partials: usize,
    /// Of items alike those of the same position are neighbours, not those of the same row, so that what rows share is
    /// read again while it is in a cache.
    pub by_position: bool,
    /// Whether an item may be a whole row of any length, whose keys the warps of a block share out; teams take none.
    pub whole_rows: bool,
}

/// What is said of a run of so many units.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RunVerdict {
    /// No item of it exceeds two thirds of an even share of the load: the longest such run is taken.
    Balances,
    /// Teams take them, and its items fill whole rounds of the multiprocessors: at most a tenth more than an even share
    /// for each.
    Fills,
    /// Neither.
    TooLong,
    /// The shortest that there may be is taken, whatever the load.
    Least,
    /// The kernel for so few rows shares that much out by itself.
    TooShort,
}

impl fmt::Display for RunVerdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Balances => "no item of it exceeds two thirds of an even share of the load",
            Self::Fills => "teams take items of it, which fill whole rounds of the multiprocessors",
            Self::TooLong => "an item of it would exceed two thirds of an even share of the load",
            Self::Least => "there is no shorter one that the kernels take",
            Self::TooShort => "the kernel for so few rows shares that much out by itself",
        })
    }
}

/// What is said of each run, longest first, for rows of which one has at most `most` keys, and all have `all`;
/// `pieces(run)` is how they are cut into it.
pub fn runs(load: &Load, most: usize, all: usize, pieces: impl Fn(usize) -> Pieces) -> [(usize, RunVerdict); 3] {
    let &Load {
        kv_heads,
        at_once,
        least_run,
        ..
    } = load;
    let balances = |run: usize| 2 * kv_heads * all >= 3 * at_once * most.min(run * ATTENTION_UNIT);
    let fills = |run: usize| {
        let Pieces {
            whole,
            parts,
            longest_part,
        } = pieces(run);
        let rounds = (kv_heads * whole).div_ceil(at_once);
        // Shorter ones go last, where the last round of whole ones has room, and behind it.
        let left = (kv_heads * (whole + parts)).saturating_sub(rounds * at_once);
        let keys = rounds * run * ATTENTION_UNIT + left.div_ceil(at_once) * longest_part;
        least_run == ATTENTION_GROUP && 10 * keys * at_once <= 11 * kv_heads * all
    };
    RUNS.map(|run| match run {
        _ if run < least_run => (run, RunVerdict::TooShort),
        _ if balances(run) => (run, RunVerdict::Balances),
        _ if fills(run) => (run, RunVerdict::Fills),
        _ if run == least_run => (run, RunVerdict::Least),
        _ => (run, RunVerdict::TooLong),
    })
}

/// The run that is taken.
pub fn taken(runs: &[(usize, RunVerdict)]) -> usize {
    let mut takes = runs
        .iter()
        .filter(|(_, verdict)| matches!(verdict, RunVerdict::Balances | RunVerdict::Fills | RunVerdict::Least));
    takes.next().map_or(1, |&(run, _)| run)
}

/// Items of rows that are cut into runs.
#[derive(Clone, Copy, Debug, Default)]
pub struct Pieces {
    /// Whole runs.
    pub whole: usize,
    /// Others, and the keys of the longest of these.
    pub parts: usize,
    /// See `parts`.
    pub longest_part: usize,
}

impl Pieces {
    /// Of so many rows with so many keys each from `first` on, in runs of `run` units.
    pub fn of(rows: usize, first: usize, keys: usize, run: usize) -> Self {
        let (end, size) = (first + keys, run * ATTENTION_UNIT);
        let whole = (end / size).saturating_sub(first.div_ceil(size));
        let longest_part = match whole {
            0 => keys,
            _ => (end % size).max(first.next_multiple_of(size) - first),
        };
        Self {
            whole: rows * whole,
            parts: rows * (items_of(first, keys, run) - whole),
            longest_part,
        }
    }

    /// Those of both.
    pub fn and(self, other: Self) -> Self {
        Self {
            whole: self.whole + other.whole,
            parts: self.parts + other.parts,
            longest_part: self.longest_part.max(other.longest_part),
        }
    }
}

/// How many items a row of so many keys from `first` on has in runs of `run` units.
pub fn items_of(first: usize, keys: usize, run: usize) -> usize {
    let (end, size) = (first + keys, run * ATTENTION_UNIT);
    let whole = keys <= size && (end - 1) / KV_PAGE - first / KV_PAGE < ITEM_PAGES;
    if whole { 1 } else { (end - 1) / size - first / size + 1 }
}

/// The shortest run into which a step with so many decoding rows is split, where teams take up to `team_rows`: a team
/// shares an item's units out by itself.
pub fn least_run(rows: usize, team_rows: usize) -> usize {
    if rows <= team_rows { ATTENTION_GROUP } else { 1 }
}

/// The most partial sums that there may be if all rows together attend to at most `keys` keys.
pub fn max_partials(keys: usize, kv_heads: usize, at_once: usize) -> usize {
    // A split row has more keys than a run, and they lie in at most two more runs than they would fill.
    RUNS.iter().enumerate().fold(0, |most, (i, &run)| {
        let bound = match i {
            0 => keys,
            _ => keys.min(3 * at_once * RUNS[i - 1] * ATTENTION_UNIT / (2 * kv_heads)),
        };
        most.max(3 * (bound / (run * ATTENTION_UNIT)))
    })
}

/// The most items that there may be of `rows` rows of at most `keys` keys each, which begin at position 0
/// (`from_start`) or anywhere.
pub fn most_items(rows: usize, keys: usize, from_start: bool, kv_heads: usize, at_once: usize) -> usize {
    let begun = if from_start { 1 } else { 2 };
    let items = |i: usize| {
        let size = RUNS[i] * ATTENTION_UNIT;
        // A run is taken only if the next longer one is too long, which bounds the number of keys.
        let all = match i {
            0 => rows * keys,
            _ => (rows * keys).min(3 * at_once * keys.min(RUNS[i - 1] * ATTENTION_UNIT) / (2 * kv_heads)),
        };
        let of_one = if keys <= size { 1 } else { (keys - 1) / size + begun };
        (rows * of_one).min(all / size + begun * rows)
    };
    (0..RUNS.len()).map(items).max().unwrap_or(rows)
}

/// Whether a row of so many keys from `first` on, alone in its step, is cut into items that lie in no more units than a
/// group has, one for each warp of a team, and these are a job for each of so many blocks at most: for each KV head,
/// and with an item more where a window begins within a group. Teams have no shorter runs than groups, and only longer
/// rows have longer ones (see [`runs`]); but a row that is no longer than a group is one item, wherever it begins.
pub fn is_one_job_a_block(first: usize, keys: usize, kv_heads: usize, blocks: usize) -> bool {
    let units = (first + keys - 1) / ATTENTION_UNIT - first / ATTENTION_UNIT + 1;
    let is_few = keys > GROUP_KEYS || units <= ATTENTION_GROUP;
    is_few && (keys.div_ceil(GROUP_KEYS) + 1) * kv_heads <= blocks
}
