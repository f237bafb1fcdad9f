//! Plays whole workloads: the library's scheduler decides each step, and a model of the devices gives what it takes.
//!
//! The host takes no time. A step begins on a device when that has done the step before, when its rows have come from
//! the device before, and when the tokens that it is fed have been found.

#![allow(dead_code, reason = "each benchmark that includes this uses a part")]

use crate::group::Group;
use crate::workload::{Lengths, Workload};
use getp::batch::StepPlan;
use getp::config::ModelConfig;
use getp::request::{EndTokens, Request};
use getp::scheduler::{Ahead, Scheduler};
use std::cell::RefCell;
use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;

/// A token that ends no answer.
const TOKEN: u32 = 7;

/// Seconds of a step's parts.
pub struct Parts {
    /// A layer without its attention.
    pub layer: f64,
    /// The attention of a layer with a window.
    pub windowed: f64,
    /// The attention of a layer without one.
    pub full: f64,
    /// What stands behind the layers.
    pub head: f64,
}

impl Parts {
    /// Seconds of a device's part of the step.
    fn of_device(&self, config: &ModelConfig, layers: &Range<usize>) -> f64 {
        let windowed = layers.clone().filter(|&layer| config.is_windowed(layer)).count();
        let full = layers.len() - windowed;
        let head = if layers.end == config.n_layers { self.head } else { 0.0 };
        layers.len() as f64 * self.layer + windowed as f64 * self.windowed + full as f64 * self.full + head
    }
}

/// What steps take on the devices of a replica.
pub trait Costs {
    /// Seconds of a step's parts.
    fn of(&self, plan: &StepPlan) -> anyhow::Result<Parts>;
    /// Seconds of so many rows' way from a device to the next.
    fn hop(&self, rows: usize) -> f64;
}

/// Keys that the rows that decode attend to in a layer, each at most the last `window` of its own.
pub fn decoding_keys(plan: &StepPlan, window: usize) -> usize {
    let decoding = &plan.chunks[..plan.decode_chunks];
    decoding
        .iter()
        .map(|chunk| (chunk.first_position + 1).min(window))
        .sum()
}

/// What so many rows cost, between the nearest of those numbers of rows whose cost is computed, once: each power of two
/// is the end of `counts / 2` equal steps from the one before.
pub fn interpolated(
    known: &RefCell<BTreeMap<usize, f64>>,
    rows: usize,
    counts: usize,
    of: impl Fn(usize) -> anyhow::Result<f64>,
) -> anyhow::Result<f64> {
    let step = (rows.next_power_of_two() / counts).max(1);
    let at = |rows| -> anyhow::Result<f64> {
        if let Some(&cost) = known.borrow().get(&rows) {
            return Ok(cost);
        }
        let cost = of(rows)?;
        known.borrow_mut().insert(rows, cost);
        Ok(cost)
    };
    let below = rows / step * step;
    let cost = at(below)?;
    match rows - below {
        0 => Ok(cost),
        more => Ok(cost + (at(below + step)? - cost) * more as f64 / step as f64),
    }
}

/// When requests start.
#[derive(Clone, Copy, PartialEq)]
pub enum Starts {
    /// By the scheduler's timetable.
    Spread,
    /// As soon as the scheduler's other rules have room for them.
    Unplanned,
    /// As many together as have room at their longest, the next ones when the last has ended.
    Waves,
}

/// What the scheduler is told of an answer's length.
#[derive(Clone, Copy, PartialEq)]
pub enum Told {
    /// Its limit, before which mixed answers end.
    Limit,
    /// Where it ends.
    End,
}

/// Devices that play workloads.
pub struct Player<'a> {
    pub config: &'a ModelConfig,
    pub group: &'a Group,
    pub costs: &'a dyn Costs,
}

impl Player<'_> {
    /// All steps of a workload, in their order.
    pub fn play(&self, workload: &Workload, starts: Starts, told: Told) -> anyhow::Result<Vec<Step>> {
        Run::new(self, workload, told)?.play(starts)
    }
}

