//! Groups of devices: the bits of one device whatever the number of stages and the cut, whatever order queues run in,
//! by peer copies and by way of the host.

use super::answers::{Answers, Run, answer, options, prompts};
use super::devices::{self, all};
use super::fake;
use super::model::{self, Drawing, Model};
use super::synthetic::{SyntheticCheckpoint, Temperament};
use getp::abi::lifecycle::{self, Backends};
use getp::backend::cpu;
use getp::backend::gpu;
use getp::backend::gpu::driver::simt::{Call, Live, Order, Setup, System};
use getp::backend::gpu::open::inspect::open_cut;
use getp::batch::Want;
use getp::checkpoint::Checkpoint;
use getp::config::ModelConfig;
use getp::options::{Options, Precision};
use getp::replica::Replica;
use std::sync::Arc;

fn system(devices: usize, order: Order, peer_access: bool) -> Arc<System> {
    System::new(&Setup {
        devices,
        capacity_bytes: 256 << 20,
        order,
        threads: 1,
        peer_access,
        ..Setup::default()
    })
}

/// A model of so many layers, windowed and full ones in turn.
fn checkpoint(n_layers: usize) -> SyntheticCheckpoint {
    let config = ModelConfig {
        vocab_size: 301,
        n_layers,
        n_experts: 4,
        experts_per_token: 2,
        seq_len: 64,
        sliding_window: 16,
        ..ModelConfig::preset_7m()
    };
    SyntheticCheckpoint::new(&config, 6, Temperament::Tame).unwrap()
}

/// What a group of devices answers that is cut before these layers; nothing of it is left on them.
fn answers(
    system: &Arc<System>,
    checkpoint: &dyn Checkpoint,
    ends: &[usize],
    precision: Precision,
    want: Want,
) -> Answers {
    let options = Options {
        kv_mb: 1,
        ..options(precision, 2, 16)
    };
    let contexts = all(system).into_iter().map(super::context).collect();
    let mut replica = open_cut(contexts, ends, checkpoint, &options).unwrap();
    assert_eq!(replica.depth(), ends.len() + 1);
    let config = checkpoint.config();
    let run = Run {
        more: 6,
        want,
        record_all: false,
        ends: true,
        share_beginnings: false,
        preempts: false,
    };
    let answers = answer(&mut replica, config, &prompts(config, 3), run);
    drop(replica);
    for device in 0..system.devices() {
        assert_eq!(system.live(device), Live::default(), "device {device}");
    }
    answers
}

/// The largest logits of every position, to the bit, and all answers.
fn assert_same(found: &Answers, expected: &Answers, what: &str) {
    assert_eq!(found.tokens, expected.tokens, "{what}");
    let bits = |answers: &Answers| -> Vec<_> {
        let greedy = answers.greedy.iter();
        greedy
            .map(|(at, (token, logit))| (*at, *token, logit.to_bits()))
            .collect()
    };
    assert!(bits(found) == bits(expected), "{what}: other logits");
}

#[test]
fn any_cut_gives_the_bits_of_one_device() {
    for (layers, cuts) in [
        (2, &[&[1, 2][..]][..]),
        (4, &[&[2, 4], &[1, 4], &[3, 4], &[1, 2, 4], &[1, 2, 3, 4]]),
    ] {
        let checkpoint = checkpoint(layers);
        for precision in [Precision::Exact, Precision::Fast] {
            let of = |ends: &[usize], order, peer_access, want| {
                let system = system(ends.len(), order, peer_access);
                answers(&system, &checkpoint, ends, precision, want)
            };
            let expected = of(&[layers], Order::Eager, true, Want::Tokens);
            for (i, ends) in cuts.iter().enumerate() {
                let order = [Order::Deferred, Order::Random(i as u64), Order::Eager][i % 3];
                let what = format!("{precision:?}, {ends:?}, {order:?}");
                assert_same(&of(ends, order, true, Want::Tokens), &expected, &what);
                if i == 0 {
                    let with_logits = of(ends, order, true, Want::Logits);
                    assert_same(&with_logits, &expected, &format!("{what}, logits"));
                }
            }
        }
    }
}

/// As late as events allow, and in many odd orders: a copy that does not wait for what it copies brings something else.
#[test]
fn queues_may_run_in_any_order_they_allow() {
    let checkpoint = checkpoint(3);
    let of = |ends: &[usize], order, peer_access| {
        let system = system(ends.len(), order, peer_access);
        let found = answers(&system, &checkpoint, ends, Precision::Fast, Want::Tokens);
        let copies = system.calls(None, Some(Call::CopyFromPeer));
        assert_eq!(copies > 0, peer_access && ends.len() > 1);
        found
    };
    let expected = of(&[3], Order::Eager, true);
    let orders = [Order::Eager, Order::Deferred]
        .into_iter()
        .chain((10..14).map(Order::Random));
    for order in orders {
        for peer_access in [true, false] {
            let what = format!("{order:?}, peer access {peer_access}");
            assert_same(&of(&[1, 2, 3], order, peer_access), &expected, &what);
        }
    }
}

