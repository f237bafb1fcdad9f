//! A plain implementation of the model's operations and of its whole forward pass, to test backends against.
//!
//! It is written once, generic over an [`Arithmetic`]: [`Reals`] computes in float64, and [`Letter`] rounds exactly
//! where the eval program rounds, so that `exact` can be compared with it bit for bit. Only the checkpoint and the
//! configuration are the library's.

#![allow(dead_code)] // each test uses a part of it

use getp::checkpoint::{Checkpoint, TensorId};
use getp::config::ModelConfig;

/// The type of numbers, and where they are rounded.
pub trait Arithmetic: Copy {
    type Value: Copy + PartialOrd + Into<f64>;

    fn of(self, x: f32) -> Self::Value;
    fn add(self, a: Self::Value, b: Self::Value) -> Self::Value;
    /// `acc + a * b`, in loops whose accumulator the eval program holds in float32.
    fn add_product(self, acc: Self::Value, a: Self::Value, b: Self::Value) -> Self::Value;
    /// The sum of products, in order.
    fn dot(self, pairs: impl Iterator<Item = (Self::Value, Self::Value)>) -> Self::Value;
    /// `q . k / sqrt(D)`
    fn score(self, q: &[Self::Value], k: &[Self::Value]) -> Self::Value;
    fn norm(self, x: &[Self::Value], weight: &[f32]) -> Vec<Self::Value>;
    fn softmax(self, x: &[Self::Value]) -> Vec<Self::Value>;
    /// cos and sin of each pair's angle, times YaRN's concentration.
    fn angles(self, config: &ModelConfig, position: usize) -> Vec<[Self::Value; 2]>;
    /// `(a cos - b sin, b cos + a sin)`
    fn rotate(self, a: Self::Value, b: Self::Value, angle: [Self::Value; 2]) -> [Self::Value; 2];
    /// `gate * sigmoid(1.702 gate) * (up + 1)`, both clamped.
    fn gated_unit(self, gate: Self::Value, up: Self::Value, limit: f32) -> Self::Value;
}

/// float64 throughout.
#[derive(Clone, Copy)]
pub struct Reals;

impl Arithmetic for Reals {
    type Value = f64;

    // Inlined always: tests are compiled with few optimizations, and spend much of their time here.
    #[inline(always)]
    fn of(self, x: f32) -> f64 {
        x.into()
    }

    #[inline(always)]
    fn add(self, a: f64, b: f64) -> f64 {
        a + b
    }

    #[inline(always)]
    fn add_product(self, acc: f64, a: f64, b: f64) -> f64 {
        acc + a * b
    }

    #[inline(always)]
    fn dot(self, mut pairs: impl Iterator<Item = (f64, f64)>) -> f64 {
        // Four sums at a time: each addition would wait for the one before.
        let mut sums = [0.0; 4];
        'all: loop {
            for sum in &mut sums {
                let Some((a, b)) = pairs.next() else { break 'all };
                *sum += a * b;
            }
        }
        (sums[0] + sums[1]) + (sums[2] + sums[3])
    }

    fn score(self, q: &[f64], k: &[f64]) -> f64 {
        self.dot(q.iter().copied().zip(k.iter().copied())) / (q.len() as f64).sqrt()
    }

    fn norm(self, x: &[f64], weight: &[f32]) -> Vec<f64> {
        let mean = x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64;
        let root = (mean + 1e-5).sqrt();
        x.iter().zip(weight).map(|(x, &w)| x / root * f64::from(w)).collect()
    }

    fn softmax(self, x: &[f64]) -> Vec<f64> {
        let max = x.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let sum: f64 = x.iter().map(|x| (x - max).exp()).sum();
        x.iter().map(|x| (x - max).exp() / sum).collect()
    }

    fn angles(self, config: &ModelConfig, position: usize) -> Vec<[f64; 2]> {
        let (half, theta) = (config.head_dim / 2, f64::from(config.rope_theta));
        let scale = f64::from(config.rope_scaling_factor);
        let concentration = if scale > 1.0 { 0.1 * scale.ln() + 1.0 } else { 1.0 };
        let pair_that_turns = |times: f64| {
            let period = config.initial_context_length as f64 / (times * 2.0 * std::f64::consts::PI);
            half as f64 * period.ln() / theta.ln()
        };
        let (low, high) = (pair_that_turns(32.0), pair_that_turns(1.0));
        let angle = |i: usize| {
            let frequency = theta.powf((2 * i) as f64 / config.head_dim as f64);
            let ramp = if scale > 1.0 {
                ((i as f64 - low) / (high - low)).clamp(0.0, 1.0)
            } else {
                0.0
            };
            position as f64 * (ramp / (scale * frequency) + (1.0 - ramp) / frequency)
        };
        (0..half)
            .map(|i| [angle(i).cos() * concentration, angle(i).sin() * concentration])
            .collect()
    }

