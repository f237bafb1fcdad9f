//! The model's operations as kernel launches.
//!
//! Each operation asks `launches.rs` for its kernels, and queues them with their arguments. No operation waits for the
//! device or reads from it; what profiles, tests and tools ask for does ([`inspect`], [`Routes::rows_by_expert`]).
//! [`super::stage`] captures one run of `model::forward` over these operations for each shape of step and launches it
//! from then on. Counts and tables are read by the kernels from the plan in device memory ([`super::step`]), so that
//! only buckets of the counts make a new shape.

mod arguments;
mod costs;
pub mod inspect;
mod one_launch;
mod queue;
mod values;

pub use arguments::Sizes;
pub use one_launch::handed_bytes;
pub use queue::Queue;
pub use values::{
    Buffer, Gated, Normed, Projected, Queries, Residual, ResidualMemory, Routed, Routes, SLACK_ROWS, Settled, slots,
    y_elements,
};

use super::args::{
    GemmArgs, Greedy, NormRouteArgs, QkvStoreArgs, SortArgs, SortGatherArgs, SortMlp1Args, Step, UploadArgs,
};
use super::catalogue::Op;
use super::context::Context;
use super::kv::KvCache;
use super::launch::Launch;
use super::layout::TypedPtr;
use super::logits::LogitsAt;
use super::shapes::{
    AttentionWork, ExpertCuts, GemmLaunch, GemmShape, MatrixForm, Mlp1Launch, NormWork, Numbers, Product,
    SortGatherLaunch, StepShape,
};
use super::target::Target;
use super::weights::{Matrix, Vector};
use crate::batch::{StepPlan, Want};
use crate::config::ModelConfig;
use crate::error::{Error, Result};
use crate::ops::Ops;
use crate::profile::Operation;
use arguments::Arguments;
use costs::Costs;
use std::sync::Arc;
use values::{Multiplication, Norm, Rows, Sending};

