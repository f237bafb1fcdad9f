//! Error bounds of each operation, computed from its operands on the device.
//!
//! Every operation is checked alone: its inputs are read back from the device and count as exact, so a bound covers
//! only the rounding of the operation itself. A sum is off by some float32 roundoffs of the sum of its terms'
//! magnitudes, in any order (a matrix unit may also truncate), and the result by the roundoff of its format.

use super::oracle::{self, Reals};
use super::wgmma::{SLABS_CHAINED, chains, exact_mxfp4, exact_w16, products, terms};
use getp::backend::gpu::args::{Format, SLAB};
use getp::backend::gpu::catalogue::ExactSums;
use getp::backend::gpu::family::FAMILIES;
use getp::backend::gpu::shapes::Numbers;
use getp::backend::gpu::target::Target;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use rand_distr::StandardNormal;
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
        let (unit, least) = match (self.numbers.format, several) {
            // Where matrix cores flush subnormals to zero, the kernels do, too.
            (Format::F16, false) if self.target.flushes_subnormals() => (F16, F16_NORMAL),
            (Format::F16, false) => (F16, F16_LEAST),
            (Format::F16, true) => (4.0 * F32, F16_LEAST),
            (_, false) => (BF16, 0.0),
            (_, true) => (F32, 0.0),
        };
        self.rounded(x, self.numbers.format, unit, least)
    }

    /// Rounds to stored queries, keys and values.
    pub fn cached(&self, x: Close) -> Close {
        match self.numbers.kv {
            Format::F16 => self.rounded(x, Format::F16, F16, F16_LEAST),
            Format::Bf16 => self.rounded(x, Format::Bf16, BF16, 0.0),
            _ => x,
        }
    }

    /// Rounds to a stored expert output.
    pub fn output(&self, x: Close) -> Close {
        if self.numbers.exact {
            return Close::new(x.value, x.error + F32 * x.value.abs());
        }
        self.rounded(x, Format::F16, F16, F16_LEAST)
    }

    fn rounded(&self, x: Close, format: Format, unit: f64, least: f64) -> Close {
        let value = if format == Format::F16 {
            x.value.clamp(-F16_LARGEST, F16_LARGEST)
        } else {
            x.value
        };
        Close::new(value, x.error * (1.0 + unit) + unit * x.value.abs() + least)
    }

    /// The error of a sum of `n` products, relative to the sum of their magnitudes. `exact` has float32 sums of a slab's
    /// products, which it adds in float64; or in float32 as the table says, and the bound is for both kinds of weights.
    fn sum(&self, n: usize) -> f64 {
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
            let weights = if self.numbers.format == Format::F16 {
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
            Format::F32 => (4.0 * F32 * most, 4.0 * F32, 0.0),
            Format::F16 => ((q.len() as f64 + 8.0) * F32 * most, F16 + 8.0 * F32, F16_NORMAL),
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
        assert_eq!(got.len(), expected.len(), "{what}: how many values");
        for (i, (&got, expected)) in got.iter().zip(expected).enumerate() {
            let error = (f64::from(got) - expected.value).abs();
            assert!(
                error <= expected.error,
                "{what}: value {i} is {got:e}, {error:e} from {:e}, which is more than {:e}",
                expected.value,
                expected.error
            );
            let part = if error == 0.0 { 0.0 } else { error / expected.error };
            let worst = self.0.entry(what.to_owned()).or_default();
            *worst = worst.max(part);
        }
    }

    pub fn print(&self, name: &str) {
        let parts: Vec<_> = self.0.iter().map(|(what, part)| format!("{what} {part:.2}")).collect();
        println!("{name}: largest part of the bound: {}", parts.join(", "));
    }
}

/// Sums that are added in float32, emulated, keep to their bounds, and with the worst operands come near them.
#[test]
fn emulated_sums_keep_to_their_bounds() {
    let mut families = FAMILIES.iter().filter(|family| family.table().exact_sums.is_some());
    let family = *families.next().expect("a family adds them so");
    let bounds = |exact: bool| Bounds {
        numbers: Numbers {
            format: Format::F16,
            kv: if exact { Format::F32 } else { Format::F16 },
            terms: if exact { 2 } else { 1 },
            exact,
        },
        target: Target {
            family,
            multiprocessors: 132,
        },
    };
    // Terms, the products of a chain, and the sum of weights times terms.
    type Sum = fn(&[f32], &[Vec<f32>]) -> f32;
    let ways: [(&str, usize, usize, Sum); 3] = [
        ("fast", 1, usize::MAX, |w, x| chains(w, x, w.len())[0]),
        ("exact, 16 bits", 2, SLAB, exact_w16),
        ("exact, MXFP4", 2, SLABS_CHAINED * SLAB, exact_mxfp4),
    ];
    let mut rng = ChaCha8Rng::seed_from_u64(9);
    let mut normal = |n: usize| -> Vec<f32> { (0..n).map(|_| rng.sample(StandardNormal)).collect() };
    let positive = |v: &[f32]| -> Vec<f32> { v.iter().map(|x| x.abs()).collect() };
    // The first product of each chain is 1, the others are a little less than 2^-25, and all of them are lost.
    let lost = |n: usize, chain: usize| -> [Vec<f32>; 2] {
        [1.0 / 8192.0, 1.9375 / 8192.0].map(|other| (0..n).map(|i| if i % chain == 0 { 1.0 } else { other }).collect())
    };
    for n in [64, 90, 1000, 2880, 4096] {
        let random = [terms(&normal(n))[0].clone(), normal(n)];
        for (way, count, chain, sum) in ways {
            let share = |[w, x]: &[Vec<f32>; 2]| {
                let x = &terms(x)[..count];
                let size: f64 = products(w, x).map(f64::abs).sum();
                let error = (f64::from(sum(w, x)) - products(w, x).sum::<f64>()).abs();
                error / (bounds(count > 1).sum(n) * size)
            };
            let shares = [&random, &random.each_ref().map(|v| positive(v)), &lost(n, chain)].map(share);
            println!("{way}, {n} products: normal, positive, lost {shares:.3?} of the bound");
            assert!(shares.iter().all(|share| *share <= 1.0));
            assert!(shares[2] > 0.25, "the bound is wider than it has to be");
        }
    }
}
