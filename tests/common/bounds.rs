//! What each operation of a GPU gives, by the oracle in float64, and bounds of its errors, computed from its operands
//! on the device.
//!
//! Every operation is checked alone: its inputs are read back from the device and count as exact, so a bound covers
//! only the rounding of the operation itself. A sum is off by some float32 roundoffs of the sum of its terms'
//! magnitudes, in any order (a matrix core may also truncate), and the result by the roundoff of its format.

#![allow(dead_code)] // each of its users uses a part of it

use super::oracle::{self, Reals};
use getp::backend::gpu::args::{KV_PAGE, SLAB};
use getp::backend::gpu::catalogue::{Elements, ExactSums};
use getp::backend::gpu::ops::inspect::Pages;
use getp::backend::gpu::shapes::Numbers;
use getp::backend::gpu::target::Target;
use getp::batch::{Chunk, StepPlan};
use getp::config::ModelConfig;
use getp::model::Rope;
use std::collections::BTreeMap;

/// Half the distance from 1 to the next float32.
pub const F32: f64 = 1.0 / (1 << 24) as f64;
/// Half the distance from 1 to the next FP16 and BF16.
const F16: f64 = 1.0 / (1 << 11) as f64;
const BF16: f64 = 1.0 / (1 << 8) as f64;
/// The least normal FP16, and half the distance between smaller ones.
const F16_NORMAL: f64 = 1.0 / (1 << 14) as f64;
const F16_LEAST: f64 = F32 / 2.0;
const F16_LARGEST: f64 = 65504.0;

/// A result, and a bound of the device's error.
#[derive(Clone, Copy, Debug)]
pub struct Close {
    pub value: f64,
    pub error: f64,
}

impl Close {
    /// A result with this error at most.
    pub fn new(value: f64, error: f64) -> Self {
        Self { value, error }
    }

    /// A number that the device has.
    pub fn exactly(value: f32) -> Self {
        Self::new(value.into(), 0.0)
    }

    /// Added to a number of float32.
    pub fn onto(self, x: f32) -> Self {
        let x = f64::from(x);
        Self::new(self.value + x, self.error + 2.0 * F32 * (self.value.abs() + x.abs()))
    }
}

/// A row plus its experts' outputs, each with its share.
pub fn combined(x: &[f32], outputs: &[(f32, &[f32])]) -> Vec<Close> {
    let sum = |(i, &x): (usize, &f32)| {
        let x = f64::from(x);
        let terms = outputs.iter().map(|(share, y)| f64::from(*share) * f64::from(y[i]));
        let sum: f64 = terms.clone().sum();
        let size: f64 = x.abs() + terms.map(f64::abs).sum::<f64>();
        Close::new(x + sum, (outputs.len() + 2) as f64 * F32 * size)
    };
    match outputs {
        [] => x.iter().copied().map(Close::exactly).collect(),
        _ => x.iter().enumerate().map(sum).collect(),
    }
}

/// The arithmetic of a replica.
#[derive(Clone, Copy, Debug)]
pub struct Bounds {
    pub numbers: Numbers,
    pub target: Target,
}

impl Bounds {
    /// Rounds to stored activations: 16-bit terms; FP16 saturates.
    pub fn stored(&self, x: Close) -> Close {
        let several = self.numbers.terms > 1;
        let (unit, least) = match (self.numbers.elements, several) {
            // Where matrix cores flush subnormals to zero, the kernels do, too.
            (Elements::F16, false) if self.target.flushes_subnormals() => (F16, F16_NORMAL),
            (Elements::F16, false) => (F16, F16_LEAST),
            (Elements::F16, true) => (4.0 * F32, F16_LEAST),
            (_, false) => (BF16, 0.0),
            (_, true) => (F32, 0.0),
        };
        self.rounded(x, self.numbers.elements, unit, least)
    }

    /// Rounds to stored queries, keys and values.
    pub fn cached(&self, x: Close) -> Close {
        match self.numbers.kv {
            Elements::F16 => self.rounded(x, Elements::F16, F16, F16_LEAST),
            Elements::Bf16 => self.rounded(x, Elements::Bf16, BF16, 0.0),
            _ => x,
        }
    }

