//! A directory with a gpt-oss model: `config.json` and one or more safetensors files, read in place. It is either
//! Hugging Face's or the release's `original`.
//!
//! Hugging Face's directories store the query, key and value projections as separate tensors, so [`TensorId::Qkv`] and
//! its bias have three parts there. All experts of a layer are in one array, and each expert is a slice of it.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::path::{Path, PathBuf};

use safetensors::Dtype;
use safetensors::tensor::Metadata;

use super::fields::read_object;
use super::mapped::MappedFile;
use super::names::{Naming, Place};
use super::{
    Checkpoint, Columns, Element, Generation, MXFP4_BLOCK, MXFP4_BLOCK_BYTES, Part, Tensor, TensorId, Values,
    generation, hf_config, original_config,
};
use crate::config::ModelConfig;
use crate::error::{Error, Result, shown};
use crate::file_kind::{self, GivenAs};

/// The file with the model's dimensions.
pub(super) const CONFIG: &str = "config.json";

/// The file that maps each tensor to the shard that holds it.
pub(super) const INDEX: &str = "model.safetensors.index.json";

/// The file with all tensors, in a directory without an index. If it is missing too, all safetensors files are read.
const SINGLE: &str = "model.safetensors";

/// How the names of a model's shards begin, Hugging Face's and the release's.
const SHARD_PREFIX: &str = "model-";

/// Types in which a tensor may be stored that is not MXFP4.
const UNQUANTIZED: [Dtype; 2] = [Dtype::BF16, Dtype::F32];

/// A directory's safetensors files, mapped. They must not be changed while this lives.
#[derive(Debug)]
pub struct SafetensorsCheckpoint {
    config: ModelConfig,
    generation: Generation,
    naming: Naming,
    dir: PathBuf,
    shards: Vec<Shard>,
    tensors: HashMap<String, TensorEntry>,
}

/// One safetensors file.
#[derive(Debug)]
struct Shard {
    path: PathBuf,
    map: MappedFile,
    /// Offset of the tensors' bytes in the file.
    data_start: usize,
}

/// The place, type and shape of a stored tensor.
#[derive(Debug)]
struct TensorEntry {
    shard: usize,
    dtype: Dtype,
    shape: Vec<usize>,
    /// Start and end of its bytes, as offsets from `Shard::data_start`.
    bytes: (usize, usize),
}

impl SafetensorsCheckpoint {
    /// Maps the directory's files and checks that each tensor of the model is there with the right type and shape, and
    /// no other tensor is. The configuration's `seq_len` is the model's context length, but at most 4096.
    pub fn open(dir: impl AsRef<Path>) -> Result<Self> {
        let dir = dir.as_ref().to_path_buf();
        let (config, generation, naming) = read_config(&dir)?;
        let mut checkpoint = Self {
            config,
            generation,
            naming,
            dir,
            shards: Vec::new(),
            tensors: HashMap::new(),
        };
        if checkpoint.dir.join(INDEX).exists() {
            checkpoint.add_indexed()?;
        } else {
            checkpoint.add_all()?;
        }
        TensorId::all(&checkpoint.config).try_for_each(|id| checkpoint.tensor(id).map(drop))?;
        checkpoint.check_unused()?;
        Ok(checkpoint)
    }

    /// The files that are read, and how many tensors each has.
    pub fn files(&self) -> impl Iterator<Item = (&Path, usize)> {
        let tensors = |shard| {
            self.tensors
                .values()
                .filter(move |stored| stored.shard == shard)
                .count()
        };
        let shards = self.shards.iter().enumerate();
        shards.map(move |(number, shard)| (shard.path.as_path(), tensors(number)))
    }

