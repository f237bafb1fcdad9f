//! A CPU replica's guarantees: answers do not depend on the batch, the order, prompt chunks or threads, and `fast` is
//! close to `exact` layer by layer.

#[path = "common/synthetic.rs"]
mod synthetic;

use getp::backend::cpu::{
    self, BLOCK_TOKENS, Buffer, ComputeMode, CpuOps, CpuWeights, Element, KvCache, ResidualMemory, Routes,
};
use getp::batch::{Chunk, Draw, Greedy, LogitsRow, StepOutput, StepPlan, Want};
use getp::config::ModelConfig;
use getp::engine::limits;
use getp::kv_blocks::KvBlocks;
use getp::model::{Activations, LayerWeights};
use getp::ops::Ops;
use getp::options::{Options, Precision};
use getp::replica::Replica;
use getp::request::Request;
use getp::scheduler::{Limits, Scheduler};
use getp::simd::Level;
use getp::weights::Packed;
use half::f16;
use std::collections::BTreeMap;
use synthetic::{Synthetic, SyntheticCheckpoint, Temperament};

fn small() -> ModelConfig {
    ModelConfig {
        vocab_size: 777,
        hidden_dim: 96,
        intermediate_dim: 64,
        n_experts: 6,
        experts_per_token: 2,
        n_layers: 3,
        head_dim: 24,
        n_attn_heads: 6,
        n_kv_heads: 2,
        sliding_window: 20,
        seq_len: 128,
        ..ModelConfig::preset_20b()
    }
}

/// The prompt of request `i`, of 1 to 70 tokens.
fn prompt(i: usize, vocab: usize) -> Vec<u32> {
    (0..1 + i * 23 % 70)
        .map(|j| ((i * 7919 + j * 104_729) % vocab) as u32)
        .collect()
}

/// Prompts of which each begins as the longest one does, up to a place of its own.
fn alike(vocab: usize) -> Vec<Vec<u32>> {
    let longest = prompt(3, vocab);
    (0..10)
        .map(|i| [&longest[..longest.len() - i * 5], &prompt(i, vocab)[..1]].concat())
        .collect()
}

/// By request: the tokens of its answer, and a hash of the logits of each.
type Answers = BTreeMap<usize, (Vec<u32>, Vec<u32>)>;

/// A replica's answers to prompts, with the number of rows computed. The youngest request is preempted before one of
/// so many steps; 0 is none.
fn answers(
    replica: &mut dyn Replica,
    limits: Limits,
    prompts: &[Vec<u32>],
    vocab: usize,
    preempts: usize,
) -> (Answers, usize) {
    let mut scheduler = Scheduler::new(limits).unwrap();
    for (request, prompt) in prompts.iter().enumerate() {
        scheduler.submit(Request::greedy(request, prompt.clone(), 90)).unwrap();
    }
    let mut rows = 0;
    let (mut plan, mut output, mut finished) = (StepPlan::default(), StepOutput::default(), Vec::new());
    let mut summary = StepOutput::default();
    let mut all = Answers::new();
    let mut steps = 0;
    while scheduler.plan(&mut plan) {
        rows += plan.rows();
        scheduler.begin(&plan);
        replica.submit(&plan, Want::Logits).unwrap();
        replica.collect(&mut output).unwrap();
        // The same step with the argmax alone, which `exact` finds without computing most logits.
        replica.submit(&plan, Want::Tokens).unwrap();
        replica.collect(&mut summary).unwrap();
        assert_eq!(summary.greedy, output.greedy);
        let mut sampled = Vec::new();
        for (i, row) in plan.logits.iter().enumerate() {
            let logits = &output.logits[i * vocab..][..vocab];
            assert_eq!(
                output.greedy[i].token,
                getp::sampler::argmax(logits),
                "the summary is the row's own"
            );
            let answer = all.entry(scheduler.request(row.slot).unwrap()).or_default();
            answer.0.push(output.greedy[i].token);
            // A hash of the row's bits: all rows of all positions would be much memory.
            answer.1.push(
                logits
                    .iter()
                    .fold(0, |h: u32, l| (h ^ l.to_bits()).wrapping_mul(0x0100_0193)),
            );
            sampled.push(output.greedy[i].token);
        }
        scheduler.commit(&plan, &sampled, &mut finished).unwrap();
        steps += 1;
        if preempts > 0 && steps % preempts == 0 {
            scheduler.preempt_youngest();
        }
    }
    assert_eq!(finished.len(), prompts.len());
    (all, rows)
}

