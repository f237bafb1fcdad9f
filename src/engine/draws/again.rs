//! Tokens that a grammar forbids are sampled again, from those that it allows.

use super::{Draws, Pipeline};
use crate::batch::{Draw, StepPlan};
use crate::error::{Error, Result};
use crate::grammar::Matcher;
use crate::memory::{self, Purpose};
use crate::sampler::Sampler;
use crate::scheduler::Scheduler;
use rayon::ThreadPool;
use rayon::prelude::*;

/// A row whose answer follows a grammar.
struct Follower {
    /// The row among the plan's logits rows.
    row: usize,
    /// The row of its logits in the output.
    logits: usize,
    /// The index of its token among those sampled.
    place: usize,
    sequence: usize,
    number: usize,
    /// Lent by the scheduler.
    matcher: Box<dyn Matcher>,
    token: u32,
    found: Result<Verdict>,
}

/// What a grammar says of a token.
enum Verdict {
    Allowed,
    /// The mask of those that are allowed.
    Forbidden(Vec<u32>),
}

/// A row to be sampled again: the first three are a [`Follower`]'s.
struct Forbidden {
    row: usize,
    logits: usize,
    place: usize,
    mask: Vec<u32>,
}

impl Follower {
    fn judge(&mut self) -> Result<Verdict> {
        if self.matcher.allows(self.token)? {
            return Ok(Verdict::Allowed);
        }
        let mut mask = Vec::new();
        self.matcher.mask(&mut mask)?;
        Ok(Verdict::Forbidden(mask))
    }
}

impl Draws {
    /// Replaces the tokens sampled that grammars forbid. Gives the requests whose grammars cannot be followed, and why.
    /// `fetches`: the step came without the logits of its rows.
    pub(super) fn sample_again(
        &mut self,
        pool: &ThreadPool,
        scheduler: &mut Scheduler,
        plan: &StepPlan,
        pipeline: &mut Pipeline,
        fetches: bool,
    ) -> Result<Vec<(usize, Error)>> {
        if !plan.has_grammars() {
            return Ok(Vec::new());
        }
        let mut followers = self.followers(scheduler, plan, pipeline)?;
        pool.install(|| {
            followers
                .par_iter_mut()
                .for_each(|follower| follower.found = follower.judge());
        });
        let mut failed = Vec::new();
        let mut forbidden = memory::room(followers.len(), Purpose::Draws)?;
        for mut follower in followers {
            let found = std::mem::replace(&mut follower.found, Ok(Verdict::Allowed));
            scheduler.return_matcher(follower.sequence, follower.matcher);
            match found {
                Ok(Verdict::Allowed) => {}
                Ok(Verdict::Forbidden(mask)) => forbidden.push(Forbidden {
                    row: follower.row,
                    logits: follower.logits,
                    place: follower.place,
                    mask,
                }),
                Err(why) => memory::push(&mut failed, (follower.number, why), Purpose::Draws)?,
            }
        }
        if forbidden.is_empty() {
            return Ok(failed);
        }
        if fetches {
            let rows = memory::collect(forbidden.iter().map(|again| again.row), Purpose::Draws)?;
            pipeline.fetch(&rows)?;
            self.check_rows(rows.len(), &pipeline.output)?;
            forbidden.iter_mut().enumerate().for_each(|(i, again)| again.logits = i);
        }
        let tokens = self.sample_allowed(pool, plan, &pipeline.output.logits, &forbidden)?;
        for (Forbidden { row, place, .. }, token) in forbidden.iter().zip(tokens) {
            self.tokens[*place] = token;
            memory::push(&mut self.left_to_host, plan.logits[*row].sequence, Purpose::Draws)?;
        }
        Ok(failed)
    }

    /// The tokens of these rows, under their masks.
    fn sample_allowed(
        &mut self,
        pool: &ThreadPool,
        plan: &StepPlan,
        logits: &[f32],
        rows: &[Forbidden],
    ) -> Result<impl Iterator<Item = u32> + use<>> {
        let (vocab, drawable) = (self.vocab, self.drawable);
        let run = rows.len().div_ceil(self.samplers.len()).max(1);
        let runs = rows.par_chunks(run).zip(&mut self.samplers);
        let tokens = pool.install(|| {
            let tokens = |(run, sampler): (&[Forbidden], &mut Sampler)| {
                let token = |again: &Forbidden| {
                    let wanted = &plan.logits[again.row];
                    let draw = Draw {
                        coin: wanted.again.unwrap_or(0.0),
                        ..wanted.draw
                    };
                    sampler.sample_allowed(&logits[again.logits * vocab..][..drawable], &again.mask, draw)
                };
                memory::try_collect(run.iter().map(token), Purpose::Draws)
            };
            runs.map(tokens).collect::<Result<Vec<_>>>()
        })?;
        Ok(tokens.into_iter().flatten())
    }

    /// The rows whose answers follow a grammar, with the tokens sampled.
    fn followers(&self, scheduler: &mut Scheduler, plan: &StepPlan, pipeline: &Pipeline) -> Result<Vec<Follower>> {
        let whole = pipeline.output.logits.len() == plan.logits.len() * self.vocab;
        let mut followers = memory::room(plan.logits.len(), Purpose::Draws)?;
        let (mut place, mut for_host) = (0, 0);
        for (row, wanted) in plan.logits.iter().enumerate() {
            let logits = if whole { row } else { for_host };
            for_host += usize::from(wanted.is_for_host());
            if !wanted.sample {
                continue;
            }
            place += 1;
            if wanted.again.is_some()
                && let Some(number) = scheduler.drawing(wanted.sequence)
                && let Some(matcher) = scheduler.lend_matcher(wanted.sequence)
            {
                followers.push(Follower {
                    row,
                    logits,
                    place: place - 1,
                    sequence: wanted.sequence,
                    number,
                    matcher,
                    token: self.tokens[place - 1],
                    found: Ok(Verdict::Allowed),
                });
            }
        }
        Ok(followers)
    }
}
