//! The model's operations as kernel launches.
//!
//! No operation waits for the device or reads from it; what profiles, tests and tools ask for does ([`inspect`],
//! [`Routes::rows_by_expert`]). [`super::stage`] captures one run of `model::forward` over these operations for each
//! shape of step and launches it from then on. Counts and tables are read by the kernels from the plan in device memory
//! ([`super::step`]), so that only buckets of the counts make a new shape.

pub mod inspect;

use super::args::{
    ArgmaxArgs, AttentionArgs, DrawArgs, EmbedArgs, Format, GROUP_ALIGN, GatherArgs, GemmArgs, Greedy, NormArgs,
    NormRouteArgs, PARTIAL_FLOATS, QkvStoreArgs, RopeStoreArgs, RouteArgs, SLAB, ScoreArgs, SortArgs, SortGatherArgs,
    SortMlp1Args, Step, StepHeader, UploadArgs,
};
use super::catalogue::Op;
use super::context::Context;
use super::driver::DevicePtr;
use super::kv::KvCache;
use super::launch::Launch;
use super::layout::TypedPtr;
use super::logits::LogitsAt;
use super::memory::{DeviceBuffer, PinnedBuffer, Stream, to_host};
use super::profile::Timeline;
use super::shapes::{AttentionWork, GemmShape, Kind, Product};
use super::weights::{Matrix, Vector};
use crate::batch::{StepPlan, Want};
use crate::config::ModelConfig;
use crate::error::{Error, Result};
use crate::memory::{self, Purpose};
use crate::model::Rope;
use crate::ops::Ops;
use crate::profile::{Cost, Stage};
use crate::sampler::exponential_table;
use std::cell::Cell;
use std::ffi::c_void;
use std::mem::offset_of;
use std::sync::Arc;

/// Rows that a product may read behind a buffer's last one: its largest tile.
pub const SLACK_ROWS: usize = 256;

/// How a replica computes.
#[derive(Clone, Copy, Debug)]
pub struct Numbers {
    /// Of activations: FP16 or BF16.
    pub format: Format,
    /// Of keys, values and queries: the same in `fast`, float32 in `exact`.
    pub kv: Format,
    /// Terms an activation: 1 in `fast`.
    pub terms: usize,
    /// Products, norms and attention as close to the float32 baseline as a GPU can, see docs/precision.md.
    pub exact: bool,
}

/// The shape of a step: what of it the choice and the grids of kernels depend on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct StepShape {
    /// At least its rows.
    pub rows: usize,
    /// At least its rows whose logits are wanted.
    pub logits_rows: usize,
    /// At least its items of decode attention, full or windowed; 0 if it has none.
    pub decode_items: usize,
    /// At least its tiles of prefill attention; 0 if it has none.
    pub prefill_tiles: usize,
    /// Whether whole rows of logits are wanted.
    pub logits: bool,
    /// Whether tokens are drawn from them.
    pub draws: bool,
    /// Whether some are scored.
    pub scores: bool,
}

/// Activations on the device.
pub struct Buffer {
    bytes: DeviceBuffer,
    /// Rows it has room for; tiled ones have slack behind them.
    rows: usize,
    /// Elements from one term to the next; 0 in a float32 buffer.
    term: usize,
}

impl Buffer {
    /// Float32 `[rows, width]`.
    pub fn plain(context: &Context, rows: usize, width: usize) -> Result<Self> {
        Ok(Self {
            bytes: DeviceBuffer::zeroed(&context.stream, 4 * rows * width)?,
            rows,
            term: 0,
        })
    }

    /// Tiled 16-bit terms `[terms][width / 64][rows][64]`.
    pub fn tiled(context: &Context, rows: usize, width: usize, terms: usize) -> Result<Self> {
        let rows = (rows + SLACK_ROWS).next_multiple_of(GROUP_ALIGN);
        let term = width.div_ceil(SLAB) * rows * SLAB;
        Ok(Self {
            // Zeroed: what a product reads behind the last row is thrown away, but must not be trapped as uninitialized.
            bytes: DeviceBuffer::zeroed(&context.stream, 2 * terms * term)?,
            rows,
            term,
        })
    }

    /// Its address.
    pub fn at(&self) -> DevicePtr {
        self.bytes.at()
    }

    /// The address of float32 values.
    fn floats(&self) -> TypedPtr<f32> {
        debug_assert_eq!(self.term, 0, "tiled terms taken for float32 values");
        TypedPtr::new(self.at())
    }

    /// Where its rows lie.
    fn rows(&self) -> Rows {
        Rows {
            terms: self.terms(),
            term: self.term as i64,
            buffer_rows: self.rows as i32,
        }
    }

    /// The address of tiled terms.
    fn terms(&self) -> TypedPtr<u16> {
        debug_assert_ne!(self.term, 0, "float32 values taken for tiled terms");
        TypedPtr::new(self.at())
    }
}

/// Memory of the residual stream, and of the way of its rows through the experts.
pub struct ResidualMemory {
    /// `[T, H]` in float32.
    pub x: Buffer,
    /// Of the layer that ran last.
    pub routes: Routes,
}

impl ResidualMemory {
    /// Room for `rows` rows.
    pub fn new(context: &Context, config: &ModelConfig, rows: usize, numbers: &Numbers) -> Result<Self> {
        Ok(Self {
            x: Buffer::plain(context, rows, config.hidden_dim)?,
            routes: Routes::new(context, config, rows, numbers)?,
        })
    }
}

/// The residual stream, to which the kernel that reads it next may have a sum to add.
pub struct Residual<'x> {
    memory: &'x mut ResidualMemory,
    outstanding: Outstanding,
}

/// What is to be added to the residual stream.
#[derive(Clone, Copy, PartialEq)]
enum Outstanding {
    Nothing,
    /// The outputs that the experts left in the stream's [`Routes`].
    Experts,
}

impl Residual<'_> {
    /// Its memory.
    pub fn memory(&mut self) -> &mut ResidualMemory {
        self.memory
    }
}

/// The residual stream, complete in its memory.
pub struct Settled<'x> {
    memory: &'x mut ResidualMemory,
}

