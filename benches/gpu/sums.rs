//! How exact the sums of Hopper's `exact` are, and how exact other orders of adding would be. The matrix cores are
//! emulated on the CPU, so that no device is needed.

use super::wgmma::{chains, exact_mxfp4, exact_w16, fp16, in_groups, products, terms};
use getp::dtype::{E2M1, MXFP4_BLOCK};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use rand_distr::StandardNormal;
use rayon::prelude::*;

#[derive(clap::Args)]
pub struct Args {
    /// Sums of each kind of weights.
    #[arg(long, default_value_t = 20_000)]
    sums: usize,
}

/// Slabs whose products are summed in one accumulator, how these sums are added, and what the whole sum of weights
/// times terms is.
type Way = (&'static str, &'static str, fn(&[f32], &[Vec<f32>]) -> f64);
const WAYS: [Way; 9] = [
    ("1", "float64", |w, x| float64(&chains(w, x, 1))),
    ("1", "float32, as with 16-bit weights", |w, x| exact_w16(w, x).into()),
    ("1", "float32", |w, x| float32(&chains(w, x, 1))),
    ("2", "float64", |w, x| float64(&chains(w, x, 2))),
    ("2", "float32, as with MXFP4", |w, x| exact_mxfp4(w, x).into()),
    ("2", "float32, 5 at a time", |w, x| {
        in_groups(&chains(w, x, 2), 5).into()
    }),
    ("3", "float32", |w, x| float32(&chains(w, x, 3))),
    ("all", "", |w, x| float32(&chains(w, x, w.len()))),
    ("none", "float32, product by product", |w, x| {
        let product = |(i, w): (usize, &f32)| w * (x[0][i] + x[1][i]);
        w.iter().enumerate().map(product).sum::<f32>().into()
    }),
];

fn float64(sums: &[f32]) -> f64 {
    sums.iter().map(|&x| f64::from(x)).sum()
}

fn float32(sums: &[f32]) -> f64 {
    sums.iter().sum::<f32>().into()
}

pub fn run(args: &super::Args, part: &Args) {
    let k = args.config().hidden_dim;
    println!(
        "Root mean square error of {} sums of {k} products with two FP16 terms, in 2^-24 of the sums' root mean square",
        part.sums
    );
    println!("{:<8}{:<34}{:>8}{:>8}", "a chain", "chains added in", "MXFP4", "FP16");
    let [mxfp4, fp16] = [mxfp4 as fn(&[f32]) -> Vec<f32>, fp16].map(|pack| errors(pack, k, part.sums));
    for (((slabs, how, _), mxfp4), fp16) in WAYS.iter().zip(mxfp4).zip(fp16) {
        println!("{slabs:<8}{how:<34}{mxfp4:>8.2}{fp16:>8.2}");
    }
}

/// The error of each of [`WAYS`] with weights that `pack` makes of normally distributed numbers.
fn errors(pack: fn(&[f32]) -> Vec<f32>, k: usize, count: usize) -> Vec<f64> {
    let squares = |seed: usize| {
        let mut rng = ChaCha8Rng::seed_from_u64(seed as u64);
        let mut random = || -> Vec<f32> { (0..k).map(|_| rng.sample(StandardNormal)).collect() };
        let (w, terms) = (pack(&random()), terms(&random()));
        let right: f64 = products(&w, &terms).sum();
        let error = |(_, _, sum): &Way| (sum(&w, &terms) - right).powi(2);
        WAYS.iter().map(error).chain([right.powi(2)]).collect::<Vec<f64>>()
    };
    let added = |a: Vec<f64>, b: Vec<f64>| a.iter().zip(b).map(|(a, b)| a + b).collect();
    let zeros = || vec![0.0; WAYS.len() + 1];
    let sums: Vec<f64> = (0..count).into_par_iter().map(squares).reduce(zeros, added);
    let all = sums[WAYS.len()];
    let units = |square: &f64| (square / all).sqrt() * f64::from(1 << 24);
    sums[..WAYS.len()].iter().map(units).collect()
}

/// Each block's numbers, rounded to MXFP4. The scale is the OCP standard's: the power of two in the block's largest
/// number, divided by 4, the power of two in E2M1's largest value, 6.
fn mxfp4(values: &[f32]) -> Vec<f32> {
    let pack = |block: &[f32]| -> Vec<f32> {
        let largest = block.iter().fold(f32::MIN_POSITIVE, |most, x| most.max(x.abs()));
        let scale = (largest.log2().floor() - 2.0).exp2();
        let distance = |x: f32, code: f32| (x - code * scale).abs();
        let nearest = |&x: &f32| {
            let code = E2M1
                .into_iter()
                .min_by(|&a, &b| distance(x, a).total_cmp(&distance(x, b)));
            code.expect("there are 16") * scale
        };
        block.iter().map(nearest).collect()
    };
    values.chunks(MXFP4_BLOCK).flat_map(pack).collect()
}
