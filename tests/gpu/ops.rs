//! Every operation compared with float64: in `fast` on FP16 and on BF16 and in `exact`, with weights in every format,
//! and at shapes that are not multiples of a tile or a slab. Steps mix prompt chunks of odd lengths and decoding rows.
//!
//! Results are overwritten with garbage before they are computed: buffers with NaN, the KV cache with finite numbers,
//! since in a run it holds only those of earlier requests. With `--nocapture` each error is printed as a share of its
//! bound.

mod sums;
mod walk;

use super::answers::options;
use super::bounds::{self, Bounds};
use super::plans::Sequences;
use super::synthetic::{Dense, Experts, Synthetic, SyntheticCheckpoint, Temperament};
use super::wgmma;
use super::wide::Wide;
use getp::backend::gpu::catalogue::Elements;
use getp::backend::gpu::context::Context;
use getp::backend::gpu::memory::SharedDriver;
use getp::backend::gpu::open;
use getp::backend::gpu::replica::GpuReplica;
use getp::batch::{StepPlan, Want};
use getp::checkpoint::{Checkpoint, TensorId};
use getp::config::ModelConfig;
use getp::model::{Activations, forward, forward_layer};
use getp::ops::Ops;
use getp::options::{Options, Precision};
use getp::replica::Replica;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use std::sync::Arc;
use walk::Walk;

/// Most rows of a step, and of one sequence in it: more than those that are sorted and gathered at once.
const MAX_ROWS: usize = 135;

/// Lengths of sequences; the first wraps around its ring of the sliding window.
const LENGTHS: [usize; 4] = [294, 24, 40, 31];

/// Each step: rows of its sequences, decoding ones first, and the number of decoding ones.
const STEPS: [(&[(usize, usize)], usize); 10] = [
    (&[(0, 1)], 0),
    (&[(0, 64), (1, 1)], 0),
    (&[(1, 1), (0, 16)], 1),
    (&[(2, 33)], 0),
    (&[(2, 1), (0, 1), (1, 1)], 3),
    (&[(1, 1), (2, 1)], 2),
    (&[(2, 1), (1, 1), (3, 31)], 2),
    (&[(0, 135)], 0),
    (&[(1, 1), (0, 64)], 1),
    (&[(0, 1), (2, 1), (1, 1)], 3),
];

/// What is wide in a wide model: the second layer's first matrix.
pub const WIDE: TensorId = TensorId::Qkv { layer: 1 };

/// Dimensions, in this order: hidden, intermediate, vocabulary; head_dim, heads, kv heads; experts, experts per token.
fn shape(
    [hidden_dim, intermediate_dim, vocab_size]: [usize; 3],
    [head_dim, n_attn_heads, n_kv_heads]: [usize; 3],
    [n_experts, experts_per_token]: [usize; 2],
    sliding_window: usize,
) -> ModelConfig {
    let config = ModelConfig {
        vocab_size,
        hidden_dim,
        n_experts,
        experts_per_token,
        intermediate_dim,
        head_dim,
        n_attn_heads,
        n_kv_heads,
        sliding_window,
        seq_len: 320,
        ..ModelConfig::preset_7m()
    };
    config.check().expect("the shape is a model's")
}

/// The 7m's, except for its vocabulary.
pub fn tiny() -> ModelConfig {
    shape([32, 64, 301], [32, 2, 1], [32, 4], 128)
}

/// No dimension fills a slab, the query heads per kv head are no power of two, and there are more experts than a small
/// cluster of blocks has waves.
pub fn odd() -> ModelConfig {
    shape([96, 160, 257], [24, 6, 2], [41, 4], 21)
}

/// The 20b's heads, whose attention uses the matrix cores.
fn grouped() -> ModelConfig {
    shape([160, 96, 130], [64, 16, 2], [5, 3], 128)
}

pub fn model(config: &ModelConfig, dense: Dense, experts: Experts) -> SyntheticCheckpoint {
    let synthetic = Synthetic {
        config: config.clone(),
        seed: 71,
        temperament: Temperament::Wild,
        dense,
        experts,
    };
    SyntheticCheckpoint::widened(&synthetic.check().expect("the model can be made"))
}

/// A replica for steps of so many rows.
pub fn replica(
    driver: SharedDriver,
    checkpoint: &dyn Checkpoint,
    precision: Precision,
    rows: usize,
) -> (GpuReplica, Bounds) {
    let options = options(precision, rows, rows);
    replica_on(super::context(driver), checkpoint, &options)
}