#[test]
fn answers_do_not_depend_on_batch_chunks_or_threads() {
    let config = small();
    let checkpoint = SyntheticCheckpoint::new(&config, 5, Temperament::Wild).unwrap();
    for precision in [Precision::Exact, Precision::Fast] {
        let options = |max_batch, step_tokens, threads| Options {
            precision: Some(precision),
            max_batch: Some(max_batch),
            step_tokens: Some(step_tokens),
            threads,
            kv_mb: 64,
            ..Options::default()
        };
        let prompts: Vec<_> = (0..10).map(|i| prompt(i, config.vocab_size)).collect();
        let preempted = |options: &Options, prompts: &[Vec<u32>], share_beginnings, preempts| {
            let mut replica = cpu::open(&checkpoint, options).unwrap();
            let limits = Limits {
                share_beginnings,
                ..limits(&*replica, &config)
            };
            answers(&mut *replica, limits, prompts, config.vocab_size, preempts)
        };
        let answers = |options: &Options, prompts: &[Vec<u32>], shares| preempted(options, prompts, shares, 0);
        let (alone, _) = answers(&options(1, 1, 1), &prompts, false);
        for (max_batch, step_tokens, threads) in [(1, 64, 2), (3, 7, 1), (10, 200, 3), (16, 33, 2)] {
            let options = options(max_batch, step_tokens, threads);
            let (together, _) = answers(&options, &prompts, true);
            assert!(
                alone == together,
                "{precision:?}, batch {max_batch}, {step_tokens} tokens a step, {threads} threads"
            );
            let (again, _) = preempted(&options, &prompts, true, 3);
            assert!(alone == again, "{precision:?}, batch {max_batch}: preempted");
            // With blocks of their own, and with shared ones.
            let alike = alike(config.vocab_size);
            let ((apart, all), (shared, fewer)) = (answers(&options, &alike, false), answers(&options, &alike, true));
            assert!(
                apart == shared && fewer + 100 < all,
                "{precision:?}: {fewer} of {all} rows"
            );
        }
        // Behind an answer, whose keys and values decoding has computed: those of the fifth block's last positions.
        let options = options(1, 64, 2);
        let turn: Vec<_> = prompt(3, config.vocab_size).into_iter().cycle().take(75).collect();
        let (first_turn, _) = answers(&options, std::slice::from_ref(&turn), false);
        let next_turn = [&turn[..], &first_turn[&0].0[..9], &[7]].concat();
        let turns = [turn, next_turn];
        let ((apart, all), (behind, fewer)) = (answers(&options, &turns, false), answers(&options, &turns, true));
        assert!(apart == behind, "{precision:?}: behind an answer");
        assert_eq!(all - fewer, 80, "{precision:?}: five blocks of the first turn");
    }
}

/// Where only the first tokens may be sampled, the argmax is that of a row that ends there; by `exact` with and without
/// an estimate, and where the last tile is cut.
#[test]
fn ids_beyond_those_that_may_be_sampled_are_no_argmax() {
    let config = small();
    let checkpoint = SyntheticCheckpoint::new(&config, 5, Temperament::Wild).unwrap();
    for precision in [Precision::Exact, Precision::Fast] {
        let options = Options {
            precision: Some(precision),
            kv_mb: 16,
            ..Options::default()
        };
        let mut replica = cpu::open(&checkpoint, &options).unwrap();
        let rows = 60;
        let logits = (0..rows).map(|row| LogitsRow {
            row,
            slot: 0,
            position: row,
            sample: true,
            draw: Draw::GREEDY,
            score: None,
            second_coin: None,
        });
        let whole = StepPlan {
            logits: logits.collect(),
            ..one_chunk(rows)
        };
        let mut output = |plan: &StepPlan, want| {
            let mut output = StepOutput::default();
            replica.submit(plan, want).unwrap();
            replica.collect(&mut output).unwrap();
            output
        };
        let all = output(&whole, Want::Logits);
        for drawable in [1, 31, 32, 500, 776, 777] {
            let cut = StepPlan {
                drawable: Some(drawable),
                ..whole.clone()
            };
            let (found, with_logits) = (output(&cut, Want::Tokens), output(&cut, Want::Logits));
            assert!(*with_logits.logits == *all.logits, "{precision:?}");
            assert_eq!(found.greedy, with_logits.greedy, "{precision:?}");
            let mut others = 0;
            for (row, logits) in all.logits.chunks_exact(config.vocab_size).enumerate() {
                let token = getp::sampler::argmax(&logits[..drawable]);
                let logit = logits[token as usize];
                assert_eq!(found.greedy[row], Greedy { token, logit }, "{precision:?}, {drawable}");
                others += usize::from(token != all.greedy[row].token);
            }
            assert!(others > 0 || drawable > 700, "{precision:?}, {drawable}");
        }
    }
}

// ---- `fast` beside `exact`, layer by layer

/// One sequence's prompt in one step.
fn one_chunk(rows: usize) -> StepPlan {
    let blocks = rows.div_ceil(BLOCK_TOKENS) as u32;
    StepPlan {
        tokens: (0..rows as i32).map(|i| i * 7 % 512).collect(),
        positions: (0..rows as u32).collect(),
        chunks: vec![Chunk {
            slot: 0,
            first_row: 0,
            rows,
            first_position: 0,
            full: 0..blocks as usize,
            window: 0..blocks as usize,
        }],
        tables: (0..blocks).collect(),
        ..StepPlan::default()
    }
}

