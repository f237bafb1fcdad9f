//! Exact packing: each tensor in the narrowest format that is exact for all its values.
//!
//! In released models the experts' matrices are MXFP4 and the other matrices bfloat16, even if a file has widened them.
//! A tensor is packed tile by tile, in parallel, in the format that its kind has in the released models. Every value is
//! checked to unpack to the same bits. The backend's [`Layout`] arranges the packed values as its kernels read them. If
//! one value is not exact, the whole tensor is packed in a wider format. In memory ([`pack`]) tiles that were packed
//! before it are widened from their packed form, so each page of the checkpoint is read once, except for the tile with
//! that value; for a device, which has those tiles already, all of the tensor is packed again.

mod encoding;
mod fingerprint;
mod mxfp4;
mod non_finite;
mod report;
mod row_major;

pub use fingerprint::fingerprint_of;
pub use non_finite::NonFinite;
pub use report::{PackReport, PackedKind, Transfer};
pub use row_major::RowMajor;

use crate::checkpoint::{Columns, Part, Tensor, Values};
use crate::config::ModelConfig;
use crate::dtype::MXFP4_BLOCK;
use crate::error::{Error, Result};
use crate::memory::{self, Purpose};
use crate::simd::Level;
use crate::tensors::{Holds, TensorId};
use encoding::{EncodeRows, Place, Scratch, mxfp4_row};
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
