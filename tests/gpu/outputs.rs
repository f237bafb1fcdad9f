//! Outputs of a step other than the argmax: whole rows of logits in the replica's memory, sampled tokens, and times.

use super::open_on;
use super::plans::{decoding, drawing};
use super::synthetic::{SyntheticCheckpoint, Temperament};
#[cfg(feature = "simt")]
use getp::backend::gpu::driver::simt::Order;
use getp::backend::gpu::memory::SharedDriver;
use getp::backend::gpu::replica::GpuReplica;
use getp::batch::{Draw, MOST_TOP, RowScore, StepOutput, StepPlan, Want};
use getp::config::ModelConfig;
use getp::options::{Options, Precision};
use getp::profile::Operation;
use getp::replica::Replica;
use getp::sampler::Sampler;

/// Number of sequences, each in a row of its own.
const ROWS: usize = 3;

/// Vocabulary of the model whose logits are read.
const VOCAB: usize = 301;

/// Vocabulary of the model whose tokens are sampled: a row is more than two tiles of the kernel.
const WIDE: usize = 9001;

fn replica(vocab_size: usize, profile: bool) -> Box<dyn Replica> {
    replica_on(super::drivers(), vocab_size, profile)
}

/// A replica on the first of these devices.
fn replica_on(drivers: Vec<SharedDriver>, vocab_size: usize, profile: bool) -> Box<dyn Replica> {
    let config = ModelConfig {
        vocab_size,
        seq_len: 64,
        ..ModelConfig::preset_7m()
    };
    let checkpoint = SyntheticCheckpoint::new(&config, 6, Temperament::Tame).unwrap();
    let options = Options {
        precision: Some(Precision::Fast),
        max_batch: Some(8),
        step_tokens: Some(8),
        kv_mb: 16,
        profile,
        ..Options::default()
    };
    open_on(drivers, &checkpoint, &options)
}

/// A step in which all sequences decode at the same position.
fn plan(replica: &dyn Replica, position: usize, rows: usize) -> StepPlan {
    let window = replica.kv_blocks().count / ROWS - 1;
    decoding(rows, position, [1, window], |row| (17 * row + 5 * position) as i32)
}

fn step_for(replica: &mut dyn Replica, position: usize, rows: usize, want: Want) -> StepOutput {
    let plan = plan(replica, position, rows);
    replica.submit(&plan, want).unwrap();
    let mut output = StepOutput::default();
    replica.collect(&mut output).unwrap();
    output
}

fn step(replica: &mut dyn Replica, position: usize, rows: usize) -> StepOutput {
    let output = step_for(replica, position, rows, Want::Logits);
    assert_eq!(output.logits.len(), rows * VOCAB);
    assert!(output.drawn.is_empty());
    output
}

#[test]
fn rows_that_are_held_are_not_written_to() {
    let mut replica = replica(VOCAB, false);
    // Later steps have more rows: the host's buffers are too small for them.
    let held: Vec<_> = (0..5)
        .map(|position| {
            let output = step(&mut *replica, position, 1 + position.min(ROWS - 1));
            (output.logits.to_vec(), output)
        })
        .collect();
    for (before, output) in &held {
        assert!(
            before
                .iter()
                .zip(&*output.logits)
                .all(|(a, b)| a.to_bits() == b.to_bits())
        );
    }
    assert_ne!(held[3].0, held[4].0);
    drop(replica);
    assert_eq!(held[4].0, *held[4].1.logits);
}

