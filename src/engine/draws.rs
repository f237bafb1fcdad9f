//! Samples the next token of each sequence from a step's output.
//!
//! A replica whose device samples returns most tokens itself. For a row that the device could not sample (too many
//! tokens are equally probable, or values are not finite), the host fetches the row's logits and samples it. The device
//! has meanwhile fed another token to the next step; the scheduler discards that step's row and plans it again. If the
//! device cannot sample many rows, as where most logits are equal, the next steps copy all logits to the host, and only
//! half of the sequences are in a step, so that the host samples one half while the device computes the other.

use super::Sampling;
use super::pipeline::Pipeline;
use crate::batch::{StepOutput, StepPlan, Want};
use crate::error::{Error, Result};
use crate::memory::{self, Purpose};
use crate::sampler::{self, Row, Sampler, request_seed};
use crate::scheduler::Scheduler;
use rayon::ThreadPool;
use rayon::prelude::*;
use std::sync::atomic::{AtomicU64, Ordering};

/// The state of each request's random number generator. One per request, so that an answer depends neither on the other
/// requests nor on the replica. Relaxed atomics suffice: a request runs on one replica at a time, and moves to another
/// under the queue's lock.
pub struct Streams {
    seed: u64,
    states: Vec<AtomicU64>,
}

impl Streams {
    /// States for `requests` requests, at least one, derived from `seed`, the state of the first.
    pub fn new(seed: u64, requests: usize) -> Result<Self> {
        let states = (0..requests).map(|request| request_seed(seed, request).into());
        Ok(Self {
            seed,
            states: memory::collect(states, Purpose::Draws)?,
        })
    }

    /// How many there are.
    #[cfg(feature = "mpi")]
    pub fn len(&self) -> usize {
        self.states.len()
    }

    /// Resets a request's generator.
    pub fn restart(&self, request: usize) {
        self.set(request, request_seed(self.seed, request));
    }

    /// The state of request 0's generator now.
    pub fn first_state(&self) -> u64 {
        self.get(0)
    }

    /// The random number in [0, 1) that samples a request's token, `ahead` tokens after its next one.
    pub fn coin(&self, request: usize, ahead: usize) -> f32 {
        sampler::coin(self.get(request), ahead)
    }

    /// Advances a request's generator past one token.
    fn advance(&self, request: usize) {
        self.set(request, sampler::next_state(self.get(request)));
    }

    fn get(&self, request: usize) -> u64 {
        self.states[request].load(Ordering::Relaxed)
    }

    fn set(&self, request: usize, state: u64) {
        self.states[request].store(state, Ordering::Relaxed);
    }
}

/// Samples the tokens of one replica's steps.
pub struct Draws {
    greedy: bool,
    /// Whether the replica's device samples.
    device_draws: bool,
    vocab: usize,
    /// One per thread: each has scratch memory as long as the vocabulary.
    samplers: Vec<Sampler>,
    draws: Vec<Draw>,
    tokens: Vec<u32>,
    /// See [`Drawn::left_to_host`].
    left_to_host: Vec<usize>,
    /// Since the last decision: rows that the device has sampled, and rows that it left to the host.
    drawn_rows: [usize; 2],
    /// Whether the device left many rows to the host; then each step has only a part of the sequences.
    takes_turns: bool,
    /// How many more steps copy all logits to the host.
    whole_rows: usize,
}

/// Rows after which it is decided whether the device samples: a few rows say little.
const JUDGED_ROWS: usize = 64;
/// Steps with all logits on the host before the device may sample again. A failed attempt costs a copy that overlaps
/// with nothing; among this many steps that is little.
const WHOLE_ROWS_STEPS: usize = 32;

/// One row that the host samples.
struct Draw {
    row: usize,
    /// The index of its token in `tokens`.
    place: usize,
    sequence: usize,
    request: usize,
    state: u64,
    token: u32,
}

/// A step's tokens.
pub struct Drawn<'a> {
    /// One token for each row of the plan with `sample`, in order; arbitrary for rows that the scheduler discards.
    pub tokens: &'a [u32],
    /// Sequences for which the device holds another token than the one sampled here.
    pub left_to_host: &'a [usize],
}

impl Draws {
    /// Samples with `threads` threads; `device_draws`: whether [the device samples](crate::replica::Replica::draws).
    pub fn new(vocab: usize, sampling: Sampling, threads: usize, device_draws: bool) -> Result<Self> {
        let Sampling {
            temperature,
            topp,
            rng_state,
        } = sampling;
        let samplers = (0..threads.max(1)).map(|_| Sampler::new(vocab, temperature, topp, rng_state));
        Ok(Self {
            greedy: sampling.is_greedy(),
            device_draws,
            vocab,
            samplers: memory::try_collect(samplers, Purpose::Draws)?,
            draws: Vec::new(),
            tokens: Vec::new(),
            left_to_host: Vec::new(),
            drawn_rows: [0; 2],
            takes_turns: false,
            whole_rows: 0,
        })
    }