type Layer = LayerWeights<Packed, Vec<f32>>;

/// A backend of one precision with all it needs.
struct Side<E: Element> {
    ops: CpuOps<E>,
    activations: Activations<ResidualMemory, Buffer>,
    kv: KvCache,
}

impl<E: Element> Side<E> {
    fn new(config: &ModelConfig, precision: Precision, level: Level, rows: usize) -> Self {
        let blocks = rows.div_ceil(BLOCK_TOKENS);
        Self {
            ops: CpuOps::new(config, ComputeMode { level, precision }, rows, false).unwrap(),
            activations: cpu::activations(config, rows).unwrap(),
            kv: KvCache::new(
                config,
                KvBlocks {
                    tokens: BLOCK_TOKENS,
                    count: 2 * blocks,
                },
                E::BYTES,
            )
            .unwrap(),
        }
    }

    /// One layer from `x`; with `routes` given, through those experts.
    fn layer(&mut self, w: &Layer, layer: usize, plan: &StepPlan, x: &[f32], routes: Option<&Routes>) {
        let (ops, a) = (&mut self.ops, &mut self.activations.scratch);
        let memory = &mut self.activations.x;
        memory.x.set_rows(plan.rows()).unwrap();
        memory.x.values_mut().copy_from_slice(x);
        let (x, normed) = ops.norm(memory, &w.attn_norm, &mut a.t).unwrap();
        let qkv = ops.qkv(normed, &w.qkv, &w.qkv_bias, &mut a.qkv).unwrap();
        let queries = ops.rope_store(plan, layer, qkv, &mut self.kv).unwrap();
        let attended = ops
            .attention(plan, queries, &w.sinks, &self.kv, &mut a.attention)
            .unwrap();
        let x = ops.attn_out(attended, &w.attn_out, &w.attn_out_bias, x).unwrap();
        let routed = ops.route(x, &w.ffn_norm, &w.router, &w.router_bias, &mut a.t).unwrap();
        if let Some(routes) = routes {
            routed.memory.routes = routes.clone();
        }
        let gated = ops.mlp1(&routed, &w.mlp1, &w.mlp1_bias, &mut a.h).unwrap();
        ops.mlp2(gated, routed, &w.mlp2, &w.mlp2_bias).unwrap();
    }

    /// The residual stream after the layer that ran last.
    fn x(&self) -> &[f32] {
        self.activations.x.x.values()
    }
}

/// The largest relative error of a row of the residual stream after one layer, over all layers. Each layer starts from
/// the exact one's input.
fn worst_layer_error(config: &ModelConfig, level: Level, rows: usize) -> f64 {
    let checkpoint = SyntheticCheckpoint::packed(&Synthetic::new(config, 9, Temperament::Wild).unwrap());
    let (weights, _): (CpuWeights, _) = cpu::load(&checkpoint).unwrap();
    let plan = one_chunk(rows);
    let mut exact = Side::<f32>::new(config, Precision::Exact, level, rows);
    let mut fast = Side::<f16>::new(config, Precision::Fast, level, rows);
    exact
        .ops
        .embed(&plan, weights.embedding.as_ref().unwrap(), &mut exact.activations.x)
        .unwrap();
    let mut worst = 0.0_f64;
    for (layer, w) in weights.layers.iter().enumerate() {
        let x = exact.x().to_vec();
        exact.layer(w, layer, &plan, &x, None);
        fast.layer(w, layer, &plan, &x, Some(&exact.activations.x.routes));
        let rows = exact.x().chunks(config.hidden_dim);
        for (e, f) in rows.zip(fast.x().chunks(config.hidden_dim)) {
            let norm: f64 = e.iter().map(|&v| f64::from(v).powi(2)).sum();
            let error: f64 = e.iter().zip(f).map(|(&e, &f)| f64::from(e - f).powi(2)).sum();
            worst = worst.max((error / norm).sqrt());
        }
    }
    worst
}

/// The gate for bfloat16 inputs to the dense products; instruction sets without them multiply float32 by float32 and
/// are held to the tighter one.
fn gate(level: Level) -> f64 {
    if matches!(level, Level::Avx512(_)) {
        1.5e-2
    } else {
        3e-3
    }
}

#[test]
fn fast_layers_of_a_wild_7m_model_stay_close() {
    for level in Level::available() {
        let error = worst_layer_error(
            &ModelConfig {
                vocab_size: 512,
                ..ModelConfig::preset_7m()
            },
            level,
            150,
        );
        println!("{level:?}: {error:.2e}");
        assert!(error <= gate(level), "{level:?}: {error:e}");
    }
}

#[test]
fn fast_layers_of_a_wild_20b_shape_stay_close() {
    let config = ModelConfig {
        vocab_size: 512,
        n_layers: 2,
        n_experts: 6,
        ..ModelConfig::preset_20b()
    };
    let level = Level::detect();
    let error = worst_layer_error(&config, level, 12);
    println!("{level:?}: {error:.2e}");
    assert!(error <= gate(level), "{level:?}: {error:e}");
}
