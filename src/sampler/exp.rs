//! Exponentials of whole rows, with the bits of the C library's `expf`.
//!
//! The program calls `expf` for every logit, which is most of the time of sampling a token. glibc computes it (since
//! 2.27) in double: `2^(k / 32)` from a table times a polynomial of degree three, rounded to float once. The same steps
//! on sixteen lanes, with the same fused multiply-adds, give the same bits seven times as fast. Other libraries may
//! round differently, so [`level`] first compares with `expf` where roundings are close. `kernels/draw.hip` computes
//! `expf` by the same steps.

use crate::simd::{LANES, Level, Simd, VectorCode};
use std::sync::OnceLock;

/// Powers of two in the sampler's table, evenly spaced from 1 to 2.
pub const POWERS: usize = 32;
/// The bits of 2^(i / 32) minus i << 47, so that adding k << 47 gives the bits of 2^(k / 32).
pub type Table = [u64; POWERS];

/// `1.5 * 2^52`: adding it leaves the nearest integer in the low bits.
const ROUND: f64 = 6_755_399_441_055_744.0;
const LOG2_E_32: f64 = std::f64::consts::LOG2_E * 32.0;
/// glibc's polynomial of `2^(r / 32)` on |r| <= 1/2; the constant is 1.
const CUBIC: f64 = f64::from_bits(0x3fac_6af8_4b91_2394) / 32.0 / 32.0 / 32.0;
const SQUARE: f64 = f64::from_bits(0x3fce_bfce_50fa_c4f3) / 32.0 / 32.0;
const LINEAR: f64 = f64::from_bits(0x3fe6_2e42_ff0c_52d6) / 32.0;
/// `expf` is 0 from -103.98 down.
const ZERO_BELOW: f32 = -104.5;

/// The instruction set whose exponentials are those of `expf`; `None` if they are not, or there is none.
pub fn level() -> Option<Level> {
    static FOUND: OnceLock<Option<Level>> = OnceLock::new();
    *FOUND.get_or_init(|| Some(Level::detect()).filter(|&level| !level.is_portable() && agrees(level)))
}

/// Whether all of some thousand exponentials from -110 to 0 have the bits of `expf`.
fn agrees(level: Level) -> bool {
    const SOME: usize = 512;
    (0..16_384).step_by(SOME).all(|first| {
        let logits: [f32; SOME] = std::array::from_fn(|i| -110.0 * ((first + i) as f32 / 16_384.0));
        let mut out = [0.0; SOME];
        level.run(Exponentials {
            logits: &logits,
            temperature: 1.0,
            max: 0.0,
            out: &mut out,
        });
        logits.iter().zip(&out).all(|(x, y)| x.exp().to_bits() == y.to_bits())
    })
}

/// `out = expf(logits / temperature - max)`, where no logit is above `max`; returns the largest result. NaN stays NaN.
pub struct Exponentials<'a> {
    /// Part of a row.
    pub logits: &'a [f32],
    /// Above 0.
    pub temperature: f32,
    /// The row's largest logit, divided by the temperature.
    pub max: f32,
    /// As long.
    pub out: &'a mut [f32],
}

impl VectorCode for Exponentials<'_> {
    type Output = f32;

    #[inline(always)]
    fn run<S: Simd>(self, _: S) -> f32 {
        let table = table();
        let (chunks, tail) = self.logits.as_chunks::<LANES>();
        let (out, out_tail) = self.out.as_chunks_mut::<LANES>();
        let mut largest = [0.0; LANES];
        // SAFETY: under `VectorCode::run`; all arrays have sixteen elements.
        unsafe {
            let (temperature, max) = (S::splat(self.temperature), S::splat(self.max));
            let mut most = S::splat(0.0);
            for (chunk, out) in chunks.iter().zip(out) {
                let scaled = S::div(S::load(chunk.as_ptr()), temperature);
                let values = exp::<S>(S::sub(scaled, max), table);
                S::store(out.as_mut_ptr(), values);
                most = S::max(values, most);
            }
            S::store(largest.as_mut_ptr(), most);
            let mut last = [f32::NEG_INFINITY; LANES];
            last[..tail.len()].copy_from_slice(tail);
            let scaled = S::div(S::load(last.as_ptr()), temperature);
            S::store(last.as_mut_ptr(), exp::<S>(S::sub(scaled, max), table));
            out_tail.copy_from_slice(&last[..tail.len()]);
        }
        largest.iter().chain(&*out_tail).fold(0.0, |max, &x| x.max(max))
    }
}

