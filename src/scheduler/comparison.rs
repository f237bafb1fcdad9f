//! How many steps runs take, whether or not the scheduler learns how long answers go on. A block has one position.

use super::ends::Ends;
use super::*;
use crate::batch::LogitsRow;
use crate::request::EndTokens;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use rand_distr::{Distribution, LogNormal};

/// A request, and how long its answer becomes.
#[derive(Clone, Copy)]
struct Job {
    n_prompt: usize,
    answer: usize,
    longest: usize,
}

impl Job {
    fn max_positions(self) -> usize {
        self.n_prompt + self.longest - 1
    }
}

fn room(blocks: usize, sequences: usize) -> Limits {
    Limits {
        max_batch: sequences,
        step_tokens: 8192,
        chunk_tokens: 512,
        max_logits_rows: sequences,
        max_positions: u32::MAX as usize,
        block_tokens: 1,
        blocks,
        sliding_window: 0,
        has_full_layers: true,
        record_all: false,
        share_beginnings: false,
        share_answers: false,
        depth: 2,
        plans_ahead: true,
    }
}

/// What a run has taken.
#[derive(Clone, Copy, Debug, Default)]
struct Taken {
    steps: usize,
    /// Rows computed, and how many of them again.
    rows: usize,
    again: u64,
}

/// Answers the jobs.
fn run(limits: &Limits, jobs: &[Job], learns: bool) -> Taken {
    let mut scheduler = Scheduler::new(limits.clone()).unwrap();
    let (mut under_way, mut spare, mut finished) = (VecDeque::new(), Vec::new(), Vec::new());
    let mut next = 0;
    let mut taken = Taken::default();
    loop {
        while under_way.len() < limits.depth {
            scheduler.look_ahead(jobs[next..].iter().map(|job| Ahead {
                n_prompt: job.n_prompt,
                max_positions: job.max_positions(),
            }));
            while let Some(&job) = jobs.get(next)
                && scheduler.has_free_slot()
                && scheduler.has_room(&Request::greedy(next, vec![1; job.n_prompt], job.max_positions()))
            {
                let request = Request::greedy(next, vec![1; job.n_prompt], job.max_positions());
                scheduler.submit(request).unwrap();
                next += 1;
            }
            let mut plan: StepPlan = spare.pop().unwrap_or_default();
            if !scheduler.plan(&mut plan) {
                break;
            }
            scheduler.begin(&plan);
            taken.steps += 1;
            taken.rows += plan.rows();
            under_way.push_back(plan);
        }
        let Some(plan) = under_way.pop_front() else {
            break;
        };
        let sample = |row: &LogitsRow| {
            let job = scheduler.request(row.slot).map(|request| jobs[request]);
            let ends = job.is_some_and(|job| row.position + 2 == job.n_prompt + job.answer);
            if ends { EndTokens::RELEASED[0] } else { 7 }
        };
        let sampled: Vec<_> = plan.logits.iter().filter(|row| row.sample).map(sample).collect();
        scheduler.commit(&plan, &sampled, &mut finished).unwrap();
        if !learns {
            scheduler.lending.ends = Ends::new(limits.blocks).unwrap();
        }
        spare.push(plan);
    }
    assert_eq!((finished.len(), scheduler.free_blocks()), (jobs.len(), limits.blocks));
    taken.again = scheduler.take_recomputed();
    taken
}

/// The steps with what is learned, of a hundred without, and of a hundred rows those computed again.
fn percent(limits: &Limits, jobs: &[Job]) -> (f64, f64) {
    let [without, with] = [false, true].map(|learns| run(limits, jobs, learns));
    assert_eq!(without.again, 0, "nobody is preempted where nothing is learned");
    let percent = |part: u64, all: usize| 100.0 * part as f64 / all as f64;
    (
        percent(with.steps as u64, without.steps),
        percent(with.again, with.rows),
    )
}

/// Prompts and answers as in a benchmark whose answers may have 10,240 tokens and have 1,278 in the mean; a block has
/// 64 positions.
fn mixed(requests: usize) -> Vec<Job> {
    let rng = &mut ChaCha8Rng::seed_from_u64(1);
    let mut draw = |mean: f64, sigma: f64, most: f64| {
        let tokens: f64 = LogNormal::new(mean.ln() - sigma * sigma / 2.0, sigma)
            .unwrap()
            .sample(rng);
        (tokens.min(most) / 64.0).ceil() as usize
    };
    let one = |_| Job {
        n_prompt: draw(1000.0, 0.7, 4096.0),
        answer: draw(1278.0, 0.8, 10_240.0),
        longest: 160,
    };
    (0..requests).map(one).collect()
}

