//! NaN, infinities and ties: NaN and infinities do not reach other rows, and a row's argmax is defined.

use super::draw::{buffer, dense, normal, packed, residual, rng, shapes, stale, values};
use super::{assert_same_bits, on_every_engine};
use getp::backend::cpu::{Buffer, Routes, Tiles};
use getp::batch::{StepOutput, StepPlan, Want};
use getp::config::ModelConfig;
use getp::weights::WeightFormat;

on_every_engine!(
    greedy_takes_the_lowest_index
    greedy_is_the_same_beside_ties
    rows_keep_their_odd_values
    weights_keep_their_odd_values
    experts_keep_their_odd_values
    attention_keeps_odd_values
    heads_may_have_no_sink
);

const ODD: [f32; 3] = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY];

/// All rows but one have the same bits as before, and that one is not finite.
#[track_caller]
fn check_other_rows(before: &Buffer, after: &Buffer, width: usize, odd_row: usize) {
    for (row, (a, b)) in after
        .values()
        .chunks_exact(width)
        .zip(before.values().chunks_exact(width))
        .enumerate()
    {
        if row == odd_row {
            assert!(a.iter().any(|v| !v.is_finite()), "the odd value is lost: {a:?}");
        } else {
            assert_same_bits(a, b, &format!("row {row}"));
        }
    }
}

mod checks {
    use super::*;
    use getp::backend::cpu::{BLOCK_TOKENS, ComputeMode, CpuOps, Element, KvCache, Routed};
    use getp::ops::Ops;

    pub fn greedy_takes_the_lowest_index<E: Element>(mode: ComputeMode) {
        let (vocab, h) = (101, 34);
        let config = ModelConfig {
            vocab_size: vocab,
            hidden_dim: h,
            ..ModelConfig::preset_7m()
        };
        let mut ops = CpuOps::<E>::new(&config, mode, 3, false).unwrap();
        // The first column is each token's logit.
        let mut greedy = |logit: &dyn Fn(usize) -> f32, x: f32| {
            let mut w = vec![0.0; vocab * h];
            w.iter_mut()
                .step_by(h)
                .enumerate()
                .for_each(|(token, w)| *w = logit(token));
            let packed = packed(&[w], h, WeightFormat::Bf16, &Tiles { gated: false });
            let mut t = vec![0.0; 3 * h];
            t.iter_mut().step_by(h).for_each(|t| *t = x);
            ops.unembed(&StepPlan::default(), &buffer(h, &t), &packed, Want::Tokens)
                .unwrap();
            assert!(ops.output.greedy.iter().all(|g| g.token == ops.output.greedy[0].token));
            (ops.output.greedy[0].token, ops.output.greedy[0].logit)
        };
        let (inf, nan) = (f32::INFINITY, f32::NAN);
        assert_eq!(greedy(&|_| 0.0, 1.0), (0, 0.0));
        // Ties within a vector, between a tile's vectors, between tiles, with the partly filled last one.
        for (first, second) in [(3, 5), (3, 20), (40, 77), (63, 64), (31, 100)] {
            let tied = |token| if token == first || token == second { 2.0 } else { 1.0 };
            assert_eq!(greedy(&tied, 1.0), (first as u32, 2.0));
        }
        assert_eq!(greedy(&|t| if t == 100 { -1.0 } else { -2.0 }, 1.0), (100, -1.0));
        assert_eq!(greedy(&|t| if t == 70 { inf } else { 1.0 }, 1.0), (70, inf));
        assert_eq!(greedy(&|_| -inf, 1.0), (0, -inf));
        assert_eq!(greedy(&|t| if t < 40 { nan } else { -inf }, 1.0), (40, -inf));
        assert_eq!(greedy(&|t| if t < 40 { -inf } else { nan }, 1.0), (0, -inf));
        assert_eq!(greedy(&|t| if t == 50 { -3.0 } else { nan }, 1.0), (50, -3.0));
        assert_eq!(greedy(&|_| nan, 1.0).0, 0);
        assert_eq!(greedy(&|_| 1.0, nan).0, 0);
    }

