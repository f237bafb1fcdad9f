//! What the user can choose, from the environment or from a C struct.

use crate::error::{Error, Result};
use std::path::PathBuf;

/// How numbers are computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Precision {
    /// The program's own answers: float64 sums in its order.
    Exact,
    /// What the hardware does best within the gates of ARCHITECTURE.md.
    Fast,
}

/// The choices, complete.
#[derive(Clone, Debug)]
pub struct Options {
    /// `GETP_PRECISION=exact|fast`; `None` lets the backend choose.
    pub precision: Option<Precision>,
    /// `GETP_THREADS=N`: worker threads of the CPU backend; 0 is one a core.
    pub threads: usize,
    /// `GETP_MAX_BATCH=N`: the most sequences in one step.
    pub max_batch: usize,
    /// `GETP_STEP_TOKENS=N`: the most tokens in one step.
    pub step_tokens: usize,
    /// `GETP_KV_MB=N`: the most memory for the KV cache in MiB; 0 sizes it from free memory.
    pub kv_mb: usize,
    /// `GETP_PRINT=0|1`: print each request's decoded text on stdout.
    pub print: bool,
    /// `GETP_PROGRESS=0|1`: a progress bar on stderr, if that is a terminal.
    pub progress: bool,
    /// `GETP_PROFILE=0|1`: time each stage and print a table at the end.
    pub profile: bool,
    /// `GETP_LOGITS=FILE`: write the logits of every position fed to FILE.
    pub logits: Option<PathBuf>,
}
