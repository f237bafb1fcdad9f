//! One replica on devices that the caller chooses: for tests, benches and tools.

use super::replica;
use crate::backend::gpu::context::Context;
use crate::backend::gpu::replica::GpuReplica;
use crate::backend::gpu::stage::is_exact;
use crate::backend::gpu::weights::{Share, load};
use crate::checkpoint::Checkpoint;
use crate::error::Result;
use crate::options::Options;
use std::sync::Arc;

/// Opens one replica whose stages end before these layers, each on a device of its own.
pub fn open_cut(
    contexts: Vec<Arc<Context>>,
    ends: &[usize],
    checkpoint: &dyn Checkpoint,
    options: &Options,
) -> Result<GpuReplica> {
    let begins = [0].into_iter().chain(ends.iter().copied());
    let shares = contexts
        .iter()
        .zip(begins.zip(ends))
        .map(|(context, (begin, &end))| Share {
            context,
            layers: begin..end,
        });
    let loaded = load(
        &shares.collect::<Vec<_>>(),
        checkpoint,
        is_exact(options),
        options.threads,
    )?;
    let stages = contexts.into_iter().zip(loaded.weights).collect();
    replica(stages, checkpoint.config(), options, loaded.elements, loaded.report)
}
