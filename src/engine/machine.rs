//! What the ranks of one machine share, and which part of it is whose.

use crate::cluster::message::{Reader, Writer};
use crate::cluster::node;
use crate::error::Result;
use crate::options::{DeviceChoice, Options, Part};

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
    options.part = Part {
        devices: (!own.devices.is_empty()).then_some(devices),
        processes: cores.len(),
    };
    (options, has_part)
}
