//! Groups of devices: the bits of one device whatever the number of stages and the cut, whatever order queues run in, by
//! peer copies and by way of the host.

use super::answers::{Answers, Run, answer, options, prompts};
use super::devices::all;
use super::synthetic::{SyntheticCheckpoint, Temperament};
use getp::backend::gpu::driver::simt::{Call, Live, Order, Setup, System};
use getp::backend::gpu::open::open_cut;
use getp::backend::gpu::weights::WeightSource;
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
    let mut replica = open_cut(all(system), ends, &WeightSource::Checkpoint(checkpoint), &options).unwrap();
    assert_eq!(replica.depth(), ends.len() + 1);
    let config = checkpoint.config();
    let run = Run {
        more: 6,
        want,
        record_all: false,
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
            let expected = of(&[layers], Order::Eager, true, Want::Greedy);
            for (i, ends) in cuts.iter().enumerate() {
                let order = [Order::Deferred, Order::Random(i as u64), Order::Eager][i % 3];
                let what = format!("{precision:?}, {ends:?}, {order:?}");
                assert_same(&of(ends, order, true, Want::Greedy), &expected, &what);
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
        let found = answers(&system, &checkpoint, ends, Precision::Fast, Want::Greedy);
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