/// See the module.
///
/// # Safety
/// Inside [`Simd::vectorize`]. No lane is above 0; NaN stays NaN.
#[inline(always)]
unsafe fn exp<S: Simd>(x: S::F, table: &Table) -> S::F {
    // SAFETY: the caller's.
    unsafe {
        // NaN passes, as the second operand.
        let x = S::d_add(S::d_zero(), S::max(S::splat(ZERO_BELOW), x));
        let (log2_e, round) = (S::d_splat(LOG2_E_32), S::d_splat(ROUND));
        // k = the integer nearest to 32 log2(e^x), r the rest. Negating the product is exact: r is one rounding.
        let rounded = S::d_fma(x, log2_e, round);
        let minus_k = S::d_sub(round, rounded);
        let r = S::d_fma(x, log2_e, minus_k);
        let power = S::d_lookup::<47>(table, rounded);
        let high = S::d_fma(S::d_splat(CUBIC), r, S::d_splat(SQUARE));
        let low = S::d_fma(S::d_splat(LINEAR), r, S::d_splat(1.0));
        let y = S::d_fma(high, S::d_mul(r, r), low);
        S::d_round(S::d_mul(y, power))
    }
}

/// The table of `2^(k / 32)`.
pub fn table() -> &'static Table {
    static TABLE: OnceLock<Table> = OnceLock::new();
    TABLE.get_or_init(|| {
        std::array::from_fn(|i| {
            let power = (i as f64 / POWERS as f64).exp2();
            power.to_bits().wrapping_sub((i as u64) << 47)
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every float from -0 to -110, or one in so many of them: all take a minute.
    const STEP: usize = 61;

    #[test]
    fn exponentials_are_those_of_the_c_library() {
        let (first, last) = ((-0.0_f32).to_bits(), (-110.0_f32).to_bits());
        for level in Level::available().into_iter().filter(|&level| !level.is_portable()) {
            let mut out = [0.0; 1000];
            let mut logits = [0.0; 1000];
            let mut bits = (first..=last).step_by(STEP).peekable();
            while bits.peek().is_some() {
                logits.fill_with(|| f32::from_bits(bits.next().unwrap_or(last)));
                level.run(Exponentials {
                    logits: &logits,
                    temperature: 1.0,
                    max: 0.0,
                    out: &mut out,
                });
                let differs = logits.iter().zip(&out).find(|(x, y)| x.exp().to_bits() != y.to_bits());
                assert_eq!(differs, None, "{level:?}");
            }
        }
    }

    #[test]
    fn ends_and_odd_values_are_right_at_any_length() {
        let Some(level) = level() else { return };
        for n in 0..40 {
            let logits: Vec<f32> = (0..n).map(|i| (i * 7 % 11) as f32).collect();
            let mut out = vec![f32::NAN; n];
            let largest = level.run(Exponentials {
                logits: &logits,
                temperature: 2.0,
                max: 20.0,
                out: &mut out,
            });
            let expected: Vec<f32> = logits.iter().map(|x| (x / 2.0 - 20.0).exp()).collect();
            assert_eq!(out, expected);
            assert_eq!(largest, expected.iter().copied().fold(0.0, f32::max));
            for at in 0..n {
                let mut odd = logits.clone();
                odd[at] = f32::NAN;
                level.run(Exponentials {
                    logits: &odd,
                    temperature: 2.0,
                    max: 20.0,
                    out: &mut out,
                });
                assert!((0..n).all(|i| out[i].is_nan() == (i == at)));
            }
        }
    }
}