/// A device that runs as late as possible reads a plan only when its step is waited for.
#[cfg(feature = "simt")]
#[test]
fn a_step_too_many_is_refused_and_spoils_none_under_way() {
    let late = super::devices::system(1, Order::Deferred);
    let mut replica = replica_on(super::devices::all(&late), VOCAB, false);
    let expected: Vec<_> = (0..2)
        .map(|position| step(&mut *replica, position, ROWS).greedy)
        .collect();
    for position in 0..2 {
        let plan = plan(&*replica, position, ROWS);
        replica.submit(&plan, Want::Tokens).unwrap();
    }
    let third = plan(&*replica, 2, 1);
    let error = replica.submit(&third, Want::Tokens).unwrap_err();
    assert!(error.to_string().contains("more than 2 steps under way"), "{error}");
    let mut output = StepOutput::default();
    for expected in expected {
        replica.collect(&mut output).unwrap();
        assert_eq!(output.greedy, expected);
    }
}

/// The KV cache leaves room for the logits of the largest steps under way, and for no others beside them.
#[cfg(feature = "simt")]
#[test]
fn steps_of_more_rows_need_no_more_device_memory() {
    let system = super::devices::system(1, Order::Eager);
    let mut replica = replica_on(super::devices::all(&system), WIDE, false);
    let mut bytes = Vec::new();
    // Two steps are under way when the largest is submitted.
    for (position, rows) in [1, 2, ROWS].into_iter().enumerate() {
        let plan = drawing(plan(&*replica, position, rows), |_| Draw {
            temperature: 1.0,
            topp: 0.9,
            coin: 0.5,
        });
        if position == 2 {
            replica.collect(&mut StepOutput::default()).unwrap();
        }
        replica.submit(&plan, Want::Tokens).unwrap();
        bytes.push(system.live(0).bytes);
    }
    assert_eq!(bytes, [bytes[0]; 3]);
    for _ in 0..2 {
        replica.collect(&mut StepOutput::default()).unwrap();
    }
}

#[test]
fn rows_given_back_are_written_to_again() {
    let mut replica = replica(VOCAB, false);
    let at = |output: &StepOutput| output.logits.as_ptr();
    let first = at(&step(&mut *replica, 0, 1));
    for position in 1..4 {
        assert_eq!(at(&step(&mut *replica, position, 1)), first);
    }
}

/// Temperatures at which rows are peaked, tame and flat.
const TEMPERATURES: [f32; 5] = [0.03, 0.3, 1.0, 40.0, 0.1];

#[test]
fn tokens_are_drawn_as_the_host_draws_them() {
    let (mut whole, mut drawing) = (replica(WIDE, false), replica(WIDE, false));
    let mut drawn = [0; 2];
    // The sum of all probabilities seldom exceeds the last but one: those rows are left to the host.
    let topps = [0.1, 0.5, 0.9, 0.99, 0.9999999, 1.0];
    for (position, (temperature, topp)) in TEMPERATURES.into_iter().flat_map(|t| topps.map(|p| (t, p))).enumerate() {
        let rows = 1 + position.min(ROWS - 1);
        let expected = step_for(&mut *whole, position, rows, Want::Logits);
        let plan = plan(&*drawing, position, rows);
        let plan = super::plans::drawing(plan, |row| Draw {
            temperature,
            topp,
            coin: ((7919 * position + row) % 97) as f32 / 97.0,
        });
        drawing.submit(&plan, Want::Tokens).unwrap();
        let mut output = StepOutput::default();
        drawing.collect(&mut output).unwrap();
        assert_eq!(output.greedy, expected.greedy);
        assert_eq!((output.drawn.len(), output.logits.len()), (rows, 0));
        let mut sampler = Sampler::new(WIDE);
        sampler.make_room(temperature, topp).unwrap();
        for (row, logits) in expected.logits.chunks_exact(WIDE).enumerate() {
            let expected = sampler.sample(logits, plan.logits[row].draw);
            assert!(output.drawn[row].is_none_or(|token| token == expected));
            drawn[usize::from(output.drawn[row].is_some())] += 1;
        }
        let backwards: Vec<usize> = (0..rows).rev().collect();
        drawing.fetch(&backwards, &mut output).unwrap();
        for (fetched, &row) in output.logits.chunks_exact(WIDE).zip(&backwards) {
            let logits = &expected.logits[row * WIDE..][..WIDE];
            assert!(fetched.iter().zip(logits).all(|(a, b)| a.to_bits() == b.to_bits()));
        }
        output.logits.give_back();
    }
    assert!(drawn.iter().all(|&n| n > 5), "{drawn:?}");
}

