//! A replica's part on one device: a contiguous range of layers, their keys and values, and the kernels of a step on
//! them.

mod graphs;
mod one_launch;

pub use graphs::bucket;

use super::args::{KV_PAGE, StepHeader};
use super::attention_runs::max_partials;
use super::catalogue::Elements;
use super::context::Context;
use super::kv::{KvCache, page_bytes};
use super::logits::LogitsAt;
use super::memory::Event;
use super::ops::{Buffer, GpuOps, ResidualMemory, Sizes, slots};
use super::peaks::Peaks;
use super::profile::{StepClock, Timeline};
use super::shapes::{Numbers, Product, StepShape};
use super::step::{AttentionShape, Capacity, Plans, StepMemory};
use super::weights::{GpuWeights, Matrix};
use crate::batch::{StepPlan, Want};
use crate::config::ModelConfig;
use crate::error::Result;
use crate::kv_blocks::{BlockCounts, KvBlocks, block_bytes};
use crate::model::{Activations, Scratch, forward};
use crate::options::{Options, Precision, StepLimits};
use crate::profile::{Profile, Roofline};
use crate::replica::StageReport;
use crate::scheduler::FULL_TABLES;
use graphs::Graphs;
use one_launch::OneLaunch;
use std::sync::Arc;

/// Rows of one sequence in a step: more would only widen the rings of windowed layers. In a group, whose memory is what
/// there is too little of, half as many: a tenth more sequences have room.
fn chunk_tokens(stages: usize) -> usize {
    if stages > 1 { 256 } else { 512 }
}

/// Memory left to the runtime, for code, graphs and its own buffers, on a device of so much.
pub fn reserved_bytes(total_bytes: u64) -> u64 {
    (1 << 30).min(total_bytes / 16)
}

/// What all stages of a replica have in common.
#[derive(Clone, Debug)]
pub struct Common {
    /// The model.
    pub config: ModelConfig,
    /// How it computes.
    pub numbers: Numbers,
    /// The most rows of a step.
    pub rows: usize,
    /// The most of them whose logits are wanted.
    pub logits_rows: usize,
    /// The most sequences at once.
    pub sequences: usize,
    /// The most rows of one sequence in a step.
    pub chunk_tokens: usize,
    /// Steps under way at once.
    pub depth: usize,
}

/// A stage with weights and a step's activations.
pub struct LoadedStage {
    context: Arc<Context>,
    weights: GpuWeights,
    activations: Activations<ResidualMemory, Buffer>,
    roofline: Option<Roofline>,
}

impl LoadedStage {
    /// Makes room for a step's activations beside the weights.
    pub fn new(context: Arc<Context>, weights: GpuWeights, common: &Common, profile: bool) -> Result<Self> {
        // Before anything takes what memory there is.
        let roofline = if profile {
            roofline(&context, common.numbers.exact)?
        } else {
            None
        };
        Ok(Self {
            activations: activations(&context, common)?,
            context,
            weights,
            roofline,
        })
    }

    /// Its device.
    pub fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// Blocks for as many sequences of the checkpoint's length as may run at once and free memory allows.
    pub fn kv_blocks(&self, common: &Common, options: &Options) -> Result<KvBlocks> {
        let driver = &self.context.driver;
        let layers = self.weights.range();
        let bytes = options.kv_bytes(|| {
            let memory = driver.memory()?;
            let reserved = reserved_bytes(memory.total) + self.logits_bytes(common);
            Ok(memory.free.saturating_sub(reserved) as usize)
        })?;
        let page_bytes = page_bytes(&common.config, common.numbers.kv, &self.context.target);
        Ok(common.kv_blocks(options, block_bytes(&common.config, &layers, page_bytes), bytes))
    }

    /// Device memory that whole rows of logits may ask for in a later run, which draws.
    fn logits_bytes(&self, common: &Common) -> u64 {
        match &self.weights.head {
            Some(_) => common.logits_bytes(),
            None => 0,
        }
    }
}

/// A stage before its KV cache: what else it needs is there, so that the rest of the memory may be counted.
pub struct SizedStage {
    /// The stage before.
    pub loaded: LoadedStage,
    memory: StepMemory,
    ops: GpuOps,
    capacity: Capacity,
    attention: AttentionShape,
    one_launch: Option<OneLaunch>,
}

impl SizedStage {
    /// Makes room for `plans`, and for what operations use among themselves in steps over at most so many blocks.
    pub fn new(loaded: LoadedStage, common: &Common, most: KvBlocks, plans: &Plans, profile: bool) -> Result<Self> {
        let LoadedStage {
            context,
            weights,
            roofline,
            ..
        } = &loaded;
        let memory = StepMemory::new(&context.stream, plans)?;
        let attention = common.attention(context, most);
        let capacity = common.capacity(most);
        let sizes = Sizes {
            rows: common.rows,
            logits_rows: common.logits_rows,
            positions: capacity.positions,
            partials: attention.partials,
            turns: common.depth,
        };
        let unembedding = weights.head.as_ref().map(|head| &head.unembedding);
        let mut ops = GpuOps::new(
            context,
            &common.config,
            common.numbers,
            memory.step(),
            sizes,
            unembedding,
        )?;
        ops.queue.timeline = profile.then(|| Timeline::new(*roofline));
        let one_launch = match profile {
            true => None,
            false => OneLaunch::new(context, &ops, weights, common)?,
        };
        Ok(Self {
            one_launch,
            loaded,
            memory,
            ops,
            capacity,
            attention,
        })
    }
}