/// Prints a workload, and who plays it.
pub fn print_head(workload: &Workload, group: &Group) {
    let layers: Vec<_> = group.layers.iter().map(|layers| layers.len()).collect();
    println!(
        "{}: {} requests, {} + {} tokens{}; layers {layers:?}; {} blocks",
        workload.name,
        workload.requests,
        workload.prompt,
        workload.output,
        if workload.mixed { " in the mean" } else { "" },
        group.limits.blocks,
    );
}

/// Prints what comes of steps: until the last request starts, and of all.
pub fn print(name: &str, steps: &[Step]) {
    let last_start = steps.iter().rposition(|step| step.starts > 0).unwrap_or(0);
    print_part(&format!("{name}, to the last start"), &steps[..=last_start]);
    print_part(&format!("{name}, whole"), steps);
}

/// A step that is done.
#[derive(Clone, Copy, Default)]
pub struct Step {
    /// Seconds since the step before was done.
    seconds: f64,
    /// Tokens found; of workloads of prompts alone, those of prompts, too.
    tokens: usize,
    /// Rows that decode.
    decoding: usize,
    /// Whether it has rows of prompts, too.
    reads: bool,
    /// Requests of which it computes the first row.
    starts: usize,
    /// The share of the full layers' blocks that sequences hold.
    held: f64,
}

fn print_part(name: &str, steps: &[Step]) {
    let seconds: f64 = steps.iter().map(|step| step.seconds).sum();
    let tokens: usize = steps.iter().map(|step| step.tokens).sum();
    let held: f64 = steps.iter().map(|step| step.held * step.seconds).sum();
    print!(
        "    {name:<29}{:>8.0} tok/s{:>8.1} s{:>7} steps; KV cache {:>2.0} % held",
        tokens as f64 / seconds,
        seconds,
        steps.len(),
        held / seconds * 100.0
    );
    let decoding: Vec<_> = steps.iter().filter(|step| step.decoding > 0 && !step.reads).collect();
    if !decoding.is_empty() {
        let sum = |of: &dyn Fn(&Step) -> f64| decoding.iter().map(|step| of(step)).sum::<f64>();
        let count = decoding.len() as f64;
        print!(
            "; {count:>6} steps of decoding alone: {:>6.1} rows, {:>6.2} ms",
            sum(&|step| step.decoding as f64) / count,
            sum(&|step| step.seconds) / count * 1e3
        );
    }
    println!();
}

struct Run<'a> {
    player: &'a Player<'a>,
    lengths: Vec<Lengths>,
    /// Whether prompts are all there is.
    only_prompts: bool,
    waiting: VecDeque<Request>,
    scheduler: Scheduler,
    /// When each device is done with what it has.
    free: Vec<f64>,
    /// When each slot's last token was found.
    found: Vec<f64>,
    /// When the host took the last step's tokens.
    now: f64,
}

impl<'a> Run<'a> {
    fn new(player: &'a Player<'_>, workload: &Workload, told: Told) -> anyhow::Result<Self> {
        let lengths = workload.lengths(1)?;
        let prompt = |(number, lengths): (usize, &Lengths)| {
            // Behind what all prompts begin with, no two begin alike.
            let mut prompt = vec![number as u32 + 1; lengths.prompt];
            prompt[..workload.shared].fill(0);
            let positions = match told {
                Told::Limit => workload.steps(1),
                // The last token sampled is no input.
                Told::End => lengths.prompt + lengths.output - 1,
            };
            Request::greedy(number, prompt, positions)
        };
        Ok(Self {
            waiting: lengths.iter().enumerate().map(prompt).collect(),
            scheduler: Scheduler::new(player.group.limits.clone())?,
            free: vec![0.0; player.group.layers.len()],
            found: vec![0.0; player.group.limits.max_batch],
            now: 0.0,
            only_prompts: workload.output == 1,
            lengths,
            player,
        })
    }