/// The KV cache of 20b on a device of 80 GB, and of 120b on two.
#[test]
fn far_fewer_steps_where_most_answers_end_long_before_their_limits() {
    let jobs = mixed(4000);
    for (blocks, sequences) in [(42_700, 1024), (39_200, 2048)] {
        let (steps, again) = percent(&room(blocks, sequences), &jobs);
        println!("{steps:.1} % of the steps, {again:.1} % of the rows again");
        assert!(steps <= 62.0 && again <= 1.0);
    }
}

/// Random lengths. Those whose order says nothing of the answer's length are as in a shuffled set.
fn random(kind: &str, rng: &mut ChaCha8Rng) -> (Limits, Vec<Job>) {
    let blocks = rng.random_range(60..600);
    let longest = rng.random_range(4..40.min(blocks / 2));
    let short = rng.random_range(1..=longest / 4 + 1);
    let (share, requests) = (rng.random::<f64>(), rng.random_range(20..600));
    let mean = longest as f64 * rng.random_range(0.05..0.55);
    let sigma = rng.random_range(0.3..1.3);
    let lengths = LogNormal::new(mean.ln() - sigma * sigma / 2.0, sigma).unwrap();
    let longest_prompt = rng.random_range(1..16);
    let one = |_| {
        let answer = match kind {
            "limits" => longest,
            "two lengths" | "short ones first" if rng.random_bool(share) => rng.random_range(1..=short),
            "two lengths" | "short ones first" => longest,
            "lognormal" | "ever longer" => lengths.sample(rng) as usize,
            _ => rng.random_range(1..=longest),
        };
        Job {
            n_prompt: rng.random_range(1..=longest_prompt),
            answer: answer.clamp(1, longest),
            longest,
        }
    };
    let mut jobs: Vec<_> = (0..requests).map(one).collect();
    if ["short ones first", "ever longer"].contains(&kind) {
        jobs.sort_by_key(|job| job.answer);
    }
    (room(blocks, 300), jobs)
}

/// Where lengths are spread, never more than a hundredth more. Where a part of the answers is short and the others go
/// on to their limits, some of these start together when many short ones have ended, and then need their last blocks
/// together: at most an eighth more, less in the mean. Where all short answers come first, they say little of those
/// behind them: at most three tenths more.
#[test]
fn hardly_ever_more_steps() {
    for (kind, most, mean) in [
        ("limits", 100.0, 100.0),
        ("even", 101.0, 93.5),
        ("lognormal", 101.0, 67.5),
        ("two lengths", 112.0, 98.5),
        ("short ones first", 130.0, 95.0),
        ("ever longer", 101.0, 61.0),
    ] {
        let cases = (0..60).map(|seed| {
            let (limits, jobs) = random(kind, &mut ChaCha8Rng::seed_from_u64(seed));
            percent(&limits, &jobs)
        });
        let (mut steps, again): (Vec<f64>, Vec<f64>) = cases.unzip();
        steps.sort_by(f64::total_cmp);
        let found = (steps[59], steps.iter().sum::<f64>() / 60.0);
        println!(
            "{kind}: from {:.1} to {:.1}, in the mean {:.2} % of the steps; in the mean {:.2} % of the rows again",
            steps[0],
            found.0,
            found.1,
            again.iter().sum::<f64>() / 60.0
        );
        assert!(found.0 <= most && found.1 <= mean, "{kind}");
    }
}

/// Requests that were cancelled might have gone on to their limits.
#[test]
fn nothing_is_learned_of_requests_that_were_cancelled() {
    let mut scheduler = Scheduler::new(room(100, 50)).unwrap();
    for number in 0..50 {
        scheduler
            .submit(Request::greedy(number, vec![1], 2 + number % 9))
            .unwrap();
    }
    let (mut plan, mut finished) = (StepPlan::default(), Vec::new());
    for _ in 0..3 {
        assert!(scheduler.plan(&mut plan));
        scheduler.begin(&plan);
        let sampled = vec![7; plan.logits.len()];
        scheduler.commit(&plan, &sampled, &mut finished).unwrap();
    }
    let ended = finished.len();
    let cancelled = scheduler.cancel(|number| number % 2 == 0);
    assert!(ended > 5 && cancelled > 10, "{ended} and {cancelled}");
    assert!(!scheduler.lending.ends.learn(std::iter::empty()));
}
