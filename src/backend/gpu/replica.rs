//! One copy of the model on one GPU, and the steps under way on it.

mod graphs;
pub mod inspect;

use super::args::{self, KV_PAGE, StepHeader};
use super::attention_plan::max_partial_slots;
use super::ceilings::Ceilings;
use super::context::Context;
use super::driver::DevicePtr;
use super::kv::{KvCache, page_bytes};
use super::logits::{Coming, LogitsAt, LogitsPath};
use super::memory::{DeviceBuffer, Event};
use super::ops::{Buffer, GpuOps, Numbers, ResidualMemory, Sizes, StepShape, slots};
use super::profile::{StepClock, Timeline};
use super::step::{AttentionShape, Capacity, StepMemory};
use super::weights::{GpuWeights, Matrix};
use crate::batch::{Greedy, Logits, StepOutput, StepPlan, Want};
use crate::config::ModelConfig;
use crate::error::{Error, Result};
use crate::kv_blocks::{KvBlocks, block_bytes};
use crate::memory::{self, Purpose};
use crate::model::{Activations, Scratch, forward};
use crate::options::{Options, Precision, StepLimits};
use crate::profile::{Profile, Roof};
use crate::replica::{Pointers, Replica};
use crate::weights::PackReport;
use graphs::Graphs;
use std::collections::VecDeque;
use std::ffi::c_void;
use std::ptr::null_mut;
use std::sync::Arc;

/// Steps under way at once: one runs while the host plans the next.
const DEPTH: usize = 2;
/// Rows of one sequence in a step: more would only widen the rings of windowed layers.
const CHUNK_TOKENS: usize = 512;
/// The most positions a sequence can have: gpt-oss's context.
const MAX_POSITIONS: usize = 131_072;
/// Memory left to the runtime: code, graphs, its own buffers.
const RESERVED_BYTES: u64 = 1 << 30;

/// See the module.
pub struct GpuReplica {
    // In this order dropped: first whatever may still use memory.
    in_flight: VecDeque<InFlight>,
    graphs: Graphs,
    logits: Option<Arc<LogitsPath>>,
    /// Where the rows of the step collected last are, if tokens were drawn from them, and its turn.
    collected: Option<(Arc<LogitsPath>, usize)>,
    ops: GpuOps,
    memory: StepMemory,
    activations: Activations<ResidualMemory, Buffer>,
    kv: KvCache,
    weights: GpuWeights,
    events: Vec<Event>,
    context: Arc<Context>,
    config: ModelConfig,
    numbers: Numbers,
    report: PackReport,
    capacity: Capacity,
    /// Times steps as wholes, if asked to.
    clock: Option<StepClock>,
    /// Steps so far.
    steps: usize,
}

/// A step under way.
struct InFlight {
    turn: usize,
    rows: usize,
    /// Its end, and whole rows, if they are wanted.
    coming: Coming,
    /// Where its rows are, if tokens are drawn from them.
    drawn_from: Option<Arc<LogitsPath>>,
}

