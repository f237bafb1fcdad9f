//! The router and the experts.

use super::draw::{buffer, dense, formats, normal, packed, residual, rng, shapes, stale, values};
use super::margins::{Margin, Margins};
use super::oracle::{Arithmetic, combine, linear, mlp1, pick};
use super::{assert_same_bits, compare, letter, on_every_engine};
use getp::backend::cpu::Routes;
use getp::config::ModelConfig;
use rand::Rng;
use rand_chacha::ChaCha8Rng;

on_every_engine!(route route_breaks_ties_by_index first_matrix second_matrix);

/// Random picks, with some experts left out, and one that every row is sent to.
fn random_routes(rng: &mut ChaCha8Rng, config: &ModelConfig, rows: usize) -> Routes {
    let mut routes = Routes::new(config, rows).unwrap();
    let k = config.experts_per_token;
    for _ in 0..rows {
        let mut experts: Vec<u32> = (1..config.n_experts as u32).collect();
        // The last expert gets no row (unless all are needed), the first all.
        experts.truncate((config.n_experts - 2).max(k - 1));
        for i in 0..k - 1 {
            let j = rng.random_range(i..experts.len());
            experts.swap(i, j);
        }
        experts.truncate(k - 1);
        experts.insert(rng.random_range(0..k), 0);
        routes.experts.extend(experts);
        routes.shares.extend((0..k).map(|_| rng.random_range(0.01..1.0_f32)));
    }
    routes.group(k).unwrap();
    routes
}

/// Row and expert of each pick in the order the experts' activations have: by expert, then by row.
fn picks(routes: &Routes, k: usize) -> Vec<(usize, usize, f32)> {
    let pick = |(i, (&e, &share)): (usize, (&u32, &f32))| (i / k, e as usize, share);
    let mut picks: Vec<_> = routes
        .experts
        .iter()
        .zip(&routes.shares)
        .enumerate()
        .map(pick)
        .collect();
    picks.sort_by_key(|&(row, expert, _)| (expert, row));
    picks
}

mod checks {
    use super::*;
    use getp::backend::cpu::{ComputeMode, CpuOps, Element, Routed, Tiles};
    use getp::ops::Ops;
    use getp::options::Precision;

    pub fn route<E: Element>(mode: ComputeMode) {
        let mut rng = rng(11);
        for (config, rows) in shapes() {
            let (h, experts, k) = (config.hidden_dim, config.n_experts, config.experts_per_token);
            for format in formats(h) {
                let (w, packed) = dense(&mut rng, format, experts, h);
                let (bias, t) = (normal(&mut rng, experts), normal(&mut rng, rows * h));
                let mut routes = Routes::new(&config, rows).unwrap();
                let mut ops = CpuOps::<E>::new(&config, mode, rows, false).unwrap();
                ops.pick_experts(&buffer(h, &t), &packed, &bias, &mut routes).unwrap();
                assert_eq!(routes.experts.len(), rows * k);
                for (row, t) in t.chunks_exact(h).enumerate() {
                    let picked: Vec<usize> = routes.experts[row * k..][..k].iter().map(|&e| e as usize).collect();
                    let shares = &routes.shares[row * k..][..k];
                    let (expected, expected_shares) = pick(letter(mode), &linear(letter(mode), &w, &bias, t), k);
                    if mode.precision == Precision::Exact {
                        assert_eq!(picked, expected);
                    }
                    // In every format the router's activations stay float32, since they select experts.
                    let margins = Margins::of_f32(mode);
                    let real: Vec<_> = t.iter().map(|&x| margins.of(x)).collect();
                    let logits = linear(margins, &w, &bias, &real);
                    check_order(&logits, &picked);
                    let of_picked: Vec<Margin> = picked.iter().map(|&e| logits[e]).collect();
                    compare(mode, "route", shares, &expected_shares, &margins.softmax(&of_picked));
                }
            }
        }
    }

    /// No expert is picked twice, and none instead of or before an expert whose logit is certainly larger.
    fn check_order(logits: &[Margin], picked: &[usize]) {
        for (i, e) in picked.iter().enumerate() {
            let before = &picked[..i];
            assert!(!before.contains(e), "{e} is picked twice");
            for (other, logit) in logits.iter().enumerate() {
                let surely_larger = logit.value - logit.error > logits[*e].value + logits[*e].error;
                assert!(!surely_larger || before.contains(&other), "{other} comes before {e}");
            }
        }
    }

    pub fn route_breaks_ties_by_index<E: Element>(mode: ComputeMode) {
        let config = ModelConfig {
            hidden_dim: 40,
            n_experts: 7,
            experts_per_token: 4,
            ..ModelConfig::preset_7m()
        };
        let (_, packed) = dense(&mut rng(12), getp::weights::WeightFormat::F32, 7, 40);
        // Without activations the logits are the bias; -0 equals 0.
        let bias = vec![1.0, 2.0, 0.0, 2.0, -0.0, 2.0, 0.0];
        let mut routes = Routes::new(&config, 1).unwrap();
        let mut ops = CpuOps::<E>::new(&config, mode, 1, false).unwrap();
        ops.pick_experts(&buffer(40, &[0.0; 40]), &packed, &bias, &mut routes)
            .unwrap();
        assert_eq!(routes.experts, [1, 3, 5, 0]);
        assert!(routes.shares[0] == routes.shares[1] && routes.shares[1] == routes.shares[2]);

        ops.pick_experts(&buffer(40, &[0.0; 40]), &packed, &vec![0.0; 7], &mut routes)
            .unwrap();
        assert_eq!(routes.experts, [0, 1, 2, 3]);
        assert_same_bits(&routes.shares, &[0.25; 4], "equal shares");
    }