impl Common {
    /// What `options` ask for, where a replica has so many stages.
    pub fn new(config: &ModelConfig, options: &Options, elements: Elements, stages: usize) -> Self {
        let limits = options.step_limits(StepLimits::GPU);
        Self {
            config: config.clone(),
            numbers: numbers(options, elements),
            rows: limits.step_tokens,
            logits_rows: limits.max_batch,
            sequences: limits.max_batch.saturating_mul(stages),
            chunk_tokens: limits.step_tokens.min(chunk_tokens(stages)),
            // Each stage computes a step, and one waits behind them.
            depth: stages + 1,
        }
    }

    /// Blocks that a sequence of so many positions takes.
    pub fn kv_blocks_of(&self, positions: usize) -> BlockCounts {
        BlockCounts::of_sequence(&self.config, KV_PAGE, self.chunk_tokens, positions)
    }

    /// Keys to which all rows of a step attend, at most, in full layers of so many blocks and in windows.
    pub fn keys_of(&self, blocks: usize) -> usize {
        FULL_TABLES * blocks * KV_PAGE + self.logits_rows * self.config.sliding_window
    }

    /// Device memory of whole rows of logits.
    pub fn logits_bytes(&self) -> u64 {
        (self.depth * self.logits_rows * self.config.vocab_size * 4) as u64
    }

    /// As many blocks of so many bytes as there is memory and use for.
    pub fn kv_blocks(&self, options: &Options, block_bytes: usize, bytes: usize) -> KvBlocks {
        let longest = options.longest_sequence(&self.config);
        let (config, chunk_tokens) = (&self.config, self.chunk_tokens);
        KvBlocks::within(
            config,
            KV_PAGE,
            chunk_tokens,
            block_bytes,
            bytes,
            self.sequences,
            longest,
        )
    }
}

/// See the module.
pub struct Stage {
    // In this order dropped: first whatever may still use memory.
    graphs: Graphs,
    one_launch: Option<OneLaunch>,
    /// Its operations.
    pub ops: GpuOps,
    memory: StepMemory,
    /// A step's activations.
    pub activations: Activations<ResidualMemory, Buffer>,
    /// Keys and values.
    pub kv: KvCache,
    /// Weights.
    pub weights: GpuWeights,
    /// Its device.
    pub context: Arc<Context>,
    capacity: Capacity,
    attention: AttentionShape,
    weight_bytes: u64,
    /// Device memory that whole rows of logits will ask for, if they are not there yet.
    awaited_bytes: u64,
    /// Times steps as wholes, if asked to.
    pub clock: Option<StepClock>,
}

impl Stage {
    /// Makes the KV cache.
    pub fn new(sized: SizedStage, common: &Common, blocks: KvBlocks) -> Result<Self> {
        let awaited_bytes = sized.loaded.logits_bytes(common);
        let SizedStage {
            loaded,
            memory,
            ops,
            capacity,
            attention,
            one_launch,
        } = sized;
        let LoadedStage {
            context,
            weights,
            activations,
            ..
        } = loaded;
        let kv = KvCache::new(&context, &common.config, weights.range(), common.numbers.kv, blocks)?;
        let mut stage = Self {
            graphs: Graphs::new(common.depth),
            one_launch,
            ops,
            memory,
            activations,
            kv,
            weight_bytes: weights.sum(|matrix| matrix.bytes.bytes() as u64, |vector| vector.bytes() as u64),
            weights,
            context,
            capacity,
            attention,
            awaited_bytes,
            clock: None,
        };
        stage.prepare()?;
        stage.context.stream.synchronize()?;
        Ok(stage)
    }

    /// Whole rows of logits have their memory.
    pub fn has_logits(&mut self) {
        self.awaited_bytes = 0;
    }

    /// What gives the logits, on the last stage.
    fn unembedding(&self) -> Option<&Matrix> {
        self.weights.head.as_ref().map(|head| &head.unembedding)
    }

    /// Whether a step leaves whole rows of logits on the device.
    pub fn whole_rows(&self, plan: &StepPlan, want: Want) -> bool {
        self.unembedding()
            .is_some_and(|w| self.context.target.unembedding(w.form, plan, want) == Product::Logits)
    }

    /// Queues a step's kernels, between two events if steps are timed; whole rows go to `logits`.
    pub fn queue(
        &mut self,
        plan: &StepPlan,
        header: &StepHeader,
        want: Want,
        turn: usize,
        logits: LogitsAt,
    ) -> Result<()> {
        let shape = self.shape(plan, header, want);
        let Some(mut clock) = self.clock.take() else {
            return self.launch(plan, shape, want, turn, logits);
        };
        let context = self.context.clone();
        let queued = clock.time(&context, || self.launch(plan, shape, want, turn, logits));
        self.clock = Some(clock);
        queued
    }

