//! Splits a step's attention into work items for thread blocks.
//!
//! Decode attention is bound by memory bandwidth: all multiprocessors should read all the time and finish together. A
//! row's keys form a fixed tree of units, groups and spans ([`AttentionItem`]), so that a row can be split at any of
//! them (split-K) without changing a bit of its result. Partial sums of split rows cost memory traffic, and time at the
//! end, when one block folds them all; so the longest runs of keys are taken that still balance. Where rows see the
//! same keys (`shared_keys.rs`), groups at least: pairs of rows have one item for each group that both see, and shared
//! prefixes have items of another kind for their runs. Prefill attention is split into tiles of query rows. All lists
//! are sorted longest first, but tiles of one chunk stay together: they read the same keys, which then come from the
//! L2.

use super::args::{
    ATTENTION_GROUP, ATTENTION_SPAN, ATTENTION_UNIT, AttentionItem, ITEM_PAGES, KV_PAGE, PrefillTile, SharedItem,
    Sharer,
};
use super::shared_keys::{GROUP_KEYS, Pair, SharedPrefix, SharedPrefixes};
use super::whole_rows::WholeRows;
use crate::error::Result;
use crate::memory::{self, Purpose};
use std::cmp::Reverse;
use std::fmt;

/// Bytes of a key and its value of one head, of 64 dims in 16 bits.
const HEAD_KEY_BYTES: usize = 2 * 64 * 2;

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
    /// Whether an item may be a whole row of any length, whose keys the warps of a block share out.
    pub whole_rows: bool,
}

/// What [`plan_decode`] has listed.
#[derive(Clone, Copy, Debug, Default)]
pub struct Planned {
    /// Partial sums.
    pub partials: usize,
    /// So many items are whole rows of any length, the first ones.
    pub whole: usize,
}

/// How rows are cut, and memory to find it out.
#[derive(Debug, Default)]
pub struct Cuts {
    rows: Vec<RowCut>,
    whole: WholeRows,
}

/// How a row is cut.
#[derive(Clone, Copy, Debug)]
struct RowCut {
    row: usize,
    first: usize,
    keys: usize,
    /// Units of an item.
    run: usize,
    /// It is one item, however long.
    whole: bool,
    /// The first partial sum.
    partial: usize,
    /// Keys before this one are in others' items.
    own_from: usize,
    /// The place of a row whose keys its items are of as well, as far as this key.
    second: Option<(usize, usize)>,
}

impl RowCut {
    fn items(&self) -> usize {
        if self.whole {
            1
        } else {
            items_of(self.first, self.keys, self.run)
        }
    }

    fn partials(&self) -> usize {
        match self.items() {
            1 => 0,
            several => several,
        }
    }
}

