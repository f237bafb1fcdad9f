//! Tiles as the rows are stored: row-major, of MXFP4 the codes of all rows and then their scales. So lie tensors whose
//! rows are looked up one by one, and what GPUs are sent, the wire format, which `kernels/wire.h` reads;
//! `tests/header/wire.rs` compares the two, byte for byte.

use super::encoding::row_to_f32;
use super::{Layout, Rows, WeightFormat};
use crate::checkpoint::Values;
use crate::dtype::MXFP4_BLOCK;

/// See the module.
#[derive(Clone, Copy, Debug)]
pub struct RowMajor;

impl RowMajor {
    /// Rows of a tile.
    pub const ROWS: usize = 32;

    /// Bytes of a matrix, its last tile filled up.
    pub fn bytes(self, format: WeightFormat, rows: usize, cols: usize) -> usize {
        rows.div_ceil(Self::ROWS) * self.tile_bytes(format, cols)
    }
}

impl Layout for RowMajor {
    fn tile_rows(&self) -> usize {
        Self::ROWS
    }

    fn tile_bytes(&self, format: WeightFormat, cols: usize) -> usize {
        Self::ROWS
            * match format {
                WeightFormat::Mxfp4 => cols / 2 + cols / MXFP4_BLOCK,
                WeightFormat::Bf16 => 2 * cols,
                WeightFormat::F32 => 4 * cols,
            }
    }

    /// Writes the whole tile, padding included: a GPU's buffers are reused, and not zeroed.
    fn write(&self, rows: Rows<'_>, cols: usize, tile: &mut [u8]) {
        match rows {
            Rows::Mxfp4 { codes, scales } => {
                let (all_codes, all_scales) = tile.split_at_mut(Self::ROWS * cols / 2);
                copy(codes, all_codes);
                copy(scales, all_scales);
            }
            Rows::Bf16(values) => fill(values, u16::to_le_bytes, tile),
            Rows::F32(values) => fill(values, f32::to_le_bytes, tile),
        }
    }

    fn read(&self, format: WeightFormat, cols: usize, tile: &[u8], values: &mut [f32]) {
        let source = match format {
            WeightFormat::Mxfp4 => {
                let (blocks, scales) = tile.split_at(Self::ROWS * cols / 2);
                Values::Mxfp4 { blocks, scales }
            }
            WeightFormat::Bf16 => Values::Bf16(tile),
            WeightFormat::F32 => Values::F32(tile),
        };
        for (row, out) in values.chunks_exact_mut(cols).enumerate() {
            row_to_f32(&source, row, out);
        }
    }
}

/// Writes these bytes, and zeros behind them.
fn copy(bytes: &[u8], to: &mut [u8]) {
    let (written, rest) = to.split_at_mut(bytes.len());
    written.copy_from_slice(bytes);
    rest.fill(0);
}

/// Writes these values' bytes, and zeros behind them.
fn fill<T: Copy, const N: usize>(values: &[T], bytes: impl Fn(T) -> [u8; N], to: &mut [u8]) {
    let (written, rest) = to.split_at_mut(N * values.len());
    for (out, &value) in written.as_chunks_mut().0.iter_mut().zip(values) {
        *out = bytes(value);
    }
    rest.fill(0);
}
