//! The model's operations on the CPU.

use super::attention::{Attend, scratch_values};
use super::buffers::{Buffer, Queries, ResidualMemory, Routed, Routes};
use super::epilogue::{AddBias, Combine, NOTHING, SwiGlu, Unembed};
use super::gemm::Epilogue;
use super::inputs::Inputs;
use super::kv::BLOCK_TOKENS;
use super::kv::{Element, KvCache};
use super::mode::ComputeMode;
use super::screen::{Worth, exact_greedy};
use super::shared::Shared;
use crate::batch::{Chunk, Greedy, LogitsRow, StepOutput, StepPlan, Want};
use crate::config::ModelConfig;
use crate::error::{Error, Result};
use crate::memory::{self, Purpose};
use crate::model::Rope;
use crate::ops::Ops;
use crate::options::Precision;
use crate::profile::{Cost, Operation, Profile};
use crate::simd::{LANES, Simd, VectorCode};
use crate::weights::{Layout, Packed, RowMajor, WeightFormat};
use rayon::prelude::*;
use std::cell::RefCell;
use std::marker::PhantomData;
use std::sync::Mutex;
use std::time::Instant;

/// [`Ops`] on the CPU, with the KV cache's element `E`: float32 for `exact`, float16 for `fast`.
pub struct CpuOps<E> {
    config: ModelConfig,
    mode: ComputeMode,
    rope: Rope,
    inputs: Inputs,
    /// 0, 1, 2, ...: all rows of a step.
    all_rows: Vec<u32>,
    cos: Vec<f32>,
    sin: Vec<f32>,
    /// The sum over experts `[rows, H]`.
    combined: Vec<f32>,
    /// Of the step that ran last, until it is collected.
    pub output: StepOutput,
    worth: Worth,
    profile: Option<Profile>,
    element: PhantomData<E>,
}

impl<E: Element> CpuOps<E> {
    /// Operations of a model for steps of at most `max_rows` rows.
    pub fn new(config: &ModelConfig, mode: ComputeMode, max_rows: usize, profile: bool) -> Result<Self> {
        let half = config.head_dim / 2;
        let picks = max_rows * config.experts_per_token;
        let mut inputs = Inputs::default();
        inputs.make_room(max_rows, config.hidden_dim.max(config.q_dim()), 1)?;
        inputs.make_room(picks, config.hidden_dim.max(config.intermediate_dim), config.n_experts)?;
        Ok(Self {
            config: config.clone(),
            mode,
            rope: Rope::new(config)?,
            inputs,
            all_rows: memory::collect(0..max_rows as u32, Purpose::Step)?,
            cos: memory::room(max_rows * half, Purpose::Step)?,
            sin: memory::room(max_rows * half, Purpose::Step)?,
            combined: memory::room(max_rows * config.hidden_dim, Purpose::Step)?,
            output: StepOutput::default(),
            worth: Worth::default(),
            profile: profile.then(Profile::default),
            element: PhantomData,
        })
    }

    /// Times so far, if they were asked for.
    pub fn profile(&self) -> Option<&Profile> {
        self.profile.as_ref()
    }

    fn timed<R>(&mut self, operation: Operation, cost: Cost, run: impl FnOnce(&mut Self) -> R) -> R {
        let start = Instant::now();
        let result = run(self);
        if let Some(profile) = &mut self.profile {
            profile.add(operation, start.elapsed(), cost);
        }
        result
    }

    /// All rows of `source` times a dense matrix.
    fn dense(&mut self, source: &Buffer, w: &Packed, epilogue: &impl Epilogue) -> Result<()> {
        let all = &self.all_rows[..source.rows()];
        self.inputs
            .encode(self.mode, w.format, &source.values, w.cols, std::iter::once(all))?;
        self.mode.multiply(w, &self.inputs, epilogue)
    }

