//! The GPU backend, on the SIMT machine (an emulator on the CPU) or on the devices named in `GETP_TEST_DEVICE`, in the
//! syntax of `GETP_DEVICE`. Without one of the features `simt`, `hip` and `cuda` there is nothing to test.
#![cfg(any(feature = "simt", feature = "hip", feature = "cuda"))]

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

mod answers;
mod batch;
mod closeness;
mod contract;
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
use getp::backend::gpu::context::Context;
use getp::backend::gpu::discover;
use getp::backend::gpu::memory::SharedDriver;
use getp::backend::gpu::weights::WeightSource;
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

/// A device with its kernels loaded.
fn context(driver: SharedDriver) -> Arc<Context> {
    gpu::open::context(driver).unwrap()
}

/// A replica on the first device.
fn open(checkpoint: &dyn Checkpoint, options: &Options) -> Box<dyn Replica> {
    open_on(drivers(), checkpoint, options)
}

/// A replica on the first of these devices.
fn open_on(mut drivers: Vec<SharedDriver>, checkpoint: &dyn Checkpoint, options: &Options) -> Box<dyn Replica> {
    drivers.truncate(1);
    let mut replicas = gpu::open::open(drivers, &WeightSource::Checkpoint(checkpoint), options).unwrap();
    replicas.remove(0)
}
