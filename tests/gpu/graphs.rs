//! Graphs of decoding steps are there before a run meets them.

use super::answers::options;
use super::devices::{all, system};
use super::open_on;
use super::synthetic::{SyntheticCheckpoint, Temperament};
use getp::backend::gpu::driver::simt::{Call, Order};
use getp::batch::{StepOutput, StepPlan, Want};
use getp::config::ModelConfig;
use getp::engine;
use getp::options::Precision;
use getp::scheduler::{Limits, Scheduler};

/// Rows as long as several items of attention.
fn config() -> ModelConfig {
    ModelConfig {
        vocab_size: 300,
        n_layers: 2,
        n_experts: 4,
        experts_per_token: 2,
        seq_len: 480,
        ..ModelConfig::preset_7m()
    }
}

#[test]
fn no_decoding_step_of_short_requests_captures_a_graph() {
    let config = config();
    let checkpoint = SyntheticCheckpoint::new(&config, 5, Temperament::Tame).unwrap();
    let system = system(1, Order::Eager);
    // No buckets: 5 sequences at most, 70 rows.
    let mut replica = open_on(all(&system), &checkpoint, &options(Precision::Fast, 5, 70));
    let limits = Limits {
        ignore_end: true,
        speculate: true,
        ..engine::limits(&*replica, &config)
    };
    let mut scheduler = Scheduler::new(limits).unwrap();
    let lengths = [1, 127, 200, 390];
    for (request, length) in lengths.into_iter().enumerate() {
        let prompt = (0..length).map(|i| i as u32 * 7 % 300).collect();
        scheduler.submit(request, prompt, length + 40 + 4 * request).unwrap();
    }
    let captures = || system.calls(None, Some(Call::BeginCapture));
    assert!(captures() > 0, "some are made ahead");
    let (mut output, mut finished, mut rows) = (StepOutput::default(), Vec::new(), Vec::new());
    loop {
        let mut plan = StepPlan::default();
        if !scheduler.plan(&mut plan) {
            break;
        }
        scheduler.begin(&plan);
        let before = captures();
        replica.submit(&plan, Want::Greedy).unwrap();
        if plan.decode_chunks == plan.chunks.len() {
            assert_eq!(captures(), before, "a step of {} rows has no graph", plan.rows());
            rows.push(plan.rows());
        }
        replica.collect(&mut output).unwrap();
        let tokens: Vec<u32> = plan
            .logits
            .iter()
            .zip(&output.greedy)
            .filter(|(row, _)| row.sample)
            .map(|(_, greedy)| greedy.token)
            .collect();
        scheduler.commit(&plan, &tokens, &mut finished).unwrap();
    }
    rows.dedup();
    assert!(rows.len() > 2, "steps of several sizes: {rows:?}");
}
