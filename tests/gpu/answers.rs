//! Helpers that answer requests with a replica, as the engine does it.

use getp::batch::{StepOutput, StepPlan, Want};
use getp::config::ModelConfig;
use getp::engine;
use getp::options::{Options, Precision};
use getp::replica::Replica;
use getp::request::{Answer, EndTokens, Request};
use getp::scheduler::{Limits, Scheduler};
use std::collections::{BTreeMap, VecDeque};

/// The results of a run.
#[derive(Default)]
pub struct Answers {
    /// By request.
    pub tokens: BTreeMap<usize, Vec<u32>>,
    /// The largest logit and its token by request and position.
    pub greedy: BTreeMap<(usize, usize), (u32, f32)>,
    /// Whole rows by request and position, if they were wanted.
    pub logits: BTreeMap<(usize, usize), Vec<f32>>,
}

/// The options of a run.
#[derive(Clone, Copy)]
pub struct Run {
    /// Positions of a request after its prompt.
    pub more: usize,
    pub want: Want,
    /// The logits of every position are wanted.
    pub record_all: bool,
    /// End tokens end answers.
    pub ends: bool,
    /// Whether requests share the blocks of beginnings that are equal.
    pub share_beginnings: bool,
    /// Whether the youngest request is preempted before one of three steps.
    pub preempts: bool,
}

/// Answers `prompts`.
pub fn answer(replica: &mut dyn Replica, config: &ModelConfig, prompts: &[Vec<u32>], run: Run) -> Answers {
    let mut scheduler = Scheduler::new(limits(replica, config, run)).unwrap();
    for (request, prompt) in prompts.iter().enumerate() {
        let positions = prompt.len() + run.more;
        let mut request = Request::greedy(request, prompt.clone(), positions);
        if !run.ends {
            request.ends = EndTokens::default().into();
        }
        scheduler.submit(request).unwrap();
    }
    let mut answers = Answers::default();
    let (mut under_way, mut finished) = (VecDeque::new(), Vec::new());
    let mut output = StepOutput::default();
    let mut steps = 0;
    loop {
        let mut plan = StepPlan::default();
        if under_way.len() < replica.depth() && scheduler.plan(&mut plan) {
            scheduler.begin(&plan);
            replica.submit(&plan, run.want).unwrap();
            under_way.push_back(plan);
            steps += 1;
            if run.preempts && steps % 3 == 0 {
                scheduler.preempt_youngest();
            }
            continue;
        }
        let Some(plan) = under_way.pop_front() else { break };
        replica.collect(&mut output).unwrap();
        answers.note(&plan, &output, config.vocab_size, |sequence| {
            scheduler.request(sequence)
        });
        let sampled = plan.logits.iter().zip(&output.greedy).filter(|(row, _)| row.sample);
        let sampled: Vec<u32> = sampled.map(|(_, greedy)| greedy.token).collect();
        scheduler.commit(&plan, &sampled, &mut finished).unwrap();
        for Answer {
            number: request,
            tokens,
            ..
        } in finished.drain(..)
        {
            answers.tokens.insert(request, tokens);
        }
    }
    answers
}

impl Answers {
    fn note(&mut self, plan: &StepPlan, output: &StepOutput, vocab: usize, request: impl Fn(usize) -> Option<usize>) {
        for (i, (row, greedy)) in plan.logits.iter().zip(&output.greedy).enumerate() {
            let Some(request) = request(row.slot) else { continue };
            let key = (request, row.position);
            self.greedy.insert(key, (greedy.token, greedy.logit));
            if let Some(logits) = output.logits.get(i * vocab..(i + 1) * vocab) {
                let largest = getp::sampler::argmax(logits);
                assert_eq!(greedy.token, largest, "the summary is the row's own");
                self.logits.insert(key, logits.to_vec());
            }
        }
    }
}

fn limits(replica: &dyn Replica, config: &ModelConfig, run: Run) -> Limits {
    Limits {
        record_all: run.record_all,
        share_beginnings: run.share_beginnings,
        plans_ahead: run.want == Want::Tokens,
        ..engine::limits(replica, config)
    }
}

/// The tokens of a request's prompt.
pub fn prompt(config: &ModelConfig, request: usize, length: usize) -> Vec<u32> {
    let token = |place: usize| ((request * 7919 + place * 104_729) % config.vocab_size) as u32;
    (0..length).map(token).collect()
}

/// `n` prompts of 1 to 70 tokens.
pub fn prompts(config: &ModelConfig, n: usize) -> Vec<Vec<u32>> {
    (0..n).map(|i| prompt(config, i, 1 + i * 23 % 70)).collect()
}

pub fn options(precision: Precision, max_batch: usize, step_tokens: usize) -> Options {
    Options {
        precision: Some(precision),
        max_batch: Some(max_batch),
        step_tokens: Some(step_tokens),
        kv_mb: 64,
        ..Options::default()
    }
}