    fn rotate(self, a: f64, b: f64, [cos, sin]: [f64; 2]) -> [f64; 2] {
        [a * cos - b * sin, b * cos + a * sin]
    }

    fn gated_unit(self, gate: f64, up: f64, limit: f32) -> f64 {
        let (gate, up) = (gate.min(limit.into()), up.clamp((-limit).into(), limit.into()));
        gate / (1.0 + (-1.702 * gate).exp()) * (up + 1.0)
    }
}

/// The eval program's arithmetic, bit for bit: float32, and float64 where the program has it.
#[derive(Clone, Copy)]
pub struct Letter {
    /// Whether products that are added to float32 are fused multiply-adds.
    pub fused: bool,
}

impl Letter {
    fn sum_of_rounded_products(pairs: impl Iterator<Item = (f32, f32)>) -> f64 {
        pairs.fold(0.0, |sum, (a, b)| sum + f64::from(a * b))
    }
}

impl Arithmetic for Letter {
    type Value = f32;

    fn of(self, x: f32) -> f32 {
        x
    }

    fn add(self, a: f32, b: f32) -> f32 {
        a + b
    }

    fn add_product(self, acc: f32, a: f32, b: f32) -> f32 {
        if self.fused { a.mul_add(b, acc) } else { acc + a * b }
    }

    fn dot(self, pairs: impl Iterator<Item = (f32, f32)>) -> f32 {
        Self::sum_of_rounded_products(pairs) as f32
    }

    fn score(self, q: &[f32], k: &[f32]) -> f32 {
        let sum = Self::sum_of_rounded_products(q.iter().copied().zip(k.iter().copied()));
        (sum / f64::from((q.len() as f32).sqrt())) as f32
    }

    fn norm(self, x: &[f32], weight: &[f32]) -> Vec<f32> {
        let squares = Self::sum_of_rounded_products(x.iter().map(|&x| (x, x)));
        let mean = (squares / x.len() as f64 + f64::from(1e-5_f32)) as f32;
        let scale = f64::from(1.0 / mean.sqrt());
        let element = |(&x, &w): (&f32, &f32)| (f64::from(w) * (scale * f64::from(x))) as f32;
        x.iter().zip(weight).map(element).collect()
    }

    fn softmax(self, x: &[f32]) -> Vec<f32> {
        let max = x.iter().copied().map(f64::from).fold(f64::NEG_INFINITY, f64::max);
        let exp: Vec<f32> = x.iter().map(|&x| ((f64::from(x) - max) as f32).exp()).collect();
        let sum: f64 = exp.iter().copied().map(f64::from).sum();
        exp.iter().map(|&e| (f64::from(e) / sum) as f32).collect()
    }

    fn angles(self, config: &ModelConfig, position: usize) -> Vec<[f32; 2]> {
        let (half, theta, scale) = (config.head_dim / 2, config.rope_theta, config.rope_scaling_factor);
        let scaled = scale > 1.0;
        let concentration = if scaled { 0.1 * scale.ln() + 1.0 } else { 1.0 };
        let pair_that_turns = |times: f32| {
            let pi = std::f64::consts::PI;
            let period = (config.initial_context_length as f64 / (f64::from(times * 2.0) * pi)) as f32;
            half as f32 * period.ln() / theta.ln()
        };
        let (low, high) = (pair_that_turns(32.0), pair_that_turns(1.0));
        let angle = |i: usize| {
            let frequency = theta.powf((2 * i) as f32 / config.head_dim as f32);
            let kept = 1.0 - ((i as f32 - low) / (high - low)).clamp(0.0, 1.0);
            let inverse = if scaled {
                1.0 / (scale * frequency) * (1.0 - kept) + 1.0 / frequency * kept
            } else {
                1.0 / frequency
            };
            position as f32 * inverse
        };
        (0..half)
            .map(|i| [angle(i).cos() * concentration, angle(i).sin() * concentration])
            .collect()
    }

