//! The model's operations as kernel launches.
//!
//! Nothing here waits for the device or reads from it. [`super::replica`] captures one run of `model::forward` over these
//! operations for each shape of step and launches it from then on; counts and tables are read by the kernels from the
//! plan in device memory ([`super::step`]), so that only buckets of the counts make a new shape.

pub mod inspect;

use super::args::{
    ArgmaxArgs, AttentionArgs, DrawArgs, EmbedArgs, Format, GROUP_ALIGN, GatherArgs, GemmArgs, NormArgs, NormRouteArgs,
    RopeStoreArgs, RouteArgs, SLAB, SortArgs, SortGatherArgs, Step, UploadArgs,
};
use super::context::{Context, Grid};
use super::driver::DevicePtr;
use super::grids;
use super::kv::KvCache;
use super::logits::LogitsAt;
use super::memory::{DeviceBuffer, PinnedBuffer, Stream, to_host};
use super::profile::Timeline;
use super::target::{GemmShape, Product};
use super::weights::{Kind, Matrix};
use crate::batch::StepPlan;
use crate::error::{Error, Result};
use crate::memory::{self, Purpose};
use crate::model::{ModelConfig, Rope};
use crate::ops::Ops;
use crate::profile::{Cost, Stage};
use crate::replica::{StepOutput, Want};
use crate::sampler::exponential_table;
use std::sync::Arc;

/// Rows that a product may read behind a buffer's last one: its largest tile.
const SLACK_ROWS: usize = 256;

/// How a replica computes.
#[derive(Clone, Copy, Debug)]
pub struct Numbers {
    /// Of activations: FP16 or BF16.
    pub format: Format,
    /// Of keys, values and queries: the same in `fast`, float32 in `exact`.
    pub kv: Format,
    /// Terms an activation: 1 in `fast`.
    pub terms: usize,
    /// Float64 sums, to the letter of the float32 baseline where a GPU can.
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
}

/// Activations on the device.
pub struct Buffer {
    bytes: DeviceBuffer,
    /// Rows it has room for; tiled ones have slack behind them.
    rows: usize,
    /// Elements from one term to the next; 0 in a float32 buffer.
    term: usize,
    /// Stands for rows of this buffer: those whose logits are wanted.
    selects_from: Option<DevicePtr>,
}

impl Buffer {
    /// Float32 `[rows, width]`.
    pub fn plain(context: &Context, rows: usize, width: usize) -> Result<Self> {
        Ok(Self {
            bytes: DeviceBuffer::zeroed(&context.stream, 4 * rows * width)?,
            rows,
            term: 0,
            selects_from: None,
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
            selects_from: None,
        })
    }

    /// Its address, or that of the rows it selects from.
    pub fn at(&self) -> DevicePtr {
        self.selects_from.unwrap_or(self.bytes.at())
    }
}