    /// Adds the shards that the index names. Fails unless the index has every tensor of each shard, and the tensor has
    /// only one place.
    fn add_indexed(&mut self) -> Result<()> {
        let path = self.dir.join(INDEX);
        let wrong = |why: String| Error::format(path.display().to_string(), why);
        let index = read_object(&path)?;
        let map = index.get("weight_map").and_then(|map| map.as_object());
        let map = map.ok_or_else(|| wrong("missing field `weight_map`, an object".into()))?;
        let mut shards = BTreeSet::new();
        for file in map.values() {
            let name = file
                .as_str()
                .filter(|&file| Path::new(file).file_name() == Some(file.as_ref()));
            shards.insert(name.ok_or_else(|| wrong(format!("shard {} is not a file name", shown(file))))?);
        }
        self.refuse_other_shards(|file| shards.contains(file), INDEX)?;
        for file in shards {
            let shard = self.shards.len();
            let metadata = self.add_shard(file)?;
            for name in metadata.offset_keys() {
                let Some(info) = metadata.info(&name) else { continue };
                match map.get(&name).and_then(|place| place.as_str()) {
                    Some(place) if place == file => drop(self.tensors.insert(name, TensorEntry::new(shard, info))),
                    Some(place) => {
                        return Err(wrong(format!(
                            "tensor {name} is in {file}, where the index places it in {place}"
                        )));
                    }
                    None => {
                        let why =
                            format!("tensor {name} is in {file}, but not in the index; they do not belong together");
                        return Err(wrong(why));
                    }
                }
            }
        }
        // The first by name, whatever order the map has.
        let missing = map.iter().filter(|(name, _)| !self.tensors.contains_key(*name));
        match missing.min_by_key(|(name, _)| *name) {
            None => Ok(()),
            Some((name, file)) => Err(wrong(format!(
                "tensor {name} is not in {}, where it should be",
                file.as_str().unwrap_or_default()
            ))),
        }
    }

    /// Refuses a directory with the files of a model beside those that are read, which `list` names: it would hold two
    /// models, or parts of them.
    fn refuse_other_shards(&self, is_read: impl Fn(&str) -> bool, list: &str) -> Result<()> {
        let other = safetensors_files(&self.dir)?
            .into_iter()
            .find(|file| (file == SINGLE || file.starts_with(SHARD_PREFIX)) && !is_read(file));
        match other {
            None => Ok(()),
            Some(file) => Err(Error::format(
                self.dir.display().to_string(),
                format!(
                    "{file} is there beside {list}, which does not name it; remove what does not belong to the model"
                ),
            )),
        }
    }

    /// Adds all tensors of the files of a directory without an index. Fails if two files have a tensor of the same
    /// name.
    fn add_all(&mut self) -> Result<()> {
        let files = files(&self.dir)?;
        self.refuse_other_shards(|file| files.iter().any(|read| read == file), SINGLE)?;
        for file in files {
            let shard = self.shards.len();
            for (name, info) in self.add_shard(&file)?.tensors() {
                if self
                    .tensors
                    .insert(name.clone(), TensorEntry::new(shard, info))
                    .is_some()
                {
                    let why = format!("tensor {name} is in {file} and in another file of the directory");
                    return Err(Error::format(self.dir.display().to_string(), why));
                }
            }
        }
        Ok(())
    }

    /// Refuses tensors that the model does not use: the files then hold another model than `config.json` describes.
    fn check_unused(&self) -> Result<()> {
        let mut used = HashSet::new();
        for id in TensorId::all(&self.config) {
            match Place::of(id, self.naming, &self.config) {
                Place::Matrix(name) | Place::Vector(name) | Place::ExpertVector(name) => used.extend([name]),
                Place::Stacked(parts) | Place::Joined(parts) => used.extend(parts.into_iter().map(|(name, _)| name)),
                Place::ExpertMatrix {
                    blocks,
                    scales,
                    transposed,
                } => match transposed.filter(|name| self.is_transposed(name, &blocks)) {
                    Some(name) => used.extend([name]),
                    None => used.extend([blocks, scales]),
                },
            }
        }
        // The first name in sorted order, so that the message does not depend on the hash map's order.
        let unused = self.tensors.keys().filter(|name| !used.contains(*name)).min();
        match unused {
            None => Ok(()),
            Some(name) => Err(Error::format(
                self.dir.display().to_string(),
                format!(
                    "tensor {name} is no part of the model that config.json describes; they do not belong together"
                ),
            )),
        }
    }

