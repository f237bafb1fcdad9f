//! One copy of the model on one device group: its weights, its KV cache and the memory of one step.

use crate::batch::StepPlan;
use crate::checkpoint::{Field, TensorId};
use crate::error::{Error, Result};
use crate::model::ModelConfig;
use crate::profile::Profile;
use crate::scheduler::ring_blocks;
use crate::weights::NonFinite;
use std::any::Any;
use std::ops::Deref;
use std::sync::Arc;

/// What of each wanted row the host needs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Want {
    /// The largest logit and its lowest index.
    Greedy,
    /// The same, and tokens drawn by the plan's coins, if the replica [draws](Replica::draws); else whole rows.
    Draws {
        /// Above 0, and finite.
        temperature: f32,
        /// The mass of the nucleus; outside of (0, 1) all tokens are drawn from.
        topp: f32,
    },
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
    /// The token drawn from each row; `None` where that is left to the host. Empty if [`Want::Draws`] was not asked for,
    /// or made whole rows.
    pub drawn: Vec<Option<u32>>,
    /// `[rows, vocab]`, or empty if only [`Want::Greedy`] was asked for, or tokens are drawn.
    pub logits: Logits,
}

/// Whole rows of logits, read where the replica left them: hundreds of megabytes a step are not copied once more.
#[derive(Clone)]
pub enum Logits {
    /// In memory of their own.
    Own(Vec<f32>),
    /// In memory of the replica, which does not write to it before the last clone of this is gone.
    Lent(Arc<dyn AsRef<[f32]> + Send + Sync>),
}

impl Logits {
    /// Gives back what was lent. Values in memory of their own stay.
    pub fn give_back(&mut self) {
        if let Self::Lent(_) = self {
            *self = Self::default();
        }
    }

    /// Memory to write to; what was lent is given back.
    pub fn own(&mut self) -> &mut Vec<f32> {
        self.give_back();
        match self {
            Self::Own(values) => values,
            Self::Lent(_) => unreachable!("given back above"),
        }
    }

    /// No values; what was lent is given back.
    pub fn clear(&mut self) {
        self.own().clear();
    }
}

impl Default for Logits {
    fn default() -> Self {
        Self::Own(Vec::new())
    }
}

impl Deref for Logits {
    type Target = [f32];

    fn deref(&self) -> &[f32] {
        match self {
            Self::Own(values) => values,
            Self::Lent(values) => (**values).as_ref(),
        }
    }
}

impl std::fmt::Debug for Logits {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let whose = if matches!(self, Self::Own(_)) { "own" } else { "lent" };
        write!(f, "{} {whose} values", self.len())
    }
}

/// Blocks of the KV cache. A block of the first kind holds its positions for all full layers, one of the second kind
/// for all windowed layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvBlocks {
    /// Positions in a block.
    pub tokens: usize,
    /// Blocks for the full layers.
    pub full: usize,
    /// Blocks for the windowed layers.
    pub window: usize,
}

impl KvBlocks {
    /// As many as `bytes` hold, of `[full, window]` bytes each: for at most `sequences` sequences of `seq_len` positions of
    /// which at most `chunk_tokens` are in one step, at least for one, and then for one of `longest` positions, as far as
    /// there is room.
    pub fn within(
        config: &ModelConfig,
        tokens: usize,
        chunk_tokens: usize,
        block_bytes: [usize; 2],
        bytes: usize,
        sequences: usize,
        longest: usize,
    ) -> Self {
        let [full_bytes, window_bytes] = block_bytes;
        let one = Self::of_sequence(config, tokens, chunk_tokens, config.seq_len);
        let window_part = one.window.saturating_mul(window_bytes);
        let one_bytes = one.full.saturating_mul(full_bytes).saturating_add(window_part);
        let sequences = (bytes / one_bytes.max(1)).clamp(1, sequences);
        let longest = Self::of_sequence(config, tokens, chunk_tokens, longest);
        let mut left = bytes.saturating_sub(sequences.saturating_mul(one_bytes));
        let mut grown = |blocks: usize, wanted: usize, block_bytes: usize| {
            let more = wanted.saturating_sub(blocks).min(left / block_bytes.max(1));
            left -= more * block_bytes;
            blocks + more
        };
        Self {
            tokens,
            window: grown(sequences * one.window, longest.window, window_bytes),
            full: grown(sequences * one.full, longest.full, full_bytes),
        }
    }

