//! A replica and its steps in flight.

use crate::batch::{StepOutput, StepPlan, Want};
use crate::error::Result;
use crate::replica::Replica;
use crate::scheduler::{Holdings, Scheduler};
use std::collections::VecDeque;

/// See the module. It lives longer than an inference: after a panic the next inference first waits for the steps still
/// in flight.
pub struct InFlight {
    replica: Box<dyn Replica>,
    /// Plans of the steps in flight, oldest first.
    under_way: VecDeque<StepPlan>,
    /// Plans not in use, whose memory is reused.
    spare: Vec<StepPlan>,
    /// The output of the step collected last.
    pub output: StepOutput,
    /// Whether it was opened for what others had left.
    pub stands_in: bool,
    /// What the last inference has left in the KV cache, between inferences.
    pub cache: Option<Holdings>,
    /// See [`StepPlan::drawable`].
    pub drawable: Option<usize>,
}

impl InFlight {
    /// A replica without steps in flight.
    pub fn new(replica: Box<dyn Replica>) -> Self {
        Self {
            stands_in: false,
            cache: None,
            drawable: None,
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

    /// Whether one more step may be submitted.
    pub fn has_room(&self) -> bool {
        self.under_way.len() < self.replica.depth()
    }

    /// Plans a step and submits it; `false` if there is none.
    pub fn submit(&mut self, scheduler: &mut Scheduler, want: Want) -> Result<bool> {
        let mut plan = self.spare.pop().unwrap_or_default();
        scheduler.make_room_to_plan(&mut plan)?;
        if !scheduler.plan(&mut plan) {
            self.spare.push(plan);
            return Ok(false);
        }
        plan.drawable = self.drawable;
        self.replica.submit(&plan, want)?;
        scheduler.begin(&plan);
        self.under_way.push_back(plan);
        Ok(true)
    }

    /// Waits for the oldest step in flight and returns its plan, for [`Self::recycle`]; `None` if there is none.
    pub fn collect(&mut self) -> Result<Option<StepPlan>> {
        let Some(plan) = self.under_way.pop_front() else {
            return Ok(None);
        };
        self.replica.collect(&mut self.output)?;
        Ok(Some(plan))
    }

    /// Copies rows of logits of the step collected last to the host.
    pub fn fetch(&mut self, rows: &[usize]) -> Result<()> {
        self.replica.fetch(rows, &mut self.output)
    }

    /// Keeps a plan's memory for the next plan, and gives back the logits of its step.
    pub fn recycle(&mut self, plan: StepPlan) {
        self.output.logits.give_back();
        self.spare.push(plan);
    }

    /// Waits for all steps in flight and discards their output.
    pub fn drain(&mut self) -> Result<()> {
        while let Some(plan) = self.collect()? {
            self.recycle(plan);
        }
        Ok(())
    }
}
