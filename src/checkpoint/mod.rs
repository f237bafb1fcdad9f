//! Sources of weights: the eval program's struct, its `.bin` file, or a directory of safetensors files, either Hugging
//! Face's or the release's `original`.
//!
//! A [`Checkpoint`] gives each tensor of the model, by its [`TensorId`], as slices of the mapped file or of the
//! program's memory, neither copied nor converted. `weights` packs them.

mod arrays;
pub mod describe;
mod fields;
mod generation;
mod hf_config;
mod mapped;
mod names;
mod original_config;
mod safetensors;
mod yarn;

pub use crate::tensors::{Field, TensorId};
pub use arrays::{
    BinCheckpoint, CONFIG_BYTES, PointerCheckpoint, TensorLayout, config_from_bytes, config_from_fields,
    config_to_bytes,
};
pub use generation::Generation;
pub use mapped::explain_mapped;
pub use safetensors::SafetensorsCheckpoint;

use crate::config::ModelConfig;
use crate::dtype::{E2M1, MXFP4_BLOCK, MXFP4_BLOCK_BYTES, e8m0_to_f32};
use crate::error::Result;
use crate::memory::{self, Purpose};
use half::bf16;
use std::path::Path;
use std::sync::Arc;

/// The largest `seq_len` of a model read from a directory. The KV cache is sized for sequences of `seq_len` positions;
/// gpt-oss allows 131072, but few requests come near that.
const MAX_SEQ_LEN: usize = 4096;

/// Opens a directory, or a `.bin` file.
pub fn open(path: &Path) -> Result<Arc<dyn Checkpoint>> {
    if path.is_dir() {
        return Ok(Arc::new(SafetensorsCheckpoint::open(path)?));
    }
    Ok(Arc::new(BinCheckpoint::open(path)?))
}

/// Values as stored in the checkpoint: little endian, row-major, of any alignment.
#[derive(Clone, Copy, Debug)]
pub enum Values<'a> {
    /// 4 bytes a value.
    F32(&'a [u8]),
    /// 2 bytes a value.
    Bf16(&'a [u8]),
    /// Blocks of 32 values: 16 bytes of E2M1 codes (the even index in the low nibble) and one E8M0 scale each.
    Mxfp4 {
        /// `[rows, cols / 32, 16]`
        blocks: &'a [u8],
        /// `[rows, cols / 32]`
        scales: &'a [u8],
    },
    /// Rows of a matrix that is stored transposed.
    Columns(Columns<'a>),
}

/// The type in which a value is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Element {
    /// 4 bytes.
    F32,
    /// 2 bytes.
    Bf16,
}

/// Consecutive rows of a matrix that is stored column by column, `[cols, stride]`.
#[derive(Clone, Copy, Debug)]
pub struct Columns<'a> {
    /// The type of its values.
    pub element: Element,
    /// The bytes of the whole matrix.
    pub bytes: &'a [u8],
    /// Rows of the whole matrix.
    pub stride: usize,
    /// The first of the consecutive rows.
    pub first: usize,
    /// The number of consecutive rows.
    pub rows: usize,
}

impl Columns<'_> {
    fn element_bytes(&self) -> usize {
        match self.element {
            Element::F32 => 4,
            Element::Bf16 => 2,
        }
    }

    /// Number of columns.
    pub fn cols(&self) -> usize {
        self.bytes.len() / (self.stride * self.element_bytes())
    }

    /// The values of row `first + row` of the matrix, widened to float32 exactly.
    pub fn row(&self, row: usize) -> impl Iterator<Item = f32> {
        let column_bytes = self.stride * self.element_bytes();
        let at = (self.first + row) * self.element_bytes();
        let value = move |column: &[u8]| match self.element {
            Element::F32 => column[at..]
                .first_chunk()
                .map_or(0.0, |&bytes| f32::from_le_bytes(bytes)),
            Element::Bf16 => column[at..]
                .first_chunk()
                .map_or(0.0, |&bytes| bf16::from_le_bytes(bytes).to_f32()),
        };
        self.bytes.chunks_exact(column_bytes).map(value)
    }
}

impl Values<'_> {
    /// Number of values.
    pub fn count(&self) -> usize {
        match self {
            Self::F32(bytes) => bytes.len() / 4,
            Self::Bf16(bytes) => bytes.len() / 2,
            Self::Mxfp4 { scales, .. } => scales.len() * MXFP4_BLOCK,
            Self::Columns(columns) => columns.rows * columns.cols(),
        }
    }

    /// Appends the values to `out`, widened to float32 exactly. `out` must have the capacity.
    fn extend_f32(&self, out: &mut Vec<f32>) {
        match self {
            Self::F32(bytes) => out.extend(bytes.as_chunks().0.iter().map(|&b| f32::from_le_bytes(b))),
            Self::Bf16(bytes) => out.extend(bytes.as_chunks().0.iter().map(|&b| bf16::from_le_bytes(b).to_f32())),
            Self::Mxfp4 { blocks, scales } => {
                for (codes, &scale) in blocks.as_chunks::<MXFP4_BLOCK_BYTES>().0.iter().zip(*scales) {
                    let scale = e8m0_to_f32(scale);
                    let pair = |&byte: &u8| [byte & 15, byte >> 4].map(|code| E2M1[usize::from(code)] * scale);
                    out.extend(codes.iter().flat_map(pair));
                }
            }
            Self::Columns(columns) => (0..columns.rows).for_each(|row| out.extend(columns.row(row))),
        }
    }
}

