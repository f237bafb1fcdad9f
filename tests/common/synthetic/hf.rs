//! Writes a synthetic model as a directory: Hugging Face's, or the release's `original`.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fs::File;
use std::ops::Range;
use std::path::Path;

use getp::checkpoint::{Field, TensorId};
use getp::dtype::{MXFP4_BLOCK, MXFP4_BLOCK_BYTES};
use getp::error::{Error, Result};
use safetensors::Dtype;
use safetensors::tensor::View;

use super::draw::Encoding;
use super::{Dense, Experts, Progress, Synthetic};

/// How a directory is written.
#[derive(Clone, Copy, Debug)]
pub struct Directory {
    /// Whether it is the release's `original`, and not Hugging Face's.
    pub original: bool,
    /// Whether MXFP4 experts are widened to bfloat16, as transformers saves them.
    pub dequantized: bool,
    /// Number of safetensors files. Hugging Face's directory has an index if there is more than one.
    pub shards: usize,
}

impl Directory {
    /// Hugging Face's directory, in `shards` files.
    pub fn hugging_face(shards: usize) -> Self {
        Self {
            original: false,
            dequantized: false,
            shards,
        }
    }

    /// The release's `original`, in `shards` files.
    pub fn original(shards: usize) -> Self {
        Self {
            original: true,
            ..Self::hugging_face(shards)
        }
    }

    /// The file name of a shard out of `count`.
    fn file(self, shard: usize, count: usize) -> String {
        match (count, self.original) {
            (1, _) => "model.safetensors".into(),
            (_, false) => format!("model-{:05}-of-{count:05}.safetensors", shard + 1),
            (_, true) => format!("model--{:05}-of-{count:05}.safetensors", shard + 1),
        }
    }
}

impl Synthetic {
    /// Writes the directory. The release's `original` can only have MXFP4 experts.
    pub fn write_directory(&self, dir: &Path, form: Directory, progress: Progress<'_>) -> Result<()> {
        if form.original && (self.experts != Experts::Mxfp4 || form.dequantized) {
            return Err(Error::format(
                dir.display().to_string(),
                "original experts are mxfp4 only",
            ));
        }
        std::fs::create_dir_all(dir).map_err(|e| Error::io(dir, e))?;
        let config = if form.original {
            self.original_config()
        } else {
            self.hf_config(form)
        };
        write_json(&dir.join("config.json"), &config)?;
        let tensors = self.tensors(form, progress);
        let shards = form.shards.clamp(1, tensors.len());
        let total_bytes: usize = tensors.iter().map(|(_, tensor)| tensor.data_len()).sum();
        let mut files: Vec<BTreeMap<String, HfTensor<'_>>> = (0..shards).map(|_| BTreeMap::new()).collect();
        let count = tensors.len();
        for (i, (name, tensor)) in tensors.into_iter().enumerate() {
            files[i * shards / count].insert(name, tensor);
        }
        let mut weight_map = BTreeMap::new();
        for (shard, tensors) in files.into_iter().enumerate() {
            let file = form.file(shard, shards);
            weight_map.extend(tensors.keys().map(|name| (name.clone(), file.clone())));
            let path = dir.join(file);
            // The crate renames a temporary file to this one, which only its owner may read.
            let permissions = File::create(&path)
                .and_then(|file| file.metadata())
                .map(|file| file.permissions());
            let permissions = permissions.map_err(|e| Error::io(&path, e))?;
            safetensors::serialize_to_file(tensors, None, &path)
                .map_err(|e| Error::format(path.display().to_string(), e.to_string()))?;
            std::fs::set_permissions(&path, permissions).map_err(|e| Error::io(&path, e))?;
        }
        if shards > 1 && !form.original {
            let index = serde_json::json!({ "metadata": { "total_size": total_bytes }, "weight_map": weight_map });
            write_json(&dir.join("model.safetensors.index.json"), &index)?;
        }
        Ok(())
    }

    /// Size in bytes of the tensors that `write_directory` writes.
    pub fn directory_bytes(&self, form: Directory) -> usize {
        let tensors = self.tensors(form, &|_| ());
        tensors.iter().map(|(_, tensor)| tensor.data_len()).sum()
    }