    /// Whether the experts' matrices are stored as the tensor `transposed`, and not as MXFP4 `blocks`.
    fn is_transposed(&self, transposed: &str, blocks: &str) -> bool {
        self.tensors.contains_key(transposed) && !self.tensors.contains_key(blocks)
    }

    /// Maps one file and parses its header.
    fn add_shard(&mut self, file: &str) -> Result<Metadata> {
        let path = self.dir.join(file);
        let map = MappedFile::open(&path)?;
        let header = read_header(&map).map_err(|why| Error::format(path.display().to_string(), why));
        let (data_start, metadata) = header.map_err(|error| file_kind::explain(&path, error, GivenAs::Shard))?;
        let needed = data_start.checked_add(metadata.data_len());
        if needed != Some(map.len()) {
            return Err(Error::Length {
                what: path.display().to_string(),
                expected_bytes: needed.map_or(u64::MAX, |bytes| bytes as u64),
                actual_bytes: map.len() as u64,
            });
        }
        self.shards.push(Shard { path, map, data_start });
        Ok(metadata)
    }

    /// A stored tensor's type and bytes. Fails unless it has one of these types and this shape.
    fn stored(&self, name: &str, dtypes: &[Dtype], shape: &[usize]) -> Result<(Dtype, &[u8])> {
        let Some(stored) = self.tensors.get(name) else {
            return Err(Error::format(
                self.dir.display().to_string(),
                format!("tensor {name} is missing"),
            ));
        };
        let shard = &self.shards[stored.shard];
        if !dtypes.contains(&stored.dtype) || stored.shape != shape {
            let expected: Vec<_> = dtypes.iter().map(Dtype::to_string).collect();
            let why = format!(
                "tensor {name} is {} {:?}; {} {shape:?} is needed",
                stored.dtype,
                stored.shape,
                expected.join(" or ")
            );
            return Err(Error::format(shard.path.display().to_string(), why));
        }
        shard.map.check()?;
        // In bounds: the parser checks that the header's offsets ascend, and `add_shard` that the last is the file's
        // end.
        let (start, end) = stored.bytes;
        Ok((
            stored.dtype,
            &shard.map[shard.data_start + start..shard.data_start + end],
        ))
    }