/// The same on a device with its kernels loaded.
pub fn replica_on(context: Arc<Context>, checkpoint: &dyn Checkpoint, options: &Options) -> (GpuReplica, Bounds) {
    let target = context.target;
    let ends = [checkpoint.config().n_layers];
    let replica = open::inspect::open_cut(vec![context], &ends, checkpoint, options).unwrap();
    let numbers = replica.numbers();
    (replica, Bounds { numbers, target })
}

/// Walks through the steps. `format` is what the activations must have become.
pub fn walk(context: Arc<Context>, checkpoint: &dyn Checkpoint, precision: Precision, elements: Elements, name: &str) {
    let config = checkpoint.config();
    let mut rng = ChaCha8Rng::seed_from_u64(72);
    let (replica, bounds) = replica_on(context, checkpoint, &options(precision, MAX_ROWS, MAX_ROWS));
    assert_eq!(bounds.numbers.elements, elements, "{name}");
    let room = replica.kv_blocks();
    let mut sequences = Sequences::new(&mut rng, config, room.tokens, &LENGTHS, MAX_ROWS);
    assert!(sequences.blocks.count <= room.count);
    let mut walk = Walk::new(replica, checkpoint, bounds, LENGTHS.len());
    walk.leave_stale_keys();
    for (step, &(work, decoding)) in STEPS.iter().enumerate() {
        let tokens: Vec<Vec<u32>> = work
            .iter()
            .map(|&(_, rows)| {
                (0..rows)
                    .map(|_| rng.random_range(0..config.vocab_size as u32))
                    .collect()
            })
            .collect();
        let work: Vec<_> = work
            .iter()
            .zip(&tokens)
            .map(|(&(s, _), tokens)| (s, &tokens[..]))
            .collect();
        let mut plan = sequences.plan(&work);
        plan.decode_chunks = decoding;
        want_some(&mut plan, step);
        walk.step(&plan, [Want::Tokens, Want::Logits][step % 2]);
    }
    walk.worst.print(name);
}

/// Asks for the logits of the last row and of every third.
fn want_some(plan: &mut StepPlan, step: usize) {
    let last = plan.rows() - 1;
    plan.logits
        .retain(|wanted| wanted.row == last || (wanted.row + step).is_multiple_of(3));
}

const PRECISIONS: [Precision; 2] = [Precision::Fast, Precision::Exact];

fn walk_both(checkpoint: &dyn Checkpoint, elements: Elements, name: &str) {
    for precision in PRECISIONS {
        let driver = super::drivers().remove(0);
        walk(
            super::context(driver),
            checkpoint,
            precision,
            elements,
            &format!("{name}, {precision:?} in {elements:?}"),
        );
    }
}

#[test]
fn released_formats_in_fp16() {
    for (name, config) in [("tiny", tiny()), ("odd", odd()), ("grouped", grouped())] {
        walk_both(&model(&config, Dense::Bf16, Experts::Mxfp4), Elements::F16, name);
    }
}

#[test]
fn weights_too_wide_for_fp16_go_through_bf16() {
    for (name, config) in [("tiny", tiny()), ("odd", odd()), ("grouped", grouped())] {
        let model = Wide::new(model(&config, Dense::Bf16, Experts::Mxfp4), WIDE);
        walk_both(&model, super::wide_elements(), &format!("{name}, wide range"));
    }
}

#[test]
fn float32_matrices_and_bfloat16_experts() {
    let model = model(&odd(), Dense::F32, Experts::Bf16);
    walk_both(&model, Elements::F16, "odd, float32, bfloat16");
}

#[test]
fn float32_experts() {
    let model = model(&grouped(), Dense::Bf16, Experts::F32);
    walk_both(&model, Elements::F16, "grouped, bfloat16, float32");
}

/// Steps of few rows, whose experts find them by themselves, and of one row more, which are sorted.
#[test]
fn few_rows() {
    for experts in [[5, 1], [32, 4], [128, 8]] {
        let config = shape([64, 64, 40], [16, 2, 1], experts, 128);
        let checkpoint = model(&config, Dense::Bf16, Experts::Mxfp4);
        let (replica, bounds) = replica(super::drivers().remove(0), &checkpoint, Precision::Fast, 65);
        let counts = [1, 2, 3, 5, 16, 17, 64, 65];
        let mut rng = ChaCha8Rng::seed_from_u64(77);
        let mut sequences = Sequences::new(&mut rng, &config, replica.kv_blocks().tokens, &counts, 65);
        let mut walk = Walk::new(replica, &checkpoint, bounds, counts.len());
        for (sequence, rows) in counts.into_iter().enumerate() {
            let tokens: Vec<u32> = (0..rows).map(|_| rng.random_range(0..40)).collect();
            walk.step(&sequences.plan(&[(sequence, &tokens)]), Want::Tokens);
        }
        walk.worst.print(&format!("few rows, experts {experts:?}"));
    }
}

