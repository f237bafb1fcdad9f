//! Exact packing: each tensor in the narrowest format that is exact for all its values.
//!
//! In released models the experts' matrices are MXFP4 and the other matrices bfloat16, even if a file has widened them.
//! A tensor is packed tile by tile, in parallel, in the format that its kind has in the released models. Every value is
//! checked to unpack to the same bits. The backend's [`Layout`] arranges the packed values as its kernels read them. If
//! one value is not exact, the whole tensor is packed in a wider format. In memory ([`pack`]) tiles that were packed
//! before it are widened from their packed form, so each page of the checkpoint is read once, except for the tile with
//! that value; for a device, which has those tiles already, all of the tensor is packed again.

mod fingerprint;
mod mxfp4;
mod report;
mod row_major;

pub use fingerprint::fingerprint_of;
pub use report::{PackReport, PackedKind, Transfer};
pub use row_major::RowMajor;

use crate::checkpoint::{Columns, Part, Tensor, Values};
use crate::config::ModelConfig;
use crate::dtype::{E2M1, MXFP4_BLOCK, MXFP4_BLOCK_BYTES, e8m0_to_f32};
use crate::error::{Error, Result};
use crate::memory::{self, Purpose};
use crate::simd::{Level, Simd, VectorCode};
use crate::tensors::{Field, Holds, TensorId};
use fingerprint::Fingerprint;
use memmap2::{Advice, MmapMut};
use once_cell::sync::OnceCell;
use rayon::prelude::*;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

/// The format of packed values, from the narrowest to the widest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum WeightFormat {
    /// E2M1 codes and one E8M0 scale for 32 values: 4.25 bits a value.
    Mxfp4,
    /// bfloat16.
    Bf16,
    /// float32.
    F32,
}

impl WeightFormat {
    /// The narrowest that holds such a tensor of the released models.
    pub fn expected(holds: Holds) -> Self {
        match holds {
            Holds::Norm | Holds::Bias => Self::F32,
            Holds::Lookup | Holds::Router | Holds::Dense => Self::Bf16,
            Holds::Expert { .. } => Self::Mxfp4,
        }
    }

    /// The name in messages.
    pub fn name(self) -> &'static str {
        match self {
            WeightFormat::Mxfp4 => "MXFP4",
            WeightFormat::Bf16 => "BF16",
            WeightFormat::F32 => "F32",
        }
    }
}

/// The least memory that a model's weights take: its matrices in the formats expected of them.
pub fn least_bytes(config: &ModelConfig) -> u64 {
    TensorId::all(config)
        .map(|id| {
            let [rows, cols] = id.shape(config);
            let values = (rows * cols) as u64;
            match id.place().0.holds() {
                Holds::Expert { .. } => values / 2 + values / 32,
                _ => 2 * values,
            }
        })
        .sum()
}

/// Consecutive rows of a matrix in one format, row-major.
#[derive(Clone, Copy, Debug)]
pub enum Rows<'a> {
    /// MXFP4.
    Mxfp4 {
        /// `[rows, cols / 2]`: two E2M1 codes in each byte, the even column's in the low half.
        codes: &'a [u8],
        /// `[rows, cols / 32]`: E8M0 scales (exponents biased by 127), none of them 0 or 255.
        scales: &'a [u8],
    },
    /// `[rows, cols]`
    Bf16(&'a [u16]),
    /// `[rows, cols]`
    F32(&'a [f32]),
}

impl Rows<'_> {
    /// A fingerprint of `rows` rows, the first of which has the number `place`: see [`Findings::fingerprint`].
    #[inline(always)]
    fn fingerprint(&self, rows: usize, cols: usize, place: u64) -> u64 {
        let mut sum = 0_u64;
        for row in 0..rows {
            let mut fingerprint = Fingerprint::new();
            match *self {
                Rows::Mxfp4 { codes, scales } => {
                    let (codes, scales) = mxfp4_row(codes, scales, row, cols);
                    fingerprint.add(codes);
                    fingerprint.add(scales);
                }
                Rows::Bf16(values) => fingerprint.add(bytemuck::cast_slice(&values[row * cols..][..cols])),
                Rows::F32(values) => fingerprint.add(bytemuck::cast_slice(&values[row * cols..][..cols])),
            }
            sum = sum.wrapping_add(fingerprint.at(place + row as u64));
        }
        sum
    }
}