    /// Rounds to a stored expert output.
    pub fn output(&self, x: Close) -> Close {
        if self.numbers.exact {
            return Close::new(x.value, x.error + F32 * x.value.abs());
        }
        self.rounded(x, Elements::F16, F16, F16_LEAST)
    }

    fn rounded(&self, x: Close, elements: Elements, unit: f64, least: f64) -> Close {
        let value = if elements == Elements::F16 {
            x.value.clamp(-F16_LARGEST, F16_LARGEST)
        } else {
            x.value
        };
        Close::new(value, x.error * (1.0 + unit) + unit * x.value.abs() + least)
    }

    /// The error of a sum of `n` products, relative to the sum of their magnitudes. `exact` has float32 sums of a
    /// slab's products, which it adds in float64; or in float32 as the table says, and the bound is for both kinds of
    /// weights.
    pub fn sum(&self, n: usize) -> f64 {
        let table = self.target.family.table();
        let [share, more] = table.sum_error;
        let slabs = n.div_ceil(SLAB);
        let (at_once, additions) = match (self.numbers.exact, table.exact_sums) {
            (false, _) => (n, 0),
            (true, Some(ExactSums { chained, together })) => {
                let in_groups = slabs.min(together) + slabs.div_ceil(together);
                (chained * SLAB, in_groups.max(slabs.div_ceil(chained)))
            }
            (true, None) => (SLAB, 0),
        };
        (n.min(at_once) as f64 / share + more + additions as f64) * F32
    }

    /// `w x + bias`.
    pub fn product(&self, w: &HostMatrix, member: usize, bias: &[f32], x: &[f32]) -> Vec<Close> {
        let x: Vec<f64> = x.iter().map(|&x| x.into()).collect();
        let sizes: Vec<f64> = x.iter().map(|x| x.abs()).collect();
        let all: f64 = sizes.iter().sum();
        let values = oracle::linear(Reals, w.member(&w.values, member), bias, &x);
        let sums = oracle::linear(Reals, w.member(&w.sizes, member), &[], &sizes);
        let close = |(row, (&value, &sum)): (usize, (&f64, &f64))| {
            // FP16 weights far below their row's largest may be rounded, by 2^-24 of that one.
            let weights = if self.numbers.elements == Elements::F16 {
                2.0 * F32 * w.largest[member * w.rows + row] * all
            } else {
                0.0
            };
            Close::new(value, self.sum(x.len()) * sum + weights + 2.0 * F32 * value.abs())
        };
        values.iter().zip(&sums).enumerate().map(close).collect()
    }

    /// The router's product, whose operands are float32.
    pub fn router(&self, w: &HostMatrix, bias: &[f32], x: &[f32]) -> Vec<Close> {
        let x: Vec<f64> = x.iter().map(|&x| x.into()).collect();
        let sizes: Vec<f64> = x.iter().map(|x| x.abs()).collect();
        let values = oracle::linear(Reals, &w.values, bias, &x);
        let sums = oracle::linear(Reals, &w.sizes, &[], &sizes);
        let unit = if self.numbers.exact {
            2.0 * F32
        } else {
            self.sum(x.len())
        };
        let close = |(&value, &sum): (&f64, &f64)| Close::new(value, unit * sum + 2.0 * F32 * value.abs());
        values.iter().zip(&sums).map(close).collect()
    }