impl GpuReplica {
    /// Makes room for steps and the KV cache beside the weights.
    pub fn new(
        context: Arc<Context>,
        config: &ModelConfig,
        options: &Options,
        weights: GpuWeights,
        format: args::Format,
        report: PackReport,
    ) -> Result<Self> {
        let numbers = numbers(options, format);
        // Before the KV cache takes what memory there is.
        let roof = if options.profile { roof(&context)? } else { None };
        let limits = options.step_limits(StepLimits::GPU);
        let (rows, logits_rows) = (limits.step_tokens, limits.max_batch);
        let activations = activations(&context, config, &numbers, rows)?;
        let chunk_tokens = rows.min(CHUNK_TOKENS);
        let logits_bytes = logits_bytes(config, logits_rows);
        let blocks = kv_blocks(&context, config, options, &numbers, chunk_tokens, logits_bytes)?;
        let kv = KvCache::new(&context, config, weights.range(), numbers.kv, blocks)?;
        let capacity = Capacity {
            rows,
            sequences: limits.max_batch,
            logits_rows,
            pages: blocks.full + blocks.window,
            positions: MAX_POSITIONS.min((blocks.full * KV_PAGE).max(config.seq_len)),
            vocab: config.vocab_size,
        };
        let attention = AttentionShape {
            kv_heads: config.n_kv_heads,
            window: config.sliding_window,
            processors: context.target.attention_processors(),
            prefill_rows: context.target.prefill_rows(),
        };
        let memory = StepMemory::new(&context.stream, capacity, attention, DEPTH)?;
        let keys = blocks.full * KV_PAGE + limits.max_batch * config.sliding_window;
        let sizes = Sizes {
            rows,
            logits_rows,
            positions: capacity.positions,
            partial_slots: max_partial_slots(keys, config.n_kv_heads, attention.processors),
            turns: DEPTH,
        };
        let unembedding = weights.head.as_ref().map(|head| &head.unembedding);
        let mut ops = GpuOps::new(&context, config, numbers, memory.step(), sizes, unembedding)?;
        ops.timeline = options.profile.then(|| Timeline::new(roof));
        let events = events(&context, false)?;
        let mut replica = Self {
            in_flight: VecDeque::with_capacity(DEPTH),
            graphs: Graphs::default(),
            logits: None,
            collected: None,
            ops,
            memory,
            activations,
            kv,
            weights,
            events,
            config: config.clone(),
            context,
            numbers,
            report,
            capacity,
            clock: None,
            steps: 0,
        };
        replica.prepare()?;
        replica.context.stream.synchronize()?;
        Ok(replica)
    }

    /// Queues a step's kernels, between two events if steps are timed.
    fn queue_timed(&mut self, plan: &StepPlan, shape: StepShape, want: Want, turn: usize) -> Result<()> {
        let Some(mut clock) = self.clock.take() else {
            return self.queue(plan, shape, want, turn);
        };
        let context = self.context.clone();
        let queued = clock.time(&context, || self.queue(plan, shape, want, turn));
        self.clock = Some(clock);
        queued
    }

    /// Whether a step leaves whole rows of logits on the device.
    fn whole_rows(&self, want: Want) -> bool {
        let unembedding = self.weights.head.as_ref().map(|head| &head.unembedding);
        unembedding.is_some_and(|w| want != Want::Greedy || w.is_wire())
    }

    /// What the step of this turn, which is done, found.
    fn greedy_of(&self, turn: usize, rows: usize) -> impl Iterator<Item = Greedy> {
        // SAFETY: the step that wrote here is done, and the next of its turn has not been submitted.
        let found = unsafe { self.ops.greedy(turn, rows) };
        found.iter().map(|row| Greedy {
            token: row.token,
            logit: row.logit,
        })
    }

    fn run(&mut self, plan: &StepPlan, shape: StepShape, want: Want, turn: usize) -> Result<()> {
        let logits = match &self.logits {
            Some(path) if shape.logits => path.at(turn),
            _ => LogitsAt::default(),
        };
        let Self {
            ops,
            memory,
            weights,
            activations,
            kv,
            ..
        } = self;
        ops.begin(shape, plan, logits);
        ops.upload(&memory.upload_args())?;
        let mut later = StepOutput::default(); // what it gives is read when the step is collected
        forward(ops, &weights.whole(), plan, activations, kv, want, &mut later)
    }

    /// Marks the end of a step, and sends whole rows of logits to the host behind it if they are wanted.
    fn end_step(&mut self, rows: usize, want: Want, turn: usize, done: Event) -> Result<Coming> {
        done.record(&self.context.stream)?;
        match (want, &self.logits) {
            (Want::Logits, Some(path)) => path.send(turn, rows, done),
            _ => Ok(Coming::without_rows(done)),
        }
    }

