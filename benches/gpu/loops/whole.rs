//! Whole runs of workloads: every step that the library's scheduler plans takes what the loops allow. A replica has the
//! limits that the library would give it on such devices.
//!
//! - *by limits*: as the engine knows answers, of which mixed ones end before their limits, unforeseen;
//! - *by ends*: where the scheduler knows ahead how long each answer is. Where lengths are not mixed, it does.
//!
//! Products are measured for powers of two of rows and interpolated between these. Rows' ways between the devices of a
//! group and the host take no time.

use super::rates::DeviceRates;
use crate::group::{Group, Kind};
use crate::play::{self, Costs, Parts, Player, Starts, Step, Told, decoding_keys, interpolated};
use crate::workload::Workload;
use getp::backend::gpu::driver::DeviceMemory;
use getp::backend::gpu::shapes::Product;
use getp::batch::{Chunk, StepPlan};
use getp::options::Options;
use std::cell::RefCell;
use std::collections::BTreeMap;

/// Products are measured at powers of two of rows alone: see [`interpolated`].
const COUNTS: usize = 2;

/// Costs of steps.
pub struct ByLoops<'a> {
    rates: &'a DeviceRates<'a>,
    /// Seconds of a product of so many rows.
    product: &'a dyn Fn(Product, usize) -> anyhow::Result<f64>,
    /// By counts of rows: seconds of a layer's products.
    layers: RefCell<BTreeMap<usize, f64>>,
    /// Likewise of the unembedding.
    heads: RefCell<BTreeMap<usize, f64>>,
}

impl<'a> ByLoops<'a> {
    pub fn new(rates: &'a DeviceRates<'_>, product: &'a dyn Fn(Product, usize) -> anyhow::Result<f64>) -> Self {
        Self {
            rates,
            product,
            layers: RefCell::default(),
            heads: RefCell::default(),
        }
    }

    /// Seconds of a layer's attention, in which a row sees at most `window` keys.
    fn attention(&self, plan: &StepPlan, window: usize) -> f64 {
        let prompts = &plan.chunks[plan.decode_chunks..];
        let of_prompts: usize = prompts.iter().map(|chunk| prompt_keys(chunk, window)).sum();
        self.rates.reading(decoding_keys(plan, window) as f64) + self.rates.prompts_attention(of_prompts as f64)
    }
}

impl Costs for ByLoops<'_> {
    fn of(&self, plan: &StepPlan) -> anyhow::Result<Parts> {
        let rows = plan.rows();
        let products = interpolated(&self.layers, rows, COUNTS, |rows| {
            let of_layer = [Product::Qkv, Product::AttnOut, Product::Mlp1, Product::Mlp2];
            of_layer.into_iter().map(|product| (self.product)(product, rows)).sum()
        })?;
        let head = match plan.logits.len() {
            0 => 0.0,
            rows => interpolated(&self.heads, rows, COUNTS, |rows| (self.product)(Product::Greedy, rows))?,
        };
        Ok(Parts {
            layer: products + self.rates.other_rows(rows) + self.rates.launches(rows),
            windowed: self.attention(plan, self.rates.config.sliding_window),
            full: self.attention(plan, usize::MAX),
            head,
        })
    }

    fn hop(&self, _: usize) -> f64 {
        0.0
    }
}

/// Keys that a chunk's rows see in all, each at most the last `window`.
fn prompt_keys(chunk: &Chunk, window: usize) -> usize {
    let of_first = |rows: usize| {
        let short = rows.min(window);
        short * (short + 1) / 2 + (rows - short) * window
    };
    of_first(chunk.first_position + chunk.rows) - of_first(chunk.first_position)
}

/// Runs on a number of devices alike.
pub struct Whole<'a> {
    pub costs: ByLoops<'a>,
    pub options: &'a Options,
    /// Free memory of each.
    pub memory: DeviceMemory,
    pub devices: usize,
}

/// The runs of a workload.
pub struct Runs {
    workload: Workload,
    group: Group,
    by_limits: Option<Vec<Step>>,
    by_ends: Vec<Step>,
}

impl Whole<'_> {
    /// Plays a workload's requests, so many of them at once on a device.
    pub fn play(&self, workload: Workload, at_once: usize) -> anyhow::Result<Runs> {
        let (devices, rates) = (self.devices, self.costs.rates);
        let config = workload.config(rates.config);
        let kind = Kind {
            config: &config,
            target: rates.target,
            memory: self.memory,
        };
        let options = Options {
            max_batch: Some(workload.max_batch(at_once, devices)),
            ..self.options.clone()
        };
        let group = Group::of(&kind, &kind.with_length(&options, devices), devices);
        let no_room = || anyhow::anyhow!("{}: a group of {devices} has no room for the model", workload.name);
        let group = group.ok_or_else(no_room)?;
        let player = Player {
            config: &config,
            group: &group,
            costs: &self.costs,
        };
        let by = |told| player.play(&workload, Starts::Spread, told);
        let by_limits = if workload.mixed { Some(by(Told::Limit)?) } else { None };
        let by_ends = by(Told::End)?;
        Ok(Runs {
            workload,
            group,
            by_limits,
            by_ends,
        })
    }
}

impl Runs {
    pub fn print(&self) {
        play::print_head(&self.workload, &self.group);
        if let Some(steps) = &self.by_limits {
            play::print("by limits", steps);
        }
        play::print("by ends", &self.by_ends);
    }
}
