//! Samples the next token of each sequence from a step's output.
//!
//! A replica whose device samples returns most tokens itself. For a row that the device could not sample (too many
//! tokens are equally probable, or values are not finite), the host fetches the row's logits and samples it. The device
//! has meanwhile fed another token to the next step; the scheduler discards that step's row and plans it again. If the
//! device cannot sample many rows, as where most logits are equal, the next steps copy all logits to the host, and only
//! half of the sequences are in a step, so that the host samples one half while the device computes the other.
//!
//! Where an answer follows a grammar that forbids the token, the host samples again (`engine/step_sampler/again.rs`).

mod again;

use super::in_flight::InFlight;
use crate::batch::{LogitsRow, StepOutput, StepPlan, Want};
use crate::error::{Error, Result};
use crate::memory::{self, Purpose};
use crate::request::Sampling;
use crate::sampler::{Row, Sampler, device_may_draw};
use crate::scheduler::Scheduler;
use rayon::ThreadPool;
use rayon::prelude::*;

/// Samples the tokens of one replica's steps.
pub struct StepSampler {
    /// Whether the replica's device samples.
    device_draws: bool,
    vocab: usize,
    /// How many of them may be sampled.
    drawable: usize,
    /// One per thread: each has scratch memory as long as the vocabulary.
    samplers: Vec<Sampler>,
    rows: Vec<HostRow>,
    tokens: Vec<u32>,
    /// See [`StepTokens::left_to_host`].
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
struct HostRow {
    /// The row among the plan's logits rows.
    row: usize,
    /// The row of its logits in the output.
    logits: usize,
    /// The index of its token in `tokens`.
    place: usize,
    slot: usize,
    token: u32,
}

/// A step's tokens.
pub struct StepTokens<'a> {
    /// One token for each row of the plan with `sample`, in order; arbitrary for rows that the scheduler discards.
    pub tokens: &'a [u32],
    /// Sequences for which the device holds another token than the one sampled here.
    pub left_to_host: &'a [usize],
    /// Requests that cannot be answered, since their grammars cannot be followed, and why.
    pub failed: Vec<(usize, Error)>,
}

impl StepSampler {
    /// Samples the first `drawable` of `vocab` tokens with `threads` threads; `device_draws`: whether [the device
    /// samples](crate::replica::Replica::draws).
    pub fn new(vocab: usize, drawable: usize, threads: usize, device_draws: bool) -> Result<Self> {
        let samplers = (0..threads.max(1)).map(|_| Sampler::new(drawable));
        Ok(Self {
            device_draws,
            vocab,
            drawable,
            samplers: memory::collect(samplers, Purpose::Draws)?,
            rows: Vec::new(),
            tokens: Vec::new(),
            left_to_host: Vec::new(),
            drawn_rows: [0; 2],
            takes_turns: false,
            whole_rows: 0,
        })
    }

    /// Tokens of the vocabulary.
    pub fn vocab(&self) -> usize {
        self.vocab
    }

    /// Allocates what requests with this sampling need, if it is not there yet.
    pub fn make_room(&mut self, sampling: &Sampling) -> Result<()> {
        let make_room = |sampler: &mut Sampler| sampler.make_room(sampling.temperature, sampling.topp);
        self.samplers.iter_mut().try_for_each(make_room)
    }

