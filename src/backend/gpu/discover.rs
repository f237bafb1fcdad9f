//! From the user's choice to open devices.

use super::choice::{self, Needs, Runtime};
use super::code_objects;
use super::driver::{Device, Driver, Found};
use super::target::Target;
use crate::config::ModelConfig;
use crate::error::Result;
use crate::options::{DeviceChoice, Options, StepLimits};
use crate::weights::least_bytes;
use std::sync::Arc;

/// Opened devices; if there are none, the CPU is used.
#[derive(Default)]
pub struct Usable {
    /// In the order of use.
    pub drivers: Vec<Arc<dyn Driver>>,
    /// Lines for the user.
    pub lines: Vec<String>,
}

/// A runtime's functions.
struct Entry {
    name: &'static str,
    list: fn() -> Result<Vec<Found>>,
    open: fn(usize) -> Result<Arc<dyn Driver>>,
}

/// The runtimes this library was built for.
const ENTRIES: &[Entry] = &[
    #[cfg(feature = "hip")]
    Entry {
        name: "hip",
        list: super::driver::hip::list,
        open: super::driver::hip::open,
    },
    #[cfg(feature = "cuda")]
    Entry {
        name: "cuda",
        list: super::driver::cuda::list,
        open: super::driver::cuda::open,
    },
    #[cfg(feature = "simt")]
    Entry {
        name: "simt",
        list: super::driver::simt::list,
        open: super::driver::simt::open,
    },
];

/// Opens the devices that `options` asks for and that can have the model, if one is given. See [`choice::choose`].
pub fn usable(options: &Options, model: Option<&ModelConfig>) -> Result<Usable> {
    let runtimes: Vec<Runtime> = ENTRIES
        .iter()
        .filter(|entry| concerns(entry, &options.device))
        .map(ask)
        .collect();
    let steps = options.step_limits(StepLimits::GPU);
    let supports = |device: &Device| match (Target::of(device), model) {
        (Ok(target), Some(config)) => target.supports(config, &steps),
        (Ok(_), None) => Ok(()),
        (Err(error), _) => Err(error.to_string()),
    };
    let needs = Needs {
        code: &code_objects::archs(),
        bytes: model.map_or(0, |config| least_bytes_of_part(config, options)),
        supports: &supports,
    };
    let chosen = choice::choose(&options.device, &runtimes, &needs)?;
    let wanted = chosen.devices.len();
    let mut usable = Usable {
        drivers: Vec::new(),
        lines: chosen.lines,
    };
    for device in &chosen.devices {
        match open(device.runtime, device.ordinal) {
            Ok(driver) => usable.drivers.push(driver),
            Err(error) if options.device == DeviceChoice::Auto => usable.lines.push(error.to_string()),
            Err(error) => return Err(error),
        }
    }
    if wanted > 0 && usable.drivers.is_empty() {
        usable.lines = vec![choice::cpu_line(&usable.lines)];
    }
    Ok(usable)
}

/// The least memory that a device's part of the model takes: all of it, or a layer of a group's.
fn least_bytes_of_part(config: &ModelConfig, options: &Options) -> u64 {
    match options.group {
        Some(1) => least_bytes(config),
        _ => least_bytes(config) / config.n_layers as u64,
    }
}

/// Whether a runtime has to be asked for devices: that loads it, which costs time and threads.
fn concerns(entry: &Entry, choice: &DeviceChoice) -> bool {
    match choice {
        DeviceChoice::Cpu => false,
        DeviceChoice::Auto => entry.name != "simt",
        DeviceChoice::Gpu { runtime, .. } => entry.name == *runtime,
    }
}

fn ask(entry: &Entry) -> Runtime {
    Runtime {
        name: entry.name,
        found: (entry.list)(),
    }
}

fn open(runtime: &str, ordinal: usize) -> Result<Arc<dyn Driver>> {
    let entry = ENTRIES.iter().find(|entry| entry.name == runtime);
    (entry.expect("chosen among them").open)(ordinal)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn usable_of(device: DeviceChoice) -> Result<Usable> {
        let options = Options {
            device,
            ..Options::default()
        };
        usable(&options, None)
    }

    #[test]
    fn the_cpu_is_no_device() {
        let usable = usable_of(DeviceChoice::Cpu).unwrap();
        assert!(usable.drivers.is_empty() && usable.lines.is_empty());
    }

    /// Holds on every machine: with a GPU the devices are open, without one the CPU is taken and says why.
    #[test]
    fn auto_finds_devices_or_says_why_not() {
        let usable = usable_of(DeviceChoice::Auto).unwrap();
        if usable.drivers.is_empty() {
            assert_eq!(usable.lines.len(), 1, "{:?}", usable.lines);
        }
        for driver in &usable.drivers {
            assert!(driver.memory().unwrap().total > 0);
        }
    }
}
