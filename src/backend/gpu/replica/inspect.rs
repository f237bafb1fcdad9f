//! A step whose operations the caller queues one by one, times of whole steps, and what experts got: for tests, benches and
//! tools.

use super::{Activations, Buffer, DEPTH, GpuOps, GpuReplica, KvCache, Numbers, ResidualMemory, StepClock, events};
use crate::backend::gpu::weights::GpuWeights;
use crate::batch::{Greedy, StepPlan, Want};
use crate::error::Result;
use crate::profile::StepTimes;
use crate::replica::Replica;
use std::any::Any;

/// What the operations of a step take.
pub struct Parts<'a> {
    /// The operations.
    pub ops: &'a mut GpuOps,
    /// The weights.
    pub weights: &'a GpuWeights,
    /// The activations.
    pub activations: &'a mut Activations<ResidualMemory, Buffer>,
    /// The KV cache.
    pub kv: &'a mut KvCache,
}

impl GpuReplica {
    /// The replica, if it is one on a GPU.
    pub fn of(replica: &dyn Replica) -> Option<&Self> {
        (replica as &dyn Any).downcast_ref()
    }

    /// The same, to be changed.
    pub fn of_mut(replica: &mut dyn Replica) -> Option<&mut Self> {
        (replica as &mut dyn Any).downcast_mut()
    }

    /// From now on steps are timed as wholes, which costs little. No step is under way.
    pub fn time_steps(&mut self) -> Result<()> {
        self.events = events(&self.context, true)?;
        self.clock = Some(StepClock::default());
        Ok(())
    }

    /// Times of the steps since [`GpuReplica::time_steps`].
    pub fn step_times(&self) -> Option<StepTimes> {
        self.clock.as_ref().map(|clock| clock.times)
    }

    /// Rows of each expert in the layer that ran last. No step is under way.
    pub fn expert_rows(&self) -> Result<Vec<u32>> {
        self.activations.x.routes.rows_by_expert(&self.context.stream)
    }

    /// How it computes.
    pub fn numbers(&self) -> Numbers {
        self.numbers
    }

    /// Brings a plan to the device, once all that was queued before is done.
    pub fn begin(&mut self, plan: &StepPlan, want: Want) -> Result<Parts<'_>> {
        self.context.stream.synchronize()?;
        let turn = self.steps % DEPTH;
        if self.whole_rows(want) {
            self.need_logits(plan.logits.len())?;
        }
        let header = self.memory.write(plan, turn, want)?;
        let shape = self.shape(plan, &header, want);
        let logits = self.logits.as_ref().map(|path| path.at(turn)).unwrap_or_default();
        self.ops.begin(shape, plan, logits);
        self.ops.upload(&self.memory.upload_args())?;
        self.steps += 1;
        Ok(Parts {
            ops: &mut self.ops,
            weights: &self.weights,
            activations: &mut self.activations,
            kv: &mut self.kv,
        })
    }

    /// Fills the KV cache with one byte.
    pub fn fill_kv(&mut self, byte: u8) -> Result<()> {
        self.ops.fill_kv(&mut self.kv, byte)
    }

    /// Each wanted row's largest logit in the step begun last, all of which has been queued.
    pub fn found(&self, plan: &StepPlan) -> Result<Vec<Greedy>> {
        self.context.stream.synchronize()?;
        Ok(self.greedy_of((self.steps + 1) % DEPTH, plan.logits.len()).collect())
    }
}
