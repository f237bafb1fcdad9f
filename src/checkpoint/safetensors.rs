//! A Hugging Face directory of gpt-oss: `config.json` and one or more safetensors files, read in place.
//!
//! Attention's three projections lie apart there, so [`TensorId::Qkv`] and its bias have three parts. All experts of
//! a layer share an array, of which one expert is a slice.

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};

use memmap2::Mmap;
use safetensors::Dtype;
use safetensors::tensor::Metadata;
use serde::Deserialize;

use super::arrays::map_file;
use super::{Checkpoint, MXFP4_BLOCK, MXFP4_BLOCK_BYTES, Part, Tensor, TensorId, Values, hf_config};
use crate::error::{Error, Result};
use crate::model::ModelConfig;

/// The file that says which shard holds which tensor.
const INDEX: &str = "model.safetensors.index.json";

/// The only file of a checkpoint without an index.
const SINGLE: &str = "model.safetensors";

/// Types in which everything but the experts' matrices may be stored.
const DENSE: [Dtype; 2] = [Dtype::BF16, Dtype::F32];

/// A directory in Hugging Face's layout, its files mapped. They must not be changed while this lives.
#[derive(Debug)]
pub struct SafetensorsCheckpoint {
    config: ModelConfig,
    dir: PathBuf,
    shards: Vec<Shard>,
    tensors: HashMap<String, Stored>,
}

/// One safetensors file.
#[derive(Debug)]
struct Shard {
    path: PathBuf,
    map: Mmap,
    /// Where the tensors' bytes begin.
    data_start: usize,
}

/// Where and as what a tensor of the directory is stored.
#[derive(Debug)]
struct Stored {
    shard: usize,
    dtype: Dtype,
    shape: Vec<usize>,
    /// Its first byte and the one behind its last, counted from `Shard::data_start`.
    bytes: (usize, usize),
}

/// The part of the index that matters.
#[derive(Deserialize)]
struct Index {
    weight_map: BTreeMap<String, String>,
}

impl SafetensorsCheckpoint {
    /// Maps the directory's files and checks that every tensor of the model is there, of the right type and shape.
    /// `seq_len` is the configuration's `max_position_embeddings`, but at most 4096.
    pub fn open(dir: impl AsRef<Path>) -> Result<Self> {
        let dir = dir.as_ref().to_path_buf();
        let config = hf_config::read(&dir.join("config.json"))?;
        check_blocks("hidden_dim", config.hidden_dim)?;
        check_blocks("intermediate_dim", config.intermediate_dim)?;
        let mut checkpoint = Self {
            config,
            dir,
            shards: Vec::new(),
            tensors: HashMap::new(),
        };
        if checkpoint.dir.join(INDEX).exists() {
            checkpoint.add_indexed()?;
        } else {
            let metadata = checkpoint.add_shard(SINGLE)?;
            let stored = metadata.tensors();
            checkpoint.tensors = stored
                .into_iter()
                .map(|(name, info)| (name, Stored::new(0, info)))
                .collect();
        }
        TensorId::all(&checkpoint.config).try_for_each(|id| checkpoint.tensor(id).map(drop))?;
        Ok(checkpoint)
    }

    /// Adds the shards the index names, and from each the tensors it says are there.
    fn add_indexed(&mut self) -> Result<()> {
        let path = self.dir.join(INDEX);
        let text = std::fs::read(&path).map_err(|e| Error::io(&path, e))?;
        let wrong = |why: String| Error::format(path.display().to_string(), why);
        let index: Index = serde_json::from_slice(&text).map_err(|e| wrong(e.to_string()))?;
        let mut opened: HashMap<String, (usize, Metadata)> = HashMap::new();
        for (name, file) in index.weight_map {
            if Path::new(&file).file_name() != Some(file.as_ref()) {
                return Err(wrong(format!("shard {file:?} is not a file name")));
            }
            if !opened.contains_key(&file) {
                let shard = self.shards.len();
                opened.insert(file.clone(), (shard, self.add_shard(&file)?));
            }
            let (shard, metadata) = &opened[&file];
            let info = metadata.info(&name);
            let info = info.ok_or_else(|| wrong(format!("tensor {name} is not in {file}, where it should be")))?;
            self.tensors.insert(name, Stored::new(*shard, info));
        }
        Ok(())
    }

    /// Maps one file and parses its header.
    fn add_shard(&mut self, file: &str) -> Result<Metadata> {
        let path = self.dir.join(file);
        let map = map_file(&path)?;
        let (data_start, metadata) = read_header(&map).map_err(|why| Error::format(path.display().to_string(), why))?;
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

    /// A stored tensor's bytes, if it has one of these types and this shape.
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
        // In bounds: the header's offsets ascend up to the file's end, which `add_shard` has compared.
        let (start, end) = stored.bytes;
        Ok((
            stored.dtype,
            &shard.map[shard.data_start + start..shard.data_start + end],
        ))
    }

