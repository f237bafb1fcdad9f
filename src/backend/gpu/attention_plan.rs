//! Splits a step's attention into work items for thread blocks.
//!
//! Of decode attention an item is a run of a row's keys, as long as `attention_runs.rs` says. Where rows see the same
//! keys (`shared_keys.rs`), runs are groups at least: pairs of rows have one item for each group that both see, and
//! shared prefixes have items of another kind for their runs. Prefill attention is split into tiles of query rows. All
//! lists are sorted longest first, but tiles of one chunk stay together: they read the same keys, which then come from
//! the L2.

use super::args::{
    ATTENTION_GROUP, ATTENTION_SPAN, ATTENTION_UNIT, AttentionItem, KV_PAGE, PrefillTile, SharedItem, Sharer,
};
use super::attention_runs::{Load, Pieces, items_of, runs, taken};
use super::shared_keys::{GROUP_KEYS, Pair, SharedPrefix, SharedPrefixes};
use super::whole_rows::{SPAN_KEYS, WholeRows};
use crate::error::Result;
use crate::memory::{self, Purpose};
use std::cmp::Reverse;

/// Bytes of a key and its value of one head, of 64 dims in 16 bits.
const HEAD_KEY_BYTES: usize = 2 * 64 * 2;

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
    let is_cut = run == ATTENTION_SPAN && longest > SPAN_KEYS;
    let is_of_teams = load.least_run == ATTENTION_GROUP;
    let mut whole_rows = 0;
    match sharing {
        Sharing::Pairs(&[]) if load.whole_rows && is_cut && !is_of_teams => {
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
mod tests;
