//! The kernels' arguments: where an operation's values lie, and the model's numbers.

use super::values::{Buffer, Queries, ResidualMemory, Routes, Rows, y_elements};
use crate::backend::gpu::args::{
    ArgmaxArgs, AttentionArgs, DrawArgs, EmbedArgs, Format, GatherArgs, GemmArgs, Greedy, NormArgs, NormQkvArgs,
    PARTIAL_FLOATS, QkvStoreArgs, RopeStoreArgs, RouteArgs, SLAB, ScoreArgs, SortArgs, Step, StepHeader,
};
use crate::backend::gpu::context::Context;
use crate::backend::gpu::kv::KvCache;
use crate::backend::gpu::layout::TypedPtr;
use crate::backend::gpu::logits::LogitsAt;
use crate::backend::gpu::memory::{DeviceBuffer, PinnedBuffer};
use crate::backend::gpu::shapes::{MatrixForm, NormWork, Numbers};
use crate::backend::gpu::weights::{Matrix, Vector};
use crate::config::ModelConfig;
use crate::error::{Error, Result};
use crate::memory::{self, Purpose};
use crate::model::Rope;
use crate::sampler::exponential_table;
use std::mem::offset_of;

/// Sizes that do not follow from the model.
#[derive(Clone, Copy, Debug)]
pub struct Sizes {
    /// The most rows of a step.
    pub rows: usize,
    /// The most rows whose logits are wanted.
    pub logits_rows: usize,
    /// Positions a sequence can have.
    pub positions: usize,
    /// Partial sums of attention.
    pub partials: usize,
    /// Steps under way, each of which has memory of its own for what it finds.
    pub turns: usize,
}

/// Memory that operations use among themselves.
pub struct Workspace {
    /// The router's input `[rows, H]`.
    pub t32: DeviceBuffer<f32>,
    /// `[rows, Nq, D]`
    pub q: DeviceBuffer,
    cos: DeviceBuffer<f32>,
    sin: DeviceBuffer<f32>,
    partials: DeviceBuffer<f32>,
    /// Counters, zeros between kernels.
    arrived: DeviceBuffer<i32>,
    /// `[candidates][max_logits_rows]`
    best: DeviceBuffer<f32>,
    best_index: DeviceBuffer<i32>,
    /// The sampler's table of powers.
    powers: DeviceBuffer<u64>,
    /// The sums of the rows' exponentials.
    sums: DeviceBuffer<f64>,
}

