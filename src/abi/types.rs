//! The eval program's structs, byte for byte. The program owns them; each field's comment says whether we write to it.
//!
//! Every size and offset is asserted at compile time: a change here is a change of the contract.

use std::ffi::{c_char, c_int, c_uchar, c_ulonglong, c_void};
use std::mem::{offset_of, size_of};

/// The model's dimensions.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Config {
    /// Tokens in the vocabulary.
    pub vocab_size: c_int,
    /// Width of the residual stream.
    pub hidden_dim: c_int,
    /// Experts in each layer.
    pub n_experts: c_int,
    /// Experts that the router selects for each token.
    pub experts_per_token: c_int,
    /// Width of an expert's inner activations.
    pub intermediate_dim: c_int,
    /// Layers.
    pub n_layers: c_int,
    /// Width of an attention head.
    pub head_dim: c_int,
    /// Query heads.
    pub n_attn_heads: c_int,
    /// Key and value heads.
    pub n_kv_heads: c_int,
    /// Positions the checkpoint was exported for.
    pub seq_len: c_int,
    /// Context length before YaRN's scaling; in `inference`, the most tokens a prompt may have.
    pub initial_context_length: c_int,
    /// Base of the rotary frequencies.
    pub rope_theta: f32,
    /// YaRN's scaling factor.
    pub rope_scaling_factor: f32,
    /// Positions that a sliding-window layer attends to; 0 if there is no such layer.
    pub sliding_window: c_int,
    /// Limit that gate and up are clamped to in the experts' SwiGLU.
    pub swiglu_limit: f32,
}

/// The weights, float32, row-major, outputs before inputs.
///
/// Between `warm_up` and `finish` these are addresses of the first replica's packed weights, not for the program to
/// use; `finish` restores the program's own. On a GPU they are device addresses. For arrays with a layer dimension it
/// is layer 0's. Vectors are float32. `token_embedding_table` and `w_router` are BF16 in row-major tiles of 32 rows on
/// a GPU; the other matrices there are MXFP4, FP16 or BF16 in the layout of the matrix cores. A matrix that no narrower
/// format holds exactly is float32 in row-major tiles of 32 rows.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TransformerWeights {
    /// `[vocab_size, hidden_dim]`
    pub token_embedding_table: *mut f32,
    /// `[n_layers, hidden_dim]`
    pub rms_attn_w: *mut f32,
    /// `[n_layers, hidden_dim]`
    pub rms_ffn_w: *mut f32,
    /// `[n_layers, head_dim * (n_attn_heads + 2 * n_kv_heads), hidden_dim]`: all queries, then keys, then values
    pub w_qkv: *mut f32,
    /// `[n_layers, hidden_dim, head_dim * n_attn_heads]`
    pub w_o: *mut f32,
    /// `[n_layers, head_dim * (n_attn_heads + 2 * n_kv_heads)]`
    pub b_qkv: *mut f32,
    /// `[n_layers, hidden_dim]`
    pub b_o: *mut f32,
    /// `[n_layers, n_attn_heads]`
    pub attn_sinks: *mut f32,
    /// `[n_layers, n_experts, hidden_dim]`
    pub w_router: *mut f32,
    /// `[n_layers, n_experts]`
    pub b_router: *mut f32,
    /// `[n_layers, n_experts, 2 * intermediate_dim, hidden_dim]`: rows alternate gate, up
    pub w_mlp1: *mut f32,
    /// `[n_layers, n_experts, hidden_dim, intermediate_dim]`
    pub w_mlp2: *mut f32,
    /// `[n_layers, n_experts, 2 * intermediate_dim]`
    pub b_mlp1: *mut f32,
    /// `[n_layers, n_experts, hidden_dim]`
    pub b_mlp2: *mut f32,
    /// `[hidden_dim]`
    pub rms_out_w: *mut f32,
    /// `[vocab_size, hidden_dim]`
    pub out: *mut f32,
}

