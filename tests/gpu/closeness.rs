//! The difference of whole models from the CPU's `exact`, which equals the baseline bit for bit: the logits of every
//! position of given tokens, and the residual stream after each layer. With `--nocapture` the differences are printed.
//!
//! The ignored tests need a GPU. They use models of the 20b shape with `GETP_TEST_LAYERS` layers (default 4), and
//! `GETP_TEST_POSITIONS` positions (default 16) of each of two requests.

use super::answers::{Answers, Run, answer, options};
use super::ops::{WIDE, replica};
use super::plans::Sequences;
use super::synthetic::{Synthetic, SyntheticCheckpoint, Temperament};
use super::wide::Wide;
use super::{drivers, open, wide_elements};
use getp::backend::cpu;
use getp::backend::gpu::catalogue::Elements;
use getp::backend::gpu::replica::GpuReplica;
use getp::backend::gpu::replica::inspect::Operands;
use getp::batch::{StepPlan, Want};
use getp::checkpoint::Checkpoint;
use getp::config::ModelConfig;
use getp::model::forward_layer;
use getp::ops::Ops;
use getp::options::Precision;
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;

/// Rows of a step.
const ROWS: usize = 64;

/// The 20b's proportions and heads, made small.
fn small(n_layers: usize) -> ModelConfig {
    ModelConfig {
        vocab_size: 1010,
        hidden_dim: 320,
        n_experts: 8,
        experts_per_token: 4,
        intermediate_dim: 320,
        n_layers,
        head_dim: 64,
        n_attn_heads: 16,
        n_kv_heads: 2,
        seq_len: 256,
        sliding_window: 32,
        ..ModelConfig::preset_20b()
    }
}

/// The smallest model with its whole vocabulary.
fn seven() -> ModelConfig {
    ModelConfig {
        seq_len: 256,
        ..ModelConfig::preset_7m()
    }
}

/// The 20b's shape.
fn real() -> ModelConfig {
    ModelConfig {
        n_layers: from_environment("GETP_TEST_LAYERS", 4),
        seq_len: 256,
        ..ModelConfig::preset_20b()
    }
}

fn from_environment(name: &str, default: usize) -> usize {
    std::env::var(name).map_or(default, |value| value.parse().expect("a number"))
}

fn model(config: &ModelConfig, temperament: Temperament) -> SyntheticCheckpoint {
    SyntheticCheckpoint::packed(&Synthetic::new(config, 91, temperament).unwrap())
}

/// Requests of so many tokens each.
fn requests(config: &ModelConfig, n: usize, positions: usize) -> Vec<Vec<u32>> {
    let token = |i: usize| ((i + 1) * 104_729 % config.vocab_size) as u32;
    (0..n)
        .map(|i| (0..positions).map(|j| token(i * positions + j)).collect())
        .collect()
}

/// The logits of every position.
struct Logits {
    baseline: Answers,
    prompts: Vec<Vec<u32>>,
}

impl Logits {
    fn new(checkpoint: &dyn Checkpoint, n: usize, positions: usize) -> Self {
        let config = checkpoint.config();
        let prompts = requests(config, n, positions);
        let mut cpu = cpu::open(checkpoint, &options(Precision::Exact, ROWS, ROWS)).unwrap();
        let baseline = answer(&mut *cpu, config, &prompts, run());
        Self { baseline, prompts }
    }

    fn compare(&self, checkpoint: &dyn Checkpoint, precision: Precision, name: &str) -> Closeness {
        let mut gpu = open(checkpoint, &options(precision, ROWS, ROWS));
        let answers = answer(&mut *gpu, checkpoint.config(), &self.prompts, run());
        assert_eq!(answers.logits.len(), self.prompts.concat().len());
        let mut closeness = Closeness::default();
        for (key, got) in &answers.logits {
            closeness.row(got, &self.baseline.logits[key]);
        }
        closeness.print(&format!("{name}, {}", gpu.describe()));
        closeness
    }
}

fn run() -> Run {
    Run {
        more: 0,
        want: Want::Logits,
        record_all: true,
        ends: false,
        share_beginnings: false,
        preempts: false,
    }
}