    /// The values of a BF16 or F32 tensor.
    fn unquantized(&self, name: &str, shape: &[usize]) -> Result<Values<'_>> {
        let (dtype, bytes) = self.stored(name, &UNQUANTIZED, shape)?;
        Ok(unquantized_values(dtype, bytes))
    }

    /// A whole matrix `[rows, cols]`.
    fn matrix(&self, name: &str, rows: usize, cols: usize) -> Result<Tensor<'_>> {
        let values = self.unquantized(name, &[rows, cols])?;
        Ok(Tensor {
            rows,
            cols,
            parts: vec![Part { rows, values }],
        })
    }

    /// A whole vector `[cols]`.
    fn vector(&self, name: &str, cols: usize) -> Result<Tensor<'_>> {
        let values = self.unquantized(name, &[cols])?;
        Ok(Tensor {
            rows: 1,
            cols,
            parts: vec![Part { rows: 1, values }],
        })
    }

    /// One expert's vector out of `[experts, cols]`.
    fn expert_vector(&self, name: &str, expert: usize, cols: usize) -> Result<Tensor<'_>> {
        let experts = self.config.n_experts;
        let (dtype, bytes) = self.stored(name, &UNQUANTIZED, &[experts, cols])?;
        let values = unquantized_values(dtype, nth(bytes, expert, experts));
        Ok(Tensor {
            rows: 1,
            cols,
            parts: vec![Part { rows: 1, values }],
        })
    }

    /// One expert's matrix `[rows, cols]` out of all experts' MXFP4 blocks and scales, which have these two names.
    fn expert_blocks(&self, names: [&str; 2], expert: usize, rows: usize, cols: usize) -> Result<Tensor<'_>> {
        check_blocks("hidden_dim", self.config.hidden_dim)?;
        check_blocks("intermediate_dim", self.config.intermediate_dim)?;
        let experts = self.config.n_experts;
        let in_row = cols / MXFP4_BLOCK;
        let shape = [experts, rows, in_row, MXFP4_BLOCK_BYTES];
        let (_, blocks) = self.stored(names[0], &[Dtype::U8], &shape)?;
        let (_, scales) = self.stored(names[1], &[Dtype::U8], &shape[..3])?;
        let values = Values::Mxfp4 {
            blocks: nth(blocks, expert, experts),
            scales: nth(scales, expert, experts),
        };
        Ok(Tensor {
            rows,
            cols,
            parts: vec![Part { rows, values }],
        })
    }

    /// One expert's matrix `[rows, cols]` out of all experts' transposed matrices, `[experts, cols, rows]`.
    fn expert_transposed(&self, name: &str, expert: usize, rows: usize, cols: usize) -> Result<Tensor<'_>> {
        let experts = self.config.n_experts;
        let (dtype, bytes) = self.stored(name, &UNQUANTIZED, &[experts, cols, rows])?;
        let values = Values::Columns(Columns {
            element: if dtype == Dtype::F32 {
                Element::F32
            } else {
                Element::Bf16
            },
            bytes: nth(bytes, expert, experts),
            stride: rows,
            first: 0,
            rows,
        });
        Ok(Tensor {
            rows,
            cols,
            parts: vec![Part { rows, values }],
        })
    }

    /// A matrix `[rows, cols]` in several parts, each with its name and number of rows.
    fn stacked(&self, parts: &[(String, usize)], rows: usize, cols: usize) -> Result<Tensor<'_>> {
        let part = |(name, rows): &(String, usize)| {
            let values = self.unquantized(name, &[*rows, cols])?;
            Ok(Part { rows: *rows, values })
        };
        let parts = parts.iter().map(part).collect::<Result<Vec<_>>>()?;
        Ok(Tensor { rows, cols, parts })
    }

    /// A vector `[cols]` in several parts, each with its name and number of elements.
    fn joined(&self, parts: &[(String, usize)], cols: usize) -> Result<Tensor<'_>> {
        let part = |(name, cols): &(String, usize)| {
            let values = self.unquantized(name, &[*cols])?;
            Ok(Part { rows: 1, values })
        };
        let parts = parts.iter().map(part).collect::<Result<Vec<_>>>()?;
        Ok(Tensor { rows: 1, cols, parts })
    }
}

impl Checkpoint for SafetensorsCheckpoint {
    fn config(&self) -> &ModelConfig {
        &self.config
    }

    fn generation(&self) -> Generation {
        self.generation.clone()
    }

    fn tensor(&self, id: TensorId) -> Result<Tensor<'_>> {
        id.check(&self.config)?;
        let [rows, cols] = id.shape(&self.config);
        let (_, _, expert) = id.place();
        match Place::of(id, self.naming, &self.config) {
            Place::Matrix(name) => self.matrix(&name, rows, cols),
            Place::Vector(name) => self.vector(&name, cols),
            Place::Stacked(parts) => self.stacked(&parts, rows, cols),
            Place::Joined(parts) => self.joined(&parts, cols),
            Place::ExpertVector(name) => self.expert_vector(&name, expert, cols),
            Place::ExpertMatrix {
                blocks,
                scales,
                transposed,
            } => match transposed.filter(|name| self.is_transposed(name, &blocks)) {
                Some(name) => self.expert_transposed(&name, expert, rows, cols),
                None => self.expert_blocks([&blocks, &scales], expert, rows, cols),
            },
        }
    }
}

