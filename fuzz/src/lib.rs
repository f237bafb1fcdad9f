//! What fuzz targets share.

use getp::abi::types::Config;
use getp::backend::cpu;
use getp::checkpoint::{Checkpoint, TensorId};

/// Reads every tensor of a checkpoint that has been accepted, and packs them all.
pub fn read_all(checkpoint: &dyn Checkpoint) {
    let config = checkpoint.config();
    for id in TensorId::all(config) {
        let tensor = checkpoint.tensor(id).expect("an accepted checkpoint has every tensor");
        assert_eq!([tensor.rows, tensor.cols], id.shape(config), "{id:?}");
        assert_eq!(
            tensor.to_f32().expect("there is memory").len(),
            tensor.rows * tensor.cols,
            "{id:?}"
        );
    }
    cpu::load(checkpoint).expect("an accepted checkpoint can be packed");
}

/// A model that takes little time.
pub const CONFIG: Config = Config {
    vocab_size: 260,
    hidden_dim: 8,
    n_experts: 3,
    experts_per_token: 2,
    intermediate_dim: 4,
    n_layers: 2,
    head_dim: 2,
    n_attn_heads: 2,
    n_kv_heads: 1,
    seq_len: 40,
    initial_context_length: 30,
    rope_theta: 10_000.0,
    rope_scaling_factor: 2.0,
    sliding_window: 4,
    swiglu_limit: 7.0,
};

/// A model's weight number `i`: between -0.5 and 0.5, without a pattern that the model could see.
pub fn weight(i: usize) -> f32 {
    (i.wrapping_mul(0x9E37_79B9) >> 8 & 0xFFFF) as f32 / 65536.0 - 0.5
}
