//! Error bounds of `fast` and `exact`: an arithmetic of float64 values, each with a bound of its error.
//!
//! Each operation adds the rounding errors that the library's kernel may make: running error analysis (Higham, Accuracy
//! and Stability of Numerical Algorithms, 3.3). So the tolerance follows from the operands, and is small enough that a
//! kernel which leaves out one product of a long sum fails.

use crate::oracle::{Arithmetic, Reals};
use getp::backend::cpu::ComputeMode;
use getp::config::ModelConfig;
use getp::options::Precision;
use getp::simd::Level;
use getp::weights::WeightFormat;

/// Half the distance from 1 to the next float32.
const F32: f64 = 1.0 / (1 << 24) as f64;
/// Half the distance from 1 to the next bfloat16, to which `fast` rounds activations where the hardware multiplies
/// pairs of them.
const BF16: f64 = 1.0 / (1 << 8) as f64;
/// Half the distance from 1 to the next float16, the format of the KV cache of `fast`; below 2^-14 its values are 2^-24
/// apart.
const F16: f64 = 1.0 / (1 << 11) as f64;
const F16_LEAST: f64 = F32 / 2.0;
/// The largest relative error of `exp`: the documented 2e-7 of our own, which is more than libm's.
const EXP: f64 = 2e-7;

/// A value, and a bound of the library's error.
#[derive(Clone, Copy, Debug, PartialEq, PartialOrd)]
pub struct Margin {
    pub value: f64,
    pub error: f64,
}

impl From<Margin> for f64 {
    fn from(m: Margin) -> f64 {
        m.value
    }
}

impl Margin {
    /// Rounded to float32 so many times.
    fn rounded(self, times: f64) -> Self {
        self.off(times * F32)
    }

    /// Adds a relative error.
    fn off(self, relative: f64) -> Self {
        let error = self.error + relative * (self.value.abs() + self.error);
        Self { error, ..self }
    }

    fn times(self, other: Self) -> Self {
        Self {
            value: self.value * other.value,
            error: self.value.abs() * other.error + other.value.abs() * self.error + self.error * other.error,
        }
    }

    fn plus(self, other: Self) -> Self {
        Self {
            value: self.value + other.value,
            error: self.error + other.error,
        }
    }
}

/// The arithmetic of a mode.
#[derive(Clone, Copy)]
pub struct Margins {
    pub mode: ComputeMode,
    /// The format of the weights of [`Arithmetic::dot`].
    pub format: WeightFormat,
}

impl Margins {
    /// Beside float32 weights, or none.
    pub fn of_f32(mode: ComputeMode) -> Self {
        let format = WeightFormat::F32;
        Self { mode, format }
    }

    fn fast(self) -> bool {
        self.mode.precision == Precision::Fast
    }

    /// A key or value as the cache holds it.
    pub fn cached(self, m: Margin) -> Margin {
        if self.fast() {
            m.off(F16).plus(Margin {
                value: 0.0,
                error: F16_LEAST,
            })
        } else {
            m
        }
    }
}

impl Arithmetic for Margins {
    type Value = Margin;

    fn of(self, x: f32) -> Margin {
        Margin {
            value: x.into(),
            error: 0.0,
        }
    }

    fn add(self, a: Margin, b: Margin) -> Margin {
        a.plus(b).rounded(1.0)
    }

    fn add_product(self, acc: Margin, a: Margin, b: Margin) -> Margin {
        // The portable mode rounds the product as well.
        acc.plus(a.times(b).rounded(1.0)).rounded(1.0)
    }

    fn dot(self, pairs: impl Iterator<Item = (Margin, Margin)>) -> Margin {
        let pairs: Vec<_> = pairs.collect();
        let sum_of = |f: fn(&(Margin, Margin)) -> f64| pairs.iter().map(f).sum::<f64>();
        let largest = pairs.iter().map(|(_, x)| x.value.abs() + x.error).fold(0.0, f64::max);
        let n = pairs.len() as f64;
        let weights = sum_of(|(w, _)| w.value.abs());
        let products = sum_of(|(w, x)| (w.value.abs() + w.error) * (x.value.abs() + x.error));
        let inherited = sum_of(|&(w, x)| w.times(x).error);
        let lost = match (self.fast(), self.mode.level, self.format) {
            // Each product is rounded, and the sum at the end; float64 in between.
            (false, _, _) => (2.0 + n * F32 * F32) * F32 * products,
            // Pairs of bfloat16, then two roundings a pair.
            (true, Level::Avx512(_), WeightFormat::Bf16) => (BF16 + (n + 1.0) * F32 * (1.0 + BF16)) * products,
            // Half a step of 16 bits (a little more, for the scaled value is a float32), exact sums of 32 products,
            // then four roundings: to float32, a multiply-add a block, the token's scale and its product.
            (true, Level::Avx512(_), WeightFormat::Mxfp4) => {
                0.51 * largest / 32767.0 * weights + (n / 32.0 + 4.0) * F32 * (products + largest / 32767.0 * weights)
            }
            // A multiply-add in float32, or both.
            (true, _, _) => (n + 1.0) * F32 * products,
        };
        Margin {
            value: sum_of(|(w, x)| w.value * x.value),
            error: inherited + lost,
        }
    }

