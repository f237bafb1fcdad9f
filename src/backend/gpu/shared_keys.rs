//! Decoding rows that see the same keys in the same pages of the KV cache, two by two, so that decode attention may
//! read these once for both. (For the idea see J. Juravsky et al., "Hydragen: High-Throughput LLM Inference with Shared
//! Prefixes", 2024. Here no bit of a row's result depends on it: the keys are added in the same order.)
//!
//! CDNA's kernel does: the second row takes columns of the matrix cores that idle otherwise. On NVIDIA a warp that
//! multiplies each tile by the queries of two rows was tried on an H200: attention took 9 % less with 64 rows and 10 %
//! more with 128, since shared keys come from the L2 anyway, and registers leave no room for more warps. There only the
//! items' order and Hopper's choice of a kernel depend on it.
//!
//! Sequences that share a beginning have the same page numbers in front of their tables. A pair shares whole groups of
//! units, the rows' newest keys not among them.

use super::args::{ATTENTION_GROUP, ATTENTION_UNIT, KV_PAGE};
use crate::error::Result;
use crate::memory::{self, Purpose};
use std::cmp::Reverse;

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
    /// The groups before its newest key.
    fn groups(self) -> usize {
        (self.position / GROUP_KEYS).min(self.pages.len() / GROUP_PAGES)
    }

    /// The last page of each of these groups.
    fn ends(self) -> impl Iterator<Item = u32> {
        let ends = self.pages.iter().skip(GROUP_PAGES - 1).step_by(GROUP_PAGES);
        ends.copied().take(self.groups())
    }

    /// How many groups from the first on are the same in both.
    fn shared_groups(self, other: Self) -> usize {
        let alike = |groups: usize| self.pages[..groups * GROUP_PAGES] == other.pages[..groups * GROUP_PAGES];
        // Only tables that no scheduler makes are alike at a group's end, but not before it.
        let by_ends = self.ends().zip(other.ends()).take_while(|(a, b)| a == b).count();
        (0..=by_ends).rev().find(|&groups| alike(groups)).unwrap_or(0)
    }
}

/// Two of the rows, by their places, and the groups that they share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pair {
    /// Places among the rows.
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
    left.clear();
    let long = (0..rows.len()).filter(|&row| rows[row].groups() > 0);
    memory::extend(left, long, Purpose::Step)?;
    left.sort_unstable_by(|&a, &b| rows[a].ends().cmp(rows[b].ends()).then(a.cmp(&b)));
    loop {
        shared.clear();
        let neighbours = left.windows(2).enumerate();
        let worth = neighbours.filter_map(|(place, two)| {
            let groups = rows[two[0]].shared_groups(rows[two[1]]);
            let most = rows[two[0]].groups().max(rows[two[1]].groups());
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

#[cfg(test)]
mod tests {
    use super::*;

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
