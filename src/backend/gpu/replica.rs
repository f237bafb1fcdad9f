//! One copy of the model on one GPU, or on several, each with a stage of it; and the steps under way on them.
//!
//! Each stage computes another step at the same time. The rows between two of them go from device to device, and so do
//! tokens from the last stage to the first: the host plans steps ahead and waits for the oldest one alone.

pub mod inspect;

use super::args::StepHeader;
use super::catalogue::Elements;
use super::context::Context;
use super::driver::DevicePtr;
use super::group::hop::Hop;
use super::logits::{LogitsAt, LogitsPath, StepEnd};
use super::memory::Event;
use super::profile::StepClock;
use super::stage::{Common, LoadedStage, SizedStage, Stage};
use super::step::Plans;
use super::weights::{GpuWeights, Matrix, Vector};
use crate::batch::{Chunk, Draw, Greedy, Logits, LogitsRow, StepOutput, StepPlan, Want};
use crate::config::ModelConfig;
use crate::error::{Error, Result};
use crate::kv_blocks::KvBlocks;
use crate::memory::{self, Purpose};
use crate::options::Options;
use crate::profile::{Profile, StepTimes};
use crate::replica::{Pointers, Replica, StageReport};
use crate::report;
use crate::weights::PackReport;
use std::collections::VecDeque;
use std::ffi::c_void;
use std::mem::{ManuallyDrop, forget, take};
use std::ptr::null_mut;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Steps after which the routes of a pipeline that is profiled are looked at, which waits for all that is queued.
const STEPS_A_LOOK: usize = 64;

/// How long the devices of a group, one of which may be lost, are given for the end of what is queued on them: many
/// times what the steps under way take.
const PATIENCE: Duration = Duration::from_secs(10);

/// See the module.
pub struct GpuReplica {
    // In this order dropped: first whatever may still use memory.
    in_flight: VecDeque<InFlight>,
    /// From each stage to the next.
    hops: Vec<Hop>,
    logits: Option<Arc<LogitsPath>>,
    /// Where the rows of the step collected last are, if they can be fetched, and its turn.
    collected: Option<(Arc<LogitsPath>, usize)>,
    /// At least one, in the order of their layers.
    stages: Vec<Stage>,
    plans: ManuallyDrop<Plans>,
    /// By turn, where each of several devices has done its part of a step, its part of the hop included.
    ends: Vec<Vec<Event>>,
    /// Marks of the ends of steps, those that are not in use.
    events: Vec<Event>,
    common: Common,
    report: PackReport,
    /// The step, counted from 0, that found the token of each slot last.
    found_in: Vec<usize>,
    /// Steps so far.
    steps: usize,
}

/// A step under way.
struct InFlight {
    turn: usize,
    rows: usize,
    /// Its end, and whole rows, if they are wanted.
    end: StepEnd,
    /// Where its rows are, if tokens are drawn from them, they are scored, or the host may have to sample from them.
    path: Option<Arc<LogitsPath>>,
    draws: bool,
    scores: bool,
}

impl GpuReplica {
    /// Makes room for steps and the KV cache beside the weights, each stage's on its device.
    pub fn new(
        stages: Vec<(Arc<Context>, GpuWeights)>,
        config: &ModelConfig,
        options: &Options,
        elements: Elements,
        report: PackReport,
    ) -> Result<Self> {
        let common = Common::new(config, options, elements, stages.len());
        let several = stages.len() > 1;
        let begin = |(context, weights)| LoadedStage::new(context, weights, &common, options.profile);
        let loaded: Vec<_> = stages.into_iter().map(begin).collect::<Result<_>>()?;
        let Some(first) = loaded.first().map(|loaded| loaded.context().clone()) else {
            return Err(Error::Internal("a replica without a device".into()));
        };
        let x_bytes = 4 * common.rows * config.hidden_dim;
        let pairs = loaded.iter().zip(loaded.iter().skip(1));
        let hops = pairs.map(|(from, to)| Hop::new(&from.context().driver, &to.context().driver, x_bytes));
        let hops = hops.collect::<Result<_>>()?;
        // At most so many: what operations need beside them is counted next.
        let most = kv_blocks(&loaded, &common, options)?;
        let plans = Plans::new(
            &first.stream,
            common.capacity(most),
            common.attention(&first, most),
            common.depth,
            several,
        )?;
        let sized = |loaded| SizedStage::new(loaded, &common, most, &plans, options.profile);
        let sized: Vec<_> = loaded.into_iter().map(sized).collect::<Result<_>>()?;
        let left = kv_blocks(sized.iter().map(|sized| &sized.loaded), &common, options)?;
        let blocks = fewer(most, left);
        let stage = |sized| Stage::new(sized, &common, blocks);
        let stages: Vec<_> = sized.into_iter().map(stage).collect::<Result<_>>()?;
        let ends = || {
            stages
                .iter()
                .filter(|_| several)
                .map(|stage| Event::new(&stage.context.driver, false))
        };
        let ends = (0..common.depth).map(|_| ends().collect()).collect::<Result<_>>()?;
        let events = events(&stages, common.depth, false)?;
        let mut replica = Self {
            in_flight: VecDeque::with_capacity(common.depth),
            hops,
            logits: None,
            collected: None,
            stages,
            plans: ManuallyDrop::new(plans),
            ends,
            events,
            found_in: memory::filled(0, common.sequences, Purpose::Schedule)?,
            common,
            report,
            steps: 0,
        };
        replica.choose_one_launch()?;
        Ok(replica)
    }

