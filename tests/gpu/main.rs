//! The GPU backend, on the SIMT machine (an emulator on the CPU) or on the devices named in `GETP_TEST_DEVICE`, in the
//! syntax of `GETP_DEVICE`. `GETP_TEST_FAMILY` has a device run the kernels of another family than its own. Without one
//! of the features `simt`, `hip` and `cuda` there is nothing to test.
#![cfg(any(feature = "simt", feature = "hip", feature = "cuda"))]

#[path = "../common/bounds.rs"]
mod bounds;
#[path = "../fake/mod.rs"]
mod fake;
#[path = "../common/grammar.rs"]
mod grammar;
#[path = "../common/oracle.rs"]
mod oracle;
#[path = "../common/plans.rs"]
mod plans;
#[path = "../common/synthetic.rs"]
mod synthetic;
#[path = "../common/wgmma.rs"]
mod wgmma;
#[path = "../common/wide.rs"]
mod wide;

mod answers;
mod batch;
mod closeness;
mod contract;
mod cuts;
#[cfg(feature = "simt")]
mod devices;
#[cfg(feature = "simt")]
mod faults;
#[cfg(feature = "simt")]
mod graphs;
#[cfg(feature = "simt")]
mod groups;
mod independence;
#[cfg(feature = "simt")]
mod limits;
mod model;
mod ops;
mod outputs;
#[cfg(feature = "simt")]
mod plain;
mod replica;

use getp::backend::gpu;
use getp::backend::gpu::catalogue::Elements;
use getp::backend::gpu::context::Context;
use getp::backend::gpu::discover;
use getp::backend::gpu::family::{self, Family};
use getp::backend::gpu::memory::SharedDriver;
use getp::checkpoint::Checkpoint;
use getp::options::{DeviceChoice, Options};
use getp::replica::Replica;
use std::sync::Arc;

/// The devices to test on.
fn drivers() -> Vec<SharedDriver> {
    let options = Options {
        device: devices(),
        ..Options::default()
    };
    discover::usable(&options, None).unwrap().drivers
}

fn devices() -> DeviceChoice {
    let name = std::env::var("GETP_TEST_DEVICE").unwrap_or_else(|_| "simt:0".into());
    name.parse().unwrap()
}

/// A device with its kernels loaded: those of its own family, or of the one that `GETP_TEST_FAMILY` names.
fn context(driver: SharedDriver) -> Arc<Context> {
    match family() {
        Some(family) => gpu::open::context_as(driver, family),
        None => gpu::open::context(driver),
    }
    .unwrap()
}

/// The format of activations of a model whose range is too wide for FP16: weights that the plain kernels multiply have
/// any.
fn wide_elements() -> Elements {
    let is_plain = |family: &dyn Family| family.table().kernels.iter().all(|kernel| kernel.weights.is_none());
    match family().is_some_and(is_plain) {
        true => Elements::F16,
        false => Elements::Bf16,
    }
}

fn family() -> Option<&'static dyn Family> {
    let name = std::env::var("GETP_TEST_FAMILY").ok()?;
    Some(family::named(&name).expect("GETP_TEST_FAMILY names a family"))
}

/// A replica on the first device.
fn open(checkpoint: &dyn Checkpoint, options: &Options) -> Box<dyn Replica> {
    open_on(drivers(), checkpoint, options)
}

/// A replica on the first of these devices.
fn open_on(mut drivers: Vec<SharedDriver>, checkpoint: &dyn Checkpoint, options: &Options) -> Box<dyn Replica> {
    drivers.truncate(1);
    if family().is_some() {
        let ends = [checkpoint.config().n_layers];
        let contexts = drivers.into_iter().map(context).collect();
        return Box::new(gpu::open::inspect::open_cut(contexts, &ends, checkpoint, options).unwrap());
    }
    gpu::open::open(drivers, checkpoint, options).unwrap().remove(0)
}
