//! What the ranks of one machine share, and which part of it is whose.

use crate::cluster::message::{Reader, Writer};
use crate::cluster::node;
use crate::error::Result;
use crate::options::{DeviceChoice, MachineShare, Options};

/// What a rank tells the others of its machine.
pub struct Machine {
    name: String,
    devices: Vec<String>,
    cores: Vec<u32>,
}

impl Machine {
    /// This one, of which a rank may use these devices.
    pub fn this(devices: Vec<String>) -> Self {
        Self {
            name: node::name(),
            devices,
            cores: node::cores(),
        }
    }

    /// Writes it.
    pub fn write(&self, writer: &mut Writer) -> Result<()> {
        writer.text(&self.name)?;
        writer.number(self.devices.len())?;
        self.devices.iter().try_for_each(|device| writer.text(device))?;
        writer.list(&self.cores)
    }

    /// Reads what [`Self::write`] has written.
    pub fn read(words: &[u32]) -> Result<Self> {
        let mut reader = Reader::new(words);
        let machine = Self {
            name: reader.text()?,
            devices: reader.many(Reader::text)?,
            cores: reader.list()?,
        };
        reader.end()?;
        Ok(machine)
    }
}

/// A rank's options with its part of what it shares with other ranks of its machine, and whether there is one for it.
/// Where others have GPUs, a rank without any does not compute on the CPU unless it is told to: it would be slow, and
/// its answers not those of a GPU.
pub fn with_part(mut options: Options, machines: &[Machine], rank: usize) -> (Options, bool) {
    let own = &machines[rank];
    let here = || machines.iter().filter(|machine| machine.name == own.name);
    let place = machines[..rank]
        .iter()
        .filter(|machine| machine.name == own.name)
        .count();
    let devices: Vec<_> = here().map(|machine| machine.devices.clone()).collect();
    let cores: Vec<_> = here().map(|machine| machine.cores.clone()).collect();
    let devices = node::share_out(&devices, place);
    let anybody_has = machines.iter().any(|machine| !machine.devices.is_empty());
    let has_part = match options.device {
        DeviceChoice::Cpu => true,
        DeviceChoice::Auto => !devices.is_empty() || !anybody_has,
        // Without any, opening says what is wrong.
        DeviceChoice::Gpu { .. } => !devices.is_empty() || own.devices.is_empty(),
    };
    if options.threads == 0 && cores.len() > 1 {
        options.threads = node::share_out(&cores, place).len().max(1);
    }
    options.share = MachineShare {
        devices: (!own.devices.is_empty()).then_some(devices),
        processes: cores.len(),
    };
    (options, has_part)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn machine(name: &str, devices: &[&str], cores: u32) -> Machine {
        Machine {
            name: name.into(),
            devices: devices.iter().map(|&device| device.into()).collect(),
            cores: (0..cores).collect(),
        }
    }

    /// A rank's devices, the processes that it shares host memory with, its threads, and whether it has a part.
    fn part(device: &DeviceChoice, machines: &[Machine], rank: usize) -> (Option<Vec<String>>, usize, usize, bool) {
        let options = Options {
            device: device.clone(),
            ..Options::default()
        };
        let (options, has_part) = with_part(options, machines, rank);
        (
            options.share.devices,
            options.share.processes,
            options.threads,
            has_part,
        )
    }

    fn some(devices: &[&str]) -> Option<Vec<String>> {
        Some(devices.iter().map(|&device| device.into()).collect())
    }

    #[test]
    fn ranks_of_a_machine_have_parts_of_its_devices_and_cores() {
        let machines = [
            machine("a", &["x", "y"], 8),
            machine("b", &["x"], 8),
            machine("a", &["y", "x"], 8),
            machine("a", &["own"], 8),
        ];
        let auto = DeviceChoice::Auto;
        assert_eq!(part(&auto, &machines, 0), (some(&["x"]), 3, 2, true));
        // Alone on its machine, it has all of it; 0 threads are one a core.
        assert_eq!(part(&auto, &machines, 1), (some(&["x"]), 1, 0, true));
        assert_eq!(part(&auto, &machines, 2), (some(&["y"]), 3, 3, true));
        assert_eq!(part(&auto, &machines, 3), (some(&["own"]), 3, 3, true));
        let words = |machine: &Machine| {
            let mut writer = Writer::default();
            machine.write(&mut writer).unwrap();
            writer.words()
        };
        let read: Vec<_> = machines.iter().map(|m| Machine::read(&words(m)).unwrap()).collect();
        assert_eq!(part(&auto, &read, 2), (some(&["y"]), 3, 3, true));
    }

    #[test]
    fn the_cpu_is_used_where_it_is_asked_for_or_nobody_has_a_device() {
        let all = DeviceChoice::Gpu {
            runtime: "cuda",
            ordinals: Vec::new(),
        };
        let one_for_two = [machine("a", &["x"], 1), machine("a", &["x"], 1), machine("b", &[], 1)];
        assert_eq!(part(&DeviceChoice::Auto, &one_for_two, 0), (some(&[]), 2, 1, false));
        assert_eq!(part(&all, &one_for_two, 0), (some(&[]), 2, 1, false));
        assert_eq!(part(&DeviceChoice::Cpu, &one_for_two, 0), (some(&[]), 2, 1, true));
        assert_eq!(part(&DeviceChoice::Auto, &one_for_two, 1), (some(&["x"]), 2, 1, true));
        assert_eq!(part(&DeviceChoice::Auto, &one_for_two, 2), (None, 1, 0, false));
        // It has none to lose: opening says what is wrong.
        assert_eq!(part(&all, &one_for_two, 2), (None, 1, 0, true));
        let none = [machine("a", &[], 4), machine("a", &[], 4)];
        assert_eq!(part(&DeviceChoice::Auto, &none, 1), (None, 2, 2, true));
    }
}