    /// Whether layers of few decoding rows are one launch depends on how soon blocks see what others have written,
    /// which no property of a device tells: each stage takes what is faster in a step of one row. If the one launch
    /// fails, or finds something else, it is not used. It uses the first of the cache's blocks, which are empty yet.
    fn choose_one_launch(&mut self) -> Result<()> {
        if !self.stages.iter().any(Stage::has_one_launch) {
            return Ok(());
        }
        let plan = step_of_one(self.kv_blocks(), self.common.config.sliding_window > 0);
        let apart = self.try_steps(&plan, false)?;
        let at_once = match self.try_steps(&plan, true) {
            Ok(at_once) if at_once.found == apart.found => at_once.times,
            other => {
                let why = match other {
                    Ok(_) => "it finds another token".into(),
                    Err(error) => error.to_string(),
                };
                report::warning(format_args!("layers of few rows are not one launch: {why}"));
                while let Some(step) = self.in_flight.pop_front() {
                    step.end.synchronize()?;
                }
                Vec::new()
            }
        };
        for (i, stage) in self.stages.iter_mut().enumerate() {
            let faster = at_once
                .get(i)
                .is_some_and(|time| time.computing < apart.times[i].computing);
            stage.keep_one_launch(faster);
            stage.clock = None;
        }
        self.events = events(&self.stages, self.common.depth, false)?;
        Ok(())
    }

    /// A few steps whose layers are one launch or not.
    fn try_steps(&mut self, plan: &StepPlan, at_once: bool) -> Result<Tried> {
        /// The first of so many steps each fetch code.
        const STEPS: usize = 4;
        for stage in &mut self.stages {
            stage.try_one_launch(at_once);
        }
        let mut output = StepOutput::default();
        for _ in 0..2 {
            self.time_steps()?;
            for _ in 0..STEPS {
                self.submit(plan, Want::Tokens)?;
                self.collect(&mut output)?;
            }
        }
        let bits = |found: &Greedy| (found.token, found.logit.to_bits());
        Ok(Tried {
            times: self.step_times(),
            found: output.greedy.iter().map(bits).collect(),
        })
    }

    /// From now on steps are timed as wholes, which costs little. No step is under way.
    pub fn time_steps(&mut self) -> Result<()> {
        self.events = events(&self.stages, self.common.depth, true)?;
        for stage in &mut self.stages {
            stage.clock = Some(StepClock::default());
        }
        Ok(())
    }

    /// Times of the steps since [`GpuReplica::time_steps`], one a stage; none before.
    pub fn step_times(&self) -> Vec<StepTimes> {
        let clocks = self.stages.iter().filter_map(|stage| stage.clock.as_ref());
        clocks.map(|clock| clock.times).collect()
    }

    fn first(&self) -> &Stage {
        &self.stages[0]
    }

    /// The one that gives logits.
    fn last(&self) -> &Stage {
        &self.stages[self.stages.len() - 1]
    }

    fn too_many(&self) -> Error {
        Error::Internal(format!("more than {} steps under way", self.common.depth))
    }

    /// What the step of this turn, which is done, found.
    fn greedy_of(&self, turn: usize, rows: usize) -> impl Iterator<Item = Greedy> {
        // SAFETY: the step that wrote here is done, and the next of its turn has not been submitted.
        let found = unsafe { self.last().ops.greedy(turn, rows) };
        found.iter().map(|row| Greedy {
            token: row.token,
            logit: row.logit,
        })
    }