impl Settled<'_> {
    /// Its memory.
    pub fn memory(&mut self) -> &mut ResidualMemory {
        self.memory
    }
}

/// The residual stream, whose rows have been sent to their experts.
pub struct Routed<'x> {
    memory: &'x mut ResidualMemory,
    sent: Sending,
}

/// How the experts get their rows.
#[derive(Clone, Copy)]
enum Sending {
    /// Each has copies.
    Gathered,
    /// A single row, whose experts the router tells to mlp1 before it ends.
    Told(Rows),
    /// mlp1 finds them, or a kernel before it.
    Outstanding(Rows),
}

/// Where a step's normed rows lie in their order. They are not overwritten before mlp1.
#[derive(Clone, Copy)]
struct Rows {
    terms: TypedPtr<u16>,
    term: i64,
    buffer_rows: i32,
}

impl Routed<'_> {
    /// Its memory.
    pub fn memory(&mut self) -> &mut ResidualMemory {
        self.memory
    }
}

/// Queries, keys and values before their rotation.
pub struct Projected<'m> {
    qkv: &'m Buffer,
    /// Whether the elements of a head are in pairs.
    paired: bool,
    /// The product, if the kernel that multiplies also rotates and stores.
    outstanding: Option<Multiplication<'m>>,
}

/// A product that is not queued yet.
struct Multiplication<'m> {
    launch: Launch,
    args: GemmArgs,
    cost: Cost,
    /// As long as it is borrowed it is not overwritten.
    _input: &'m Buffer,
}

/// Rotated queries, in 16 bits with attention's factor.
pub struct Queries<'m> {
    at: TypedPtr<c_void>,
    /// The layer whose cache has their keys and values.
    layer: usize,
    /// What they were made of: as long as it is borrowed, no others are made.
    _qkv: &'m Buffer,
}

/// Which rows a norm reads and what else it does.
#[derive(Clone, Copy)]
struct NormTask {
    outstanding: Outstanding,
    /// Only the rows whose logits are wanted; nothing is stored to `x`.
    wanted_only: bool,
    /// Stores the router's float32 input, too.
    for_router: bool,
}

/// Where each row's experts are computed.
pub struct Routes {
    /// `[rows, K]`, in order of the expert's index.
    experts: DeviceBuffer<i32>,
    /// `[rows, K]`
    shares: DeviceBuffer<f32>,
    /// `[rows, K]`: the slot of each.
    slots: DeviceBuffer<i32>,
    /// `[E + 1]`: the first slot of each expert.
    offsets: DeviceBuffer<i32>,
    /// `[E]`
    counts: DeviceBuffer<i32>,
    /// A single row's experts, see [`GemmArgs`].
    picks: DeviceBuffer<u64>,
    /// The experts' inputs by slot.
    gathered: Buffer,
    /// Their outputs by slot `[slots, H]`.
    y: DeviceBuffer,
}

impl Routes {
    /// Routes of at most `rows` rows.
    pub fn new(context: &Context, config: &ModelConfig, rows: usize, numbers: &Numbers) -> Result<Self> {
        let (e, k) = (config.n_experts, config.experts_per_token);
        let slots = slots(config, rows);
        let stream = &context.stream;
        Ok(Self {
            experts: DeviceBuffer::zeroed(stream, rows * k)?,
            shares: DeviceBuffer::zeroed(stream, rows * k)?,
            slots: DeviceBuffer::zeroed(stream, rows * k)?,
            offsets: DeviceBuffer::zeroed(stream, e + 1)?,
            counts: DeviceBuffer::zeroed(stream, e)?,
            picks: DeviceBuffer::zeroed(stream, 1)?,
            gathered: Buffer::tiled(context, slots, config.hidden_dim, numbers.terms)?,
            y: DeviceBuffer::zeroed(stream, slots * config.hidden_dim * y_format(numbers).bytes())?,
        })
    }

    /// Rows of each expert in the layer that ran last. Waits for the device.
    pub fn rows_by_expert(&self, stream: &Stream) -> Result<Vec<u32>> {
        // SAFETY: it was zeroed when it was made.
        unsafe { to_host(stream, self.counts.at(), self.counts.bytes() / 4) }
    }
}

/// Slots that the experts of `rows` rows may need: each expert's begin at a multiple of [`GROUP_ALIGN`].
pub fn slots(config: &ModelConfig, rows: usize) -> usize {
    rows * config.experts_per_token + config.n_experts * (GROUP_ALIGN - 1)
}

/// The format of the experts' outputs.
pub fn y_format(numbers: &Numbers) -> Format {
    if numbers.exact { Format::F32 } else { Format::F16 }
}

/// Memory that operations use among themselves.
struct Workspace {
    /// The router's input `[rows, H]`.
    t32: DeviceBuffer<f32>,
    /// `[rows, Nq, D]`
    q: DeviceBuffer,
    cos: DeviceBuffer<f32>,
    sin: DeviceBuffer<f32>,
    partials: DeviceBuffer<f32>,
    arrived: DeviceBuffer<i32>,
    best: DeviceBuffer<f32>,
    best_index: DeviceBuffer<i32>,
    /// The sampler's table of powers.
    powers: DeviceBuffer<u64>,
    /// The sums of the rows' exponentials.
    sums: DeviceBuffer<f64>,
}

/// [`Ops`] on a GPU.
pub struct GpuOps {
    context: Arc<Context>,
    config: ModelConfig,
    numbers: Numbers,
    step: Step,
    /// `[turns][max_logits_rows]`
    greedy: PinnedBuffer<Greedy>,
    workspace: Workspace,
    max_logits_rows: usize,
    shape: StepShape,
    /// Rows of the step, for costs: the shape's are those of its bucket.
    n_rows: usize,
    /// The same of those whose logits are wanted.
    n_wanted: usize,
    /// Where logits go in this step, if more than the largest is wanted.
    logits: LogitsAt,
    /// Whether the kernel queued last fetches the plan.
    fetches: Cell<bool>,
    /// Measures instead of only queueing, if asked to.
    pub timeline: Option<Timeline>,
}

