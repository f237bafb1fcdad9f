//! Steps of few decoding rows whose layers are one launch (`kernels/cdna/one_launch.h`,
//! `kernels/ampere/one_launch.h`), where the device has such launches and is faster so.

use super::super::args::{KV_PAGE, LayerCommand, OneLaunchArgs};
use super::super::attention_runs::is_one_job_a_block;
use super::super::catalogue::{Kernel, Workers};
use super::super::context::Context;
use super::super::launch::Launch;
use super::super::layout::TypedPtr;
use super::super::logits::LogitsAt;
use super::super::memory::{DeviceBuffer, PinnedBuffer};
use super::super::ops::{GpuOps, handed_bytes};
use super::super::shapes::StepShape;
use super::super::weights::GpuWeights;
use super::{Common, Stage};
use crate::batch::{Chunk, StepPlan, Want};
use crate::error::{Error, GpuFault, Result};
use crate::memory::{Purpose, lacking};
use crate::model::{enter, forward_layers, leave};
use crate::ops::Ops;
use std::collections::HashMap;

/// A byte of memory that nothing has been handed on through.
const WIPED: u8 = 0xff;

/// The device's clock, in a second.
const TICKS: i32 = 100_000_000;
/// How long blocks wait for each other while it is tried whether they can, and afterwards, when other processes may use
/// the device as well; no longer than half of the clock's low word.
const TRIED_SECONDS: i32 = 2;
const SECONDS: i32 = 20;

/// See the module.
pub struct OneLaunch {
    /// Whether steps are launched so.
    chosen: bool,
    launch: Launch,
    kv_heads: usize,
    /// Of layers that have one.
    window: Option<usize>,
    /// Steps launched so.
    steps: usize,
    /// Memory that values are handed on through: a step uses one and wipes the other.
    memory: [DeviceBuffer; 2],
    /// The bytes of each that the step which used it last may have written.
    used: [usize; 2],
    /// The one that the next step uses.
    next: usize,
    /// Set by blocks that have waited for a value in vain.
    in_vain: PinnedBuffer<u32>,
    /// How long they wait, in units of 10 ns.
    patience: i32,
    /// The commands of a shape's rows and items of attention, for each memory; `None`: it has others.
    lists: HashMap<(usize, usize), Option<[DeviceBuffer<LayerCommand>; 2]>>,
}

impl OneLaunch {
    /// If the device has it for this model.
    pub fn new(context: &Context, ops: &GpuOps, weights: &GpuWeights, common: &Common) -> Result<Option<Self>> {
        let experts = weights.layers.first().and_then(|layer| layer.mlp1.form.packed());
        let Some(kernel) = ops.one_launch(experts) else {
            return Ok(None);
        };
        let blocks = context.blocks_together(kernel)?;
        let rows = most_rows(kernel);
        if blocks < rows.max(common.config.experts_per_token) {
            return Ok(None);
        }
        let bytes = handed_bytes(&common.config, weights.layers.len(), rows);
        let wiped = || -> Result<DeviceBuffer> {
            let buffer = DeviceBuffer::new(&context.driver, bytes)?;
            // SAFETY: the range is the whole buffer, which lives until the stream has been waited for.
            unsafe { context.driver.fill(buffer.at(), WIPED, bytes, context.stream.handle) }?;
            context.stream.synchronize()?;
            Ok(buffer)
        };
        Ok(Some(Self {
            chosen: false,
            launch: Launch::new(kernel, blocks),
            kv_heads: common.config.n_kv_heads,
            window: Some(common.config.sliding_window).filter(|&window| window > 0),
            steps: 0,
            memory: [wiped()?, wiped()?],
            used: [0; 2],
            next: 0,
            in_vain: PinnedBuffer::zeroed(&context.driver, 1)?,
            patience: TRIED_SECONDS * TICKS,
            lists: HashMap::new(),
        }))
    }

    /// Whether a step is one of few decoding rows, each of which writes a page that no other reads.
    fn takes(&self, plan: &StepPlan, shape: &StepShape) -> bool {
        let few = shape.prefill_tiles == 0 && shape.decode_items > 0 && self.launch.kernel.holds(shape.rows);
        self.chosen && few && self.attends(plan) && !newest_is_shared(plan)
    }