    /// Queues a step on all stages, the plan being written.
    fn queue(&mut self, plan: &StepPlan, header: &StepHeader, want: Want, turn: usize) -> Result<()> {
        self.await_tokens(plan)?;
        let logits = match &self.logits {
            Some(path) if self.last().whole_rows(plan, want) => path.at(turn),
            _ => LogitsAt::default(),
        };
        let x_bytes = 4 * plan.rows() * self.common.config.hidden_dim;
        for i in 0..self.stages.len() {
            self.stages[i].queue(plan, header, want, turn, logits)?;
            let stage = &self.stages[i];
            let (stream, end) = (&stage.context.stream, self.ends[turn].get(i));
            match (self.stages.get(i + 1), self.hops.get(i), end) {
                (Some(next), Some(hop), Some(end)) => {
                    let (x, next_x) = (stage.activations.x.x.at(), next.activations.x.x.at());
                    hop.queue((stream, x), (&next.context.stream, next_x), x_bytes, end)?;
                }
                (_, _, end) => end.map_or(Ok(()), |end| end.record(stream))?,
            }
        }
        let found = plan.logits.iter().filter(|row| row.sample);
        found.for_each(|row| self.found_in[row.slot] = self.steps);
        Ok(())
    }

    /// Lets the first stage wait for the tokens that the plan leaves to the devices: for the last of the steps under
    /// way that find them. On a single device steps follow each other anyway.
    fn await_tokens(&self, plan: &StepPlan) -> Result<()> {
        let slots = plan
            .tokens
            .iter()
            .filter(|&&token| token < 0)
            .map(|&token| (-1 - token) as usize);
        let last_step = slots.filter_map(|slot| self.found_in.get(slot)).max();
        let under_way = |&&step: &&usize| step + self.in_flight.len() >= self.steps;
        let Some(step) = last_step.filter(under_way) else {
            return Ok(());
        };
        match self.ends[step % self.common.depth].last() {
            Some(end) => self.first().context.stream.wait(end),
            None => Ok(()),
        }
    }

    /// Marks the end of a step, and sends whole rows of logits to the host behind it if they are wanted.
    fn end_step(&mut self, rows: usize, want: Want, turn: usize) -> Result<StepEnd> {
        let done = self.events.pop().ok_or_else(|| self.too_many())?;
        done.record(&self.last().context.stream)?;
        match (want, &self.logits) {
            (Want::Logits, Some(path)) => path.send(turn, rows, done),
            _ => Ok(StepEnd::without_rows(done)),
        }
    }

    /// Memory for whole rows of logits, made when they are first needed: greedy runs need none. It is for as many rows
    /// as a step may have, for which the KV cache leaves room. If it grew with the steps, the smaller one of a step
    /// under way would be there beside it.
    fn need_logits(&mut self) -> Result<()> {
        if self.logits.is_none() {
            let (driver, common) = (&self.last().context.driver, &self.common);
            let path = LogitsPath::new(driver, common.depth, common.logits_rows, common.config.vocab_size)?;
            self.logits = Some(Arc::new(path));
            self.stages.last_mut().into_iter().for_each(Stage::has_logits);
        }
        Ok(())
    }

    /// Reports what went wrong on any of the devices in the step of this turn, which is done on the last one: a later
    /// stage does not notice that rows did not come.
    fn check_ends(&self, turn: usize) -> Result<()> {
        self.ends[turn].iter().try_for_each(Event::synchronize)
    }

    /// Waits for the steps under way, in their order and that of the stages: so a lost device is found before anything
    /// is waited for that waits for it, which may never end.
    fn await_in_flight(&self) -> Result<()> {
        self.in_flight.iter().try_for_each(|step| {
            self.check_ends(step.turn)?;
            step.end.synchronize()
        })
    }

    /// Waits until the devices have done all that is queued, which uses the replica's memory. False if one of a group
    /// does not come to an end after another is lost. A lost device itself has nothing under way.
    fn comes_to_an_end(&self) -> bool {
        if let [stage] = &self.stages[..] {
            let _ = stage.context.stream.synchronize();
            return true;
        }
        let stages = self.stages.iter().map(|stage| &stage.context.stream);
        let logits = self.logits.iter().map(|path| path.stream());
        let mut streams = stages.chain(self.hops.iter().flat_map(Hop::streams)).chain(logits);
        let begin = Instant::now();
        streams.all(|stream| {
            let limit = PATIENCE.saturating_sub(begin.elapsed());
            stream.synchronize_within(limit).unwrap_or(true)
        })
    }

