//! Checkpoints of sixteen float32 arrays, those of [`Field`]: the eval program's `.bin` file, and its struct of
//! pointers.
//!
//! They differ in where each array starts; [`TensorLayout`] finds the tensors within the arrays of either.

use std::ops::Range;
use std::path::Path;

use super::mapped::{MappedFile, WatchedFile};
use super::{Checkpoint, Field, Part, Tensor, TensorId, Values};
use crate::config::ModelConfig;
use crate::error::{Error, Result};
use crate::file_kind::{self, GivenAs};

/// Size of the C struct `Config`, the header of a `.bin` file.
pub const CONFIG_BYTES: usize = 60;

/// Bytes of one value.
const VALUE_BYTES: usize = size_of::<f32>();

/// Reads the bytes of the C struct `Config`, and checks its fields.
pub fn config_from_bytes(bytes: &[u8; CONFIG_BYTES]) -> Result<ModelConfig> {
    let mut fields = [0; 15];
    for (field, bytes) in fields.iter_mut().zip(bytes.as_chunks().0) {
        *field = u32::from_le_bytes(*bytes);
    }
    config_from_fields(&fields)
}

/// Reads the C struct `Config` from the bits of its fifteen fields, and checks them.
pub fn config_from_fields(fields: &[u32; 15]) -> Result<ModelConfig> {
    let int = |index: usize, field: &'static str| {
        let value = fields[index].cast_signed();
        usize::try_from(value).map_err(|_| Error::Config {
            field,
            value: value.to_string(),
            expected: "it must not be negative".into(),
        })
    };
    ModelConfig {
        vocab_size: int(0, "vocab_size")?,
        hidden_dim: int(1, "hidden_dim")?,
        n_experts: int(2, "n_experts")?,
        experts_per_token: int(3, "experts_per_token")?,
        intermediate_dim: int(4, "intermediate_dim")?,
        n_layers: int(5, "n_layers")?,
        head_dim: int(6, "head_dim")?,
        n_attn_heads: int(7, "n_attn_heads")?,
        n_kv_heads: int(8, "n_kv_heads")?,
        seq_len: int(9, "seq_len")?,
        initial_context_length: int(10, "initial_context_length")?,
        context_length: None,
        rope_theta: f32::from_bits(fields[11]),
        rope_scaling_factor: f32::from_bits(fields[12]),
        yarn_ramp: None,
        rope_concentration: None,
        sliding_window: int(13, "sliding_window")?,
        swiglu_limit: f32::from_bits(fields[14]),
    }
    .check()
}

/// The bytes of the C struct `Config` for a checked configuration, whose dimensions all fit its fields. It has no
/// fields for `context_length`, `yarn_ramp` and `rope_concentration`, which only directories set.
pub fn config_to_bytes(config: &ModelConfig) -> [u8; CONFIG_BYTES] {
    let fields = [
        config.vocab_size as u32,
        config.hidden_dim as u32,
        config.n_experts as u32,
        config.experts_per_token as u32,
        config.intermediate_dim as u32,
        config.n_layers as u32,
        config.head_dim as u32,
        config.n_attn_heads as u32,
        config.n_kv_heads as u32,
        config.seq_len as u32,
        config.initial_context_length as u32,
        config.rope_theta.to_bits(),
        config.rope_scaling_factor.to_bits(),
        config.sliding_window as u32,
        config.swiglu_limit.to_bits(),
    ];
    let mut bytes = [0; CONFIG_BYTES];
    for (bytes, field) in bytes.as_chunks_mut().0.iter_mut().zip(fields) {
        *bytes = field.to_le_bytes();
    }
    bytes
}

/// The byte range of each tensor in its array, and of each array in a `.bin` file.
#[derive(Clone, Debug)]
pub struct TensorLayout {
    config: ModelConfig,
    /// Each array's byte range in the file, by `Field as usize`.
    in_file: [Range<usize>; Field::COUNT],
    file_bytes: usize,
}

impl TensorLayout {
    /// The layout of a checked configuration; fails if its tensors do not fit the address space.
    pub fn new(config: ModelConfig) -> Result<Self> {
        let mut in_file = [const { 0..0 }; Field::COUNT];
        let mut end = CONFIG_BYTES;
        for field in Field::IN_FILE_ORDER {
            let start = end;
            end = array_bytes(&config, field)
                .and_then(|bytes| start.checked_add(bytes))
                .filter(|&end| isize::try_from(end).is_ok())
                .ok_or(Error::Overflow(field.name()))?;
            in_file[field as usize] = start..end;
        }
        let file_bytes = end;
        Ok(Self {
            config,
            in_file,
            file_bytes,
        })
    }

    /// Size of the file in bytes.
    pub fn file_bytes(&self) -> usize {
        self.file_bytes
    }

    /// The byte range of an array in the file.
    pub fn in_file(&self, field: Field) -> Range<usize> {
        self.in_file[field as usize].clone()
    }

    /// The array that holds a tensor, and the tensor's byte range in it.
    pub fn in_array(&self, id: TensorId) -> Result<(Field, Range<usize>)> {
        id.check(&self.config)?;
        let (field, layer, expert) = id.place();
        let [_, experts] = field.counts(&self.config);
        let [rows, cols] = id.shape(&self.config);
        // Does not overflow: `new` has checked that the size of the whole array does not.
        let bytes = rows * cols * VALUE_BYTES;
        let start = (layer * experts + expert) * bytes;
        Ok((field, start..start + bytes))
    }

