//! One copy of the model on one device group: its weights, its KV cache and the memory of one step.

use crate::batch::{StepOutput, StepPlan, Want};
use crate::error::{Error, Result};
use crate::kv_blocks::KvBlocks;
use crate::profile::Profile;
use crate::weights::PackReport;
use std::any::Any;

/// Addresses the program's struct holds while it is warmed up, in the order of the struct's fields. NULL where
/// the replica has nothing of that kind.
#[derive(Clone, Copy, Debug)]
pub struct Pointers {
    /// The fields of `TransformerWeights`.
    pub weights: [*mut std::ffi::c_void; 16],
    /// The fields of `RunState`.
    pub state: [*mut std::ffi::c_void; 21],
}

/// One copy of the model, ready to step.
///
/// Steps are queued by [`Replica::submit`] and run in that order; [`Replica::collect`] waits for the oldest one. After
/// a failure of either the replica is only dropped.
pub trait Replica: Send + Any {
    /// Where it runs and how, for the summary line: for example `CPU, AVX-512 BF16, 2 threads, exact`.
    fn describe(&self) -> String;
    /// What its weights became.
    fn pack_report(&self) -> &PackReport;
    /// Blocks in its KV cache.
    fn kv_blocks(&self) -> KvBlocks;
    /// Bytes of its KV cache.
    fn kv_bytes(&self) -> u64;
    /// The most rows a step may have.
    fn max_step_tokens(&self) -> usize;
    /// The most rows of one sequence in a step.
    fn chunk_tokens(&self) -> usize;
    /// The most logits rows a step may have.
    fn max_logits_rows(&self) -> usize;
    /// The most positions a sequence may have.
    fn max_positions(&self) -> usize {
        u32::MAX as usize
    }
    /// Steps that may be under way at once, at least 1. With 1 no plan refers to tokens the device still has. With more
    /// than 2 all but one of them are computed at once, and have sequences of their own.
    fn depth(&self) -> usize;
    /// Whether it draws tokens itself, and keeps them for plans that refer to them. Where it leaves one to the host it
    /// keeps any other.
    fn draws(&self) -> bool {
        false
    }
    /// Queues a step; the plan may be changed as soon as this returns.
    fn submit(&mut self, plan: &StepPlan, want: Want) -> Result<()>;
    /// Waits for the oldest step under way and hands over what it gave. `output` may come back with other memory; logits
    /// that are lent are to be given back before the next step is submitted, or it needs memory of its own.
    fn collect(&mut self, output: &mut StepOutput) -> Result<()>;
    /// Brings whole rows of the step collected last, whose tokens are left to the host: `output.logits` become
    /// `[rows, vocab]`. No step was submitted since.
    fn fetch(&mut self, _rows: &[usize], _output: &mut StepOutput) -> Result<()> {
        Err(Error::Internal(
            "a replica that does not draw has no more to give".into(),
        ))
    }
    /// Times of all steps so far, if profiling was asked for.
    fn profile(&self) -> Option<&Profile>;
    /// What the program's struct shall hold.
    fn pointers(&self) -> Pointers;
}