/// Sizes that do not follow from the model.
#[derive(Clone, Copy, Debug)]
pub struct Sizes {
    /// The most rows of a step.
    pub rows: usize,
    /// The most rows whose logits are wanted.
    pub logits_rows: usize,
    /// Positions a sequence can have.
    pub positions: usize,
    /// Slots for partial sums of attention.
    pub partial_slots: usize,
    /// Steps under way, each of which has memory of its own for what it finds.
    pub turns: usize,
}

impl GpuOps {
    /// Operations of a model whose plan lies at `step`; `unembedding` is that of the last stage.
    pub fn new(
        context: &Arc<Context>,
        config: &ModelConfig,
        numbers: Numbers,
        step: Step,
        sizes: Sizes,
        unembedding: Option<&Matrix>,
    ) -> Result<Self> {
        let stream = &context.stream;
        let (cos, sin) = angles(config, sizes.positions)?;
        let mut ops = Self {
            context: context.clone(),
            config: config.clone(),
            numbers,
            step,
            greedy: PinnedBuffer::zeroed(&context.driver, sizes.turns * sizes.logits_rows)?,
            workspace: Workspace {
                t32: DeviceBuffer::zeroed(stream, sizes.rows * config.hidden_dim)?,
                q: DeviceBuffer::zeroed(stream, sizes.rows * config.q_dim() * numbers.kv.bytes())?,
                cos: DeviceBuffer::of(stream, &cos)?,
                sin: DeviceBuffer::of(stream, &sin)?,
                partials: DeviceBuffer::zeroed(stream, PARTIAL_FLOATS * sizes.partial_slots * config.n_kv_heads)?,
                arrived: DeviceBuffer::zeroed(stream, sizes.rows * config.n_kv_heads)?,
                best: DeviceBuffer::zeroed(stream, 1)?,
                best_index: DeviceBuffer::zeroed(stream, 1)?,
                powers: DeviceBuffer::of(stream, exponential_table())?,
                sums: DeviceBuffer::zeroed(stream, sizes.logits_rows)?,
            },
            max_logits_rows: sizes.logits_rows,
            shape: StepShape {
                rows: sizes.rows,
                logits_rows: sizes.logits_rows,
                decode_items: 1,
                prefill_tiles: 1,
                logits: false,
                draws: false,
                scores: false,
            },
            n_rows: 0,
            n_wanted: 0,
            logits: LogitsAt::default(),
            fetches: Cell::new(false),
            timeline: None,
        };
        if let Some(unembedding) = unembedding {
            let candidates = ops.most_candidates(unembedding)?;
            ops.workspace.best = DeviceBuffer::zeroed(stream, candidates * sizes.logits_rows)?;
            ops.workspace.best_index = DeviceBuffer::zeroed(stream, candidates * sizes.logits_rows)?;
        }
        Ok(ops)
    }

    /// The most candidates any kernel leaves for a row.
    fn most_candidates(&self, unembedding: &Matrix) -> Result<usize> {
        if unembedding.is_wire() {
            return Ok(1);
        }
        let rows = (0..)
            .map(|i| 1 << i)
            .take_while(|&rows| rows < 2 * self.max_logits_rows);
        let mut most = 1;
        for rows in rows {
            for product in [Product::Greedy, Product::Logits] {
                most = most.max(self.candidates(product, unembedding, rows)?);
            }
        }
        Ok(most)
    }

    /// From now on steps of this shape are queued, the first one being `plan`; more than the largest logits goes to `logits`.
    pub fn begin(&mut self, shape: StepShape, plan: &StepPlan, logits: LogitsAt) {
        self.shape = shape;
        self.n_rows = plan.rows();
        self.n_wanted = plan.logits.len();
        self.logits = logits;
        if let Some(timeline) = &mut self.timeline {
            timeline.begin_step();
        }
    }

    /// Refuses a plan whose shape is not that of the step begun.
    fn check_plan(&self, plan: &StepPlan) -> Result<()> {
        if plan.rows() == self.n_rows && plan.logits.len() == self.n_wanted {
            return Ok(());
        }
        Err(Error::Internal(
            "operations of another plan than the step began with".into(),
        ))
    }

    /// What the step of this turn found, which has the largest logits of `rows` rows.
    ///
    /// # Safety
    /// The step is done, and the next of its turn has not been submitted.
    pub unsafe fn greedy(&self, turn: usize, rows: usize) -> &[Greedy] {
        // SAFETY: as our caller vouches.
        let found = unsafe { self.greedy.read() };
        &found[turn * self.max_logits_rows..][..rows]
    }

    /// Queues the kernel that fetches the plan.
    pub fn upload(&mut self, args: &UploadArgs) -> Result<()> {
        // SAFETY: the plan's memory outlives the replica's steps.
        unsafe { self.context.launch(self.context.target.upload(), args) }?;
        self.fetches.set(true);
        Ok(())
    }

    /// Queues a kernel. Most read the plan before their predecessor has ended, so not while that fetches it.
    fn launch<A: bytemuck::NoUninit>(&self, launch: Launch, args: &A) -> Result<()> {
        let launch = if self.fetches.take() { launch.apart() } else { launch };
        // SAFETY: all addresses are of buffers that the replica keeps until its stream is done, sized for the largest
        // step; the structs are those of super::args.
        unsafe { self.context.launch(launch, args) }
    }

    fn timed(&mut self, stage: Stage, cost: Cost, queue: impl FnOnce(&mut Self) -> Result<()>) -> Result<()> {
        let Some(mut timeline) = self.timeline.take() else {
            return queue(self);
        };
        let context = self.context.clone();
        let queued = timeline.time(&context, stage, cost, || queue(self));
        self.timeline = Some(timeline);
        queued
    }

    fn gemm_shape(&self, product: Product, w: &Matrix, rows: usize) -> GemmShape {
        GemmShape {
            product,
            kind: w.kind,
            format: self.numbers.format,
            terms: self.numbers.terms,
            rows,
            groups: w.members,
            n: w.rows,
            row_blocks: w.row_blocks,
        }
    }

