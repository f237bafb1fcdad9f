//! From the user's choice to open devices.

use super::code_objects;
use super::device_choice::{self, Needs, Runtime};
use super::driver::{Device, Driver, ListedDevice};
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
    list: fn() -> Result<Vec<ListedDevice>>,
    open: fn(usize) -> Result<Arc<dyn Driver>>,
    /// A name of a device that is the same for all processes of the machine.
    shared_name: fn(usize) -> Result<String>,
}

impl Entry {
    fn of(runtime: &str) -> &'static Self {
        let entry = ENTRIES.iter().find(|entry| entry.name == runtime);
        entry.expect("chosen among them")
    }
}

/// The runtimes this library was built for.
const ENTRIES: &[Entry] = &[
    #[cfg(feature = "hip")]
    Entry {
        name: "hip",
        list: super::driver::hip::list,
        open: super::driver::hip::open,
        shared_name: super::driver::hip::shared_name,
    },
    #[cfg(feature = "cuda")]
    Entry {
        name: "cuda",
        list: super::driver::cuda::list,
        open: super::driver::cuda::open,
        shared_name: super::driver::cuda::shared_name,
    },
    #[cfg(feature = "simt")]
    Entry {
        name: "simt",
        list: super::driver::simt::list,
        open: super::driver::simt::open,
        shared_name: super::driver::simt::shared_name,
    },
];

/// Opens the devices that `options` asks for and that can have the model, if one is given. See
/// [`device_choice::choose`].
pub fn usable(options: &Options, model: Option<&ModelConfig>) -> Result<Usable> {
    let chosen = chosen(options, model)?;
    let chosen = of_this_process(chosen, options)?;
    open_all(chosen, options)
}

/// The names, which are the same for all processes of the machine, of the devices that [`usable`] opens if they are not
/// shared. None if they cannot be found out; [`usable`] says why.
pub fn addresses(options: &Options, model: &ModelConfig) -> Vec<String> {
    let chosen = chosen(options, Some(model)).unwrap_or_default();
    let addresses: Result<_> = chosen.devices.iter().map(address).collect();
    addresses.unwrap_or_default()
}

fn address(device: &Device) -> Result<String> {
    (Entry::of(device.runtime).shared_name)(device.ordinal)
}

/// Leaves other ranks the devices that are theirs.
fn of_this_process(mut chosen: device_choice::Chosen, options: &Options) -> Result<device_choice::Chosen> {
    if let Some(own) = &options.share.devices {
        let mut devices = Vec::new();
        for device in chosen.devices {
            if own.contains(&address(&device)?) {
                devices.push(device);
            }
        }
        chosen.devices = devices;
    }
    Ok(chosen)
}

fn chosen(options: &Options, model: Option<&ModelConfig>) -> Result<device_choice::Chosen> {
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
        runs: &|device| {
            let target = Target::of(device);
            target.is_ok_and(|target| code_objects::runs(target.family.table().name, &device.arch))
        },
        bytes: model.map_or(0, |config| least_bytes_of_part(config, options)),
        is_plain: &|device| Target::of(device).is_ok_and(|target| target.is_plain()),
        asked_by: options.names.device,
        supports: &supports,
    };
    let mut chosen = device_choice::choose(&options.device, &runtimes, &needs)?;
    for device in &chosen.devices {
        if (needs.is_plain)(device) {
            let device = device_choice::describe(device);
            chosen.lines.push(format!(
                "{device} runs by the kernels that serve any GPU, without its matrix cores: far slower than it could"
            ));
        }
    }
    Ok(chosen)
}

fn open_all(chosen: device_choice::Chosen, options: &Options) -> Result<Usable> {
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
        usable.lines = vec![device_choice::cpu_line(&usable.lines)];
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
    (Entry::of(runtime).open)(ordinal)
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