    /// The `config.json` of Hugging Face's directory. As in releases, the initial context times the factor is the
    /// model's context.
    fn hf_config(&self, form: Directory) -> serde_json::Value {
        let c = &self.config;
        let layer_type = |layer| match c.window(layer) {
            Some(_) => "sliding_attention",
            None => "full_attention",
        };
        let mut config = serde_json::json!({
            "architectures": ["GptOssForCausalLM"],
            "model_type": "gpt_oss",
            "vocab_size": c.vocab_size,
            "hidden_size": c.hidden_dim,
            "num_local_experts": c.n_experts,
            "num_experts_per_tok": c.experts_per_token,
            "experts_per_token": c.experts_per_token,
            "intermediate_size": c.intermediate_dim,
            "num_hidden_layers": c.n_layers,
            "layer_types": (0..c.n_layers).map(layer_type).collect::<Vec<_>>(),
            "head_dim": c.head_dim,
            "num_attention_heads": c.n_attn_heads,
            "num_key_value_heads": c.n_kv_heads,
            "max_position_embeddings": (c.initial_context_length as f32 * c.rope_scaling_factor) as usize,
            "initial_context_length": c.initial_context_length,
            "attention_bias": true,
            "rms_norm_eps": 1e-5,
            "rope_theta": c.rope_theta,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": c.rope_scaling_factor,
                "original_max_position_embeddings": c.initial_context_length,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": false,
            },
            "sliding_window": (c.sliding_window > 0).then_some(c.sliding_window),
            "swiglu_limit": c.swiglu_limit,
            "tie_word_embeddings": false,
        });
        if self.experts == Experts::Mxfp4 && !form.dequantized {
            config["quantization_config"] = serde_json::json!({ "quant_method": "mxfp4" });
        }
        config
    }

    /// The `config.json` of the release's `original` directory.
    fn original_config(&self) -> serde_json::Value {
        let c = &self.config;
        serde_json::json!({
            "num_hidden_layers": c.n_layers,
            "num_experts": c.n_experts,
            "experts_per_token": c.experts_per_token,
            "vocab_size": c.vocab_size,
            "hidden_size": c.hidden_dim,
            "intermediate_size": c.intermediate_dim,
            "swiglu_limit": c.swiglu_limit,
            "head_dim": c.head_dim,
            "num_attention_heads": c.n_attn_heads,
            "num_key_value_heads": c.n_kv_heads,
            "sliding_window": c.sliding_window,
            "initial_context_length": c.initial_context_length,
            "rope_theta": c.rope_theta,
            "rope_scaling_factor": c.rope_scaling_factor,
            "rope_ntk_alpha": 1,
            "rope_ntk_beta": 32,
        })
    }

    /// Every tensor of the directory, by name.
    fn tensors<'a>(&'a self, form: Directory, progress: Progress<'a>) -> Vec<(String, HfTensor<'a>)> {
        if form.original {
            return self.original_tensors(progress);
        }
        let whole = |name: &str, id, dims| self.whole(name.into(), id, dims, progress);
        let mut all = vec![
            whole("model.embed_tokens.weight", TensorId::Embedding, 2),
            whole("lm_head.weight", TensorId::Unembedding, 2),
            whole("model.norm.weight", TensorId::OutNorm, 1),
        ];
        for layer in 0..self.config.n_layers {
            self.add_attention(layer, progress, &mut all);
            self.add_experts(layer, form, progress, &mut all);
        }
        all
    }

    /// The tensors of a layer's attention, its norm included.
    fn add_attention<'a>(&'a self, layer: usize, progress: Progress<'a>, all: &mut Vec<(String, HfTensor<'a>)>) {
        let c = &self.config;
        let whole = |name: &str, id, dims| self.whole(format!("model.layers.{layer}.{name}"), id, dims, progress);
        all.extend([
            whole("input_layernorm.weight", TensorId::AttnNorm { layer }, 1),
            whole("self_attn.o_proj.weight", TensorId::AttnOut { layer }, 2),
            whole("self_attn.o_proj.bias", TensorId::AttnOutBias { layer }, 1),
            whole("self_attn.sinks", TensorId::Sinks { layer }, 1),
        ]);
        let mut first = 0;
        for (letter, rows) in [("q", c.q_dim()), ("k", c.kv_dim()), ("v", c.kv_dim())] {
            let end = first + rows;
            let cols = c.hidden_dim;
            let mut add = |name: &str, shape: Vec<usize>, id, values| {
                let tensor = HfTensor::new(self, self.dense.into(), shape, vec![(id, values)], progress);
                all.push((format!("model.layers.{layer}.self_attn.{letter}_proj.{name}"), tensor));
            };
            add(
                "weight",
                vec![rows, cols],
                TensorId::Qkv { layer },
                first * cols..end * cols,
            );
            add("bias", vec![rows], TensorId::QkvBias { layer }, first..end);
            first = end;
        }
    }

    /// The tensors of a layer's router and experts, their norm included.
    fn add_experts<'a>(
        &'a self,
        layer: usize,
        form: Directory,
        progress: Progress<'a>,
        all: &mut Vec<(String, HfTensor<'a>)>,
    ) {
        let whole = |name: &str, id, dims| self.whole(format!("model.layers.{layer}.{name}"), id, dims, progress);
        all.extend([
            whole("post_attention_layernorm.weight", TensorId::FfnNorm { layer }, 1),
            whole("mlp.router.weight", TensorId::Router { layer }, 2),
            whole("mlp.router.bias", TensorId::RouterBias { layer }, 1),
        ]);
        for (name, weight, bias) in [
            ("gate_up_proj", Field::WMlp1, Field::BMlp1),
            ("down_proj", Field::WMlp2, Field::BMlp2),
        ] {
            let name = format!("model.layers.{layer}.mlp.experts.{name}");
            if self.experts == Experts::Mxfp4 && !form.dequantized {
                let names = [format!("{name}_blocks"), format!("{name}_scales")];
                self.add_blocks(names, layer, weight, progress, all);
            } else {
                let encoding = if self.experts == Experts::F32 {
                    Encoding::F32
                } else {
                    Encoding::Bf16
                };
                let [rows, cols] = weight.id(layer, 0).shape(&self.config);
                let shape = vec![self.config.n_experts, cols, rows];
                let mut tensor = HfTensor::new(self, encoding, shape, self.experts_of(layer, weight), progress);
                tensor.transposed = Some([rows, cols]);
                all.push((name.clone(), tensor));
            }
            all.push((format!("{name}_bias"), self.experts_bias(layer, bias, progress)));
        }
    }

    /// Every tensor of the release's `original` directory, by name.
    fn original_tensors<'a>(&'a self, progress: Progress<'a>) -> Vec<(String, HfTensor<'a>)> {
        let whole = |name: &str, id, dims| self.whole(name.into(), id, dims, progress);
        let mut all = vec![
            whole("embedding.weight", TensorId::Embedding, 2),
            whole("norm.scale", TensorId::OutNorm, 1),
            whole("unembedding.weight", TensorId::Unembedding, 2),
        ];
        for layer in 0..self.config.n_layers {
            let whole = |name: &str, id, dims| self.whole(format!("block.{layer}.{name}"), id, dims, progress);
            all.extend([
                whole("attn.norm.scale", TensorId::AttnNorm { layer }, 1),
                whole("attn.qkv.weight", TensorId::Qkv { layer }, 2),
                whole("attn.qkv.bias", TensorId::QkvBias { layer }, 1),
                whole("attn.sinks", TensorId::Sinks { layer }, 1),
                whole("attn.out.weight", TensorId::AttnOut { layer }, 2),
                whole("attn.out.bias", TensorId::AttnOutBias { layer }, 1),
                whole("mlp.norm.scale", TensorId::FfnNorm { layer }, 1),
                whole("mlp.gate.weight", TensorId::Router { layer }, 2),
                whole("mlp.gate.bias", TensorId::RouterBias { layer }, 1),
            ]);
            for (name, weight, bias) in [
                ("mlp1", Field::WMlp1, Field::BMlp1),
                ("mlp2", Field::WMlp2, Field::BMlp2),
            ] {
                let name = format!("block.{layer}.mlp.{name}");
                let names = [format!("{name}_weight.blocks"), format!("{name}_weight.scales")];
                self.add_blocks(names, layer, weight, progress, &mut all);
                all.push((format!("{name}_bias"), self.experts_bias(layer, bias, progress)));
            }
        }
        all
    }

    /// The codes and the scales of all experts of a layer.
    fn add_blocks<'a>(
        &'a self,
        [blocks, scales]: [String; 2],
        layer: usize,
        field: Field,
        progress: Progress<'a>,
        all: &mut Vec<(String, HfTensor<'a>)>,
    ) {
        let [rows, cols] = field.id(layer, 0).shape(&self.config);
        let mut shape = vec![self.config.n_experts, rows, cols / MXFP4_BLOCK];
        let mut add = |name, encoding, shape: &[usize]| {
            let slices = self.experts_of(layer, field);
            all.push((name, HfTensor::new(self, encoding, shape.to_vec(), slices, progress)));
        };
        add(scales, Encoding::Scales, &shape);
        shape.push(MXFP4_BLOCK_BYTES);
        add(blocks, Encoding::Blocks, &shape);
    }

    /// The biases of all experts of a layer.
    fn experts_bias<'a>(&'a self, layer: usize, field: Field, progress: Progress<'a>) -> HfTensor<'a> {
        let [_, cols] = field.id(layer, 0).shape(&self.config);
        let shape = vec![self.config.n_experts, cols];
        HfTensor::new(self, self.dense.into(), shape, self.experts_of(layer, field), progress)
    }

    /// A tensor of all experts of a layer.
    fn experts_of(&self, layer: usize, field: Field) -> Vec<(TensorId, Range<usize>)> {
        let experts = 0..self.config.n_experts;
        experts.map(|expert| self.slice(field.id(layer, expert))).collect()
    }

    /// A tensor that the directory stores whole, in `dims` dimensions: 1 for vectors, 2 for matrices.
    fn whole<'a>(&'a self, name: String, id: TensorId, dims: usize, progress: Progress<'a>) -> (String, HfTensor<'a>) {
        let shape = id.shape(&self.config)[2 - dims..].to_vec();
        (
            name,
            HfTensor::new(self, self.dense.into(), shape, vec![self.slice(id)], progress),
        )
    }

    /// All of a tensor's values.
    fn slice(&self, id: TensorId) -> (TensorId, Range<usize>) {
        (id, 0..self.values(id))
    }
}