    /// What the next step is to return, and whether a sequence may be in it whose last token only the device knows.
    pub fn next_step(&mut self, want: Want) -> (Want, bool) {
        match want {
            Want::Greedy => (want, true),
            Want::Draws { .. } if self.whole_rows == 0 => (want, self.device_draws && !self.takes_turns),
            Want::Draws { .. } => {
                self.whole_rows -= 1;
                (Want::Logits, false)
            }
            Want::Logits => (want, false),
        }
    }

    /// Samples the tokens of the step collected last; `plan` is its plan.
    pub fn draw(
        &mut self,
        pool: &ThreadPool,
        streams: &Streams,
        scheduler: &Scheduler,
        plan: &StepPlan,
        pipeline: &mut Pipeline,
    ) -> Result<Drawn<'_>> {
        self.check(plan, &pipeline.output)?;
        self.tokens.clear();
        self.left_to_host.clear();
        memory::reserve(&mut self.tokens, plan.logits.len(), Purpose::Draws)?;
        if self.greedy {
            let rows = plan.logits.iter().zip(&pipeline.output.greedy);
            let sampled = rows.filter(|(row, _)| row.sample);
            self.tokens.extend(sampled.map(|(_, greedy)| greedy.token));
        } else {
            memory::reserve(&mut self.draws, plan.logits.len(), Purpose::Draws)?;
            memory::reserve(&mut self.left_to_host, plan.logits.len(), Purpose::Draws)?;
            self.gather(streams, scheduler, plan, &pipeline.output);
            if !pipeline.output.drawn.is_empty() && !self.draws.is_empty() {
                let rows = memory::collect(self.draws.iter().map(|draw| draw.row), Purpose::Draws)?;
                pipeline.fetch(&rows)?;
                self.check_rows(rows.len(), &pipeline.output)?;
                self.left_to_host.extend(self.draws.iter().map(|draw| draw.sequence));
            }
            if !self.draws.is_empty() {
                pool.install(|| self.draw_from_rows(&pipeline.output))?;
                self.scatter(streams);
            }
        }
        Ok(Drawn {
            tokens: &self.tokens,
            left_to_host: &self.left_to_host,
        })
    }

    fn check(&self, plan: &StepPlan, output: &StepOutput) -> Result<()> {
        let rows = plan.logits.len();
        if output.greedy.len() != rows {
            return Err(too_few(rows, "largest logits", output.greedy.len()));
        }
        match output.drawn.len() {
            _ if self.greedy => Ok(()),
            0 => self.check_rows(rows, output),
            drawn if drawn == rows => Ok(()),
            drawn => Err(too_few(rows, "tokens", drawn)),
        }
    }

    fn check_rows(&self, rows: usize, output: &StepOutput) -> Result<()> {
        if output.logits.len() == rows * self.vocab {
            return Ok(());
        }
        Err(too_few(rows, "logits", output.logits.len()))
    }

    /// Takes the tokens that the device has sampled, and lists the rows that the host has to sample.
    fn gather(&mut self, streams: &Streams, scheduler: &Scheduler, plan: &StepPlan, output: &StepOutput) {
        self.draws.clear();
        let [mut drawn_rows, _] = self.drawn_rows;
        for (row, wanted) in plan.logits.iter().enumerate().filter(|(_, wanted)| wanted.sample) {
            let drawn = output.drawn.get(row).copied().flatten();
            let place = self.tokens.len();
            self.tokens.push(drawn.unwrap_or(0));
            match (scheduler.drawing(wanted.sequence), drawn) {
                (None, _) => {}
                (Some(request), Some(_)) => {
                    streams.advance(request);
                    drawn_rows += 1;
                }
                (Some(request), None) => self.draws.push(Draw {
                    row,
                    place,
                    sequence: wanted.sequence,
                    request,
                    state: streams.get(request),
                    token: 0,
                }),
            }
        }
        // Steps already submitted when all logits were first requested are not counted again.
        if !output.drawn.is_empty() && self.whole_rows == 0 {
            self.judge([drawn_rows, self.drawn_rows[1] + self.draws.len()]);
        }
    }

    /// Decides on all logits if the host sampled a third of the rows: each such row is computed twice, and the host
    /// fetches and samples it while the device has nothing to do.
    fn judge(&mut self, rows: [usize; 2]) {
        self.drawn_rows = rows;
        let [drawn, left_to_host] = rows;
        if drawn + left_to_host >= JUDGED_ROWS {
            self.drawn_rows = [0; 2];
            self.takes_turns = 2 * left_to_host > drawn;
            self.whole_rows = if self.takes_turns { WHOLE_ROWS_STEPS } else { 0 };
        }
    }

    /// Samples in parallel. If the device has sampled, the output holds only the rows that it left to the host, in
    /// order.
    fn draw_from_rows(&mut self, output: &StepOutput) -> Result<()> {
        let fetched = !output.drawn.is_empty();
        let mut draws = memory::collect(self.draws.iter_mut().enumerate(), Purpose::Draws)?;
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
                (draw.state, draw.token) = (row.rng_state, row.token);
            }
            Ok(())
        })
    }

    fn scatter(&mut self, streams: &Streams) {
        for draw in &self.draws {
            streams.set(draw.request, draw.state);
            self.tokens[draw.place] = draw.token;
        }
    }
}

/// Splits the draws evenly among the samplers.
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
