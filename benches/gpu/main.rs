//! The speed of the GPU backend, with the real models' shapes and random weights. Those of `workloads` and `ops` are
//! made in host memory first: 14 GB of 20b, 65 GB of 120b.
//!
//!     cargo bench --bench gpu --features cuda -- workloads [W1 W2 ...] [--devices cuda:0] [--precision fast|exact]
//!     cargo bench --bench gpu --features cuda -- workloads W2 --skew 0.5
//!     cargo bench --bench gpu --features cuda -- workloads W2 --shape 120b --group 2 --requests 2200 --overlap
//!     cargo bench --bench gpu --features cuda -- workloads M --temperature 1 --topp 1
//!     cargo bench --bench gpu --features cuda -- workloads W2 --family ampere
//!     cargo bench --bench gpu --features cuda -- ops [--rows 1,2,4,...]
//!     cargo bench --bench gpu --features cuda -- kernel [NAME ...] [--rows 1,32,890] [--windowed]
//!     cargo bench --bench gpu -- kernel NAME [--rows 1,32,890] [--family hopper] --why
//!     cargo bench --bench gpu --features cuda -- draws
//!     cargo bench --bench gpu --features cuda -- loops [W1 ..] [--shape 120b] [--precision exact]
//!     cargo bench --bench gpu --features cuda -- loops M --whole
//!     cargo bench --bench gpu --features cuda -- demand [--shapes 20b,120b]
//!     cargo bench --bench gpu --features cuda -- sums
//!     cargo bench --bench gpu --features cuda -- warmup [--host-gib 96 | --model DIRECTORY]
//!
//! `workloads` runs whole batches through the engine and prints output tokens per second of `inference`. `ops` times
//! every kernel, by events on the device, and whole steps, over batch sizes. `kernel` runs each kernel that can do an
//! operation, or the one that is named, compares its result with float64 and times it beside the plain one; without a
//! name it lists all kernels, and with `--why` it says of each, without a device, too, whether the library may choose
//! it, what it would cost, and which is taken. `draws` times sampling from whole rows on the host. `demand` finds the
//! factors by which groups cut a model's layers. `sums` says what Hopper's `exact` loses in its sums, by an emulation
//! that needs no device. `warmup` times `warm_up` from a float32 checkpoint in host memory or a Hugging Face directory.
//! Requests are greedy without `--temperature`, and end tokens are ignored, so that all answers have the given length;
//! M's end where it says, which the scheduler does not foresee.

#![allow(missing_docs)]

#[path = "../../tests/common/bounds.rs"]
mod bounds;
#[path = "../chosen.rs"]
mod chosen;
mod demand;
mod draws;
#[path = "../group.rs"]
mod group;
mod kernel;
mod loops;
mod machine;
mod ops;
#[path = "../../tests/common/oracle.rs"]
mod oracle;
#[path = "../parameter.rs"]
mod parameter;
#[path = "../../tests/common/plans.rs"]
mod plans;
#[path = "../play.rs"]
mod play;
mod random_model;
mod sums;
#[path = "../../tests/common/synthetic.rs"]
mod synthetic;
mod warmup;
mod watched;
#[path = "../../tests/common/wgmma.rs"]
mod wgmma;
#[path = "../../tests/common/wide.rs"]
mod wide;
#[path = "../workload.rs"]
mod workload;
mod workloads;

use clap::{Parser, Subcommand};
use getp::backend::gpu;
use getp::backend::gpu::context::Context;
use getp::backend::gpu::discover;
use getp::backend::gpu::family::{self, Family};
use getp::backend::gpu::memory::SharedDriver;
use getp::backend::gpu::target::Target;
use getp::config::ModelConfig;
use getp::options::{Options, Precision, Print};
use getp::replica::Replica;
use random_model::RandomModel;
use std::sync::Arc;

#[derive(Parser)]
struct Args {
    #[command(subcommand)]
    part: Part,
    /// `GETP_DEVICE`'s value.
    #[arg(long, global = true, default_value = "auto")]
    devices: String,
    /// 20b, 120b or 7m.
    #[arg(long, global = true, default_value = "20b")]
    shape: String,
    /// Layers; 0 is the model's own number.
    #[arg(long, global = true, default_value_t = 0)]
    layers: usize,
    /// How uneven the router's choice of experts is: 0.5 for a busiest expert of 4 times the mean (20b) or 13 times
    /// (120b), 0.95 for 6.6 (20b).
    #[arg(long, global = true, default_value_t = 0.0)]
    skew: f32,
    /// exact or fast
    #[arg(long, global = true, default_value = "fast")]
    precision: String,
    /// `GETP_GROUP`'s value: devices that make a replica together; 0 is auto.
    #[arg(long, global = true, default_value_t = 0)]
    group: usize,
    /// `GETP_DEVICE_MB`'s value.
    #[arg(long, global = true, default_value_t = 0)]
    device_mb: usize,
    /// `GETP_STEP_TOKENS`'s value; 0 is the library's default.
    #[arg(long, global = true, default_value_t = 0)]
    step_tokens: usize,
    /// Opens each device so many times, to play a group on one device; `--device-mb` says what each may take of it.
    #[arg(long, global = true, default_value_t = 1)]
    copies: usize,
    /// Runs the kernels of another family than the devices' own, if there is code of them for these; each device is a
    /// replica then.
    #[arg(long, global = true)]
    family: Option<String>,
    /// Print the profile, too (kernels are then launched one by one without a graph, which is slower).
    #[arg(long, global = true)]
    profile: bool,
    /// Cargo passes it.
    #[arg(long, global = true, hide = true)]
    bench: bool,
}