/// How a backend arranges a matrix in memory: in tiles of consecutive rows.
pub trait Layout: Sync {
    /// Rows in a tile; the last tile of a matrix is padded with zeros.
    fn tile_rows(&self) -> usize;
    /// Size of a tile in bytes.
    fn tile_bytes(&self, format: WeightFormat, cols: usize) -> usize;
    /// Packs at most `tile_rows` rows of `cols` values into a zeroed tile.
    fn write(&self, rows: Rows<'_>, cols: usize, tile: &mut [u8]);
    /// Unpacks a tile into `values`, `[tile_rows, cols]`.
    fn read(&self, format: WeightFormat, cols: usize, tile: &[u8], values: &mut [f32]);
}

/// Zeroed memory in pages of its own. The system provides them only when they are used.
pub struct Bytes(MmapMut);

impl Bytes {
    /// `len` zero bytes.
    pub fn zeroed(len: usize, purpose: Purpose) -> Result<Self> {
        MmapMut::map_anon(len.max(1))
            .map(Self)
            .map_err(|_| memory::lacking::<u8>(len, purpose))
    }

    /// `len` zero bytes in pages of 2 MiB if the system has them, for memory that is read sequentially: hardware
    /// prefetchers stop at the end of a page.
    pub fn zeroed_in_huge_pages(len: usize, purpose: Purpose) -> Result<Self> {
        let bytes = Self::zeroed(len, purpose)?;
        // Failure is ignored: small pages work too.
        let _ = bytes.0.advise(Advice::HugePage);
        Ok(bytes)
    }
}

impl std::ops::Deref for Bytes {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        &self.0
    }
}

impl std::ops::DerefMut for Bytes {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.0
    }
}

/// Packed matrices of one shape: one, or a layer's experts.
pub struct Packed {
    /// The format of all members.
    pub format: WeightFormat,
    /// Number of matrices.
    pub members: usize,
    /// Rows of each member.
    pub rows: usize,
    /// Columns of each member.
    pub cols: usize,
    /// Tiles of each member.
    pub tiles: usize,
    /// Size of a tile in bytes.
    pub tile_bytes: usize,
    /// `[members, tiles, tile_bytes]`
    pub bytes: Bytes,
    /// The first value found that is not exact in the expected format, and its place.
    pub misfit: Option<String>,
    /// Values that are infinite or NaN, if there are any.
    pub non_finite: Option<NonFinite>,
    /// A fingerprint of the values, whatever their layout.
    pub fingerprint: u64,
    /// Euclidean norms of the first member's rows, `[tiles][32]`, for a backend that bounds the error of products.
    /// Computed when first needed.
    pub row_norms: OnceCell<Vec<[f32; 32]>>,
}

impl Packed {
    /// The bytes of a tile.
    pub fn tile(&self, member: usize, tile: usize) -> &[u8] {
        let at = (member * self.tiles + tile) * self.tile_bytes;
        &self.bytes[at..at + self.tile_bytes]
    }

    /// Why the format is wider than expected; `None` if it is not.
    pub fn remark(&self, expected: WeightFormat) -> Option<String> {
        self.misfit.as_ref().map(|misfit| not_expected(expected, misfit))
    }
}

/// The remark that a tensor is not in the expected format because of the value `misfit`.
pub fn not_expected(expected: WeightFormat, misfit: &str) -> String {
    format!("not {}: {misfit}", expected.name())
}