    /// Counts the oldest step where steps are timed; `done` marks the end of its copies.
    fn count_times(&mut self, done: &Event) -> Result<()> {
        let last = self.stages.len() - 1;
        let is_profiled = self.stages.iter().any(Stage::is_profiled);
        let look = is_profiled && (last == 0 || self.steps.is_multiple_of(STEPS_A_LOOK));
        if look && last > 0 {
            self.await_in_flight()?;
        }
        let mut stages = self.stages.iter_mut().enumerate();
        stages.try_for_each(|(i, stage)| stage.count_times((i == last).then_some(done), look))
    }
}

/// Blocks that the KV caches of all stages have room for: a sequence has the same in each.
fn kv_blocks<'a>(
    stages: impl IntoIterator<Item = &'a LoadedStage>,
    common: &Common,
    options: &Options,
) -> Result<KvBlocks> {
    let rooms = stages.into_iter().map(|stage| stage.kv_blocks(common, options));
    let least = rooms.reduce(|a, b| Ok(fewer(a?, b?)));
    least.unwrap_or_else(|| Err(Error::Internal("a replica without a device".into())))
}

/// What a few steps took and found.
struct Tried {
    /// One a stage.
    times: Vec<StepTimes>,
    /// Of the last one: the token and its logit's bits.
    found: Vec<(u32, u32)>,
}

/// A step of one decoding row, with some keys before it, all in the first block, and where layers have a window in the
/// second one. There are two if layers are of both kinds.
fn step_of_one(blocks: KvBlocks, has_windows: bool) -> StepPlan {
    let position = blocks.tokens / 2;
    let windowed = usize::from(has_windows);
    let tables = [0, 1.min(blocks.count as u32 - 1)];
    let row = LogitsRow {
        row: 0,
        slot: 0,
        position,
        sample: true,
        draw: Draw::GREEDY,
        score: None,
        second_coin: None,
    };
    StepPlan {
        tokens: vec![0],
        positions: vec![position as u32],
        chunks: vec![Chunk {
            slot: 0,
            first_row: 0,
            rows: 1,
            first_position: position,
            full: 0..1,
            window: 1..1 + windowed,
        }],
        decode_chunks: 1,
        tables: tables[..=windowed].to_vec(),
        logits: vec![row],
        drawable: None,
    }
}

fn fewer(a: KvBlocks, b: KvBlocks) -> KvBlocks {
    if b.count < a.count { b } else { a }
}

/// An event a step under way, on the last stage.
fn events(stages: &[Stage], depth: usize, timing: bool) -> Result<Vec<Event>> {
    let last = &stages[stages.len() - 1].context.driver;
    (0..depth).map(|_| Event::new(last, timing)).collect()
}

impl Replica for GpuReplica {
    fn describe(&self) -> String {
        let numbers = &self.common.numbers;
        let precision = if numbers.exact { "exact" } else { "fast" };
        let format = match numbers.elements {
            Elements::Bf16 => "BF16",
            _ => "FP16",
        };
        let device = self.first().context.driver.device();
        let ordinals = self
            .stages
            .iter()
            .map(|stage| stage.context.driver.device().ordinal.to_string());
        let ordinals = ordinals.collect::<Vec<_>>().join("+");
        format!(
            "{}:{ordinals} {} ({}), {precision} in {format}",
            device.runtime, device.name, device.arch
        )
    }

    fn pack_report(&self) -> &PackReport {
        &self.report
    }

    fn kv_blocks(&self) -> KvBlocks {
        self.first().kv.blocks()
    }

    fn kv_bytes(&self) -> u64 {
        self.stages.iter().map(|stage| stage.kv.bytes() as u64).sum()
    }

    fn max_step_tokens(&self) -> usize {
        self.common.rows
    }

    fn chunk_tokens(&self) -> usize {
        self.common.chunk_tokens
    }

    fn max_logits_rows(&self) -> usize {
        self.common.logits_rows
    }

    fn max_positions(&self) -> usize {
        self.common.capacity(self.kv_blocks()).positions
    }

    fn depth(&self) -> usize {
        self.common.depth
    }

    fn draws(&self) -> bool {
        true
    }

    fn scores(&self) -> bool {
        true
    }

    fn decodes_as_prompts(&self) -> bool {
        self.common.numbers.exact
    }