/// Where each row's experts are computed.
pub struct Routes {
    /// `[rows, K]`, in order of the expert's index.
    experts: DeviceBuffer,
    /// `[rows, K]`
    shares: DeviceBuffer,
    /// `[rows, K]`: the slot of each.
    slots: DeviceBuffer,
    /// `[E + 1]`: the first slot of each expert.
    offsets: DeviceBuffer,
    /// `[E]`
    counts: DeviceBuffer,
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
        let zeroed = |bytes| DeviceBuffer::zeroed(&context.stream, bytes);
        Ok(Self {
            experts: zeroed(4 * rows * k)?,
            shares: zeroed(4 * rows * k)?,
            slots: zeroed(4 * rows * k)?,
            offsets: zeroed(4 * (e + 1))?,
            counts: zeroed(4 * e)?,
            gathered: Buffer::tiled(context, slots, config.hidden_dim, numbers.terms)?,
            y: zeroed(slots * config.hidden_dim * y_format(numbers).bytes())?,
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

fn y_format(numbers: &Numbers) -> Format {
    if numbers.exact { Format::F32 } else { Format::F16 }
}

/// Memory that operations use among themselves.
struct Workspace {
    /// The router's input `[rows, H]`.
    t32: DeviceBuffer,
    /// `[rows, Nq, D]`
    q: DeviceBuffer,
    cos: DeviceBuffer,
    sin: DeviceBuffer,
    partials: DeviceBuffer,
    arrived: DeviceBuffer,
    best: DeviceBuffer,
    best_index: DeviceBuffer,
    /// The sampler's table of powers.
    powers: DeviceBuffer,
}

/// [`Ops`] on a GPU.
pub struct GpuOps {
    context: Arc<Context>,
    config: ModelConfig,
    numbers: Numbers,
    step: Step,
    greedy: [PinnedBuffer; 2],
    workspace: Workspace,
    max_logits_rows: usize,
    shape: StepShape,
    /// Rows of the step, for costs: the shape's are those of its bucket.
    n_rows: usize,
    /// The same of those whose logits are wanted.
    n_wanted: usize,
    /// What the experts gave waits to be added to `x` by the next norm.
    pending: Option<Pending>,
    /// `x` was last changed by attention, so that the next norm's rows are routed.
    routes_next: bool,
    /// Where logits go in this step, if more than the largest is wanted.
    logits: LogitsAt,
    /// Measures instead of only queueing, if asked to.
    pub timeline: Option<Timeline>,
}

#[derive(Clone, Copy)]
struct Pending {
    y: DevicePtr,
    slots: DevicePtr,
    shares: DevicePtr,
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
}

/// Floats of one partial sum of attention: a head group's values, maxima and sums.
const PARTIAL_FLOATS: usize = 8 * 64 + 16;

impl GpuOps {
    /// Operations of a model whose plan lies at `step`.
    pub fn new(
        context: &Arc<Context>,
        config: &ModelConfig,
        numbers: Numbers,
        step: Step,
        sizes: Sizes,
        unembedding: &Matrix,
    ) -> Result<Self> {
        let zeroed = |bytes| DeviceBuffer::zeroed(&context.stream, bytes);
        let pinned = || PinnedBuffer::zeroed(&context.driver, 8 * sizes.logits_rows);
        let (cos, sin) = angles(config, sizes.positions)?;
        let mut ops = Self {
            context: context.clone(),
            config: config.clone(),
            numbers,
            step,
            greedy: [pinned()?, pinned()?],
            workspace: Workspace {
                t32: zeroed(4 * sizes.rows * config.hidden_dim)?,
                q: zeroed(sizes.rows * config.q_dim() * numbers.kv.bytes())?,
                cos: DeviceBuffer::of(&context.stream, &cos)?,
                sin: DeviceBuffer::of(&context.stream, &sin)?,
                partials: zeroed(4 * PARTIAL_FLOATS * sizes.partial_slots * config.n_kv_heads)?,
                arrived: zeroed(4 * sizes.rows * config.n_kv_heads)?,
                best: zeroed(1)?,
                best_index: zeroed(1)?,
                powers: DeviceBuffer::of(&context.stream, exponential_table())?,
            },
            max_logits_rows: sizes.logits_rows,
            shape: StepShape {
                rows: sizes.rows,
                logits_rows: sizes.logits_rows,
                decode_items: 1,
                prefill_tiles: 1,
                logits: false,
                draws: false,
            },
            n_rows: 0,
            n_wanted: 0,
            pending: None,
            routes_next: false,
            logits: LogitsAt::default(),
            timeline: None,
        };
        let candidates = ops.most_candidates(unembedding);
        ops.workspace.best = zeroed(4 * candidates * sizes.logits_rows)?;
        ops.workspace.best_index = zeroed(4 * candidates * sizes.logits_rows)?;
        Ok(ops)
    }

    /// The most candidates any kernel leaves for a row.
    fn most_candidates(&self, unembedding: &Matrix) -> usize {
        if unembedding.is_wire() {
            return 1;
        }
        let rows = (0..)
            .map(|i| 1 << i)
            .take_while(|&rows| rows < 2 * self.max_logits_rows);
        rows.map(|rows| {
            let shape = self.gemm_shape(Product::Greedy, unembedding, rows);
            self.context.target.gemm(&shape).candidates
        })
        .max()
        .unwrap_or(1)
    }

    /// From now on steps of this shape are queued, the first one being `plan`; more than the largest logits goes to `logits`.
    pub fn begin(&mut self, shape: StepShape, plan: &StepPlan, logits: LogitsAt) {
        self.shape = shape;
        self.n_rows = plan.rows();
        self.n_wanted = plan.logits.len();
        self.logits = logits;
        self.pending = None;
        self.routes_next = false;
    }

    /// What the steps of this parity found.
    pub fn greedy(&self, parity: usize) -> &PinnedBuffer {
        &self.greedy[parity]
    }

    /// Queues the kernel that fetches the plan.
    pub fn upload(&mut self, args: &UploadArgs) -> Result<()> {
        // SAFETY: the plan's memory outlives the replica's steps.
        unsafe { self.context.launch("upload", grids::upload(), args) }
    }

    /// Queues a kernel.
    fn launch<A: bytemuck::NoUninit>(&self, kernel: &str, grid: Grid, args: &A) -> Result<()> {
        // SAFETY: all addresses are of buffers that the replica keeps until its stream is done, sized for the largest
        // step; the structs are those of kernels/args.h.
        unsafe { self.context.launch(kernel, grid, args) }
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

    /// A product whose epilogue's fields `epilogue` fills in.
    fn gemm(
        &mut self,
        product: Product,
        w: &Matrix,
        input: &Buffer,
        rows: DevicePtr,
        epilogue: impl FnOnce(&mut GemmArgs),
    ) -> Result<()> {
        let most = match product {
            Product::Mlp1 | Product::Mlp2 => self.shape.rows * self.config.experts_per_token,
            Product::Greedy | Product::Logits => self.shape.logits_rows,
            Product::Qkv | Product::AttnOut => self.shape.rows,
        };
        let launch = self.context.target.gemm(&self.gemm_shape(product, w, most));
        let weight_format = match w.kind {
            Kind::Wire(format) => format as i16,
            _ => 0,
        };
        let mut args = GemmArgs {
            weights: w.bytes.at(),
            bias: DevicePtr::NULL,
            input: input.at(),
            in_term: input.term as i64,
            rows,
            offsets: DevicePtr::NULL,
            out: DevicePtr::NULL,
            tiled: DevicePtr::NULL,
            tiled_term: 0,
            y: DevicePtr::NULL,
            best: DevicePtr::NULL,
            best_index: DevicePtr::NULL,
            groups: w.members as i32,
            n: w.rows as i32,
            k_blocks: w.k_blocks() as i32,
            row_blocks: w.row_blocks as i32,
            in_rows: input.rows as i32,
            tiled_rows: 0,
            best_rows: 0,
            scale: w.scale,
            limit: self.config.swiglu_limit,
            format: self.numbers.format as i32,
            cols: w.cols as i32,
            weight_format,
            terms: self.numbers.terms as i16,
        };
        epilogue(&mut args);
        self.launch(&launch.kernel, launch.grid, &args)
    }

    /// Rows of the step on the device.
    fn rows(&self) -> DevicePtr {
        self.step.header
    }

    /// Rows whose logits are wanted, on the device: the fourth number of the header.
    fn logits_rows(&self) -> DevicePtr {
        self.step.header.add(12)
    }

    /// Kernels of one layer's attention: rows that decode, and tiles of prompts.
    fn attention_launches(&self) -> [Option<(&'static str, Grid)>; 2] {
        let c = &self.config;
        let target = &self.context.target;
        let matrix_cores = c.head_dim == 64 && c.n_attn_heads == 8 * c.n_kv_heads;
        if self.numbers.exact || !matrix_cores {
            let exact = target.attention_exact(self.shape.rows, c.n_kv_heads);
            if matrix_cores && exact.is_some() {
                return [exact, None];
            }
            let name = match self.numbers.kv {
                Format::F32 => "attention_plain_f32",
                Format::F16 => "attention_plain_f16",
                Format::Bf16 => "attention_plain_bf16",
                Format::Mxfp4 => unreachable!("no cache is MXFP4"),
            };
            let grid = grids::attention_plain(self.shape.rows, c.n_attn_heads, c.n_kv_heads);
            return [Some((name, grid)), None];
        }
        let (items, tiles) = (self.shape.decode_items, self.shape.prefill_tiles);
        [
            (items > 0).then(|| target.attention_decode(self.numbers.kv, items, self.shape.rows, c.n_kv_heads)),
            (tiles > 0).then(|| target.attention_prefill(self.numbers.kv, tiles, c.n_kv_heads)),
        ]
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

    /// Logits, or the candidates for each row's largest.
    fn unembed_rows(&mut self, product: Product, t: &Buffer, w: &Matrix, rows: DevicePtr) -> Result<()> {
        let (best, best_index) = (self.workspace.best.at(), self.workspace.best_index.at());
        let best_rows = self.max_logits_rows as i32;
        let logits = self.logits.rows;
        self.gemm(product, w, t, rows, |args| match product {
            Product::Logits => args.out = logits,
            _ => {
                args.best = best;
                args.best_index = best_index;
                args.best_rows = best_rows;
            }
        })
    }

    /// Values of a row that its largest logit is picked from.
    fn candidates(&self, product: Product, w: &Matrix) -> usize {
        match product {
            Product::Logits => w.rows,
            _ => {
                let shape = self.gemm_shape(product, w, self.shape.logits_rows);
                self.context.target.gemm(&shape).candidates
            }
        }
    }

    /// Each row's largest logit.
    fn argmax(&mut self, product: Product, candidates: usize) -> Result<()> {
        let (best, logits) = (self.workspace.best.at(), self.logits.rows);
        let args = ArgmaxArgs {
            step: self.step,
            best: if product == Product::Logits { logits } else { best },
            best_index: self.workspace.best_index.at(),
            host: [self.greedy[0].device(), self.greedy[1].device()],
            candidates: candidates as i32,
            best_rows: self.max_logits_rows as i32,
        };
        match product {
            Product::Logits => self.launch("argmax_logits", grids::argmax_logits(self.shape.logits_rows), &args),
            _ => self.launch("argmax", grids::argmax(self.shape.logits_rows), &args),
        }
    }

    /// A token from each row, where that is known.
    fn draw(&mut self) -> Result<()> {
        let args = DrawArgs {
            step: self.step,
            logits: self.logits.rows,
            host: self.logits.drawn,
            powers: self.workspace.powers.at(),
            sums: DevicePtr::NULL,
            vocab: self.config.vocab_size as i32,
            reserved: 0,
        };
        let rows_bytes = 4 * self.n_wanted * self.config.vocab_size;
        self.timed(Stage::Draw, moved(rows_bytes), |ops| {
            ops.launch("draw", grids::draw(ops.shape.logits_rows), &args)
        })
    }

    /// What the next norm does, which adds what the experts gave if that waits for it, and what it moves.
    fn norm_args(&mut self, x: &Buffer, weight: &DeviceBuffer, t: &Buffer) -> (NormArgs, Cost) {
        let pending = self.pending.take();
        let routes = std::mem::take(&mut self.routes_next);
        let (c, terms) = (&self.config, self.numbers.terms);
        let args = NormArgs {
            step: self.step,
            x: x.at(),
            weight: weight.at(),
            y: pending.map_or(DevicePtr::NULL, |p| p.y),
            slots: pending.map_or(DevicePtr::NULL, |p| p.slots),
            shares: pending.map_or(DevicePtr::NULL, |p| p.shares),
            t: t.at(),
            t_term: t.term as i64,
            t32: if routes {
                self.workspace.t32.at()
            } else {
                DevicePtr::NULL
            },
            y_format: y_format(&self.numbers) as i32,
            k: c.experts_per_token as i32,
            hidden: c.hidden_dim as i32,
            t_rows: t.rows as i32,
            select: i32::from(x.selects_from.is_some()),
            terms: terms as i32,
            format: self.numbers.format as i32,
            exact: i32::from(self.numbers.exact),
        };
        let rows = match x.selects_from {
            Some(_) => self.n_wanted,
            None => self.n_rows,
        };
        let y_bytes = pending.map_or(0, |_| c.experts_per_token * y_format(&self.numbers).bytes() + 4);
        let bytes = rows * c.hidden_dim * (4 + 2 * terms + y_bytes + 4 * usize::from(routes));
        (args, moved(bytes))
    }

    /// What the router does, and what it moves beside its input.
    fn route_args(&self, w: &Matrix, bias: &DeviceBuffer, routes: &Routes) -> Result<(RouteArgs, Cost)> {
        let (c, n_rows) = (&self.config, self.n_rows);
        let Kind::Wire(format) = w.kind else {
            return Err(Error::Internal("a router that is packed for products".into()));
        };
        let args = RouteArgs {
            step: self.step,
            t32: self.workspace.t32.at(),
            w: w.bytes.at(),
            bias: bias.at(),
            experts: routes.experts.at(),
            shares: routes.shares.at(),
            format: format as i32,
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

    fn sort_args(&self, routes: &Routes) -> SortArgs {
        SortArgs {
            step: self.step,
            experts: routes.experts.at(),
            offsets: routes.offsets.at(),
            counts: routes.counts.at(),
            slots: routes.slots.at(),
            n_experts: self.config.n_experts as i32,
            k: self.config.experts_per_token as i32,
        }
    }

    fn gather_args(&self, t: &Buffer, routes: &Routes) -> GatherArgs {
        GatherArgs {
            step: self.step,
            input: t.at(),
            out: routes.gathered.at(),
            slots: routes.slots.at(),
            in_term: t.term as i64,
            out_term: routes.gathered.term as i64,
            k: self.config.experts_per_token as i32,
            k_blocks: self.config.hidden_dim.div_ceil(SLAB) as i32,
            in_rows: t.rows as i32,
            out_rows: routes.gathered.rows as i32,
            terms: self.numbers.terms as i32,
            reserved: 0,
        }
    }

    /// Gives each row's experts their slots and copies the rows there.
    fn sort_and_gather(&mut self, t: &Buffer, routes: &Routes) -> Result<()> {
        let (sort, gather) = (self.sort_args(routes), self.gather_args(t, routes));
        let (rows, n_rows) = (self.shape.rows, self.n_rows);
        let (k, width, k_blocks) = (
            self.config.experts_per_token,
            self.config.hidden_dim,
            gather.k_blocks as usize,
        );
        let gathered = moved(2 * self.numbers.terms * n_rows * width * (1 + k));
        if let Some(grid) = grids::sort_gather(rows, k, k_blocks) {
            return self.timed(Stage::Gather, gathered, |ops| {
                ops.launch("sort_gather", grid, &SortGatherArgs { sort, gather })
            });
        }
        self.timed(Stage::Sort, moved(8 * n_rows * k), |ops| {
            ops.launch("sort", grids::sort(), &sort)
        })?;
        self.timed(Stage::Gather, gathered, |ops| {
            ops.launch("gather", grids::gather(rows, k_blocks), &gather)
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
            Product::Greedy => 8 * self.candidates(product, w),
        };
        let weight_bytes = (w.bytes.bytes() as f64 * weights_read) as usize;
        Cost {
            bytes: (weight_bytes + rows * (2 * terms * w.cols + out_bytes)) as u64,
            flops: 2 * (rows * w.rows * w.cols * terms) as u64,
        }
    }
}

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
    type Vector = DeviceBuffer;
    type Buffer = Buffer;
    type Routes = Routes;
    type KvCache = KvCache;

    fn embed(&mut self, plan: &StepPlan, table: &Matrix, x: &mut Buffer) -> Result<()> {
        let Kind::Wire(format) = table.kind else {
            return Err(Error::Internal("an embedding that is packed for products".into()));
        };
        let args = EmbedArgs {
            step: self.step,
            table: table.bytes.at(),
            x: x.at(),
            format: format as i32,
            hidden: self.config.hidden_dim as i32,
        };
        let bytes = plan.rows() * self.config.hidden_dim * (format.bytes() + 4);
        let grid = grids::embed(self.shape.rows);
        self.timed(Stage::Embed, moved(bytes), |ops| ops.launch("embed", grid, &args))
    }

    fn norm(&mut self, x: &Buffer, weight: &DeviceBuffer, t: &mut Buffer) -> Result<()> {
        let (args, cost) = self.norm_args(x, weight, t);
        let rows = match x.selects_from {
            Some(_) => self.shape.logits_rows,
            None => self.shape.rows,
        };
        self.timed(Stage::Norm, cost, |ops| {
            ops.launch("rmsnorm", grids::rmsnorm(rows), &args)
        })
    }

    fn qkv(&mut self, t: &Buffer, w: &Matrix, bias: &DeviceBuffer, qkv: &mut Buffer) -> Result<()> {
        let (rows, out, bias) = (self.rows(), qkv.at(), bias.at());
        let cost = self.product_cost(Product::Qkv, w);
        self.timed(Stage::Qkv, cost, |ops| {
            ops.gemm(Product::Qkv, w, t, rows, |args| {
                args.bias = bias;
                args.out = out;
            })
        })
    }

    fn rope_store(&mut self, plan: &StepPlan, layer: usize, qkv: &mut Buffer, kv: &mut KvCache) -> Result<()> {
        let c = &self.config;
        let args = RopeStoreArgs {
            step: self.step,
            qkv: qkv.at(),
            cos: self.workspace.cos.at(),
            sin: self.workspace.sin.at(),
            q: self.workspace.q.at(),
            kv: kv.layer(layer),
            page_bytes: kv.page_bytes() as i64,
            head_bytes: kv.head_bytes() as i32,
            format: self.numbers.kv as i32,
            head_dim: c.head_dim as i32,
            heads: c.n_attn_heads as i32,
            kv_heads: c.n_kv_heads as i32,
            windowed: i32::from(c.is_windowed(layer)),
        };
        let bytes = plan.rows() * c.qkv_dim() * (4 + self.numbers.kv.bytes());
        let grid = grids::rope_store(self.shape.rows);
        self.timed(Stage::RopeStore, moved(bytes), |ops| {
            ops.launch("rope_store", grid, &args)
        })
    }

    fn attention(
        &mut self,
        plan: &StepPlan,
        layer: usize,
        _qkv: &Buffer,
        sinks: &DeviceBuffer,
        kv: &KvCache,
        out: &mut Buffer,
    ) -> Result<()> {
        let c = &self.config;
        let windowed = c.is_windowed(layer);
        let args = AttentionArgs {
            step: self.step,
            q: self.workspace.q.at(),
            kv: kv.layer(layer),
            sinks: sinks.at(),
            out: out.at(),
            partials: self.workspace.partials.at(),
            arrived: self.workspace.arrived.at(),
            out_term: out.term as i64,
            page_bytes: kv.page_bytes() as i64,
            head_bytes: kv.head_bytes() as i32,
            kv_format: self.numbers.kv as i32,
            head_dim: c.head_dim as i32,
            heads: c.n_attn_heads as i32,
            kv_heads: c.n_kv_heads as i32,
            windowed: i32::from(windowed),
            window: c.sliding_window as i32,
            out_rows: out.rows as i32,
            terms: self.numbers.terms as i32,
            format: self.numbers.format as i32,
        };
        let cost = self.attention_cost(plan, windowed);
        let launches = self.attention_launches();
        self.timed(Stage::Attention, cost, |ops| {
            launches
                .into_iter()
                .flatten()
                .try_for_each(|(kernel, grid)| ops.launch(kernel, grid, &args))
        })
    }

    fn attn_out(&mut self, a: &Buffer, w: &Matrix, bias: &DeviceBuffer, x: &mut Buffer) -> Result<()> {
        let (rows, out, bias) = (self.rows(), x.at(), bias.at());
        self.routes_next = true;
        let cost = self.product_cost(Product::AttnOut, w);
        self.timed(Stage::AttnOut, cost, |ops| {
            ops.gemm(Product::AttnOut, w, a, rows, |args| {
                args.bias = bias;
                args.out = out;
            })
        })
    }

    fn route(&mut self, t: &Buffer, w: &Matrix, bias: &DeviceBuffer, routes: &mut Routes) -> Result<()> {
        let (args, cost) = self.route_args(w, bias, routes)?;
        let input = moved(4 * self.n_rows * self.config.hidden_dim);
        self.timed(Stage::Router, input + cost, |ops| {
            ops.launch("route", grids::route(ops.shape.rows, &ops.context.target), &args)
        })?;
        self.sort_and_gather(t, routes)
    }

    fn norm_route(
        &mut self,
        x: &Buffer,
        weight: &DeviceBuffer,
        t: &mut Buffer,
        w: &Matrix,
        bias: &DeviceBuffer,
        routes: &mut Routes,
    ) -> Result<()> {
        let Some(grid) = grids::norm_route(self.shape.rows, &self.context.target) else {
            self.norm(x, weight, t)?;
            return self.route(t, w, bias, routes);
        };
        self.routes_next = false; // the router's input stays in the multiprocessor
        let (norm, norm_cost) = self.norm_args(x, weight, t);
        let (route, route_cost) = self.route_args(w, bias, routes)?;
        let alone = self.shape.rows == 1;
        let args = NormRouteArgs {
            norm,
            route,
            sort: self.sort_args(routes),
            gather: self.gather_args(t, routes),
            alone: i32::from(alone),
            reserved: 0,
        };
        self.timed(Stage::Router, norm_cost + route_cost, |ops| {
            ops.launch("norm_route", grid, &args)
        })?;
        if alone { Ok(()) } else { self.sort_and_gather(t, routes) }
    }

    fn mlp1(&mut self, _t: &Buffer, routes: &Routes, w: &Matrix, bias: &DeviceBuffer, h: &mut Buffer) -> Result<()> {
        let cost = self.product_cost(Product::Mlp1, w);
        self.timed(Stage::Mlp1, cost, |ops| {
            ops.gemm(Product::Mlp1, w, &routes.gathered, routes.counts.at(), |args| {
                args.bias = bias.at();
                args.offsets = routes.offsets.at();
                args.tiled = h.at();
                args.tiled_term = h.term as i64;
                args.tiled_rows = h.rows as i32;
            })
        })
    }

    fn mlp2(&mut self, h: &Buffer, routes: &Routes, w: &Matrix, bias: &DeviceBuffer, _x: &mut Buffer) -> Result<()> {
        let cost = self.product_cost(Product::Mlp2, w);
        self.timed(Stage::Mlp2, cost, |ops| {
            ops.gemm(Product::Mlp2, w, h, routes.counts.at(), |args| {
                args.bias = bias.at();
                args.offsets = routes.offsets.at();
                args.y = routes.y.at();
            })
        })?;
        self.pending = Some(Pending {
            y: routes.y.at(),
            slots: routes.slots.at(),
            shares: routes.shares.at(),
        });
        Ok(())
    }

    fn select(&mut self, _plan: &StepPlan, x: &Buffer, selected: &mut Buffer) -> Result<()> {
        // The norm that follows reads the wanted rows of `x` itself, and adds what the experts gave to them alone.
        selected.selects_from = Some(x.at());
        Ok(())
    }

    fn unembed(&mut self, t: &Buffer, w: &Matrix, want: Want, _output: &mut StepOutput) -> Result<()> {
        let product = match want {
            // Only the matrix cores' kernels summarize rows as they go.
            Want::Greedy if !w.is_wire() => Product::Greedy,
            _ => Product::Logits,
        };
        let rows = self.logits_rows();
        let cost = self.product_cost(product, w);
        self.timed(Stage::Unembed, cost, |ops| ops.unembed_rows(product, t, w, rows))?;
        let candidates = self.candidates(product, w);
        let value_bytes = if product == Product::Logits { 4 } else { 8 };
        let cost = moved(self.n_wanted * candidates * value_bytes);
        self.timed(Stage::Argmax, cost, |ops| ops.argmax(product, candidates))?;
        match want {
            Want::Draws { .. } => self.draw(),
            Want::Greedy | Want::Logits => Ok(()),
        }
    }
}
