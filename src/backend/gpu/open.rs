//! Opens a replica on each device or group of devices that has enough memory.

pub mod inspect;

use super::catalogue::Elements;
use super::code_objects;
use super::context::Context;
use super::driver::DeviceMemory;
use super::driver::limited::limited;
use super::family::Family;
use super::group::demand::Demand;
use super::group::form::{Devices, Group, Grouping, form};
use super::group::steps::with_length;
use super::memory::SharedDriver;
use super::replica::GpuReplica;
use super::stage::{Common, is_exact};
use super::target::Target;
use super::weights::{GpuWeights, Share, load};
use crate::checkpoint::Checkpoint;
use crate::config::ModelConfig;
use crate::error::{Error, GpuFault, Result};
use crate::options::{Options, StepLimits};
use crate::replica::Replica;
use crate::report;
use crate::weights::PackReport;
use std::cell::RefCell;
use std::ops::Range;
use std::sync::Arc;

/// Sequences that a group should have room for, if it is not asked for another size: fewer, and its products wait for
/// weights more than they compute.
const USEFUL_SEQUENCES: usize = 256;

/// Opens a replica on each device, or on groups of them. A device that fails is left out with a line, and its group if
/// that had its weights; only if all do is it an error, that of the last.
pub fn open(
    drivers: Vec<SharedDriver>,
    checkpoint: &dyn Checkpoint,
    options: &Options,
) -> Result<Vec<Box<dyn Replica>>> {
    let mut left_out = LeftOut::default();
    let contexts = drivers.into_iter().map(|driver| match options.device_mb {
        0 => driver,
        mb => limited(driver, (mb as u64) << 20, options.names.device_mb),
    });
    let mut contexts: Vec<_> = contexts
        .filter_map(|driver| left_out.or_some(context(driver)))
        .collect();
    loop {
        if contexts.is_empty() {
            return Err(left_out.last());
        }
        let opened = groups(&contexts, checkpoint, options).and_then(|grouping| {
            let opened = open_groups(&contexts, &grouping.groups, checkpoint, options, &mut left_out)?;
            grouping.lines.iter().for_each(report::warning);
            Ok(opened)
        });
        match opened {
            Ok(replicas) if replicas.is_empty() => return Err(left_out.last()),
            Ok(replicas) => return Ok(replicas),
            // Opening starts again on the other devices; the failed one's memory has been freed.
            Err(error) => {
                let Some(failed) = contexts.iter().position(|context| error.is_of(&context.name())) else {
                    return Err(error);
                };
                contexts.remove(failed);
                left_out.note(error);
            }
        }
    }
}

/// Opens replicas on these groups of devices, by their place among `contexts`. Fails as long as no group has its
/// weights.
fn open_groups(
    contexts: &[Arc<Context>],
    groups: &[Group],
    checkpoint: &dyn Checkpoint,
    options: &Options,
    left_out: &mut LeftOut,
) -> Result<Vec<Box<dyn Replica>>> {
    let members = |group: &Group| -> Vec<(usize, Range<usize>)> {
        group
            .devices
            .iter()
            .copied()
            .zip(group.layers.iter().cloned())
            .collect()
    };
    let shares: Vec<_> = groups
        .iter()
        .flat_map(members)
        .map(|(device, layers)| Share {
            context: &contexts[device],
            layers,
        })
        .collect();
    let loaded = load(&shares, checkpoint, is_exact(options), options.threads)?;
    let mut weights = loaded.weights.into_iter();
    let mut replicas: Vec<Box<dyn Replica>> = Vec::with_capacity(groups.len());
    for group in groups {
        let stages = group.devices.iter().map(|&device| contexts[device].clone());
        let stages = stages.zip(weights.by_ref()).collect();
        let report = loaded.report.clone();
        let replica = replica(stages, checkpoint.config(), options, loaded.elements, report);
        if let Some(replica) = left_out.or_some(replica) {
            replicas.push(Box::new(replica));
        }
    }
    Ok(replicas)
}