    /// Without logits the argmax is that of all logits to the bit, where some rows of a batch have so many equal
    /// logits, or so small ones, that an estimate excludes nothing.
    pub fn greedy_is_the_same_beside_ties<E: Element>(mode: ComputeMode) {
        let mut rng = rng(47);
        let (vocab, h, rows) = (3001, 32, 19);
        let config = ModelConfig {
            vocab_size: vocab,
            hidden_dim: h,
            ..ModelConfig::preset_7m()
        };
        let mut ops = CpuOps::<E>::new(&config, mode, rows, false).unwrap();
        // Rows of ordinary size, of zeros, so small that products are subnormal, and odd ones.
        let mut t = normal(&mut rng, rows * h);
        for (row, t) in t.chunks_exact_mut(h).enumerate() {
            match row % 5 {
                1 => t.fill(0.0),
                2 => t.iter_mut().for_each(|t| *t *= 1e-39),
                3 if row > 10 => t[7] = ODD[row % 3],
                _ => (),
            }
        }
        let t = buffer(h, &t);
        for format in [WeightFormat::Mxfp4, WeightFormat::Bf16, WeightFormat::F32] {
            let w = values(&mut rng, format, vocab, h);
            // The first row in place of none, all, every other one, a block, all but one.
            let same: [&dyn Fn(usize) -> bool; 5] = [
                &|_| false,
                &|_| true,
                &|i| i % 2 == 1,
                &|i| (900..2500).contains(&i),
                &|i| i != 2000,
            ];
            for (i, same) in same.iter().enumerate() {
                let mut w = w.clone();
                let (first, others) = w.split_at_mut(h);
                let tied = others.chunks_exact_mut(h).enumerate().filter(|(i, _)| same(i + 1));
                tied.for_each(|(_, row)| row.copy_from_slice(first));
                let packed = packed(&[w], h, format, &Tiles { gated: false });
                ops.unembed(&StepPlan::default(), &t, &packed, Want::Logits).unwrap();
                let bits = |output: &StepOutput| -> Vec<(u32, u32)> {
                    output.greedy.iter().map(|g| (g.token, g.logit.to_bits())).collect()
                };
                let expected = bits(&ops.output);
                ops.unembed(&StepPlan::default(), &t, &packed, Want::Tokens).unwrap();
                assert_eq!(bits(&ops.output), expected, "{mode:?} {format:?}, ties {i}");
            }
        }
    }

    /// A NaN or infinite activation makes its own row odd (not finite) and no other.
    pub fn rows_keep_their_odd_values<E: Element>(mode: ComputeMode) {
        let mut rng = rng(41);
        let (rows, h, width) = (15, 96, 70);
        let config = ModelConfig {
            hidden_dim: h,
            ..ModelConfig::preset_7m()
        };
        let mut ops = CpuOps::<E>::new(&config, mode, rows, false).unwrap();
        let t = normal(&mut rng, rows * h);
        let (weight, bias) = (normal(&mut rng, h), normal(&mut rng, width));
        for format in [WeightFormat::Mxfp4, WeightFormat::Bf16, WeightFormat::F32] {
            let (_, w) = dense(&mut rng, format, width, h);
            let mut run = |t: &[f32]| {
                let (mut normed, mut out) = (stale(h, 1), stale(width, 1));
                let mut x = residual(buffer(h, t), Routes::new(&config, rows).unwrap());
                ops.norm(&mut x, &weight, &mut normed).unwrap();
                ops.qkv(&buffer(h, t), &w, &bias, &mut out).unwrap();
                (normed, out)
            };
            let before = run(&t);
            for odd in ODD {
                for odd_row in [0, 7, 14] {
                    let mut t = t.clone();
                    t[odd_row * h + 33] = odd;
                    let after = run(&t);
                    check_other_rows(&before.0, &after.0, h, odd_row);
                    check_other_rows(&before.1, &after.1, width, odd_row);
                }
            }
        }
    }

