//! Random operands: shapes, matrices and activations.

use getp::backend::cpu::{Buffer, ResidualMemory, Routes, Tiles};
use getp::checkpoint::{Part, Tensor, Values};
use getp::config::ModelConfig;
use getp::dtype::{E2M1, MXFP4_BLOCK};
use getp::weights::{Layout, Packed, WeightFormat, pack};
use half::bf16;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use rand_distr::StandardNormal;

pub fn rng(seed: u64) -> ChaCha8Rng {
    ChaCha8Rng::seed_from_u64(seed)
}

/// Models, and numbers of rows in a step. No dimension except the 32 of an MXFP4 block is a multiple of a vector or a
/// tile; rows are one, fewer and more than a block of tokens; each has a different number of query heads per kv head.
pub fn shapes() -> Vec<(ModelConfig, usize)> {
    let shape = |[hidden, intermediate, vocab]: [usize; 3], [head_dim, heads, kv]: [usize; 3], [e, k]: [usize; 2]| {
        let config = ModelConfig {
            vocab_size: vocab,
            hidden_dim: hidden,
            n_experts: e,
            experts_per_token: k,
            intermediate_dim: intermediate,
            head_dim,
            n_attn_heads: heads,
            n_kv_heads: kv,
            sliding_window: 21,
            ..ModelConfig::preset_7m()
        };
        config.check().expect("the shape is a model's")
    };
    vec![
        (shape([32, 32, 33], [20, 2, 2], [3, 1]), 1),
        (shape([45, 50, 100], [24, 4, 2], [4, 2]), 3),
        (shape([96, 160, 257], [80, 6, 2], [9, 4]), 12),
        (shape([200, 33, 100], [6, 8, 1], [5, 3]), 30),
    ]
}

/// The formats a matrix of so many columns may be held in.
pub fn formats(cols: usize) -> Vec<WeightFormat> {
    let mut formats = vec![WeightFormat::Bf16, WeightFormat::F32];
    if cols.is_multiple_of(MXFP4_BLOCK) {
        formats.push(WeightFormat::Mxfp4);
    }
    formats
}

pub fn normal(rng: &mut ChaCha8Rng, n: usize) -> Vec<f32> {
    (0..n).map(|_| rng.sample(StandardNormal)).collect()
}

/// A matrix `[rows, cols]` with values that the format represents exactly, scaled so that sums are about 1.
pub fn values(rng: &mut ChaCha8Rng, format: WeightFormat, rows: usize, cols: usize) -> Vec<f32> {
    let unit = 1.0 / (cols as f32).sqrt();
    let mut scale = 0.0;
    (0..rows * cols)
        .map(|i| match format {
            WeightFormat::Mxfp4 => {
                if i % MXFP4_BLOCK == 0 {
                    scale = (unit.log2().round() + rng.random_range(-3..=0) as f32).exp2();
                }
                E2M1[rng.random_range(0..16)] * scale
            }
            WeightFormat::Bf16 => bf16::from_f32(unit * rng.sample::<f32, _>(StandardNormal)).to_f32(),
            WeightFormat::F32 => unit * rng.sample::<f32, _>(StandardNormal),
        })
        .collect()
}

/// Packs matrices of one shape in just this format.
pub fn packed(members: &[Vec<f32>], cols: usize, format: WeightFormat, layout: &dyn Layout) -> Packed {
    let bytes: Vec<Vec<u8>> = members
        .iter()
        .map(|m| m.iter().flat_map(|v| v.to_le_bytes()).collect())
        .collect();
    let tensors: Vec<Tensor<'_>> = bytes
        .iter()
        .map(|bytes| {
            let rows = bytes.len() / 4 / cols;
            let values = Values::F32(bytes);
            let parts = vec![Part { rows, values }];
            Tensor { rows, cols, parts }
        })
        .collect();
    let packed = pack(&tensors, format, layout).expect("packs");
    assert_eq!(packed.format, format, "the values were drawn for the format");
    packed
}

/// A matrix `[rows, cols]`, plain and packed.
pub fn dense(rng: &mut ChaCha8Rng, format: WeightFormat, rows: usize, cols: usize) -> (Vec<f32>, Packed) {
    let w = values(rng, format, rows, cols);
    let tiles = Tiles { gated: false };
    let packed = packed(std::slice::from_ref(&w), cols, format, &tiles);
    (w, packed)
}

/// Rows of activations.
pub fn buffer(width: usize, values: &[f32]) -> Buffer {
    let mut buffer = Buffer::new(values.len() / width, width).unwrap();
    buffer.set_rows(values.len() / width).unwrap();
    buffer.values_mut().copy_from_slice(values);
    buffer
}

/// A residual stream of these rows, and their experts.
pub fn residual(x: Buffer, routes: Routes) -> ResidualMemory {
    ResidualMemory { x, routes }
}

/// A buffer for rows, filled with values that must not occur in a result.
pub fn stale(width: usize, rows: usize) -> Buffer {
    buffer(width, &vec![f32::NAN; width * rows])
}
