//! Plays whole workloads by each schedule (`../play.rs`).

use crate::costs::ByModel;
use crate::group::Group;
use crate::model::Model;
use crate::play::{self, Player, Starts, Told};
use crate::workload::{AT_ONCE, Workload};
use getp::options::Options;

/// Plays a workload on as few devices as have room for the model, by each schedule, and prints what comes of it.
pub fn print(model: &Model<'_>, workload: &Workload) -> anyhow::Result<()> {
    let config = workload.config(model.config);
    let model = Model {
        config: &config,
        ..*model
    };
    let group = Group::smallest(&model.kind(), &|devices| Options {
        max_batch: Some(workload.max_batch(AT_ONCE, devices)),
        ..Options::default()
    });
    play::print_head(workload, &group);
    let player = Player {
        config: &config,
        group: &group,
        costs: &ByModel::new(&model),
    };
    for (name, starts) in [
        ("spread", Starts::Spread),
        ("unplanned", Starts::Unplanned),
        ("waves", Starts::Waves),
    ] {
        if workload.mixed && starts == Starts::Waves {
            continue;
        }
        play::print(name, &player.play(workload, starts, Told::Limit)?);
    }
    Ok(())
}
