//! Steps on their way through one replica.

use crate::batch::{LogitsRow, StepOutput, StepPlan, Want};
use crate::error::Result;
use crate::replica::Replica;
use crate::scheduler::Scheduler;
use std::collections::VecDeque;

/// A replica and its steps under way. It outlives an inference, so that one that panicked leaves no step behind that
/// the next would take for its own.
pub struct Pipeline {
    replica: Box<dyn Replica>,
    /// The steps under way, oldest first.
    under_way: VecDeque<StepPlan>,
    /// Plans not in use, kept for their memory.
    spare: Vec<StepPlan>,
    /// What the step collected last gave.
    pub output: StepOutput,
}

impl Pipeline {
    /// Nothing is under way yet.
    pub fn new(replica: Box<dyn Replica>) -> Self {
        Self {
            replica,
            under_way: VecDeque::new(),
            spare: Vec::new(),
            output: StepOutput::default(),
        }
    }

    /// The replica.
    pub fn replica(&self) -> &dyn Replica {
        &*self.replica
    }

    /// Whether one more step may be under way.
    pub fn has_room(&self) -> bool {
        self.under_way.len() < self.replica.depth()
    }

    /// Plans a step and submits it; `false` if there is none. `coin` is what a token of a request is drawn by, so many
    /// that are not known yet coming before it.
    pub fn submit(
        &mut self,
        scheduler: &mut Scheduler,
        want: Want,
        coin: impl Fn(usize, usize) -> f32,
    ) -> Result<bool> {
        let mut plan = self.spare.pop().unwrap_or_default();
        scheduler.make_room_to_plan(&mut plan)?;
        if !scheduler.plan(&mut plan) {
            self.spare.push(plan);
            return Ok(false);
        }
        if let Want::Draws { .. } = want {
            let coin = |row: &LogitsRow| match scheduler.draws_ahead(row) {
                Some((request, ahead)) => coin(request, ahead),
                None => 0.0,
            };
            plan.coins.extend(plan.logits.iter().map(coin));
        }
        self.replica.submit(&plan, want)?;
        scheduler.begin(&plan);
        self.under_way.push_back(plan);
        Ok(true)
    }

    /// Waits for the oldest step; its plan is to be [recycled](Self::recycle). `None` if none is under way.
    pub fn collect(&mut self) -> Result<Option<StepPlan>> {
        let Some(plan) = self.under_way.pop_front() else {
            return Ok(None);
        };
        self.replica.collect(&mut self.output)?;
        Ok(Some(plan))
    }

    /// Brings whole rows of the step collected last.
    pub fn fetch(&mut self, rows: &[usize]) -> Result<()> {
        self.replica.fetch(rows, &mut self.output)
    }

    /// Keeps a plan's memory for the next; what its step gave is not needed any more.
    pub fn recycle(&mut self, plan: StepPlan) {
        self.output.logits.give_back();
        self.spare.push(plan);
    }

    /// Waits for all steps under way and forgets them.
    pub fn drain(&mut self) -> Result<()> {
        while let Some(plan) = self.collect()? {
            self.recycle(plan);
        }
        Ok(())
    }
}
