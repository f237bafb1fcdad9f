//! A replica: one copy of the model on a device, with its weights, its KV cache and the activations of a step.

use crate::batch::{StepOutput, StepPlan, Want};
use crate::error::{Error, Result};
use crate::kv_blocks::KvBlocks;
use crate::profile::Profile;
use crate::weights::PackReport;
use std::any::Any;

/// The addresses that the program's struct holds between `warm_up` and `finish`, in the order of its fields. NULL for
/// fields that the replica has no buffer for.
#[derive(Clone, Copy, Debug)]
pub struct Pointers {
    /// The fields of `TransformerWeights`.
    pub weights: [*mut std::ffi::c_void; 16],
    /// The fields of `RunState`.
    pub state: [*mut std::ffi::c_void; 21],
}

/// What is said of a stage: one of the devices of a replica that has several.
pub struct StageReport<'a> {
    /// The device, its part of the model and its memory, for the line that `warm_up` prints.
    pub name: String,
    /// The times of all steps so far, if profiling is on.
    pub profile: Option<&'a Profile>,
}

impl Pointers {
    /// For an engine that has no replica: all addresses are this one.
    pub fn all_at(address: *const ()) -> Self {
        let address = address.cast_mut().cast();
        Self {
            weights: [address; 16],
            state: [address; 21],
        }
    }
}

/// One copy of the model, ready to compute steps.
///
/// Steps are queued by [`Replica::submit`] and run in that order; [`Replica::collect`] waits for the oldest one. After
/// a failure of either the replica must be dropped.
pub trait Replica: Send + Any {
    /// The device and the precision, for the line that `warm_up` prints: for example
    /// `CPU, AVX-512 BF16, 2 threads, exact`.
    fn describe(&self) -> String;
    /// The formats and sizes of the packed weights.
    fn pack_report(&self) -> &PackReport;
    /// The number and size of the KV cache's blocks.
    fn kv_blocks(&self) -> KvBlocks;
    /// Size of the KV cache in bytes.
    fn kv_bytes(&self) -> u64;
    /// The most rows of a step.
    fn max_step_tokens(&self) -> usize;
    /// The most rows of one sequence in a step.
    fn chunk_tokens(&self) -> usize;
    /// The most rows of a step whose logits are computed.
    fn max_logits_rows(&self) -> usize;
    /// The most positions of a sequence.
    fn max_positions(&self) -> usize {
        u32::MAX as usize
    }
    /// The most steps in flight, at least 1. With 1, plans never refer to tokens that only the device has. With more
    /// than 2, all but one of them compute at the same time, each with sequences of its own.
    fn depth(&self) -> usize;
    /// Whether it samples tokens itself, and keeps them for plans that refer to them. If it leaves a row to the host,
    /// the token that it keeps is arbitrary.
    fn draws(&self) -> bool;
    /// Whether it finds [what log-probabilities take](crate::batch::FoundScore) itself. If not, steps with rows that
    /// are scored are asked for all logits.
    fn scores(&self) -> bool;
    /// Whether a token that is decoded has the same keys and values, to the bit, as in a prompt: not where attention
    /// has a kernel for each.
    fn decodes_as_prompts(&self) -> bool;
    /// Queues a step. The plan may be changed as soon as this returns.
    fn submit(&mut self, plan: &StepPlan, want: Want) -> Result<()>;
    /// Waits for the oldest step in flight and stores its output. `output` may come back with other vectors. Lent
    /// logits should be given back before the next step is submitted, or the replica allocates more memory.
    fn collect(&mut self, output: &mut StepOutput) -> Result<()>;
    /// Copies whole rows of the step collected last to the host, for rows whose sampling or scoring is left to it:
    /// `output.logits` become `[rows, vocab]`. To be called before another step is submitted.
    fn fetch(&mut self, _rows: &[usize], _output: &mut StepOutput) -> Result<()> {
        Err(Error::Internal(
            "a replica that neither draws nor scores has no more to give".into(),
        ))
    }
    /// The times of all steps so far, if profiling is on; `None` if [`Replica::stages`] have them.
    fn profile(&self) -> Option<&Profile>;
    /// Its devices, if they are several.
    fn stages(&self) -> Vec<StageReport<'_>> {
        Vec::new()
    }
    /// The addresses of its buffers, for the program's struct.
    fn pointers(&self) -> Pointers;
}