    /// Whether the blocks do a step's attention in one go, where each has a team for one job.
    fn attends(&self, plan: &StepPlan) -> bool {
        let Launch { kernel, blocks, .. } = self.launch;
        let in_one_go = |chunk: &Chunk| {
            let end = chunk.first_position + 1;
            let of_window = self.window.map(|window| end.saturating_sub(window));
            let mut firsts = std::iter::once(0).chain(of_window);
            firsts.all(|first| is_one_job_a_block(first, end - first, self.kv_heads, blocks))
        };
        kernel.workers != Workers::Team || plan.chunks.iter().all(in_one_go)
    }

    /// What the next step is launched with, whose commands lie in these lists.
    fn args(&mut self, lists: &[TypedPtr<LayerCommand>; 2], count: usize, bytes: usize) -> OneLaunchArgs {
        const PIECE: usize = 16;
        let (this, other) = (self.next, 1 - self.next);
        let pieces = std::mem::replace(&mut self.used[other], 0) / PIECE;
        self.used[this] = bytes;
        self.next = other;
        OneLaunchArgs {
            commands: lists[this],
            wiped: self.memory[other].values(),
            in_vain: self.in_vain.values(),
            count: count as i32,
            pieces: pieces as i32,
            patience: self.patience,
            reserved: 0,
        }
    }
}

fn most_rows(kernel: &Kernel) -> usize {
    kernel.most_rows.unwrap_or(1)
}

/// Whether the page that a row writes is another's, too: attention takes only a row's own newest key from the step.
fn newest_is_shared(plan: &StepPlan) -> bool {
    let page_of = |chunk: &Chunk| {
        let table = plan.tables.get(chunk.full.clone())?;
        table.get(chunk.first_position / KV_PAGE).copied()
    };
    plan.chunks.iter().enumerate().any(|(i, chunk)| {
        let Some(newest) = page_of(chunk) else {
            return true;
        };
        let mut others = plan.chunks.iter().enumerate().filter(|(j, _)| *j != i);
        others.any(|(_, other)| plan.tables[other.full.clone()].contains(&newest))
    })
}

impl Stage {
    /// Whether steps of few decoding rows can be launched so.
    pub fn has_one_launch(&self) -> bool {
        self.one_launch.is_some()
    }

    /// From now on they are, if they can be, or not.
    pub fn try_one_launch(&mut self, at_once: bool) {
        if let Some(one) = &mut self.one_launch {
            one.chosen = at_once;
        }
    }

    /// From now on they are, if they can be, or never.
    pub fn keep_one_launch(&mut self, keep: bool) {
        self.try_one_launch(keep);
        self.one_launch.take_if(|_| !keep);
        if let Some(one) = &mut self.one_launch {
            one.patience = SECONDS * TICKS;
        }
    }

    /// From now on they are, if they can be, also where that has been given up for being slower.
    pub fn insist_on_one_launch(&mut self, common: &Common) -> Result<()> {
        if self.one_launch.is_none() {
            self.one_launch = OneLaunch::new(&self.context, &self.ops, &self.weights, common)?;
        }
        self.keep_one_launch(true);
        Ok(())
    }

    /// Steps that were; none if they cannot be.
    pub fn steps_in_one_launch(&self) -> Option<usize> {
        self.one_launch.as_ref().map(|one| one.steps)
    }

    /// Fails if blocks of a step that has been queued have waited for each other in vain.
    pub fn check_waits(&self) -> Result<()> {
        let in_vain = |one: &OneLaunch| {
            // SAFETY: a word that the device only ever sets.
            unsafe { one.in_vain.host().cast::<u32>().read_volatile() != 0 }
        };
        if !self.one_launch.as_ref().is_some_and(in_vain) {
            return Ok(());
        }
        let name = self.context.name();
        Err(Error::Internal(format!(
            "{name}: blocks of one launch have waited for each other in vain"
        )))
    }