/// The program's scratch memory for one token, which the library does not use.
///
/// Between `warm_up` and `finish`, `x`, `t`, `tb`, `mlp1_out` and `qkv` are addresses of the first replica's
/// activations, `key_cache` that of its KV cache, and the others NULL. On a GPU they are device addresses.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RunState {
    /// `[hidden_dim]`
    pub x: *mut f32,
    /// `[hidden_dim]`
    pub t: *mut f32,
    /// `[head_dim * n_attn_heads]`
    pub tb: *mut f32,
    /// `[hidden_dim]`
    pub tb2: *mut f32,
    /// `[n_experts]`
    pub router_score: *mut f32,
    /// `[experts_per_token]`
    pub topk_v: *mut f32,
    /// `[experts_per_token]`
    pub topk_i: *mut c_int,
    /// `[2 * intermediate_dim]`
    pub mlp1_out: *mut f32,
    /// `[intermediate_dim]`
    pub gate: *mut f32,
    /// `[intermediate_dim]`
    pub up: *mut f32,
    /// `[intermediate_dim]`
    pub gate_up: *mut f32,
    /// `[hidden_dim]`
    pub e_agg: *mut f32,
    /// `[head_dim * (n_attn_heads + 2 * n_kv_heads)]`
    pub qkv: *mut f32,
    /// `[head_dim * n_attn_heads]`
    pub q: *mut f32,
    /// `[head_dim * n_kv_heads]`
    pub k: *mut f32,
    /// `[head_dim * n_kv_heads]`
    pub v: *mut f32,
    /// `[n_attn_heads, seq_len]`
    pub att: *mut f32,
    /// `[vocab_size]`
    pub logits: *mut f32,
    /// `[n_layers, seq_len, head_dim * n_kv_heads]`
    pub key_cache: *mut f32,
    /// `[n_layers, seq_len, head_dim * n_kv_heads]`
    pub value_cache: *mut f32,
    /// `[seq_len, seq_len]`; NULL if `sliding_window` is 0
    pub mask: *mut f32,
}

/// A model. The struct's address is the handle by which `inference` and `finish` find what `warm_up` made.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Transformer {
    /// The dimensions.
    pub config: Config,
    /// The weights.
    pub weights: TransformerWeights,
    /// The scratch memory.
    pub state: RunState,
    /// The program's file descriptor of the mapped checkpoint, used only to ask for the file's size.
    pub fd: c_int,
    /// The program's mapping of the checkpoint, or NULL. If the embedding lies in it, all weights must.
    pub data: *mut f32,
    /// Size of the mapping in bytes.
    pub file_size: isize,
}

/// An entry of `Tokenizer.sorted_vocab`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct TokenIndex {
    /// The token's bytes, `[len]`.
    pub str: *const c_char,
    /// Number of bytes.
    pub len: c_int,
    /// The token's id.
    pub id: c_int,
}

/// The vocabulary. Only `vocab`, `lengths`, `scores`, `vocab_size` and `max_token_length` are read.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Tokenizer {
    /// `[vocab_size]`: pointers to the tokens' bytes.
    pub vocab: *mut *mut c_char,
    /// `[vocab_size]`: the tokens' lengths in bytes.
    pub lengths: *mut c_int,
    /// `[vocab_size]`: -1e30 for special tokens, which encoding never produces.
    pub scores: *mut f32,
    /// Tokens in the vocabulary.
    pub vocab_size: c_int,
    /// Length in bytes of the longest token that encoding may produce.
    pub max_token_length: c_int,
    /// `[vocab_size]`: sorted by bytes, then by length.
    pub sorted_vocab: *mut TokenIndex,
    /// The id of each single byte's token.
    pub byte_tokens: [c_int; 256],
    /// Each byte as a string: `[256, 2]`, byte and NUL.
    pub byte_pieces: [c_uchar; 512],
}

/// An entry of `Sampler.probindex`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct ProbIndex {
    /// A token's probability.
    pub prob: f32,
    /// The token's id.
    pub index: c_int,
}

/// How tokens are sampled.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Sampler {
    /// Tokens in the vocabulary.
    pub vocab_size: c_int,
    /// `[vocab_size]`: the program's scratch memory, which the library does not use.
    pub probindex: *mut ProbIndex,
    /// 0 is greedy decoding. What the evaluation program's `main` would replace `inference` replaces, with a line: a
    /// negative number by 0. NaN is refused.
    pub temperature: f32,
    /// Within (0, 1): top-p (nucleus) sampling. 0 and 1: all tokens can be sampled. Another number is replaced by 0.9,
    /// as `main` would, and NaN refused, unless `temperature` is 0.
    pub topp: f32,
    /// State of the random number generator. `inference` stores here the state after request 0's last token. With 0,
    /// which the generator never leaves, request 0 draws the number 0 for every token, as in the program; a line says
    /// so.
    pub rng_state: c_ulonglong,
}

