//! Random models of any size, with values in the formats of released checkpoints: bfloat16 and MXFP4.
//!
//! Each value is a hash of the seed, the tensor and the value's index. So tensors can be made in any order, in parallel
//! and in parts; they are the same in every file format, and do not change when layers are added. The standard
//! deviation of a tensor is chosen so that the outputs of every operation have a standard deviation of about 1.
//!
//! Tests, examples and benchmarks include this file by `#[path]`.

#![allow(dead_code)] // each of them uses a part of it

#[path = "synthetic/draw.rs"]
mod draw;
#[path = "synthetic/hf.rs"]
mod hf;

use std::collections::HashMap;
use std::fs::File;
use std::io::Write;
use std::path::Path;

use getp::checkpoint::{Checkpoint, Part, Tensor, TensorId, TensorLayout, Values, config_to_bytes};
use getp::config::ModelConfig;
use getp::dtype::MXFP4_BLOCK;
use getp::error::{Error, Result};

use draw::{Blocks, Encoding, Normal, Source, random};
pub use hf::Directory;

/// How strongly layers change the residual stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Temperament {
    /// Closer to a trained model: as wild, but with `w_qkv` halved and `w_o` and `w_mlp2` quartered.
    Tame,
    /// The outputs of every operation have a standard deviation of about 1; each layer about doubles an error.
    Wild,
}

/// The values of all tensors other than the experts' matrices.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Dense {
    /// Exact in bfloat16, as in released checkpoints.
    Bf16,
    /// float32; most are not exact in bfloat16.
    F32,
}

/// The values of the experts' matrices.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Experts {
    /// Exact in MXFP4, as in released checkpoints.
    Mxfp4,
    /// Exact in bfloat16.
    Bf16,
    /// float32; most are not exact in bfloat16.
    F32,
}

/// A random model.
#[derive(Clone, Debug)]
pub struct Synthetic {
    pub config: ModelConfig,
    pub seed: u64,
    pub temperament: Temperament,
    pub dense: Dense,
    pub experts: Experts,
}

/// Writes a model with values as in released checkpoints, as a `.bin` file.
pub fn write_bin(path: impl AsRef<Path>, config: &ModelConfig, seed: u64, temperament: Temperament) -> Result<()> {
    Synthetic::new(config, seed, temperament)?.write_bin(path.as_ref(), &|_| ())
}

/// Writes the same model as a Hugging Face directory of `shards` files, with an index if there is more than one.
pub fn write_safetensors(
    dir: impl AsRef<Path>,
    config: &ModelConfig,
    seed: u64,
    temperament: Temperament,
    shards: usize,
) -> Result<()> {
    let form = Directory::hugging_face(shards);
    Synthetic::new(config, seed, temperament)?.write_directory(dir.as_ref(), form, &|_| ())
}

/// Called with the number of bytes each time some have been written.
pub type Progress<'a> = &'a (dyn Fn(usize) + Sync);

/// Number of bytes made at a time: enough for all threads, and few enough to be in cache when they are written.
const BUFFER_BYTES: usize = 4 << 20;

impl Synthetic {
    /// A model with values as in released checkpoints: MXFP4 experts, all else bfloat16.
    pub fn new(config: &ModelConfig, seed: u64, temperament: Temperament) -> Result<Self> {
        let config = config.clone();
        Self {
            config,
            seed,
            temperament,
            dense: Dense::Bf16,
            experts: Experts::Mxfp4,
        }
        .check()
    }

    /// Checks the configuration.
    pub fn check(self) -> Result<Self> {
        let config = &self.config.clone().check()?;
        for (field, value) in [
            ("hidden_dim", config.hidden_dim),
            ("intermediate_dim", config.intermediate_dim),
        ] {
            if self.experts == Experts::Mxfp4 && !value.is_multiple_of(MXFP4_BLOCK) {
                let expected = format!("MXFP4 experts need a multiple of {MXFP4_BLOCK}; or make them bf16 or f32");
                return Err(Error::Config {
                    field,
                    value: value.to_string(),
                    expected,
                });
            }
        }
        Ok(self)
    }

    /// Writes the `.bin` file.
    pub fn write_bin(&self, path: &Path, progress: Progress<'_>) -> Result<()> {
        TensorLayout::new(self.config.clone())?;
        let mut file = File::create(path).map_err(|e| Error::io(path, e))?;
        let mut write = |bytes: &[u8]| {
            progress(bytes.len());
            file.write_all(bytes).map_err(|e| Error::io(path, e))
        };
        write(&config_to_bytes(&self.config))?;
        let mut buffer = vec![0; BUFFER_BYTES];
        for id in TensorId::all(&self.config) {
            let source = self.source(id);
            let total = Encoding::F32.bytes(self.values(id));
            for start in (0..total).step_by(BUFFER_BYTES) {
                let bytes = &mut buffer[..BUFFER_BYTES.min(total - start)];
                source.fill(Encoding::F32, start, bytes);
                write(bytes)?;
            }
        }
        Ok(())
    }

