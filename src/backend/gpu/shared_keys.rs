//! Decoding rows that see the same keys in the same pages of the KV cache, two by two, so that decode attention may
//! read these once for both. (For the idea see J. Juravsky et al., "Hydragen: High-Throughput LLM Inference with Shared
//! Prefixes", 2024. Here no bit of a row's result depends on it: the keys are added in the same order.)
//!
//! CDNA's kernel does: the second row takes columns of the matrix cores that idle otherwise. NVIDIA's were tried with
//! both rows' queries a tile: from an H200's L2, which a step's rows read one behind the other, that was 9 % faster
//! with 64 rows and 10 % slower with 128, as registers leave no room for more warps. So there it is the order alone.
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
        let most = self.groups().min(other.groups());
        let alike = |groups: usize| self.pages[..groups * GROUP_PAGES] == other.pages[..groups * GROUP_PAGES];
        // Only tables that no scheduler makes are alike at a group's end, but not before it.
        let by_ends = self
            .ends()
            .zip(other.ends())
            .take(most)
            .take_while(|(a, b)| a == b)
            .count();
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

/// Pairs of rows, those that share most first; no row is in two. Neighbours in the order of the tables share as much as
/// any two do, but for one where their number is odd.
pub fn pairs(rows: &[PagedRow<'_>], order: &mut Vec<usize>, pairs: &mut Vec<Pair>) -> Result<()> {
    pairs.clear();
    order.clear();
    let long = (0..rows.len()).filter(|&row| rows[row].groups() > 0);
    memory::extend(order, long, Purpose::Step)?;
    order.sort_unstable_by(|&a, &b| rows[a].ends().cmp(rows[b].ends()).then(a.cmp(&b)));
    let mut left = &order[..];
    while let [a, b, ..] = *left {
        let groups = rows[a].shared_groups(rows[b]);
        let taken = if groups > 0 { 2 } else { 1 };
        left = &left[taken..];
        if groups > 0 {
            let rows = [a.min(b), a.max(b)];
            memory::push(pairs, Pair { rows, groups }, Purpose::Step)?;
        }
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
        pairs(&rows, &mut Vec::new(), &mut found).unwrap();
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
        let shallow = |own| (4000, [table(0, 8, own), vec![9; 20]].concat());
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
