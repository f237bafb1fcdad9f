//! The whole forward pass: compared with the oracle's, and alone with in a batch.

use super::draw::rng;
use super::oracle::{self, Reals};
use super::plans::Sequences;
use super::synthetic::{Dense, Experts, Synthetic, SyntheticCheckpoint, Temperament};
use super::{assert_same_bits, letter, on_every_engine};
use getp::checkpoint::Checkpoint;
use getp::config::ModelConfig;
use rand::Rng;

on_every_engine!(logits company stages);

/// A small model of each kind of weights.
fn models() -> Vec<SyntheticCheckpoint> {
    let model = |dense, experts, hidden_dim, intermediate_dim, head_dim| {
        let config = ModelConfig {
            vocab_size: 67,
            hidden_dim,
            n_experts: 5,
            experts_per_token: 2,
            intermediate_dim,
            n_layers: 3,
            head_dim,
            n_attn_heads: 6,
            n_kv_heads: 2,
            sliding_window: 10,
            ..ModelConfig::preset_7m()
        };
        let synthetic = Synthetic {
            config,
            seed: 31,
            temperament: Temperament::Tame,
            dense,
            experts,
        };
        SyntheticCheckpoint::widened(&synthetic.check().expect("the model can be made"))
    };
    vec![
        model(Dense::Bf16, Experts::Mxfp4, 64, 96, 24),
        model(Dense::F32, Experts::Bf16, 44, 38, 10),
        model(Dense::Bf16, Experts::F32, 50, 40, 16),
    ]
}

/// A prompt longer than the ring of the windowed layers, one within a block, and one of a single token.
fn prompts(config: &ModelConfig) -> Vec<Vec<u32>> {
    let mut rng = rng(32);
    let mut prompt = |n: usize| (0..n).map(|_| rng.random_range(0..config.vocab_size as u32)).collect();
    vec![prompt(53), prompt(11), prompt(1)]
}

/// Largest chunk of a sequence in one step.
const MAX_CHUNK: usize = 7;

mod checks {
    use super::*;
    use getp::backend::cpu::{BLOCK_TOKENS, ComputeMode, CpuOps, Element, KvCache, activations, load};
    use getp::batch::Want;
    use getp::model::forward;
    use getp::options::Precision;

    /// The logits of each position of each prompt.
    fn run<E: Element>(
        mode: ComputeMode,
        model: &dyn Checkpoint,
        prompts: &[Vec<u32>],
        max_chunk: usize,
    ) -> Vec<Vec<f32>> {
        let layers = model.config().n_layers;
        run_in_stages::<E>(mode, model, prompts, max_chunk, &[layers])
    }

    /// The logits of each position of each prompt, with each step in stages that end before these layers.
    fn run_in_stages<E: Element>(
        mode: ComputeMode,
        model: &dyn Checkpoint,
        prompts: &[Vec<u32>],
        max_chunk: usize,
        ends: &[usize],
    ) -> Vec<Vec<f32>> {
        let config = model.config();
        let (weights, _) = load(model).unwrap();
        let lengths: Vec<usize> = prompts.iter().map(Vec::len).collect();
        let mut sequences = Sequences::new(&mut rng(33), config, BLOCK_TOKENS, &lengths, max_chunk);
        let max_rows = max_chunk * prompts.len();
        let mut ops = CpuOps::<E>::new(config, mode, max_rows, false).unwrap();
        let mut activations = activations(config, max_rows).unwrap();
        let mut kv = KvCache::new(config, sequences.blocks, E::BYTES).unwrap();
        let mut logits = vec![Vec::new(); prompts.len()];
        for step in 0.. {
            let turn = sequences.turn(step);
            if turn.is_empty() {
                break;
            }
            let rows = |&(s, rows): &(usize, usize)| (s, &prompts[s][sequences.next(s)..][..rows]);
            let work: Vec<_> = turn.iter().map(rows).collect();
            let plan = sequences.plan(&work);
            for (i, &end) in ends.iter().enumerate() {
                let begin = if i == 0 { 0 } else { ends[i - 1] };
                let stage = weights.stage(begin..end);
                let (a, kv) = (&mut activations, &mut kv);
                forward(&mut ops, &stage, &plan, a, kv, Want::Logits).unwrap();
            }
            for (row, values) in plan
                .logits
                .iter()
                .zip(ops.output.logits.chunks_exact(config.vocab_size))
            {
                logits[row.slot].extend_from_slice(values);
            }
        }
        logits
    }