    /// Queues a step whose layers are one launch. Whether it has been done.
    pub(super) fn launch_at_once(
        &mut self,
        plan: &StepPlan,
        shape: StepShape,
        want: Want,
        logits: LogitsAt,
    ) -> Result<bool> {
        let Some(mut one) = self.one_launch.take_if(|one| one.takes(plan, &shape)) else {
            return Ok(false);
        };
        let queued = self.queue_at_once(&mut one, plan, shape, want, logits);
        self.one_launch = Some(one);
        queued
    }

    fn queue_at_once(
        &mut self,
        one: &mut OneLaunch,
        plan: &StepPlan,
        shape: StepShape,
        want: Want,
        logits: LogitsAt,
    ) -> Result<bool> {
        let of = (shape.rows, shape.decode_items);
        if !one.lists.contains_key(&of) {
            let lists = match self.lists(one, plan, shape, logits) {
                // Then the layers' kernels are launched apart.
                Err(Error::Gpu {
                    fault: GpuFault::OutOfMemory,
                    ..
                }) => None,
                lists => lists?,
            };
            let more = one.lists.try_reserve(1);
            more.map_err(|_| lacking::<[DeviceBuffer; 2]>(one.lists.len() + 1, Purpose::Step))?;
            one.lists.insert(of, lists);
        }
        let Some(lists) = &one.lists[&of] else {
            return Ok(false);
        };
        let lists = [lists[0].values(), lists[1].values()];
        self.begin(plan, shape, logits)?;
        let Self {
            ops,
            weights,
            activations,
            ..
        } = self;
        let stage = weights.whole();
        let x = enter(ops, &stage, plan, &mut activations.x)?;
        let layers = stage.layers.len();
        let bytes = handed_bytes(ops.config(), layers, shape.rows);
        let args = one.args(&lists, layers * GpuOps::COMMANDS, bytes);
        let x = ops.layers_at_once(x, one.launch, &args)?;
        one.steps += 1;
        leave(ops, &stage, plan, x, &mut activations.scratch, want)?;
        Ok(true)
    }

    /// The commands of a shape, for each memory.
    fn lists(
        &mut self,
        one: &OneLaunch,
        plan: &StepPlan,
        shape: StepShape,
        logits: LogitsAt,
    ) -> Result<Option<[DeviceBuffer<LayerCommand>; 2]>> {
        self.ops.begin(shape, plan, logits);
        let Self {
            ops,
            weights,
            activations,
            kv,
            context,
            ..
        } = self;
        let stage = weights.whole();
        let mut list = |at| -> Result<Option<DeviceBuffer<LayerCommand>>> {
            let commands = ops.commands(one.launch.kernel, at, |ops| {
                let x = ops.resume(plan, &mut activations.x)?;
                forward_layers(ops, &stage, plan, x, &mut activations.scratch, kv).map(drop)
            })?;
            commands
                .map(|commands| DeviceBuffer::of(&context.stream, &commands))
                .transpose()
        };
        let [first, second] = [&one.memory[0], &one.memory[1]].map(|memory| list(memory.at()));
        Ok(first?.zip(second?).map(|(first, second)| [first, second]))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A plan of a decoding row for each position, with these tables of full layers.
    fn plan(rows: &[(usize, &[u32])]) -> StepPlan {
        let mut plan = StepPlan::default();
        for (row, (position, table)) in rows.iter().enumerate() {
            let first = plan.tables.len();
            plan.tables.extend_from_slice(table);
            plan.chunks.push(Chunk {
                slot: row,
                first_row: row,
                rows: 1,
                first_position: *position,
                full: first..plan.tables.len(),
                window: 0..0,
            });
        }
        plan
    }

    #[test]
    fn only_a_row_s_own_newest_page_is_read() {
        // The first page is shared, the second one of each its own.
        assert!(!newest_is_shared(&plan(&[(70, &[1, 2]), (127, &[1, 3])])));
        // The first row is about to fill a page that the second one has.
        assert!(newest_is_shared(&plan(&[(63, &[1]), (127, &[1, 3])])));
        assert!(newest_is_shared(&plan(&[(70, &[1])])), "there is no such page");
    }
}