    /// The shares of the experts that were picked by these logits, or an expert that is wrongly left out.
    pub fn shares(&self, logits: &[Close], picked: &[usize]) -> Result<Vec<Close>, String> {
        if !picked.windows(2).all(|pair| pair[0] < pair[1]) || picked.iter().any(|&e| e >= logits.len()) {
            return Err(format!("{picked:?} are no experts in their order"));
        }
        let least = picked
            .iter()
            .map(|&e| logits[e].value + logits[e].error)
            .fold(f64::INFINITY, f64::min);
        let mut left_out = (0..logits.len()).filter(|e| !picked.contains(e));
        if let Some(e) = left_out.find(|&e| logits[e].value - logits[e].error > least) {
            return Err(format!("{e} is left out of {picked:?}"));
        }
        let of_picked: Vec<f64> = picked.iter().map(|&e| logits[e].value).collect();
        let error = picked.iter().map(|&e| logits[e].error).fold(0.0, f64::max);
        let shares = oracle::Arithmetic::softmax(Reals, &of_picked);
        let close = |&share: &f64| {
            Close::new(
                share,
                share * ((2.0 * error).exp_m1() + (16 + picked.len()) as f64 * F32),
            )
        };
        Ok(shares.iter().map(close).collect())
    }

    /// The largest of these logits, if it may be that of this token.
    pub fn largest(&self, logits: &[Close], token: usize) -> Result<Close, String> {
        let least = |logit: &Close| logit.value - logit.error;
        let largest = logits.iter().map(least).fold(f64::NEG_INFINITY, f64::max);
        let of_token = logits[token];
        match of_token.value + of_token.error >= largest {
            true => Ok(of_token),
            false => Err(format!("another logit than that of {token} is larger")),
        }
    }

    /// The norm of a row.
    pub fn normed(&self, x: &[Close], weight: &[f32]) -> Vec<Close> {
        let values: Vec<f64> = x.iter().map(|x| x.value).collect();
        let root = (values.iter().map(|x| x * x).sum::<f64>() / values.len() as f64 + 1e-5).sqrt();
        // Sums of squares go through a tree of threads, each of which has 16 of them.
        let unit = if self.numbers.exact { 4.0 } else { 32.0 } * F32;
        let inherited = x.iter().map(|x| x.error).fold(0.0, f64::max) / root;
        let normed = oracle::Arithmetic::norm(Reals, &values, weight);
        let close = |(&t, &w): (&f64, &f32)| Close::new(t, unit * t.abs() + inherited * (f64::from(w.abs()) + t.abs()));
        normed.iter().zip(weight).map(close).collect()
    }

    /// The same as it is stored for a product.
    pub fn stored_norm(&self, x: &[Close], weight: &[f32]) -> Vec<Close> {
        self.normed(x, weight).into_iter().map(|t| self.stored(t)).collect()
    }

    /// What stored queries of heads of this width are multiplied by.
    pub fn query_factor(&self, head_dim: usize) -> f64 {
        match self.numbers.kv {
            Elements::F32 => 1.0,
            _ => std::f64::consts::LOG2_E / (head_dim as f64).sqrt(),
        }
    }

    /// Stored queries, keys and values of a position, from a row of all three.
    pub fn rotated(&self, config: &ModelConfig, position: usize, row: &[Close]) -> [Vec<Close>; 3] {
        let (q_dim, both) = (config.q_dim(), config.q_dim() + config.kv_dim());
        let rotated = rotate(config, position, &row[..both]);
        let factor = self.query_factor(config.head_dim);
        let scaled = |c: &Close| self.cached(Close::new(c.value * factor, c.error + 4.0 * F32 * c.value.abs()));
        let cached = |c: &Close| self.cached(*c);
        [
            rotated[..q_dim].iter().map(scaled).collect(),
            rotated[q_dim..].iter().map(cached).collect(),
            row[both..].iter().map(cached).collect(),
        ]
    }

    /// The gated unit of pairs of gate and up.
    pub fn gated(&self, pairs: &[Close], limit: f32) -> Vec<Close> {
        let limit = f64::from(limit);
        let unit = |pair: &[Close]| {
            let (g, u) = (pair[0].value.min(limit), pair[1].value.clamp(-limit, limit));
            let silu = g / (1.0 + (-1.702 * g).exp());
            let value = silu * (u + 1.0);
            // The slope of the gate's part is nowhere above 1.1; exponential and quotient are the hardware's in `fast`.
            let inherited = 1.1 * pair[0].error * (u.abs() + 1.0 + pair[1].error) + silu.abs() * pair[1].error;
            let own = (6.0 * g.abs() + 16.0) * F32 * (value.abs() + silu.abs());
            self.stored(Close::new(value, inherited + own))
        };
        pairs.chunks_exact(2).map(unit).collect()
    }