    pub fn logits<E: Element>(mode: ComputeMode) {
        for model in models() {
            let prompts = prompts(model.config());
            let got = run::<E>(mode, &model, &prompts, MAX_CHUNK);
            for (prompt, got) in prompts.iter().zip(&got) {
                let real = oracle::forward(Reals, &model, prompt).concat();
                match mode.precision {
                    Precision::Exact => {
                        let expected = oracle::forward(letter(mode), &model, prompt).concat();
                        assert_same_bits(got, &expected, &format!("{mode:?}"));
                        // The eval checker's tolerance, which the exact arithmetic must meet on a tame model despite
                        // its own roundings.
                        for (got, real) in got.iter().zip(&real) {
                            assert!((f64::from(*got) - real).abs() <= 1e-5 + 1e-4 * real.abs());
                        }
                    }
                    Precision::Fast => check_divergence(mode, model.config().vocab_size, got, &real),
                }
            }
        }
    }

    /// The limit of `fast` on tame models: mean KL divergence at most 1e-3, the same argmax in 98 of 100 rows.
    fn check_divergence(mode: ComputeMode, vocab: usize, got: &[f32], real: &[f64]) {
        let rows = real.len() / vocab;
        let (mut divergence, mut agree) = (0.0, 0);
        for (got, real) in got.chunks_exact(vocab).zip(real.chunks_exact(vocab)) {
            let got: Vec<f64> = got.iter().copied().map(f64::from).collect();
            let (p, q) = (log_softmax(real), log_softmax(&got));
            divergence += p.iter().zip(&q).map(|(p, q)| p.exp() * (p - q)).sum::<f64>() / rows as f64;
            let first = |l: &[f64]| (0..vocab).reduce(|best, i| if l[i] > l[best] { i } else { best });
            agree += usize::from(first(&p) == first(&q));
        }
        assert!(divergence <= 1e-3, "{mode:?}: mean KL divergence {divergence:e}");
        assert!(100 * agree >= 98 * rows, "{mode:?}: {agree} of {rows} rows agree");
    }

    fn log_softmax(logits: &[f64]) -> Vec<f64> {
        let max = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let sum: f64 = logits.iter().map(|l| (l - max).exp()).sum();
        logits.iter().map(|l| l - max - sum.ln()).collect()
    }

    /// A sequence gives the same bits alone, token by token, as among others in chunks.
    pub fn company<E: Element>(mode: ComputeMode) {
        for model in models() {
            let prompts = prompts(model.config());
            let together = run::<E>(mode, &model, &prompts, MAX_CHUNK);
            for (prompt, together) in prompts.iter().zip(&together) {
                let alone = run::<E>(mode, &model, std::slice::from_ref(prompt), 1);
                assert_same_bits(together, &alone[0], &format!("{mode:?}"));
            }
        }
    }

    /// Layers in stages, each of which starts from the rows of the one before, give the same bits as all layers at
    /// once.
    pub fn stages<E: Element>(mode: ComputeMode) {
        let model = &models()[0];
        let prompts = prompts(model.config());
        let whole = run::<E>(mode, model, &prompts, MAX_CHUNK);
        for ends in [&[1, 3][..], &[1, 2, 3]] {
            let cut = run_in_stages::<E>(mode, model, &prompts, MAX_CHUNK, ends);
            assert_same_bits(&cut.concat(), &whole.concat(), &format!("{mode:?} {ends:?}"));
        }
    }
}