/// Where only the first tokens may be sampled, the argmax and the draws are those of a row that ends there.
#[test]
fn ids_beyond_those_that_may_be_sampled_are_never_found() {
    const DRAWABLE: usize = 4097;
    let (mut whole, mut cut) = (replica(WIDE, false), replica(WIDE, false));
    let (mut beyond, mut by_device) = (0, 0);
    for (position, temperature) in [0.0, 0.3, 0.0, 1.0, 40.0, 0.1].into_iter().enumerate() {
        let rows = 1 + position.min(ROWS - 1);
        let expected = step_for(&mut *whole, position, rows, Want::Logits);
        let draw = |row: usize| Draw {
            temperature,
            topp: [0.9, 1.0, 0.99][row],
            coin: ((7919 * position + row) % 97) as f32 / 97.0,
        };
        let plan = StepPlan {
            drawable: Some(DRAWABLE),
            ..drawing(plan(&*cut, position, rows), draw)
        };
        let mut output = StepOutput::default();
        cut.submit(&plan, Want::Tokens).unwrap();
        cut.collect(&mut output).unwrap();
        assert_eq!(output.drawn.len(), if temperature == 0.0 { 0 } else { rows });
        let mut sampler = Sampler::new(DRAWABLE);
        for (row, logits) in expected.logits.chunks_exact(WIDE).enumerate() {
            let argmax = output.greedy[row].token;
            assert_eq!(argmax, getp::sampler::argmax(&logits[..DRAWABLE]));
            assert_eq!(output.greedy[row].logit, logits[argmax as usize]);
            beyond += usize::from(argmax != expected.greedy[row].token);
            if let Some(Some(token)) = output.drawn.get(row) {
                sampler.make_room(temperature, draw(row).topp).unwrap();
                assert_eq!(*token, sampler.sample(&logits[..DRAWABLE], draw(row)));
                by_device += 1;
            }
        }
        // Whole rows are whole, and the next step of the same shape may find all again.
        let whole_rows = step_for(&mut *cut, position, rows, Want::Logits);
        assert_eq!(whole_rows.greedy, expected.greedy);
        assert!(*whole_rows.logits == *expected.logits);
        let again = step_for(&mut *cut, position, rows, Want::Tokens);
        assert_eq!(again.greedy, expected.greedy);
    }
    assert!(beyond > 2 && by_device > 2, "{beyond} {by_device}");
}

/// Rows of all kinds in one step: greedy ones, and others with a temperature and a nucleus of their own.
#[test]
fn a_step_draws_each_row_in_its_own_way() {
    let (mut whole, mut mixed) = (replica(WIDE, false), replica(WIDE, false));
    let draw = |row: usize| Draw {
        temperature: [0.3, 0.0, 40.0][row],
        topp: [0.9, 0.5, 1.0][row],
        coin: [0.6, 0.9, 0.2][row],
    };
    let expected = step_for(&mut *whole, 0, ROWS, Want::Logits);
    let plan = drawing(plan(&*mixed, 0, ROWS), draw);
    mixed.submit(&plan, Want::Tokens).unwrap();
    let mut output = StepOutput::default();
    mixed.collect(&mut output).unwrap();
    assert_eq!(output.greedy, expected.greedy);
    assert_eq!(output.drawn.len(), ROWS);
    let tokens: Vec<u32> = (0..ROWS)
        .map(|row| {
            let logits = &expected.logits[row * WIDE..][..WIDE];
            let mut sampler = Sampler::new(WIDE);
            sampler.make_room(draw(row).temperature, draw(row).topp).unwrap();
            sampler.sample(logits, draw(row))
        })
        .collect();
    assert_eq!([output.drawn[0], output.drawn[2]], [Some(tokens[0]), Some(tokens[2])]);
    assert_eq!(tokens[1], output.greedy[1].token);
    assert_ne!(tokens[2], output.greedy[2].token, "another token than the argmax");

    // The device feeds each row's own token to the next step.
    let next = |named: bool| {
        let mut next = super::outputs::plan(&*replica(WIDE, false), 1, ROWS);
        let kept = (1..=ROWS as i32).map(|slot| -slot).collect();
        next.tokens = if named {
            tokens.iter().map(|&t| t as i32).collect()
        } else {
            kept
        };
        next
    };
    whole.submit(&next(true), Want::Logits).unwrap();
    mixed.submit(&next(false), Want::Logits).unwrap();
    let mut named = StepOutput::default();
    whole.collect(&mut named).unwrap();
    mixed.collect(&mut output).unwrap();
    assert!(
        output
            .logits
            .iter()
            .zip(&*named.logits)
            .all(|(a, b)| a.to_bits() == b.to_bits())
    );
}

