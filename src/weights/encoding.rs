//! Rows in the format in which they are packed: encoded, or taken as a checkpoint stores them.

use super::{NonFinite, Rows, WeightFormat, mxfp4};
use crate::checkpoint::{Tensor, Values};
use crate::dtype::{E2M1, MXFP4_BLOCK, MXFP4_BLOCK_BYTES, e8m0_to_f32};
use crate::error::Result;
use crate::memory::{self, Purpose};
use crate::simd::{Simd, VectorCode};

/// Memory into which a worker encodes a tile's rows.
#[derive(Default)]
pub(super) struct Scratch {
    codes: Vec<u8>,
    scales: Vec<u8>,
    halves: Vec<u16>,
    floats: Vec<f32>,
}

impl Scratch {
    /// Allocates memory for rows in `format`. `floats` holds all rows if that is F32, else one row at a time.
    pub(super) fn make_room(&mut self, format: WeightFormat, rows: usize, cols: usize) -> Result<()> {
        let n = rows * cols;
        match format {
            WeightFormat::Mxfp4 => {
                memory::resize(&mut self.codes, n / 2, 0, Purpose::Checkpoint)?;
                memory::resize(&mut self.scales, n / MXFP4_BLOCK, 0, Purpose::Checkpoint)?;
            }
            WeightFormat::Bf16 => memory::resize(&mut self.halves, n, 0, Purpose::Checkpoint)?,
            WeightFormat::F32 => {}
        }
        let floats = if format == WeightFormat::F32 { n } else { cols };
        memory::resize(&mut self.floats, floats, 0.0, Purpose::Checkpoint)
    }

    /// Takes row `stored` of `values` as its row `row` without decoding it; `false` if that is not in `format`, or in
    /// it has a value that is not exact or not finite.
    #[inline(always)]
    fn take(&mut self, format: WeightFormat, values: &Values<'_>, stored: usize, row: usize, cols: usize) -> bool {
        match (format, *values) {
            (WeightFormat::Mxfp4, Values::Mxfp4 { blocks, scales }) => {
                let (blocks, scales) = mxfp4_row(blocks, scales, stored, cols);
                let codes = nth_row(&mut self.codes, row, cols / 2);
                mxfp4::take(
                    blocks,
                    scales,
                    codes,
                    nth_row(&mut self.scales, row, cols / MXFP4_BLOCK),
                )
            }
            (WeightFormat::Bf16, Values::Bf16(bytes)) => take_bf16(
                &bytes[stored * cols * 2..][..cols * 2],
                nth_row(&mut self.halves, row, cols),
            ),
            _ => false,
        }
    }

    pub(super) fn rows(&self, format: WeightFormat) -> Rows<'_> {
        match format {
            WeightFormat::Mxfp4 => Rows::Mxfp4 {
                codes: &self.codes,
                scales: &self.scales,
            },
            WeightFormat::Bf16 => Rows::Bf16(&self.halves),
            WeightFormat::F32 => Rows::F32(&self.floats),
        }
    }
}

/// Row and column in the tile, and the value there.
pub(super) type Place = (usize, usize, f32);

/// What was found while encoding a tile.
#[derive(Default)]
pub(super) struct Encoded<'b> {
    /// The rows, where they are packed as they are stored, and not in the scratch memory.
    pub(super) as_stored: Option<Rows<'b>>,
    pub(super) needs: Option<WeightFormat>,
    pub(super) misfit: Option<Place>,
    /// With rows counted in the tile.
    pub(super) non_finite: Option<NonFinite>,
    /// See [`Findings::fingerprint`].
    pub(super) fingerprint: u64,
}

/// Encodes all rows of `source` into the scratch memory of `format`, which is large enough, up to the first row with a
/// value that is not exact.
pub(super) struct EncodeRows<'a, 'b> {
    pub(super) source: &'a Tensor<'b>,
    /// The number of the first row, counted over all members.
    pub(super) place: u64,
    pub(super) format: WeightFormat,
    pub(super) scratch: &'a mut Scratch,
}

impl<'b> VectorCode for EncodeRows<'_, 'b> {
    type Output = Encoded<'b>;

    #[inline(always)]
    fn run<S: Simd>(self, _: S) -> Encoded<'b> {
        let Self {
            source,
            place,
            format,
            scratch,
        } = self;
        let cols = source.cols;
        let float_rows = if format == WeightFormat::F32 { source.rows } else { 1 };
        let mut out = Encoded::default();
        if let (WeightFormat::Mxfp4, [part]) = (format, &source.parts[..])
            && let Values::Mxfp4 { blocks, scales } = part.values
            && mxfp4::are_in_form(blocks, scales)
        {
            let rows = Rows::Mxfp4 { codes: blocks, scales };
            out.fingerprint = rows.fingerprint(source.rows, cols, place);
            out.as_stored = Some(rows);
            return out;
        }
        let mut row = 0;
        for part in &source.parts {
            for r in 0..part.rows {
                let in_floats = row % float_rows;
                if !scratch.take(format, &part.values, r, row, cols) {
                    let floats = nth_row(&mut scratch.floats, in_floats, cols);
                    row_to_f32(&part.values, r, floats);
                    let here = NonFinite::find(floats, cols).map(|here| NonFinite { row, ..here });
                    out.non_finite = NonFinite::merge(out.non_finite, here);
                    let fits = match format {
                        WeightFormat::Mxfp4 => mxfp4::encode(
                            floats,
                            nth_row(&mut scratch.codes, row, cols / 2),
                            nth_row(&mut scratch.scales, row, cols / MXFP4_BLOCK),
                        ),
                        WeightFormat::Bf16 => encode_bf16(floats, nth_row(&mut scratch.halves, row, cols)),
                        WeightFormat::F32 => true,
                    };
                    if !fits {
                        let (col, needs) = misfit(floats, format);
                        out.needs = out.needs.max(Some(needs));
                        out.misfit.get_or_insert((row, col, floats[col]));
                        return out;
                    }
                }
                row += 1;
            }
        }
        out.fingerprint = scratch.rows(format).fingerprint(row, cols, place);
        out
    }
}