/// [`Ops`] on a GPU.
pub struct GpuOps {
    target: Target,
    args: Arguments,
    shape: StepShape,
    /// Rows of the step, and those whose logits are wanted: the shape's are those of its bucket.
    n_rows: usize,
    n_wanted: usize,
    /// Where kernels go.
    pub queue: Queue,
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
        let target = context.target;
        let candidates = match unembedding {
            Some(w) => target.most_candidates(config, &numbers, w.form, sizes.logits_rows)?,
            None => 1,
        };
        Ok(Self {
            target,
            args: Arguments::new(context, config, numbers, step, &sizes, candidates)?,
            shape: StepShape {
                rows: sizes.rows,
                logits_rows: sizes.logits_rows,
                decode_items: 1,
                shares_keys: false,
                whole_rows: false,
                prefill_tiles: 1,
                logits: false,
                drawable: None,
                draws: false,
                scores: false,
            },
            n_rows: 0,
            n_wanted: 0,
            queue: Queue::new(context),
        })
    }

    /// From now on steps of this shape are queued, the first one being `plan`; more than the largest logits goes to
    /// `logits`.
    pub fn begin(&mut self, shape: StepShape, plan: &StepPlan, logits: LogitsAt) {
        self.shape = shape;
        self.n_rows = plan.rows();
        self.n_wanted = plan.logits.len();
        self.args.logits = logits;
        self.queue.begin_step();
    }

    /// The model.
    pub fn config(&self) -> &ModelConfig {
        &self.args.config
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

    /// Queues the kernel that fetches the plan.
    pub fn upload(&mut self, args: &UploadArgs) -> Result<()> {
        self.queue.launch(self.target.upload(), args)
    }

    /// What the step of this turn found, which has the largest logits of `rows` rows.
    ///
    /// # Safety
    /// The step is done, and the next of its turn has not been submitted.
    pub unsafe fn greedy(&self, turn: usize, rows: usize) -> &[Greedy] {
        // SAFETY: as our caller vouches.
        let found = unsafe { self.args.greedy.read() };
        &found[turn * self.args.max_logits_rows..][..rows]
    }

    /// What the step's operations cost.
    fn costs(&self) -> Costs<'_> {
        Costs {
            config: &self.args.config,
            numbers: &self.args.numbers,
            rows: self.n_rows,
            wanted: self.n_wanted,
        }
    }

    /// What the choice of a product's kernel depends on.
    fn gemm_shape(&self, product: Product, form: MatrixForm) -> GemmShape {
        let Arguments { config, numbers, .. } = &self.args;
        let rows = match product {
            Product::Greedy | Product::Logits => self.shape.logits_rows,
            _ => self.shape.rows,
        };
        self.target
            .product_shape(config, product, form, numbers.elements, numbers.terms, rows)
    }

    /// Its kernel.
    fn choose(&self, product: Product, w: &Matrix) -> Result<GemmLaunch> {
        self.target.gemm(&self.gemm_shape(product, w.form))
    }

    /// Queues it with these arguments.
    fn multiply(&mut self, operation: Operation, product: Product, w: &Matrix, args: &GemmArgs) -> Result<()> {
        let chosen = self.choose(product, w)?;
        let cost = self.costs().product(product, w, &chosen);
        self.queue.operation(operation, cost, chosen.launch, args)
    }

    /// A norm of all rows or of those whose logits are wanted.
    fn prepare_norm(&self, x: &ResidualMemory, weight: &Vector, t: &Buffer, work: NormWork) -> Norm {
        let rows = if work.wanted_only {
            self.shape.logits_rows
        } else {
            self.shape.rows
        };
        Norm {
            launch: self.target.norm(&self.args.config, &self.args.numbers, &work, rows),
            args: self.args.norm(x, weight.values(), Some(t), &work),
            cost: self.costs().norm(&work),
        }
    }

    fn queue_norm(&mut self, norm: &Norm) -> Result<()> {
        self.queue
            .operation(Operation::Norm, norm.cost, norm.launch, &norm.args)
    }

    /// Rows after attention's norm, by a kernel of its own where it is outstanding.
    pub fn normed<'m>(&mut self, t: Normed<'m>) -> Result<&'m Buffer> {
        if let Some(norm) = &t.outstanding {
            self.queue_norm(norm)?;
        }
        Ok(t.t)
    }

    /// Norm and product in one kernel, where there is one for the step's rows and weights held so.
    fn norm_qkv(&self, form: MatrixForm) -> Option<Launch> {
        let shape = self.gemm_shape(Product::Qkv, form);
        self.target.norm_qkv(&self.args.config, &shape)
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
        let for_router = NormWork {
            for_router: true,
            ..NormWork::default()
        };
        self.queue_norm(&self.prepare_norm(memory, norm, t, for_router))?;
        let args = self.args.route(w, bias, &memory.routes)?;
        let launch = self.target.route(self.shape.rows);
        let cost = self.costs().router_input() + self.costs().route(w);
        self.queue.operation(Operation::Router, cost, launch, &args)?;
        self.send(t, memory)
    }

    /// Sends the rows to the experts that the router has picked, unless mlp1 may find or index them.
    fn send<'x>(&mut self, t: &Buffer, memory: &'x mut ResidualMemory) -> Result<Routed<'x>> {
        let Numbers { elements, terms, .. } = self.args.numbers;
        let sent = if self.target.gathers(elements, terms, self.shape.rows) {
            self.sort_and_gather(t.tiles(), &memory.routes)?;
            Sending::Gathered
        } else {
            Sending::Outstanding(t.tiles())
        };
        Ok(Routed { memory, sent })
    }

    /// Gives each row's experts their slots and copies the rows there.
    fn sort_and_gather(&mut self, t: Rows, routes: &Routes) -> Result<()> {
        let (sort_args, gather_args) = (self.args.sort(routes), self.args.gather(t, routes));
        let (sort_cost, gather_cost) = (self.costs().sort(), self.costs().gather());
        match self.target.sort_gather(self.shape.rows, self.args.k_blocks()) {
            SortGatherLaunch::Together(launch) => {
                let args = SortGatherArgs {
                    sort: sort_args,
                    gather: gather_args,
                };
                self.queue.operation(Operation::Gather, gather_cost, launch, &args)
            }
            SortGatherLaunch::Apart { sort, gather } => {
                self.queue.operation(Operation::Sort, sort_cost, sort, &sort_args)?;
                self.queue
                    .operation(Operation::Gather, gather_cost, gather, &gather_args)
            }
        }
    }

    /// Gives each row's experts their slots and each slot its row, and cuts the experts' rows into tiles, of which each
    /// is so many blocks in mlp1 and in mlp2.
    fn sort_with_index(&mut self, cuts: Option<ExpertCuts>, spans: [usize; 2], routes: &Routes) -> Result<()> {
        let mut sort = SortArgs {
            slot_rows: routes.slot_rows.values(),
            ..self.args.sort(routes)
        };
        if let Some(cuts) = cuts {
            sort.mlp1_cuts = routes.mlp1_cuts.values();
            sort.mlp2_cuts = routes.mlp2_cuts.values();
            [sort.mlp1_spans, sort.mlp2_spans] = spans.map(|blocks| blocks as i32);
            sort.tile_steps = cuts.tile_steps as i32;
            sort.places = cuts.places as i32;
        }
        let launch = self.target.sort(self.shape.rows);
        let cost = self.costs().sort();
        self.queue.operation(Operation::Sort, cost, launch, &sort)
    }
}