/// A replica on these devices; alone, one may have long steps.
fn replica(
    stages: Vec<(Arc<Context>, GpuWeights)>,
    config: &ModelConfig,
    options: &Options,
    elements: Elements,
    report: PackReport,
) -> Result<GpuReplica> {
    let options = match &stages[..] {
        [(context, _)] => with_length(
            options,
            config,
            &context.target,
            elements,
            context.driver.memory()?.free,
        ),
        _ => options.clone(),
    };
    GpuReplica::new(stages, config, &options, elements, report)
}

/// Which devices make replicas, and which layers each has.
fn groups(contexts: &[Arc<Context>], checkpoint: &dyn Checkpoint, options: &Options) -> Result<Grouping> {
    const GIB: f64 = (1u64 << 30) as f64;
    let memory: Vec<DeviceMemory> = contexts
        .iter()
        .map(|context| context.driver.memory())
        .collect::<Result<_>>()?;
    let with_free = |(context, memory): (&Arc<Context>, &DeviceMemory)| {
        format!("{} ({:.1} GiB free)", context.name(), memory.free as f64 / GIB)
    };
    let names: Vec<_> = contexts.iter().zip(&memory).map(with_free).collect();
    let kinds = contexts.iter().map(|context| {
        let device = context.driver.device();
        format!("{} {} {}", device.runtime, device.arch, device.multiprocessors)
    });
    // The first failure is told when the groups are formed: a link that nobody knows the length of is none.
    let failed = RefCell::new(None);
    let distance = |a: usize, b: usize| {
        let link = contexts[a].driver.link(&*contexts[b].driver);
        link.map(|link| link.distance).unwrap_or_else(|error| {
            failed.borrow_mut().get_or_insert(error);
            u32::MAX
        })
    };
    let devices = Devices {
        names: &names,
        kinds: &kinds.collect::<Vec<_>>(),
        asked_by: options.names.group,
        distance: &distance,
    };
    let fit = |devices: &[usize], sequences: usize| fit(contexts, &memory, devices, sequences, checkpoint, options);
    let sequences = USEFUL_SEQUENCES.min(options.step_limits(StepLimits::GPU).max_batch);
    let grouping = form(&devices, options.group, sequences, &fit);
    match failed.into_inner() {
        Some(error) => Err(error),
        None => grouping,
    }
}

/// The layers of each of these devices, if they have room.
fn fit(
    contexts: &[Arc<Context>],
    memory: &[DeviceMemory],
    devices: &[usize],
    sequences: usize,
    checkpoint: &dyn Checkpoint,
    options: &Options,
) -> Option<Vec<Range<usize>>> {
    // Before the weights are there, nobody knows that FP16 does not fit.
    let common = Common::new(checkpoint.config(), options, Elements::F16, devices.len());
    let demand = Demand {
        common: &common,
        target: &contexts[*devices.first()?].target,
    };
    let memory: Vec<_> = devices.iter().map(|&device| memory[device]).collect();
    demand.cut(&memory, sequences, options)
}

/// A device with its kernels loaded.
pub fn context(driver: SharedDriver) -> Result<Arc<Context>> {
    let target = Target::of(driver.device())?;
    context_as(driver, target.family)
}

/// A device with the kernels of this family, which may be another than its own: for tests and tools.
pub fn context_as(driver: SharedDriver, family: &'static dyn Family) -> Result<Arc<Context>> {
    let images = code_objects::for_device(family.table().name, &driver.device().arch);
    let target = Target {
        family,
        ..Target::of(driver.device())?
    };
    Context::open(driver, target, &images).map(Arc::new)
}

/// Devices that failed.
#[derive(Default)]
struct LeftOut {
    last: Option<Error>,
}

impl LeftOut {
    fn note(&mut self, why: Error) {
        report::warning(format_args!("{why}; it is left out"));
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
