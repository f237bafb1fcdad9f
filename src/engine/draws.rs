//! The next token of each sequence, from what a step gave.

use super::Sampling;
use super::pipeline::Pipeline;
use crate::batch::StepPlan;
use crate::error::{Error, Result};
use crate::memory::{self, Purpose};
use crate::replica::{StepOutput, Summaries, Want};
use crate::sampler::{Row, Sampler, next_coin, request_seed};
use crate::scheduler::Scheduler;
use rayon::ThreadPool;
use rayon::prelude::*;
use std::sync::atomic::{AtomicU64, Ordering};

/// The random stream of each request, so that answers do not depend on company, nor on the replica. A request runs on
/// one replica at a time, and changes it through the queue's lock, so that the states need no order of their own.
pub struct Streams {
    seed: u64,
    states: Vec<AtomicU64>,
}

impl Streams {
    /// Streams for `requests` requests, at least one, that follow from the state of the first.
    pub fn new(seed: u64, requests: usize) -> Result<Self> {
        let states = (0..requests).map(|request| request_seed(seed, request).into());
        Ok(Self {
            seed,
            states: memory::collect(states, Purpose::Draws)?,
        })
    }

    /// Begins a request's stream anew.
    pub fn restart(&self, request: usize) {
        self.set(request, request_seed(self.seed, request));
    }

    /// The state request 0's stream has come to.
    pub fn first_state(&self) -> u64 {
        self.get(0)
    }

    /// What the request's next token is drawn by.
    pub fn coin(&self, request: usize) -> f32 {
        next_coin(self.get(request))
    }

    fn get(&self, request: usize) -> u64 {
        self.states[request].load(Ordering::Relaxed)
    }

    fn set(&self, request: usize, state: u64) {
        self.states[request].store(state, Ordering::Relaxed);
    }
}

/// Draws the tokens of one replica's steps.
pub struct Draws {
    greedy: bool,
    vocab: usize,
    /// One a thread: their scratch memory is as long as the vocabulary.
    samplers: Vec<Sampler>,
    draws: Vec<Draw>,
    tokens: Vec<u32>,
    /// Steps that whole rows are still asked for, as summaries said too little.
    whole_rows: usize,
}

/// Steps after one whose summaries said too little, until they are tried again: what a try costs, a copy that nothing hides, is
/// little among so many.
const WHOLE_ROWS_STEPS: usize = 32;

/// One row to draw from.
struct Draw {
    row: usize,
    request: usize,
    state: u64,
    token: Option<u32>,
}

impl Draws {
    /// Draws by `threads` threads.
    pub fn new(vocab: usize, sampling: Sampling, threads: usize) -> Result<Self> {
        let Sampling {
            temperature,
            topp,
            rng_state,
        } = sampling;
        let samplers = (0..threads.max(1)).map(|_| Sampler::new(vocab, temperature, topp, rng_state));
        Ok(Self {
            greedy: sampling.is_greedy(),
            vocab,
            samplers: memory::try_collect(samplers, Purpose::Draws)?,
            draws: Vec::new(),
            tokens: Vec::new(),
            whole_rows: 0,
        })
    }

    /// What the next step is to give. Where a nucleus is most of the vocabulary, as in rows that are nearly flat, whole rows
    /// had better come while the device computes.
    pub fn want(&mut self, want: Want) -> Want {
        match want {
            Want::Draws { .. } if self.whole_rows > 0 => {
                self.whole_rows -= 1;
                Want::Logits
            }
            want => want,
        }
    }

    /// The tokens of the plan's rows that ask for one, in order. The plan's step is the one collected last.
    pub fn draw(
        &mut self,
        pool: &ThreadPool,
        streams: &Streams,
        scheduler: &Scheduler,
        plan: &StepPlan,
        pipeline: &mut Pipeline,
    ) -> Result<&[u32]> {
        self.check(plan, &pipeline.output)?;
        self.tokens.clear();
        memory::reserve(&mut self.tokens, plan.logits.len(), Purpose::Draws)?;
        if self.greedy {
            let rows = plan.logits.iter().zip(&pipeline.output.greedy);
            let sampled = rows.filter(|(row, _)| row.sample);
            self.tokens.extend(sampled.map(|(_, greedy)| greedy.token));
            return Ok(&self.tokens);
        }
        self.gather(streams, scheduler, plan)?;
        if pipeline.output.summaries.is_empty() {
            pool.install(|| self.draw_from_rows(&pipeline.output))?;
        } else {
            pool.install(|| self.draw_from_summaries(&pipeline.output.summaries));
            let rest = self.draws.iter().filter(|draw| draw.token.is_none());
            let rest = memory::collect(rest.map(|draw| draw.row), Purpose::Draws)?;
            if 2 * rest.len() > self.draws.len() {
                self.whole_rows = WHOLE_ROWS_STEPS;
            }
            if !rest.is_empty() {
                pipeline.fetch(&rest)?;
                self.check_rows(rest.len(), &pipeline.output)?;
                pool.install(|| self.draw_from_rows(&pipeline.output))?;
            }
        }
        self.scatter(streams);
        Ok(&self.tokens)
    }