impl Workspace {
    /// Room for steps of these sizes, in which the unembedding leaves at most so many candidates a row.
    fn new(
        context: &Context,
        config: &ModelConfig,
        numbers: &Numbers,
        sizes: &Sizes,
        candidates: usize,
    ) -> Result<Self> {
        let stream = &context.stream;
        let (cos, sin) = angles(config, sizes.positions)?;
        Ok(Self {
            t32: DeviceBuffer::zeroed(stream, sizes.rows * config.hidden_dim)?,
            q: DeviceBuffer::zeroed(stream, sizes.rows * config.q_dim() * numbers.kv.bytes())?,
            cos: DeviceBuffer::of(stream, &cos)?,
            sin: DeviceBuffer::of(stream, &sin)?,
            partials: DeviceBuffer::zeroed(stream, PARTIAL_FLOATS * sizes.partials * config.n_kv_heads)?,
            arrived: DeviceBuffer::zeroed(stream, sizes.rows * config.n_kv_heads)?,
            best: DeviceBuffer::zeroed(stream, candidates * sizes.logits_rows)?,
            best_index: DeviceBuffer::zeroed(stream, candidates * sizes.logits_rows)?,
            powers: DeviceBuffer::of(stream, exponential_table())?,
            sums: DeviceBuffer::zeroed(stream, sizes.logits_rows)?,
        })
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

/// What arguments are made of, beside an operation's values.
pub struct Arguments {
    pub config: ModelConfig,
    pub numbers: Numbers,
    /// The plan on the device.
    step: Step,
    /// `[turns][max_logits_rows]`
    pub greedy: PinnedBuffer<Greedy>,
    pub workspace: Workspace,
    pub max_logits_rows: usize,
    /// Where logits go in this step, if more than the largest is wanted.
    pub logits: LogitsAt,
}

impl Arguments {
    /// Of a model whose plan lies at `step`.
    pub fn new(
        context: &Context,
        config: &ModelConfig,
        numbers: Numbers,
        step: Step,
        sizes: &Sizes,
        candidates: usize,
    ) -> Result<Self> {
        Ok(Self {
            config: config.clone(),
            numbers,
            step,
            greedy: PinnedBuffer::zeroed(&context.driver, sizes.turns * sizes.logits_rows)?,
            workspace: Workspace::new(context, config, &numbers, sizes, candidates)?,
            max_logits_rows: sizes.logits_rows,
            logits: LogitsAt::default(),
        })
    }

    /// Rows of the step on the device.
    pub fn rows(&self) -> TypedPtr<i32> {
        self.count(offset_of!(StepHeader, rows))
    }

    /// Rows whose logits are wanted, on the device.
    pub fn logits_rows(&self) -> TypedPtr<i32> {
        self.count(offset_of!(StepHeader, logits_rows))
    }

    /// A count of the step's header, so many bytes behind its beginning.
    fn count(&self, offset: usize) -> TypedPtr<i32> {
        TypedPtr::new(self.step.header.raw().add(offset))
    }

    /// Rows of a table in the wire format.
    pub fn embed(&self, table: &Matrix, x: &Buffer) -> Result<EmbedArgs> {
        let MatrixForm::Wire(format) = table.form else {
            return Err(Error::Internal("an embedding that is packed for products".into()));
        };
        Ok(EmbedArgs {
            step: self.step,
            table: table.bytes.values().void(),
            x: x.floats(),
            format: format.into(),
            hidden: self.config.hidden_dim as i32,
        })
    }

    /// Without `t` no norm is written.
    pub fn norm(&self, x: &ResidualMemory, weight: TypedPtr<f32>, t: Option<&Buffer>, work: &NormWork) -> NormArgs {
        let c = &self.config;
        NormArgs {
            step: self.step,
            x: x.x.floats(),
            weight,
            y: x.routes.y.values().void().only_if(work.adds),
            slots: x.routes.slots.values().only_if(work.adds),
            shares: x.routes.shares.values().only_if(work.adds),
            t: t.map_or(TypedPtr::NULL, Buffer::terms),
            t_term: t.map_or(0, |t| t.term as i64),
            t32: self.workspace.t32.values().only_if(work.for_router),
            y_format: y_elements(&self.numbers).into(),
            k: c.experts_per_token as i32,
            hidden: c.hidden_dim as i32,
            t_rows: t.map_or(0, |t| t.rows as i32),
            select: i32::from(work.wanted_only),
            terms: self.numbers.terms as i32,
            format: self.numbers.elements.into(),
            exact: i32::from(self.numbers.exact),
        }
    }

    /// A product of rows whose counts lie at `rows`, but for its epilogue's fields.
    pub fn product(&self, w: &Matrix, input: &Buffer, rows: TypedPtr<i32>) -> GemmArgs {
        let weight_format = match w.form {
            MatrixForm::Wire(format) => Format::from(format) as i16,
            _ => 0,
        };
        GemmArgs {
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
            format: self.numbers.elements.into(),
            cols: w.cols as i32,
            weight_format,
            terms: self.numbers.terms as i16,
            half: 0,
            picked: self.config.experts_per_token as i32,
            picks: TypedPtr::NULL,
            slot_rows: TypedPtr::NULL,
            cuts: TypedPtr::NULL,
        }
    }

    /// Of `qkv` in float32, unless the product is stored by the kernel that multiplies.
    pub fn rope_store(&self, qkv: TypedPtr<f32>, paired: bool, kv: &KvCache, layer: usize) -> RopeStoreArgs {
        let c = &self.config;
        RopeStoreArgs {
            step: self.step,
            qkv,
            cos: self.workspace.cos.values(),
            sin: self.workspace.sin.values(),
            q: self.workspace.q.values().void(),
            kv: TypedPtr::new(kv.layer(layer)),
            page_bytes: kv.page_bytes() as i64,
            head_bytes: kv.head_bytes() as i32,
            format: self.numbers.kv.into(),
            head_dim: c.head_dim as i32,
            heads: c.n_attn_heads as i32,
            kv_heads: c.n_kv_heads as i32,
            windowed: i32::from(c.is_windowed(layer)),
            paired: i32::from(paired),
            reserved: 0,
        }
    }

    /// Of a row whose norm is outstanding.
    pub fn norm_qkv(&self, norm: NormArgs, qkv: QkvStoreArgs) -> NormQkvArgs {
        NormQkvArgs {
            qkv,
            norm,
            arrived: self.workspace.arrived.values(),
        }
    }

    pub fn attention(&self, queries: &Queries<'_>, sinks: &Vector, kv: &KvCache, out: &Buffer) -> AttentionArgs {
        let (c, layer) = (&self.config, queries.layer);
        AttentionArgs {
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
            head_dim: c.head_dim as i32,
            heads: c.n_attn_heads as i32,
            kv_heads: c.n_kv_heads as i32,
            windowed: i32::from(c.is_windowed(layer)),
            window: c.sliding_window as i32,
            out_rows: out.rows as i32,
            terms: self.numbers.terms as i32,
            format: self.numbers.elements.into(),
            reserved: 0,
        }
    }

    /// A router in the wire format.
    pub fn route(&self, w: &Matrix, bias: &Vector, routes: &Routes) -> Result<RouteArgs> {
        let c = &self.config;
        let MatrixForm::Wire(format) = w.form else {
            return Err(Error::Internal("a router that is packed for products".into()));
        };
        Ok(RouteArgs {
            step: self.step,
            t32: self.workspace.t32.values(),
            w: w.bytes.values().void(),
            bias: bias.values(),
            experts: routes.experts.values(),
            shares: routes.shares.values(),
            format: format.into(),
            hidden: c.hidden_dim as i32,
            n_experts: c.n_experts as i32,
            k: c.experts_per_token as i32,
            exact: i32::from(self.numbers.exact),
            reserved: 0,
        })
    }

    pub fn sort(&self, routes: &Routes) -> SortArgs {
        SortArgs {
            step: self.step,
            experts: routes.experts.values(),
            offsets: routes.offsets.values(),
            counts: routes.counts.values(),
            slots: routes.slots.values(),
            n_experts: self.config.n_experts as i32,
            k: self.config.experts_per_token as i32,
            slot_rows: TypedPtr::NULL,
            mlp1_cuts: TypedPtr::NULL,
            mlp2_cuts: TypedPtr::NULL,
            mlp1_spans: 0,
            mlp2_spans: 0,
            tile_steps: 0,
            places: 0,
        }
    }

    pub fn gather(&self, t: Rows, routes: &Routes) -> GatherArgs {
        GatherArgs {
            step: self.step,
            input: t.terms,
            out: routes.gathered.terms(),
            slots: routes.slots.values(),
            in_term: t.term,
            out_term: routes.gathered.term as i64,
            k: self.config.experts_per_token as i32,
            k_blocks: self.k_blocks() as i32,
            in_rows: t.buffer_rows,
            out_rows: routes.gathered.rows as i32,
            terms: self.numbers.terms as i32,
            reserved: 0,
        }
    }

    /// Slabs of a row of the residual stream.
    pub fn k_blocks(&self) -> usize {
        self.config.hidden_dim.div_ceil(SLAB)
    }

    /// The unembedding, which leaves candidates and, if `whole_rows` are wanted, logits.
    pub fn unembed(&self, t: &Buffer, w: &Matrix, whole_rows: bool) -> GemmArgs {
        GemmArgs {
            out: self.logits.rows.only_if(whole_rows),
            best: self.workspace.best.values(),
            best_index: self.workspace.best_index.values(),
            best_rows: self.max_logits_rows as i32,
            ..self.product(w, t, self.logits_rows())
        }
    }

    /// Of so many candidates a row, or of the first `drawable` logits.
    pub fn argmax(&self, of_logits: bool, candidates: usize, drawable: usize) -> ArgmaxArgs {
        ArgmaxArgs {
            step: self.step,
            best: if of_logits {
                self.logits.rows
            } else {
                self.workspace.best.values()
            },
            best_index: self.workspace.best_index.values(),
            host: self.greedy.values(),
            candidates: candidates as i32,
            best_rows: self.max_logits_rows as i32,
            drawable: drawable as i32,
            reserved: 0,
        }
    }

    pub fn draw(&self, drawable: usize) -> DrawArgs {
        DrawArgs {
            step: self.step,
            logits: self.logits.rows,
            host: self.logits.drawn,
            host_rows: self.logits.turn_rows as i64,
            powers: self.workspace.powers.values(),
            sums: self.workspace.sums.values(),
            vocab: self.config.vocab_size as i32,
            drawable: drawable as i32,
        }
    }

    pub fn score(&self) -> ScoreArgs {
        ScoreArgs {
            step: self.step,
            logits: self.logits.rows,
            host: self.logits.scores,
            host_rows: self.logits.turn_rows as i64,
            vocab: self.config.vocab_size as i32,
            reserved: 0,
        }
    }
}