    /// Queues a product whose epilogue's fields `epilogue` fills in.
    fn gemm(
        &mut self,
        product: Product,
        w: &Matrix,
        input: &Buffer,
        rows: TypedPtr<i32>,
        epilogue: impl FnOnce(&mut GemmArgs),
    ) -> Result<()> {
        let (launch, mut args) = self.product(product, w, input, rows)?;
        epilogue(&mut args);
        self.launch(launch, &args)
    }

    /// A product, but for its epilogue's fields.
    fn product(&self, product: Product, w: &Matrix, input: &Buffer, rows: TypedPtr<i32>) -> Result<(Launch, GemmArgs)> {
        let most = match product {
            Product::Mlp1 | Product::Mlp2 => self.shape.rows * self.config.experts_per_token,
            Product::Greedy | Product::Logits => self.shape.logits_rows,
            Product::Qkv | Product::AttnOut => self.shape.rows,
        };
        let launch = self.context.target.gemm(&self.gemm_shape(product, w, most))?.launch;
        let weight_format = match w.kind {
            Kind::Wire(format) => format as i16,
            _ => 0,
        };
        let args = GemmArgs {
            weights: w.bytes.values(),
            bias: TypedPtr::NULL,
            input: input.terms(),
            in_term: input.term as i64,
            rows,
            offsets: TypedPtr::NULL,
            out: TypedPtr::NULL,
            tiled: TypedPtr::NULL,
            tiled_term: 0,
            y: TypedPtr::NULL,
            best: TypedPtr::NULL,
            best_index: TypedPtr::NULL,
            groups: w.members as i32,
            n: w.rows as i32,
            k_blocks: w.k_blocks() as i32,
            row_blocks: w.row_blocks as i32,
            in_rows: input.rows as i32,
            tiled_rows: 0,
            best_rows: 0,
            scale: w.scale,
            limit: self.config.swiglu_limit,
            format: self.numbers.format,
            cols: w.cols as i32,
            weight_format,
            terms: self.numbers.terms as i16,
            half: 0,
            picked: self.config.experts_per_token as i32,
            picks: TypedPtr::NULL,
        };
        Ok((launch, args))
    }

    /// Rows of the step on the device.
    fn rows(&self) -> TypedPtr<i32> {
        self.count(offset_of!(StepHeader, rows))
    }

    /// Rows whose logits are wanted, on the device.
    fn logits_rows(&self) -> TypedPtr<i32> {
        self.count(offset_of!(StepHeader, logits_rows))
    }

    /// A count of the step's header, so many bytes behind its beginning.
    fn count(&self, offset: usize) -> TypedPtr<i32> {
        TypedPtr::new(self.step.header.raw().add(offset))
    }

    /// Keys and values read once by each sequence, queries and the output by each row.
    fn attention_cost(&self, plan: &StepPlan, windowed: bool) -> Cost {
        let c = &self.config;
        let (mut keys_read, mut products) = (0, 0);
        for chunk in &plan.chunks {
            let last = chunk.first_position + chunk.rows;
            let seen = |end: usize| if windowed { end.min(c.sliding_window) } else { end };
            keys_read += last.min(seen(last) + chunk.rows - 1);
            products += chunk.rows * (seen(chunk.first_position + 1) + seen(last)) / 2;
        }
        let kv_bytes = keys_read * 2 * c.n_kv_heads * c.head_dim * self.numbers.kv.bytes();
        let row_bytes = c.q_dim() * (self.numbers.kv.bytes() + 2 * self.numbers.terms);
        Cost {
            bytes: (kv_bytes + plan.rows() * row_bytes) as u64,
            flops: (4 * products * c.q_dim()) as u64,
        }
    }

    /// The candidates for each row's largest logit, which weights in the wire format do not give, and the logits, if they
    /// are wanted.
    fn unembed_rows(&mut self, product: Product, t: &Buffer, w: &Matrix, rows: TypedPtr<i32>) -> Result<()> {
        let (best, best_index) = (self.workspace.best.values(), self.workspace.best_index.values());
        let best_rows = self.max_logits_rows as i32;
        let logits = self.logits.rows;
        self.gemm(product, w, t, rows, |args| {
            if product == Product::Logits {
                args.out = logits;
            }
            args.best = best;
            args.best_index = best_index;
            args.best_rows = best_rows;
        })
    }

    /// Values of a row that its largest logit is picked from.
    fn candidates(&self, product: Product, w: &Matrix, rows: usize) -> Result<usize> {
        let shape = self.gemm_shape(product, w, rows);
        Ok(self.context.target.gemm(&shape)?.candidates)
    }

    /// Each row's largest logit, from the candidates or from whole rows.
    fn argmax(&mut self, whole_rows: bool, candidates: usize) -> Result<()> {
        let (best, logits) = (self.workspace.best.values(), self.logits.rows);
        let args = ArgmaxArgs {
            step: self.step,
            best: if whole_rows { logits } else { best },
            best_index: self.workspace.best_index.values(),
            host: self.greedy.values(),
            candidates: candidates as i32,
            best_rows: self.max_logits_rows as i32,
        };
        let (target, rows) = (&self.context.target, self.shape.logits_rows);
        if whole_rows {
            self.launch(target.argmax_logits(rows), &args)
        } else {
            self.launch(target.argmax(rows), &args)
        }
    }

    /// A token from each row, where that is known.
    fn draw(&mut self) -> Result<()> {
        let args = DrawArgs {
            step: self.step,
            logits: self.logits.rows,
            host: self.logits.drawn,
            host_rows: self.logits.turn_rows as i64,
            powers: self.workspace.powers.values(),
            sums: self.workspace.sums.values(),
            vocab: self.config.vocab_size as i32,
            reserved: 0,
        };
        let rows = self.shape.logits_rows;
        let rows_bytes = 4 * self.n_wanted * self.config.vocab_size;
        self.timed(Stage::Draw, moved(rows_bytes), |ops| {
            ops.launch(ops.context.target.draw(rows), &args)?;
            ops.launch(ops.context.target.draw_wide(rows), &args)
        })
    }