/// What decoding rows share. Places are those among the rows.
#[derive(Clone, Copy, Debug)]
pub enum Sharing<'a> {
    /// Items may be of two rows: of the first of these pairs, as many as there is room for partial sums.
    Pairs(&'a [Pair]),
    /// Groups or spans, which a kernel for many rows reads once for all.
    Prefixes(&'a SharedPrefixes),
}

/// Lists the items of all decoding rows, longest first, those of whole rows of any length before the others.
///
/// `contexts` has for each row its index, the first key that it attends to, and the number of keys, its own included.
/// Rows that share keys attend to all keys before their newest.
pub fn plan_decode(
    contexts: impl Iterator<Item = (usize, usize, usize)>,
    sharing: Sharing<'_>,
    load: &Load,
    cuts: &mut Cuts,
    items: &mut Vec<AttentionItem>,
) -> Result<Planned> {
    let Cuts { rows: cuts, whole } = cuts;
    cuts.clear();
    items.clear();
    let uncut = contexts.map(|(row, first, keys)| RowCut {
        row,
        first,
        keys,
        run: 1,
        whole: false,
        partial: 0,
        own_from: 0,
        second: None,
    });
    memory::extend(cuts, uncut, Purpose::Step)?;
    let longest = cuts.iter().map(|cut| cut.keys).max().unwrap_or(0);
    let all: usize = cuts.iter().map(|cut| cut.keys).sum();
    let pieces = |run| {
        let of = |cut: &RowCut| Pieces::of(1, cut.first, cut.keys, run);
        cuts.iter().map(of).fold(Pieces::default(), Pieces::and)
    };
    let run = taken(&runs(load, longest, all, pieces));
    cuts.iter_mut().for_each(|cut| cut.run = run);
    let is_cut = run == ATTENTION_SPAN && longest > ATTENTION_SPAN * ATTENTION_UNIT;
    let mut whole_rows = 0;
    match sharing {
        Sharing::Pairs(&[]) if load.whole_rows && is_cut => {
            whole.choose(cuts.iter().map(|cut| cut.keys), load.kv_heads, load.at_once)?;
            whole_rows = whole.places().len();
            whole.places().for_each(|place| cuts[place].whole = true);
        }
        Sharing::Pairs(pairs) => share_with_second(cuts, pairs, load.most_partials),
        Sharing::Prefixes(prefixes) => leave_out_shared(cuts, prefixes, load.most_partials),
    }
    let mut partials = 0;
    for cut in cuts.iter_mut() {
        cut.partial = partials;
        partials += cut.partials();
    }
    for whole in [true, false] {
        for place in (0..cuts.len()).filter(|&place| cuts[place].whole == whole) {
            cut_row(cuts, place, items)?;
        }
    }
    let place = |item: &AttentionItem| match load.by_position {
        false => (item.row, item.first_unit),
        true => (item.first_unit, item.row),
    };
    let (first, others) = items.split_at_mut(whole_rows);
    for items in [first, others] {
        items.sort_unstable_by_key(|item| (Reverse(item.tokens), place(item)));
    }
    Ok(Planned {
        partials,
        whole: whole_rows,
    })
}

/// Splits rows of pairs into groups, of which the first one has those that both see.
fn share_with_second(cuts: &mut [RowCut], pairs: &[Pair], most_partials: usize) {
    let mut partials = cuts.iter().map(RowCut::partials).sum::<usize>();
    for &Pair { rows, groups } in pairs {
        let [a, b] = rows.map(|place| RowCut {
            run: ATTENTION_GROUP,
            ..cuts[place]
        });
        let others = partials - cuts[rows[0]].partials() - cuts[rows[1]].partials();
        let with_both = others + a.partials() + b.partials();
        if with_both > most_partials {
            break;
        }
        partials = with_both;
        let until = groups * GROUP_KEYS;
        cuts[rows[0]] = RowCut {
            second: Some((rows[1], until)),
            ..a
        };
        cuts[rows[1]] = RowCut { own_from: until, ..b };
    }
}

/// Leaves the keys of shared prefixes out of the rows' own items, as long as there is room for their partial sums.
fn leave_out_shared(cuts: &mut [RowCut], prefixes: &SharedPrefixes, most_partials: usize) {
    let keys = prefixes.pages * KV_PAGE;
    let mut partials = cuts.iter().map(RowCut::partials).sum::<usize>();
    for prefix in &prefixes.all {
        let places = &prefixes.order[prefix.rows.clone()];
        let shared = |cut: &RowCut| RowCut {
            run: keys / ATTENTION_UNIT,
            own_from: prefix.runs.end * keys,
            ..*cut
        };
        let sum = |of: &dyn Fn(&RowCut) -> usize| places.iter().map(|&place| of(&cuts[place])).sum::<usize>();
        partials = partials - sum(&RowCut::partials) + sum(&|cut| shared(cut).partials());
        if partials > most_partials {
            break;
        }
        for &place in places {
            cuts[place] = shared(&cuts[place]);
        }
    }
}

/// Tenths of a microsecond that are won if these prefixes are read once for all of their rows, at most `most_rows` at a
/// time, in a step of so many decoding rows. Measured on an H200 with 2 to 256 rows that share 512 to 32,768 keys: an
/// item takes a block 4 us and then 0.4 us a page, or 0.7 with more than eight rows; the sum of a run is folded in 0.3
/// us, a row's own keys beside it take 0.05 us more, and another launch 3 us. Keys that rows read by themselves come at
/// 2.5 TB/s to teams, at 7.5 to few rows, most of them from the L2, and at 11 to more.
pub fn won_by_sharing(load: &Load, prefixes: &SharedPrefixes, most_rows: usize, rows: usize) -> i64 {
    let parts = |prefix: &SharedPrefix| prefix.rows.len().div_ceil(most_rows);
    let of_prefix = |prefix: &SharedPrefix| parts(prefix) * prefix.runs.len();
    let blocks = load.kv_heads * prefixes.all.iter().map(of_prefix).sum::<usize>();
    let most_in_item = prefixes
        .all
        .iter()
        .map(|prefix| prefix.rows.len().div_ceil(parts(prefix)));
    let page = if most_in_item.max() > Some(8) { 7 } else { 4 };
    let most_runs = prefixes.all.iter().map(|prefix| prefix.runs.end).max().unwrap_or(0);
    let rounds = blocks.div_ceil(load.at_once);
    let takes = rounds * (40 + page * prefixes.pages) + 3 * most_runs + rows / 2 + 30;
    let bytes_each = match load.least_run {
        ATTENTION_GROUP => 250_000,
        _ if rows * load.kv_heads < 4 * load.at_once => 750_000,
        _ => 1_100_000,
    };
    let saves = prefixes.saved_keys() * load.kv_heads * HEAD_KEY_BYTES / bytes_each;
    saves as i64 - takes as i64
}

/// Lists the items of shared prefixes, as [`plan_decode`] has left these out of the rows' own, of at most `most_rows`
/// rows each; `table` gives the place where a row's page table begins. Blocks that read the same keys for different
/// rows are neighbours. Both lists are empty before.
pub fn plan_shared(
    cuts: &Cuts,
    prefixes: &SharedPrefixes,
    most_rows: usize,
    table: impl Fn(usize) -> usize,
    items: &mut Vec<SharedItem>,
    sharers: &mut Vec<Sharer>,
) -> Result<()> {
    let (pages, cuts) = (prefixes.pages, &cuts.rows);
    let is_left_out = |prefix: &&SharedPrefix| {
        let place = prefixes.order[prefix.rows.start];
        cuts[place].own_from >= prefix.runs.end * pages * KV_PAGE
    };
    for prefix in prefixes.all.iter().take_while(is_left_out) {
        let places = &prefixes.order[prefix.rows.clone()];
        let first_sharer = sharers.len();
        let of_prefix = places.iter().map(|&place| Sharer {
            row: cuts[place].row as i32,
            partial: cuts[place].partial as i32,
        });
        memory::extend(sharers, of_prefix, Purpose::Step)?;
        let parts = places.len().div_ceil(most_rows);
        for run in prefix.runs.clone() {
            for i in 0..parts {
                let [from, to] = [i, i + 1].map(|i| places.len() * i / parts);
                let item = SharedItem {
                    table: (table(places[0]) + run * pages) as i32,
                    pages: pages as i32,
                    part: run as i32,
                    first_sharer: (first_sharer + from) as i32,
                    sharers: (to - from) as i32,
                };
                memory::push(items, item, Purpose::Step)?;
            }
        }
    }
    Ok(())
}

/// The most partial sums that [`plan_decode`] may return if all rows together attend to at most `keys` keys.
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

/// The most items that [`plan_decode`] may list for `rows` rows of at most `keys` keys each, which begin at position 0
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

    fn and(self, other: Self) -> Self {
        Self {
            whole: self.whole + other.whole,
            parts: self.parts + other.parts,
            longest_part: self.longest_part.max(other.longest_part),
        }
    }
}