impl TensorEntry {
    fn new(shard: usize, info: &safetensors::tensor::TensorInfo) -> Self {
        let (dtype, shape, bytes) = (info.dtype, info.shape.clone(), info.data_offsets);
        Self {
            shard,
            dtype,
            shape,
            bytes,
        }
    }
}

/// The configuration in a directory's `config.json`, and which names the tensors have.
fn read_config(dir: &Path) -> Result<(ModelConfig, Generation, Naming)> {
    let path = dir.join(CONFIG);
    if dir.is_dir() && !path.exists() {
        return Err(file_kind::explain_directory(dir, CONFIG));
    }
    let object = read_object(&path)?;
    let ends = generation::ends(&object);
    let (config, naming) = if original_config::is_original(&object) {
        (original_config::config(object), Naming::Original)
    } else {
        (hf_config::config(object), Naming::HuggingFace)
    };
    let wrong = |why| Error::unsupported(path.display().to_string(), why);
    let config = config.map_err(wrong)?;
    let config = config.check().map_err(|error| wrong(error.to_string()))?;
    let generation = Generation::read(dir, ends.map_err(wrong)?)?;
    Ok((config, generation, naming))
}

/// The files of a directory without an index: `SINGLE`, or without that all safetensors files, sorted by name.
fn files(dir: &Path) -> Result<Vec<String>> {
    if dir.join(SINGLE).exists() {
        return Ok(vec![SINGLE.into()]);
    }
    let files = safetensors_files(dir)?;
    if files.is_empty() {
        return Err(file_kind::explain_directory(dir, SINGLE));
    }
    Ok(files)
}

/// The names of all safetensors files in a directory, sorted.
fn safetensors_files(dir: &Path) -> Result<Vec<String>> {
    let entries = std::fs::read_dir(dir).map_err(|e| Error::io(dir, e))?;
    let names = entries
        .flatten()
        .filter_map(|entry| entry.file_name().into_string().ok());
    let mut files: Vec<String> = names.filter(|name| name.ends_with(".safetensors")).collect();
    files.sort();
    Ok(files)
}

/// Refuses a dimension that is not a multiple of an MXFP4 block.
fn check_blocks(field: &'static str, value: usize) -> Result<()> {
    if value.is_multiple_of(MXFP4_BLOCK) {
        return Ok(());
    }
    let expected = format!("MXFP4 experts need a multiple of {MXFP4_BLOCK}");
    Err(Error::Config {
        field,
        value: value.to_string(),
        expected,
    })
}

/// Values of one of the types in `UNQUANTIZED`.
fn unquantized_values(dtype: Dtype, bytes: &[u8]) -> Values<'_> {
    match dtype {
        Dtype::F32 => Values::F32(bytes),
        _ => Values::Bf16(bytes),
    }
}

/// The `n`th of `count` equal slices.
fn nth(bytes: &[u8], n: usize, count: usize) -> &[u8] {
    let len = bytes.len() / count;
    &bytes[n * len..][..len]
}

/// Parses a safetensors file's header. Gives the offset of the data and the tensors' metadata. The crate's own
/// `read_metadata` adds offsets without checking for overflow, so only its parser is used, which checks each tensor's
/// offsets against its shape.
fn read_header(file: &[u8]) -> std::result::Result<(usize, Metadata), String> {
    let (header_bytes, rest) = file
        .split_first_chunk()
        .ok_or("the file is shorter than a safetensors header")?;
    let header_bytes = u64::from_le_bytes(*header_bytes);
    let header = usize::try_from(header_bytes).ok().and_then(|bytes| rest.get(..bytes));
    let header = header.ok_or_else(|| format!("the header's {header_bytes} bytes exceed the file"))?;
    let metadata = serde_json::from_slice(header).map_err(|e| format!("wrong header: {e}"))?;
    Ok((size_of::<u64>() + header.len(), metadata))
}