impl From<Dense> for Encoding {
    fn from(dense: Dense) -> Self {
        match dense {
            Dense::Bf16 => Self::Bf16,
            Dense::F32 => Self::F32,
        }
    }
}

/// A tensor of a directory: slices of the model's tensors, concatenated. Values are made when they are written.
struct HfTensor<'a> {
    synthetic: &'a Synthetic,
    encoding: Encoding,
    shape: Vec<usize>,
    slices: Vec<(TensorId, Range<usize>)>,
    /// `[rows, cols]` of each slice, if it is written column by column.
    transposed: Option<[usize; 2]>,
    progress: Progress<'a>,
}

impl<'a> HfTensor<'a> {
    fn new(
        synthetic: &'a Synthetic,
        encoding: Encoding,
        shape: Vec<usize>,
        slices: Vec<(TensorId, Range<usize>)>,
        progress: Progress<'a>,
    ) -> Self {
        Self {
            synthetic,
            encoding,
            shape,
            slices,
            transposed: None,
            progress,
        }
    }
}

/// A matrix's values, reordered column by column.
fn transpose(bytes: &mut [u8], [rows, cols]: [usize; 2]) {
    let source = bytes.to_vec();
    let value_bytes = bytes.len() / (rows * cols);
    for (i, value) in bytes.chunks_exact_mut(value_bytes).enumerate() {
        let (col, row) = (i / rows, i % rows);
        value.copy_from_slice(&source[(row * cols + col) * value_bytes..][..value_bytes]);
    }
}

impl View for HfTensor<'_> {
    fn dtype(&self) -> Dtype {
        match self.encoding {
            Encoding::F32 => Dtype::F32,
            Encoding::Bf16 => Dtype::BF16,
            Encoding::Blocks | Encoding::Scales => Dtype::U8,
        }
    }

    fn shape(&self) -> &[usize] {
        &self.shape
    }

    fn data(&self) -> Cow<'_, [u8]> {
        let mut data = vec![0; self.data_len()];
        let mut rest = &mut data[..];
        for (id, values) in &self.slices {
            let (bytes, behind) = rest.split_at_mut(self.encoding.bytes(values.len()));
            let start = self.encoding.bytes(values.start);
            self.synthetic.source(*id).fill(self.encoding, start, bytes);
            if let Some(shape) = self.transposed {
                transpose(bytes, shape);
            }
            (self.progress)(bytes.len());
            rest = behind;
        }
        data.into()
    }

    fn data_len(&self) -> usize {
        self.slices
            .iter()
            .map(|(_, values)| self.encoding.bytes(values.len()))
            .sum()
    }
}

fn write_json(path: &Path, value: &serde_json::Value) -> Result<()> {
    std::fs::write(path, format!("{value:#}\n")).map_err(|e| Error::io(path, e))
}