    /// What log-probabilities take, of the rows that are scored.
    fn score(&mut self, plan: &StepPlan) -> Result<()> {
        let args = ScoreArgs {
            step: self.step,
            logits: self.logits.rows,
            host: self.logits.scores,
            host_rows: self.logits.turn_rows as i64,
            vocab: self.config.vocab_size as i32,
            reserved: 0,
        };
        let rows = self.shape.logits_rows;
        let scored = plan.logits.iter().filter(|row| row.score.is_some()).count();
        self.timed(Stage::Score, moved(4 * scored * self.config.vocab_size), |ops| {
            ops.launch(ops.context.target.score(rows), &args)
        })
    }

    /// What a norm does, and what it moves.
    fn norm_args(
        &self,
        x: &ResidualMemory,
        weight: TypedPtr<f32>,
        t: Option<&Buffer>,
        task: NormTask,
    ) -> (NormArgs, Cost) {
        let (c, terms) = (&self.config, self.numbers.terms);
        let adds = task.outstanding == Outstanding::Experts;
        let args = NormArgs {
            step: self.step,
            x: x.x.floats(),
            weight,
            y: x.routes.y.values().void().only_if(adds),
            slots: x.routes.slots.values().only_if(adds),
            shares: x.routes.shares.values().only_if(adds),
            t: t.map_or(TypedPtr::NULL, Buffer::terms),
            t_term: t.map_or(0, |t| t.term as i64),
            t32: self.workspace.t32.values().only_if(task.for_router),
            y_format: y_format(&self.numbers),
            k: c.experts_per_token as i32,
            hidden: c.hidden_dim as i32,
            t_rows: t.map_or(0, |t| t.rows as i32),
            select: i32::from(task.wanted_only),
            terms: terms as i32,
            format: self.numbers.format,
            exact: i32::from(self.numbers.exact),
        };
        let rows = if task.wanted_only { self.n_wanted } else { self.n_rows };
        let bytes = 4 + 2 * terms + 4 * usize::from(task.for_router) + self.sum_bytes(task.outstanding);
        (args, moved(rows * c.hidden_dim * bytes))
    }

    /// What adding to an element of `x` moves, that being read anyway.
    fn sum_bytes(&self, outstanding: Outstanding) -> usize {
        match outstanding {
            Outstanding::Nothing => 0,
            Outstanding::Experts => self.config.experts_per_token * y_format(&self.numbers).bytes() + 4,
        }
    }

    fn queue_norm(&mut self, x: &ResidualMemory, weight: &Vector, t: &Buffer, task: NormTask) -> Result<()> {
        let (args, cost) = self.norm_args(x, weight.values(), Some(t), task);
        let rows = if task.wanted_only {
            self.shape.logits_rows
        } else {
            self.shape.rows
        };
        let (target, adds) = (self.context.target, task.outstanding == Outstanding::Experts);
        let made_for = || {
            target
                .norm_few(&self.config, rows)
                .or_else(|| target.norm_rows(&self.config, rows))
        };
        let plain = !adds || task.wanted_only || task.for_router || self.numbers.exact;
        let launch = if plain { None } else { made_for() }.unwrap_or_else(|| target.norm(rows));
        self.timed(Stage::Norm, cost, |ops| ops.launch(launch, &args))
    }

    /// Norm and router in one kernel, where there is one for the step's rows.
    fn norm_route(&self, w: &Matrix) -> Option<Launch> {
        let (target, rows) = (self.context.target, self.shape.rows);
        let fast = !self.numbers.exact && w.kind == Kind::Wire(Format::Bf16);
        let few = fast.then(|| target.norm_route_few(&self.config, rows)).flatten();
        let many = || fast.then(|| target.norm_route_rows(&self.config, rows)).flatten();
        few.or_else(many).or_else(|| target.norm_route(rows))
    }

