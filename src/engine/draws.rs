//! The next token of each sequence, from what a step gave.

use super::Sampling;
use crate::batch::StepPlan;
use crate::error::{Error, Result};
use crate::replica::{StepOutput, Want};
use crate::sampler::{Sampler, request_seed};
use crate::scheduler::Scheduler;
use rayon::ThreadPool;
use rayon::prelude::*;

/// Draws tokens, each request from its own random stream, so that answers do not depend on company.
pub struct Draws {
    greedy: bool,
    vocab: usize,
    /// The state of each request's stream.
    states: Vec<u64>,
    /// One a thread: their scratch memory is as long as the vocabulary.
    samplers: Vec<Sampler>,
    draws: Vec<Draw>,
    tokens: Vec<u32>,
}

/// One row to draw from.
struct Draw {
    row: usize,
    request: usize,
    state: u64,
    token: u32,
}

impl Draws {
    /// Streams for `requests` requests, at least one, drawn from by `threads` threads.
    pub fn new(vocab: usize, sampling: Sampling, requests: usize, threads: usize) -> Self {
        let Sampling {
            temperature,
            topp,
            rng_state,
        } = sampling;
        let sampler = Sampler::new(vocab, temperature, topp, rng_state);
        Self {
            greedy: temperature == 0.0,
            vocab,
            states: (0..requests).map(|request| request_seed(rng_state, request)).collect(),
            samplers: vec![sampler; threads.max(1)],
            draws: Vec::new(),
            tokens: Vec::new(),
        }
    }

    /// What drawing needs of each row.
    pub fn want(&self) -> Want {
        if self.greedy { Want::Greedy } else { Want::Logits }
    }

    /// The state request 0's stream has come to.
    pub fn first_state(&self) -> u64 {
        self.states[0]
    }

    /// The tokens of the plan's rows that ask for one, in order.
    pub fn draw(
        &mut self,
        pool: &ThreadPool,
        scheduler: &Scheduler,
        plan: &StepPlan,
        output: &StepOutput,
    ) -> Result<&[u32]> {
        self.check(plan, output)?;
        self.tokens.clear();
        if self.greedy {
            let rows = plan.logits.iter().zip(&output.greedy).filter(|(row, _)| row.sample);
            self.tokens.extend(rows.map(|(_, greedy)| greedy.token));
        } else {
            self.gather(scheduler, plan)?;
            pool.install(|| self.draw_all(&output.logits));
            self.scatter();
        }
        Ok(&self.tokens)
    }

    fn check(&self, plan: &StepPlan, output: &StepOutput) -> Result<()> {
        let rows = plan.logits.len();
        let full = self.greedy || output.logits.len() == rows * self.vocab;
        if output.greedy.len() == rows && full {
            return Ok(());
        }
        Err(Error::Internal(format!(
            "a step with {rows} rows of logits gave {} and {} values",
            output.greedy.len(),
            output.logits.len()
        )))
    }

    fn gather(&mut self, scheduler: &Scheduler, plan: &StepPlan) -> Result<()> {
        self.draws.clear();
        for (row, wanted) in plan.logits.iter().enumerate().filter(|(_, wanted)| wanted.sample) {
            let request = scheduler.request(wanted.sequence);
            let request = request.ok_or_else(|| Error::Internal("a row belongs to no request".into()))?;
            self.draws.push(Draw {
                row,
                request,
                state: self.states[request],
                token: 0,
            });
        }
        Ok(())
    }

    /// Draws in parallel, one run of rows a thread. `logits` is `[rows, vocab]`.
    fn draw_all(&mut self, logits: &[f32]) {
        let run = self.draws.len().div_ceil(self.samplers.len()).max(1);
        let runs = self.draws.par_chunks_mut(run).zip(&mut self.samplers);
        runs.for_each(|(draws, sampler)| {
            for draw in draws {
                let row = &logits[draw.row * self.vocab..][..self.vocab];
                draw.token = sampler.sample_with(row, &mut draw.state);
            }
        });
    }

    fn scatter(&mut self) {
        for draw in &self.draws {
            self.states[draw.request] = draw.state;
            self.tokens.push(draw.token);
        }
    }
}