/// How many items a row of so many keys from `first` on has in runs of `run` units.
fn items_of(first: usize, keys: usize, run: usize) -> usize {
    let (end, size) = (first + keys, run * ATTENTION_UNIT);
    let whole = keys <= size && (end - 1) / KV_PAGE - first / KV_PAGE < ITEM_PAGES;
    if whole { 1 } else { (end - 1) / size - first / size + 1 }
}

/// The run that is taken.
pub fn taken(runs: &[(usize, RunVerdict)]) -> usize {
    let mut takes = runs
        .iter()
        .filter(|(_, verdict)| matches!(verdict, RunVerdict::Balances | RunVerdict::Fills | RunVerdict::Least));
    takes.next().map_or(1, |&(run, _)| run)
}

/// The shortest run into which a step with so many decoding rows is split, where teams take up to `team_rows`: a team
/// shares an item's units out by itself.
pub fn least_run(rows: usize, team_rows: usize) -> usize {
    if rows <= team_rows { ATTENTION_GROUP } else { 1 }
}

/// Lists the items of the row at a place, but for keys that others' items have.
fn cut_row(cuts: &[RowCut], place: usize, items: &mut Vec<AttentionItem>) -> Result<()> {
    let cut = &cuts[place];
    let (end, size, row_items) = (cut.first + cut.keys, cut.run * ATTENTION_UNIT, cut.items());
    let mut begin = cut.first.max(cut.own_from);
    while begin < end {
        let until = if row_items == 1 {
            end
        } else {
            end.min((begin / size + 1) * size)
        };
        let second = cut.second.filter(|&(_, until)| begin < until);
        let second = second.map(|(place, _)| &cuts[place]);
        let item = AttentionItem {
            row: cut.row as i32,
            first_unit: (begin / ATTENTION_UNIT) as i32,
            tokens: (until - begin) as i32,
            row_items: row_items as i32,
            partial: if row_items == 1 { 0 } else { cut.partial as i32 },
            run: cut.run as i32,
            second: second.map_or(-1, |second| second.row as i32),
            second_partial: second.map_or(0, |second| second.partial as i32),
        };
        memory::push(items, item, Purpose::Step)?;
        begin = until;
    }
    Ok(())
}