    /// The argmax of `rows` of `t` without their logits; gives those for which it has to be computed with all logits.
    fn screen(
        &mut self,
        t: &Buffer,
        rows: Vec<u32>,
        w: &Packed,
        drawable: usize,
        greedy: &mut [Greedy],
    ) -> Result<Vec<u32>> {
        if rows.is_empty() || !self.worth.estimates() {
            return Ok(rows);
        }
        if rows.len() == t.rows() {
            let left_out = exact_greedy(self.mode, &mut self.inputs, t, &rows, w, drawable, greedy)?;
            self.worth.judge(rows.len(), left_out.len());
            return Ok(left_out);
        }
        let mut some = Buffer::new(rows.len(), t.width)?;
        rows.iter()
            .for_each(|&row| some.values.extend_from_slice(t.row(row as usize)));
        let mut found = memory::filled(NOTHING, rows.len(), Purpose::Step)?;
        let all = &self.all_rows[..rows.len()];
        let left_out = exact_greedy(self.mode, &mut self.inputs, &some, all, w, drawable, &mut found)?;
        self.worth.judge(rows.len(), left_out.len());
        rows.iter()
            .zip(found)
            .for_each(|(&row, found)| greedy[row as usize] = found);
        memory::collect(left_out.iter().map(|&row| rows[row as usize]), Purpose::Step)
    }

    /// See [`Ops::unembed`].
    fn find(&mut self, plan: &StepPlan, t: &Buffer, w: &Packed, want: Want, output: &mut StepOutput) -> Result<()> {
        let rows = t.rows();
        output.greedy.clear();
        memory::resize(&mut output.greedy, rows, NOTHING, Purpose::Step)?;
        let is_for_host = |row: u32| plan.logits.get(row as usize).is_some_and(LogitsRow::is_for_host);
        let is_stored = |&row: &u32| want == Want::Logits || is_for_host(row);
        let stored = memory::collect((0..rows as u32).filter(is_stored), Purpose::Step)?;
        memory::resize(output.logits.own(), stored.len() * w.rows, 0.0, Purpose::Step)?;
        if rows == 0 {
            return Ok(());
        }
        let drawable = plan.drawable_of(w.rows);
        self.timed(Operation::Unembed, product_cost(w, 1, rows), |ops| {
            let is_stored = |row: &u32| stored.binary_search(row).is_ok();
            let others = memory::collect((0..rows as u32).filter(|row| !is_stored(row)), Purpose::Step)?;
            let mut computed = match ops.mode.precision {
                Precision::Exact => ops.screen(t, others, w, drawable, &mut output.greedy)?,
                Precision::Fast => others,
            };
            memory::append(&mut computed, &stored, Purpose::Step)?;
            computed.sort_unstable();
            ops.unembed_rows(t, &computed, &stored, w, drawable, output)
        })?;
        for greedy in &mut output.greedy {
            if greedy.token == NOTHING.token {
                greedy.token = 0;
            }
        }
        Ok(())
    }

    /// The argmax of `rows` of `t`, and the logits of those that are `stored`, in their order.
    fn unembed_rows(
        &mut self,
        t: &Buffer,
        rows: &[u32],
        stored: &[u32],
        w: &Packed,
        drawable: usize,
        output: &mut StepOutput,
    ) -> Result<()> {
        if rows.is_empty() {
            return Ok(());
        }
        let place = |row: u32| stored.binary_search(&row).ok();
        let epilogue = Unembed {
            vocab: w.rows,
            drawable,
            places: &memory::collect((0..t.rows() as u32).map(place), Purpose::Step)?,
            logits: Shared::new(output.logits.own()),
            greedy: Mutex::new(&mut output.greedy),
        };
        self.inputs
            .encode(self.mode, w.format, &t.values, w.cols, std::iter::once(rows))?;
        self.mode.multiply(w, &self.inputs, &epilogue)
    }

    /// Row `i` of `t`, which gets `rows` of them, is the norm of row `source(i)` of `x`.
    fn norm_rows(
        &mut self,
        x: &Buffer,
        rows: usize,
        source: impl Fn(usize) -> usize + Sync,
        weight: &[f32],
        t: &mut Buffer,
    ) -> Result<()> {
        t.set_rows(rows)?;
        let cost = buffer_cost(2 * t.values.len(), 4);
        self.timed(Operation::Norm, cost, |ops| {
            let rows = t.values.par_chunks_exact_mut(x.width).enumerate();
            rows.with_min_len(4).for_each(|(i, t)| {
                ops.mode.level.run(Norm {
                    precision: ops.mode.precision,
                    x: x.row(source(i)),
                    weight,
                    t,
                })
            });
        });
        Ok(())
    }

