//! The next token of each sequence, from what a step gave.
//!
//! A replica that draws has most tokens itself. Those it leaves to the host are drawn from whole rows, brought for
//! that, and the scheduler mends what followed from the tokens that the replica had in their places. Where many are
//! left to the host, as where a nucleus is most of the vocabulary, whole rows come with each step, and sequences take
//! turns.

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

    /// What one of the request's next tokens is drawn by, `ahead` others coming before it.
    pub fn coin(&self, request: usize, ahead: usize) -> f32 {
        sampler::coin(self.get(request), ahead)
    }

    /// Notes that the request's next token has been drawn.
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

/// Draws the tokens of one replica's steps.
pub struct Draws {
    greedy: bool,
    /// Whether the replica draws.
    device_draws: bool,
    vocab: usize,
    /// One a thread: their scratch memory is as long as the vocabulary.
    samplers: Vec<Sampler>,
    draws: Vec<Draw>,
    tokens: Vec<u32>,
    /// See [`Drawn::left_to_host`].
    left_to_host: Vec<usize>,
    /// Rows that the replica has drawn from since it was last judged, and rows that it left to the host.
    drawn_rows: [usize; 2],
    /// It left many rows to the host: sequences take turns until it does not.
    takes_turns: bool,
    /// Steps that whole rows are still asked for.
    whole_rows: usize,
}

/// Rows after which a replica that draws is judged: one row alone says little.
const JUDGED_ROWS: usize = 64;
/// Steps after many rows were left to the host, until the replica is to draw again: what a try costs, a copy
/// that nothing hides, is little among so many.
const WHOLE_ROWS_STEPS: usize = 32;

/// One row that the host draws from.
struct Draw {
    row: usize,
    /// Where its token goes among all.
    place: usize,
    sequence: usize,
    request: usize,
    state: u64,
    token: u32,
}

/// What a step gave.
pub struct Drawn<'a> {
    /// The tokens of the plan's rows that ask for one, in order; anything for those that are passed over.
    pub tokens: &'a [u32],
    /// Sequences whose token the replica does not have, but another in its place.
    pub left_to_host: &'a [usize],
}

impl Draws {
    /// Draws by `threads` threads; `device_draws` says whether [the replica does](crate::replica::Replica::draws).
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

    /// What the next step is to give, and whether sequences may go on while only the device knows their tokens.
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

    /// What the plan's step gave, which is the one collected last.
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

    /// Takes the tokens that the replica has drawn, and finds the rows that the host is to draw from.
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
        // A step that was under way when whole rows were first asked for says nothing new.
        if !output.drawn.is_empty() && self.whole_rows == 0 {
            self.judge([drawn_rows, self.drawn_rows[1] + self.draws.len()]);
        }
    }

    /// A third of the rows is too many: each is computed twice, and the host has to bring and draw it within a step.
    fn judge(&mut self, rows: [usize; 2]) {
        self.drawn_rows = rows;
        let [drawn, left_to_host] = rows;
        if drawn + left_to_host >= JUDGED_ROWS {
            self.drawn_rows = [0; 2];
            self.takes_turns = 2 * left_to_host > drawn;
            self.whole_rows = if self.takes_turns { WHOLE_ROWS_STEPS } else { 0 };
        }
    }

    /// Draws in parallel. Where tokens are drawn only the rows that lack one are there, in order.
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
