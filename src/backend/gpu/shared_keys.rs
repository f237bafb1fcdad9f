//! Decoding rows that see the same keys in the same pages of the KV cache, so that decode attention may read these once
//! for all. (For the idea see J. Juravsky et al., "Hydragen: High-Throughput LLM Inference with Shared Prefixes", 2024.
//! Here no bit of a row's result depends on it: the keys are added in the same order.)
//!
//! Hopper has a kernel for keys of many rows ([`SharedPrefixes`]). CDNA's takes rows two by two ([`pairs`]): the second
//! one has columns of the matrix cores that idle otherwise. Of the others only the items' order depends on it.
//!
//! Sequences that share a beginning have the same page numbers in front of their tables. They share whole runs of
//! units, the rows' newest keys not among them.

use super::args::{ATTENTION_GROUP, ATTENTION_UNIT, KV_PAGE};
use crate::error::Result;
use crate::memory::{self, Purpose};
use std::cmp::Reverse;
use std::ops::Range;

/// Keys of a group.
pub const GROUP_KEYS: usize = ATTENTION_GROUP * ATTENTION_UNIT;
const GROUP_PAGES: usize = GROUP_KEYS / KV_PAGE;

/// Two rows are a pair if they share at least a quarter of the longer one's groups: for it both are cut into groups,
/// whose partial sums are some 3 % of the bytes of their keys and values, written and read.
const LEAST_PART: usize = 4;

/// A decoding row that sees the keys from position 0 on.
#[derive(Clone, Copy, Debug)]
pub struct PagedRow<'a> {
    /// Its newest key's position.
    pub position: usize,
    /// The numbers of its pages.
    pub pages: &'a [u32],
}

impl PagedRow<'_> {
    /// The runs of so many pages before its newest key.
    fn runs(self, pages: usize) -> usize {
        (self.position / (pages * KV_PAGE)).min(self.pages.len() / pages)
    }

    /// The last page of each of these runs.
    fn ends(self, pages: usize) -> impl Iterator<Item = u32> {
        let ends = self.pages.iter().skip(pages - 1).step_by(pages);
        ends.copied().take(self.runs(pages))
    }

    /// How many runs of so many pages, from the first on, are the same in both.
    fn shared_runs(self, other: Self, pages: usize) -> usize {
        let alike = |runs: usize| self.pages[..runs * pages] == other.pages[..runs * pages];
        // Only tables that no scheduler makes are alike at a run's end, but not before it.
        let ends = self.ends(pages).zip(other.ends(pages));
        let by_ends = ends.take_while(|(a, b)| a == b).count();
        (0..=by_ends).rev().find(|&runs| alike(runs)).unwrap_or(0)
    }
}

/// Those of the rows that have a run of so many pages before their newest keys, in the order of their tables:
/// neighbours share as much as any two do.
fn in_order(rows: &[PagedRow<'_>], pages: usize, order: &mut Vec<usize>) -> Result<()> {
    order.clear();
    let long = (0..rows.len()).filter(|&row| rows[row].runs(pages) > 0);
    memory::extend(order, long, Purpose::Step)?;
    order.sort_unstable_by(|&a, &b| rows[a].ends(pages).cmp(rows[b].ends(pages)).then(a.cmp(&b)));
    Ok(())
}

/// Two of the rows, by their places, and the groups that they share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pair {
    /// Places among the rows, the lower one first.
    pub rows: [usize; 2],
    /// At least one.
    pub groups: usize,
}

impl Pair {
    /// The keys that both see.
    pub fn keys(&self) -> usize {
        self.groups * GROUP_KEYS
    }
}

/// What finding pairs needs.
#[derive(Debug, Default)]
pub struct Scratch {
    /// Rows that have no other yet, in the order of their tables.
    left: Vec<usize>,
    /// Of rows that are neighbours there: the groups that they share, and the first one's place.
    shared: Vec<(usize, usize)>,
    taken: Vec<bool>,
}