/// Decodes a row as a checkpoint stores it.
#[inline(always)]
pub(super) fn row_to_f32(values: &Values<'_>, row: usize, out: &mut [f32]) {
    let cols = out.len();
    match *values {
        Values::F32(bytes) => {
            let (words, _) = bytes[row * cols * 4..][..cols * 4].as_chunks::<4>();
            for (o, w) in out.iter_mut().zip(words) {
                *o = f32::from_le_bytes(*w);
            }
        }
        Values::Bf16(bytes) => {
            let (words, _) = bytes[row * cols * 2..][..cols * 2].as_chunks::<2>();
            for (o, w) in out.iter_mut().zip(words) {
                *o = f32::from_bits(u32::from(u16::from_le_bytes(*w)) << 16);
            }
        }
        Values::Mxfp4 { blocks, scales } => {
            let (blocks, scales) = mxfp4_row(blocks, scales, row, cols);
            for ((out, block), &scale) in out
                .chunks_exact_mut(MXFP4_BLOCK)
                .zip(blocks.chunks_exact(MXFP4_BLOCK_BYTES))
                .zip(scales)
            {
                let scale = e8m0_to_f32(scale);
                for (pair, &byte) in out.chunks_exact_mut(2).zip(block) {
                    pair[0] = E2M1[usize::from(byte & 15)] * scale;
                    pair[1] = E2M1[usize::from(byte >> 4)] * scale;
                }
            }
        }
        Values::Columns(columns) => out.iter_mut().zip(columns.row(row)).for_each(|(o, value)| *o = value),
    }
}

/// A row of memory that holds rows of `len` elements.
#[inline(always)]
fn nth_row<T>(rows: &mut [T], row: usize, len: usize) -> &mut [T] {
    &mut rows[row * len..][..len]
}

/// The blocks and the scales of a row.
#[inline(always)]
pub(super) fn mxfp4_row<'a>(blocks: &'a [u8], scales: &'a [u8], row: usize, cols: usize) -> (&'a [u8], &'a [u8]) {
    let in_row = cols / MXFP4_BLOCK;
    (&blocks[row * cols / 2..][..cols / 2], &scales[row * in_row..][..in_row])
}

/// Takes a row of bfloat16 as it is stored; `false` if a value is not finite.
#[inline(always)]
fn take_bf16(bytes: &[u8], out: &mut [u16]) -> bool {
    let mut bad = false;
    for (o, bytes) in out.iter_mut().zip(bytes.as_chunks::<2>().0) {
        *o = u16::from_le_bytes(*bytes);
        bad |= *o & 0x7f80 == 0x7f80;
    }
    !bad
}

#[inline(always)]
fn encode_bf16(row: &[f32], out: &mut [u16]) -> bool {
    let mut lost = 0;
    for (o, v) in out.iter_mut().zip(row) {
        let bits = v.to_bits();
        lost |= bits & 0xffff;
        *o = (bits >> 16) as u16;
    }
    lost == 0
}

/// The column of a row's first value that is not exact in `format`, and the format that the row needs.
fn misfit(row: &[f32], format: WeightFormat) -> (usize, WeightFormat) {
    let not_bf16 = row.iter().position(|v| v.to_bits() & 0xffff != 0);
    match (not_bf16, format) {
        (Some(col), _) => (col, WeightFormat::F32),
        (None, WeightFormat::Mxfp4) => {
            let fits = |block: &[f32]| mxfp4::encode(block, &mut [0; MXFP4_BLOCK_BYTES], &mut [0]);
            let index = row.chunks_exact(MXFP4_BLOCK).position(|b| !fits(b)).unwrap_or(0);
            let block = &row[index * MXFP4_BLOCK..][..MXFP4_BLOCK];
            // The first value that is not exact with any scale, or else with the scale of the block's largest value.
            let largest = block.iter().fold(0.0_f32, |m, v| m.max(v.abs()));
            let beside = |v: f32, other: f32| {
                fits(&std::array::from_fn::<_, MXFP4_BLOCK, _>(|i| {
                    if i == 0 { other } else { v }
                }))
            };
            let alone = block.iter().position(|&v| !beside(v, v));
            let col = alone
                .or_else(|| block.iter().position(|&v| !beside(v, largest)))
                .unwrap_or(0);
            (index * MXFP4_BLOCK + col, WeightFormat::Bf16)
        }
        (None, _) => (0, WeightFormat::F32),
    }
}