/// The prompts, and memory for the answers.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Requests {
    /// Number of requests.
    pub num_reqs: c_int,
    /// Bytes allocated for each position of a prompt.
    pub max_token_len: c_int,
    /// The steps of a request; `getp_options.steps` says what they count.
    pub max_seq_len: c_int,
    /// `[num_reqs, max_token_len * (max_seq_len + 1)]`: the prompts, padded with NUL.
    pub str_reqs: *mut c_char,
    /// `[num_reqs, max_seq_len + 1]`: the answers, each ended by -1. `inference` writes them.
    pub tok_gens: *mut c_int,
}

/// Asserts a struct's size and the offset of each of its fields.
macro_rules! layout {
    ($name:ident: $size:literal, $($field:ident $offset:literal),+ $(,)?) => {
        const _: () = {
            assert!(size_of::<$name>() == $size);
            $(assert!(offset_of!($name, $field) == $offset);)+
        };
    };
}

layout!(Config: 60,
    vocab_size 0, hidden_dim 4, n_experts 8, experts_per_token 12, intermediate_dim 16, n_layers 20, head_dim 24,
    n_attn_heads 28, n_kv_heads 32, seq_len 36, initial_context_length 40, rope_theta 44, rope_scaling_factor 48,
    sliding_window 52, swiglu_limit 56,
);
layout!(TransformerWeights: 128,
    token_embedding_table 0, rms_attn_w 8, rms_ffn_w 16, w_qkv 24, w_o 32, b_qkv 40, b_o 48, attn_sinks 56,
    w_router 64, b_router 72, w_mlp1 80, w_mlp2 88, b_mlp1 96, b_mlp2 104, rms_out_w 112, out 120,
);
layout!(RunState: 168,
    x 0, t 8, tb 16, tb2 24, router_score 32, topk_v 40, topk_i 48, mlp1_out 56, gate 64, up 72, gate_up 80,
    e_agg 88, qkv 96, q 104, k 112, v 120, att 128, logits 136, key_cache 144, value_cache 152, mask 160,
);
layout!(Transformer: 384, config 0, weights 64, state 192, fd 360, data 368, file_size 376);
layout!(TokenIndex: 16, str 0, len 8, id 12);
layout!(Tokenizer: 1576,
    vocab 0, lengths 8, scores 16, vocab_size 24, max_token_length 28, sorted_vocab 32, byte_tokens 40,
    byte_pieces 1064,
);
layout!(ProbIndex: 8, prob 0, index 4);
layout!(Sampler: 32, vocab_size 0, probindex 8, temperature 16, topp 20, rng_state 24);
layout!(Requests: 32, num_reqs 0, max_token_len 4, max_seq_len 8, str_reqs 16, tok_gens 24);

impl Config {
    /// The struct's bytes, which are also the header of a `.bin` file.
    pub fn to_bytes(self) -> [u8; size_of::<Self>()] {
        // SAFETY: fifteen fields of four bytes leave no padding, and any bytes are bytes.
        unsafe { std::mem::transmute(self) }
    }

    /// The inverse of [`Self::to_bytes`].
    pub fn from_bytes(bytes: [u8; size_of::<Self>()]) -> Self {
        // SAFETY: every field takes any bytes.
        unsafe { std::mem::transmute(bytes) }
    }
}

impl TransformerWeights {
    /// The fields, in order.
    pub fn arrays(&self) -> [*const u8; 16] {
        // SAFETY: both are sixteen addresses of data.
        unsafe { std::mem::transmute_copy(self) }
    }

    /// The struct of these fields, in order.
    pub fn from_arrays(arrays: [*mut c_void; 16]) -> Self {
        // SAFETY: both are sixteen addresses of data.
        unsafe { std::mem::transmute(arrays) }
    }
}

impl RunState {
    /// The struct of these fields, in order.
    pub fn from_arrays(arrays: [*mut c_void; 21]) -> Self {
        // SAFETY: both are twenty-one addresses of data.
        unsafe { std::mem::transmute(arrays) }
    }
}