    fn run(&mut self, plan: &StepPlan, shape: StepShape, want: Want, logits: LogitsAt) -> Result<()> {
        self.begin(plan, shape, logits)?;
        let Self {
            ops,
            weights,
            activations,
            kv,
            ..
        } = self;
        forward(ops, &weights.whole(), plan, activations, kv, want)
    }

    /// Queues the kernel that fetches the plan; operations of a step of this shape may follow.
    pub fn begin(&mut self, plan: &StepPlan, shape: StepShape, logits: LogitsAt) -> Result<()> {
        self.ops.begin(shape, plan, logits);
        self.ops.upload(&self.memory.upload_args())
    }

    /// Times of its kernels, if profiling was asked for.
    pub fn profile(&self) -> Option<&Profile> {
        self.ops.queue.timeline.as_ref().map(|timeline| &timeline.profile)
    }

    /// For users: its device, layers and memory.
    pub fn report(&self) -> StageReport<'_> {
        const GB: f64 = 1e9;
        let range = self.weights.range();
        let before = if self.weights.embedding.is_some() {
            "the embedding, "
        } else {
            ""
        };
        let behind = if self.weights.head.is_some() {
            ", the unembedding"
        } else {
            ""
        };
        StageReport {
            name: format!(
                "{}: {before}layers {} to {}{behind}; weights {:.2} GB, KV cache {:.2} GB",
                self.context.name(),
                range.start,
                range.end - 1,
                self.weight_bytes as f64 / GB,
                self.kv.bytes() as f64 / GB
            ),
            profile: self.profile(),
        }
    }

    /// Whether each kernel is timed.
    pub fn is_profiled(&self) -> bool {
        self.ops.queue.timeline.is_some()
    }

    /// Counts the oldest step, which is done; `copied`, an event with a time, tells when what it gave was on the host.
    pub fn count_times(&mut self, copied: Option<&Event>, count_rows: bool) -> Result<()> {
        if let Some(clock) = &mut self.clock {
            clock.count_times(copied)?;
        }
        if let Some(timeline) = &mut self.ops.queue.timeline {
            timeline.count_times()?;
            if count_rows {
                let rows = self.activations.x.routes.rows_by_expert(&self.context.stream)?;
                timeline.profile.spread.add(&rows);
            }
        }
        Ok(())
    }
}

impl Common {
    /// The most of everything a step can have.
    pub fn capacity(&self, blocks: KvBlocks) -> Capacity {
        Capacity {
            rows: self.rows,
            sequences: self.sequences,
            logits_rows: self.logits_rows,
            pages: FULL_TABLES * blocks.count,
            positions: MAX_POSITIONS.min((blocks.count * KV_PAGE).max(self.config.seq_len)),
            vocab: self.config.vocab_size,
        }
    }

    /// What attention's planning needs to know of a device, in steps over at most so many blocks.
    pub fn attention(&self, context: &Context, most: KvBlocks) -> AttentionShape {
        let Context { target, .. } = context;
        let Self { config, numbers, .. } = self;
        let keys = self.keys_of(most.count);
        let items_at_once = target.attention_items_at_once();
        AttentionShape {
            kv_heads: config.n_kv_heads,
            window: config.sliding_window,
            items_at_once,
            team_rows: target.attention_team_rows(),
            on_cores: target.attends_on_cores(config, numbers.kv, numbers.exact),
            two_rows: target.family.attends_to_two_rows(),
            shared_rows: target.shared_rows(config, numbers.kv),
            whole_rows: target.family.attends_to_whole_rows(),
            partials: max_partials(keys, config.n_kv_heads, items_at_once),
            prefill_rows: target.prefill_rows(),
        }
    }
}

/// Whether these options ask for `exact`.
pub fn is_exact(options: &Options) -> bool {
    options.precision == Some(Precision::Exact)
}

/// What a model's values are computed in, whose activations are in this format.
pub fn numbers(options: &Options, elements: Elements) -> Numbers {
    Numbers::new(elements, is_exact(options))
}

/// The most positions a sequence can have: gpt-oss's context.
const MAX_POSITIONS: usize = 131_072;

/// The device's peak rates, if its family has a kernel that measures them. An emulated device has none.
fn roofline(context: &Context, exact: bool) -> Result<Option<Roofline>> {
    if context.driver.device().runtime == "simt" {
        return Ok(None);
    }
    let peaks = Peaks::measure(context)?;
    Ok(peaks.matrix_flops_per_s.map(|flops_per_s| Roofline {
        bytes_per_s: peaks.copy_bytes_per_s,
        flops_per_s,
        attention_flops_per_s: peaks.attention_flops_per_s.filter(|_| !exact).unwrap_or(flops_per_s),
    }))
}

fn activations(context: &Context, common: &Common) -> Result<Activations<ResidualMemory, Buffer>> {
    let (config, numbers, rows) = (&common.config, &common.numbers, common.rows);
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
