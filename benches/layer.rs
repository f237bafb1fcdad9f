//! What the models of steps take of a layer: its products, rows of its experts, and its launches, as the library
//! chooses them for a device.

use getp::backend::gpu::catalogue::{Elements, Op};
use getp::backend::gpu::shapes::{
    GemmShape, MatrixForm, Mlp1Launch, NormRouteLaunch, Numbers, Product, SortGatherLaunch,
};
use getp::backend::gpu::target::Target;
use getp::config::ModelConfig;
use getp::weights::WeightFormat;
use rand::SeedableRng;
use rand::seq::index::sample;
use rand_chacha::ChaCha8Rng;

/// Launches of a step beside its layers': upload, embed, norm, unembedding and argmax.
pub const STEP_LAUNCHES: usize = 5;

/// A product of `fast` in a step of so many rows, with weights as released models have them.
pub fn shape(target: &Target, config: &ModelConfig, product: Product, rows: usize) -> GemmShape {
    let form = match product {
        Product::Mlp1 | Product::Mlp2 => MatrixForm::Mxfp4,
        Product::Qkv => target.qkv_held(config, false),
        _ => MatrixForm::W16,
    };
    target.product_shape(config, product, form, Elements::F16, 1, rows)
}

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

/// Whether queries, keys and values are rotated and stored by the kernel of their product.
pub fn stores(target: &Target, qkv: &GemmShape) -> bool {
    target.gemm(qkv).expect("a kernel").launch.kernel.op == Op::QkvStore
}

/// mlp1, and how it gets its rows.
pub fn mlp1(target: &Target, config: &ModelConfig, rows: usize) -> Mlp1Launch {
    let shape = shape(target, config, Product::Mlp1, rows);
    target.mlp1(&shape, rows, target.gemm(&shape).expect("a kernel").launch)
}

/// Norm and router in one kernel, where they are.
pub fn norm_route(target: &Target, config: &ModelConfig, rows: usize) -> Option<NormRouteLaunch> {
    let fast = Numbers::new(Elements::F16, false);
    target.norm_route(config, &fast, MatrixForm::Wire(WeightFormat::Bf16), rows)
}

/// Launches of a layer, of the kernels that the host chooses.
pub fn launches(target: &Target, config: &ModelConfig, rows: usize) -> usize {
    let qkv = shape(target, config, Product::Qkv, rows);
    let norm_route = norm_route(target, config, rows);
    let sends = norm_route.as_ref().is_some_and(|launch| launch.sends);
    let sort_and_gather = match (mlp1(target, config, rows), target.sort_gather(rows, 1)) {
        _ if sends => 0,
        (Mlp1Launch::Sorting(_), _) => 0,
        (Mlp1Launch::Indexing(..), _) | (_, SortGatherLaunch::Together(_)) => 1,
        (_, SortGatherLaunch::Apart { .. }) => 2,
    };
    let norm = if target.norm_qkv(config, &qkv).is_some() { 0 } else { 1 };
    let attention_and_out = 2;
    let experts = 2;
    let qkv_and_rope = if stores(target, &qkv) { 1 } else { 2 };
    let norm_and_route = if norm_route.is_some() { 1 } else { 2 };
    norm + attention_and_out + qkv_and_rope + norm_and_route + sort_and_gather + experts
}
