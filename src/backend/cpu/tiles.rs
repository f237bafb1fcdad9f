//! The layout of matrices on the CPU: tiles of 32 rows, that is two vectors of sixteen lanes, one lane a row.
//!
//! A tile stores the 32 rows' words of one column (or group of columns) together, then those of the next. So a kernel
//! reads a tile as one sequential stream, and each row's sum stays in its lane and adds over the columns in order.
//!
//! | format | 32-bit word of a row | words of a tile |
//! | --- | --- | --- |
//! | F32 | one column | `[cols][32]` |
//! | BF16 | two columns, the first in the low half | `[cols / 2][32]` |
//! | MXFP4 | eight columns, see below | `[cols / 8][32]`, then the scales, `[cols / 32][32]` bytes |
//!
//! An MXFP4 word has the codes of even columns in the low half and those of odd columns in the high half, the first
//! column of each half in its lowest bits.
//!
//! Tiles of gated matrices, whose rows alternate gate and up, have sixteen gate rows in the first vector and their up
//! rows in the second, so that a gate and its up have the same lane.

use crate::dtype::{E2M1, MXFP4_BLOCK, e8m0_to_f32};
use crate::simd::{LANES, Level, Simd, VectorCode};
use crate::weights::{Layout, Rows, WeightFormat};

/// Rows of a tile.
pub const TILE: usize = 2 * LANES;

/// A token's sums for the rows of a tile, in the order of lanes.
pub type Sums = [f32; TILE];

/// The layout described at the top of this file.
#[derive(Clone, Copy, Debug)]
pub struct Tiles {
    /// Whether rows alternate gate and up.
    pub gated: bool,
}

impl Tiles {
    /// The lane, 0 to 31, of a row of the tile.
    fn lane(self, row: usize) -> usize {
        if self.gated { row % 2 * LANES + row / 2 } else { row }
    }
}

/// Words in a column group of a tile.
const WORDS: usize = TILE;

/// Bytes of a column group.
const GROUP_BYTES: usize = 4 * WORDS;

/// Columns in a word.
fn columns_per_word(format: WeightFormat) -> usize {
    match format {
        WeightFormat::Mxfp4 => 8,
        WeightFormat::Bf16 => 2,
        WeightFormat::F32 => 1,
    }
}

impl Layout for Tiles {
    fn tile_rows(&self) -> usize {
        TILE
    }

    fn tile_bytes(&self, format: WeightFormat, cols: usize) -> usize {
        let scales = if format == WeightFormat::Mxfp4 {
            cols / MXFP4_BLOCK * TILE
        } else {
            0
        };
        cols.div_ceil(columns_per_word(format)) * GROUP_BYTES + scales
    }

    fn write(&self, rows: Rows<'_>, cols: usize, tile: &mut [u8]) {
        match rows {
            Rows::Mxfp4 { codes, scales } => {
                let (words, scale_bytes) = tile.split_at_mut(cols / 8 * GROUP_BYTES);
                self.write_words(codes, cols / 2, words, |four| halves(u32::from_le_bytes(four)));
                let blocks = cols / MXFP4_BLOCK;
                for (row, scales) in scales.chunks_exact(blocks).enumerate() {
                    let lane = self.lane(row);
                    for (block, &scale) in scales.iter().enumerate() {
                        scale_bytes[block * TILE + lane] = scale;
                    }
                }
            }
            Rows::Bf16(values) => {
                self.write_words(values, cols, tile, |[low, high]| u32::from(low) | u32::from(high) << 16);
            }
            Rows::F32(values) => self.write_words(values, cols, tile, |[one]: [f32; 1]| one.to_bits()),
        }
    }

    fn read(&self, format: WeightFormat, cols: usize, tile: &[u8], values: &mut [f32]) {
        for (row, values) in values.chunks_exact_mut(cols).enumerate() {
            for (col, value) in values.iter_mut().enumerate() {
                *value = self.value(format, cols, tile, row, col);
            }
        }
    }
}

impl Tiles {
    /// One value of a tile.
    #[inline]
    pub fn value(self, format: WeightFormat, cols: usize, tile: &[u8], row: usize, col: usize) -> f32 {
        let per_word = columns_per_word(format);
        let lane = self.lane(row);
        let at = (col / per_word * WORDS + lane) * 4;
        let word = u32::from_le_bytes([tile[at], tile[at + 1], tile[at + 2], tile[at + 3]]);
        match format {
            WeightFormat::F32 => f32::from_bits(word),
            WeightFormat::Bf16 => f32::from_bits(word >> (16 * (col % 2)) << 16),
            WeightFormat::Mxfp4 => {
                let code = word >> (16 * (col % 2) + 4 * (col % 8 / 2)) & 15;
                let scales = cols / per_word * GROUP_BYTES;
                E2M1[code as usize] * e8m0_to_f32(tile[scales + col / MXFP4_BLOCK * TILE + lane])
            }
        }
    }
}

impl Tiles {
    /// Writes a tile's words, each made by `word` from `N` columns of a row.
    fn write_words<T: Copy + Default, const N: usize>(
        &self,
        rows: &[T],
        cols: usize,
        tile: &mut [u8],
        word: impl Fn([T; N]) -> u32,
    ) {
        let layout = *self;
        Level::detect().run(WriteWords {
            layout,
            rows,
            cols,
            tile,
            word,
        });
    }
}

/// The kernel of [`Tiles::write_words`].
struct WriteWords<'a, T, F, const N: usize> {
    layout: Tiles,
    rows: &'a [T],
    cols: usize,
    tile: &'a mut [u8],
    word: F,
}

impl<T: Copy + Default, F: Fn([T; N]) -> u32, const N: usize> VectorCode for WriteWords<'_, T, F, N> {
    type Output = ();

    /// Column groups are written in runs, short enough that a run's part of the tile stays in the L1 cache while the
    /// words of all rows are written to it.
    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        const RUN: usize = 64;
        let (words, _) = self.tile.as_chunks_mut::<4>();
        let (groups, _) = words.as_chunks_mut::<WORDS>();
        for (run, tile) in groups.chunks_mut(RUN).enumerate() {
            let from = run * RUN * N;
            let to = self.cols.min(from + RUN * N);
            for (row, values) in self.rows.chunks_exact(self.cols).enumerate() {
                let mut words = [0; RUN];
                let (whole, rest) = values[from..to].as_chunks::<N>();
                for (word, values) in words.iter_mut().zip(whole) {
                    *word = (self.word)(*values);
                }
                if !rest.is_empty() {
                    let mut last = [T::default(); N];
                    last[..rest.len()].copy_from_slice(rest);
                    words[whole.len()] = (self.word)(last);
                }
                let lane = self.layout.lane(row);
                for (group, word) in tile.iter_mut().zip(words) {
                    group[lane] = word.to_le_bytes();
                }
            }
        }
    }
}

/// Parts eight codes: even columns into the low half, odd ones into the high half.
fn halves(codes: u32) -> u32 {
    let half = |x: u32| {
        let x = x & 0x0f0f_0f0f;
        let x = (x | x >> 4) & 0x00ff_00ff;
        (x | x >> 8) & 0xffff
    };
    half(codes) | half(codes >> 4) << 16
}