    /// Sends rows `t` to the experts of their `K` largest logits.
    pub fn pick_experts(&mut self, t: &Buffer, w: &Packed, bias: &Vec<f32>, routes: &mut Routes) -> Result<()> {
        routes.logits.set_rows(t.rows())?;
        self.timed(Operation::Router, product_cost(w, 1, t.rows()), |ops| {
            // The router's input stays float32: a rounded one sends tokens to other experts.
            let all = &ops.all_rows[..t.rows()];
            ops.inputs
                .encode(ops.mode, WeightFormat::F32, &t.values, w.cols, std::iter::once(all))?;
            ops.mode.multiply(
                w,
                &ops.inputs,
                &AddBias {
                    bias,
                    out: Shared::new(&mut routes.logits.values),
                    onto: false,
                },
            )?;
            let k = ops.config.experts_per_token;
            routes.begin(t.rows() * k)?;
            for logits in routes.logits.values.chunks_exact(ops.config.n_experts) {
                pick_largest(logits, k, &mut routes.experts, &mut routes.shares);
            }
            routes.group(k)
        })
    }
}

/// The cost of a product of `inputs` rows with `members` of a matrix's members.
fn product_cost(w: &Packed, members: usize, inputs: usize) -> Cost {
    let weights = (members * w.tiles * w.tile_bytes) as u64;
    let activations = (inputs * (w.rows + w.cols) * 4) as u64;
    Cost {
        bytes: weights + activations,
        flops: 2 * (inputs * w.rows * w.cols) as u64,
    }
}

fn buffer_cost(values: usize, flops_per_value: usize) -> Cost {
    Cost {
        bytes: 4 * values as u64,
        flops: (values * flops_per_value) as u64,
    }
}

impl<E: Element> Ops for CpuOps<E> {
    type Matrix = Packed;
    type Vector = Vec<f32>;
    type KvCache = KvCache;
    type Buffer = Buffer;
    type ResidualMemory = ResidualMemory;

    type Residual<'x> = &'x mut ResidualMemory;
    type Settled<'x> = &'x mut ResidualMemory;
    type Routed<'x, 't> = Routed<'x, 't>;
    type Normed<'m> = &'m Buffer;
    type Projected<'m> = &'m mut Buffer;
    type Queries<'m> = Queries<'m>;
    type Attended<'m> = &'m Buffer;
    type Gated<'m> = &'m Buffer;
    type LogitsRows<'m> = &'m Buffer;

