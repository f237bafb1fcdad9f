//! The time of steps and of whole workloads on a CDNA GPU, estimated by a model, since it has not been measured on one.
//!
//!     cargo bench --profile dev --bench cdna --features hip [-- --card mi250|mi300x|mi355x] [W2 W5 ...]
//!     cargo bench --profile dev --bench cdna --features hip -- W2 --requests 890,4000
//!
//! *Products.* A matrix product's blocks are assigned in order to compute units that hold eight waves (`units.rs`). A
//! compute unit multiplies at the share of its peak that llvm-mca gives for the kernel's inner loop (`LLVM_MCA` names
//! the program), with one block or with two (`shares.rs`). A product takes at least the time in which its weights and
//! activations cross memory. Tokens select experts at random, with a fixed seed; the experts' tiles and their order are
//! those that the device makes of the counts (`cuts.rs`).
//!
//! A device of several dies gives its blocks to them in turn, as `kernels/cdna/work.h` numbers them, and a die's
//! blocks go to its own compute units. What a die's blocks read of weights and activations its L2 reads once, from a
//! cache that all dies share: a product takes at least that long, too. No L2 is too small, and none is read from more
//! slowly than it is used.
//!
//! *Attention.* Rows that decode take the time of their keys' and values' bytes. Of prompts each wave takes its tile's
//! keys at the share of the peak that the kernel's inner loop has, blocks being assigned as those of products.
//!
//! *The rest* takes the time of its bytes, and each launch a fixed time. Kernels do not overlap, and the host takes no
//! time. "At least": without launches, and with products at the peak or at the memory's rate.
//!
//! Single steps are in the middle of W2's sequences, with all rows of one age, or of prompts alone (`steps.rs`). In
//! workloads the library's scheduler decides each step, with as many KV blocks as the card has memory for
//! (`../group.rs`), by three schedules (`../play.rs`):
//!
//! - *spread*: starts are spread by the scheduler's timetable, so that ages are apart;
//! - *unplanned*: without it, requests start as soon as the scheduler's other rules have room for them;
//! - *waves*: all ages alike; as many start together as have room at their longest, the next ones when the last has
//!   ended. Not for mixed lengths.
//!
//! Steps of as many rows cost the same but for attention, and are interpolated between those computed (`costs.rs`).

#![allow(missing_docs)]

mod card;
#[path = "../chosen.rs"]
mod chosen;
mod costs;
mod cuts;
#[path = "../group.rs"]
mod group;
#[path = "../layer.rs"]
mod layer;
mod model;
#[path = "../play.rs"]
mod play;
mod runs;
mod shares;
mod steps;
mod units;
#[path = "../workload.rs"]
mod workload;

use clap::Parser;
use getp::config::ModelConfig;
use model::Model;
use shares::Shares;
use workload::WORKLOADS;

#[derive(Parser)]
struct Args {
    /// Workloads that are played.
    #[arg(default_values = ["W2", "W5", "W6", "M"])]
    names: Vec<String>,
    #[arg(long, value_enum, default_value = "mi250")]
    card: card::Name,
    /// Numbers of requests, one run each, instead of the workload's.
    #[arg(long, value_delimiter = ',')]
    requests: Vec<usize>,
    /// Cargo passes it.
    #[arg(long, hide = true)]
    bench: bool,
}

fn main() -> anyhow::Result<()> {
    let args = Args::parse();
    let card = args.card.card();
    let Some(shares) = Shares::new(card.arch) else {
        println!("no code objects for {}: build with --features hip", card.arch);
        return Ok(());
    };
    println!(
        "{}: {}, {} compute units at {:.1} GHz, 16x16x16 of the matrix cores {} slots of 4 clocks; memory {:.2} TB/s",
        card.name,
        card.arch,
        card.compute_units,
        card.hertz * 1e-9,
        shares.run_slots,
        card.bytes_a_second() * 1e-12
    );
    let (of_20b, of_120b) = (ModelConfig::preset_20b(), ModelConfig::preset_120b());
    let [of_20b, of_120b] = [&of_20b, &of_120b].map(|config| Model {
        config,
        card,
        target: card.target(),
        shares: &shares,
    });
    steps::print_steps(&of_20b);
    for &(devices, most_rows) in card.groups {
        steps::print_group(&of_120b, devices, most_rows);
    }
    steps::print_prompts(&of_20b);
    let is_named = |name: &str| args.names.iter().any(|named| named == name);
    for (name, model) in [("20b", of_20b), ("120b", of_120b)] {
        for workload in WORKLOADS.iter().filter(|workload| is_named(workload.name)) {
            for workload in workload.with(&args.requests) {
                print!("{name}, ");
                runs::print(&model, &workload)?;
            }
        }
    }
    Ok(())
}