/// Packs `members`, matrices of one shape, in the narrowest format, `expected` or wider, that is exact for all values.
pub fn pack(members: &[Tensor<'_>], expected: WeightFormat, layout: &dyn Layout) -> Result<Packed> {
    let first = members.first().ok_or(Error::Internal("no tensor to pack".into()))?;
    let mut format = first_format(first.cols, expected);
    let mut narrower: Option<Attempt> = None;
    // At most three attempts, since every value is exact in float32.
    loop {
        let attempt = attempt(members, format, layout, narrower.as_ref())?;
        match attempt.needs {
            None => return Ok(attempt.packed),
            Some(wider) => {
                format = wider;
                narrower = Some(attempt);
            }
        }
    }
}

/// The format to try first: `expected`, unless that is MXFP4 and rows are not whole blocks.
pub fn first_format(cols: usize, expected: WeightFormat) -> WeightFormat {
    if cols.is_multiple_of(MXFP4_BLOCK) {
        expected
    } else {
        expected.max(WeightFormat::Bf16)
    }
}

/// Packs consecutive tiles of `members` in one format: as many as fit into `bytes`, from tile `first` on, counted over
/// all members. If a value is not exact (`Findings::needs`), the contents of `bytes` are not valid.
pub fn pack_tiles(
    members: &[Tensor<'_>],
    format: WeightFormat,
    layout: &dyn Layout,
    first: usize,
    bytes: &mut [u8],
) -> Result<Findings> {
    let tiles = bytes.len() / layout.tile_bytes(format, members[0].cols);
    let mut done = memory::filled(false, tiles, Purpose::Checkpoint)?;
    encode_tiles(members, format, layout, first, bytes, &mut done, None)
}

/// A packing in one format, complete or stopped at a value that is not exact.
struct Attempt {
    packed: Packed,
    /// Which tiles are packed.
    done: Vec<bool>,
    /// The format that the value needs; `None` if the packing is complete.
    needs: Option<WeightFormat>,
}

fn attempt(
    members: &[Tensor<'_>],
    format: WeightFormat,
    layout: &dyn Layout,
    narrower: Option<&Attempt>,
) -> Result<Attempt> {
    let (rows, cols) = (members[0].rows, members[0].cols);
    let tiles = rows.div_ceil(layout.tile_rows());
    let tile_bytes = layout.tile_bytes(format, cols);
    let total = tiles
        .checked_mul(members.len())
        .ok_or(Error::Overflow("a packed tensor"))?;
    let len = total
        .checked_mul(tile_bytes)
        .ok_or(Error::Overflow("a packed tensor"))?;
    let mut bytes = Bytes::zeroed_in_huge_pages(len, Purpose::Weights)?;
    let mut done = memory::filled(false, total, Purpose::Checkpoint)?;
    let mut found = encode_tiles(members, format, layout, 0, &mut bytes, &mut done, narrower)?;
    if let Some(a) = narrower {
        found.misfit = a.packed.misfit.clone().or(found.misfit);
    }
    let packed = Packed {
        format,
        members: members.len(),
        rows,
        cols,
        tiles,
        tile_bytes,
        bytes,
        misfit: found.misfit,
        non_finite: found.non_finite,
        fingerprint: found.fingerprint,
        row_norms: OnceCell::new(),
    };
    Ok(Attempt {
        packed,
        done,
        needs: found.needs,
    })
}

/// Packs the tiles from `first` on that fit into `bytes`, in parallel, until a value is not exact. Tiles that the
/// earlier attempt `narrower` has packed are widened from it.
fn encode_tiles(
    members: &[Tensor<'_>],
    format: WeightFormat,
    layout: &dyn Layout,
    first: usize,
    bytes: &mut [u8],
    done: &mut [bool],
    narrower: Option<&Attempt>,
) -> Result<Findings> {
    let (rows, cols) = (members[0].rows, members[0].cols);
    let tiles = rows.div_ceil(layout.tile_rows());
    let findings = Mutex::new(Findings::default());
    let stop = AtomicBool::new(false);
    let fingerprint = AtomicU64::new(0);
    let level = Level::detect();
    bytes
        .par_chunks_mut(layout.tile_bytes(format, cols))
        .zip(done.par_iter_mut())
        .enumerate()
        .try_for_each_init(Scratch::default, |scratch, (i, (tile, done))| {
            if stop.load(Ordering::Relaxed) {
                return Ok(());
            }
            let i = first + i;
            let first_row = i % tiles * layout.tile_rows();
            let n = layout.tile_rows().min(rows - first_row);
            let tensor = &members[i / tiles];
            let widened;
            let source = match narrower {
                Some(a) if a.done[i] => {
                    widened = widen(a, i, layout, n)?;
                    Tensor {
                        rows: n,
                        cols,
                        parts: vec![Part {
                            rows: n,
                            values: Values::F32(&widened),
                        }],
                    }
                }
                _ => slice_rows(tensor, first_row, n),
            };
            scratch.make_room(format, n, cols)?;
            let found = level.run(EncodeRows {
                source: &source,
                place: (i / tiles * rows + first_row) as u64,
                format,
                scratch,
            });
            fingerprint.fetch_add(found.fingerprint, Ordering::Relaxed);
            if found.needs.is_none() {
                let rows = found.as_stored.unwrap_or_else(|| scratch.rows(format));
                layout.write(rows, cols, tile);
                *done = true;
            } else {
                stop.store(true, Ordering::Relaxed);
            }
            if found.needs.is_some() || found.non_finite.is_some() {
                let place = |(row, col, value): Place| {
                    format!(
                        "{value:e} at row {}, column {col} of matrix {}",
                        first_row + row,
                        i / tiles
                    )
                };
                let mut all = findings.lock().unwrap_or_else(PoisonError::into_inner);
                all.needs = all.needs.max(found.needs);
                all.misfit = all.misfit.take().or(found.misfit.map(place));
                let here = found.non_finite.map(|mut here| {
                    here.matrix = i / tiles;
                    here.row += first_row;
                    here
                });
                all.non_finite = NonFinite::merge(all.non_finite.take(), here);
            }
            Ok(())
        })?;
    Ok(Findings {
        fingerprint: fingerprint.into_inner(),
        ..findings.into_inner().unwrap_or_else(PoisonError::into_inner)
    })
}

/// What was found while packing tiles.
#[derive(Clone, Debug, Default)]
pub struct Findings {
    /// The format needed by a value that is not exact; `None` if all are.
    pub needs: Option<WeightFormat>,
    /// That value, and its place.
    pub misfit: Option<String>,
    /// Values that are infinite or NaN, among those that were checked: all, if `needs` is `None`.
    pub non_finite: Option<NonFinite>,
    /// A fingerprint of the tiles' values, the same for any layout; valid if `needs` is `None`. That of several parts
    /// of a tensor is their sum.
    pub fingerprint: u64,
}

/// Values that are infinite or NaN, and mean nothing.
#[derive(Clone, Copy, Debug)]
pub struct NonFinite {
    /// Number of such values.
    pub count: usize,
    /// The matrix of the first one.
    pub matrix: usize,
    /// The row of the first one.
    pub row: usize,
    /// The column of the first one.
    pub col: usize,
    /// The first one.
    pub value: f32,
}

impl NonFinite {
    /// Finds them in rows of `cols` values. Rows are counted from 0, in matrix 0.
    #[inline(always)]
    pub fn find(values: &[f32], cols: usize) -> Option<Self> {
        // Nearly always there are none, and this is faster than a search.
        let bad = values.iter().fold(false, |bad, v| bad | !v.is_finite());
        bad.then(|| Self::search(values, cols, |value| !value.is_finite()))
            .flatten()
    }

    /// Finds them in `count` vectors of equal length, stored one after the other in an array. Each vector counts as a
    /// matrix. A sink of -inf does not count: it weighs nothing, so that its head attends as if there were none.
    pub fn of_vectors(array: Field, values: &[f32], count: usize) -> Option<Self> {
        let no_sink = |value: f32| array == Field::AttnSinks && value == f32::NEG_INFINITY;
        let cols = values.len() / count.max(1);
        let found = Self::search(values, cols, |value| !value.is_finite() && !no_sink(value))?;
        Some(Self {
            matrix: found.row,
            row: 0,
            ..found
        })
    }

    #[inline(always)]
    fn search(values: &[f32], cols: usize, is_bad: impl Fn(f32) -> bool) -> Option<Self> {
        let first = values.iter().position(|&value| is_bad(value))?;
        Some(Self {
            count: values.iter().filter(|&&value| is_bad(value)).count(),
            matrix: 0,
            row: first / cols,
            col: first % cols,
            value: values[first],
        })
    }

    /// Combines the findings of two parts of a tensor.
    pub fn merge(a: Option<Self>, b: Option<Self>) -> Option<Self> {
        let (Some(a), Some(b)) = (a, b) else { return a.or(b) };
        let first = if b.place() < a.place() { b } else { a };
        Some(Self {
            count: a.count + b.count,
            ..first
        })
    }

    fn place(&self) -> [usize; 3] {
        [self.matrix, self.row, self.col]
    }
}

/// A packed tile's rows, unpacked to the bytes of float32 values.
fn widen(a: &Attempt, tile: usize, layout: &dyn Layout, rows: usize) -> Result<Vec<u8>> {
    let cols = a.packed.cols;
    let mut values = memory::filled(0.0_f32, layout.tile_rows() * cols, Purpose::Checkpoint)?;
    layout.read(
        a.packed.format,
        cols,
        a.packed.tile(tile / a.packed.tiles, tile % a.packed.tiles),
        &mut values,
    );
    let mut bytes = memory::room(size_of::<f32>() * rows * cols, Purpose::Checkpoint)?;
    bytes.extend(values[..rows * cols].iter().flat_map(|v| v.to_le_bytes()));
    Ok(bytes)
}

/// Rows `first..first + n` of a tensor.
fn slice_rows<'a>(tensor: &Tensor<'a>, first: usize, n: usize) -> Tensor<'a> {
    let cols = tensor.cols;
    let mut parts = Vec::new();
    let mut start = 0;
    for part in &tensor.parts {
        let (from, to) = (first.max(start), (first + n).min(start + part.rows));
        if from < to {
            let (a, b) = ((from - start) * cols, (to - start) * cols);
            let values = match part.values {
                Values::F32(bytes) => Values::F32(&bytes[4 * a..4 * b]),
                Values::Bf16(bytes) => Values::Bf16(&bytes[2 * a..2 * b]),
                Values::Mxfp4 { blocks, scales } => Values::Mxfp4 {
                    blocks: &blocks[a / 2..b / 2],
                    scales: &scales[a / MXFP4_BLOCK..b / MXFP4_BLOCK],
                },
                Values::Columns(columns) => Values::Columns(Columns {
                    first: columns.first + from - start,
                    rows: to - from,
                    ..columns
                }),
            };
            parts.push(Part {
                rows: to - from,
                values,
            });
        }
        start += part.rows;
    }
    Tensor { rows: n, cols, parts }
}

/// Memory into which a worker encodes a tile's rows.
#[derive(Default)]
struct Scratch {
    codes: Vec<u8>,
    scales: Vec<u8>,
    halves: Vec<u16>,
    floats: Vec<f32>,
}

impl Scratch {
    /// Allocates memory for rows in `format`. `floats` holds all rows if that is F32, else one row at a time.
    fn make_room(&mut self, format: WeightFormat, rows: usize, cols: usize) -> Result<()> {
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

    fn rows(&self, format: WeightFormat) -> Rows<'_> {
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
type Place = (usize, usize, f32);

/// What was found while encoding a tile.
#[derive(Default)]
struct Encoded<'b> {
    /// The rows, where they are packed as they are stored, and not in the scratch memory.
    as_stored: Option<Rows<'b>>,
    needs: Option<WeightFormat>,
    misfit: Option<Place>,
    /// With rows counted in the tile.
    non_finite: Option<NonFinite>,
    /// See [`Findings::fingerprint`].
    fingerprint: u64,
}

/// Encodes all rows of `source` into the scratch memory of `format`, which is large enough, up to the first row with a
/// value that is not exact.
struct EncodeRows<'a, 'b> {
    source: &'a Tensor<'b>,
    /// The number of the first row, counted over all members.
    place: u64,
    format: WeightFormat,
    scratch: &'a mut Scratch,
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

#[inline(always)]
fn row_to_f32(values: &Values<'_>, row: usize, out: &mut [f32]) {
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
fn mxfp4_row<'a>(blocks: &'a [u8], scales: &'a [u8], row: usize, cols: usize) -> (&'a [u8], &'a [u8]) {
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