    /// What one sequence of so many positions takes.
    fn of_sequence(config: &ModelConfig, tokens: usize, chunk_tokens: usize, positions: usize) -> Self {
        let has_full_layers = config.windowed_layers() < config.n_layers;
        Self {
            tokens,
            full: if has_full_layers { positions.div_ceil(tokens) } else { 0 },
            window: match config.sliding_window {
                0 => 0,
                window => ring_blocks(tokens, window, chunk_tokens, positions, positions),
            },
        }
    }
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
    /// A line for each tensor with values that are infinite or not a number: which, how many, where the first one is.
    pub non_finite: Vec<String>,
    /// Bytes of the checkpoint read.
    pub read_bytes: u64,
    /// Seconds the packing took, and the sending.
    pub seconds: f64,
    /// How the weights came to their device; `None` if they are where they were packed.
    pub sent: Option<Sent>,
}

/// How fast packed weights came to the devices. Packing and sending go on side by side.
#[derive(Clone, Copy, Debug)]
pub struct Sent {
    /// Bytes sent to each device.
    pub bytes: u64,
    /// Seconds the bus was busy with them.
    pub link_seconds: f64,
    /// Seconds the host was busy packing them.
    pub pack_seconds: f64,
}

impl PackReport {
    /// Adds a tensor to its kind's line; the first remark of a kind stands for all.
    pub fn note(&mut self, name: &'static str, format: &str, bytes: usize, remark: Option<String>) {
        let kinds = &mut self.kinds;
        let at = kinds.iter().position(|k| k.name == name).unwrap_or_else(|| {
            kinds.push(PackedKind {
                name,
                format: format.to_owned(),
                bytes: 0,
                remark: None,
            });
            kinds.len() - 1
        });
        let kind = &mut kinds[at];
        kind.bytes += bytes as u64;
        if !kind.format.split('+').any(|f| f == format) {
            kind.format = format!("{}+{format}", kind.format);
        }
        if kind.remark.is_none() {
            kind.remark = remark;
        }
    }

    /// Adds a line for values of the matrices `ids` that are not finite.
    pub fn note_non_finite(&mut self, ids: &[TensorId], found: NonFinite) {
        let Some(id) = ids.get(found.matrix) else { return };
        let (field, layer, expert) = id.place();
        let tensor = match field {
            Field::TokenEmbeddingTable | Field::Out | Field::RmsOutW => field.name().to_owned(),
            _ => format!("{} of layer {layer}", field.name()),
        };
        let expert = match ids.len() {
            1 => String::new(),
            _ => format!(" of expert {expert}"),
        };
        let (count, value) = (found.count, found.value);
        self.non_finite.push(format!(
            "{tensor}: {count} of its values not finite, the first {value:e} at row {}, column {}{expert}",
            found.row, found.col
        ));
    }
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

#[cfg(test)]
mod tests {
    use super::*;

    /// Blocks of 16 positions and 10 bytes either way; with chunks of 32 rows a ring of the window takes 10 of them.
    fn within(seq_len: usize, bytes: usize, sequences: usize, longest: usize) -> [usize; 2] {
        let config = ModelConfig {
            seq_len,
            ..ModelConfig::preset_7m()
        };
        let blocks = KvBlocks::within(&config, 16, 32, [10, 10], bytes, sequences, longest);
        [blocks.full, blocks.window]
    }

    #[test]
    fn the_cache_holds_a_batch_and_one_long_sequence() {
        let ring = within(4096, 0, 1, 4096)[1];
        let one = 256 + ring;
        // As many as there is memory for, but at least one, and no more than may run at once.
        assert_eq!(within(4096, 0, 8, 131_072), [256, ring]);
        assert_eq!(within(4096, 10 * 3 * one, 8, 4096), [3 * 256, 3 * ring]);
        assert_eq!(within(4096, usize::MAX / 2, 8, 4096), [8 * 256, 8 * ring]);
        // A batch of one does not keep a long sequence out, as far as memory goes.
        assert_eq!(within(4096, usize::MAX / 2, 1, 131_072), [8192, ring]);
        assert_eq!(within(4096, 10 * (one + 1000), 1, 131_072), [1256, ring]);
        // What holds a large batch holds it too.
        assert_eq!(within(4096, usize::MAX / 2, 128, 131_072), [128 * 256, 128 * ring]);
        // A long sequence needs a longer ring than one shorter than the window.
        assert_eq!(within(16, usize::MAX / 2, 1, 131_072), [8192, ring]);
    }
}
