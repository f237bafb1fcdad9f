//! The backends: the CPU and GPUs.

pub mod cpu;
pub mod gpu;

use crate::checkpoint::Checkpoint;
use crate::error::Result;
use crate::options::{DeviceChoice, Options};
use crate::replica::Replica;
use crate::report;
use gpu::discover::{self, Usable};

/// Opens a replica of the model on each GPU that can be used, or on the CPU if there is none.
pub fn open(checkpoint: &dyn Checkpoint, options: &Options) -> Result<Vec<Box<dyn Replica>>> {
    let usable = discover::usable(options, Some(checkpoint.config()))?;
    open_on(usable, checkpoint, options)
}

/// Opens a replica on each of these devices, or on the CPU if there is none or, with `auto`, if opening them fails.
pub fn open_on(usable: Usable, checkpoint: &dyn Checkpoint, options: &Options) -> Result<Vec<Box<dyn Replica>>> {
    usable.lines.iter().for_each(report::warning);
    if !usable.drivers.is_empty() {
        match gpu::open::open(usable.drivers, checkpoint, options) {
            Err(error) if options.device == DeviceChoice::Auto && options.group.is_none() => {
                report::warning(format_args!("running on the CPU: {error}"));
            }
            opened => return opened,
        }
    }
    Ok(vec![cpu::open(checkpoint, options)?])
}