    /// The tensor with these bytes as its values.
    fn tensor<'a>(&self, id: TensorId, bytes: &'a [u8]) -> Tensor<'a> {
        let [rows, cols] = id.shape(&self.config);
        let values = Values::F32(bytes);
        Tensor {
            rows,
            cols,
            parts: vec![Part { rows, values }],
        }
    }
}

/// Size of an array in bytes; `None` if that overflows.
fn array_bytes(config: &ModelConfig, field: Field) -> Option<usize> {
    let [layers, experts] = field.counts(config);
    let [rows, cols] = field.id(0, 0).shape(config);
    [layers, experts, rows, cols]
        .into_iter()
        .try_fold(VALUE_BYTES, usize::checked_mul)
}

/// A `.bin` file, mapped. It must not be changed while this lives.
#[derive(Debug)]
pub struct BinCheckpoint {
    layout: TensorLayout,
    map: MappedFile,
}

impl BinCheckpoint {
    /// Maps the file and checks that it has the length that its configuration gives.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        Self::open_bin(path).map_err(|error| file_kind::explain(path, error, GivenAs::Model))
    }

    fn open_bin(path: &Path) -> Result<Self> {
        let map = MappedFile::open(path)?;
        let wrong_length = |expected_bytes: usize| Error::Length {
            what: path.display().to_string(),
            expected_bytes: expected_bytes as u64,
            actual_bytes: map.len() as u64,
        };
        let header = map.first_chunk().ok_or_else(|| wrong_length(CONFIG_BYTES))?;
        let layout = TensorLayout::new(config_from_bytes(header)?)?;
        if map.len() != layout.file_bytes() {
            return Err(wrong_length(layout.file_bytes()));
        }
        Ok(Self { layout, map })
    }
}

impl Checkpoint for BinCheckpoint {
    fn config(&self) -> &ModelConfig {
        &self.layout.config
    }

    fn tensor(&self, id: TensorId) -> Result<Tensor<'_>> {
        let (field, bytes) = self.layout.in_array(id)?;
        self.map.check()?;
        let array = &self.map[self.layout.in_file(field)];
        Ok(self.layout.tensor(id, &array[bytes]))
    }
}

/// The sixteen arrays that the eval program's `TransformerWeights` points to.
#[derive(Debug)]
pub struct PointerCheckpoint {
    layout: TensorLayout,
    /// Each array's first byte, by `Field as usize`.
    arrays: [*const u8; Field::COUNT],
    /// The mapped file that holds the arrays, if it is known.
    file: Option<WatchedFile>,
}

// SAFETY: nothing is written through the pointers, and `new` requires that nobody writes there while this lives.
unsafe impl Send for PointerCheckpoint {}
// SAFETY: as above; methods that take `&self` change nothing.
unsafe impl Sync for PointerCheckpoint {}

impl PointerCheckpoint {
    /// Takes the pointers of `TransformerWeights` in its order; none may be NULL. They need not be aligned.
    ///
    /// # Safety
    ///
    /// As long as this lives, each pointer must point to as many float32 values as `config` asks of its array
    /// ([`TensorLayout`]), readable and written to by nobody.
    pub unsafe fn new(config: ModelConfig, arrays: [*const u8; Field::COUNT]) -> Result<Self> {
        let layout = TensorLayout::new(config)?;
        match Field::IN_FILE_ORDER
            .iter()
            .find(|&&field| arrays[field as usize].is_null())
        {
            Some(field) => Err(Error::Null(field.name())),
            None => Ok(Self {
                layout,
                arrays,
                file: None,
            }),
        }
    }

    /// Makes `tensor` check the length of the file open as `descriptor`, if that file is the one mapped at `data`: at
    /// least `bytes`. Fails if it is shorter already.
    pub fn watch(&mut self, descriptor: i32, data: *const u8, bytes: u64) -> Result<()> {
        self.file = WatchedFile::new(descriptor, data, bytes);
        self.check_file()
    }

    fn check_file(&self) -> Result<()> {
        self.file.as_ref().map_or(Ok(()), WatchedFile::check)
    }

    /// Checks that every array lies inside the `file_bytes` mapped at `data`.
    pub fn check_range(&self, data: *const u8, file_bytes: u64) -> Result<()> {
        for field in Field::IN_FILE_ORDER {
            let expected_bytes = self.layout.in_file(field).len() as u64;
            let start = self.arrays[field as usize].addr().checked_sub(data.addr());
            let actual_bytes = start.map_or(0, |start| file_bytes.saturating_sub(start as u64));
            if actual_bytes < expected_bytes {
                let what = format!("{} inside the mapped file", field.name());
                return Err(Error::Length {
                    what,
                    expected_bytes,
                    actual_bytes,
                });
            }
        }
        Ok(())
    }
}

impl Checkpoint for PointerCheckpoint {
    fn config(&self) -> &ModelConfig {
        &self.layout.config
    }

    fn tensor(&self, id: TensorId) -> Result<Tensor<'_>> {
        let (field, bytes) = self.layout.in_array(id)?;
        self.check_file()?;
        let array = self.arrays[field as usize];
        // SAFETY: `in_array` gives a range inside the array, whose length the caller of `new` guarantees; bytes need no
        // alignment, and the slice lives no longer than `self`.
        let bytes = unsafe { std::slice::from_raw_parts(array.add(bytes.start), bytes.len()) };
        Ok(self.layout.tensor(id, bytes))
    }
}