    /// Fused as GCC 12 and later do it. The library does the same on machines without FMA, in software.
    fn rotate(self, a: f32, b: f32, [cos, sin]: [f32; 2]) -> [f32; 2] {
        [a.mul_add(cos, -(b * sin)), b.mul_add(cos, a * sin)]
    }

    fn gated_unit(self, gate: f32, up: f32, limit: f32) -> f32 {
        let (gate, up) = (gate.min(limit), up.clamp(-limit, limit));
        let sigmoid = 1.0 / (1.0 + (-1.702 * gate).exp());
        gate * sigmoid * (up + 1.0)
    }
}

/// `w[rows, x] x + bias`; an empty `bias` is none.
pub fn linear<A: Arithmetic>(a: A, w: &[f32], bias: &[f32], x: &[A::Value]) -> Vec<A::Value> {
    let row = |(i, w): (usize, &[f32])| {
        let sum = a.dot(w.iter().map(|&w| a.of(w)).zip(x.iter().copied()));
        bias.get(i).map_or(sum, |&bias| a.add(sum, a.of(bias)))
    };
    w.chunks_exact(x.len()).enumerate().map(row).collect()
}

/// Rotates the pairs `(i, i + D / 2)` of each head.
pub fn rope<A: Arithmetic>(a: A, config: &ModelConfig, position: usize, heads: &mut [A::Value]) {
    let angles = a.angles(config, position);
    for head in heads.chunks_exact_mut(config.head_dim) {
        let (first, second) = head.split_at_mut(angles.len());
        for ((x, y), &angle) in first.iter_mut().zip(second).zip(&angles) {
            [*x, *y] = a.rotate(*x, *y, angle);
        }
    }
}

/// The key and value of a KV head at one position.
type KeyValue<'a, A> = (&'a [<A as Arithmetic>::Value], &'a [<A as Arithmetic>::Value]);

