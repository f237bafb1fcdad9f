//! Which array of the C struct holds a tensor, the tensor's shape, and the order of the arrays in a `.bin` file.

use super::TensorId;
use crate::config::ModelConfig;
use crate::error::{Error, Result};

/// The arrays of `TransformerWeights`, in its order. Each holds one kind of tensor, for all layers and experts.
#[allow(missing_docs)] // the variants are the C struct's fields, `Field::name`
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Field {
    TokenEmbeddingTable,
    RmsAttnW,
    RmsFfnW,
    WQkv,
    WO,
    BQkv,
    BO,
    AttnSinks,
    WRouter,
    BRouter,
    WMlp1,
    WMlp2,
    BMlp1,
    BMlp2,
    RmsOutW,
    Out,
}

impl Field {
    /// Number of fields.
    pub const COUNT: usize = 16;

    /// All fields, in the order of a `.bin` file.
    pub const IN_FILE_ORDER: [Self; Self::COUNT] = [
        Self::TokenEmbeddingTable,
        Self::Out,
        Self::RmsAttnW,
        Self::RmsFfnW,
        Self::RmsOutW,
        Self::WQkv,
        Self::BQkv,
        Self::WO,
        Self::BO,
        Self::AttnSinks,
        Self::WRouter,
        Self::BRouter,
        Self::WMlp1,
        Self::BMlp1,
        Self::WMlp2,
        Self::BMlp2,
    ];

    /// The field's name in C.
    pub fn name(self) -> &'static str {
        match self {
            Self::TokenEmbeddingTable => "token_embedding_table",
            Self::RmsAttnW => "rms_attn_w",
            Self::RmsFfnW => "rms_ffn_w",
            Self::WQkv => "w_qkv",
            Self::WO => "w_o",
            Self::BQkv => "b_qkv",
            Self::BO => "b_o",
            Self::AttnSinks => "attn_sinks",
            Self::WRouter => "w_router",
            Self::BRouter => "b_router",
            Self::WMlp1 => "w_mlp1",
            Self::WMlp2 => "w_mlp2",
            Self::BMlp1 => "b_mlp1",
            Self::BMlp2 => "b_mlp2",
            Self::RmsOutW => "rms_out_w",
            Self::Out => "out",
        }
    }

    /// The tensor of `layer` and `expert` in this array. Arrays without layers or experts ignore that argument.
    pub fn id(self, layer: usize, expert: usize) -> TensorId {
        match self {
            Self::TokenEmbeddingTable => TensorId::Embedding,
            Self::RmsAttnW => TensorId::AttnNorm { layer },
            Self::RmsFfnW => TensorId::FfnNorm { layer },
            Self::WQkv => TensorId::Qkv { layer },
            Self::WO => TensorId::AttnOut { layer },
            Self::BQkv => TensorId::QkvBias { layer },
            Self::BO => TensorId::AttnOutBias { layer },
            Self::AttnSinks => TensorId::Sinks { layer },
            Self::WRouter => TensorId::Router { layer },
            Self::BRouter => TensorId::RouterBias { layer },
            Self::WMlp1 => TensorId::Mlp1 { layer, expert },
            Self::WMlp2 => TensorId::Mlp2 { layer, expert },
            Self::BMlp1 => TensorId::Mlp1Bias { layer, expert },
            Self::BMlp2 => TensorId::Mlp2Bias { layer, expert },
            Self::RmsOutW => TensorId::OutNorm,
            Self::Out => TensorId::Unembedding,
        }
    }

    /// `[layers, experts]`: number of layers in the array, and of tensors in each layer; 1 where it has no such
    /// dimension.
    pub fn counts(self, config: &ModelConfig) -> [usize; 2] {
        match self {
            Self::TokenEmbeddingTable | Self::Out | Self::RmsOutW => [1, 1],
            Self::WMlp1 | Self::WMlp2 | Self::BMlp1 | Self::BMlp2 => [config.n_layers, config.n_experts],
            _ => [config.n_layers, 1],
        }
    }
}

impl TensorId {
    /// Every tensor of the model, in the order of a `.bin` file.
    pub fn all(config: &ModelConfig) -> impl Iterator<Item = Self> {
        Field::IN_FILE_ORDER.into_iter().flat_map(|field| {
            let [layers, experts] = field.counts(config);
            (0..layers).flat_map(move |layer| (0..experts).map(move |expert| field.id(layer, expert)))
        })
    }

    /// The array that holds the tensor, and the tensor's layer and expert (0 if it has none).
    pub fn place(self) -> (Field, usize, usize) {
        match self {
            Self::Embedding => (Field::TokenEmbeddingTable, 0, 0),
            Self::Unembedding => (Field::Out, 0, 0),
            Self::AttnNorm { layer } => (Field::RmsAttnW, layer, 0),
            Self::FfnNorm { layer } => (Field::RmsFfnW, layer, 0),
            Self::OutNorm => (Field::RmsOutW, 0, 0),
            Self::Qkv { layer } => (Field::WQkv, layer, 0),
            Self::QkvBias { layer } => (Field::BQkv, layer, 0),
            Self::AttnOut { layer } => (Field::WO, layer, 0),
            Self::AttnOutBias { layer } => (Field::BO, layer, 0),
            Self::Sinks { layer } => (Field::AttnSinks, layer, 0),
            Self::Router { layer } => (Field::WRouter, layer, 0),
            Self::RouterBias { layer } => (Field::BRouter, layer, 0),
            Self::Mlp1 { layer, expert } => (Field::WMlp1, layer, expert),
            Self::Mlp1Bias { layer, expert } => (Field::BMlp1, layer, expert),
            Self::Mlp2 { layer, expert } => (Field::WMlp2, layer, expert),
            Self::Mlp2Bias { layer, expert } => (Field::BMlp2, layer, expert),
        }
    }

    /// `[rows, cols]` in a model of these dimensions.
    pub fn shape(self, config: &ModelConfig) -> [usize; 2] {
        let hidden = config.hidden_dim;
        match self {
            Self::Embedding | Self::Unembedding => [config.vocab_size, hidden],
            Self::AttnNorm { .. } | Self::FfnNorm { .. } | Self::OutNorm => [1, hidden],
            Self::AttnOutBias { .. } | Self::Mlp2Bias { .. } => [1, hidden],
            Self::Qkv { .. } => [config.qkv_dim(), hidden],
            Self::QkvBias { .. } => [1, config.qkv_dim()],
            Self::AttnOut { .. } => [hidden, config.q_dim()],
            Self::Sinks { .. } => [1, config.n_attn_heads],
            Self::Router { .. } => [config.n_experts, hidden],
            Self::RouterBias { .. } => [1, config.n_experts],
            Self::Mlp1 { .. } => [2 * config.intermediate_dim, hidden],
            Self::Mlp1Bias { .. } => [1, 2 * config.intermediate_dim],
            Self::Mlp2 { .. } => [hidden, config.intermediate_dim],
        }
    }

    /// Refuses a layer or an expert that the model does not have.
    pub(super) fn check(self, config: &ModelConfig) -> Result<()> {
        let (field, layer, expert) = self.place();
        let [layers, experts] = field.counts(config);
        if layer < layers && expert < experts {
            return Ok(());
        }
        let why = format!("the model has no layer {layer} with expert {expert}; it has {layers} with {experts}");
        Err(Error::format(field.name(), why))
    }
}