/// Sums of so many slabs that no kernel has all on their way, and a router of so many that it takes them in parts.
#[test]
fn sums_longer_than_what_is_on_its_way() {
    let config = shape([1600, 1088, 40], [64, 24, 3], [4, 2], 128);
    let checkpoint = model(&config, Dense::Bf16, Experts::Mxfp4);
    let (replica, bounds) = replica(super::drivers().remove(0), &checkpoint, Precision::Fast, 17);
    let mut rng = ChaCha8Rng::seed_from_u64(80);
    let mut sequences = Sequences::new(&mut rng, &config, replica.kv_blocks().tokens, &[3, 17], 17);
    let mut walk = Walk::new(replica, &checkpoint, bounds, 2);
    for (sequence, rows, decoding) in [(0, 1, 0), (1, 17, 0), (0, 1, 1)] {
        let tokens: Vec<u32> = (0..rows).map(|_| rng.random_range(0..40)).collect();
        let mut plan = sequences.plan(&[(sequence, &tokens)]);
        plan.decode_chunks = decoding;
        walk.step(&plan, Want::Tokens);
    }
    walk.worst.print("long sums");
}

/// A single row's norm, product, rotation and storing give the same bits by one kernel as by several, and as often as
/// they are launched.
#[test]
fn a_row_normed_by_its_product_has_the_same_bits() {
    // Of the last two the product has more slabs than a warp has on their way.
    for (hidden, experts) in [(160, [5, 1]), (1120, [5, 3]), (2880, [32, 4]), (3072, [5, 1])] {
        let config = shape([hidden, 96, 40], [64, 16, 2], experts, 128);
        let checkpoint = model(&config, Dense::Bf16, Experts::Mxfp4);
        let (mut replica, _) = replica(super::drivers().remove(0), &checkpoint, Precision::Fast, 1);
        let mut rng = ChaCha8Rng::seed_from_u64(79);
        let block = replica.kv_blocks().tokens;
        let plan = Sequences::new(&mut rng, &config, block, &[1], 1).plan(&[(0, &[3])]);
        // The second layer's stream, queries, and attention to what was stored.
        let mut second = |apart: bool| {
            let parts = replica.begin(&plan, Want::Tokens).unwrap();
            let (ops, kv, weights) = (parts.ops, parts.kv, parts.weights);
            let Activations { x, scratch } = parts.activations;
            let x = ops.embed(&plan, weights.embedding.as_ref().unwrap(), x).unwrap();
            let x = forward_layer(ops, &weights.layers[0], 0, &plan, x, scratch, kv).unwrap();
            for buffer in [&mut scratch.t, &mut scratch.qkv, &mut scratch.attention] {
                ops.spoil(buffer).unwrap();
            }
            ops.spoil_workspace().unwrap();
            let w = &weights.layers[1];
            let (mut x, mut t) = ops.norm(x, &w.attn_norm, &mut scratch.t).unwrap();
            if apart {
                t = ops.normed(t).unwrap().into();
            }
            let qkv = ops.qkv(t, &w.qkv, &w.qkv_bias, &mut scratch.qkv).unwrap();
            let queries = ops.rope_store(&plan, 1, qkv, kv).unwrap();
            let attended = ops.attention(&plan, queries, &w.sinks, kv, &mut scratch.attention);
            let attended = ops.read(attended.unwrap(), 1, config.q_dim()).unwrap();
            let stream = ops.read(&x.memory().x, 1, config.hidden_dim).unwrap();
            let values = [stream, ops.queries(1).unwrap(), attended].concat();
            assert!(values.iter().all(|value| value.is_finite()));
            values.into_iter().map(f32::to_bits).collect::<Vec<_>>()
        };
        let apart = second(true);
        for _ in 0..2 {
            assert!(second(false) == apart, "{hidden}, experts {experts:?}");
        }
    }
}