    fn play(mut self, starts: Starts) -> anyhow::Result<Vec<Step>> {
        let mut steps = Vec::new();
        let mut under_way = VecDeque::new();
        let (mut spare, mut answers) = (Vec::<StepPlan>::new(), Vec::new());
        loop {
            while under_way.len() < self.player.group.limits.depth {
                self.start(starts)?;
                let mut plan = spare.pop().unwrap_or_default();
                if !self.scheduler.plan(&mut plan) {
                    break;
                }
                self.scheduler.begin(&plan);
                let free = self.scheduler.free_blocks() as f64;
                let held = 1.0 - free / self.player.group.limits.blocks as f64;
                under_way.push_back((self.compute(&plan)?, held, plan));
            }
            let Some((end, held, plan)) = under_way.pop_front() else {
                anyhow::ensure!(answers.len() == self.lengths.len(), "only {} answers", answers.len());
                return Ok(steps);
            };
            let prompts = &plan.chunks[plan.decode_chunks..];
            let mut step = Step {
                seconds: end - self.now,
                decoding: plan.decode_chunks,
                reads: !prompts.is_empty(),
                starts: prompts.iter().filter(|chunk| chunk.first_position == 0).count(),
                held,
                ..Step::default()
            };
            self.now = end;
            if self.only_prompts {
                step.tokens += plan.rows();
            }
            let sampled = plan.logits.iter().map(|row| {
                let Some(request) = self.scheduler.drawing(row.slot) else {
                    return TOKEN; // its answer has ended
                };
                step.tokens += 1;
                let Lengths { prompt, output } = self.lengths[request];
                let is_last = row.position + 2 == prompt + output;
                if is_last { EndTokens::RELEASED[0] } else { TOKEN }
            });
            let sampled: Vec<_> = sampled.collect();
            self.scheduler.commit(&plan, &sampled, &mut answers)?;
            steps.push(step);
            spare.push(plan);
        }
    }

    /// Hands over requests while there is room, as the engine's queue does.
    fn start(&mut self, starts: Starts) -> anyhow::Result<()> {
        // Blocks for those that start, at their longest.
        let mut blocks = usize::MAX;
        match starts {
            Starts::Spread => self.scheduler.look_ahead(self.waiting.iter().map(|request| Ahead {
                n_prompt: request.prompt.len(),
                max_positions: request.max_positions,
            })),
            Starts::Unplanned => {}
            Starts::Waves if self.scheduler.running() + self.scheduler.waiting() > 0 => return Ok(()),
            Starts::Waves => blocks = self.player.group.limits.blocks,
        }
        while let Some(next) = self.waiting.front() {
            let most = self
                .player
                .group
                .limits
                .need(next.prompt.len(), next.max_positions)
                .all();
            if blocks < most || !self.scheduler.has_free_slot() || !self.scheduler.has_room(next) {
                break;
            }
            blocks -= most;
            self.scheduler.submit(self.waiting.pop_front().expect("one waits"))?;
        }
        Ok(())
    }

    /// When the devices are done with a step.
    fn compute(&mut self, plan: &StepPlan) -> anyhow::Result<f64> {
        let Player { config, group, costs } = self.player;
        let parts = costs.of(plan)?;
        let fed = plan.tokens.iter().filter(|&&token| token < 0);
        let found = fed.map(|&token| self.found[(-1 - token) as usize]);
        let mut at = found.fold(self.now, f64::max);
        let hop = costs.hop(plan.rows());
        for (device, layers) in group.layers.iter().enumerate() {
            let arrives = if device > 0 { at + hop } else { at };
            at = arrives.max(self.free[device]) + parts.of_device(config, layers);
            self.free[device] = at;
        }
        for row in &plan.logits {
            self.found[row.slot] = at;
        }
        Ok(at)
    }
}
