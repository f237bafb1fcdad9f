//! One copy of the model on one device group: its weights, its KV cache and the memory of one step.

use crate::batch::StepPlan;
use crate::error::Result;
use crate::profile::Profile;

/// What of each wanted row the host needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Want {
    /// The largest logit and its lowest index.
    Greedy,
    /// The largest logit, its lowest index, and the whole row.
    Logits,
}

/// A row's largest logit.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Greedy {
    /// The lowest index among the largest logits; 0 if all are NaN.
    pub token: u32,
    /// Its logit.
    pub logit: f32,
}

/// What one step gave, in the order of the plan's logits rows.
#[derive(Clone, Debug, Default)]
pub struct StepOutput {
    /// One a row.
    pub greedy: Vec<Greedy>,
    /// `[rows, vocab]`, or empty if only [`Want::Greedy`] was asked for.
    pub logits: Vec<f32>,
}

/// Blocks of the KV cache (see [`crate::batch::BLOCK_TOKENS`]). A block of the first kind holds its positions
/// for all full layers, one of the second kind for all windowed layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvBlocks {
    /// Blocks for the full layers.
    pub full: usize,
    /// Blocks for the windowed layers.
    pub window: usize,
}

/// What the tensors of one kind became.
#[derive(Clone, Debug)]
pub struct PackedKind {
    /// The kind as the C struct names it, for example `w_mlp1`.
    pub name: &'static str,
    /// The format of its values, for example `MXFP4`; several joined by `+` if its layers differ.
    pub format: String,
    /// Bytes in the replica's memory.
    pub bytes: u64,
    /// Why it is not in the format expected of its kind; `None` if it is.
    pub remark: Option<String>,
}

/// What warming up made.
#[derive(Clone, Debug, Default)]
pub struct PackReport {
    /// By kind, in the order of the `.bin` file.
    pub kinds: Vec<PackedKind>,
    /// Bytes of the checkpoint read.
    pub read_bytes: u64,
    /// Seconds the packing took.
    pub seconds: f64,
}

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
pub trait Replica: Send {
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
    /// The most logits rows a step may have.
    fn max_logits_rows(&self) -> usize;
    /// Runs one step.
    fn step(&mut self, plan: &StepPlan, want: Want, output: &mut StepOutput) -> Result<()>;
    /// Times of all steps so far, if profiling was asked for.
    fn profile(&self) -> Option<&Profile>;
    /// What the program's struct shall hold.
    fn pointers(&self) -> Pointers;
}