/// Pairs of rows, those that share most first; no row is in two. Neighbours in the order of the tables share as much as
/// any two do: those that share most are taken, then those of the rest, which are neighbours now.
pub fn pairs(rows: &[PagedRow<'_>], scratch: &mut Scratch, pairs: &mut Vec<Pair>) -> Result<()> {
    pairs.clear();
    let Scratch { left, shared, taken } = scratch;
    in_order(rows, GROUP_PAGES, left)?;
    loop {
        shared.clear();
        let neighbours = left.windows(2).enumerate();
        let worth = neighbours.filter_map(|(place, two)| {
            let groups = rows[two[0]].shared_runs(rows[two[1]], GROUP_PAGES);
            let most = rows[two[0]].runs(GROUP_PAGES).max(rows[two[1]].runs(GROUP_PAGES));
            (groups > 0 && LEAST_PART * groups >= most).then_some((groups, place))
        });
        memory::extend(shared, worth, Purpose::Step)?;
        if shared.is_empty() {
            break;
        }
        shared.sort_unstable_by_key(|&(groups, place)| (Reverse(groups), place));
        taken.clear();
        memory::extend(taken, left.iter().map(|_| false), Purpose::Step)?;
        for &(groups, place) in &*shared {
            if !taken[place] && !taken[place + 1] {
                taken[place..place + 2].fill(true);
                let [a, b] = [left[place], left[place + 1]];
                let rows = [a.min(b), a.max(b)];
                memory::push(pairs, Pair { rows, groups }, Purpose::Step)?;
            }
        }
        let mut was_taken = taken.iter();
        left.retain(|_| was_taken.next() == Some(&false));
    }
    pairs.sort_unstable_by_key(|pair| (Reverse(pair.groups), pair.rows));
    Ok(())
}

/// What several rows have in common: the same keys in a range of runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SharedPrefix {
    /// Places in the list of rows.
    pub rows: Range<usize>,
    /// At least one.
    pub runs: Range<usize>,
}

/// All of them, and the list that has their rows.
#[derive(Debug, Default)]
pub struct SharedPrefixes {
    /// Pages of a run.
    pub pages: usize,
    /// By the runs that they begin with.
    pub all: Vec<SharedPrefix>,
    /// Places among the rows given: those that share anything, in the order of their tables.
    pub order: Vec<usize>,
    /// Of each and the next one there: the runs that they share.
    shared: Vec<usize>,
}

