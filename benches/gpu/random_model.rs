//! A model of random values in host memory, for benchmarks without a checkpoint. A value is a hash of a seed and its
//! place, so that what a model answers can be compared with earlier records.

use getp::checkpoint::{Checkpoint, Field, Part, Tensor, TensorId, Values};
use getp::config::ModelConfig;
use getp::dtype::{MXFP4_BLOCK, MXFP4_BLOCK_BYTES};
use getp::error::{Error, Result};
use getp::tensors::Holds;
use getp::weights::{RowMajor, WeightFormat};
use half::bf16;
use rayon::prelude::*;
use std::collections::HashMap;

const SEED: u32 = 1;
/// SplitMix64's step.
const STEP: u64 = 0x9e37_79b9_7f4a_7c15;

pub struct RandomModel {
    config: ModelConfig,
    /// By the first tensor of a layer's: all of them, each filled up to whole tiles.
    matrices: HashMap<TensorId, Matrices>,
    /// By layer.
    router_biases: Vec<Vec<u8>>,
    zeros: Vec<u8>,
    ones: Vec<u8>,
}

/// Matrices one after the other.
enum Matrices {
    Bf16(Vec<u8>),
    Mxfp4 { blocks: Vec<u8>, scales: Vec<u8> },
}

impl RandomModel {
    /// The n-th favoured expert's bias is `-skew * ln(n)`: at 0 the router's choice is even.
    pub fn new(config: &ModelConfig, skew: f32) -> Self {
        let config = config.clone();
        let is_matrix = |id: &TensorId| !matches!(id.place().0.holds(), Holds::Norm | Holds::Bias);
        let firsts = TensorId::all(&config).filter(|id| is_matrix(id) && id.place().2 == 0);
        let matrices = firsts.map(|id| (id, Matrices::new(id, &config))).collect();
        let bytes = |values: Vec<f32>| values.into_iter().flat_map(f32::to_le_bytes).collect::<Vec<u8>>();
        let router_biases = (0..config.n_layers)
            .map(|layer| bytes(router_bias(config.n_experts, layer, skew)))
            .collect();
        let longest = TensorId::all(&config)
            .filter(|id| !is_matrix(id))
            .map(|id| id.shape(&config)[1]);
        let longest = longest.max().unwrap_or(0);
        Self {
            matrices,
            router_biases,
            zeros: vec![0; 4 * longest],
            ones: bytes(vec![1.0; longest]),
            config,
        }
    }

    /// A vector's bytes. Biases and sinks but for the router's are zeros, and norms ones: they do not change timings.
    fn vector(&self, id: TensorId, len: usize) -> &[u8] {
        let (field, layer, _) = id.place();
        match field.holds() {
            _ if field == Field::BRouter => &self.router_biases[layer],
            Holds::Norm => &self.ones[..4 * len],
            _ => &self.zeros[..4 * len],
        }
    }
}

impl Checkpoint for RandomModel {
    fn config(&self) -> &ModelConfig {
        &self.config
    }

    fn tensor(&self, id: TensorId) -> Result<Tensor<'_>> {
        id.check(&self.config)?;
        let (field, layer, expert) = id.place();
        let [rows, cols] = id.shape(&self.config);
        // Where a row of so many bytes has the tensor's rows.
        let within = |row: usize| {
            let begin = expert * rows.next_multiple_of(RowMajor::ROWS) * row;
            begin..begin + rows * row
        };
        let values = match self.matrices.get(&field.id(layer, 0)) {
            Some(Matrices::Bf16(values)) => Values::Bf16(&values[within(2 * cols)]),
            Some(Matrices::Mxfp4 { blocks, scales }) => Values::Mxfp4 {
                blocks: &blocks[within(cols / 2)],
                scales: &scales[within(cols / MXFP4_BLOCK)],
            },
            None if rows == 1 => Values::F32(self.vector(id, cols)),
            None => return Err(Error::format("random model", format!("has no {id:?}"))),
        };
        let parts = vec![Part { rows, values }];
        Ok(Tensor { rows, cols, parts })
    }
}

