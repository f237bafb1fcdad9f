//! The Hugging Face directory of a synthetic model.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;

use getp::checkpoint::{Field, TensorId};
use getp::dtype::{MXFP4_BLOCK, MXFP4_BLOCK_BYTES};
use getp::error::{Error, Result};
use safetensors::Dtype;
use safetensors::tensor::View;

use super::draw::Encoding;
use super::{Dense, Experts, Progress, Synthetic};

impl Synthetic {
    /// Writes the Hugging Face directory. Its experts are MXFP4; Hugging Face has no other that we read.
    pub fn write_safetensors(&self, dir: &Path, shards: usize, progress: Progress<'_>) -> Result<()> {
        if self.experts != Experts::Mxfp4 {
            return Err(Error::format(
                dir.display().to_string(),
                "experts in safetensors are mxfp4 only",
            ));
        }
        std::fs::create_dir_all(dir).map_err(|e| Error::io(dir, e))?;
        write_json(&dir.join("config.json"), &self.hf_config())?;
        let tensors = self.hf_tensors(progress);
        let shards = shards.clamp(1, tensors.len());
        let total_bytes: usize = tensors.iter().map(|(_, tensor)| tensor.data_len()).sum();
        let mut files: Vec<BTreeMap<String, HfTensor<'_>>> = (0..shards).map(|_| BTreeMap::new()).collect();
        let count = tensors.len();
        for (i, (name, tensor)) in tensors.into_iter().enumerate() {
            files[i * shards / count].insert(name, tensor);
        }
        let mut weight_map = BTreeMap::new();
        for (shard, tensors) in files.into_iter().enumerate() {
            let file = match shards {
                1 => "model.safetensors".to_string(),
                _ => format!("model-{:05}-of-{shards:05}.safetensors", shard + 1),
            };
            weight_map.extend(tensors.keys().map(|name| (name.clone(), file.clone())));
            let path = dir.join(file);
            safetensors::serialize_to_file(tensors, None, &path)
                .map_err(|e| Error::format(path.display().to_string(), e.to_string()))?;
        }
        if shards > 1 {
            let index = serde_json::json!({ "metadata": { "total_size": total_bytes }, "weight_map": weight_map });
            write_json(&dir.join("model.safetensors.index.json"), &index)?;
        }
        Ok(())
    }

    /// Bytes `write_safetensors` puts into its tensors.
    pub fn safetensors_bytes(&self) -> usize {
        self.hf_tensors(&|_| ())
            .iter()
            .map(|(_, tensor)| tensor.data_len())
            .sum()
    }

    /// The `config.json` of the model.
    fn hf_config(&self) -> serde_json::Value {
        let c = &self.config;
        let layer_type = |layer| match c.window(layer) {
            Some(_) => "sliding_attention",
            None => "full_attention",
        };
        serde_json::json!({
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
            "max_position_embeddings": c.seq_len,
            "initial_context_length": c.initial_context_length,
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
            "quantization_config": { "quant_method": "mxfp4" },
        })
    }

    /// Every tensor of the Hugging Face directory, by name.
    fn hf_tensors<'a>(&'a self, progress: Progress<'a>) -> Vec<(String, HfTensor<'a>)> {
        let whole = |name: &str, id, dims| self.hf_whole(name.into(), id, dims, progress);
        let mut all = vec![
            whole("model.embed_tokens.weight", TensorId::Embedding, 2),
            whole("lm_head.weight", TensorId::Unembedding, 2),
            whole("model.norm.weight", TensorId::OutNorm, 1),
        ];
        for layer in 0..self.config.n_layers {
            self.add_attention(layer, progress, &mut all);
            self.add_experts(layer, progress, &mut all);
        }
        all
    }

    /// The tensors of a layer's attention, its norm included.
    fn add_attention<'a>(&'a self, layer: usize, progress: Progress<'a>, all: &mut Vec<(String, HfTensor<'a>)>) {
        let c = &self.config;
        let whole = |name: &str, id, dims| self.hf_whole(format!("model.layers.{layer}.{name}"), id, dims, progress);
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
    fn add_experts<'a>(&'a self, layer: usize, progress: Progress<'a>, all: &mut Vec<(String, HfTensor<'a>)>) {
        let experts = self.config.n_experts;
        let whole = |name: &str, id, dims| self.hf_whole(format!("model.layers.{layer}.{name}"), id, dims, progress);
        all.extend([
            whole("post_attention_layernorm.weight", TensorId::FfnNorm { layer }, 1),
            whole("mlp.router.weight", TensorId::Router { layer }, 2),
            whole("mlp.router.bias", TensorId::RouterBias { layer }, 1),
        ]);
        let mut add = |name: &str, encoding, shape: Vec<usize>, field: Field| {
            let slices = (0..experts).map(|expert| self.slice(field.id(layer, expert))).collect();
            let tensor = HfTensor::new(self, encoding, shape, slices, progress);
            all.push((format!("model.layers.{layer}.mlp.experts.{name}"), tensor));
        };
        for (name, weight, bias) in [
            ("gate_up_proj", Field::WMlp1, Field::BMlp1),
            ("down_proj", Field::WMlp2, Field::BMlp2),
        ] {
            let [rows, cols] = weight.id(layer, 0).shape(&self.config);
            let mut shape = vec![experts, rows, cols / MXFP4_BLOCK];
            add(&format!("{name}_scales"), Encoding::Scales, shape.clone(), weight);
            shape.push(MXFP4_BLOCK_BYTES);
            add(&format!("{name}_blocks"), Encoding::Blocks, shape, weight);
            add(&format!("{name}_bias"), self.dense.into(), vec![experts, rows], bias);
        }
    }

    /// A tensor that the directory has as the model has it, in `dims` dimensions: vectors have one.
    fn hf_whole<'a>(
        &'a self,
        name: String,
        id: TensorId,
        dims: usize,
        progress: Progress<'a>,
    ) -> (String, HfTensor<'a>) {
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

/// A tensor of the Hugging Face directory: runs of values of the model's tensors, one behind the other. The values
/// are made when they are written.
struct HfTensor<'a> {
    synthetic: &'a Synthetic,
    encoding: Encoding,
    shape: Vec<usize>,
    slices: Vec<(TensorId, Range<usize>)>,
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
            progress,
        }
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