impl SharedPrefixes {
    /// Finds them, of runs of so many pages. Rows that share their first runs have a prefix as far as all of them do;
    /// behind that those that share more have prefixes of their own. A row is in one at most for each run, and in
    /// those for all runs before, too. If they had more than `most_rows` rows in all, the last ones are left out.
    pub fn find(&mut self, rows: &[PagedRow<'_>], pages: usize, most_rows: usize) -> Result<()> {
        self.pages = pages;
        let Self { all, order, shared, .. } = self;
        all.clear();
        in_order(rows, pages, order)?;
        shared.clear();
        let neighbours = order
            .windows(2)
            .map(|two| rows[two[0]].shared_runs(rows[two[1]], pages));
        memory::extend(shared, neighbours, Purpose::Step)?;
        split(shared, 0..order.len(), 0, all)?;
        let mut done = 0;
        while let Some(SharedPrefix { rows, runs }) = all.get(done).cloned() {
            split(shared, rows, runs.end, all)?;
            done += 1;
        }
        all.sort_by_key(|prefix| prefix.runs.start);
        let mut in_all = 0;
        let has_room = |prefix: &&SharedPrefix| {
            in_all += prefix.rows.len();
            in_all <= most_rows
        };
        let kept = all.iter().take_while(has_room).count();
        all.truncate(kept);
        Ok(())
    }

    /// The keys that need not be read again for another row.
    pub fn saved_keys(&self) -> usize {
        let of = |prefix: &SharedPrefix| (prefix.rows.len() - 1) * prefix.runs.len() * self.pages * KV_PAGE;
        self.all.iter().map(of).sum()
    }
}

/// Appends the prefixes that begin with run `from` among these rows, of which neighbours share `shared` runs.
fn split(shared: &[usize], rows: Range<usize>, from: usize, all: &mut Vec<SharedPrefix>) -> Result<()> {
    let mut first = rows.start;
    for row in rows.clone() {
        if row + 1 < rows.end && shared[row] > from {
            continue;
        }
        if let Some(&until) = shared[first..row].iter().min() {
            let prefix = SharedPrefix {
                rows: first..row + 1,
                runs: from..until,
            };
            memory::push(all, prefix, Purpose::Step)?;
        }
        first = row + 1;
    }
    Ok(())
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use rand::{Rng, SeedableRng};
    use rand_chacha::ChaCha8Rng;

    /// Rows whose tables begin with a part of another's, or with none.
    pub struct RandomRows {
        pub positions: Vec<usize>,
        pub tables: Vec<Vec<u32>>,
    }

    impl RandomRows {
        pub fn new(rng: &mut ChaCha8Rng) -> Self {
            let most = [12, 50, 200][rng.random_range(0..3)];
            let mut tables: Vec<Vec<u32>> = Vec::new();
            let mut next = 0;
            for _ in 0..rng.random_range(1..60) {
                let mut table = match tables.len() {
                    0 => Vec::new(),
                    rows => tables[rng.random_range(0..rows)].clone(),
                };
                table.truncate(rng.random_range(0..=most));
                let own = rng.random_range(1..=most / 2);
                table.extend(next..next + own as u32);
                next += own as u32;
                tables.push(table);
            }
            let positions = tables.iter().map(|table| rng.random_range(0..table.len() * KV_PAGE));
            Self {
                positions: positions.collect(),
                tables,
            }
        }

        pub fn paged(&self) -> Vec<PagedRow<'_>> {
            let rows = self.positions.iter().zip(&self.tables);
            let paged = rows.map(|(&position, pages)| PagedRow { position, pages });
            paged.collect()
        }
    }

    /// A row is in one prefix for each run that it shares with any other, and in none for others.
    #[test]
    fn a_prefix_is_of_all_that_share_a_run() {
        let mut nested = 0;
        for seed in 0..300 {
            let rng = &mut ChaCha8Rng::seed_from_u64(seed);
            let random = RandomRows::new(rng);
            let rows = random.paged();
            let pages = [GROUP_PAGES, 4 * GROUP_PAGES][rng.random_range(0..2)];
            let mut found = SharedPrefixes::default();
            found.find(&rows, pages, usize::MAX).unwrap();
            for (place, row) in rows.iter().enumerate() {
                for run in 0..row.runs(pages) {
                    let shares = |other: &PagedRow<'_>| row.shared_runs(*other, pages) > run;
                    let with = (0..rows.len()).filter(|&other| shares(&rows[other]));
                    let has_run = |prefix: &&SharedPrefix| prefix.runs.contains(&run);
                    let prefix = found.all.iter().filter(has_run);
                    let of = |prefix: &SharedPrefix| {
                        let mut places = found.order[prefix.rows.clone()].to_vec();
                        places.sort_unstable();
                        places
                    };
                    let mine: Vec<_> = prefix.map(of).filter(|places| places.contains(&place)).collect();
                    let with: Vec<_> = with.collect();
                    let expected = if with.len() > 1 { vec![with] } else { vec![] };
                    assert_eq!(mine, expected, "seed {seed}, row {place}, run {run}");
                }
            }
            let saved = found.saved_keys();
            nested += found.all.iter().filter(|prefix| prefix.runs.start > 0).count();
            let most = found.all.iter().map(|prefix| prefix.rows.len()).sum::<usize>() / 2;
            let all = found.all.clone();
            found.find(&rows, pages, most).unwrap();
            assert!(all.starts_with(&found.all) && found.saved_keys() <= saved);
            assert!(found.all.iter().map(|prefix| prefix.rows.len()).sum::<usize>() <= most);
        }
        assert!(nested > 300, "{nested}");
    }