    fn embed<'x>(
        &mut self,
        plan: &StepPlan,
        table: &Packed,
        memory: &'x mut ResidualMemory,
    ) -> Result<&'x mut ResidualMemory> {
        let x = &mut memory.x;
        x.set_rows(plan.rows())?;
        self.timed(Operation::Embed, buffer_cost(2 * x.values.len(), 0), |_| {
            let rows = RowMajor.tile_rows();
            for (row, &token) in x.values.chunks_exact_mut(table.cols).zip(&plan.tokens) {
                let tile = table.tile(0, token as usize / rows);
                let bytes = if table.format == WeightFormat::F32 { 4 } else { 2 };
                let source = &tile[token as usize % rows * table.cols * bytes..][..table.cols * bytes];
                RowMajor.read(table.format, table.cols, source, row);
            }
        });
        Ok(memory)
    }

    fn resume<'x>(&mut self, plan: &StepPlan, x: &'x mut ResidualMemory) -> Result<&'x mut ResidualMemory> {
        if x.x.rows() == plan.rows() {
            return Ok(x);
        }
        let (there, rows) = (x.x.rows(), plan.rows());
        Err(Error::Internal(format!(
            "{there} rows of the residual stream for a step of {rows}"
        )))
    }

    fn norm<'x, 't>(
        &mut self,
        x: Self::Residual<'x>,
        weight: &Vec<f32>,
        t: &'t mut Buffer,
    ) -> Result<(Self::Settled<'x>, &'t Buffer)> {
        self.norm_rows(&x.x, x.x.rows(), |row| row, weight, t)?;
        Ok((x, t))
    }

    fn qkv<'m>(&mut self, t: &Buffer, w: &Packed, bias: &Vec<f32>, qkv: &'m mut Buffer) -> Result<&'m mut Buffer> {
        qkv.set_rows(t.rows())?;
        self.timed(Operation::Qkv, product_cost(w, 1, t.rows()), |ops| {
            ops.dense(
                t,
                w,
                &AddBias {
                    bias,
                    out: Shared::new(&mut qkv.values),
                    onto: false,
                },
            )
        })?;
        Ok(qkv)
    }

    fn rope_store<'m>(
        &mut self,
        plan: &StepPlan,
        layer: usize,
        qkv: Self::Projected<'m>,
        kv: &mut KvCache,
    ) -> Result<Queries<'m>> {
        let cost = buffer_cost(2 * qkv.values.len(), 2);
        self.timed(Operation::RopeStore, cost, |ops| {
            let half = ops.config.head_dim / 2;
            if layer == 0 {
                memory::resize(&mut ops.cos, plan.rows() * half, 0.0, Purpose::Step)?;
                memory::resize(&mut ops.sin, plan.rows() * half, 0.0, Purpose::Step)?;
                for (i, &position) in plan.positions.iter().enumerate() {
                    let at = i * half..(i + 1) * half;
                    ops.rope.angles(position, &mut ops.cos[at.clone()], &mut ops.sin[at]);
                }
            }
            for chunk in &plan.chunks {
                for i in 0..chunk.rows {
                    let row = chunk.first_row + i;
                    let at = row * half..(row + 1) * half;
                    let position = chunk.first_position + i;
                    let block = kv.block(plan, chunk, layer, position);
                    ops.mode.level.run(RotateStore::<E> {
                        qkv: &mut qkv.values[row * qkv.width..][..qkv.width],
                        q_dim: ops.config.q_dim(),
                        cos: &ops.cos[at.clone()],
                        sin: &ops.sin[at],
                        kv,
                        layer,
                        block,
                        offset: position % BLOCK_TOKENS,
                        element: PhantomData,
                    });
                }
            }
            Ok::<_, Error>(())
        })?;
        Ok(Queries { qkv, layer })
    }

    fn attention<'m>(
        &mut self,
        plan: &StepPlan,
        queries: Queries<'_>,
        sinks: &Vec<f32>,
        kv: &KvCache,
        out: &'m mut Buffer,
    ) -> Result<&'m Buffer> {
        let Queries { qkv, layer } = queries;
        out.set_rows(plan.rows())?;
        let window = self.config.window(layer).unwrap_or(usize::MAX);
        let seen = |position: usize| (position + 1).saturating_sub(window)..position + 1;
        let positions: usize = plan.positions.iter().map(|&p| seen(p as usize).len()).sum();
        let cost = Cost {
            bytes: (positions * 2 * self.config.kv_dim() * E::BYTES) as u64,
            flops: (positions * 4 * self.config.q_dim()) as u64,
        };
        self.timed(Operation::Attention, cost, |ops| {
            let (d, kv_heads) = (ops.config.head_dim, ops.config.n_kv_heads);
            let group = ops.config.n_attn_heads / kv_heads;
            let shared = Shared::new(&mut out.values);
            let rows = plan.chunks.iter().flat_map(|c| (0..c.rows).map(move |i| (c, i)));
            let rows: Vec<(&Chunk, usize)> = memory::collect(rows, Purpose::Step)?;
            (0..rows.len() * kv_heads).into_par_iter().try_for_each(|task| {
                let ((chunk, i), head) = (rows[task / kv_heads], task % kv_heads);
                let row = chunk.first_row + i;
                // SAFETY: each task has its own row and heads.
                let out = unsafe { shared.slice((row * kv_heads + head) * group * d, group * d) };
                let positions = seen(chunk.first_position + i);
                let values = scratch_values(group, &positions, d);
                SCRATCH.with_borrow_mut(|scratch| {
                    scratch.clear();
                    memory::resize(scratch, values, 0.0, Purpose::Step)?;
                    ops.mode.level.run(Attend::<E> {
                        kv,
                        plan,
                        chunk,
                        layer,
                        head,
                        positions,
                        queries: &qkv.row(row)[head * group * d..][..group * d],
                        sinks: &sinks[head * group..][..group],
                        head_dim: d,
                        scratch,
                        out,
                        precision: ops.mode.precision,
                        element: PhantomData,
                    });
                    Ok::<_, Error>(())
                })
            })
        })?;
        Ok(out)
    }

    fn attn_out<'x>(
        &mut self,
        a: &Buffer,
        w: &Packed,
        bias: &Vec<f32>,
        x: Self::Settled<'x>,
    ) -> Result<Self::Settled<'x>> {
        self.timed(Operation::AttnOut, product_cost(w, 1, a.rows()), |ops| {
            ops.dense(
                a,
                w,
                &AddBias {
                    bias,
                    out: Shared::new(&mut x.x.values),
                    onto: true,
                },
            )
        })?;
        Ok(x)
    }

    fn route<'x, 't>(
        &mut self,
        x: Self::Settled<'x>,
        norm: &Vec<f32>,
        w: &Packed,
        bias: &Vec<f32>,
        t: &'t mut Buffer,
    ) -> Result<Routed<'x, 't>> {
        self.norm_rows(&x.x, x.x.rows(), |row| row, norm, t)?;
        self.pick_experts(t, w, bias, &mut x.routes)?;
        Ok(Routed { memory: x, t })
    }

    fn mlp1<'m>(&mut self, x: &Routed<'_, '_>, w: &Packed, bias: &Vec<f32>, h: &'m mut Buffer) -> Result<&'m Buffer> {
        let (t, routes) = (x.t, &x.memory.routes);
        h.set_rows(routes.rows.len())?;
        self.timed(
            Operation::Mlp1,
            product_cost(w, routes.experts_used(), routes.rows.len()),
            |ops| {
                ops.inputs
                    .encode(ops.mode, w.format, &t.values, w.cols, routes.groups(&routes.rows))?;
                ops.mode.multiply(
                    w,
                    &ops.inputs,
                    &SwiGlu {
                        bias,
                        limit: ops.config.swiglu_limit,
                        precision: ops.mode.precision,
                        width: ops.config.intermediate_dim,
                        out: Shared::new(&mut h.values),
                    },
                )
            },
        )?;
        Ok(h)
    }

    fn mlp2<'x>(
        &mut self,
        h: &Buffer,
        x: Self::Routed<'x, '_>,
        w: &Packed,
        bias: &Vec<f32>,
    ) -> Result<Self::Residual<'x>> {
        let ResidualMemory { x: out, routes } = &mut *x.memory;
        self.timed(
            Operation::Mlp2,
            product_cost(w, routes.experts_used(), routes.rows.len()),
            |ops| {
                let picks = &routes.picks[..routes.rows.len()];
                ops.inputs
                    .encode(ops.mode, w.format, &h.values, w.cols, routes.groups(picks))?;
                ops.combined.clear();
                memory::resize(&mut ops.combined, out.values.len(), 0.0, Purpose::Step)?;
                ops.mode.multiply_in_order(
                    w,
                    &ops.inputs,
                    &Combine {
                        bias,
                        shares: &routes.pick_shares,
                        rows: &routes.rows,
                        width: w.rows,
                        out: Shared::new(&mut ops.combined),
                    },
                )?;
                for (x, sum) in out.values.iter_mut().zip(&ops.combined) {
                    *x += sum;
                }
                Ok::<_, Error>(())
            },
        )?;
        Ok(x.memory)
    }

    /// Nothing is ever outstanding.
    fn settle<'x>(&mut self, x: Self::Residual<'x>) -> Result<Self::Settled<'x>> {
        Ok(x)
    }

    fn norm_wanted<'t>(
        &mut self,
        plan: &StepPlan,
        x: &mut ResidualMemory,
        weight: &Vec<f32>,
        t: &'t mut Buffer,
    ) -> Result<&'t Buffer> {
        self.norm_rows(&x.x, plan.logits.len(), |i| plan.logits[i].row, weight, t)?;
        Ok(t)
    }

    fn unembed(&mut self, plan: &StepPlan, t: &Buffer, w: &Packed, want: Want) -> Result<()> {
        let mut output = std::mem::take(&mut self.output);
        self.find(plan, t, w, want, &mut output)?;
        self.output = output;
        Ok(())
    }
}