/// Splits chunks `(chunk, first position, rows)` into tiles of at most `rows_per_tile` rows: chunks with the longest
/// contexts first, and of a chunk its last rows.
pub fn plan_prefill(
    chunks: impl Iterator<Item = (usize, usize, usize)>,
    rows_per_tile: usize,
    tiles: &mut Vec<PrefillTile>,
) -> Result<()> {
    tiles.clear();
    for (chunk, position, rows) in chunks {
        // For the sort: the number of keys that the chunk attends to.
        let keys = position + rows;
        for first in (0..rows).step_by(rows_per_tile) {
            let rows = rows_per_tile.min(rows - first);
            let tile = PrefillTile {
                chunk: chunk as i32,
                first: first as i32,
                rows: rows as i32,
                reserved: keys as i32,
            };
            memory::push(tiles, tile, Purpose::Step)?;
        }
    }
    tiles.sort_unstable_by_key(|tile| (Reverse(tile.reserved), tile.chunk, Reverse(tile.first)));
    for tile in tiles {
        tile.reserved = 0;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::shared_keys::{PagedRow, tests::RandomRows};
    use super::*;
    use rand::seq::SliceRandom;
    use rand::{Rng, SeedableRng};
    use rand_chacha::ChaCha8Rng;

    const MULTIPROCESSORS: usize = 132;
    const KV_HEADS: usize = 8;
    const ALONE: Sharing<'_> = Sharing::Pairs(&[]);

    /// Pseudo-random contexts `(row, first, keys)`; windowed ones if `window` is given.
    fn contexts(rows: usize, longest: usize, window: Option<usize>, seed: u32) -> Vec<(usize, usize, usize)> {
        let mut state = seed;
        (0..rows)
            .map(|row| {
                state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                let position = (state >> 8) as usize % longest;
                let first = window.map_or(0, |window| (position + 1).saturating_sub(window));
                (row, first, position + 1 - first)
            })
            .collect()
    }

    /// Checks one row's items as the kernels take them; marks its partial sums.
    fn check_row(items: &[AttentionItem], first: usize, keys: usize, used: &mut [bool]) {
        let mut at = first;
        for item in items {
            assert_eq!(item.first_unit as usize, at / ATTENTION_UNIT);
            assert!(item.tokens > 0);
            let last = at + item.tokens as usize - 1;
            assert!(last / KV_PAGE - at / KV_PAGE < ITEM_PAGES);
            assert_eq!(item.row_items as usize, items.len());
            if items.len() > 1 {
                let size = item.run as usize * ATTENTION_UNIT;
                assert!(at == first || at.is_multiple_of(size));
                assert_eq!(at / size, last / size);
                let partial = item.partial as usize + at / size - first / size;
                assert!(!std::mem::replace(&mut used[partial], true), "a partial sum used twice");
            }
            at = last + 1;
        }
        assert_eq!(at, first + keys, "each key once");
    }

    fn load(least_run: usize, most_partials: usize) -> Load {
        Load {
            kv_heads: KV_HEADS,
            at_once: MULTIPROCESSORS,
            least_run,
            most_partials,
            by_position: false,
            whole_rows: false,
        }
    }

    fn check(contexts: &[(usize, usize, usize)]) -> Vec<AttentionItem> {
        check_runs(contexts, 1)
    }

    #[test]
    fn a_row_by_itself_is_one_job_a_block_as_far_as_that_is_said() {
        for blocks in [16, 20, 58, 84, 108, 132, 160] {
            let longest = (1..200_000)
                .take_while(|&keys| is_one_job_a_block(0, keys, KV_HEADS, blocks))
                .last();
            let longest = longest.expect("a row of one key");
            assert!(longest.is_multiple_of(GROUP_KEYS) && longest / GROUP_KEYS == blocks / KV_HEADS - 1);
            for at_once in [blocks, 2 * blocks, 5 * blocks] {
                let load = Load {
                    at_once,
                    ..load(ATTENTION_GROUP, usize::MAX)
                };
                let mut items = Vec::new();
                let rows = (1..=longest)
                    .step_by(61)
                    .flat_map(|keys| [(0, keys), (4_000 + keys, keys)]);
                for (first, keys) in rows.filter(|&(first, keys)| is_one_job_a_block(first, keys, KV_HEADS, blocks)) {
                    let row = std::iter::once((0, first, keys));
                    plan_decode(row, ALONE, &load, &mut Cuts::default(), &mut items).unwrap();
                    assert!(
                        items.len() * KV_HEADS <= blocks,
                        "{keys} keys from {first}, {blocks} blocks"
                    );
                    // A whole row's item does not say where it begins.
                    let begins = |item: &AttentionItem| first.max(item.first_unit as usize * ATTENTION_UNIT);
                    let units = |item: &AttentionItem| {
                        let last = begins(item) + item.tokens as usize - 1;
                        last / ATTENTION_UNIT - begins(item) / ATTENTION_UNIT + 1
                    };
                    assert!(
                        items.iter().all(|item| units(item) <= ATTENTION_GROUP),
                        "{keys} keys from {first}"
                    );
                }
            }
        }
        // The longest window that lies in no more units wherever it begins.
        let begun_anywhere = |keys| (0..ATTENTION_UNIT).all(|first| is_one_job_a_block(first, keys, KV_HEADS, 132));
        assert!(begun_anywhere(385) && !begun_anywhere(386) && !begun_anywhere(512) && begun_anywhere(513));
    }

    fn check_runs(contexts: &[(usize, usize, usize)], least_run: usize) -> Vec<AttentionItem> {
        let mut items = Vec::new();
        let load = load(least_run, usize::MAX);
        let planned = plan_decode(contexts.iter().copied(), ALONE, &load, &mut Cuts::default(), &mut items).unwrap();
        let partials = planned.partials;
        let keys = contexts.iter().map(|&(.., keys)| keys).sum();
        assert!(
            partials <= max_partials(keys, KV_HEADS, MULTIPROCESSORS),
            "{partials} partial sums for {keys} keys"
        );
        assert!(
            items.windows(2).all(|pair| pair[0].tokens >= pair[1].tokens),
            "longest first"
        );
        let longest = contexts.iter().map(|&(.., keys)| keys).max().unwrap_or(1);
        let from_start = contexts.iter().all(|&(_, first, _)| first == 0);
        let most = most_items(contexts.len(), longest, from_start, KV_HEADS, MULTIPROCESSORS);
        assert!(items.len() <= most, "{} items, at most {most} foreseen", items.len());
        let mut used = vec![false; partials];
        let mut by_row = items.clone();
        by_row.sort_by_key(|item| (item.row, item.first_unit));
        let mut rest = &by_row[..];
        for &(row, first, keys) in contexts {
            let (own, others) = rest.split_at(rest.iter().take_while(|item| item.row as usize == row).count());
            check_row(own, first, keys, &mut used);
            rest = others;
        }
        assert!(rest.is_empty());
        assert!(used.iter().all(|&is_used| is_used), "a partial sum that no item has");
        items
    }

    #[test]
    fn items_cover_every_key_once() {
        for rows in [0, 1, 2, 7, 32, 128, 890] {
            for longest in [1, 64, 129, 1000, 5000, 40_000] {
                for window in [None, Some(1), Some(128), Some(129), Some(1000), Some(4096)] {
                    let contexts = contexts(rows, longest, window, (rows * longest) as u32);
                    check(&contexts);
                    let items = check_runs(&contexts, ATTENTION_GROUP);
                    assert!(items.iter().all(|item| item.run as usize >= ATTENTION_GROUP));
                }
            }
        }
    }

    /// Where rows may stay whole, those that do come first, and have one item and no partial sum.
    #[test]
    fn whole_rows_come_first() {
        let (mut all, mut some, mut none) = (0, 0, 0);
        for seed in 0..300 {
            let rng = &mut ChaCha8Rng::seed_from_u64(seed);
            let rows = rng.random_range(9..400);
            let (least, longest) = [(1, 2500), (1, 9000), (8000, 9000), (30_000, 33_000)][rng.random_range(0..4)];
            let contexts: Vec<_> = (0..rows)
                .map(|row| (3 * row, 0, rng.random_range(least..=longest)))
                .collect();
            let load = Load {
                whole_rows: true,
                ..load(1, usize::MAX)
            };
            let mut items = Vec::new();
            let contexts_of = contexts.iter().copied();
            let planned = plan_decode(contexts_of, ALONE, &load, &mut Cuts::default(), &mut items).unwrap();
            let (whole, others) = items.split_at(planned.whole);
            for items in [whole, others] {
                let is_longest_first = items.windows(2).all(|pair| pair[0].tokens >= pair[1].tokens);
                assert!(is_longest_first, "seed {seed}");
            }
            let shortest = whole.last().map_or(usize::MAX, |item| item.tokens as usize);
            let mut used = vec![false; planned.partials];
            for &(row, first, keys) in &contexts {
                let of_row = |item: &&AttentionItem| item.row as usize == row;
                let mut own: Vec<_> = others.iter().filter(of_row).copied().collect();
                if let Some(item) = whole.iter().find(of_row) {
                    assert_eq!((item.first_unit, item.tokens as usize, item.row_items), (0, keys, 1));
                    assert!(own.is_empty(), "seed {seed}: row {row} twice");
                } else {
                    assert!(keys <= shortest, "seed {seed}: a longer row is cut");
                    own.sort_by_key(|item| item.first_unit);
                    check_row(&own, first, keys, &mut used);
                }
            }
            assert!(
                used.iter().all(|&is_used| is_used),
                "seed {seed}: a partial sum that no item has"
            );
            let kind = match planned.whole {
                0 => &mut none,
                count if count == rows => &mut all,
                _ => &mut some,
            };
            *kind += 1;
        }
        assert!(all > 20 && some > 20 && none > 20, "{all}, {some}, {none}");
    }

    /// Few rows are cut into units; of many rows there are not many more items than rows.
    #[test]
    fn the_most_items_are_no_more_than_there_can_be() {
        for rows in [1, 4] {
            let items = check(&(0..rows).map(|row| (row, 0, 1024)).collect::<Vec<_>>());
            assert_eq!(items.len(), most_items(rows, 1024, true, KV_HEADS, MULTIPROCESSORS));
        }
        assert_eq!(most_items(1, 1024, true, KV_HEADS, MULTIPROCESSORS), 8);
        assert_eq!(most_items(32, 128, true, KV_HEADS, MULTIPROCESSORS), 32);
        assert!(most_items(890, 1024, true, KV_HEADS, MULTIPROCESSORS) < 1100);
    }

    #[test]
    fn long_rows_are_cut_only_where_rows_are_few() {
        let runs = |rows, keys| check(&(0..rows).map(|row| (row, 0, keys)).collect::<Vec<_>>())[0].run;
        let of_teams = |rows, keys| {
            let rows: Vec<_> = (0..rows).map(|row| (row, 0, keys)).collect();
            check_runs(&rows, ATTENTION_GROUP)[0].run
        };
        assert_eq!(runs(1, 1024), 1);
        assert_eq!(runs(16, 1024), 4);
        assert_eq!(runs(890, 1024), 16);
        // Of 132 multiprocessors 128 have a span each; but three rows of 11,000 keys have 18 spans, for 144.
        let spans = [(1, 32_768), (2, 16_400), (4, 8193)].map(|(rows, keys)| of_teams(rows, keys));
        assert_eq!((spans, of_teams(4, 7000), of_teams(3, 11_000)), ([16; 3], 4, 4));
        assert_eq!(runs(1, 32_768), 4, "warps alone want more than one a block");
    }

    /// Every row has all its keys once, by items of its own or of the row that it shares them with, and each has a
    /// partial sum of its own for each of them, of which there are no more than have room.
    #[test]
    fn pairs_share_items_and_no_partial_sums() {
        for seed in 0..200 {
            let rng = &mut ChaCha8Rng::seed_from_u64(seed);
            let rows = rng.random_range(2..60);
            let longest = [700, 3000, 20_000][rng.random_range(0..3)];
            let contexts: Vec<_> = (0..rows)
                .map(|row| (3 * row, 0, rng.random_range(1..=longest)))
                .collect();
            let mut places: Vec<usize> = (0..rows).collect();
            places.shuffle(rng);
            let mut pairs = Vec::new();
            for two in places.chunks_exact(2) {
                let most = two
                    .iter()
                    .map(|&place| (contexts[place].2 - 1) / GROUP_KEYS)
                    .min()
                    .unwrap();
                if most > 0 && rng.random_bool(0.7) {
                    let rows = [two[0].min(two[1]), two[0].max(two[1])];
                    let groups = rng.random_range(1..=most);
                    pairs.push(Pair { rows, groups });
                }
            }
            let plan = |pairs: &[Pair], most_partials| {
                let (load, mut items) = (load(1, most_partials), Vec::new());
                let contexts = contexts.iter().copied();
                let pairs = Sharing::Pairs(pairs);
                let planned = plan_decode(contexts, pairs, &load, &mut Cuts::default(), &mut items).unwrap();
                (planned.partials, items)
            };
            let (least, _) = plan(&[], usize::MAX);
            let (most, all) = plan(&pairs, usize::MAX);
            let mut two_rows = 0;
            let shared: usize = pairs.iter().map(|pair| pair.groups).sum();
            assert_eq!(all.iter().filter(|item| item.second >= 0).count(), shared);
            for room in [least.max(most), least.max(most).midpoint(least), least] {
                let (partials, mut items) = plan(&pairs, room);
                assert!(partials <= room, "seed {seed}");
                two_rows += items.iter().filter(|item| item.second >= 0).count();
                let seconds = items.clone().into_iter().filter(|item| item.second >= 0);
                let seconds: Vec<_> = seconds
                    .map(|item| AttentionItem {
                        row: item.second,
                        partial: item.second_partial,
                        row_items: contexts[item.second as usize / 3].2.div_ceil(GROUP_KEYS) as i32,
                        ..item
                    })
                    .collect();
                assert!(
                    seconds
                        .iter()
                        .all(|item| item.tokens == GROUP_KEYS as i32 && item.run == 4)
                );
                items.extend(seconds);
                items.sort_by_key(|item| (item.row, item.first_unit));
                let mut used = vec![false; partials];
                let mut rest = &items[..];
                for &(row, first, keys) in &contexts {
                    let (own, others) = rest.split_at(rest.iter().take_while(|item| item.row as usize == row).count());
                    check_row(own, first, keys, &mut used);
                    rest = others;
                }
                assert!(rest.is_empty() && used.iter().all(|&is_used| is_used), "seed {seed}");
            }
            assert!(two_rows >= shared);
        }
    }

    /// Every row has all its keys once, by items of its own or of shared prefixes, whose rows see the same pages, and a
    /// partial sum of its own for each. Where these have no room nobody shares.
    #[test]
    fn shared_prefixes_and_rows_have_every_key_once() {
        let (mut in_all, mut fewer) = (0, 0);
        for seed in 0..300 {
            let rng = &mut ChaCha8Rng::seed_from_u64(seed);
            let rows = RandomRows::new(rng);
            let keys = || rows.positions.iter().map(|position| position + 1);
            let load = load([1, ATTENTION_GROUP][rng.random_range(0..2)], usize::MAX);
            let pages = [ATTENTION_GROUP, ATTENTION_SPAN][rng.random_range(0..2)] * ATTENTION_UNIT / KV_PAGE;
            let mut prefixes = SharedPrefixes::default();
            prefixes.find(&rows.paged(), pages, usize::MAX).unwrap();
            let (mut cuts, mut items) = (Cuts::default(), Vec::new());
            let (mut shared, mut sharers) = (Vec::new(), Vec::new());
            let contexts = || keys().enumerate().map(|(row, keys)| (3 * row, 0, keys));
            let alone = plan_decode(contexts(), ALONE, &load, &mut cuts, &mut items)
                .unwrap()
                .partials;
            let mut plan = |most_partials| {
                let load = Load { most_partials, ..load };
                let sharing = Sharing::Prefixes(&prefixes);
                let planned = plan_decode(contexts(), sharing, &load, &mut cuts, &mut items).unwrap();
                let partials = planned.partials;
                let table = |place| 1000 * place;
                shared.clear();
                sharers.clear();
                plan_shared(&cuts, &prefixes, 16, table, &mut shared, &mut sharers).unwrap();
                let mut all = items.clone();
                for item in &shared {
                    assert!((2..=16).contains(&item.sharers) && item.pages as usize == pages);
                    let from = item.table as usize;
                    let seen = |row: usize, at: usize| &rows.tables[row][at..at + pages];
                    let same = seen(from / 1000, from % 1000);
                    for sharer in &sharers[item.first_sharer as usize..][..item.sharers as usize] {
                        let row = sharer.row as usize / 3;
                        assert_eq!(seen(row, item.part as usize * pages), same, "seed {seed}");
                        all.push(AttentionItem {
                            row: sharer.row,
                            first_unit: item.part * (pages * KV_PAGE / ATTENTION_UNIT) as i32,
                            tokens: (pages * KV_PAGE) as i32,
                            row_items: all.iter().find(|item| item.row == sharer.row).unwrap().row_items,
                            partial: sharer.partial,
                            run: (pages * KV_PAGE / ATTENTION_UNIT) as i32,
                            ..AttentionItem::default()
                        });
                    }
                }
                all.sort_by_key(|item| (item.row, item.first_unit));
                let mut used = vec![false; partials];
                let mut rest = &all[..];
                for (row, keys) in keys().enumerate() {
                    let mine = |item: &&AttentionItem| item.row as usize == 3 * row;
                    let (own, others) = rest.split_at(rest.iter().take_while(mine).count());
                    check_row(own, 0, keys, &mut used);
                    rest = others;
                }
                assert!(rest.is_empty() && used.iter().all(|&is_used| is_used), "seed {seed}");
                (partials, shared.len())
            };
            let (partials, count) = plan(usize::MAX);
            assert_eq!(count > 0, !prefixes.all.is_empty());
            assert_eq!(plan(partials.max(alone)).1, count);
            let room = rng.random_range(alone..=alone.max(partials));
            let (some_partials, some) = plan(room);
            assert!(some_partials <= room && some <= count, "seed {seed}");
            fewer += usize::from(some < count);
            in_all += count;
        }
        assert!(in_all > 1000 && fewer > 10, "{in_all}, {fewer}");
    }

    /// What was fastest on an H200, of nothing, groups and spans, where rows share so many keys of 208 more.
    #[test]
    fn rows_share_what_is_faster() {
        let chosen = |rows: usize, shared: usize| {
            let load = load(least_run(rows, 8), usize::MAX);
            let tables: Vec<Vec<u32>> = (1..=rows as u32)
                .map(|row| {
                    (0..(shared / KV_PAGE) as u32)
                        .chain(10_000 * row..10_000 * row + 4)
                        .collect()
                })
                .collect();
            let position = shared + 207;
            let paged: Vec<_> = tables.iter().map(|pages| PagedRow { position, pages }).collect();
            let won = [ATTENTION_GROUP, ATTENTION_SPAN].map(|run| {
                let mut prefixes = SharedPrefixes::default();
                prefixes
                    .find(&paged, run * ATTENTION_UNIT / KV_PAGE, usize::MAX)
                    .unwrap();
                (won_by_sharing(&load, &prefixes, 16, rows), run)
            });
            won.into_iter()
                .max()
                .filter(|(won, _)| *won > 0)
                .map_or(0, |(_, run)| run)
        };
        let of = |shared, rows: [usize; 5]| rows.map(|rows| chosen(rows, shared));
        assert_eq!(of(512, [2, 8, 64, 128, 256]), [0; 5]);
        assert_eq!(of(1024, [2, 8, 16, 64, 256]), [0, 0, 0, 4, 4]);
        assert_eq!(of(2048, [4, 16, 32, 64, 256]), [0, 0, 4, 4, 16]);
        assert_eq!(of(8192, [4, 8, 16, 64, 256]), [4, 4, 4, 16, 16]);
        assert_eq!(of(32_768, [2, 4, 8, 16, 64]), [16; 5]);
    }

    #[test]
    fn items_alike_are_neighbours_by_row_or_by_position() {
        let first = |by_position| {
            let load = Load {
                by_position,
                ..load(1, usize::MAX)
            };
            let (contexts, mut items) = ((0..200).map(|row| (row, 0, 4096)), Vec::new());
            plan_decode(contexts, ALONE, &load, &mut Cuts::default(), &mut items).unwrap();
            [0, 1].map(|place: usize| (items[place].row, items[place].first_unit))
        };
        assert_eq!(first(false), [(0, 0), (0, 16)]);
        assert_eq!(first(true), [(0, 0), (1, 0)]);
    }

    #[test]
    fn a_window_is_one_item() {
        let items = check(&[(0, 300 - 127, 128)]);
        assert_eq!(
            items,
            [AttentionItem {
                first_unit: 1,
                tokens: 128,
                row_items: 1,
                run: 1,
                second: -1,
                ..Default::default()
            }]
        );
    }

    #[test]
    fn tiles_cover_every_row_once_longest_chunks_first() {
        let chunks = [(3, 100, 33), (5, 0, 16), (6, 999, 1), (9, 0, 100)];
        let mut tiles = vec![PrefillTile::default()];
        plan_prefill(chunks.into_iter(), 16, &mut tiles).unwrap();
        let mut order: Vec<_> = tiles.iter().map(|tile| tile.chunk).collect();
        order.dedup();
        assert_eq!(order, [6, 3, 9, 5], "1000, 133, 100 and 16 keys");
        let together = |pair: &&[PrefillTile]| pair[0].chunk == pair[1].chunk;
        assert!(
            tiles
                .windows(2)
                .filter(together)
                .all(|pair| pair[0].first > pair[1].first)
        );
        for (chunk, _, rows) in chunks {
            let mut own: Vec<_> = tiles.iter().filter(|tile| tile.chunk as usize == chunk).collect();
            own.sort_by_key(|tile| tile.first);
            assert!(
                own.iter()
                    .enumerate()
                    .all(|(i, tile)| tile.first as usize == i * 16 && tile.reserved == 0)
            );
            assert_eq!(own.iter().map(|tile| tile.rows as usize).sum::<usize>(), rows);
        }
    }
}
