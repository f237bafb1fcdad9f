//! What fits which card: for documents, and for whoever chooses cards.

use super::demand::Demand;
use super::steps::with_length_foreseen;
use crate::backend::gpu::catalogue::{Card, Elements};
use crate::backend::gpu::driver::DeviceMemory;
use crate::backend::gpu::family::{FAMILIES, Family};
use crate::backend::gpu::stage::Common;
use crate::backend::gpu::target::Target;
use crate::config::ModelConfig;
use crate::options::Options;

/// The kinds of devices that are spoken of, those of less memory first.
pub fn cards() -> Vec<(Card, &'static dyn Family)> {
    let of = |&family: &&'static dyn Family| family.table().cards.iter().map(move |&card| (card, family));
    let mut cards: Vec<_> = FAMILIES.iter().flat_map(of).collect();
    cards.sort_by_key(|(card, _)| card.gb);
    cards
}

/// What the runtime has taken of a device that does nothing, in MiB.
const TAKEN_MIB: u64 = 600;

/// As many as a group is asked to have room for before it is put together of more devices.
pub const ENOUGH: usize = 256;

/// Sequences of the model's `seq_len` for which a group of so many cards of a family has room, to eight; 0 if the model
/// does not fit.
pub fn room(card: &Card, family: &'static dyn Family, config: &ModelConfig, devices: usize) -> usize {
    let target = Target {
        family,
        multiprocessors: card.multiprocessors,
    };
    let memory = DeviceMemory {
        free: (card.mib - TAKEN_MIB) << 20,
        total: card.mib << 20,
    };
    let mut options = Options::default();
    if devices == 1 {
        options = with_length_foreseen(&options, config, &target, Elements::F16, memory.free);
    }
    let common = Common::new(config, &options, Elements::F16, devices);
    let demand = Demand {
        common: &common,
        target: &target,
    };
    let memory = vec![memory; devices];
    let fits = |n: usize| demand.cut(&memory, n, &options).is_some();
    let (mut room, mut too_many) = (0, common.sequences / 8 + 1);
    while too_many - room > 1 {
        let n = usize::midpoint(room, too_many);
        *(if fits(8 * n) { &mut room } else { &mut too_many }) = n;
    }
    8 * room
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
        for (card, family) in cards() {
            let cells = [ModelConfig::preset_20b(), ModelConfig::preset_120b()].map(|config| {
                let rooms: Vec<usize> = (1..=4).map(|devices| room(&card, family, &config, devices)).collect();
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