    /// An odd weight makes its own output odd and no other.
    pub fn weights_keep_their_odd_values<E: Element>(mode: ComputeMode) {
        let mut rng = rng(42);
        let (rows, h, width) = (3, 50, 70);
        let config = ModelConfig {
            hidden_dim: h,
            ..ModelConfig::preset_7m()
        };
        let mut ops = CpuOps::<E>::new(&config, mode, rows, false).unwrap();
        let (t, bias) = (buffer(h, &normal(&mut rng, rows * h)), normal(&mut rng, width));
        for format in [WeightFormat::Bf16, WeightFormat::F32] {
            let w = values(&mut rng, format, width, h);
            let mut run = |w: &[f32]| {
                let mut out = stale(width, 1);
                let w = packed(&[w.to_vec()], h, format, &Tiles { gated: false });
                ops.qkv(&t, &w, &bias, &mut out).unwrap();
                out
            };
            let before = run(&w);
            for odd in ODD {
                for output in [0, 16, 31, 32, 69] {
                    let mut w = w.clone();
                    w[output * h + 49] = odd;
                    let after = run(&w);
                    for (i, (a, b)) in after.values().iter().zip(before.values()).enumerate() {
                        if i % width == output {
                            assert!(!a.is_finite());
                        } else {
                            assert_eq!(a.to_bits(), b.to_bits(), "output {i}");
                        }
                    }
                }
            }
        }
    }

    /// A row whose activations are not finite is still sent to different, existing experts, and changes no other row's
    /// sum.
    pub fn experts_keep_their_odd_values<E: Element>(mode: ComputeMode) {
        let mut rng = rng(43);
        for (config, rows) in shapes() {
            let (h, inner, k) = (config.hidden_dim, config.intermediate_dim, config.experts_per_token);
            let (_, router) = dense(&mut rng, WeightFormat::Bf16, config.n_experts, h);
            let mut experts = |rows: usize, cols: usize, gated: bool| {
                let w: Vec<_> = (0..config.n_experts)
                    .map(|_| values(&mut rng, WeightFormat::Bf16, rows, cols))
                    .collect();
                packed(&w, cols, WeightFormat::Bf16, &Tiles { gated })
            };
            let (first, second) = (experts(2 * inner, h, true), experts(h, inner, false));
            let zeros = |n: usize| vec![0.0; n * config.n_experts];
            let mut ops = CpuOps::<E>::new(&config, mode, rows, false).unwrap();
            let mut run = |t: &[f32]| {
                let (t, mut y) = (buffer(h, t), stale(inner, 1));
                let mut x = residual(buffer(h, &vec![0.0; rows * h]), Routes::new(&config, rows).unwrap());
                ops.pick_experts(&t, &router, &zeros(1), &mut x.routes).unwrap();
                let routed = Routed { memory: &mut x, t: &t };
                let gated = ops.mlp1(&routed, &first, &zeros(2 * inner), &mut y).unwrap();
                ops.mlp2(gated, routed, &second, &zeros(h)).unwrap();
                (x.routes, x.x)
            };
            let t = normal(&mut super::rng(44), rows * h);
            let (_, before) = run(&t);
            for odd in ODD {
                let odd_row = rows / 2;
                let mut t = t.clone();
                t[odd_row * h + 5] = odd;
                let (routes, after) = run(&t);
                let mut picked = routes.experts[odd_row * k..][..k].to_vec();
                picked.sort_unstable();
                picked.dedup();
                assert!(picked.len() == k && picked.iter().all(|&e| (e as usize) < config.n_experts));
                check_other_rows(&before, &after, h, odd_row);
            }
        }
    }