    fn check(&self, plan: &StepPlan, output: &StepOutput) -> Result<()> {
        let rows = plan.logits.len();
        if output.greedy.len() != rows {
            return Err(too_few(rows, "largest logits", output.greedy.len()));
        }
        match output.summaries.len() {
            _ if self.greedy => Ok(()),
            0 => self.check_rows(rows, output),
            summaries if summaries == rows => Ok(()),
            summaries => Err(too_few(rows, "summaries", summaries)),
        }
    }

    fn check_rows(&self, rows: usize, output: &StepOutput) -> Result<()> {
        if output.logits.len() == rows * self.vocab {
            return Ok(());
        }
        Err(too_few(rows, "logits", output.logits.len()))
    }

    fn gather(&mut self, streams: &Streams, scheduler: &Scheduler, plan: &StepPlan) -> Result<()> {
        self.draws.clear();
        memory::reserve(&mut self.draws, plan.logits.len(), Purpose::Draws)?;
        for (row, wanted) in plan.logits.iter().enumerate().filter(|(_, wanted)| wanted.sample) {
            let request = scheduler.request(wanted.sequence);
            let request = request.ok_or_else(|| Error::Internal("a row belongs to no request".into()))?;
            self.draws.push(Draw {
                row,
                request,
                state: streams.get(request),
                token: None,
            });
        }
        Ok(())
    }

    /// Draws in parallel where the summaries say enough.
    fn draw_from_summaries(&mut self, summaries: &Summaries) {
        runs(&mut self.draws, &mut self.samplers).for_each(|(draws, sampler)| {
            for draw in draws {
                let summary = summaries.get(draw.row);
                draw.token = summary.and_then(|summary| sampler.sample_summary(summary, &mut draw.state));
            }
        });
    }

    /// The same from whole rows, where there is no token yet. Beside summaries only the rows of these are there, in order.
    fn draw_from_rows(&mut self, output: &StepOutput) -> Result<()> {
        let fetched = !output.summaries.is_empty();
        let draws = self.draws.iter_mut().filter(|draw| draw.token.is_none()).enumerate();
        let mut draws = memory::collect(draws, Purpose::Draws)?;
        runs(&mut draws, &mut self.samplers).try_for_each(|(draws, sampler)| {
            let row = |(place, draw): &(usize, &mut Draw)| {
                let place = if fetched { *place } else { draw.row };
                let logits = &output.logits[place * self.vocab..][..self.vocab];
                let largest = logits.get(output.greedy[draw.row].token as usize);
                Row {
                    logits,
                    largest: largest.copied().unwrap_or(f32::NAN),
                    rng_state: draw.state,
                    token: 0,
                }
            };
            let mut rows = memory::collect(draws.iter().map(row), Purpose::Draws)?;
            sampler.sample_rows(&mut rows);
            for ((_, draw), row) in draws.iter_mut().zip(rows) {
                (draw.state, draw.token) = (row.rng_state, Some(row.token));
            }
            Ok(())
        })
    }

    fn scatter(&mut self, streams: &Streams) {
        for draw in &self.draws {
            streams.set(draw.request, draw.state);
            self.tokens.extend(draw.token);
        }
    }
}

/// One run of draws a thread.
fn runs<'a, T: Send>(
    draws: &'a mut [T],
    samplers: &'a mut [Sampler],
) -> impl IndexedParallelIterator<Item = (&'a mut [T], &'a mut Sampler)> {
    let run = draws.len().div_ceil(samplers.len()).max(1);
    draws.par_chunks_mut(run).zip(samplers)
}

fn too_few(rows: usize, what: &str, values: usize) -> Error {
    Error::Internal(format!("a step with {rows} rows to draw from gave {values} {what}"))
}