    /// Attention of one query head: `q` unscaled, as the oracle takes it, and the keys and values that it sees.
    pub fn attention(&self, q: &[f64], seen: &[(&[f64], &[f64])], sink: f32) -> Vec<Close> {
        let scores = scores(q, seen, sink);
        let shares = oracle::Arithmetic::softmax(Reals, &scores);
        let largest = shares.iter().copied().fold(0.0, f64::max);
        let values = oracle::attend(Reals, q, seen, sink);
        let (n, root) = (seen.len() as f64, (q.len() as f64).sqrt());
        let size = |k: &[f64]| q.iter().zip(k).map(|(q, k)| (q * k).abs()).sum::<f64>() / root;
        let most = seen.iter().map(|(k, _)| size(k)).fold(0.0, f64::max);
        // The error of scores, and so the relative error of shares: in the share itself and in their sum.
        let (score, share, flushed) = match self.numbers.kv {
            Elements::F32 => (4.0 * F32 * most, 4.0 * F32, 0.0),
            Elements::F16 => ((q.len() as f64 + 8.0) * F32 * most, F16 + 8.0 * F32, F16_NORMAL),
            _ => ((q.len() as f64 + 8.0) * F32 * most, BF16 + 8.0 * F32, 0.0),
        };
        let relative = 2.0 * (score.exp_m1() + share + (n + 8.0) * F32);
        let of = |d: usize| {
            let each = seen.iter().zip(&shares).map(|((_, v), share)| (share, v[d].abs()));
            let sum: f64 = each.clone().map(|(share, v)| share * v).sum();
            // Shares below 2^-14 of the largest are subnormal in FP16.
            let lost = each.filter(|(share, _)| **share <= 2.0 * flushed * largest);
            let lost: f64 = lost.map(|(share, v)| share * v).sum();
            self.stored(Close::new(values[d], relative * sum + lost))
        };
        (0..values.len()).map(of).collect()
    }

    /// Attention of all heads of a position over all that come before it. Of keys and values those outside of the
    /// layer's window are not looked at.
    pub fn attended(
        &self,
        config: &ModelConfig,
        layer: usize,
        q: &[f64],
        [keys, values]: [&[Vec<f64>]; 2],
        sinks: &[f32],
    ) -> Vec<Close> {
        let (d, end) = (config.head_dim, keys.len());
        let first = config.window(layer).map_or(0, |window| end.saturating_sub(window));
        let of_head = |(head, q): (usize, &[f64])| {
            let kv = head / (config.n_attn_heads / config.n_kv_heads) * d;
            let seen: Vec<_> = (first..end)
                .map(|p| (&keys[p][kv..kv + d], &values[p][kv..kv + d]))
                .collect();
            self.attention(q, &seen, sinks[head])
        };
        q.chunks_exact(d).enumerate().flat_map(of_head).collect()
    }
}

fn rotate(config: &ModelConfig, position: usize, heads: &[Close]) -> Vec<Close> {
    let half = config.head_dim / 2;
    let (mut cos, mut sin) = (vec![0.0; half], vec![0.0; half]);
    Rope::new(config).unwrap().angles(position as u32, &mut cos, &mut sin);
    let mut out = vec![Close::new(0.0, 0.0); heads.len()];
    for (head, out) in heads.chunks_exact(2 * half).zip(out.chunks_exact_mut(2 * half)) {
        for i in 0..half {
            let (x, y, cos, sin) = (head[i], head[i + half], f64::from(cos[i]), f64::from(sin[i]));
            let close = |a: Close, cos: f64, b: Close, sin: f64| {
                let (first, second) = (a.value * cos, b.value * sin);
                let inherited = a.error * cos.abs() + b.error * sin.abs();
                Close::new(
                    first + second,
                    3.0 * F32 * (first.abs() + second.abs() + inherited) + inherited,
                )
            };
            out[i] = close(x, cos, y, -sin);
            out[i + half] = close(y, cos, x, sin);
        }
    }
    out
}

