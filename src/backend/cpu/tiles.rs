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

    /// The row of a lane.
    fn row(self, lane: usize) -> usize {
        if self.gated {
            lane % LANES * 2 + lane / LANES
        } else {
            lane
        }
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
                self.write_scales(scales, cols / MXFP4_BLOCK, scale_bytes);
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
    /// Writes a tile's scales.
    fn write_scales(self, scales: &[u8], blocks: usize, to: &mut [u8]) {
        // A lane's four scales are a word first, and then parted.
        let (fours, rest) = to.as_chunks_mut::<{ 4 * TILE }>();
        self.write_words(scales, blocks, fours.as_flattened_mut(), u32::from_le_bytes);
        for four in &mut *fours {
            let lanes: [u32; TILE] = bytemuck::cast(*four);
            for (block, to) in four.as_chunks_mut::<TILE>().0.iter_mut().enumerate() {
                for (to, lane) in to.iter_mut().zip(&lanes) {
                    *to = (u32::from_le(*lane) >> (8 * block)) as u8;
                }
            }
        }
        for (row, scales) in scales.chunks_exact(blocks).enumerate() {
            for (to, &scale) in rest.chunks_exact_mut(TILE).zip(&scales[4 * fours.len()..]) {
                to[self.lane(row)] = scale;
            }
        }
    }

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

    /// Sixteen column groups are written at a time, a vector of lanes after the other: sixteen words of each of sixteen
    /// rows, transposed. What is left is written word by word.
    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        let n = self.rows.len() / self.cols;
        let (words, _) = self.tile.as_chunks_mut::<4>();
        let (vectors, _) = words.as_chunks_mut::<LANES>();
        let (groups, _) = vectors.as_chunks_mut::<2>();
        let whole = self.cols / (LANES * N);
        let (runs, last) = groups.split_at_mut(whole * LANES);
        let (runs, _) = runs.as_chunks_mut::<LANES>();
        for (run, tile) in runs.iter_mut().enumerate() {
            for vector in 0..2 {
                let mut words = [[0; LANES]; LANES];
                for (lane, words) in words.iter_mut().enumerate() {
                    let row = self.layout.row(vector * LANES + lane);
                    if row < n {
                        let columns = &self.rows[row * self.cols + run * LANES * N..][..LANES * N];
                        // Behind rows that lie in a checkpoint are those of its next tile, which are wanted next.
                        let next = columns.as_ptr().wrapping_add(self.rows.len());
                        // SAFETY: under `VectorCode::run`, and any address may be prefetched.
                        unsafe { S::prefetch(next.cast()) };
                        for (to, columns) in words.iter_mut().zip(columns.as_chunks().0) {
                            *to = (self.word)(*columns).to_le();
                        }
                    }
                }
                // SAFETY: under `VectorCode::run`.
                let lanes = unsafe { S::transpose(&words) };
                for (group, lanes) in tile.iter_mut().zip(&lanes) {
                    group[vector] = bytemuck::cast(*lanes);
                }
            }
        }
        for (row, values) in self.rows.chunks_exact(self.cols).enumerate() {
            let lane = self.layout.lane(row);
            for (group, values) in last.iter_mut().zip(values[whole * LANES * N..].chunks(N)) {
                let mut columns = [T::default(); N];
                columns[..values.len()].copy_from_slice(values);
                group[lane / LANES][lane % LANES] = (self.word)(columns).to_le_bytes();
            }
        }
    }
}

/// Parts eight codes: even columns into the low half, odd ones into the high half.
fn halves(codes: u32) -> u32 {
    // Of each half word the middle codes change places, then of the word the middle bytes.
    let apart = (codes ^ codes >> 4) & 0x00f0_00f0;
    let codes = codes ^ apart ^ apart << 4;
    let apart = (codes ^ codes >> 8) & 0x0000_ff00;
    codes ^ apart ^ apart << 8
}
