//! Which rows of decode attention stay whole, where the warps of a block share out rows of any length.
//!
//! A row that is cut between blocks has items whose sums go through memory, and writing these takes time. Whole rows
//! have no such sums, but may leave some blocks more keys than others, where items come out even. So all rows stay
//! whole, or as many of the longest as are a number for each block, or none: what takes the fullest block the least
//! time.

use super::args::{ATTENTION_SPAN, ATTENTION_UNIT};
use crate::error::Result;
use crate::memory::{self, Purpose};
use std::cmp::Reverse;

/// A row of more keys is cut, if it does not stay whole.
pub const SPAN_KEYS: usize = ATTENTION_SPAN * ATTENTION_UNIT;
/// Where rows are cut into spans, storing and folding their sums takes as long as reading a key more for each so many.
/// On an H200 attention of 40 to 900 long rows took 4 to 6 % more time with these sums.
const CUT_KEYS_A_KEY: usize = 20;
/// Of so many keys that the fullest block has more than an even share one costs time: when other blocks have ended, it
/// gets more of the memory's rate. With 30 % more keys attention of 50 rows took 7 % longer, with 3 % more of 900 rows
/// 0.4 %.
const UNEVEN_KEYS_A_KEY: usize = 3;
/// Beside whole rows, rows that would not be cut anyway take as long as with a key more for each so many: 0.3 to 4 %.
const SHORT_KEYS_A_KEY: usize = 40;

/// Which rows stay whole, and memory to find it out.
#[derive(Debug, Default)]
pub struct WholeRows {
    /// Rows' keys and places, the longest first; once chosen, of rows that stay whole.
    rows: Vec<(Reverse<usize>, usize)>,
    /// Keys of each block.
    blocks: Vec<usize>,
}

impl WholeRows {
    /// Chooses which rows stay whole, of rows that have so many keys. A row and a KV head go to one block.
    pub fn choose(&mut self, keys: impl Iterator<Item = usize>, kv_heads: usize, blocks: usize) -> Result<()> {
        self.rows.clear();
        let of_place = keys.enumerate().map(|(place, keys)| (Reverse(keys), place));
        memory::extend(&mut self.rows, of_place, Purpose::Step)?;
        self.rows.sort_unstable();
        let count = self.count(kv_heads, blocks)?;
        self.rows.truncate(count);
        Ok(())
    }

    /// The places of rows that stay whole.
    pub fn places(&self) -> impl ExactSizeIterator<Item = usize> {
        self.rows.iter().map(|&(_, place)| place)
    }

    /// How many of the longest rows stay whole.
    fn count(&mut self, kv_heads: usize, blocks: usize) -> Result<usize> {
        let rows = self.rows.len();
        let keys_of = |rows: &[(Reverse<usize>, usize)]| rows.iter().map(|row| row.0.0).sum::<usize>();
        let share_of = |keys: usize| (kv_heads * keys).div_ceil(blocks);
        let long = self.rows.partition_point(|row| row.0.0 > SPAN_KEYS);
        let (all, long_keys) = (keys_of(&self.rows), keys_of(&self.rows[..long]));
        let share = share_of(all);
        let short = share_of(all - long_keys) / SHORT_KEYS_A_KEY;
        // A number of rows for each block, less a few where rows' heads do not come out even.
        let even = rows * kv_heads / blocks * blocks / kv_heads;
        let mut best = (share + share_of(long_keys) / CUT_KEYS_A_KEY, 0);
        self.blocks.clear();
        memory::extend(&mut self.blocks, std::iter::repeat_n(0, blocks), Purpose::Step)?;
        for row in 0..rows {
            for pair in row * kv_heads..(row + 1) * kv_heads {
                self.blocks[block_of(pair, blocks)] += self.rows[row].0.0;
            }
            let count = row + 1;
            if count != even && count != rows {
                continue;
            }
            let fullest = self.blocks.iter().copied().max().unwrap_or(0);
            // What is cut comes in spans: blocks differ by one.
            let uneven = if count < rows { SPAN_KEYS / 2 } else { 0 };
            let more = (fullest.max(share + uneven) - share) / UNEVEN_KEYS_A_KEY;
            let cut = share_of(keys_of(&self.rows[count.min(long)..long])) / CUT_KEYS_A_KEY;
            best = best.min((share + more + cut + short, count));
        }
        Ok(best.1)
    }
}

/// The block that has a pair of a whole row and a KV head: rounds of pairs go to them back and forth, so that each has
/// some of the longest and some of the shortest.
fn block_of(pair: usize, blocks: usize) -> usize {
    let (round, place) = (pair / blocks, pair % blocks);
    if round.is_multiple_of(2) {
        place
    } else {
        blocks - 1 - place
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn whole(keys: impl Iterator<Item = usize>) -> usize {
        let mut rows = WholeRows::default();
        rows.choose(keys, 8, 132).unwrap();
        rows.places().len()
    }

    #[test]
    fn rows_stay_whole_as_far_as_blocks_come_out_even() {
        let alike = |rows: usize, keys: usize| whole(std::iter::repeat_n(keys, rows));
        // 246 rows are 14.9 for each block, 65 are 3.94, and 33 two; of 39 rows two for each are 33.
        let all = [(246, 8700), (65, 33_000), (33, 33_000), (511, 8192), (60, 3000)];
        assert_eq!(all.map(|(rows, keys)| alike(rows, keys)), all.map(|(rows, _)| rows));
        assert_eq!(alike(39, 33_000), 33);
        let most = [(200, 8700), (512, 8192), (50, 8700), (50, 3000), (24, 33_000)];
        assert_eq!(most.map(|(rows, keys)| alike(rows, keys)), [198, 511, 49, 49, 16]);
        // Less than one for each: cut as without.
        assert_eq!(alike(12, 8700), 0);
        // Few of the keys are in rows that would be cut.
        assert_eq!(whole((0..901).map(|row| if row == 0 { 2100 } else { 1500 })), 0);
        assert_eq!(
            whole((0..900).map(|row| 64 + row % 450 + if row % 100 == 0 { 2000 } else { 0 })),
            0
        );
        // Lengths of all kinds come out even by themselves, but for one that is longer than a block's share.
        assert_eq!(whole((0..900).map(|row| 64 + row * 5)), 900);
        assert_eq!(whole((0..900).map(|row| if row == 0 { 100_000 } else { 500 })), 0);
    }

    #[test]
    fn the_longest_stay_whole() {
        let keys = (0..40).map(|row| 33_000 + row % 7);
        let mut rows = WholeRows::default();
        rows.choose(keys.clone(), 8, 132).unwrap();
        let mut places: Vec<_> = rows.places().collect();
        assert_eq!(places.len(), 33);
        let keys: Vec<_> = keys.collect();
        let shortest = places.iter().map(|&place| keys[place]).min();
        places.sort_unstable();
        let others = (0..40).filter(|place| places.binary_search(place).is_err());
        assert!(others.map(|place| keys[place]).max() <= shortest);
    }
}
