//! Graphs of decoding steps are there before a run meets them, and no graphs take memory that others need.

use super::answers::options;
use super::devices::{all, system};
use super::open_on;
use super::synthetic::{SyntheticCheckpoint, Temperament};
use getp::backend::gpu::driver::simt::{Call, Order, Setup, System};
use getp::batch::{StepOutput, StepPlan, Want};
use getp::config::ModelConfig;
use getp::engine;
use getp::options::Precision;
use getp::replica::Replica;
use getp::request::{Answer, EndTokens, Request};
use getp::scheduler::{Limits, Scheduler};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

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

/// A request whose answer is as long as it is asked to be.
fn endless(number: usize, prompt: Vec<u32>, max_positions: usize) -> Request {
    Request {
        ends: EndTokens::default().into(),
        ..Request::greedy(number, prompt, max_positions)
    }
}

/// Without requests.
fn scheduler(replica: &dyn Replica, config: &ModelConfig) -> Scheduler {
    let limits = Limits {
        plans_ahead: true,
        ..engine::limits(replica, config)
    };
    Scheduler::new(limits).unwrap()
}

/// Runs all requests; `submit` submits the greedy steps.
fn finish(
    replica: &mut dyn Replica,
    mut scheduler: Scheduler,
    mut submit: impl FnMut(&mut dyn Replica, &StepPlan),
) -> Vec<Answer> {
    let (mut output, mut finished) = (StepOutput::default(), Vec::new());
    loop {
        let mut plan = StepPlan::default();
        if !scheduler.plan(&mut plan) {
            return finished;
        }
        scheduler.begin(&plan);
        submit(replica, &plan);
        replica.collect(&mut output).unwrap();
        let sampled = plan.logits.iter().zip(&output.greedy).filter(|(row, _)| row.sample);
        let tokens: Vec<u32> = sampled.map(|(_, greedy)| greedy.token).collect();
        scheduler.commit(&plan, &tokens, &mut finished).unwrap();
    }
}

#[test]
fn no_decoding_step_of_short_requests_captures_a_graph() {
    let config = config();
    let checkpoint = SyntheticCheckpoint::new(&config, 5, Temperament::Tame).unwrap();
    let system = system(1, Order::Eager);
    // No buckets: 5 sequences at most, 70 rows.
    let mut replica = open_on(all(&system), &checkpoint, &options(Precision::Fast, 5, 70));
    let mut scheduler = scheduler(&*replica, &config);
    let lengths = [1, 127, 200, 390];
    for (request, length) in lengths.into_iter().enumerate() {
        let prompt = (0..length).map(|i| i as u32 * 7 % 300).collect();
        scheduler
            .submit(endless(request, prompt, length + 40 + 4 * request))
            .unwrap();
    }
    let captures = || system.calls(None, Some(Call::BeginCapture));
    assert!(captures() > 0, "some are made ahead");
    let mut rows = Vec::new();
    finish(&mut *replica, scheduler, |replica, plan| {
        let before = captures();
        replica.submit(plan, Want::Tokens).unwrap();
        if plan.decode_chunks == plan.chunks.len() {
            assert_eq!(captures(), before, "a step of {} rows has no graph", plan.rows());
            rows.push(plan.rows());
        }
    });
    rows.dedup();
    assert!(rows.len() > 2, "steps of several sizes: {rows:?}");
}

/// Of a device's memory so much is the runtime's, and a quarter of that is not for graphs.
const CAPACITY: u64 = 256 << 20;
const NOT_FOR_GRAPHS: u64 = CAPACITY / 16 / 4;

/// What a run gives whose steps have many shapes, and how many graphs there were at most and are captured in all.
struct Ran {
    tokens: Vec<Vec<u32>>,
    most: usize,
    captured: u64,
    /// Memory that was left for graphs.
    room: u64,
}

/// Runs on a device on which a graph takes so many bytes; after it a step asks for whole rows of logits.
fn run(graph_bytes: u64) -> Ran {
    let config = ModelConfig {
        vocab_size: 6000,
        ..config()
    };
    let checkpoint = SyntheticCheckpoint::new(&config, 5, Temperament::Tame).unwrap();
    let system = System::new(&Setup {
        capacity_bytes: CAPACITY,
        graph_bytes,
        threads: 1,
        ..Setup::default()
    });
    let mut replica = open_on(all(&system), &checkpoint, &options(Precision::Fast, 24, 96));
    let mut scheduler = scheduler(&*replica, &config);
    let mut random = ChaCha8Rng::seed_from_u64(3);
    for request in 0..40 {
        let length = random.random_range(1..24);
        let prompt = (0..length).map(|i| (i * 7 + request as u32) % 6000).collect();
        let output = random.random_range(1..12);
        scheduler
            .submit(endless(request, prompt, length as usize + output))
            .unwrap();
    }
    let (mut most, mut last) = (0, StepPlan::default());
    let mut finished = finish(&mut *replica, scheduler, |replica, plan| {
        replica.submit(plan, Want::Tokens).unwrap();
        most = most.max(system.live(0).graphs);
        last = plan.clone();
    });
    let captured = system.calls(None, Some(Call::EndCapture));
    let driver = system.driver(0).unwrap();
    let free = driver.memory().unwrap().free;
    replica.submit(&last, Want::Logits).unwrap();
    replica.collect(&mut StepOutput::default()).unwrap();
    let logits = free.saturating_sub(driver.memory().unwrap().free);
    finished.sort_by_key(|finished| finished.number);
    Ran {
        tokens: finished.into_iter().map(|finished| finished.tokens).collect(),
        most,
        captured,
        room: free.saturating_sub(logits + NOT_FOR_GRAPHS),
    }
}

#[test]
fn graphs_leave_memory_to_others() {
    let free = run(0);
    assert_eq!(free.most as u64, free.captured, "nothing is given up");
    assert!(free.most > 45, "{} shapes", free.most);
    // There is room for less than all, but more than are kept in any case; and for a few, none of which is given up.
    for (graphs, are_given_up) in [(40, true), (10, false)] {
        let ran = run(free.room / graphs + 1);
        assert_eq!(ran.tokens, free.tokens);
        assert_eq!(ran.most as u64, graphs);
        assert_eq!(ran.captured > graphs, are_given_up, "{} captured", ran.captured);
    }
}