    /// Memory for whole rows of logits, made when they are first needed and again when they are more: greedy runs need
    /// none.
    fn need_logits(&mut self, rows: usize) -> Result<()> {
        if self.logits.as_ref().is_some_and(|path| path.rows() >= rows) {
            return Ok(());
        }
        // Graphs have the old addresses.
        self.context.stream.synchronize()?;
        self.graphs.forget_logits();
        self.logits = None; // a step under way that draws keeps its own
        let rows = rows.next_power_of_two().min(self.capacity.logits_rows);
        let path = LogitsPath::new(&self.context.driver, DEPTH, rows, self.config.vocab_size)?;
        self.logits = Some(Arc::new(path));
        Ok(())
    }
}

fn numbers(options: &Options, format: args::Format) -> Numbers {
    let exact = options.precision == Some(Precision::Exact);
    let terms = match (exact, format) {
        (false, _) => 1,
        (true, args::Format::Bf16) => 3,
        (true, _) => 2,
    };
    Numbers {
        format,
        kv: if exact { args::Format::F32 } else { format },
        terms,
        exact,
    }
}

fn too_many() -> Error {
    Error::Internal(format!("more than {DEPTH} steps under way"))
}

/// An event a step under way.
fn events(context: &Context, timing: bool) -> Result<Vec<Event>> {
    (0..DEPTH).map(|_| Event::new(&context.driver, timing)).collect()
}

/// The device's peak rates. An emulated device has none.
fn roof(context: &Context) -> Result<Option<Roof>> {
    if context.driver.device().runtime == "simt" {
        return Ok(None);
    }
    Ceilings::measure(context).map(|ceilings| {
        Some(Roof {
            bytes_per_s: ceilings.copy_bytes_per_s,
            flops_per_s: ceilings.matrix_flops_per_s,
        })
    })
}

fn activations(
    context: &Context,
    config: &ModelConfig,
    numbers: &Numbers,
    rows: usize,
) -> Result<Activations<ResidualMemory, Buffer>> {
    let tiled = |rows, width| Buffer::tiled(context, rows, width, numbers.terms);
    Ok(Activations {
        x: ResidualMemory::new(context, config, rows, numbers)?,
        scratch: Scratch {
            t: tiled(rows, config.hidden_dim)?,
            qkv: Buffer::plain(context, rows, config.qkv_dim())?,
            attention: tiled(rows, config.q_dim())?,
            h: tiled(slots(config, rows), config.intermediate_dim)?,
        },
    })
}

/// Device memory that whole rows of logits may ask for in a later run, which draws.
fn logits_bytes(config: &ModelConfig, logits_rows: usize) -> u64 {
    (DEPTH * logits_rows * config.vocab_size * 4) as u64
}

/// Blocks for as many sequences of the checkpoint's length as may run at once and free memory allows.
fn kv_blocks(
    context: &Context,
    config: &ModelConfig,
    options: &Options,
    numbers: &Numbers,
    chunk_tokens: usize,
    logits_bytes: u64,
) -> Result<KvBlocks> {
    let bytes = options.kv_bytes(|| {
        let memory = context.driver.memory()?;
        let reserved = RESERVED_BYTES.min(memory.total / 16) + logits_bytes;
        Ok(memory.free.saturating_sub(reserved) as usize)
    })?;
    Ok(KvBlocks::within(
        config,
        KV_PAGE,
        chunk_tokens,
        block_bytes(
            config,
            &(0..config.n_layers),
            page_bytes(config, numbers.kv, &context.target),
        ),
        bytes,
        options.step_limits(StepLimits::GPU).max_batch,
        options.longest_sequence(config),
    ))
}

impl Replica for GpuReplica {
    fn describe(&self) -> String {
        let device = self.context.driver.device();
        let precision = if self.numbers.exact { "exact" } else { "fast" };
        let format = match self.numbers.format {
            args::Format::Bf16 => "BF16",
            _ => "FP16",
        };
        format!(
            "{}:{} {} ({}), {precision} in {format}",
            device.runtime, device.ordinal, device.name, device.arch
        )
    }

    fn pack_report(&self) -> &PackReport {
        &self.report
    }

    fn kv_blocks(&self) -> KvBlocks {
        self.kv.blocks()
    }

    fn kv_bytes(&self) -> u64 {
        self.kv.bytes() as u64
    }