    fn found(rows: &[(usize, Vec<u32>)]) -> Vec<Pair> {
        let rows: Vec<_> = rows
            .iter()
            .map(|(position, pages)| PagedRow {
                position: *position,
                pages,
            })
            .collect();
        let mut found = Vec::new();
        pairs(&rows, &mut Scratch::default(), &mut found).unwrap();
        found
    }

    /// A table that begins with so many pages from `first` on, and has others from `own` on.
    fn table(first: u32, shared: u32, own: u32) -> Vec<u32> {
        (first..first + shared).chain(own..own + 20).collect()
    }

    #[test]
    fn neighbours_share_whole_groups_before_their_newest_keys() {
        let one = |shared| [(2000, table(0, shared, 1000)), (2100, table(0, shared, 2000))];
        let groups = |shared| found(&one(shared)).first().map_or(0, |pair| pair.groups);
        assert_eq!([0, 7, 8, 15, 16, 31].map(groups), [0, 0, 1, 1, 2, 3]);
        // The newest key is no part of it, though its page is.
        let at = |position| found(&[(position, table(0, 9, 1000)), (3000, table(0, 9, 2000))]);
        assert!(at(511).is_empty());
        assert_eq!(
            at(512),
            [Pair {
                rows: [0, 1],
                groups: 1
            }]
        );
    }

    #[test]
    fn those_that_share_most_come_first_and_nobody_twice() {
        let deep = |own| (4000, table(0, 40, own));
        let shallow = |own| (1900, [table(0, 8, own), vec![9; 20]].concat());
        let rows = [
            shallow(500),
            deep(600),
            (4000, table(9000, 40, 700)),
            deep(800),
            shallow(900),
            (100, table(0, 1, 77)),
        ];
        let found = found(&rows);
        assert_eq!(
            found,
            [
                Pair {
                    rows: [1, 3],
                    groups: 5
                },
                Pair {
                    rows: [0, 4],
                    groups: 1
                }
            ]
        );
    }

    /// A short row that shares one group with all leaves those together that share ten.
    #[test]
    fn a_row_between_others_does_not_part_them() {
        let conversation = |number: u32, own| {
            let mut pages: Vec<u32> = (0..8).collect();
            pages.extend(1000 * number..1000 * number + 72);
            pages.extend(own..own + 20);
            (5200, pages)
        };
        let mut rows = vec![(900, table(0, 8, 1))];
        for number in 1..=8 {
            rows.extend([1, 2].map(|sample| conversation(number, 100_000 * sample + 100 * number)));
        }
        let found = found(&rows);
        assert_eq!(found.iter().map(|pair| pair.groups).sum::<usize>(), 80);
    }

    /// What is hardly a part of a row is not worth cutting it.
    #[test]
    fn rows_that_share_little_are_no_pair() {
        let long = |own| (131_000, [table(0, 8, own), vec![own + 50; 2040]].concat());
        assert!(found(&[long(1000), long(5000)]).is_empty());
    }

    /// Tables with the same page at a group's end alone have nothing in common.
    #[test]
    fn pages_are_compared_and_not_trusted() {
        let mut other = table(0, 16, 1000);
        other[11] = 5000;
        let rows = [(2000, table(0, 16, 2000)), (2000, other)];
        assert_eq!(found(&rows)[0].groups, 1);
        let mut other = table(0, 16, 1000);
        other[3] = 5000;
        assert!(found(&[(2000, table(0, 16, 2000)), (2000, other)]).is_empty());
    }
}