    /// A tensor of plain floating-point values.
    fn dense(&self, name: &str, shape: &[usize]) -> Result<Values<'_>> {
        let (dtype, bytes) = self.stored(name, &DENSE, shape)?;
        Ok(dense_values(dtype, bytes))
    }

    /// A whole matrix `[rows, cols]`.
    fn matrix(&self, name: &str, rows: usize, cols: usize) -> Result<Tensor<'_>> {
        let values = self.dense(name, &[rows, cols])?;
        Ok(Tensor {
            rows,
            cols,
            parts: vec![Part { rows, values }],
        })
    }

    /// A whole vector `[cols]`.
    fn vector(&self, name: &str, cols: usize) -> Result<Tensor<'_>> {
        let values = self.dense(name, &[cols])?;
        Ok(Tensor {
            rows: 1,
            cols,
            parts: vec![Part { rows: 1, values }],
        })
    }

    /// One expert's vector out of `[experts, cols]`.
    fn expert_vector(&self, name: &str, expert: usize, cols: usize) -> Result<Tensor<'_>> {
        let experts = self.config.n_experts;
        let (dtype, bytes) = self.stored(name, &DENSE, &[experts, cols])?;
        let values = dense_values(dtype, nth(bytes, expert, experts));
        Ok(Tensor {
            rows: 1,
            cols,
            parts: vec![Part { rows: 1, values }],
        })
    }

    /// One expert's matrix `[rows, cols]` out of the blocks and scales of all.
    fn expert_matrix(&self, name: &str, expert: usize, rows: usize, cols: usize) -> Result<Tensor<'_>> {
        let experts = self.config.n_experts;
        let in_row = cols / MXFP4_BLOCK;
        let shape = [experts, rows, in_row, MXFP4_BLOCK_BYTES];
        let (_, blocks) = self.stored(&format!("{name}_blocks"), &[Dtype::U8], &shape)?;
        let (_, scales) = self.stored(&format!("{name}_scales"), &[Dtype::U8], &shape[..3])?;
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

    /// The rows of queries, keys and values.
    fn qkv_rows(&self) -> [(&'static str, usize); 3] {
        [
            ("q", self.config.q_dim()),
            ("k", self.config.kv_dim()),
            ("v", self.config.kv_dim()),
        ]
    }

    /// The query, key and value projections, stacked.
    fn qkv(&self, layer: usize, rows: usize, cols: usize) -> Result<Tensor<'_>> {
        let part = |(letter, rows)| {
            let values = self.dense(&attention(layer, &format!("{letter}_proj.weight")), &[rows, cols])?;
            Ok(Part { rows, values })
        };
        let parts = self.qkv_rows().into_iter().map(part).collect::<Result<Vec<_>>>()?;
        Ok(Tensor { rows, cols, parts })
    }

    /// Their biases, one behind the other.
    fn qkv_bias(&self, layer: usize, cols: usize) -> Result<Tensor<'_>> {
        let part = |(letter, cols)| {
            let values = self.dense(&attention(layer, &format!("{letter}_proj.bias")), &[cols])?;
            Ok(Part { rows: 1, values })
        };
        let parts = self.qkv_rows().into_iter().map(part).collect::<Result<Vec<_>>>()?;
        Ok(Tensor { rows: 1, cols, parts })
    }
}

impl Checkpoint for SafetensorsCheckpoint {
    fn config(&self) -> &ModelConfig {
        &self.config
    }

    fn tensor(&self, id: TensorId) -> Result<Tensor<'_>> {
        id.check(&self.config)?;
        let [rows, cols] = id.shape(&self.config);
        let mlp = |layer: usize, name: &str| format!("model.layers.{layer}.mlp.{name}");
        match id {
            TensorId::Embedding => self.matrix("model.embed_tokens.weight", rows, cols),
            TensorId::Unembedding => self.matrix("lm_head.weight", rows, cols),
            TensorId::OutNorm => self.vector("model.norm.weight", cols),
            TensorId::AttnNorm { layer } => self.vector(&format!("model.layers.{layer}.input_layernorm.weight"), cols),
            TensorId::FfnNorm { layer } => {
                self.vector(&format!("model.layers.{layer}.post_attention_layernorm.weight"), cols)
            }
            TensorId::Qkv { layer } => self.qkv(layer, rows, cols),
            TensorId::QkvBias { layer } => self.qkv_bias(layer, cols),
            TensorId::AttnOut { layer } => self.matrix(&attention(layer, "o_proj.weight"), rows, cols),
            TensorId::AttnOutBias { layer } => self.vector(&attention(layer, "o_proj.bias"), cols),
            TensorId::Sinks { layer } => self.vector(&attention(layer, "sinks"), cols),
            TensorId::Router { layer } => self.matrix(&mlp(layer, "router.weight"), rows, cols),
            TensorId::RouterBias { layer } => self.vector(&mlp(layer, "router.bias"), cols),
            TensorId::Mlp1 { layer, expert } => {
                self.expert_matrix(&mlp(layer, "experts.gate_up_proj"), expert, rows, cols)
            }
            TensorId::Mlp1Bias { layer, expert } => {
                self.expert_vector(&mlp(layer, "experts.gate_up_proj_bias"), expert, cols)
            }
            TensorId::Mlp2 { layer, expert } => {
                self.expert_matrix(&mlp(layer, "experts.down_proj"), expert, rows, cols)
            }
            TensorId::Mlp2Bias { layer, expert } => {
                self.expert_vector(&mlp(layer, "experts.down_proj_bias"), expert, cols)
            }
        }
    }
}

impl Stored {
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

/// The name of a tensor of attention.
fn attention(layer: usize, name: &str) -> String {
    format!("model.layers.{layer}.self_attn.{name}")
}

/// Refuses experts whose rows are not whole MXFP4 blocks.
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

/// Values of one of the types in `DENSE`.
fn dense_values(dtype: Dtype, bytes: &[u8]) -> Values<'_> {
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

/// Parses a safetensors file's header: where the data begin, and what lies there. The crate's own `read_metadata`
/// adds offsets unchecked, so only its parser is used; that one checks each tensor's offsets against its shape.
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