    /// [`Ops::route`] by kernels of their own for the norm and the router.
    pub fn norm_then_route<'x>(
        &mut self,
        x: Settled<'x>,
        norm: &Vector,
        w: &Matrix,
        bias: &Vector,
        t: &mut Buffer,
    ) -> Result<Routed<'x>> {
        let Settled { memory } = x;
        self.queue_norm(memory, norm, t, FOR_ROUTER)?;
        let (args, cost) = self.route_args(w, bias, &memory.routes)?;
        let input = moved(4 * self.n_rows * self.config.hidden_dim);
        self.timed(Stage::Router, input + cost, |ops| {
            ops.launch(ops.context.target.route(ops.shape.rows), &args)
        })?;
        self.send(t, memory)
    }

    /// Sends the rows to the experts that the router has picked, unless mlp1 may find them.
    fn send<'x>(&mut self, t: &Buffer, memory: &'x mut ResidualMemory) -> Result<Routed<'x>> {
        let sent = if self.finds_rows() {
            Sending::Outstanding(t.rows())
        } else {
            self.sort_and_gather(t.rows(), &memory.routes)?;
            Sending::Gathered
        };
        Ok(Routed { memory, sent })
    }

    fn finds_rows(&self) -> bool {
        let Numbers { format, terms, .. } = self.numbers;
        self.context.target.finds_rows(format, terms, self.shape.rows)
    }

    /// What the router does, and what it moves beside its input.
    fn route_args(&self, w: &Matrix, bias: &Vector, routes: &Routes) -> Result<(RouteArgs, Cost)> {
        let (c, n_rows) = (&self.config, self.n_rows);
        let Kind::Wire(format) = w.kind else {
            return Err(Error::Internal("a router that is packed for products".into()));
        };
        let args = RouteArgs {
            step: self.step,
            t32: self.workspace.t32.values(),
            w: w.bytes.values().void(),
            bias: bias.values(),
            experts: routes.experts.values(),
            shares: routes.shares.values(),
            format,
            hidden: c.hidden_dim as i32,
            n_experts: c.n_experts as i32,
            k: c.experts_per_token as i32,
            exact: i32::from(self.numbers.exact),
            reserved: 0,
        };
        let cost = Cost {
            bytes: (8 * n_rows * c.experts_per_token + w.bytes.bytes()) as u64,
            flops: (2 * n_rows * c.n_experts * c.hidden_dim) as u64,
        };
        Ok((args, cost))
    }

    /// mlp1 of rows that it finds by itself, if there is one for them.
    fn sort_mlp1(&self, w: &Matrix) -> Option<Launch> {
        let picks = self.shape.rows * self.config.experts_per_token;
        let shape = self.gemm_shape(Product::Mlp1, w, picks);
        self.context.target.sort_mlp1(&shape, self.shape.rows)
    }

    fn sort_args(&self, routes: &Routes) -> SortArgs {
        SortArgs {
            step: self.step,
            experts: routes.experts.values(),
            offsets: routes.offsets.values(),
            counts: routes.counts.values(),
            slots: routes.slots.values(),
            n_experts: self.config.n_experts as i32,
            k: self.config.experts_per_token as i32,
        }
    }

    fn gather_args(&self, t: Rows, routes: &Routes) -> GatherArgs {
        GatherArgs {
            step: self.step,
            input: t.terms,
            out: routes.gathered.terms(),
            slots: routes.slots.values(),
            in_term: t.term,
            out_term: routes.gathered.term as i64,
            k: self.config.experts_per_token as i32,
            k_blocks: self.config.hidden_dim.div_ceil(SLAB) as i32,
            in_rows: t.buffer_rows,
            out_rows: routes.gathered.rows as i32,
            terms: self.numbers.terms as i32,
            reserved: 0,
        }
    }

    /// Gives each row's experts their slots and copies the rows there.
    fn sort_and_gather(&mut self, t: Rows, routes: &Routes) -> Result<()> {
        let (sort, gather) = (self.sort_args(routes), self.gather_args(t, routes));
        let (rows, n_rows) = (self.shape.rows, self.n_rows);
        let (k, width, k_blocks) = (
            self.config.experts_per_token,
            self.config.hidden_dim,
            gather.k_blocks as usize,
        );
        let gathered = moved(2 * self.numbers.terms * n_rows * width * (1 + k));
        let target = self.context.target;
        if let Some(launch) = target.sort_gather(rows, k_blocks) {
            return self.timed(Stage::Gather, gathered, |ops| {
                ops.launch(launch, &SortGatherArgs { sort, gather })
            });
        }
        self.timed(Stage::Sort, moved(8 * n_rows * k), |ops| {
            ops.launch(target.sort(rows), &sort)
        })?;
        self.timed(Stage::Gather, gathered, |ops| {
            ops.launch(target.gather(rows, k_blocks), &gather)
        })
    }

    /// Weights, inputs and outputs moved once; each term of an input is a product of its own.
    fn product_cost(&self, product: Product, w: &Matrix) -> Cost {
        let k = self.config.experts_per_token;
        let terms = self.numbers.terms;
        let (rows, weights_read) = match product {
            Product::Mlp1 | Product::Mlp2 => (self.n_rows * k, experts_hit(self.n_rows, k, w.members)),
            Product::Greedy | Product::Logits => (self.n_wanted, 1.0),
            Product::Qkv | Product::AttnOut => (self.n_rows, 1.0),
        };
        let out_bytes = match product {
            Product::Qkv | Product::Logits => 4 * w.rows,
            // The residual stream is read, too.
            Product::AttnOut => 8 * w.rows,
            // A gate and its up become one.
            Product::Mlp1 => w.rows / 2 * 2 * terms,
            Product::Mlp2 => y_format(&self.numbers).bytes() * w.rows,
            Product::Greedy => 8 * self.candidates(product, w, self.shape.logits_rows).unwrap_or(0),
        };
        let weight_bytes = (w.bytes.bytes() as f64 * weights_read) as usize;
        Cost {
            bytes: (weight_bytes + rows * (2 * terms * w.cols + out_bytes)) as u64,
            flops: 2 * (rows * w.rows * w.cols * terms) as u64,
        }
    }
}

/// The norm before a router: its rows are complete.
const FOR_ROUTER: NormTask = NormTask {
    outstanding: Outstanding::Nothing,
    wanted_only: false,
    for_router: true,
};

/// The share of `experts` experts that any of `rows` rows reaches, each row having `k` of them: their weights are read. The
/// host does not know which they are; it counts as if rows chose evenly.
fn experts_hit(rows: usize, k: usize, experts: usize) -> f64 {
    1.0 - (1.0 - k as f64 / experts as f64).powf(rows as f64)
}

/// A cost of bytes alone.
fn moved(bytes: usize) -> Cost {
    Cost {
        bytes: bytes as u64,
        flops: 0,
    }
}

/// Cosines and sines of every position `[positions, D / 2]`.
fn angles(config: &ModelConfig, positions: usize) -> Result<(Vec<f32>, Vec<f32>)> {
    let rope = Rope::new(config)?;
    let half = config.head_dim / 2;
    let zeros = || memory::filled(0.0_f32, positions * half, Purpose::Step);
    let (mut cos, mut sin) = (zeros()?, zeros()?);
    let rows = cos.chunks_exact_mut(half).zip(sin.chunks_exact_mut(half));
    for (position, (cos, sin)) in rows.enumerate() {
        rope.angles(position as u32, cos, sin);
    }
    Ok((cos, sin))
}

impl Ops for GpuOps {
    type Matrix = Matrix;
    type Vector = Vector;
    type KvCache = KvCache;
    type Buffer = Buffer;
    type ResidualMemory = ResidualMemory;
    /// The host reads what a step found when it collects the step.
    type Output = ();

    type Residual<'x> = Residual<'x>;
    type Settled<'x> = Settled<'x>;
    type Routed<'x, 't> = Routed<'x>;
    type Normed<'m> = &'m Buffer;
    type Projected<'m> = Projected<'m>;
    type Queries<'m> = Queries<'m>;
    type Attended<'m> = &'m Buffer;
    type Gated<'m> = &'m Buffer;
    type Wanted<'m> = &'m Buffer;