/// How far rows of logits are from the baseline's.
#[derive(Default)]
struct Closeness {
    rows: usize,
    /// The largest error, as a part of 1e-5 (5e-5, 1e-4) + 1e-4 times the baseline's logit.
    ratios: [f64; 3],
    divergence: f64,
    same_first: usize,
}

const ABSOLUTE: [f64; 3] = [1e-5, 5e-5, 1e-4];

impl Closeness {
    fn row(&mut self, got: &[f32], baseline: &[f32]) {
        for (&got, &expected) in got.iter().zip(baseline) {
            let (got, expected) = (f64::from(got), f64::from(expected));
            for (ratio, absolute) in self.ratios.iter_mut().zip(ABSOLUTE) {
                *ratio = ratio.max((got - expected).abs() / (absolute + 1e-4 * expected.abs()));
            }
            assert!(got.is_finite());
        }
        let (p, q) = (log_softmax(baseline), log_softmax(got));
        self.divergence += p.iter().zip(&q).map(|(p, q)| p.exp() * (p - q)).sum::<f64>();
        self.same_first += usize::from(getp::sampler::argmax(got) == getp::sampler::argmax(baseline));
        self.rows += 1;
    }

    fn mean_divergence(&self) -> f64 {
        self.divergence / self.rows as f64
    }

    fn print(&self, name: &str) {
        println!(
            "{name}: {} rows; largest error / (1e-5 + 1e-4 |logit|) {:.3}, with 5e-5 {:.3}, with 1e-4 {:.3}; \
            KL mean {:.2e}; first token the same in {}",
            self.rows,
            self.ratios[0],
            self.ratios[1],
            self.ratios[2],
            self.mean_divergence(),
            self.same_first
        );
    }

    /// The gate of `fast` on tame models.
    fn check_fast(&self) {
        assert!(self.mean_divergence() <= 1e-3);
        assert!(100 * self.same_first >= 98 * self.rows);
    }
}

fn log_softmax(logits: &[f32]) -> Vec<f64> {
    let max = logits.iter().copied().map(f64::from).fold(f64::NEG_INFINITY, f64::max);
    let sum: f64 = logits.iter().map(|&l| (f64::from(l) - max).exp()).sum();
    logits.iter().map(|&l| f64::from(l) - max - sum.ln()).collect()
}

#[test]
fn tame_models() {
    for (name, config, n, positions) in [("7m", seven(), 2, 12), ("small, 4 layers", small(4), 2, 50)] {
        let checkpoint = model(&config, Temperament::Tame);
        let logits = Logits::new(&checkpoint, n, positions);
        let exact = logits.compare(&checkpoint, Precision::Exact, &format!("tame {name}"));
        assert!(exact.ratios[0] <= 1.0);
        logits
            .compare(&checkpoint, Precision::Fast, &format!("tame {name}"))
            .check_fast();
    }
}

#[test]
fn wild_models() {
    for (name, config, n, positions, limit) in [("7m", seven(), 2, 12, 2), ("small, 2 layers", small(2), 2, 50, 1)] {
        let checkpoint = model(&config, Temperament::Wild);
        let logits = Logits::new(&checkpoint, n, positions);
        let exact = logits.compare(&checkpoint, Precision::Exact, &format!("wild {name}"));
        assert!(exact.ratios[limit] <= 1.0);
    }
}

#[test]
#[ignore = "for a device: gigabytes of weights"]
fn tame_20b() {
    let config = real();
    let checkpoint = model(&config, Temperament::Tame);
    let logits = Logits::new(&checkpoint, 2, from_environment("GETP_TEST_POSITIONS", 16));
    let name = format!("tame 20b, {} layers", config.n_layers);
    let exact = logits.compare(&checkpoint, Precision::Exact, &name);
    logits.compare(&checkpoint, Precision::Fast, &name).check_fast();
    assert!(exact.ratios[0] <= 1.0);
}

/// Two replicas of a model that take each layer from the same inputs: those of the first, which is `exact`.
struct Layers {
    exact: GpuReplica,
    fast: GpuReplica,
    plan: StepPlan,
    config: ModelConfig,
}

/// What a layer made of its inputs.
struct Outcome {
    x: Vec<f32>,
    experts: Vec<i32>,
}

