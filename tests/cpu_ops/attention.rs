//! Rotation, the KV cache and attention, over several steps of several sequences.

use super::draw::{buffer, normal, rng, shapes, stale};
use super::margins::Margins;
use super::on_every_engine;
use super::oracle::{Arithmetic, attention, rope};
use super::plans::Sequences;
use super::{assert_same_bits, compare, letter};

on_every_engine!(rotate_and_attend);

/// What has been rotated and stored, by position.
#[derive(Clone, Default)]
struct KeysAndValues {
    keys: Vec<Vec<f32>>,
    values: Vec<Vec<f32>>,
}

mod checks {
    use super::*;
    use getp::backend::cpu::BLOCK_TOKENS;
    use getp::backend::cpu::{ComputeMode, CpuOps, Element, KvCache};
    use getp::batch::{Chunk, StepPlan};
    use getp::config::ModelConfig;
    use getp::ops::Ops;
    use getp::simd::{LANES, Portable};
    use half::f16;

    pub fn rotate_and_attend<E: Element>(mode: ComputeMode) {
        let mut rng = rng(21);
        // More positions than the first sequence's ring of three blocks holds, a prompt within a block, and one that
        // crosses blocks.
        let lengths = [70, 6, 35];
        for (config, _) in shapes() {
            let mut sequences = Sequences::new(&mut rng, &config, BLOCK_TOKENS, &lengths, 9);
            let mut kv = poisoned::<E>(&config, &sequences);
            let mut ops = CpuOps::<E>::new(&config, mode, 27, false).unwrap();
            let mut stored = vec![vec![KeysAndValues::default(); lengths.len()]; config.n_layers];
            let sinks: Vec<_> = (0..config.n_layers)
                .map(|_| normal(&mut rng, config.n_attn_heads))
                .collect();
            for step in 0.. {
                let turn = sequences.turn(step);
                if turn.is_empty() {
                    break;
                }
                let tokens = [0; 9];
                let work: Vec<_> = turn.iter().map(|&(s, rows)| (s, &tokens[..rows])).collect();
                let plan = sequences.plan(&work);
                for layer in 0..config.n_layers {
                    let width = config.qkv_dim();
                    let before = normal(&mut rng, plan.rows() * width);
                    let mut qkv = buffer(width, &before);
                    let queries = ops.rope_store(&plan, layer, &mut qkv, &mut kv).unwrap();
                    let mut out = stale(config.q_dim(), 1);
                    ops.attention(&plan, queries, &sinks[layer], &kv, &mut out).unwrap();
                    for chunk in &plan.chunks {
                        for i in 0..chunk.rows {
                            let row = chunk.first_row + i;
                            let (before, after) =
                                (&before[row * width..][..width], &qkv.values()[row * width..][..width]);
                            let position = chunk.first_position + i;
                            check_rotation(mode, &config, position, before, after);
                            let stored = &mut stored[layer][chunk.slot];
                            let (k, v) = after[config.q_dim()..].split_at(config.kv_dim());
                            stored.keys.push(k.to_vec());
                            stored.values.push(v.to_vec());
                            let out = &out.values()[row * config.q_dim()..][..config.q_dim()];
                            check_row(
                                mode,
                                &config,
                                layer,
                                &after[..config.q_dim()],
                                stored,
                                &sinks[layer],
                                out,
                            );
                        }
                        let last = chunk.first_position + chunk.rows - 1;
                        check_cache::<E>(&config, &kv, &plan, chunk, layer, last, &stored[layer][chunk.slot]);
                    }
                }
            }
        }
    }

    /// A cache full of NaN: memory where no position was written must have no influence.
    fn poisoned<E: Element>(config: &ModelConfig, sequences: &Sequences) -> KvCache {
        let mut kv = KvCache::new(config, sequences.blocks, E::BYTES).unwrap();
        let nan = vec![f32::NAN; config.head_dim];
        for layer in 0..config.n_layers {
            for block in 0..sequences.blocks.count {
                for (head, slot) in (0..config.n_kv_heads).flat_map(|h| (0..BLOCK_TOKENS).map(move |s| (h, s))) {
                    // SAFETY: any machine has the portable instruction set.
                    unsafe { kv.store::<Portable, E>(layer, block, head, slot, &nan, &nan) };
                }
            }
        }
        kv
    }