impl Ops for GpuOps {
    type Matrix = Matrix;
    type Vector = Vector;
    type KvCache = KvCache;
    type Buffer = Buffer;
    type ResidualMemory = ResidualMemory;

    type Residual<'x> = Residual<'x>;
    type Settled<'x> = Settled<'x>;
    type Routed<'x, 't> = Routed<'x>;
    type Normed<'m> = Normed<'m>;
    type Projected<'m> = Projected<'m>;
    type Queries<'m> = Queries<'m>;
    type Attended<'m> = &'m Buffer;
    type Gated<'m> = Gated<'m>;
    type LogitsRows<'m> = &'m Buffer;

    fn embed<'x>(&mut self, plan: &StepPlan, table: &Matrix, x: &'x mut ResidualMemory) -> Result<Residual<'x>> {
        self.check_plan(plan)?;
        let args = self.args.embed(table, &x.x)?;
        let launch = self.target.embed(self.shape.rows);
        let cost = self.costs().embed(table);
        self.queue.operation(Operation::Embed, cost, launch, &args)?;
        Ok(Residual {
            memory: x,
            outstanding: false,
        })
    }

    fn resume<'x>(&mut self, plan: &StepPlan, x: &'x mut ResidualMemory) -> Result<Residual<'x>> {
        self.check_plan(plan)?;
        Ok(Residual {
            memory: x,
            outstanding: false,
        })
    }

    fn norm<'x, 't>(
        &mut self,
        x: Self::Residual<'x>,
        weight: &Vector,
        t: &'t mut Buffer,
    ) -> Result<(Settled<'x>, Normed<'t>)> {
        let Residual { memory, outstanding } = x;
        let work = NormWork {
            adds: outstanding,
            ..NormWork::default()
        };
        let norm = self.prepare_norm(memory, weight, t, work);
        let mut normed = Normed::from(&*t);
        // Which weights come is not known yet: if these are held otherwise, `qkv` queues the norm.
        if outstanding && self.norm_qkv(MatrixForm::Heads).is_some() {
            normed.outstanding = Some(norm);
        } else {
            self.queue_norm(&norm)?;
        }
        Ok((Settled { memory }, normed))
    }

    fn qkv<'m>(&mut self, mut t: Normed<'m>, w: &Matrix, bias: &Vector, qkv: &'m mut Buffer) -> Result<Projected<'m>> {
        let chosen = self.choose(Product::Qkv, w)?;
        let mut cost = self.costs().product(Product::Qkv, w, &chosen);
        let mut launch = chosen.launch;
        let mut norm = None;
        if let Some(both) = self.norm_qkv(w.form)
            && let Some(outstanding) = t.outstanding.take()
        {
            launch = both;
            cost = cost + outstanding.cost;
            norm = Some(outstanding.args);
        }
        let t = self.normed(t)?;
        let stores = norm.is_some() || launch.kernel.op == Op::QkvStore;
        let paired = w.form == MatrixForm::Heads;
        let half = self.args.config.head_dim as i32 / 2;
        let args = GemmArgs {
            bias: bias.values(),
            half: if paired { half } else { 0 },
            out: qkv.floats().only_if(!stores),
            ..self.args.product(w, t, self.args.rows())
        };
        let outstanding = if stores {
            Some(Multiplication {
                launch,
                args,
                norm,
                cost,
                _input: t,
            })
        } else {
            self.queue.operation(Operation::Qkv, cost, launch, &args)?;
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
        _plan: &StepPlan,
        layer: usize,
        qkv: Self::Projected<'m>,
        kv: &mut KvCache,
    ) -> Result<Queries<'m>> {
        let Projected {
            qkv,
            paired,
            outstanding,
        } = qkv;
        let multiplied = qkv.floats().only_if(outstanding.is_none());
        let store = self.args.rope_store(multiplied, paired, kv, layer);
        let queries = Queries {
            at: store.q,
            layer,
            _qkv: qkv,
        };
        if let Some(Multiplication {
            launch,
            args: product,
            norm,
            cost,
            ..
        }) = outstanding
        {
            let args = QkvStoreArgs { product, store };
            match norm.map(|norm| self.args.norm_qkv(norm, args)) {
                Some(args) => self.queue.operation(Operation::Qkv, cost, launch, &args)?,
                None => self.queue.operation(Operation::Qkv, cost, launch, &args)?,
            }
            return Ok(queries);
        }
        let launch = self.target.rope_store(self.shape.rows);
        let cost = self.costs().rope_store();
        self.queue.operation(Operation::RopeStore, cost, launch, &store)?;
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
        let Arguments { config, numbers, .. } = &self.args;
        let work = AttentionWork {
            windowed: config.is_windowed(queries.layer),
            rows: self.shape.rows,
            items: self.shape.decode_items,
            shares_keys: self.shape.shares_keys,
            whole_rows: self.shape.whole_rows,
            tiles: self.shape.prefill_tiles,
        };
        let launches = self.target.attention(config, numbers.kv, numbers.exact, &work)?;
        let args = self.args.attention(&queries, sinks, kv, out);
        let cost = self.costs().attention(plan, work.windowed);
        self.queue.timed(Operation::Attention, cost, |queue| {
            let mut launches = launches.into_iter().flatten();
            launches.try_for_each(|launch| queue.launch(launch, &args))
        })?;
        Ok(out)
    }

    fn attn_out<'x>(&mut self, a: &Buffer, w: &Matrix, bias: &Vector, x: Self::Settled<'x>) -> Result<Settled<'x>> {
        let args = GemmArgs {
            bias: bias.values(),
            out: x.memory.x.floats(),
            ..self.args.product(w, a, self.args.rows())
        };
        self.multiply(Operation::AttnOut, Product::AttnOut, w, &args)?;
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
        let Arguments { config, numbers, .. } = &self.args;
        let Some(chosen) = self.target.norm_route(config, numbers, w.form, self.shape.rows) else {
            return self.norm_then_route(x, norm, w, bias, t);
        };
        let Settled { memory } = x;
        let work = NormWork::default(); // the router's input stays in the multiprocessor
        let args = NormRouteArgs {
            norm: self.args.norm(memory, norm.values(), Some(t), &work),
            route: self.args.route(w, bias, &memory.routes)?,
            sort: self.args.sort(&memory.routes),
            gather: self.args.gather(t.tiles(), &memory.routes),
            sends: i32::from(chosen.sends),
            reserved: 0,
            picks: memory.routes.picks.values().only_if(chosen.tells),
        };
        let cost = self.costs().norm(&work) + self.costs().route(w);
        self.queue.operation(Operation::Router, cost, chosen.launch, &args)?;
        if !chosen.sends {
            return self.send(t, memory);
        }
        let sent = if chosen.tells {
            Sending::ByPicks(t.tiles())
        } else {
            Sending::Gathered
        };
        Ok(Routed { memory, sent })
    }

    fn mlp1<'m>(&mut self, x: &Routed<'_>, w: &Matrix, bias: &Vector, h: &'m mut Buffer) -> Result<Gated<'m>> {
        let routes = &x.memory.routes;
        let shape = self.gemm_shape(Product::Mlp1, w.form);
        let chosen = self.target.gemm(&shape)?;
        let cost = self.costs().product(Product::Mlp1, w, &chosen);
        let mut args = GemmArgs {
            bias: bias.values(),
            offsets: routes.offsets.values(),
            tiled: h.terms(),
            tiled_term: h.term as i64,
            tiled_rows: h.rows as i32,
            ..self.args.product(w, &routes.gathered, routes.counts.values())
        };
        let mut cuts = None;
        match x.sent {
            Sending::ByPicks(row) if chosen.launch.kernel.op == Op::Mlp1 => {
                args.input = row.terms;
                args.in_rows = row.buffer_rows;
                args.picks = routes.picks.values();
            }
            Sending::Outstanding(rows) => {
                let launch = self.target.mlp1(&shape, self.shape.rows, chosen.launch);
                if !matches!(launch, Mlp1Launch::Gathered(_)) {
                    args.input = rows.terms;
                    args.in_term = rows.term;
                    args.in_rows = rows.buffer_rows;
                }
                match launch {
                    Mlp1Launch::Sorting(launch) => {
                        let args = SortMlp1Args {
                            product: args,
                            sort: self.args.sort(routes),
                            most_rows: self.shape.rows as i32,
                            reserved: 0,
                        };
                        self.queue.operation(Operation::Mlp1, cost, launch, &args)?;
                        return Ok(Gated { h, cuts });
                    }
                    Mlp1Launch::Indexing(_, how) => {
                        cuts = how;
                        let mlp2 = self.gemm_shape(Product::Mlp2, w.form);
                        let spans = [&shape, &mlp2].map(|of| self.target.spans(of, chosen.launch.kernel));
                        self.sort_with_index(cuts, spans, routes)?;
                        args.slot_rows = routes.slot_rows.values();
                        args.cuts = routes.mlp1_cuts.values().only_if(cuts.is_some());
                    }
                    Mlp1Launch::Gathered(_) => self.sort_and_gather(rows, routes)?,
                }
            }
            Sending::Gathered | Sending::ByPicks(_) => {}
        }
        self.queue.operation(Operation::Mlp1, cost, chosen.launch, &args)?;
        Ok(Gated { h, cuts })
    }

    fn mlp2<'x>(&mut self, h: Gated<'_>, x: Self::Routed<'x, '_>, w: &Matrix, bias: &Vector) -> Result<Residual<'x>> {
        let routes = &x.memory.routes;
        let chosen = self.choose(Product::Mlp2, w)?;
        let cost = self.costs().product(Product::Mlp2, w, &chosen);
        // Cuts are for tiles of mlp1's height; a kernel with others cuts the rows itself.
        let own = self.target.cuts(chosen.launch.kernel).map(|own| own.tile_steps);
        let is_cut = h.cuts.is_some_and(|cuts| own == Some(cuts.tile_steps));
        let args = GemmArgs {
            bias: bias.values(),
            offsets: routes.offsets.values(),
            y: routes.y.values().void(),
            picks: routes.picks.values().only_if(matches!(x.sent, Sending::ByPicks(_))),
            cuts: routes.mlp2_cuts.values().only_if(is_cut),
            ..self.args.product(w, h.h, routes.counts.values())
        };
        self.queue.operation(Operation::Mlp2, cost, chosen.launch, &args)?;
        Ok(Residual {
            memory: x.memory,
            outstanding: true,
        })
    }

    fn settle<'x>(&mut self, x: Self::Residual<'x>) -> Result<Settled<'x>> {
        let Residual { memory, outstanding } = x;
        if outstanding {
            let adds = NormWork {
                adds: true,
                ..NormWork::default()
            };
            // The kernel sums and stores as a norm's first half does, and writes no norm.
            let args = self.args.norm(memory, TypedPtr::NULL, None, &adds);
            let launch = self.target.settle(self.shape.rows);
            let cost = self.costs().settle();
            self.queue.operation(Operation::Norm, cost, launch, &args)?;
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
        let work = NormWork {
            adds: x.outstanding,
            wanted_only: true,
            ..NormWork::default()
        };
        self.queue_norm(&self.prepare_norm(x.memory, weight, t, work))?;
        Ok(t)
    }

    fn unembed(&mut self, plan: &StepPlan, t: &Buffer, w: &Matrix, want: Want) -> Result<()> {
        let product = self.target.unembedding(w.form, plan, want);
        let chosen = self.choose(product, w)?;
        let cost = self.costs().product(product, w, &chosen);
        let args = self.args.unembed(t, w, product == Product::Logits);
        self.queue.operation(Operation::Unembed, cost, chosen.launch, &args)?;

        // Candidates may be tokens that may not be sampled.
        let of_logits = w.is_wire() || plan.drawable.is_some();
        let candidates = if of_logits { w.rows } else { chosen.candidates };
        let drawable = plan.drawable_of(w.rows);
        let args = self.args.argmax(of_logits, candidates, drawable);
        let launch = self.target.argmax(of_logits, self.shape.logits_rows);
        let cost = self.costs().argmax(candidates, of_logits);
        self.queue.operation(Operation::Argmax, cost, launch, &args)?;

        if want.draws(plan) {
            let args = self.args.draw(drawable);
            let launches = self.target.draw(self.shape.logits_rows);
            let cost = self.costs().logits(self.n_wanted);
            self.queue.timed(Operation::Draw, cost, |queue| {
                launches.into_iter().try_for_each(|launch| queue.launch(launch, &args))
            })?;
        }
        if want.scores(plan) {
            let args = self.args.score();
            let launch = self.target.score(self.shape.logits_rows);
            let scored = plan.logits.iter().filter(|row| row.score.is_some()).count();
            let cost = self.costs().logits(scored);
            self.queue.operation(Operation::Score, cost, launch, &args)?;
        }
        Ok(())
    }
}
