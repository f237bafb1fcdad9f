//! A step whose operations the caller queues one by one: for tests and tools.

use super::{Activations, Buffer, DEPTH, GpuOps, GpuReplica, KvCache, Numbers, Routes};
use crate::backend::gpu::weights::GpuWeights;
use crate::batch::StepPlan;
use crate::error::Result;
use crate::replica::{Greedy, Want};

/// What the operations of a step take.
pub struct Parts<'a> {
    /// The operations.
    pub ops: &'a mut GpuOps,
    /// The weights.
    pub weights: &'a GpuWeights,
    /// The activations.
    pub activations: &'a mut Activations<Buffer, Routes>,
    /// The KV cache.
    pub kv: &'a mut KvCache,
}

impl GpuReplica {
    /// How it computes.
    pub fn numbers(&self) -> Numbers {
        self.numbers
    }

    /// Brings a plan to the device, once all that was queued before is done.
    pub fn begin(&mut self, plan: &StepPlan, want: Want) -> Result<Parts<'_>> {
        self.context.stream.synchronize()?;
        let parity = self.steps % DEPTH;
        if self.whole_rows(want) {
            self.need_logits(plan.logits.len())?;
        }
        let header = self.memory.write(plan, parity, want)?;
        let shape = self.shape(plan, &header, want);
        let logits = self.logits.as_ref().map(|path| path.at(parity)).unwrap_or_default();
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
