//! What steps hand over beside tokens: whole rows of logits, lent, and times.

use super::open;
use super::plans::decoding;
use super::synthetic::{SyntheticCheckpoint, Temperament};
use getp::batch::StepPlan;
use getp::model::ModelConfig;
use getp::options::{Options, Precision};
use getp::profile::Stage;
use getp::replica::{Replica, StepOutput, Want};

/// Sequences, each in a row of its own.
const ROWS: usize = 3;

fn replica(profile: bool) -> Box<dyn Replica> {
    let config = ModelConfig {
        vocab_size: 301,
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
    open(&checkpoint, &options)
}

/// The rows' tokens at a position that all have come to.
fn plan(replica: &dyn Replica, position: usize, rows: usize) -> StepPlan {
    let window = replica.kv_blocks().window / ROWS;
    decoding(rows, position, [1, window], |row| (17 * row + 5 * position) as i32)
}

fn step(replica: &mut dyn Replica, position: usize, rows: usize) -> StepOutput {
    let plan = plan(replica, position, rows);
    replica.submit(&plan, Want::Logits).unwrap();
    let mut output = StepOutput::default();
    replica.collect(&mut output).unwrap();
    assert_eq!(output.logits.len(), rows * 301);
    output
}

#[test]
fn rows_that_are_held_are_not_written_to() {
    let mut replica = replica(false);
    // More rows in later steps: the buffers are made anew meanwhile.
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

#[test]
fn rows_given_back_are_written_to_again() {
    let mut replica = replica(false);
    let at = |output: &StepOutput| output.logits.as_ptr();
    let first = at(&step(&mut *replica, 0, 1));
    for position in 1..4 {
        assert_eq!(at(&step(&mut *replica, position, 1)), first);
    }
}

#[test]
fn every_stage_and_every_step_is_timed() {
    let mut replica = replica(true);
    replica.time_steps().unwrap();
    for position in 0..3 {
        step(&mut *replica, position, ROWS);
    }
    let times = replica.step_times().unwrap();
    assert_eq!(times.steps, 3);
    assert!(!times.computing.is_zero());
    assert_eq!(
        replica.expert_rows().unwrap().iter().sum::<u32>() as usize,
        ROWS * ModelConfig::preset_7m().experts_per_token
    );
    let profile = replica.profile().unwrap();
    let layers = ModelConfig::preset_7m().n_layers as u64;
    for (stage, calls) in [
        (Stage::Embed, 3),
        (Stage::Router, 3 * layers),
        (Stage::Gather, 3 * layers),
        (Stage::Attention, 3 * layers),
        // That of the experts is one kernel with the router.
        (Stage::Norm, 3 * (layers + 1)),
        (Stage::Argmax, 3),
    ] {
        assert_eq!(profile.total(stage).calls, calls, "{stage:?}");
    }
    assert_eq!(profile.spread.layers, 3);
    let rows_bytes = ROWS * 301 * 4;
    assert_eq!(profile.total(Stage::Argmax).cost.bytes as usize, 3 * rows_bytes);
}
