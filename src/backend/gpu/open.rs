//! Opens a replica on each device that has enough memory.

use super::args::Format;
use super::code_objects;
use super::context::Context;
use super::memory::SharedDriver;
use super::replica::GpuReplica;
use super::weights::{GpuWeights, WeightSource, load};
use crate::error::{Error, GpuFault, Result};
use crate::options::Options;
use crate::replica::Replica;
use crate::report;
use crate::weights::{PackReport, least_bytes};
use std::sync::Arc;

/// Opens a replica on each device. A device that fails is left out with a line; if all fail, the last error is
/// returned.
pub fn open(drivers: Vec<SharedDriver>, source: &WeightSource<'_>, options: &Options) -> Result<Vec<Box<dyn Replica>>> {
    let mut left_out = LeftOut::default();
    let mut contexts: Vec<_> = drivers
        .into_iter()
        .filter_map(|driver| left_out.or_some(context_for(driver, source)))
        .collect();
    let loaded = loop {
        if contexts.is_empty() {
            return Err(left_out.last());
        }
        let all: Vec<_> = contexts.iter().map(Arc::as_ref).collect();
        match load(&all, source) {
            Ok(loaded) => break loaded,
            // Loading starts again on the other devices; the failed one's memory has been freed.
            Err(error) => {
                let Some(failed) = contexts.iter().position(|context| error.is_of(&context.name())) else {
                    return Err(error);
                };
                contexts.remove(failed);
                left_out.note(error);
            }
        }
    };
    let replicas: Vec<_> = contexts
        .into_iter()
        .zip(loaded.weights)
        .filter_map(|(context, weights)| {
            left_out.or_some(replica(
                context,
                source,
                options,
                weights,
                loaded.format,
                loaded.report.clone(),
            ))
        })
        .collect();
    if replicas.is_empty() {
        return Err(left_out.last());
    }
    Ok(replicas)
}

/// A device with its kernels loaded and enough free memory for the weights: checked before packing begins.
fn context_for(driver: SharedDriver, source: &WeightSource<'_>) -> Result<Arc<Context>> {
    let context = context(driver)?;
    let (needed, memory) = (least_bytes(source.config()), context.driver.memory()?);
    if memory.free >= needed {
        return Ok(context);
    }
    Err(Error::Gpu {
        device: context.name(),
        call: format!("{} of {needed} bytes are free that the weights take", memory.free),
        fault: GpuFault::OutOfMemory,
        code: None,
    })
}

/// A device with its kernels loaded.
pub fn context(driver: SharedDriver) -> Result<Arc<Context>> {
    let images = code_objects::for_arch(&driver.device().arch);
    Context::open(driver, &images).map(Arc::new)
}

fn replica(
    context: Arc<Context>,
    source: &WeightSource<'_>,
    options: &Options,
    weights: GpuWeights,
    format: Format,
    report: PackReport,
) -> Result<Box<dyn Replica>> {
    let replica = GpuReplica::new(context, source.config(), options, weights, format, report)?;
    Ok(Box::new(replica))
}

/// Devices that failed.
#[derive(Default)]
struct LeftOut {
    last: Option<Error>,
}

impl LeftOut {
    fn note(&mut self, why: Error) {
        report::line(format_args!("{why}; it is left out"));
        self.last = Some(why);
    }

    fn or_some<T>(&mut self, result: Result<T>) -> Option<T> {
        result.map_err(|why| self.note(why)).ok()
    }

    fn last(self) -> Error {
        self.last.unwrap_or_else(|| Error::Gpu {
            device: "gpu".into(),
            call: "opening a device".into(),
            fault: GpuFault::NoDevice,
            code: None,
        })
    }
}
