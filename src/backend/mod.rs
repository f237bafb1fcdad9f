//! Where the operations run.

pub mod cpu;

use crate::checkpoint::Checkpoint;
use crate::error::Result;
use crate::options::Options;
use crate::replica::Replica;

/// Opens a replica of the model on the best device there is.
pub fn open(checkpoint: &dyn Checkpoint, options: &Options) -> Result<Box<dyn Replica>> {
    cpu::open(checkpoint, options)
}