    /// An odd query, key or value makes its own head's output odd, in every later row of its sequence that sees it,
    /// and no other's. (An infinite score alone is no oddity: it takes all the mass, or none.)
    pub fn attention_keeps_odd_values<E: Element>(mode: ComputeMode) {
        use crate::plans::Sequences;
        let mut rng = rng(45);
        let (config, _) = shapes().swap_remove(1);
        let (d, width, q_dim) = (config.head_dim, config.qkv_dim(), config.q_dim());
        let qkv = normal(&mut rng, 18 * width);
        let sinks = normal(&mut rng, config.n_attn_heads);
        let mut ops = CpuOps::<E>::new(&config, mode, 18, false).unwrap();
        let mut run = |qkv: &[f32]| {
            let mut sequences = Sequences::new(&mut super::rng(46), &config, BLOCK_TOKENS, &[9, 9], 9);
            let plan = sequences.plan(&[(0, &[0; 9]), (1, &[0; 9])]);
            let mut kv = KvCache::new(&config, sequences.blocks, E::BYTES).unwrap();
            let (mut qkv, mut out) = (buffer(width, qkv), stale(q_dim, 1));
            let queries = ops.rope_store(&plan, 0, &mut qkv, &mut kv).unwrap();
            ops.attention(&plan, queries, &sinks, &kv, &mut out).unwrap();
            out
        };
        let before = run(&qkv);
        // Row 4 is the first sequence's fifth. Query head 1, then KV head 1, which serves the query heads 2 and 3.
        let [query, key, value] = [d, q_dim + d, q_dim + config.kv_dim() + d];
        for (column, heads, rows) in [(query, 1..2, 4..5), (key, 2..4, 4..9), (value, 2..4, 4..9)] {
            let mut qkv = qkv.clone();
            qkv[4 * width + column] = f32::NAN;
            let after = run(&qkv);
            let pairs = after.values().chunks_exact(d).zip(before.values().chunks_exact(d));
            for (i, (a, b)) in pairs.enumerate() {
                let (row, head) = (i / config.n_attn_heads, i % config.n_attn_heads);
                if heads.contains(&head) && rows.contains(&row) {
                    assert!(
                        a.iter().any(|v| v.is_nan()),
                        "row {row}, head {head} hides a NaN: {a:?}"
                    );
                } else {
                    assert_same_bits(a, b, &format!("row {row}, head {head}"));
                }
            }
        }
    }

    /// A sink of -inf weighs nothing: as one so low that nothing of its weight is left.
    pub fn heads_may_have_no_sink<E: Element>(mode: ComputeMode) {
        use crate::plans::Sequences;
        let mut rng = rng(47);
        let (config, _) = shapes().swap_remove(1);
        let (width, d, heads) = (config.qkv_dim(), config.head_dim, config.n_attn_heads);
        let qkv = normal(&mut rng, 18 * width);
        let sinks = normal(&mut rng, heads);
        let mut ops = CpuOps::<E>::new(&config, mode, 18, false).unwrap();
        let mut run = |without: &[usize], none: f32| {
            let mut sequences = Sequences::new(&mut super::rng(48), &config, BLOCK_TOKENS, &[9, 9], 9);
            let plan = sequences.plan(&[(0, &[0; 9]), (1, &[0; 9])]);
            let mut kv = KvCache::new(&config, sequences.blocks, E::BYTES).unwrap();
            let (mut qkv, mut out) = (buffer(width, &qkv), stale(config.q_dim(), 1));
            let mut sinks = sinks.clone();
            without.iter().for_each(|&head| sinks[head] = none);
            let queries = ops.rope_store(&plan, 0, &mut qkv, &mut kv).unwrap();
            ops.attention(&plan, queries, &sinks, &kv, &mut out).unwrap();
            out
        };
        let all: Vec<_> = (0..heads).collect();
        let before = run(&[], 0.0);
        for without in [&[1][..], &all] {
            let (after, low) = (run(without, f32::NEG_INFINITY), run(without, -1e4));
            assert_same_bits(after.values(), low.values(), "without sinks");
            let pairs = after.values().chunks_exact(d).zip(before.values().chunks_exact(d));
            for (i, (a, b)) in pairs.enumerate() {
                assert_eq!(
                    a != b,
                    without.contains(&(i % heads)),
                    "row {}, head {}",
                    i / heads,
                    i % heads
                );
            }
        }
    }
}
