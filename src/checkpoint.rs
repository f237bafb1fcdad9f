//! Where the weights come from: the eval program's struct, its `.bin` file, or a Hugging Face directory.
//!
//! A checkpoint names tensors in the model's words and gives their values as they lie in memory, unconverted
//! and uncopied. What they become is the business of `weights`.

use crate::error::Result;
use crate::model::ModelConfig;

/// A tensor of the model. `layer` and `expert` count from 0.
#[allow(missing_docs)] // the fields are the layer and the expert, nothing else
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TensorId {
    /// Token embedding `[vocab, hidden]`.
    Embedding,
    /// Unembedding `[vocab, hidden]`.
    Unembedding,
    /// RMSNorm before attention `[1, hidden]`.
    AttnNorm { layer: usize },
    /// RMSNorm before the experts `[1, hidden]`.
    FfnNorm { layer: usize },
    /// RMSNorm before the unembedding `[1, hidden]`.
    OutNorm,
    /// Query, key and value projection `[head_dim * (heads + 2 * kv_heads), hidden]`.
    Qkv { layer: usize },
    /// Its bias `[1, head_dim * (heads + 2 * kv_heads)]`.
    QkvBias { layer: usize },
    /// Attention's output projection `[hidden, head_dim * heads]`.
    AttnOut { layer: usize },
    /// Its bias `[1, hidden]`.
    AttnOutBias { layer: usize },
    /// Attention sinks `[1, heads]`.
    Sinks { layer: usize },
    /// Router `[experts, hidden]`.
    Router { layer: usize },
    /// Its bias `[1, experts]`.
    RouterBias { layer: usize },
    /// An expert's first matrix `[2 * intermediate, hidden]`, rows alternating gate and up.
    Mlp1 { layer: usize, expert: usize },
    /// Its bias `[1, 2 * intermediate]`.
    Mlp1Bias { layer: usize, expert: usize },
    /// An expert's second matrix `[hidden, intermediate]`.
    Mlp2 { layer: usize, expert: usize },
    /// Its bias `[1, hidden]`.
    Mlp2Bias { layer: usize, expert: usize },
}

/// Values as they lie in the checkpoint, little endian, row-major, of any alignment.
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
}

/// Consecutive rows of a tensor that lie together.
#[derive(Clone, Copy, Debug)]
pub struct Part<'a> {
    /// How many rows.
    pub rows: usize,
    /// Their values, `rows * cols` of them.
    pub values: Values<'a>,
}

/// A matrix `[rows, cols]` as it lies in the checkpoint; vectors have one row.
#[derive(Clone, Debug)]
pub struct Tensor<'a> {
    /// Outputs.
    pub rows: usize,
    /// Inputs.
    pub cols: usize,
    /// The rows from the first to the last, in one or more parts.
    pub parts: Vec<Part<'a>>,
}

/// A source of weights.
pub trait Checkpoint: Send + Sync {
    /// The model's dimensions.
    fn config(&self) -> &ModelConfig;
    /// One tensor. Its shape is the one `TensorId` documents, checked.
    fn tensor(&self, id: TensorId) -> Result<Tensor<'_>>;
}