/// Attention of one query head over keys and values in the order of positions. The sink counts in the softmax and has
/// no value.
pub fn attend<A: Arithmetic>(a: A, q: &[A::Value], seen: &[KeyValue<'_, A>], sink: f32) -> Vec<A::Value> {
    let mut scores: Vec<_> = seen.iter().map(|(k, _)| a.score(q, k)).collect();
    scores.push(a.of(sink));
    let mut out = vec![a.of(0.0); q.len()];
    for (share, (_, v)) in a.softmax(&scores).into_iter().zip(seen) {
        for (out, &v) in out.iter_mut().zip(*v) {
            *out = a.add_product(*out, share, v);
        }
    }
    out
}

/// Attention of all heads of the last position. `keys` and `values` hold all heads of each position.
pub fn attention<A: Arithmetic>(
    a: A,
    config: &ModelConfig,
    layer: usize,
    q: &[A::Value],
    keys: &[Vec<A::Value>],
    values: &[Vec<A::Value>],
    sinks: &[f32],
) -> Vec<A::Value> {
    let d = config.head_dim;
    let windowed = config.sliding_window > 0 && layer.is_multiple_of(2);
    let first = if windowed {
        keys.len().saturating_sub(config.sliding_window)
    } else {
        0
    };
    let mut out = Vec::new();
    for (head, q) in q.chunks_exact(d).enumerate() {
        let kv = head / (config.n_attn_heads / config.n_kv_heads) * d;
        let seen: Vec<_> = (first..keys.len())
            .map(|p| (&keys[p][kv..kv + d], &values[p][kv..kv + d]))
            .collect();
        out.extend(attend(a, q, &seen, sinks[head]));
    }
    out
}

/// The indices of the `k` largest, the largest first, and of equal ones the lower index first; and their softmax.
pub fn pick<A: Arithmetic>(a: A, logits: &[A::Value], k: usize) -> (Vec<usize>, Vec<A::Value>) {
    let mut order: Vec<usize> = (0..logits.len()).collect();
    // A stable sort keeps the lower index of equal scores first.
    order.sort_by(|&i, &j| logits[j].partial_cmp(&logits[i]).expect("logits are numbers"));
    order.truncate(k);
    let picked: Vec<_> = order.iter().map(|&i| logits[i]).collect();
    (order, a.softmax(&picked))
}

/// SwiGLU of the output of an expert's first matrix, whose rows alternate gate and up.
pub fn mlp1<A: Arithmetic>(a: A, w: &[f32], bias: &[f32], limit: f32, t: &[A::Value]) -> Vec<A::Value> {
    let pairs = linear(a, w, bias, t);
    let unit = |pair: &[A::Value]| a.gated_unit(pair[0], pair[1], limit);
    pairs.chunks_exact(2).map(unit).collect()
}

/// The weighted sum of the experts' outputs, in the order of the experts' index.
pub fn combine<A: Arithmetic>(a: A, mut outputs: Vec<(usize, A::Value, Vec<A::Value>)>) -> Vec<A::Value> {
    outputs.sort_by_key(|&(expert, _, _)| expert);
    let mut sum = vec![a.of(0.0); outputs[0].2.len()];
    for (_, share, output) in &outputs {
        for (sum, &y) in sum.iter_mut().zip(output) {
            *sum = a.add_product(*sum, *share, y);
        }
    }
    sum
}

fn add_to<A: Arithmetic>(a: A, x: &mut [A::Value], y: &[A::Value]) {
    for (x, &y) in x.iter_mut().zip(y) {
        *x = a.add(*x, y);
    }
}

/// The logits of every position of a sequence, `[tokens][vocab]`.
pub fn forward<A: Arithmetic>(a: A, checkpoint: &dyn Checkpoint, tokens: &[u32]) -> Vec<Vec<A::Value>> {
    let config = checkpoint.config();
    let get = |id| {
        checkpoint
            .tensor(id)
            .expect("the checkpoint is complete")
            .to_f32()
            .unwrap()
    };
    let (h, q_dim, kv_dim) = (
        config.hidden_dim,
        config.head_dim * config.n_attn_heads,
        config.head_dim * config.n_kv_heads,
    );
    let table = get(TensorId::Embedding);
    let embed = |&token: &u32| table[token as usize * h..][..h].iter().map(|&x| a.of(x)).collect();
    let mut residuals: Vec<Vec<A::Value>> = tokens.iter().map(embed).collect();

    for layer in 0..config.n_layers {
        let (attn_norm, ffn_norm) = (get(TensorId::AttnNorm { layer }), get(TensorId::FfnNorm { layer }));
        let (w_qkv, b_qkv) = (get(TensorId::Qkv { layer }), get(TensorId::QkvBias { layer }));
        let (w_o, b_o) = (get(TensorId::AttnOut { layer }), get(TensorId::AttnOutBias { layer }));
        let (w_router, b_router) = (get(TensorId::Router { layer }), get(TensorId::RouterBias { layer }));
        let sinks = get(TensorId::Sinks { layer });
        let experts: Vec<_> = (0..config.n_experts)
            .map(|expert| {
                let first = (
                    get(TensorId::Mlp1 { layer, expert }),
                    get(TensorId::Mlp1Bias { layer, expert }),
                );
                let second = (
                    get(TensorId::Mlp2 { layer, expert }),
                    get(TensorId::Mlp2Bias { layer, expert }),
                );
                (first, second)
            })
            .collect();

        let (mut keys, mut values) = (Vec::new(), Vec::new());
        for (position, x) in residuals.iter_mut().enumerate() {
            let mut qkv = linear(a, &w_qkv, &b_qkv, &a.norm(x, &attn_norm));
            rope(a, config, position, &mut qkv[..q_dim + kv_dim]);
            keys.push(qkv[q_dim..q_dim + kv_dim].to_vec());
            values.push(qkv[q_dim + kv_dim..].to_vec());
            let out = attention(a, config, layer, &qkv[..q_dim], &keys, &values, &sinks);
            add_to(a, x, &linear(a, &w_o, &b_o, &out));

            let t = a.norm(x, &ffn_norm);
            let (picked, shares) = pick(a, &linear(a, &w_router, &b_router, &t), config.experts_per_token);
            let run = |(expert, share): (usize, A::Value)| {
                let ((w1, b1), (w2, b2)) = &experts[expert];
                let y = mlp1(a, w1, b1, config.swiglu_limit, &t);
                (expert, share, linear(a, w2, b2, &y))
            };
            let outputs = picked.into_iter().zip(shares).map(run).collect();
            add_to(a, x, &combine(a, outputs));
        }
    }

    let (out_norm, unembedding) = (get(TensorId::OutNorm), get(TensorId::Unembedding));
    residuals
        .iter()
        .map(|x| linear(a, &unembedding, &[], &a.norm(x, &out_norm)))
        .collect()
}