thread_local! {
    /// A worker's scores; they grow to the longest context and stay.
    static SCRATCH: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
}

/// Registers the destructor of this thread's scores, for which there may be no memory later.
pub fn prepare_thread() {
    SCRATCH.with(|_| ());
}

/// One row's norm.
struct Norm<'a> {
    precision: Precision,
    x: &'a [f32],
    weight: &'a [f32],
    t: &'a mut [f32],
}

impl VectorCode for Norm<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        let n = self.x.len();
        let mean = match self.precision {
            Precision::Exact => {
                (self.x.iter().map(|&x| f64::from(x * x)).sum::<f64>() / n as f64 + f64::from(1e-5_f32)) as f32
            }
            Precision::Fast => {
                let (chunks, tail) = self.x.as_chunks::<LANES>();
                let mut sums = [0.0_f32; LANES];
                for chunk in chunks {
                    for (sum, x) in sums.iter_mut().zip(chunk) {
                        *sum += x * x;
                    }
                }
                let squares = sums.iter().sum::<f32>() + tail.iter().map(|x| x * x).sum::<f32>();
                squares / n as f32 + 1e-5
            }
        };
        let scale = 1.0 / mean.sqrt();
        for ((t, &x), &w) in self.t.iter_mut().zip(self.x).zip(self.weight) {
            *t = match self.precision {
                Precision::Exact => (f64::from(w) * (f64::from(scale) * f64::from(x))) as f32,
                Precision::Fast => w * (scale * x),
            };
        }
    }
}

