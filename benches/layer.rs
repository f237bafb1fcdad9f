//! What the models of steps take of a layer: the size of its weights and rows of its experts.

use getp::backend::gpu::shapes::{GemmShape, Product};
use getp::backend::gpu::target::Target;
use getp::config::ModelConfig;
use rand::SeedableRng;
use rand::seq::index::sample;
use rand_chacha::ChaCha8Rng;

/// Launches of a step beside its layers': upload, embed, norm, unembedding and argmax.
pub const STEP_LAUNCHES: usize = 5;

/// Columns of a product's weights.
pub fn columns(config: &ModelConfig, product: Product) -> usize {
    match product {
        Product::AttnOut => config.head_dim * config.n_attn_heads,
        Product::Mlp2 => config.intermediate_dim,
        _ => config.hidden_dim,
    }
}

/// Bytes of a group's packed weights.
pub fn weight_bytes(target: &Target, shape: &GemmShape, columns: usize) -> usize {
    let format = shape.form.packed().expect("a family packs what it multiplies");
    target.packed(format, shape.n, columns).bytes
}

/// Rows of each expert. Tokens select experts at random, with a fixed seed.
pub fn expert_rows(config: &ModelConfig, rows: usize) -> Vec<usize> {
    let mut random = ChaCha8Rng::seed_from_u64(1);
    let mut counts = vec![0; config.n_experts];
    for _ in 0..rows {
        for expert in sample(&mut random, config.n_experts, config.experts_per_token) {
            counts[expert] += 1;
        }
    }
    counts
}