    pub fn first_matrix<E: Element>(mode: ComputeMode) {
        let mut rng = rng(13);
        for (config, rows) in shapes() {
            let (h, inner, k) = (config.hidden_dim, config.intermediate_dim, config.experts_per_token);
            for format in formats(h) {
                let w: Vec<_> = (0..config.n_experts)
                    .map(|_| values(&mut rng, format, 2 * inner, h))
                    .collect();
                let packed = packed(&w, h, format, &Tiles { gated: true });
                // A range in which both clamps occur.
                let wide = |v: Vec<f32>| -> Vec<f32> { v.into_iter().map(|v| 4.0 * v).collect() };
                let bias = wide(normal(&mut rng, config.n_experts * 2 * inner));
                let t = wide(normal(&mut rng, rows * h));
                let routes = random_routes(&mut rng, &config, rows);
                let mut out = stale(inner, 1);
                let mut ops = CpuOps::<E>::new(&config, mode, rows, false).unwrap();
                let (inputs, mut memory) = (buffer(h, &t), residual(stale(h, rows), routes.clone()));
                let routed = Routed {
                    memory: &mut memory,
                    t: &inputs,
                };
                ops.mlp1(&routed, &packed, &bias, &mut out).unwrap();
                assert_eq!(out.rows(), rows * k);
                let margins = Margins { mode, format };
                for ((row, e, _), got) in picks(&routes, k).into_iter().zip(out.values().chunks_exact(inner)) {
                    let t = &t[row * h..][..h];
                    let real: Vec<_> = t.iter().map(|&x| margins.of(x)).collect();
                    let bias = &bias[e * 2 * inner..][..2 * inner];
                    compare(
                        mode,
                        &format!("mlp1 {format:?} {inner}x{h}"),
                        got,
                        &mlp1(letter(mode), &w[e], bias, config.swiglu_limit, t),
                        &mlp1(margins, &w[e], bias, config.swiglu_limit, &real),
                    );
                }
            }
        }
    }

    pub fn second_matrix<E: Element>(mode: ComputeMode) {
        let mut rng = rng(14);
        for (config, rows) in shapes() {
            let (h, inner, k) = (config.hidden_dim, config.intermediate_dim, config.experts_per_token);
            for format in formats(inner) {
                let w: Vec<_> = (0..config.n_experts)
                    .map(|_| values(&mut rng, format, h, inner))
                    .collect();
                let packed = packed(&w, inner, format, &Tiles { gated: false });
                let bias = normal(&mut rng, config.n_experts * h);
                let y = normal(&mut rng, rows * k * inner);
                let before = normal(&mut rng, rows * h);
                let routes = random_routes(&mut rng, &config, rows);
                let mut x = residual(buffer(h, &before), routes.clone());
                let mut ops = CpuOps::<E>::new(&config, mode, rows, false).unwrap();
                let routed = Routed {
                    memory: &mut x,
                    t: &stale(h, rows),
                };
                ops.mlp2(&buffer(inner, &y), routed, &packed, &bias).unwrap();
                let picks = picks(&routes, k);
                for (row, got) in x.x.values().chunks_exact(h).enumerate() {
                    compare(
                        mode,
                        &format!("mlp2 {format:?} {h}x{inner}"),
                        got,
                        &onto(letter(mode), &w, &bias, &y, &picks, row, &before[row * h..][..h]),
                        &onto(
                            Margins { mode, format },
                            &w,
                            &bias,
                            &y,
                            &picks,
                            row,
                            &before[row * h..][..h],
                        ),
                    );
                }
            }
        }
    }

    /// A row of the residual stream plus its experts' outputs in `y`, whose rows are in the order of all picks.
    fn onto<A: Arithmetic>(
        a: A,
        w: &[Vec<f32>],
        bias: &[f32],
        y: &[f32],
        picks: &[(usize, usize, f32)],
        row: usize,
        before: &[f32],
    ) -> Vec<A::Value> {
        let (h, inner) = (before.len(), y.len() / picks.len());
        let mut outputs = Vec::new();
        for (i, &(of, e, share)) in picks.iter().enumerate() {
            if of == row {
                let y: Vec<_> = y[i * inner..][..inner].iter().map(|&y| a.of(y)).collect();
                outputs.push((e, a.of(share), linear(a, &w[e], &bias[e * h..][..h], &y)));
            }
        }
        let sum = combine(a, outputs);
        before.iter().zip(sum).map(|(&x, y)| a.add(a.of(x), y)).collect()
    }
}