    fn embed<'x>(&mut self, plan: &StepPlan, table: &Matrix, x: &'x mut ResidualMemory) -> Result<Residual<'x>> {
        self.check_plan(plan)?;
        let Kind::Wire(format) = table.kind else {
            return Err(Error::Internal("an embedding that is packed for products".into()));
        };
        let args = EmbedArgs {
            step: self.step,
            table: table.bytes.values().void(),
            x: x.x.floats(),
            format,
            hidden: self.config.hidden_dim as i32,
        };
        let bytes = plan.rows() * self.config.hidden_dim * (format.bytes() + 4);
        let launch = self.context.target.embed(self.shape.rows);
        self.fetches.set(false); // it waits before it reads the plan
        self.timed(Stage::Embed, moved(bytes), |ops| ops.launch(launch, &args))?;
        Ok(Residual {
            memory: x,
            outstanding: Outstanding::Nothing,
        })
    }

    fn resume<'x>(&mut self, plan: &StepPlan, x: &'x mut ResidualMemory) -> Result<Residual<'x>> {
        self.check_plan(plan)?;
        Ok(Residual {
            memory: x,
            outstanding: Outstanding::Nothing,
        })
    }

    fn norm<'x, 't>(
        &mut self,
        x: Self::Residual<'x>,
        weight: &Vector,
        t: &'t mut Buffer,
    ) -> Result<(Settled<'x>, &'t Buffer)> {
        let Residual { memory, outstanding } = x;
        let task = NormTask {
            outstanding,
            wanted_only: false,
            for_router: false,
        };
        self.queue_norm(memory, weight, t, task)?;
        Ok((Settled { memory }, t))
    }

    fn qkv<'m>(&mut self, t: &'m Buffer, w: &Matrix, bias: &Vector, qkv: &'m mut Buffer) -> Result<Projected<'m>> {
        let (rows, out, bias) = (self.rows(), qkv.floats(), bias.values());
        let cost = self.product_cost(Product::Qkv, w);
        let paired = w.kind == Kind::Heads;
        let (launch, mut args) = self.product(Product::Qkv, w, t, rows)?;
        args.bias = bias;
        args.half = if paired { self.config.head_dim as i32 / 2 } else { 0 };
        let outstanding = if launch.kernel.op == Op::QkvStore {
            Some(Multiplication {
                launch,
                args,
                cost,
                _input: t,
            })
        } else {
            args.out = out;
            self.timed(Stage::Qkv, cost, |ops| ops.launch(launch, &args))?;
            None
        };
        Ok(Projected {
            qkv,
            paired,
            outstanding,
        })
    }

    fn rope_store<'m>(
        &mut self,
        plan: &StepPlan,
        layer: usize,
        qkv: Self::Projected<'m>,
        kv: &mut KvCache,
    ) -> Result<Queries<'m>> {
        let c = &self.config;
        let args = RopeStoreArgs {
            step: self.step,
            qkv: qkv.qkv.floats().only_if(qkv.outstanding.is_none()),
            cos: self.workspace.cos.values(),
            sin: self.workspace.sin.values(),
            q: self.workspace.q.values().void(),
            kv: TypedPtr::new(kv.layer(layer)),
            page_bytes: kv.page_bytes() as i64,
            head_bytes: kv.head_bytes() as i32,
            format: self.numbers.kv,
            head_dim: c.head_dim as i32,
            heads: c.n_attn_heads as i32,
            kv_heads: c.n_kv_heads as i32,
            windowed: i32::from(c.is_windowed(layer)),
            paired: i32::from(qkv.paired),
            reserved: 0,
        };
        let queries = Queries {
            at: args.q,
            layer,
            _qkv: qkv.qkv,
        };
        if let Some(product) = qkv.outstanding {
            let args = QkvStoreArgs {
                product: product.args,
                store: args,
            };
            self.timed(Stage::Qkv, product.cost, |ops| ops.launch(product.launch, &args))?;
            return Ok(queries);
        }
        let bytes = plan.rows() * c.qkv_dim() * (4 + self.numbers.kv.bytes());
        let launch = self.context.target.rope_store(self.shape.rows);
        self.timed(Stage::RopeStore, moved(bytes), |ops| ops.launch(launch, &args))?;
        Ok(queries)
    }

    fn attention<'m>(
        &mut self,
        plan: &StepPlan,
        queries: Queries<'_>,
        sinks: &Vector,
        kv: &KvCache,
        out: &'m mut Buffer,
    ) -> Result<&'m Buffer> {
        let (c, layer) = (&self.config, queries.layer);
        let windowed = c.is_windowed(layer);
        let args = AttentionArgs {
            step: self.step,
            q: queries.at,
            kv: TypedPtr::new(kv.layer(layer)),
            sinks: sinks.values(),
            out: out.terms(),
            partials: self.workspace.partials.values(),
            arrived: self.workspace.arrived.values(),
            out_term: out.term as i64,
            page_bytes: kv.page_bytes() as i64,
            head_bytes: kv.head_bytes() as i32,
            kv_format: self.numbers.kv,
            head_dim: c.head_dim as i32,
            heads: c.n_attn_heads as i32,
            kv_heads: c.n_kv_heads as i32,
            windowed: i32::from(windowed),
            window: c.sliding_window as i32,
            out_rows: out.rows as i32,
            terms: self.numbers.terms as i32,
            format: self.numbers.format,
        };
        let cost = self.attention_cost(plan, windowed);
        let Numbers { kv: format, exact, .. } = self.numbers;
        let work = AttentionWork {
            windowed,
            rows: self.shape.rows,
            items: self.shape.decode_items,
            tiles: self.shape.prefill_tiles,
        };
        let target = self.context.target;
        let launches = target.attention(c, format, exact, &work)?;
        self.timed(Stage::Attention, cost, |ops| {
            launches
                .into_iter()
                .flatten()
                .try_for_each(|launch| ops.launch(launch, &args))
        })?;
        Ok(out)
    }

    fn attn_out<'x>(&mut self, a: &Buffer, w: &Matrix, bias: &Vector, x: Self::Settled<'x>) -> Result<Settled<'x>> {
        let (rows, out, bias) = (self.rows(), x.memory.x.floats(), bias.values());
        let cost = self.product_cost(Product::AttnOut, w);
        self.timed(Stage::AttnOut, cost, |ops| {
            ops.gemm(Product::AttnOut, w, a, rows, |args| {
                args.bias = bias;
                args.out = out;
            })
        })?;
        Ok(x)
    }

    fn route<'x, 't>(
        &mut self,
        x: Self::Settled<'x>,
        norm: &Vector,
        w: &Matrix,
        bias: &Vector,
        t: &'t mut Buffer,
    ) -> Result<Self::Routed<'x, 't>> {
        let Some(launch) = self.norm_route(w) else {
            return self.norm_then_route(x, norm, w, bias, t);
        };
        let Settled { memory } = x;
        let in_registers = NormTask {
            for_router: false, // the router's input stays in the multiprocessor
            ..FOR_ROUTER
        };
        let (norm, norm_cost) = self.norm_args(memory, norm.values(), Some(t), in_registers);
        let (route, route_cost) = self.route_args(w, bias, &memory.routes)?;
        let alone = self.shape.rows == 1 && !self.finds_rows();
        // The word has four bytes for picks.
        let tells = alone && launch.kernel.cluster > 0 && self.config.experts_per_token <= size_of::<u32>();
        let args = NormRouteArgs {
            norm,
            route,
            sort: self.sort_args(&memory.routes),
            gather: self.gather_args(t.rows(), &memory.routes),
            alone: i32::from(alone),
            reserved: 0,
            picks: memory.routes.picks.values().only_if(tells),
        };
        self.timed(Stage::Router, norm_cost + route_cost, |ops| ops.launch(launch, &args))?;
        if !alone {
            return self.send(t, memory);
        }
        let sent = if tells {
            Sending::Told(t.rows())
        } else {
            Sending::Gathered
        };
        Ok(Routed { memory, sent })
    }

    fn mlp1<'m>(&mut self, x: &Routed<'_>, w: &Matrix, bias: &Vector, h: &'m mut Buffer) -> Result<&'m Buffer> {
        let routes = &x.memory.routes;
        let cost = self.product_cost(Product::Mlp1, w);
        let (launch, mut args) = self.product(Product::Mlp1, w, &routes.gathered, routes.counts.values())?;
        args.bias = bias.values();
        args.offsets = routes.offsets.values();
        args.tiled = h.terms();
        args.tiled_term = h.term as i64;
        args.tiled_rows = h.rows as i32;
        match x.sent {
            Sending::Told(row) if launch.kernel.op == Op::Mlp1 => {
                args.input = row.terms;
                args.in_rows = row.buffer_rows;
                args.picks = routes.picks.values();
            }
            Sending::Outstanding(rows) => {
                if let Some(launch) = self.sort_mlp1(w) {
                    args.input = rows.terms;
                    args.in_term = rows.term;
                    args.in_rows = rows.buffer_rows;
                    let args = SortMlp1Args {
                        product: args,
                        sort: self.sort_args(routes),
                        most_rows: self.shape.rows as i32,
                        reserved: 0,
                    };
                    self.timed(Stage::Mlp1, cost, |ops| ops.launch(launch, &args))?;
                    return Ok(h);
                }
                self.sort_and_gather(rows, routes)?;
            }
            Sending::Gathered | Sending::Told(_) => {}
        }
        self.timed(Stage::Mlp1, cost, |ops| ops.launch(launch, &args))?;
        Ok(h)
    }

    fn mlp2<'x>(&mut self, h: &Buffer, x: Self::Routed<'x, '_>, w: &Matrix, bias: &Vector) -> Result<Residual<'x>> {
        let routes = &x.memory.routes;
        let cost = self.product_cost(Product::Mlp2, w);
        self.timed(Stage::Mlp2, cost, |ops| {
            ops.gemm(Product::Mlp2, w, h, routes.counts.values(), |args| {
                args.bias = bias.values();
                args.offsets = routes.offsets.values();
                args.y = routes.y.values().void();
                args.picks = routes.picks.values().only_if(matches!(x.sent, Sending::Told(_)));
            })
        })?;
        Ok(Residual {
            memory: x.memory,
            outstanding: Outstanding::Experts,
        })
    }

    fn settle<'x>(&mut self, x: Self::Residual<'x>) -> Result<Settled<'x>> {
        let Residual { memory, outstanding } = x;
        if outstanding == Outstanding::Experts {
            let task = NormTask {
                outstanding,
                wanted_only: false,
                for_router: false,
            };
            // The kernel sums and stores as a norm's first half does, and writes no norm.
            let (args, _) = self.norm_args(memory, TypedPtr::NULL, None, task);
            let bytes = 4 + self.sum_bytes(outstanding);
            let cost = moved(self.n_rows * self.config.hidden_dim * bytes);
            self.timed(Stage::Norm, cost, |ops| {
                ops.launch(ops.context.target.settle(ops.shape.rows), &args)
            })?;
        }
        Ok(Settled { memory })
    }

    fn norm_wanted<'t>(
        &mut self,
        _plan: &StepPlan,
        x: Residual<'_>,
        weight: &Vector,
        t: &'t mut Buffer,
    ) -> Result<&'t Buffer> {
        // The kernel finds the wanted rows in the plan on the device.
        let task = NormTask {
            outstanding: x.outstanding,
            wanted_only: true,
            for_router: false,
        };
        self.queue_norm(x.memory, weight, t, task)?;
        Ok(t)
    }

    fn unembed(&mut self, plan: &StepPlan, t: &Buffer, w: &Matrix, want: Want, _: &mut ()) -> Result<()> {
        let (draws, scores) = (want.draws(plan), want.scores(plan));
        let product = match want {
            // Only the matrix cores' kernels summarize rows as they go.
            Want::Tokens if !draws && !scores && !w.is_wire() => Product::Greedy,
            _ => Product::Logits,
        };
        let rows = self.logits_rows();
        let cost = self.product_cost(product, w);
        self.timed(Stage::Unembed, cost, |ops| ops.unembed_rows(product, t, w, rows))?;
        let candidates = self.candidates(product, w, self.shape.logits_rows)?;
        let value_bytes = if w.is_wire() { 4 } else { 8 };
        let cost = moved(self.n_wanted * candidates * value_bytes);
        self.timed(Stage::Argmax, cost, |ops| ops.argmax(w.is_wire(), candidates))?;
        if draws {
            self.draw()?;
        }
        if scores { self.score(plan) } else { Ok(()) }
    }
}
