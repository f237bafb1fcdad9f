//! The operations on rows: embedding, norm, and the products with dense matrices.

use super::draw::{buffer, dense, formats, normal, packed, residual, rng, shapes, stale, values};
use super::margins::Margins;
use super::oracle::{Arithmetic, linear};
use super::{assert_same_bits, compare, letter, on_every_engine};

on_every_engine!(embed norm qkv blocks_of_any_size attn_out wanted_rows unembed);

mod checks {
    use super::*;
    use getp::backend::cpu::{ComputeMode, CpuOps, Element, Routes};
    use getp::batch::{Draw, LogitsRow, StepPlan, Want};
    use getp::ops::Ops;
    use getp::weights::{RowMajor, WeightFormat};
    use rand::Rng;

    pub fn embed<E: Element>(mode: ComputeMode) {
        let mut rng = rng(1);
        for (config, rows) in shapes() {
            let (vocab, h) = (config.vocab_size, config.hidden_dim);
            for format in [WeightFormat::Bf16, WeightFormat::F32] {
                let table = values(&mut rng, format, vocab, h);
                let packed = packed(std::slice::from_ref(&table), h, format, &RowMajor);
                // The first and the last row among them.
                let mut tokens: Vec<u32> = (0..rows).map(|_| rng.random_range(0..vocab as u32)).collect();
                tokens[0] = vocab as u32 - 1;
                tokens[rows - 1] = if rows > 1 { 0 } else { tokens[0] };
                let plan = StepPlan {
                    tokens: tokens.iter().map(|token| token.cast_signed()).collect(),
                    ..StepPlan::default()
                };
                let mut x = residual(stale(h, 2), Routes::new(&config, rows).unwrap());
                let mut ops = CpuOps::<E>::new(&config, mode, rows, false).unwrap();
                ops.embed(&plan, &packed, &mut x).unwrap();
                let expected: Vec<f32> = tokens
                    .iter()
                    .flat_map(|&t| &table[t as usize * h..][..h])
                    .copied()
                    .collect();
                assert_same_bits(x.x.values(), &expected, "embed");
            }
        }
    }

    pub fn norm<E: Element>(mode: ComputeMode) {
        let mut rng = rng(2);
        for (config, rows) in shapes() {
            let h = config.hidden_dim;
            let weight = normal(&mut rng, h);
            let mut x = normal(&mut rng, rows * h);
            // One row of large values, one where the epsilon matters.
            x[..h].iter_mut().for_each(|x| *x *= 3e4);
            x[(rows - 1) * h..].iter_mut().for_each(|x| *x *= 1e-7);
            let mut t = stale(h, 1);
            let mut ops = CpuOps::<E>::new(&config, mode, rows, false).unwrap();
            let mut memory = residual(buffer(h, &x), Routes::new(&config, rows).unwrap());
            ops.norm(&mut memory, &weight, &mut t).unwrap();
            for (x, t) in x.chunks_exact(h).zip(t.values().chunks_exact(h)) {
                let margins = Margins::of_f32(mode);
                let real: Vec<_> = x.iter().map(|&x| margins.of(x)).collect();
                let expected = letter(mode).norm(x, &weight);
                compare(mode, "norm", t, &expected, &margins.norm(&real, &weight));
            }
        }
    }

    pub fn qkv<E: Element>(mode: ComputeMode) {
        let mut rng = rng(3);
        for (config, rows) in shapes() {
            let (h, width) = (config.hidden_dim, config.qkv_dim());
            for format in formats(h) {
                let (w, packed) = dense(&mut rng, format, width, h);
                let (bias, t) = (normal(&mut rng, width), normal(&mut rng, rows * h));
                let mut qkv = stale(width, 1);
                let mut ops = CpuOps::<E>::new(&config, mode, rows, false).unwrap();
                ops.qkv(&buffer(h, &t), &packed, &bias, &mut qkv).unwrap();
                let margins = Margins { mode, format };
                for (t, got) in t.chunks_exact(h).zip(qkv.values().chunks_exact(width)) {
                    let real: Vec<_> = t.iter().map(|&x| margins.of(x)).collect();
                    compare(
                        mode,
                        &format!("qkv {format:?} {width}x{h}"),
                        got,
                        &linear(letter(mode), &w, &bias, t),
                        &linear(margins, &w, &bias, &real),
                    );
                }
            }
        }
    }

    /// The first row's result is the same for any number of rows, however these are cut into blocks.
    pub fn blocks_of_any_size<E: Element>(mode: ComputeMode) {
        let mut rng = rng(6);
        let (config, _) = shapes().swap_remove(2);
        let (h, width, most) = (config.hidden_dim, config.qkv_dim(), 26);
        let (bias, t) = (normal(&mut rng, width), normal(&mut rng, most * h));
        let mut ops = CpuOps::<E>::new(&config, mode, most, false).unwrap();
        for format in formats(h) {
            let (_, packed) = dense(&mut rng, format, width, h);
            let mut run = |rows: &[f32]| {
                let mut qkv = stale(width, 1);
                ops.qkv(&buffer(h, rows), &packed, &bias, &mut qkv).unwrap();
                qkv
            };
            let one_by_one: Vec<f32> = t.chunks_exact(h).flat_map(|row| run(row).values().to_vec()).collect();
            for rows in 1..=most {
                let together = run(&t[..rows * h]);
                assert_same_bits(
                    together.values(),
                    &one_by_one[..rows * width],
                    &format!("{mode:?} {rows} rows"),
                );
            }
        }
    }