    fn max_step_tokens(&self) -> usize {
        self.capacity.rows
    }

    fn chunk_tokens(&self) -> usize {
        self.capacity.rows.min(CHUNK_TOKENS)
    }

    fn max_logits_rows(&self) -> usize {
        self.capacity.logits_rows
    }

    fn max_positions(&self) -> usize {
        self.capacity.positions
    }

    fn depth(&self) -> usize {
        DEPTH
    }

    fn draws(&self) -> bool {
        true
    }

    fn submit(&mut self, plan: &StepPlan, want: Want) -> Result<()> {
        // The step of this turn that is under way still reads what would be written.
        if self.in_flight.len() == DEPTH {
            return Err(too_many());
        }
        let turn = self.steps % DEPTH;
        if self.whole_rows(want) {
            self.need_logits(plan.logits.len())?;
        }
        let header = self.memory.write(plan, turn, want)?;
        let shape = self.shape(plan, &header, want);
        let done = self.events.pop().ok_or_else(too_many)?;
        self.queue_timed(plan, shape, want, turn)?;
        let coming = self.end_step(plan.logits.len(), want, turn, done)?;
        self.in_flight.push_back(InFlight {
            turn,
            rows: plan.logits.len(),
            coming,
            drawn_from: self.logits.clone().filter(|_| shape.draws),
        });
        self.steps += 1;
        Ok(())
    }

    fn collect(&mut self, output: &mut StepOutput) -> Result<()> {
        let step = self
            .in_flight
            .pop_front()
            .ok_or_else(|| Error::Internal("no step is under way".into()))?;
        let (done, rows) = step.coming.wait()?;
        if let Some(clock) = &mut self.clock {
            clock.settle(&done)?;
        }
        self.events.push(done);
        if let Some(timeline) = &mut self.ops.timeline {
            timeline.settle(&self.context.stream)?;
            let rows = self.activations.x.routes.rows_by_expert(&self.context.stream)?;
            timeline.profile.spread.add(&rows);
        }
        output.greedy.clear();
        memory::extend(&mut output.greedy, self.greedy_of(step.turn, step.rows), Purpose::Step)?;
        match rows {
            Some(rows) => output.logits = Logits::Lent(rows),
            None => output.logits.clear(),
        }
        output.drawn.clear();
        memory::reserve(&mut output.drawn, step.rows, Purpose::Step)?;
        if let Some(path) = &step.drawn_from {
            output.drawn.extend(path.drawn(step.turn, step.rows));
        }
        self.collected = step.drawn_from.map(|path| (path, step.turn));
        Ok(())
    }

    fn fetch(&mut self, rows: &[usize], output: &mut StepOutput) -> Result<()> {
        let collected = self.collected.as_ref();
        let (path, turn) = collected.ok_or_else(|| Error::Internal("the step has left no rows of logits".into()))?;
        output.logits = Logits::Lent(path.fetch(*turn, rows)?);
        Ok(())
    }

    fn profile(&self) -> Option<&Profile> {
        self.ops.timeline.as_ref().map(|timeline| &timeline.profile)
    }

    fn pointers(&self) -> Pointers {
        let address = |at: DevicePtr| at.0 as *mut c_void;
        let (x, a) = (&self.activations.x.x, &self.activations.scratch);
        let mut state = [null_mut(); 21];
        for (field, at) in [
            (0, x.at()),
            (1, a.t.at()),
            (2, a.attention.at()),
            (7, a.h.at()),
            (12, a.qkv.at()),
            (18, self.kv.at()),
        ] {
            state[field] = address(at);
        }
        Pointers {
            weights: self.weights.pointers(
                |m: &Matrix| address(m.bytes.at()),
                |v: &DeviceBuffer<f32>| address(v.at()),
            ),
            state,
        }
    }
}

impl Drop for GpuReplica {
    fn drop(&mut self) {
        // Whatever is under way uses the memory that goes now. A lost device has nothing under way.
        let _ = self.context.stream.synchronize();
    }
}