/// Consecutive rows of a matrix, or consecutive elements of a vector, that are stored together.
#[derive(Clone, Copy, Debug)]
pub struct Part<'a> {
    /// Number of rows. For a vector it is 1, whatever number of its elements the part holds.
    pub rows: usize,
    /// `[rows, cols]` of a matrix, or [`Values::count`] elements of a vector.
    pub values: Values<'a>,
}

/// A matrix `[rows, cols]` as stored in the checkpoint; a vector has one row.
#[derive(Clone, Debug)]
pub struct Tensor<'a> {
    /// Outputs.
    pub rows: usize,
    /// Inputs.
    pub cols: usize,
    /// One or more parts, which one after the other hold the tensor's values in row-major order. A matrix is split
    /// between rows, a vector between elements.
    pub parts: Vec<Part<'a>>,
}

impl Tensor<'_> {
    /// Size in the checkpoint in bytes.
    pub fn len_bytes(&self) -> u64 {
        let bytes = |values: &Values<'_>| match values {
            Values::F32(bytes) | Values::Bf16(bytes) => bytes.len(),
            Values::Mxfp4 { blocks, scales } => blocks.len() + scales.len(),
            Values::Columns(columns) => values.count() * columns.element_bytes(),
        };
        self.parts.iter().map(|part| bytes(&part.values) as u64).sum()
    }

    /// All values in row-major order, widened to float32 exactly.
    pub fn to_f32(&self) -> Result<Vec<f32>> {
        let mut out = Vec::new();
        self.extend_f32(&mut out)?;
        Ok(out)
    }

    /// Appends all values to `out`, in row-major order, widened to float32 exactly.
    pub fn extend_f32(&self, out: &mut Vec<f32>) -> Result<()> {
        let values = self.parts.iter().map(|part| part.values.count()).sum();
        memory::reserve(out, values, Purpose::Checkpoint)?;
        for part in &self.parts {
            part.values.extend_f32(out);
        }
        Ok(())
    }
}

/// A source of weights.
pub trait Checkpoint: Send + Sync {
    /// The model's dimensions.
    fn config(&self) -> &ModelConfig;
    /// What it says of answers.
    fn generation(&self) -> Generation {
        Generation::default()
    }
    /// One tensor, checked to have the shape that [`TensorId`] documents.
    fn tensor(&self, id: TensorId) -> Result<Tensor<'_>>;
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tensor(cols: usize, values: Vec<Values<'_>>) -> Tensor<'_> {
        let parts = values.into_iter().map(|values| Part { rows: 1, values }).collect();
        Tensor { rows: 1, cols, parts }
    }

    #[test]
    fn mxfp4_puts_the_even_index_in_the_low_nibble() {
        let blocks: Vec<u8> = (0..16).map(|i| (((i + 1) % 16) << 4) | i).collect();
        let values = tensor(
            32,
            vec![Values::Mxfp4 {
                blocks: &blocks,
                scales: &[128],
            }],
        )
        .to_f32()
        .unwrap();
        let expected: Vec<f32> = (0..16)
            .flat_map(|i| [2.0 * E2M1[i], 2.0 * E2M1[(i + 1) % 16]])
            .collect();
        assert_eq!(values, expected);
        assert!(values[16] == 0.0 && values[16].is_sign_negative());
    }

    #[test]
    fn an_mxfp4_block_with_scale_255_is_nan() {
        let values = tensor(
            32,
            vec![Values::Mxfp4 {
                blocks: &[0x21; 16],
                scales: &[255],
            }],
        )
        .to_f32()
        .unwrap();
        assert!(values.len() == 32 && values.iter().all(|v| v.is_nan()));
    }

    #[test]
    fn parts_of_a_vector_follow_one_another_unaligned() {
        let f32s: Vec<u8> = [0].into_iter().chain(1.25f32.to_le_bytes()).collect();
        let bf16s: Vec<u8> = [0].into_iter().chain(bf16::from_f32(-3.0).to_le_bytes()).collect();
        let vector = tensor(2, vec![Values::F32(&f32s[1..]), Values::Bf16(&bf16s[1..])]);
        assert_eq!(vector.to_f32().unwrap(), [1.25, -3.0]);
    }
}
