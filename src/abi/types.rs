//! The eval program's structs, byte for byte. It owns them; we read them, and write what each field's comment says.
//!
//! Every size and offset is asserted while compiling: a change here is a change of the contract.

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
    /// Experts each token is sent to.
    pub experts_per_token: c_int,
    /// Width inside an expert.
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
    /// Context length before YaRN's scaling; the most tokens a prompt may have.
    pub initial_context_length: c_int,
    /// Base of the rotary frequencies.
    pub rope_theta: f32,
    /// YaRN's scaling factor.
    pub rope_scaling_factor: f32,
    /// Width of the windowed layers' attention; 0 if no layer is windowed.
    pub sliding_window: c_int,
    /// Clamp of the gated unit's inputs.
    pub swiglu_limit: f32,
}

/// The weights, float32, row-major, outputs before inputs. While the model is warmed up these are addresses
/// in the first replica, in its own formats, or NULL; `finish` puts the program's own back. On a GPU they are
/// the first device's, not for the host to read: of the arrays that have layers those of layer 0; vectors
/// float32, `token_embedding_table` and `w_router` BF16 (float32 where that is not exact) in row-major tiles
/// of 32 rows, the other matrices MXFP4, FP16 or BF16 in the order of the device's matrix cores.
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

/// The program's own scratch memory for one token. Never read; while the model is warmed up these are
/// addresses in the first replica, or NULL. On a GPU `x`, `t`, `tb`, `mlp1_out` and `qkv` are the activations
/// of a step on the first device, `key_cache` its KV cache, and the others NULL.
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

/// A model. Its address is the handle of everything `warm_up` makes for it.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Transformer {
    /// The dimensions.
    pub config: Config,
    /// The weights.
    pub weights: TransformerWeights,
    /// The scratch memory.
    pub state: RunState,
    /// The program's file descriptor of the mapped checkpoint; only asked how long the file is.
    pub fd: c_int,
    /// The program's mapping of the checkpoint, or NULL: weights that begin within it must end within it.
    pub data: *mut f32,
    /// Bytes in the program's mapping.
    pub file_size: isize,
}

/// An entry of the sorted vocabulary.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct TokenIndex {
    /// The token's bytes, `[len]`.
    pub str: *const c_char,
    /// How many.
    pub len: c_int,
    /// The token.
    pub id: c_int,
}

/// The vocabulary. Only `vocab`, `lengths`, `scores`, `vocab_size` and `max_token_length` are read.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Tokenizer {
    /// `[vocab_size]` pointers to each token's bytes.
    pub vocab: *mut *mut c_char,
    /// `[vocab_size]` numbers of bytes.
    pub lengths: *mut c_int,
    /// `[vocab_size]`; special tokens have -1e30.
    pub scores: *mut f32,
    /// Tokens in the vocabulary.
    pub vocab_size: c_int,
    /// Bytes of the longest token.
    pub max_token_length: c_int,
    /// `[vocab_size]`, sorted by bytes, then length.
    pub sorted_vocab: *mut TokenIndex,
    /// The token of each single byte.
    pub byte_tokens: [c_int; 256],
    /// Each byte as a string: `[256, 2]`, byte and NUL.
    pub byte_pieces: [c_uchar; 512],
}

/// An entry of the sampler's scratch memory.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct ProbIndex {
    /// A token's probability.
    pub prob: f32,
    /// The token.
    pub index: c_int,
}

/// How to sample.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Sampler {
    /// Tokens in the vocabulary.
    pub vocab_size: c_int,
    /// `[vocab_size]` of scratch memory; never used.
    pub probindex: *mut ProbIndex,
    /// 0 takes the most likely token.
    pub temperature: f32,
    /// The mass of the nucleus; all tokens count unless it lies within (0, 1).
    pub topp: f32,
    /// State of the random numbers. `inference` leaves here what request 0 left.
    pub rng_state: c_ulonglong,
}

/// The prompts, and room for the answers.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Requests {
    /// How many.
    pub num_reqs: c_int,
    /// Bytes set aside for each token of a prompt.
    pub max_token_len: c_int,
    /// The most positions of a request, prompt and answer.
    pub max_seq_len: c_int,
    /// `[num_reqs, max_token_len * (max_seq_len + 1)]`: the prompts, filled up with NUL.
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
    /// The struct's bytes, as they begin a `.bin` file.
    pub fn to_bytes(self) -> [u8; size_of::<Self>()] {
        // SAFETY: fifteen fields of four bytes leave no padding, and any bytes are bytes.
        unsafe { std::mem::transmute(self) }
    }

    /// The struct of these bytes.
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