    fn submit(&mut self, plan: &StepPlan, want: Want) -> Result<()> {
        // The step of this turn that is under way still reads what would be written.
        if self.in_flight.len() == self.common.depth {
            return Err(self.too_many());
        }
        let turn = self.steps % self.common.depth;
        if self.last().whole_rows(plan, want) {
            self.need_logits()?;
        }
        let header = self.plans.write(plan, turn)?;
        self.queue(plan, &header, want, turn)?;
        let end = self.end_step(plan.logits.len(), want, turn)?;
        let (draws, scores) = (want.draws(plan), want.scores(plan));
        self.in_flight.push_back(InFlight {
            turn,
            rows: plan.logits.len(),
            end,
            path: self
                .logits
                .clone()
                .filter(|_| draws || scores || want.keeps_logits(plan)),
            draws,
            scores,
        });
        self.steps += 1;
        Ok(())
    }

    fn collect(&mut self, output: &mut StepOutput) -> Result<()> {
        let step = self
            .in_flight
            .pop_front()
            .ok_or_else(|| Error::Internal("no step is under way".into()))?;
        self.check_ends(step.turn)?;
        let (done, rows) = step.end.wait()?;
        self.stages.iter().try_for_each(Stage::check_waits)?;
        self.count_times(&done)?;
        self.events.push(done);
        output.greedy.clear();
        memory::extend(&mut output.greedy, self.greedy_of(step.turn, step.rows), Purpose::Step)?;
        match rows {
            Some(rows) => output.logits = Logits::Lent(rows),
            None => output.logits.clear(),
        }
        output.drawn.clear();
        output.scores.clear();
        if let Some(path) = &step.path {
            if step.draws {
                memory::extend(&mut output.drawn, path.drawn(step.turn, step.rows), Purpose::Step)?;
            }
            if step.scores {
                memory::extend(&mut output.scores, path.scores(step.turn, step.rows), Purpose::Step)?;
            }
        }
        self.collected = step.path.map(|path| (path, step.turn));
        Ok(())
    }

    fn fetch(&mut self, rows: &[usize], output: &mut StepOutput) -> Result<()> {
        let collected = self.collected.as_ref();
        let (path, turn) = collected.ok_or_else(|| Error::Internal("the step has left no rows of logits".into()))?;
        // The rows' copies come behind these.
        if self.in_flight.iter().any(|step| step.end.has_rows()) {
            self.await_in_flight()?;
        }
        output.logits = Logits::Lent(path.fetch(*turn, rows)?);
        Ok(())
    }

    fn profile(&self) -> Option<&Profile> {
        match &self.stages[..] {
            [stage] => stage.profile(),
            _ => None,
        }
    }

    fn stages(&self) -> Vec<StageReport<'_>> {
        match &self.stages[..] {
            [_] => Vec::new(),
            stages => stages.iter().map(Stage::report).collect(),
        }
    }

    fn pointers(&self) -> Pointers {
        let address = |at: DevicePtr| at.0 as *mut c_void;
        let first = self.first();
        let (x, a) = (&first.activations.x.x, &first.activations.scratch);
        let mut state = [null_mut(); 21];
        for (field, at) in [
            (0, x.at()),
            (1, a.t.at()),
            (2, a.attention.at()),
            (7, a.h.at()),
            (12, a.qkv.at()),
            (18, first.kv.at()),
        ] {
            state[field] = address(at);
        }
        let of = |stage: &Stage| {
            let weights = &stage.weights;
            weights.pointers(|m: &Matrix| address(m.bytes.at()), |v: &Vector| address(v.at()))
        };
        // What the first stage lacks, the last one has.
        let (mut weights, last) = (of(first), of(self.last()));
        for (pointer, last) in weights.iter_mut().zip(last) {
            if pointer.is_null() {
                *pointer = last;
            }
        }
        Pointers { weights, state }
    }
}

impl Drop for GpuReplica {
    fn drop(&mut self) {
        if self.comes_to_an_end() {
            // SAFETY: nothing uses it from here on.
            unsafe { ManuallyDrop::drop(&mut self.plans) };
            return;
        }
        report::warning(format_args!(
            "{}: a device waits for one that is lost; their memory stays in use until the program ends",
            self.describe()
        ));
        // Freeing would wait, too.
        forget((take(&mut self.in_flight), take(&mut self.hops)));
        forget((self.logits.take(), self.collected.take()));
        forget((take(&mut self.stages), take(&mut self.ends), take(&mut self.events)));
    }
}
