//! The names of the model's tensors in a directory of safetensors files, and how they are stored there.

use super::TensorId;
use crate::config::ModelConfig;

/// Which names a directory's tensors have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Naming {
    /// The names of Hugging Face's models.
    HuggingFace,
    /// The names in the release's `original` directory.
    Original,
}

/// How a tensor is stored, and under which names.
pub(super) enum Place {
    /// A whole matrix `[rows, cols]`.
    Matrix(String),
    /// A whole vector `[cols]`.
    Vector(String),
    /// A matrix in several parts, each with its name and number of rows.
    Stacked(Vec<(String, usize)>),
    /// A vector in several parts, each with its name and number of elements.
    Joined(Vec<(String, usize)>),
    /// One expert's vector, a row of `[experts, cols]`.
    ExpertVector(String),
    /// One expert's matrix, a slice of an array that holds all experts.
    ExpertMatrix {
        /// MXFP4 codes `[experts, rows, cols / 32, 16]`.
        blocks: String,
        /// MXFP4 scales `[experts, rows, cols / 32]`.
        scales: String,
        /// An array that may be there instead of the codes and scales: BF16 or F32, transposed, `[experts, cols,
        /// rows]`.
        transposed: Option<String>,
    },
}

impl Place {
    /// How the tensor is stored in a directory with these names.
    pub fn of(id: TensorId, naming: Naming, config: &ModelConfig) -> Self {
        match naming {
            Naming::HuggingFace => hugging_face(id, config),
            Naming::Original => original(id),
        }
    }
}

fn hugging_face(id: TensorId, config: &ModelConfig) -> Place {
    use Place::{ExpertVector, Joined, Matrix, Stacked, Vector};
    let of_layer = |layer: usize, name: &str| format!("model.layers.{layer}.{name}");
    let qkv = |layer: usize, what: &str| {
        let rows = [("q", config.q_dim()), ("k", config.kv_dim()), ("v", config.kv_dim())];
        let part = |(letter, rows)| (of_layer(layer, &format!("self_attn.{letter}_proj.{what}")), rows);
        rows.into_iter().map(part).collect::<Vec<_>>()
    };
    let experts = |layer: usize, name: &str| of_layer(layer, &format!("mlp.experts.{name}"));
    let matrix = |layer: usize, name: &str| Place::ExpertMatrix {
        blocks: experts(layer, &format!("{name}_blocks")),
        scales: experts(layer, &format!("{name}_scales")),
        transposed: Some(experts(layer, name)),
    };
    match id {
        TensorId::Embedding => Matrix("model.embed_tokens.weight".into()),
        TensorId::Unembedding => Matrix("lm_head.weight".into()),
        TensorId::OutNorm => Vector("model.norm.weight".into()),
        TensorId::AttnNorm { layer } => Vector(of_layer(layer, "input_layernorm.weight")),
        TensorId::FfnNorm { layer } => Vector(of_layer(layer, "post_attention_layernorm.weight")),
        TensorId::Qkv { layer } => Stacked(qkv(layer, "weight")),
        TensorId::QkvBias { layer } => Joined(qkv(layer, "bias")),
        TensorId::AttnOut { layer } => Matrix(of_layer(layer, "self_attn.o_proj.weight")),
        TensorId::AttnOutBias { layer } => Vector(of_layer(layer, "self_attn.o_proj.bias")),
        TensorId::Sinks { layer } => Vector(of_layer(layer, "self_attn.sinks")),
        TensorId::Router { layer } => Matrix(of_layer(layer, "mlp.router.weight")),
        TensorId::RouterBias { layer } => Vector(of_layer(layer, "mlp.router.bias")),
        TensorId::Mlp1 { layer, .. } => matrix(layer, "gate_up_proj"),
        TensorId::Mlp1Bias { layer, .. } => ExpertVector(experts(layer, "gate_up_proj_bias")),
        TensorId::Mlp2 { layer, .. } => matrix(layer, "down_proj"),
        TensorId::Mlp2Bias { layer, .. } => ExpertVector(experts(layer, "down_proj_bias")),
    }
}

fn original(id: TensorId) -> Place {
    use Place::{ExpertVector, Matrix, Vector};
    let block = |layer: usize, name: &str| format!("block.{layer}.{name}");
    let matrix = |layer: usize, name: &str| Place::ExpertMatrix {
        blocks: block(layer, &format!("mlp.{name}.blocks")),
        scales: block(layer, &format!("mlp.{name}.scales")),
        transposed: None,
    };
    match id {
        TensorId::Embedding => Matrix("embedding.weight".into()),
        TensorId::Unembedding => Matrix("unembedding.weight".into()),
        TensorId::OutNorm => Vector("norm.scale".into()),
        TensorId::AttnNorm { layer } => Vector(block(layer, "attn.norm.scale")),
        TensorId::FfnNorm { layer } => Vector(block(layer, "mlp.norm.scale")),
        TensorId::Qkv { layer } => Matrix(block(layer, "attn.qkv.weight")),
        TensorId::QkvBias { layer } => Vector(block(layer, "attn.qkv.bias")),
        TensorId::AttnOut { layer } => Matrix(block(layer, "attn.out.weight")),
        TensorId::AttnOutBias { layer } => Vector(block(layer, "attn.out.bias")),
        TensorId::Sinks { layer } => Vector(block(layer, "attn.sinks")),
        TensorId::Router { layer } => Matrix(block(layer, "mlp.gate.weight")),
        TensorId::RouterBias { layer } => Vector(block(layer, "mlp.gate.bias")),
        TensorId::Mlp1 { layer, .. } => matrix(layer, "mlp1_weight"),
        TensorId::Mlp1Bias { layer, .. } => ExpertVector(block(layer, "mlp.mlp1_bias")),
        TensorId::Mlp2 { layer, .. } => matrix(layer, "mlp2_weight"),
        TensorId::Mlp2Bias { layer, .. } => ExpertVector(block(layer, "mlp.mlp2_bias")),
    }
}
