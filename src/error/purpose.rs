//! What allocations are for, to name in an error the option that lowers them.

use std::fmt;

/// What an allocation is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// The packed weights.
    Weights,
    /// Tables of the checkpoint's tensors, and temporary memory for packing them.
    Checkpoint,
    /// The KV cache.
    KvCache,
    /// Activations, plans and outputs of steps.
    Step,
    /// Sampling.
    Draws,
    /// Sequences and their blocks.
    Schedule,
    /// Prompts and answers.
    Requests,
    /// The tokenizer's entries.
    Vocabulary,
    /// Worker threads.
    Threads,
    /// Logits that are recorded.
    Logits,
    /// Texts that are printed.
    Print,
}

impl Purpose {
    /// What the user can do to need less memory.
    pub fn remedy(self) -> &'static str {
        self.words().1
    }

    fn words(self) -> (&'static str, &'static str) {
        match self {
            Self::Weights => ("packed weights", "run on a machine with more of it"),
            Self::Checkpoint => ("reading the checkpoint", "lower GETP_THREADS"),
            Self::KvCache => ("the KV cache", "lower GETP_KV_MB or GETP_MAX_BATCH"),
            Self::Step => ("a step", "lower GETP_STEP_TOKENS or GETP_MAX_BATCH"),
            Self::Draws => ("drawing tokens", "lower GETP_THREADS or GETP_MAX_BATCH"),
            Self::Schedule => ("scheduling sequences", "lower GETP_MAX_BATCH or GETP_KV_MB"),
            Self::Requests => ("requests and answers", "pass fewer requests, or fewer steps, at a time"),
            Self::Vocabulary => ("the vocabulary", "check that the tokenizer is the model's"),
            Self::Threads => ("worker threads", "lower GETP_THREADS"),
            Self::Logits => ("recording logits", "unset GETP_LOGITS"),
            Self::Print => ("printing answers", "set GETP_PRINT=0"),
        }
    }
}

impl fmt::Display for Purpose {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.words().0)
    }
}