#[derive(Subcommand)]
enum Part {
    /// Whole batches: output tokens per second.
    Workloads(workloads::Args),
    /// Kernels over batch sizes: microseconds, GB/s, TFLOP/s, share of the limit.
    Ops(ops::Args),
    /// Every kernel of an operation, alone: checked against float64, timed, beside the plain one.
    Kernel(kernel::Args),
    /// Sampling from whole rows of logits on the host.
    Draws(draws::Args),
    /// Warming up from a checkpoint: seconds, GB/s read, packed and sent.
    Warmup(warmup::Args),
    /// The device's limits: its rates of copying memory and of matrix products.
    Machine,
    /// The products' inner loops on end, and what workloads could reach with them.
    Loops(loops::Part),
    /// Stages' times, and the factors of `group/demand.rs` that meet them best.
    Demand(demand::Args),
    /// What the sums of Hopper's `exact` lose, by emulation.
    Sums(sums::Args),
}

impl Args {
    fn config(&self) -> ModelConfig {
        self.config_of(&self.shape)
    }

    fn config_of(&self, shape: &str) -> ModelConfig {
        let mut config = match shape {
            "7m" => ModelConfig::preset_7m(),
            "120b" => ModelConfig::preset_120b(),
            _ => ModelConfig::preset_20b(),
        };
        if self.layers > 0 {
            config.n_layers = self.layers;
        }
        config.context_length = Some(workload::CONTEXT_LENGTH);
        config
    }

    fn options(&self) -> anyhow::Result<Options> {
        let precision = match self.precision.as_str() {
            "exact" => Precision::Exact,
            _ => Precision::Fast,
        };
        Ok(Options {
            precision: Some(precision),
            device: self.devices.parse()?,
            profile: self.profile,
            group: (self.group > 0).then_some(self.group),
            device_mb: self.device_mb,
            step_tokens: (self.step_tokens > 0).then_some(self.step_tokens),
            print: Print::Nothing,
            progress: false,
            ignore_end: true,
            ..Options::default()
        })
    }

    /// Replicas of a [`RandomModel`] on the devices of `--devices`.
    fn replicas(&self, config: &ModelConfig, options: &Options) -> anyhow::Result<Vec<Box<dyn Replica>>> {
        let model = RandomModel::new(config, self.skew);
        if self.family.is_none() {
            return Ok(gpu::open::open(self.devices(options)?, &model, options)?);
        }
        let open = |driver| -> anyhow::Result<Box<dyn Replica>> {
            let ends = [config.n_layers];
            let replica = gpu::open::inspect::open_cut(vec![self.context(driver)?], &ends, &model, options)?;
            Ok(Box::new(replica))
        };
        self.devices(options)?.into_iter().map(open).collect()
    }

    /// The family whose kernels a device runs: its own, or that of `--family`.
    fn family_of(&self, driver: &SharedDriver) -> anyhow::Result<&'static dyn Family> {
        let Some(name) = &self.family else {
            return Ok(Target::of(driver.device())?.family);
        };
        family::named(name).ok_or_else(|| anyhow::anyhow!("there is no family {name}"))
    }

    /// A device with the kernels of that family loaded.
    fn context(&self, driver: SharedDriver) -> anyhow::Result<Arc<Context>> {
        let family = self.family_of(&driver)?;
        Ok(gpu::open::context_as(driver, family)?)
    }

    /// The devices of `--devices` that can be used, each as often as `--copies` says.
    fn devices(&self, options: &Options) -> anyhow::Result<Vec<SharedDriver>> {
        let devices = usable(options)?;
        Ok(devices
            .iter()
            .cycle()
            .take(self.copies * devices.len())
            .cloned()
            .collect())
    }
}

/// The devices of `--devices` that can be used.
fn usable(options: &Options) -> anyhow::Result<Vec<SharedDriver>> {
    let usable = discover::usable(options, None)?;
    usable.lines.iter().for_each(|line| println!("{line}"));
    anyhow::ensure!(!usable.drivers.is_empty(), "no GPU can be used");
    Ok(usable.drivers)
}

fn main() -> anyhow::Result<()> {
    let args = Args::parse();
    match &args.part {
        Part::Workloads(part) => workloads::run(&args, part),
        Part::Ops(part) => ops::run(&args, part),
        Part::Kernel(part) => kernel::run(&args, part),
        Part::Draws(part) => {
            draws::run(&args, part);
            Ok(())
        }
        Part::Warmup(part) => warmup::run(&args, part),
        Part::Machine => machine::run(&args),
        Part::Loops(part) => loops::run(&args, part),
        Part::Demand(part) => demand::run(&args, part),
        Part::Sums(part) => {
            sums::run(&args, part);
            Ok(())
        }
    }
}