    /// Number of values of a tensor.
    fn values(&self, id: TensorId) -> usize {
        id.shape(&self.config).iter().product()
    }

    /// A tensor's bytes.
    fn make(&self, id: TensorId, encoding: Encoding) -> Vec<u8> {
        let mut bytes = vec![0; encoding.bytes(self.values(id))];
        self.source(id).fill(encoding, 0, &mut bytes);
        bytes
    }

    /// The distribution of a tensor's values.
    fn source(&self, id: TensorId) -> Source {
        let [_, fan_in] = id.shape(&self.config);
        let unit = 1.0 / (fan_in as f32).sqrt();
        let calm = |factor: f32| {
            if self.temperament == Temperament::Tame {
                factor
            } else {
                1.0
            }
        };
        let (mean, std) = match id {
            TensorId::Embedding | TensorId::Sinks { .. } => (0.0, 1.0),
            // Logits with a large spread, so that the next token depends on the state and answers differ.
            TensorId::Unembedding => (0.0, 4.0 * unit),
            TensorId::AttnNorm { .. } | TensorId::FfnNorm { .. } | TensorId::OutNorm => (1.0, 0.1),
            TensorId::QkvBias { .. } | TensorId::AttnOutBias { .. } => (0.0, 0.1),
            TensorId::Mlp1Bias { .. } | TensorId::Mlp2Bias { .. } => (0.0, 0.1),
            // Hardly any bias, so that all experts are selected about equally often.
            TensorId::RouterBias { .. } => (0.0, 0.01),
            TensorId::Router { .. } | TensorId::Mlp1 { .. } => (0.0, unit),
            TensorId::Qkv { .. } => (0.0, calm(0.5) * unit),
            TensorId::AttnOut { .. } | TensorId::Mlp2 { .. } => (0.0, calm(0.25) * unit),
        };
        let (field, layer, expert) = id.place();
        let key = [field as u64, layer as u64, expert as u64]
            .into_iter()
            .fold(self.seed, random);
        let normal = |bf16| Source::Normal(Normal { key, mean, std, bf16 });
        match (id, self.experts) {
            (TensorId::Mlp1 { .. } | TensorId::Mlp2 { .. }, Experts::Mxfp4) => Source::Blocks(Blocks::new(key, std)),
            (TensorId::Mlp1 { .. } | TensorId::Mlp2 { .. }, experts) => normal(experts == Experts::Bf16),
            _ => normal(self.dense == Dense::Bf16),
        }
    }
}

/// A synthetic model in memory.
pub struct SyntheticCheckpoint {
    config: ModelConfig,
    tensors: HashMap<TensorId, Owned>,
}

/// A tensor's values, in the formats of [`Values`].
enum Owned {
    F32(Vec<u8>),
    Bf16(Vec<u8>),
    Mxfp4 { blocks: Vec<u8>, scales: Vec<u8> },
}

impl SyntheticCheckpoint {
    /// A model with values as in released checkpoints, widened to float32 as in a `.bin` file.
    pub fn new(config: &ModelConfig, seed: u64, temperament: Temperament) -> Result<Self> {
        Ok(Self::widened(&Synthetic::new(config, seed, temperament)?))
    }

    /// Makes every tensor as float32, as in a `.bin` file.
    pub fn widened(synthetic: &Synthetic) -> Self {
        Self::with(synthetic, |_, id| Owned::F32(synthetic.make(id, Encoding::F32)))
    }

    /// Makes every tensor in its own format, as in a Hugging Face directory, with a sixth of the memory.
    pub fn packed(synthetic: &Synthetic) -> Self {
        Self::with(synthetic, |source, id| match source {
            Source::Normal(Normal { bf16: true, .. }) => Owned::Bf16(synthetic.make(id, Encoding::Bf16)),
            Source::Normal(_) => Owned::F32(synthetic.make(id, Encoding::F32)),
            Source::Blocks(_) => Owned::Mxfp4 {
                blocks: synthetic.make(id, Encoding::Blocks),
                scales: synthetic.make(id, Encoding::Scales),
            },
        })
    }

    fn with(synthetic: &Synthetic, make: impl Fn(Source, TensorId) -> Owned) -> Self {
        let config = synthetic.config.clone();
        let tensors = TensorId::all(&config)
            .map(|id| (id, make(synthetic.source(id), id)))
            .collect();
        Self { config, tensors }
    }
}

impl Checkpoint for SyntheticCheckpoint {
    fn config(&self) -> &ModelConfig {
        &self.config
    }

    fn tensor(&self, id: TensorId) -> Result<Tensor<'_>> {
        let owned = self.tensors.get(&id);
        let values = match owned.ok_or_else(|| Error::format("synthetic model", format!("has no {id:?}")))? {
            Owned::F32(bytes) => Values::F32(bytes),
            Owned::Bf16(bytes) => Values::Bf16(bytes),
            Owned::Mxfp4 { blocks, scales } => Values::Mxfp4 { blocks, scales },
        };
        let [rows, cols] = id.shape(&self.config);
        Ok(Tensor {
            rows,
            cols,
            parts: vec![Part { rows, values }],
        })
    }
}
