//! The wire format: weights as the host sends them, equal for every device. Row-major in tiles of 32 rows; a tile of
//! MXFP4 is the codes of all its rows (two per byte, the even index in the low half), then the scales of all its rows.
//! Each device rearranges them for its own kernels at its memory's bandwidth, so that the host packs once for all
//! devices.

use super::args::{Format, WIRE_ROWS};
use crate::dtype::{E2M1, MXFP4_BLOCK, e8m0_to_f32};
use crate::weights::{Layout, RowMajor, Rows, WeightFormat};

/// See the module.
pub struct Wire;

impl Wire {
    /// Bytes of a matrix.
    pub fn bytes(format: WeightFormat, rows: usize, cols: usize) -> usize {
        rows.div_ceil(WIRE_ROWS) * Self.tile_bytes(format, cols)
    }
}

/// The kernels' number for a format.
pub fn format(format: WeightFormat) -> Format {
    match format {
        WeightFormat::Mxfp4 => Format::Mxfp4,
        WeightFormat::Bf16 => Format::Bf16,
        WeightFormat::F32 => Format::F32,
    }
}

impl Layout for Wire {
    fn tile_rows(&self) -> usize {
        WIRE_ROWS
    }

    fn tile_bytes(&self, format: WeightFormat, cols: usize) -> usize {
        match format {
            WeightFormat::Mxfp4 => WIRE_ROWS * (cols / 2 + cols / MXFP4_BLOCK),
            _ => RowMajor.tile_bytes(format, cols),
        }
    }

    /// Writes the whole tile, padding included: buffers are reused, and not zeroed.
    fn write(&self, rows: Rows<'_>, cols: usize, tile: &mut [u8]) {
        match rows {
            Rows::Mxfp4 { codes, scales } => {
                let (packed, tile_scales) = tile.split_at_mut(WIRE_ROWS * cols / 2);
                let (packed, rest) = packed.split_at_mut(codes.len());
                packed.copy_from_slice(codes);
                rest.fill(0);
                let (tile_scales, rest) = tile_scales.split_at_mut(scales.len());
                tile_scales.copy_from_slice(scales);
                rest.fill(0);
            }
            Rows::Bf16(values) => {
                tile[2 * values.len()..].fill(0);
                RowMajor.write(rows, cols, tile);
            }
            Rows::F32(values) => {
                tile[4 * values.len()..].fill(0);
                RowMajor.write(rows, cols, tile);
            }
        }
    }

    fn read(&self, format: WeightFormat, cols: usize, tile: &[u8], values: &mut [f32]) {
        if format != WeightFormat::Mxfp4 {
            return RowMajor.read(format, cols, tile, values);
        }
        let (packed, scales) = tile.split_at(WIRE_ROWS * cols / 2);
        let blocks = values
            .chunks_exact_mut(MXFP4_BLOCK)
            .zip(packed.chunks_exact(MXFP4_BLOCK / 2));
        for ((values, codes), &scale) in blocks.zip(scales) {
            for (pair, code) in values.as_chunks_mut::<2>().0.iter_mut().zip(codes) {
                *pair = [code & 15, code >> 4].map(|code| E2M1[usize::from(code)] * e8m0_to_f32(scale));
            }
        }
    }
}
