//! The bound of a sum is no wider than it has to be, by emulated sums.

use super::bounds::Bounds;
use super::wgmma::{SLABS_CHAINED, chains, exact_mxfp4, exact_w16, products, terms};
use getp::backend::gpu::args::SLAB;
use getp::backend::gpu::catalogue::Elements;
use getp::backend::gpu::family::FAMILIES;
use getp::backend::gpu::shapes::Numbers;
use getp::backend::gpu::target::Target;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use rand_distr::StandardNormal;

/// Sums that are added in float32, emulated, keep to their bounds, and with the worst operands come near them.
#[test]
fn emulated_sums_keep_to_their_bounds() {
    let mut families = FAMILIES.iter().filter(|family| family.table().exact_sums.is_some());
    let family = *families.next().expect("a family adds them so");
    let bounds = |exact: bool| Bounds {
        numbers: Numbers {
            elements: Elements::F16,
            kv: if exact { Elements::F32 } else { Elements::F16 },
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