    pub fn attn_out<E: Element>(mode: ComputeMode) {
        let mut rng = rng(4);
        for (config, rows) in shapes() {
            let (h, width) = (config.hidden_dim, config.q_dim());
            for format in formats(width) {
                let (w, packed) = dense(&mut rng, format, h, width);
                let (bias, a) = (normal(&mut rng, h), normal(&mut rng, rows * width));
                let before = normal(&mut rng, rows * h);
                let mut x = residual(buffer(h, &before), Routes::new(&config, rows).unwrap());
                let mut ops = CpuOps::<E>::new(&config, mode, rows, false).unwrap();
                ops.attn_out(&buffer(width, &a), &packed, &bias, &mut x).unwrap();
                let margins = Margins { mode, format };
                for (row, got) in x.x.values().chunks_exact(h).enumerate() {
                    let (a, before) = (&a[row * width..][..width], &before[row * h..][..h]);
                    let real: Vec<_> = a.iter().map(|&x| margins.of(x)).collect();
                    let real = linear(margins, &w, &bias, &real).into_iter().zip(before);
                    let real: Vec<_> = real.map(|(y, &x)| margins.add(margins.of(x), y)).collect();
                    let expected = linear(letter(mode), &w, &bias, a).into_iter().zip(before);
                    let expected: Vec<_> = expected.map(|(y, &x)| x + y).collect();
                    compare(mode, &format!("attn_out {format:?}"), got, &expected, &real);
                }
            }
        }
    }

    /// The last norm takes the plan's rows in the plan's order; each equals the norm of all rows.
    pub fn wanted_rows<E: Element>(mode: ComputeMode) {
        let mut rng = rng(5);
        for (config, rows) in shapes() {
            let h = config.hidden_dim;
            let (weight, x) = (normal(&mut rng, h), normal(&mut rng, rows * h));
            let mut memory = residual(buffer(h, &x), Routes::new(&config, rows).unwrap());
            let mut ops = CpuOps::<E>::new(&config, mode, rows, false).unwrap();
            let wanted: Vec<usize> = (0..rows).rev().step_by(2).collect();
            let logits = wanted.iter().map(|&row| LogitsRow {
                row,
                slot: 0,
                position: 0,
                sample: true,
                draw: Draw::GREEDY,
                score: None,
                second_coin: None,
            });
            let plan = StepPlan {
                logits: logits.collect(),
                ..StepPlan::default()
            };
            let (mut all, mut some) = (stale(h, 1), stale(h, rows));
            ops.norm(&mut memory, &weight, &mut all).unwrap();
            ops.norm_wanted(&plan, &mut memory, &weight, &mut some).unwrap();
            let expected: Vec<f32> = wanted
                .iter()
                .flat_map(|&r| &all.values()[r * h..][..h])
                .copied()
                .collect();
            assert_same_bits(some.values(), &expected, "the wanted rows' norm");
        }
    }

    pub fn unembed<E: Element>(mode: ComputeMode) {
        let mut rng = rng(7);
        for (config, rows) in shapes() {
            let (h, vocab) = (config.hidden_dim, config.vocab_size);
            for format in formats(h) {
                let (w, packed) = dense(&mut rng, format, vocab, h);
                let x = normal(&mut rng, rows * h);
                let rows_in = buffer(h, &x);
                let mut ops = CpuOps::<E>::new(&config, mode, rows, false).unwrap();
                // Every second row is drawn.
                let logits_row = |row: usize| LogitsRow {
                    row,
                    slot: row,
                    position: 0,
                    sample: true,
                    draw: Draw {
                        temperature: (row % 2) as f32,
                        ..Draw::GREEDY
                    },
                    score: None,
                    second_coin: None,
                };
                let mixed = StepPlan {
                    logits: (0..rows).map(logits_row).collect(),
                    ..StepPlan::default()
                };
                let plan = StepPlan::default();
                ops.unembed(&plan, &rows_in, &packed, Want::Logits).unwrap();
                let margins = Margins { mode, format };
                for (got, (i, t)) in ops.output.logits.chunks_exact(vocab).zip(x.chunks_exact(h).enumerate()) {
                    let real: Vec<_> = t.iter().map(|&x| margins.of(x)).collect();
                    compare(
                        mode,
                        &format!("unembed {format:?}"),
                        got,
                        &linear(letter(mode), &w, &[], t),
                        &linear(margins, &w, &[], &real),
                    );
                    let largest = got.iter().copied().fold(f32::NEG_INFINITY, f32::max);
                    let token = got.iter().position(|&l| l == largest).unwrap();
                    assert_eq!(ops.output.greedy[i].token as usize, token);
                    assert_eq!(ops.output.greedy[i].logit, largest);
                }
                assert_eq!(ops.output.logits.len(), rows * vocab);

                // Where only some rows need their logits, these and the argmax of all are the same.
                let with_logits = ops.output.greedy.clone();
                let rows_of_all = ops.output.logits.to_vec();
                ops.unembed(&mixed, &rows_in, &packed, Want::Tokens).unwrap();
                assert_eq!(ops.output.greedy, with_logits);
                let drawn: Vec<f32> = rows_of_all
                    .chunks_exact(vocab)
                    .skip(1)
                    .step_by(2)
                    .flatten()
                    .copied()
                    .collect();
                assert_same_bits(&ops.output.logits, &drawn, "the logits of the rows drawn");

                // Without logits the argmax is the same.
                ops.unembed(&plan, &rows_in, &packed, Want::Tokens).unwrap();
                assert_eq!(ops.output.greedy, with_logits);
                assert!(ops.output.logits.is_empty());
            }
        }
    }
}