/// A program on a system whose devices make groups of `size`: so many replicas.
fn run(model: &Model, drawing: Drawing, system: &Arc<System>, size: usize, replicas: usize) {
    let mut program = model.program(drawing);
    let open = |checkpoint: &dyn Checkpoint, own: &Options| {
        let own = Options {
            group: Some(size),
            ..own.clone()
        };
        devices::open(all(system), checkpoint, &own)
    };
    let backends = Backends {
        open: &open,
        fallback: &cpu::open,
        join: &|| Ok(None),
    };
    model::warm_up(&mut program, &backends).unwrap();
    let lines = |engine: &getp::engine::Engine| {
        let of = |replica: &dyn Replica| {
            (
                replica.describe(),
                replica.stages().into_iter().map(|p| p.name).collect::<Vec<_>>(),
            )
        };
        engine.replicas().map(of).collect::<Vec<_>>()
    };
    let lines = lifecycle::with_engine(&raw const *program.transformer, lines).unwrap();
    assert_eq!(lines.len(), replicas);
    if size == 2 {
        assert!(lines[0].0.starts_with("simt:0+1 "), "{lines:?}");
        assert!(
            lines[0].1[0].starts_with("simt:0: the embedding, layers 0 to 0; weights 0."),
            "{lines:?}"
        );
        assert!(
            lines[0].1[1].starts_with("simt:1: layers 1 to 1, the unembedding; weights 0."),
            "{lines:?}"
        );
    }
    model::inference(&mut program, &backends).unwrap();
    assert_eq!(model::replicas(&program), replicas);
    fake::finish(&mut program).unwrap();
    assert_eq!(program.rows(), model.expected(drawing), "{drawing:?}, groups of {size}");
    for device in 0..system.devices() {
        assert_eq!(system.live(device), Live::default(), "device {device}");
    }
}

#[test]
fn groups_draw_as_one_device_does() {
    let model = Model::new();
    for drawing in [Drawing::GREEDY, Drawing::NUCLEUS, Drawing::WIDE, Drawing::ALL] {
        run(&model, drawing, &system(2, Order::Random(3), true), 2, 1);
    }
    run(&model, Drawing::WIDE, &system(4, Order::Deferred, false), 2, 2);
}

/// With ever more memory: too little, a group, and a replica on each device. What is chosen has room when it is opened.
#[test]
fn devices_go_together_where_one_is_too_small() {
    let config = ModelConfig {
        vocab_size: 4001,
        n_layers: 4,
        seq_len: 128,
        ..ModelConfig::preset_7m()
    };
    let checkpoint = SyntheticCheckpoint::new(&config, 6, Temperament::Tame).unwrap();
    let own = Options {
        kv_mb: 0,
        ..options(Precision::Fast, 4, 64)
    };
    let opened = |mib: u64, device_mb: usize| {
        let system = System::new(&Setup {
            devices: 2,
            capacity_bytes: mib << 20,
            ..Setup::default()
        });
        let own = Options {
            device_mb,
            ..own.clone()
        };
        let opened = gpu::open::open(all(&system), &checkpoint, &own);
        opened.map(|replicas| replicas.iter().map(|r| r.stages().len()).collect::<Vec<_>>())
    };
    let mut found = Vec::new();
    for mib in 2..24 {
        let devices = opened(mib, 0).unwrap_or_else(|error| {
            assert!(
                error.to_string().contains("the weights and a step do not fit"),
                "{mib} MiB: {error}"
            );
            Vec::new()
        });
        // A limit is as good as a smaller device.
        assert_eq!(opened(64, mib as usize).unwrap_or_default(), devices, "{mib} MiB");
        if found.last() != Some(&devices) {
            found.push(devices);
        }
    }
    assert_eq!(found, [vec![], vec![2], vec![0, 0]]);
}

/// A device of little memory, of which what belongs to a step takes much: the KV cache has what that leaves. What
/// attention uses for the keys of sequences of 4,096 positions, one for each row, would not fit most of these devices.
#[test]
fn the_kv_cache_leaves_room_for_a_step_on_a_small_device() {
    let opened = |checkpoint: &SyntheticCheckpoint, mib: usize| {
        let options = Options {
            device_mb: mib,
            precision: Some(Precision::Fast),
            ..Options::default()
        };
        gpu::open::open(all(&System::new(&Setup::default())), checkpoint, &options)
    };
    for seq_len in [256, 4096] {
        let config = ModelConfig {
            vocab_size: 512,
            n_experts: 4,
            experts_per_token: 2,
            seq_len,
            sliding_window: 8,
            ..ModelConfig::preset_7m()
        };
        let checkpoint = SyntheticCheckpoint::new(&config, 6, Temperament::Tame).unwrap();
        let mut most = 0;
        for mib in [48, 72, 96, 128, 192] {
            let replicas = opened(&checkpoint, mib).unwrap_or_else(|error| panic!("{seq_len}, {mib} MiB: {error}"));
            let blocks = replicas[0].kv_blocks().count;
            assert!(blocks >= most, "{mib} MiB: {blocks} blocks, {most} with less");
            most = blocks;
        }
    }
}