/// One row's rotation of queries and keys, and its keys' and values' way into the cache.
struct RotateStore<'a, E> {
    /// `[D * (Nq + 2 Nkv)]`
    qkv: &'a mut [f32],
    q_dim: usize,
    cos: &'a [f32],
    sin: &'a [f32],
    kv: &'a mut KvCache,
    layer: usize,
    block: usize,
    offset: usize,
    element: PhantomData<E>,
}

impl<E: Element> VectorCode for RotateStore<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        let d = 2 * self.cos.len();
        let kv_dim = (self.qkv.len() - self.q_dim) / 2;
        let (rotated, values) = self.qkv.split_at_mut(self.q_dim + kv_dim);
        for head in rotated.chunks_exact_mut(d) {
            rotate(head, self.cos, self.sin);
        }
        let keys = rotated[self.q_dim..].chunks_exact(d);
        for (head, (key, value)) in keys.zip(values.chunks_exact(d)).enumerate() {
            // SAFETY: under `VectorCode::run`.
            unsafe {
                self.kv
                    .store::<S, E>(self.layer, self.block, head, self.offset, key, value)
            };
        }
    }
}

/// Rotates the pairs `(i, i + D / 2)` of a head.
#[inline(always)]
fn rotate(head: &mut [f32], cos: &[f32], sin: &[f32]) {
    let (first, second) = head.split_at_mut(cos.len());
    for (((a, b), &cos), &sin) in first.iter_mut().zip(second).zip(cos).zip(sin) {
        (*a, *b) = (a.mul_add(cos, -(*b * sin)), b.mul_add(cos, *a * sin));
    }
}

/// The `k` largest logits, the largest first (ties: lower index first), and their softmax.
fn pick_largest(logits: &[f32], k: usize, experts: &mut Vec<u32>, shares: &mut Vec<f32>) {
    let first = experts.len();
    for _ in 0..k {
        let taken = &experts[first..];
        let free = |i: &usize| !taken.contains(&(*i as u32));
        // NaN counts as the smallest, so that there are always k experts.
        let larger = |a: f32, b: f32| a > b || b.is_nan() && !a.is_nan();
        let best = (0..logits.len())
            .filter(free)
            .reduce(|best, i| if larger(logits[i], logits[best]) { i } else { best });
        experts.push(best.unwrap_or(0) as u32);
    }
    let max = f64::from(logits[experts[first] as usize]);
    let exp = |&e: &u32| ((f64::from(logits[e as usize]) - max) as f32).exp();
    let sum: f64 = experts[first..].iter().map(|e| f64::from(exp(e))).sum();
    shares.extend(experts[first..].iter().map(|e| (f64::from(exp(e)) / sum) as f32));
}
