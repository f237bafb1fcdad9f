//! Sums of Hopper's tensor cores, computed on the CPU by the model of Khattak and Mikaitis ("Accurate Models of NVIDIA
//! Tensor Cores", arXiv:2512.07004), which they compared with an H100. It was not compared with a device here.

use getp::backend::gpu::args::SLAB;
use half::f16;

/// Products that are added at once.
const BLOCK: usize = 16;
/// Bits that are kept below the largest exponent.
const KEPT: i32 = 25;
/// FP16's smallest exponent.
const LEAST: i32 = -14;

/// `sum + w x` of a block of FP16 operands: the products and `sum` are aligned to the largest of their exponents, cut off
/// below 2^-25 of it, and added. The result is truncated to float32.
fn add_block(sum: f32, w: &[f32], x: &[f32]) -> f32 {
    let pairs = || w.iter().zip(x).filter(|(w, x)| **w != 0.0 && **x != 0.0);
    let of_product = |(&w, &x): (&f32, &f32)| exponent(w).max(LEAST) + exponent(x).max(LEAST);
    let of_sum = (sum != 0.0).then(|| exponent(sum));
    let Some(largest) = pairs().map(of_product).chain(of_sum).max() else {
        return 0.0;
    };
    let unit = f64::from(largest - KEPT).exp2();
    let cut = |x: f64| (x / unit).trunc();
    let units = cut(sum.into()) + pairs().map(|(&w, &x)| cut(f64::from(w) * f64::from(x))).sum::<f64>();
    truncated(units * unit)
}

fn exponent(x: f32) -> i32 {
    (x.to_bits() >> 23 & 0xff) as i32 - 127
}

fn truncated(x: f64) -> f32 {
    let beyond = f64::MANTISSA_DIGITS - f32::MANTISSA_DIGITS;
    f64::from_bits(x.to_bits() >> beyond << beyond) as f32
}

/// FP16 terms of an activation, the first one its nearest FP16.
pub fn terms(x: &[f32]) -> [Vec<f32>; 2] {
    let nearest = |x: f32| f16::from_f32(x).to_f32();
    let first: Vec<f32> = x.iter().map(|&x| nearest(x)).collect();
    let second = x.iter().zip(&first).map(|(x, first)| nearest(x - first)).collect();
    [first, second]
}

/// What one accumulator has after the products with all terms, the last term's first.
fn chain(w: &[f32], terms: &[&[f32]]) -> f32 {
    let mut sum = 0.0;
    for term in terms.iter().rev() {
        for (w, x) in w.chunks(BLOCK).zip(term.chunks(BLOCK)) {
            sum = add_block(sum, w, x);
        }
    }
    sum
}

/// The sums of `slabs` slabs at a time, each of a chain of its own.
pub fn chains(w: &[f32], terms: &[Vec<f32>], slabs: usize) -> Vec<f32> {
    let starts = (0..w.len()).step_by(slabs * SLAB);
    let of = |from: usize| {
        let range = from..(from + slabs * SLAB).min(w.len());
        let terms: Vec<&[f32]> = terms.iter().map(|term| &term[range.clone()]).collect();
        chain(&w[range], &terms)
    };
    starts.map(of).collect()
}

/// Sums of so many at a time, and then of what comes of these, rounded to nearest.
pub fn in_groups(sums: &[f32], together: usize) -> f32 {
    sums.chunks(together).map(|part| part.iter().sum::<f32>()).sum()
}
