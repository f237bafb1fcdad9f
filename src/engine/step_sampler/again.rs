//! Tokens that a grammar forbids are sampled again, from those that it allows.

use super::{InFlight, StepSampler, places_of_logits, runs};
use crate::batch::{Draw, StepOutput, StepPlan};
use crate::error::{Error, Result};
use crate::grammar::Matcher;
use crate::memory::{self, Purpose};
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
    number: usize,
    /// Lent by the scheduler.
    matcher: Box<dyn Matcher>,
    token: u32,
    /// The tokens that its grammar allows, if that one is not among them.
    mask: Vec<u32>,
}

impl Follower {
    /// Asks its grammar; gives whether that forbids the token.
    fn is_forbidden(&mut self) -> Result<bool> {
        if self.matcher.allows(self.token)? {
            return Ok(false);
        }
        self.matcher.mask(&mut self.mask)?;
        Ok(true)
    }
}

impl StepSampler {
    /// Replaces the tokens sampled that grammars forbid. Gives the requests whose grammars cannot be followed, and why.
    /// `fetches`: the step came without the logits of its rows.
    pub(super) fn sample_again(
        &mut self,
        pool: &ThreadPool,
        scheduler: &mut Scheduler,
        plan: &StepPlan,
        in_flight: &mut InFlight,
        fetches: bool,
    ) -> Result<Vec<(usize, Error)>> {
        if !plan.has_grammars() {
            return Ok(Vec::new());
        }
        let mut followers = self.followers(scheduler, plan, &in_flight.output)?;
        let asked: Vec<Result<bool>> = pool.install(|| followers.par_iter_mut().map(Follower::is_forbidden).collect());
        let mut failed = Vec::new();
        let mut forbidden = memory::room(followers.len(), Purpose::Draws)?;
        for (follower, is_forbidden) in followers.into_iter().zip(asked) {
            match is_forbidden {
                Ok(true) => forbidden.push(follower),
                Ok(false) => give_back(scheduler, plan, follower),
                Err(why) => {
                    memory::push(&mut failed, (follower.number, why), Purpose::Draws)?;
                    give_back(scheduler, plan, follower);
                }
            }
        }
        if fetches && !forbidden.is_empty() {
            let rows = memory::collect(forbidden.iter().map(|follower| follower.row), Purpose::Draws)?;
            in_flight.fetch(&rows)?;
            self.check_rows(rows.len(), &in_flight.output)?;
            forbidden
                .iter_mut()
                .enumerate()
                .for_each(|(i, follower)| follower.logits = i);
        }
        pool.install(|| self.sample_allowed(plan, &in_flight.output, &mut forbidden))?;
        for follower in forbidden {
            self.tokens[follower.place] = follower.token;
            memory::push(&mut self.left_to_host, plan.logits[follower.row].slot, Purpose::Draws)?;
            give_back(scheduler, plan, follower);
        }
        Ok(failed)
    }

    /// Samples under their masks, in parallel.
    fn sample_allowed(&mut self, plan: &StepPlan, output: &StepOutput, forbidden: &mut [Follower]) -> Result<()> {
        let (vocab, drawable) = (self.vocab, self.drawable);
        runs(forbidden, &mut self.samplers).try_for_each(|(followers, sampler)| {
            followers.iter_mut().try_for_each(|follower| {
                let wanted = &plan.logits[follower.row];
                let draw = Draw {
                    coin: wanted.second_coin.unwrap_or(0.0),
                    ..wanted.draw
                };
                let logits = &output.logits[follower.logits * vocab..][..drawable];
                follower.token = sampler.sample_allowed(logits, &follower.mask, draw)?;
                Ok(())
            })
        })
    }

    /// The rows whose answers follow a grammar, with the tokens sampled.
    fn followers(&self, scheduler: &mut Scheduler, plan: &StepPlan, output: &StepOutput) -> Result<Vec<Follower>> {
        let mut followers = memory::room(plan.logits.len(), Purpose::Draws)?;
        let rows = places_of_logits(plan, output, self.vocab).filter(|(_, _, wanted)| wanted.sample);
        for (place, (row, logits, wanted)) in rows.enumerate() {
            if wanted.second_coin.is_some()
                && let Some(number) = scheduler.drawing(wanted.slot)
                && let Some(matcher) = scheduler.lend_matcher(wanted.slot)
            {
                followers.push(Follower {
                    row,
                    logits,
                    place,
                    number,
                    matcher,
                    token: self.tokens[place],
                    mask: Vec::new(),
                });
            }
        }
        Ok(followers)
    }
}

/// Gives its matcher back to the scheduler.
fn give_back(scheduler: &mut Scheduler, plan: &StepPlan, follower: Follower) {
    scheduler.return_matcher(plan.logits[follower.row].slot, follower.matcher);
}