    fn score(self, q: &[Margin], k: &[Margin]) -> Margin {
        let sum = Self::of_f32(self.mode).dot(q.iter().copied().zip(k.iter().copied()));
        let scale = Margin {
            value: 1.0 / (q.len() as f64).sqrt(),
            error: 0.0,
        };
        // The root, its inverse and the product.
        sum.times(scale).rounded(3.0)
    }

    fn norm(self, x: &[Margin], weight: &[f32]) -> Vec<Margin> {
        let values: Vec<f64> = x.iter().map(|x| x.value).collect();
        // `exact` rounds each square and their mean; `fast` also every sum. The root halves that and is rounded
        // itself, then come its inverse and two products.
        let squares = if self.fast() { x.len() as f64 + 2.0 } else { 2.0 };
        let of = |value| Margin { value, error: 0.0 }.rounded(squares / 2.0 + 4.0);
        Reals.norm(&values, weight).into_iter().map(of).collect()
    }

    fn softmax(self, x: &[Margin]) -> Vec<Margin> {
        let values: Vec<f64> = x.iter().map(|x| x.value).collect();
        let error = x.iter().map(|x| x.error).fold(0.0, f64::max);
        let max = values.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let least = values.iter().copied().fold(f64::INFINITY, f64::min);
        // The difference to the maximum is rounded, and so are e to its power, the sum and the quotient. Both a
        // share's own exponential and those of the sum are off.
        let exponential = (error + (max - least) * F32).exp() * (1.0 + EXP) - 1.0;
        let relative = (1.0 + exponential) * (1.0 + exponential) - 1.0 + (x.len() as f64 + 4.0) * F32;
        // Below e^-87, `fast` has something of that size or nothing.
        let tiny = Margin {
            value: 0.0,
            error: 2e-38,
        };
        let of = |value| Margin { value, error: 0.0 }.off(relative).plus(tiny);
        Reals.softmax(&values).into_iter().map(of).collect()
    }

    fn angles(self, config: &ModelConfig, position: usize) -> Vec<[Margin; 2]> {
        let scale = config.rope_scaling_factor.max(1.0);
        let concentration = f64::from(0.1 * scale.ln() + 1.0);
        let of = |(i, [cos, sin]): (usize, [f64; 2])| {
            // The frequency theta^(2i/D) magnifies its exponent's rounding by ln theta, 12; the ramp's ends are
            // found by logarithms and a difference of numbers some four times as large. 64 units hold all of it.
            let fastest = position as f64 / f64::from(config.rope_theta).powf((2 * i) as f64 / config.head_dim as f64);
            let error = concentration * (64.0 * fastest + 4.0) * F32;
            [cos, sin].map(|value| Margin { value, error })
        };
        Reals.angles(config, position).into_iter().enumerate().map(of).collect()
    }

    fn rotate(self, a: Margin, b: Margin, [cos, sin]: [Margin; 2]) -> [Margin; 2] {
        let minus_sin = Margin {
            value: -sin.value,
            ..sin
        };
        let sum = |a: Margin, b: Margin| a.plus(b.rounded(1.0)).rounded(1.0);
        [sum(a.times(cos), b.times(minus_sin)), sum(b.times(cos), a.times(sin))]
    }

    fn gated_unit(self, gate: Margin, up: Margin, limit: f32) -> Margin {
        // Clamping makes no error larger.
        let limit = f64::from(limit);
        let (g, u) = (gate.value.min(limit), up.value.clamp(-limit, limit));
        let silu = Margin {
            value: g / (1.0 + (-1.702 * g).exp()),
            // Its slope is nowhere above 1.1.
            error: 1.1 * gate.error,
        };
        // The exponent is a product with a rounded 1.702; then exp, a sum, a quotient and a product.
        let silu = silu.off((3.5 * g.abs() + 3.0) * F32 + EXP);
        let one_more = Margin {
            value: u + 1.0,
            error: up.error,
        };
        silu.times(one_more.rounded(1.0)).rounded(1.0)
    }
}
