//! A step whose operations the caller queues one by one, and what experts got: for tests, benches and tools.

use super::GpuReplica;
use crate::backend::gpu::kv::KvCache;
use crate::backend::gpu::ops::{Buffer, GpuOps, ResidualMemory};
use crate::backend::gpu::shapes::Numbers;
use crate::backend::gpu::weights::GpuWeights;
use crate::batch::StepPlan;
use crate::batch::{Greedy, Want};
use crate::error::Result;
use crate::model::Activations;
use crate::replica::Replica;
use std::any::Any;

/// What the operations of a step take.
pub struct Operands<'a> {
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

    /// Rows of each expert in the last layer. No step is under way.
    pub fn expert_rows(&self) -> Result<Vec<u32>> {
        let last = self.last();
        last.activations.x.routes.rows_by_expert(&last.context.stream)
    }

    /// From now on layers of few decoding rows are one launch, however fast that is, where the device has such launches
    /// for the model.
    pub fn insist_on_one_launch(&mut self) -> Result<()> {
        let Self { stages, common, .. } = self;
        stages
            .iter_mut()
            .try_for_each(|stage| stage.insist_on_one_launch(common))
    }

    /// Steps whose layers were one launch on the first stage; none if it has no such launches.
    pub fn steps_in_one_launch(&self) -> Option<usize> {
        self.first().steps_in_one_launch()
    }

    /// How it computes.
    pub fn numbers(&self) -> Numbers {
        self.common.numbers
    }

    /// Brings a plan to the only device, once all that was queued before is done.
    pub fn begin(&mut self, plan: &StepPlan, want: Want) -> Result<Operands<'_>> {
        self.first().context.stream.synchronize()?;
        let turn = self.steps % self.common.depth;
        if self.last().whole_rows(plan, want) {
            self.need_logits()?;
        }
        let written = self.plans.write(plan, turn)?;
        let logits = self.logits.as_ref().map(|path| path.at(turn)).unwrap_or_default();
        let stage = &mut self.stages[0];
        let shape = stage.shape(plan, &written, want);
        stage.begin(plan, shape, logits)?;
        self.steps += 1;
        Ok(Operands {
            ops: &mut stage.ops,
            weights: &stage.weights,
            activations: &mut stage.activations,
            kv: &mut stage.kv,
        })
    }

    /// Fills the KV cache with one byte.
    pub fn fill_kv(&mut self, byte: u8) -> Result<()> {
        let mut stages = self.stages.iter_mut();
        stages.try_for_each(|stage| stage.ops.fill_kv(&mut stage.kv, byte))
    }

    /// Each wanted row's largest logit in the step begun last, all of which has been queued.
    pub fn found(&self, plan: &StepPlan) -> Result<Vec<Greedy>> {
        self.last().context.stream.synchronize()?;
        let turn = (self.steps + self.common.depth - 1) % self.common.depth;
        Ok(self.greedy_of(turn, plan.logits.len()).collect())
    }
}