    fn check_rotation(mode: ComputeMode, config: &ModelConfig, position: usize, before: &[f32], after: &[f32]) {
        let rotated = config.q_dim() + config.kv_dim();
        let margins = Margins::of_f32(mode);
        let mut real: Vec<_> = before[..rotated].iter().map(|&x| margins.of(x)).collect();
        rope(margins, config, position, &mut real);
        let mut expected = before[..rotated].to_vec();
        rope(letter(mode), config, position, &mut expected);
        compare(mode, "rope", &after[..rotated], &expected, &real);
        assert_same_bits(&after[rotated..], &before[rotated..], "values are not rotated");
    }

    /// Attention of one row, from the queries, keys and values as they were rotated.
    fn check_row(
        mode: ComputeMode,
        config: &ModelConfig,
        layer: usize,
        q: &[f32],
        stored: &KeysAndValues,
        sinks: &[f32],
        out: &[f32],
    ) {
        let margins = Margins::of_f32(mode);
        let real_q: Vec<_> = q.iter().map(|&x| margins.of(x)).collect();
        let cached = |rows: &[Vec<f32>]| -> Vec<Vec<_>> {
            let row = |row: &Vec<f32>| row.iter().map(|&x| margins.cached(margins.of(x))).collect();
            rows.iter().map(row).collect()
        };
        let (keys, values) = (cached(&stored.keys), cached(&stored.values));
        compare(
            mode,
            &format!("attention of {} positions", keys.len()),
            out,
            &attention(letter(mode), config, layer, q, &stored.keys, &stored.values, sinks),
            &attention(margins, config, layer, &real_q, &keys, &values, sinks),
        );
    }

    /// The cache holds the sequence's positions up to `last` (in a windowed layer, the window's), rounded as the
    /// element is, and the padding of values stays zero.
    fn check_cache<E: Element>(
        config: &ModelConfig,
        kv: &KvCache,
        plan: &StepPlan,
        chunk: &Chunk,
        layer: usize,
        last: usize,
        stored: &KeysAndValues,
    ) {
        let d = config.head_dim;
        let first = config
            .window(layer)
            .map_or(0, |window| (last + 1).saturating_sub(window));
        let rounded = |x: f32| if E::BYTES == 4 { x } else { f16::from_f32(x).to_f32() };
        for position in first..=last {
            let block = kv.block(plan, chunk, layer, position);
            let slot = position % BLOCK_TOKENS;
            for head in 0..config.n_kv_heads {
                let (keys, values) = kv.head::<E>(layer, block, head);
                let of_head = |rows: &[Vec<f32>]| -> Vec<f32> {
                    rows[position][head * d..][..d].iter().map(|&x| rounded(x)).collect()
                };
                let key: Vec<f32> = widen(keys).into_iter().skip(slot).step_by(BLOCK_TOKENS).collect();
                assert_same_bits(&key, &of_head(&stored.keys), "key");
                let padded = values.len() / BLOCK_TOKENS;
                let value = widen(&values[slot * padded..][..padded]);
                assert_same_bits(&value[..d], &of_head(&stored.values), "value");
                assert_same_bits(&value[d..], &vec![0.0; padded - d], "padding");
            }
        }
    }

    /// Elements as float32; there are always whole vectors of them.
    fn widen<E: Element>(elements: &[E]) -> Vec<f32> {
        let (vectors, rest) = elements.as_chunks::<LANES>();
        assert!(rest.is_empty());
        // SAFETY: a vector has sixteen elements, and the portable instance asks nothing of the machine.
        let widen = |vector: &[E; LANES]| unsafe { E::load::<Portable>(vector.as_ptr()) };
        vectors.iter().flat_map(widen).collect()
    }
}