/// All heads' keys and values of a position of a chunk's sequence, as the layer's cache has them.
pub fn in_cache(
    config: &ModelConfig,
    pages: &Pages,
    plan: &StepPlan,
    chunk: &Chunk,
    layer: usize,
    position: usize,
) -> [Vec<f32>; 2] {
    let block = position / KV_PAGE;
    let at = if config.is_windowed(layer) {
        chunk.window.start + block % chunk.window.len()
    } else {
        chunk.full.start + block
    };
    let page = plan.tables[at] as usize;
    let of_heads = (0..config.n_kv_heads).map(|head| pages.key_value(page, head, position));
    of_heads.fold([vec![], vec![]], |[keys, values]: [Vec<f32>; 2], [k, v]| {
        [[keys, k].concat(), [values, v].concat()]
    })
}

fn scores(q: &[f64], seen: &[(&[f64], &[f64])], sink: f32) -> Vec<f64> {
    let mut scores: Vec<_> = seen
        .iter()
        .map(|(k, _)| oracle::Arithmetic::score(Reals, q, k))
        .collect();
    scores.push(sink.into());
    scores
}

/// Matrices of one shape as the checkpoint has them.
pub struct HostMatrix {
    values: Vec<f32>,
    sizes: Vec<f32>,
    /// The largest magnitude in each row.
    largest: Vec<f64>,
    rows: usize,
    cols: usize,
}

impl HostMatrix {
    pub fn new(values: Vec<f32>, [rows, cols]: [usize; 2]) -> Self {
        let sizes: Vec<f32> = values.iter().map(|v| v.abs()).collect();
        let largest = |row: &[f32]| row.iter().copied().fold(0.0, f32::max).into();
        Self {
            largest: sizes.chunks_exact(cols).map(largest).collect(),
            values,
            sizes,
            rows,
            cols,
        }
    }

    fn member<'a>(&self, of: &'a [f32], member: usize) -> &'a [f32] {
        let values = self.rows * self.cols;
        &of[member * values..][..values]
    }

    /// A row of the first matrix.
    pub fn row(&self, row: usize) -> &[f32] {
        &self.values[row * self.cols..][..self.cols]
    }
}

/// For each operation the largest error of any value, relative to its bound.
#[derive(Default)]
pub struct Worst(BTreeMap<String, f64>);

impl Worst {
    #[track_caller]
    pub fn check(&mut self, what: &str, got: &[f32], expected: &[Close]) {
        self.compare(what, got, expected).unwrap_or_else(|why| panic!("{why}"));
    }

    /// Says which value is beyond its bound, if one is.
    pub fn compare(&mut self, what: &str, got: &[f32], expected: &[Close]) -> Result<(), String> {
        if got.len() != expected.len() {
            return Err(format!("{what}: {} values instead of {}", got.len(), expected.len()));
        }
        for (i, (&got, expected)) in got.iter().zip(expected).enumerate() {
            let error = (f64::from(got) - expected.value).abs();
            // What is no number is beyond any bound.
            if error.partial_cmp(&expected.error).is_none_or(|order| order.is_gt()) {
                return Err(format!(
                    "{what}: value {i} is {got:e}, {error:e} from {:e}, which is more than {:e}",
                    expected.value, expected.error
                ));
            }
            let part = if error == 0.0 { 0.0 } else { error / expected.error };
            let worst = self.0.entry(what.to_owned()).or_default();
            *worst = worst.max(part);
        }
        Ok(())
    }

    /// Of all operations.
    pub fn largest(&self) -> f64 {
        self.0.values().copied().fold(0.0, f64::max)
    }

    pub fn print(&self, name: &str) {
        let parts: Vec<_> = self.0.iter().map(|(what, part)| format!("{what} {part:.2}")).collect();
        println!("{name}: largest part of the bound: {}", parts.join(", "));
    }
}