impl Matrices {
    fn new(first: TensorId, config: &ModelConfig) -> Self {
        let (field, layer, _) = first.place();
        let seed = SEED.wrapping_mul(0x9e37_79b9) ^ (field as u32) << 16 ^ layer as u32;
        let key = mix(u64::from(seed).wrapping_add(STEP));
        let [rows, cols] = first.shape(config);
        let [_, members] = field.counts(config);
        let values = members * rows.next_multiple_of(RowMajor::ROWS) * cols;
        let spread = Spread::of(first, cols);
        if WeightFormat::expected(field.holds()) != WeightFormat::Mxfp4 {
            let mut bytes = vec![0; 2 * values];
            fill(&mut bytes, |i| {
                bf16::from_f32(spread.deviation * unit(key, i)).to_le_bytes()
            });
            return Self::Bf16(bytes);
        }
        let n = values / MXFP4_BLOCK;
        let (mut blocks, mut scales) = (vec![0; n * MXFP4_BLOCK_BYTES], vec![0; n]);
        fill(&mut blocks, |i| {
            let codes = draw(key, 3 * i) as u128 | (draw(key, 3 * i + 1) as u128) << 64;
            codes.to_le_bytes()
        });
        fill(&mut scales, |i| {
            [(127 + spread.exponent - (draw(key, 3 * i + 2) >> 63) as i32) as u8]
        });
        Self::Mxfp4 { blocks, scales }
    }
}

/// Fills memory with what `make` gives for each place, on all cores.
fn fill<const N: usize>(bytes: &mut [u8], make: impl Fn(u64) -> [u8; N] + Sync) {
    const CHUNK: usize = 1 << 16;
    bytes.par_chunks_mut(CHUNK * N).enumerate().for_each(|(chunk, bytes)| {
        let places = (chunk * CHUNK) as u64..;
        bytes
            .as_chunks_mut()
            .0
            .iter_mut()
            .zip(places)
            .for_each(|(out, i)| *out = make(i));
    });
}

/// How values are distributed, so that inputs of variance 1 give outputs near 1, and near 1/4 where they are added to
/// the residual stream, as in a trained model. Random E2M1 codes have a mean square of 8.6.
#[derive(Clone, Copy)]
struct Spread {
    /// Standard deviation of 16-bit values.
    deviation: f32,
    /// Exponent of half of the MXFP4 scales; the others' is one less.
    exponent: i32,
}

impl Spread {
    fn of(id: TensorId, cols: usize) -> Self {
        let unit = 1.0 / (cols as f32).sqrt();
        let of_scales = |scale: f32| (scale / 3.0).log2().round() as i32;
        let (deviation, exponent) = match id {
            TensorId::Embedding => (1.0, 0),
            TensorId::AttnOut { .. } => (0.25 * unit, 0),
            TensorId::Mlp1 { .. } => (0.0, of_scales(unit)),
            TensorId::Mlp2 { .. } => (0.0, of_scales(0.25 * unit)),
            _ => (unit, 0),
        };
        Self { deviation, exponent }
    }
}

/// SplitMix64's finalizer.
fn mix(mut v: u64) -> u64 {
    v = (v ^ v >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    v = (v ^ v >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    v ^ v >> 31
}

/// The random number at a place of a sequence.
fn draw(key: u64, at: u64) -> u64 {
    mix(key ^ at.wrapping_mul(STEP))
}

/// A number of about a normal distribution of deviation 1: the sum of eight uniform ones of 16 bits.
fn unit(key: u64, at: u64) -> f32 {
    const DEVIATION: f32 = 53_510.084; // 65536 * sqrt(8 / 12)
    let halves = |v: u64| {
        [0, 16, 32, 48]
            .map(|shift| (v >> shift & 0xffff) as i32)
            .iter()
            .sum::<i32>()
    };
    let sum = halves(draw(key, 2 * at)) + halves(draw(key, 2 * at + 1));
    (sum - 4 * 65_535) as f32 * (1.0 / DEVIATION)
}

/// The bias of a layer's router by Zipf's law: `-skew * ln(n)` for the n-th favoured expert. Logits without it have a
/// deviation of about 1. Each layer favours another expert. Choosing 4 experts, the busiest has 4 times the mean of
/// 32 at a skew of 0.5 and 6.6 times at 0.95, and 13 times the mean of 128 at 0.5.
fn router_bias(n_experts: usize, layer: usize, skew: f32) -> Vec<f32> {
    let mut bias = vec![0.0; n_experts];
    for place in 0..n_experts {
        bias[(place + layer) % n_experts] = -skew * ((place + 1) as f32).ln();
    }
    bias
}