#[test]
fn a_drawn_token_is_fed_to_the_next_step_on_the_device() {
    let (mut named, mut kept) = (replica(WIDE, false), replica(WIDE, false));
    for topp in [0.5, 0.9999, 1.0] {
        let first = drawing(plan(&*kept, 0, ROWS), |_| Draw {
            temperature: 0.1,
            topp,
            coin: 0.7,
        });
        let mut output = StepOutput::default();
        let mut tokens = Vec::new();
        for replica in [&mut named, &mut kept] {
            replica.submit(&first, Want::Tokens).unwrap();
            replica.collect(&mut output).unwrap();
            // Where the host must sample, the device has the argmax.
            let found = output.drawn.iter().zip(&output.greedy);
            tokens = found
                .map(|(drawn, greedy)| drawn.unwrap_or(greedy.token) as i32)
                .collect();
        }
        let mut next = plan(&*kept, 1, ROWS);
        next.tokens = tokens;
        let expected = {
            named.submit(&next, Want::Logits).unwrap();
            named.collect(&mut output).unwrap();
            std::mem::take(&mut output.logits)
        };
        next.tokens = (1..=ROWS as i32).map(|slot| -slot).collect();
        kept.submit(&next, Want::Logits).unwrap();
        kept.collect(&mut output).unwrap();
        assert!(
            output
                .logits
                .iter()
                .zip(&*expected)
                .all(|(a, b)| a.to_bits() == b.to_bits())
        );
    }
}