    /// What the next step is to return, and whether a sequence may be in it whose last token only the device knows.
    /// `samplings` are of all sequences that may be in it.
    pub fn next_step<'a>(&mut self, mut samplings: impl Iterator<Item = &'a Sampling>) -> (Want, bool) {
        let mut drawn = samplings.by_ref().filter(|sampling| !sampling.is_greedy()).peekable();
        if drawn.peek().is_none() {
            return (Want::Tokens, true);
        }
        if self.device_draws && !drawn.all(|sampling| device_may_draw(sampling.temperature)) {
            return (Want::Logits, false);
        }
        if self.whole_rows > 0 {
            self.whole_rows -= 1;
            return (Want::Logits, false);
        }
        (Want::Tokens, self.device_draws && !self.takes_turns)
    }

    /// Samples the tokens of the step collected last; `plan` is its plan.
    pub fn sample(
        &mut self,
        pool: &ThreadPool,
        scheduler: &mut Scheduler,
        plan: &StepPlan,
        in_flight: &mut InFlight,
    ) -> Result<StepTokens<'_>> {
        self.check(plan, &in_flight.output)?;
        self.tokens.clear();
        self.left_to_host.clear();
        memory::reserve(&mut self.tokens, plan.logits.len(), Purpose::Draws)?;
        memory::reserve(&mut self.rows, plan.logits.len(), Purpose::Draws)?;
        memory::reserve(&mut self.left_to_host, plan.logits.len(), Purpose::Draws)?;
        self.gather(scheduler, plan, &in_flight.output);
        let fetches = in_flight.output.logits.is_empty();
        if !self.rows.is_empty() {
            if fetches {
                let rows = memory::collect(self.rows.iter().map(|of_host| of_host.row), Purpose::Draws)?;
                in_flight.fetch(&rows)?;
                self.check_rows(rows.len(), &in_flight.output)?;
                self.rows
                    .iter_mut()
                    .enumerate()
                    .for_each(|(i, of_host)| of_host.logits = i);
                self.left_to_host.extend(self.rows.iter().map(|of_host| of_host.slot));
            }
            pool.install(|| self.sample_rows_of_host(plan, &in_flight.output))?;
            for of_host in &self.rows {
                self.tokens[of_host.place] = of_host.token;
            }
        }
        let failed = self.sample_again(pool, scheduler, plan, in_flight, fetches)?;
        Ok(StepTokens {
            tokens: &self.tokens,
            left_to_host: &self.left_to_host,
            failed,
        })
    }

    fn check(&self, plan: &StepPlan, output: &StepOutput) -> Result<()> {
        let rows = plan.logits.len();
        if output.greedy.len() != rows {
            return Err(too_few(rows, "largest logits", output.greedy.len()));
        }
        if output.logits.len() == rows * self.vocab {
            return Ok(());
        }
        if !self.device_draws {
            return self.check_rows(plan.logits.iter().filter(|row| row.is_for_host()).count(), output);
        }
        match output.drawn.len() {
            tokens if tokens == rows || !plan.draws() => Ok(()),
            tokens => Err(too_few(rows, "tokens", tokens)),
        }
    }

    fn check_rows(&self, rows: usize, output: &StepOutput) -> Result<()> {
        if output.logits.len() == rows * self.vocab {
            return Ok(());
        }
        Err(too_few(rows, "logits", output.logits.len()))
    }

    /// Takes the tokens that the device has sampled, and lists the rows that the host has to sample.
    fn gather(&mut self, scheduler: &Scheduler, plan: &StepPlan, output: &StepOutput) {
        self.rows.clear();
        let [mut drawn_rows, _] = self.drawn_rows;
        for (row, logits, wanted) in places_of_logits(plan, output, self.vocab) {
            if !wanted.sample {
                continue;
            }
            let place = self.tokens.len();
            if !wanted.is_drawn() {
                self.tokens.push(output.greedy[row].token);
                continue;
            }
            let drawn = output.drawn.get(row).copied().flatten();
            self.tokens.push(drawn.unwrap_or(0));
            match (scheduler.drawing(wanted.slot), drawn) {
                (None, _) => {}
                (Some(_), Some(_)) => drawn_rows += 1,
                (Some(_), None) => self.rows.push(HostRow {
                    row,
                    logits,
                    place,
                    slot: wanted.slot,
                    token: 0,
                }),
            }
        }
        // Steps already submitted when all logits were first requested are not counted again.
        if !output.drawn.is_empty() && self.whole_rows == 0 {
            self.judge([drawn_rows, self.drawn_rows[1] + self.rows.len()]);
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

    /// Samples in parallel.
    fn sample_rows_of_host(&mut self, plan: &StepPlan, output: &StepOutput) -> Result<()> {
        runs(&mut self.rows, &mut self.samplers).try_for_each(|(of_host, sampler)| {
            let row = |of_host: &HostRow| {
                let logits = &output.logits[of_host.logits * self.vocab..][..self.drawable];
                let largest = logits.get(output.greedy[of_host.row].token as usize);
                Row {
                    logits,
                    largest: largest.copied().unwrap_or(f32::NAN),
                    draw: plan.logits[of_host.row].draw,
                    token: 0,
                }
            };
            let mut rows = memory::collect(of_host.iter().map(row), Purpose::Draws)?;
            sampler.sample_rows(&mut rows);
            of_host
                .iter_mut()
                .zip(rows)
                .for_each(|(of_host, row)| of_host.token = row.token);
            Ok(())
        })
    }
}

/// The plan's logits rows: their numbers, the rows of their logits in the output, and what is wanted. Where the output
/// has not all rows, it has those that are for the host, or none.
fn places_of_logits<'a>(
    plan: &'a StepPlan,
    output: &StepOutput,
    vocab: usize,
) -> impl Iterator<Item = (usize, usize, &'a LogitsRow)> + use<'a> {
    let is_whole = output.logits.len() == plan.logits.len() * vocab;
    let mut for_host = 0;
    plan.logits.iter().enumerate().map(move |(row, wanted)| {
        let logits = if is_whole { row } else { for_host };
        for_host += usize::from(wanted.is_for_host());
        (row, logits, wanted)
    })
}

/// Splits rows evenly among the samplers.
fn runs<'a, T: Send>(
    rows: &'a mut [T],
    samplers: &'a mut [Sampler],
) -> impl IndexedParallelIterator<Item = (&'a mut [T], &'a mut Sampler)> {
    let run = rows.len().div_ceil(samplers.len()).max(1);
    rows.par_chunks_mut(run).zip(samplers)
}

fn too_few(rows: usize, what: &str, values: usize) -> Error {
    Error::Internal(format!("a step with {rows} rows to sample gave {values} {what}"))
}