impl Layers {
    fn new(checkpoint: &dyn Checkpoint, elements: Elements) -> Self {
        let config = checkpoint.config().clone();
        let [exact, fast] = [Precision::Exact, Precision::Fast].map(|precision| {
            let (replica, bounds) = replica(drivers().remove(0), checkpoint, precision, ROWS);
            assert_eq!(bounds.numbers.elements, elements);
            replica
        });
        let tokens = requests(&config, 1, ROWS).concat();
        let mut rng = ChaCha8Rng::seed_from_u64(92);
        let page = getp::backend::gpu::args::KV_PAGE;
        let mut plan = Sequences::new(&mut rng, &config, page, &[ROWS], ROWS).plan(&[(0, &tokens)]);
        plan.logits.clear();
        Self {
            exact,
            fast,
            plan,
            config,
        }
    }

    /// Each layer's error relative to what it should give, of the rows that both send to the same experts.
    fn check(&mut self, name: &str, most: f64) {
        let Self {
            exact,
            fast,
            plan,
            config,
        } = self;
        let (mut exact, mut fast) = (
            exact.begin(plan, Want::Tokens).unwrap(),
            fast.begin(plan, Want::Tokens).unwrap(),
        );
        exact
            .ops
            .embed(
                plan,
                exact.weights.embedding.as_ref().unwrap(),
                &mut exact.activations.x,
            )
            .unwrap();
        let mut x = exact.ops.read(&exact.activations.x.x, ROWS, config.hidden_dim).unwrap();
        for layer in 0..config.n_layers {
            let should = outcome(&mut exact, plan, config, layer, &x);
            let got = outcome(&mut fast, plan, config, layer, &x);
            let (error, rows) = distance(&got, &should);
            println!("{name}, layer {layer}: residual error {error:.2e}, {rows} of {ROWS} rows with the same experts");
            assert!(10 * rows >= 9 * ROWS, "too few rows are comparable");
            assert!(error <= most);
            x = should.x;
        }
    }
}

/// Runs a layer from `x`.
fn outcome(p: &mut Operands<'_>, plan: &StepPlan, config: &ModelConfig, layer: usize, x: &[f32]) -> Outcome {
    let (a, w) = (&mut *p.activations, &p.weights.layers[layer]);
    p.ops.write(&mut a.x.x, x).unwrap();
    let x = p.ops.resume(plan, &mut a.x).unwrap();
    let x = forward_layer(p.ops, w, layer, plan, x, &mut a.scratch, p.kv).unwrap();
    p.ops.settle(x).unwrap();
    Outcome {
        x: p.ops.read(&a.x.x, ROWS, config.hidden_dim).unwrap(),
        experts: p.ops.sent(&a.x.routes, ROWS).unwrap().experts,
    }
}

/// The relative distance of the rows sent to the same experts, and their number.
fn distance(got: &Outcome, should: &Outcome) -> (f64, usize) {
    let (h, k) = (should.x.len() / ROWS, should.experts.len() / ROWS);
    let (mut error, mut size, mut rows) = (0.0, 0.0, 0);
    for row in 0..ROWS {
        if got.experts[row * k..][..k] != should.experts[row * k..][..k] {
            continue;
        }
        rows += 1;
        for (&got, &should) in got.x[row * h..][..h].iter().zip(&should.x[row * h..][..h]) {
            error += f64::from(got - should).powi(2);
            size += f64::from(should).powi(2);
        }
    }
    ((error / size).sqrt(), rows)
}

/// The gates of `fast` on wild models, a layer at a time.
const FP16_ERROR: f64 = 3e-3;
const BF16_ERROR: f64 = 1.5e-2;

#[test]
fn layers_of_wild_models() {
    let config = small(4);
    let checkpoint = model(&config, Temperament::Wild);
    Layers::new(&checkpoint, Elements::F16).check("wild small in FP16", FP16_ERROR);
    Layers::new(&Wide::new(checkpoint, WIDE), wide_elements()).check("wild small in BF16", BF16_ERROR);
}

#[test]
#[ignore = "for a device: gigabytes of weights"]
fn layers_of_a_wild_20b() {
    let checkpoint = model(&real(), Temperament::Wild);
    Layers::new(&checkpoint, Elements::F16).check("wild 20b in FP16", FP16_ERROR);
    Layers::new(&Wide::new(checkpoint, WIDE), wide_elements()).check("wild 20b in BF16", BF16_ERROR);
}
