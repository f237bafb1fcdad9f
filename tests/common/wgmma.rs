//! Sums of Hopper's matrix cores, computed on the CPU by the model of Khattak and Mikaitis ("Accurate Models of NVIDIA
//! Tensor Cores", arXiv:2512.07004), which they compared with an H100. It was not compared with a device here.

use getp::backend::gpu::args::SLAB;
pub use getp::backend::gpu::catalogue::hopper::{SLABS_CHAINED, SLABS_TOGETHER};
use half::f16;

/// Products that are added at once.
const BLOCK: usize = 16;
/// Bits that are kept below the largest exponent.
const KEPT: i32 = 25;
/// FP16's smallest exponent.
const LEAST: i32 = -14;

/// `sum + w x` of a block of FP16 operands: the products and `sum` are aligned to the largest of their exponents, cut
/// off below 2^-25 of it, and added. The result is truncated to float32.
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

/// The nearest FP16 numbers.
pub fn fp16(values: &[f32]) -> Vec<f32> {
    values.iter().map(|&x| f16::from_f32(x).to_f32()).collect()
}

/// The two FP16 terms of each activation: the nearest number, and the one nearest to what that leaves.
pub fn terms(x: &[f32]) -> [Vec<f32>; 2] {
    let first = fp16(x);
    let left: Vec<f32> = x.iter().zip(&first).map(|(x, first)| x - first).collect();
    [first, fp16(&left)]
}

/// Each weight times the sum of its activation's terms, exactly.
pub fn products(w: &[f32], terms: &[Vec<f32>]) -> impl Iterator<Item = f64> {
    let activation = |i: usize| terms.iter().map(|term| f64::from(term[i])).sum::<f64>();
    w.iter().enumerate().map(move |(i, &w)| f64::from(w) * activation(i))
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

/// The sums of so many slabs each, every one in an accumulator of its own. `w.len()` slabs are always all.
pub fn chains(w: &[f32], terms: &[Vec<f32>], slabs: usize) -> Vec<f32> {
    let starts = (0..w.len()).step_by(slabs * SLAB);
    let of = |from: usize| {
        let range = from..(from + slabs * SLAB).min(w.len());
        let terms: Vec<&[f32]> = terms.iter().map(|term| &term[range.clone()]).collect();
        chain(&w[range], &terms)
    };
    starts.map(of).collect()
}

/// Adds so many sums at a time, and then what comes of these, in float32.
pub fn in_groups(sums: &[f32], together: usize) -> f32 {
    sums.chunks(together).map(|part| part.iter().sum::<f32>()).sum()
}

/// The sum of an element of a product in `exact` with 16-bit weights.
pub fn exact_w16(w: &[f32], terms: &[Vec<f32>]) -> f32 {
    in_groups(&chains(w, terms, 1), SLABS_TOGETHER)
}

/// The same with MXFP4 weights.
pub fn exact_mxfp4(w: &[f32], terms: &[Vec<f32>]) -> f32 {
    chains(w, terms, SLABS_CHAINED).iter().sum()
}
