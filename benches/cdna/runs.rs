//! Plays whole workloads: the library's scheduler decides each step, and the model gives what it takes.
//!
//! The host takes no time. A step begins on a device when that has done the step before, when its rows have come from
//! the device before, and when the tokens that it is fed have been found.

use crate::costs::Costs;
use crate::group::Group;
use crate::model::Model;
use crate::workload::{AT_ONCE, CONTEXT_LENGTH, Lengths, Workload};
use getp::batch::StepPlan;
use getp::config::ModelConfig;
use getp::kv_blocks::blocks_for;
use getp::options::Options;
use getp::request::{EndTokens, Request};
use getp::scheduler::{Ahead, Scheduler};
use std::collections::VecDeque;

/// A token that ends no answer.
const TOKEN: u32 = 7;

/// When requests start: see `main.rs`.
#[derive(Clone, Copy, PartialEq)]
enum Starts {
    Spread,
    Unplanned,
    Waves,
}

/// Plays a workload on as few devices as have room for the model, by each schedule, and prints what comes of it.
pub fn print(model: &Model<'_>, workload: &Workload) -> anyhow::Result<()> {
    let config = ModelConfig {
        seq_len: workload.seq_len(model.config),
        context_length: Some(CONTEXT_LENGTH),
        ..model.config.clone()
    };
    let model = Model {
        config: &config,
        ..*model
    };
    let group = Group::smallest(&model, &|devices| Options {
        max_batch: Some(workload.requests.min(AT_ONCE * devices).div_ceil(devices)),
        ..Options::default()
    });
    let layers: Vec<_> = group.layers.iter().map(|layers| layers.len()).collect();
    println!(
        "{}: {} requests, {} + {} tokens{}; layers {layers:?}; {} blocks of full layers, {} of windowed ones",
        workload.name,
        workload.requests,
        workload.prompt,
        workload.output,
        if workload.mixed { " in the mean" } else { "" },
        group.limits.full_blocks,
        group.limits.window_blocks,
    );
    let costs = Costs::new(&model);
    for (name, starts) in [
        ("spread", Starts::Spread),
        ("unplanned", Starts::Unplanned),
        ("waves", Starts::Waves),
    ] {
        if workload.mixed && starts == Starts::Waves {
            continue;
        }
        let steps = Run::new(&model, &group, workload)?.play(&costs, starts)?;
        let last_start = steps.iter().rposition(|step| step.starts > 0).unwrap_or(0);
        print_part(&format!("{name}, to the last start"), &steps[..=last_start]);
        print_part(&format!("{name}, whole"), &steps);
    }
    Ok(())
}

/// A step that is done.
#[derive(Clone, Copy, Default)]
struct Step {
    /// Seconds since the step before was done.
    seconds: f64,
    /// Tokens found.
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
    model: &'a Model<'a>,
    group: &'a Group,
    lengths: Vec<Lengths>,
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
    fn new(model: &'a Model<'_>, group: &'a Group, workload: &Workload) -> anyhow::Result<Self> {
        let lengths = workload.lengths(1)?;
        let prompt = |(number, lengths): (usize, &Lengths)| {
            // Behind what all prompts begin with, no two begin alike.
            let mut prompt = vec![number as u32 + 1; lengths.prompt];
            prompt[..workload.shared].fill(0);
            Request::greedy(number, prompt, workload.steps(1))
        };
        Ok(Self {
            waiting: lengths.iter().enumerate().map(prompt).collect(),
            scheduler: Scheduler::new(group.limits.clone())?,
            free: vec![0.0; group.layers.len()],
            found: vec![0.0; group.limits.max_batch],
            now: 0.0,
            lengths,
            model,
            group,
        })
    }

    /// All steps, in their order.
    fn play(mut self, costs: &Costs<'_>, starts: Starts) -> anyhow::Result<Vec<Step>> {
        let mut steps = Vec::new();
        let mut under_way = VecDeque::new();
        let (mut spare, mut answers) = (Vec::<StepPlan>::new(), Vec::new());
        loop {
            while under_way.len() < self.group.limits.depth {
                self.start(starts)?;
                let mut plan = spare.pop().unwrap_or_default();
                if !self.scheduler.plan(&mut plan) {
                    break;
                }
                self.scheduler.begin(&plan);
                let free = self.scheduler.free_blocks().full as f64;
                let held = 1.0 - free / self.group.limits.full_blocks as f64;
                under_way.push_back((self.compute(&plan, costs), held, plan));
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
            Starts::Waves => blocks = self.group.limits.full_blocks,
        }
        while let Some(next) = self.waiting.front() {
            let most = blocks_for(self.group.limits.block_tokens, next.max_positions);
            if blocks < most || !self.scheduler.has_free_slot() || !self.scheduler.has_room(next) {
                break;
            }
            blocks -= most;
            self.scheduler.submit(self.waiting.pop_front().expect("one waits"))?;
        }
        Ok(())
    }

    /// When the devices are done with a step.
    fn compute(&mut self, plan: &StepPlan, costs: &Costs<'_>) -> f64 {
        let fed = plan.tokens.iter().filter(|&&token| token < 0);
        let found = fed.map(|&token| self.found[(-1 - token) as usize]);
        let mut at = found.fold(self.now, f64::max);
        let hop = self.model.hop(plan.rows());
        for (device, seconds) in costs.of(plan, &self.group.layers).into_iter().enumerate() {
            let arrives = if device > 0 { at + hop } else { at };
            at = arrives.max(self.free[device]) + seconds;
            self.free[device] = at;
        }
        for row in &plan.logits {
            self.found[row.slot] = at;
        }
        at
    }
}
