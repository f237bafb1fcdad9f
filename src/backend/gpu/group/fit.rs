//! What fits which card: for documents, and for whoever chooses cards.

use super::demand::Demand;
use crate::backend::gpu::args::Format;
use crate::backend::gpu::driver::{Device, DeviceMemory};
use crate::backend::gpu::stage::Common;
use crate::backend::gpu::target::Target;
use crate::config::ModelConfig;
use crate::error::Result;
use crate::options::Options;

/// A kind of device.
#[derive(Clone, Copy, Debug)]
pub struct Card {
    /// What it is called.
    pub name: &'static str,
    /// Its memory as it is sold.
    pub gb: u64,
    mib: u64,
    runtime: &'static str,
    arch: &'static str,
    multiprocessors: usize,
}

/// The kinds of devices that are spoken of.
pub const CARDS: [Card; 4] = [
    card("MI250, a device", 64, 65_536, "hip", "gfx90a", 104),
    card("H100", 80, 81_559, "cuda", "sm_90", 132),
    card("H200", 141, 143_771, "cuda", "sm_90", 132),
    card("MI300X", 192, 196_608, "hip", "gfx942", 304),
];

const fn card(
    name: &'static str,
    gb: u64,
    mib: u64,
    runtime: &'static str,
    arch: &'static str,
    multiprocessors: usize,
) -> Card {
    Card {
        name,
        gb,
        mib,
        runtime,
        arch,
        multiprocessors,
    }
}

/// What the runtime has taken of a device that does nothing, in MiB.
const TAKEN_MIB: u64 = 600;

/// As many as a group is asked to have room for before it is put together of more devices.
pub const ENOUGH: usize = 256;

impl Card {
    /// Sequences of the model's `seq_len` for which a group of so many has room, to eight; 0 if the model does not fit.
    pub fn room(&self, config: &ModelConfig, devices: usize) -> Result<usize> {
        let target = Target::of(&Device {
            runtime: self.runtime,
            ordinal: 0,
            name: self.name.into(),
            arch: self.arch.into(),
            multiprocessors: self.multiprocessors,
        })?;
        let options = Options::default();
        let common = Common::new(config, &options, Format::F16, devices);
        let demand = Demand {
            common: &common,
            target: &target,
        };
        let memory = DeviceMemory {
            free: (self.mib - TAKEN_MIB) << 20,
            total: self.mib << 20,
        };
        let memory = vec![memory; devices];
        let fits = |n: usize| demand.cut(&memory, n, &options).is_some();
        let (mut room, mut too_many) = (0, common.sequences / 8 + 1);
        while too_many - room > 1 {
            let n = usize::midpoint(room, too_many);
            *(if fits(8 * n) { &mut room } else { &mut too_many }) = n;
        }
        Ok(8 * room)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The table of docs/groups.md: devices that `auto` puts together, and sequences of `seq_len` that have room in a
    /// group.
    #[test]
    fn the_document_says_what_fits() {
        let document = include_str!("../../../../docs/groups.md");
        let mut lacking = Vec::new();
        for card in CARDS {
            let cells = [ModelConfig::preset_20b(), ModelConfig::preset_120b()].map(|config| {
                let rooms: Vec<usize> = (1..=4).map(|devices| card.room(&config, devices).unwrap()).collect();
                let group = rooms.iter().position(|&n| n >= ENOUGH).map_or(0, |place| place + 1);
                let rooms: Vec<_> = rooms.iter().map(usize::to_string).collect();
                format!("{group} | {}", rooms.join(", "))
            });
            let row = format!("| {} | {} GB | {} |", card.name, card.gb, cells.join(" | "));
            if !document.contains(&row) {
                lacking.push(row);
            }
        }
        assert!(lacking.is_empty(), "docs/groups.md lacks:\n{}", lacking.join("\n"));
    }
}