/// The kernels of a step: five, and in each layer norm, qkv_store, attention, attn_out, norm_route, mlp1 and mlp2. From
/// five rows on the emulated device's blocks route several rows, and from 65 on sort is apart.
#[cfg(feature = "simt")]
#[test]
fn few_rows_take_few_launches() {
    use getp::backend::gpu::driver::simt::{Call, Setup, System};
    let config = tiny();
    let checkpoint = model(&config, Dense::Bf16, Experts::Mxfp4);
    let system = System::new(&Setup::default());
    let launches = || system.calls(Some(0), Some(Call::Launch)) as usize;
    let counts = [(1, 7), (4, 7), (5, 7), (16, 7), (17, 7), (64, 7), (65, 8)];
    for (rows, of_layer) in counts {
        let (mut replica, _) = replica(system.driver(0).unwrap(), &checkpoint, Precision::Fast, rows);
        let mut rng = ChaCha8Rng::seed_from_u64(78);
        let block = replica.kv_blocks().tokens;
        let mut sequences = Sequences::new(&mut rng, &config, block, &[rows], rows);
        let plan = sequences.plan(&[(0, &vec![1; rows])]);
        let before = launches();
        let parts = replica.begin(&plan, Want::Tokens).unwrap();
        let stage = parts.weights.stage(0..config.n_layers);
        let (a, kv) = (&mut *parts.activations, &mut *parts.kv);
        forward(parts.ops, &stage, &plan, a, kv, Want::Tokens).unwrap();
        assert_eq!(launches() - before, 5 + of_layer * config.n_layers, "{rows} rows");
    }
}

/// Layers in stages, each of which starts from the rows of the one before, give the same logits as all layers at once,
/// bit for bit.
#[test]
fn stages_give_the_same_bits() {
    const ROWS: usize = 21;
    for precision in PRECISIONS {
        let config = ModelConfig {
            n_layers: 3,
            ..grouped()
        };
        let checkpoint = model(&config, Dense::Bf16, Experts::Mxfp4);
        // In stages that end before these layers.
        let logits = |ends: &[usize]| {
            let (mut replica, _) = replica(super::drivers().remove(0), &checkpoint, precision, ROWS);
            let mut rng = ChaCha8Rng::seed_from_u64(75);
            let block = replica.kv_blocks().tokens;
            let mut sequences = Sequences::new(&mut rng, &config, block, &[ROWS], ROWS);
            let tokens: Vec<u32> = (0..ROWS as u32).collect();
            let plan = sequences.plan(&[(0, &tokens)]);
            let parts = replica.begin(&plan, Want::Logits).unwrap();
            for (i, &end) in ends.iter().enumerate() {
                let begin = if i == 0 { 0 } else { ends[i - 1] };
                let stage = parts.weights.stage(begin..end);
                let (a, kv) = (&mut *parts.activations, &mut *parts.kv);
                forward(parts.ops, &stage, &plan, a, kv, Want::Logits).unwrap();
            }
            let logits = parts.ops.logits(plan.logits.len()).unwrap();
            logits.into_iter().map(f32::to_bits).collect::<Vec<_>>()
        };
        let whole = logits(&[3]);
        assert!(!whole.is_empty());
        for ends in [&[1, 3][..], &[1, 2, 3]] {
            assert!(logits(ends) == whole, "{precision:?} {ends:?}");
        }
    }
}

/// A plan that was not sent to the device is refused.
#[test]
fn operations_of_another_plan_are_refused() {
    let config = tiny();
    let checkpoint = model(&config, Dense::Bf16, Experts::Mxfp4);
    let (mut replica, _) = replica(super::drivers().remove(0), &checkpoint, Precision::Fast, 4);
    let mut rng = ChaCha8Rng::seed_from_u64(76);
    let block = replica.kv_blocks().tokens;
    let mut sequences = Sequences::new(&mut rng, &config, block, &[4], 4);
    let (first, second) = (sequences.plan(&[(0, &[1])]), sequences.plan(&[(0, &[2, 3])]));
    let parts = replica.begin(&first, Want::Tokens).unwrap();
    let table = parts.weights.embedding.as_ref().unwrap();
    let error = parts.ops.embed(&second, table, &mut parts.activations.x).err();
    assert!(error.unwrap().to_string().contains("another plan"));
    assert!(parts.ops.resume(&second, &mut parts.activations.x).is_err());
    assert!(parts.ops.resume(&first, &mut parts.activations.x).is_ok());
}

/// The order in which the machine runs a block's threads must not matter. More orders are those of AMD's machine code
/// (tests/programs/amd.sh).
#[cfg(feature = "simt")]
#[test]
fn in_odd_orders_of_threads() {
    use getp::backend::gpu::driver::simt::{Schedule, Setup, System};
    for (schedule, config) in [(Schedule::Random(73), odd()), (Schedule::OneWaveFirst(74), grouped())] {
        let system = System::new(&Setup {
            schedule,
            ..Setup::default()
        });
        let checkpoint = model(&config, Dense::Bf16, Experts::Mxfp4);
        for precision in PRECISIONS {
            let driver = system.driver(0).unwrap();
            walk(
                super::context(driver),
                &checkpoint,
                precision,
                Elements::F16,
                &format!("{schedule:?}, {precision:?}"),
            );
        }
    }
}