/// Greedy rows, rows that are sampled, and rows of a prompt whose next token is known; a row that is not scored.
#[test]
fn rows_are_scored_as_their_logits_say() {
    let (mut whole, mut scored) = (replica(WIDE, false), replica(WIDE, false));
    let mut left_to_host = 0;
    for position in 0..8 {
        let temperature = TEMPERATURES[position % TEMPERATURES.len()];
        let rows = 1 + position.min(ROWS - 1);
        let expected = step_for(&mut *whole, position, rows, Want::Logits);
        let plan = plan(&*scored, position, rows);
        let mut plan = drawing(plan, |row| Draw {
            temperature: if (position + row).is_multiple_of(2) {
                0.0
            } else {
                temperature
            },
            topp: 0.9,
            coin: 0.4,
        });
        for (row, wanted) in plan.logits.iter_mut().enumerate() {
            let next = (position % 3 == row).then_some((4001 * row + position) as u32);
            let top = (7 * position + row) % (MOST_TOP + 1);
            wanted.score = (position + row != 2).then_some(RowScore { next, top });
        }
        scored.submit(&plan, Want::Tokens).unwrap();
        let mut output = StepOutput::default();
        scored.collect(&mut output).unwrap();
        assert_eq!(output.greedy, expected.greedy);
        assert_eq!((output.scores.len(), output.logits.len()), (rows, 0));
        assert_eq!(output.drawn.len(), if plan.draws() { rows } else { 0 });
        for (row, logits) in expected.logits.chunks_exact(WIDE).enumerate() {
            let Some(RowScore { next, top }) = plan.logits[row].score else {
                continue;
            };
            let found = output.scores[row];
            let drawn = output.drawn.get(row).copied().flatten();
            left_to_host += usize::from(plan.logits[row].is_drawn() && drawn.is_none());
            let token = next.or(drawn).unwrap_or(output.greedy[row].token);
            assert_eq!((found.token, found.logit), (token, logits[token as usize]));
            assert_eq!(found.largest, output.greedy[row].logit);
            let sum: f64 = logits.iter().map(|&v| f64::from(v - found.largest).exp()).sum();
            assert!((found.sum / sum).ln().abs() < 5e-6, "{} {sum}", found.sum);
            let mut ids: Vec<u32> = (0..WIDE as u32).collect();
            ids.sort_by(|&a, &b| logits[b as usize].total_cmp(&logits[a as usize]));
            let most: Vec<_> = ids[..top].iter().map(|&id| (id, logits[id as usize])).collect();
            assert_eq!(found.top[..top], most);
        }
        // What the host needs of rows that the device has not sampled.
        scored.fetch(&[0], &mut output).unwrap();
        assert_eq!(output.logits[..], expected.logits[..WIDE]);
        output.logits.give_back();
    }
    assert!(left_to_host < 4, "{left_to_host}");
}

#[test]
fn every_stage_and_every_step_is_timed() {
    let mut replica = replica(VOCAB, true);
    GpuReplica::of_mut(&mut *replica).unwrap().time_steps().unwrap();
    for position in 0..3 {
        step(&mut *replica, position, ROWS);
    }
    let timed = GpuReplica::of(&*replica).unwrap();
    let times = timed.step_times()[0];
    assert_eq!(times.steps, 3);
    assert!(!times.computing.is_zero());
    assert_eq!(
        timed.expert_rows().unwrap().iter().sum::<u32>() as usize,
        ROWS * ModelConfig::preset_7m().experts_per_token
    );
    let profile = replica.profile().unwrap();
    let layers = ModelConfig::preset_7m().n_layers as u64;
    for (operation, calls) in [
        (Operation::Embed, 3),
        (Operation::Router, 3 * layers),
        // It may sort so few rows by itself.
        (Operation::Mlp1, 3 * layers),
        (Operation::Attention, 3 * layers),
        // The experts' norm is fused with the router.
        (Operation::Norm, 3 * (layers + 1)),
        (Operation::Argmax, 3),
    ] {
        assert_eq!(profile.total(operation).calls, calls, "{operation:?}");
    }
    // Each kernel by its name; of most operations every call is one.
    let kernels = |operation| {
        profile
            .kernels
            .iter()
            .filter(move |kernel| kernel.operation == operation)
    };
    let embeds: Vec<_> = kernels(Operation::Embed)
        .map(|kernel| (&*kernel.name, kernel.calls))
        .collect();
    assert_eq!(embeds, [("embed", 3)]);
    for operation in [Operation::Norm, Operation::Router, Operation::Mlp2] {
        let calls: u64 = kernels(operation).map(|kernel| kernel.calls).sum();
        assert_eq!(
            calls,
            profile.total(operation).calls,
            "{operation:?}: {:?}",
            profile.kernels
        );
    }
    assert_eq!(profile.spread.layers, 3);
    // Candidates of eight bytes, or whole rows where no matrix core's kernel takes such a vocabulary.
    let read = profile.total(Operation::Argmax).cost.bytes as usize;
    assert!((3 * ROWS * 8..=3 * ROWS * VOCAB * 4).contains(&read), "{read}");
}
