//! The model's operations on the CPU.

use super::attention::Attend;
use super::gemm::{At, Engine, Epilogue, Inputs, MAX_ESTIMATE_COLUMNS, Sums, estimate_error, exact_dot};
use super::kv::{Element, KvCache};
use super::shared::Shared;
use super::tiles::TILE;
use crate::batch::{BLOCK_TOKENS, Chunk, StepPlan};
use crate::error::Result;
use crate::model::{ModelConfig, Rope};
use crate::ops::Ops;
use crate::options::Precision;
use crate::profile::{Cost, Profile, Stage};
use crate::replica::{Greedy, StepOutput, Want};
use crate::simd::{Kernel, LANES, Simd};
use crate::weights::{Format, Layout, Packed, RowMajor};
use rayon::prelude::*;
use std::cell::RefCell;
use std::marker::PhantomData;
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

/// Activations `[rows, width]` in float32.
#[derive(Clone, Debug)]
pub struct Buffer {
    width: usize,
    values: Vec<f32>,
}

impl Buffer {
    /// Room for `max_rows` rows, none of them there yet.
    pub fn new(max_rows: usize, width: usize) -> Self {
        Self {
            width,
            values: Vec::with_capacity(max_rows * width),
        }
    }

    /// Rows there are.
    pub fn rows(&self) -> usize {
        self.values.len() / self.width
    }

    /// `[rows, width]`
    pub fn values(&self) -> &[f32] {
        &self.values
    }

    /// The values, to be written.
    pub fn values_mut(&mut self) -> &mut [f32] {
        &mut self.values
    }

    /// Makes it hold so many rows; their values are whatever they were.
    pub fn set_rows(&mut self, rows: usize) {
        self.values.resize(rows * self.width, 0.0);
    }

    fn row(&self, row: usize) -> &[f32] {
        &self.values[row * self.width..][..self.width]
    }
}

/// The experts of each row, grouped by expert.
#[derive(Clone, Debug)]
pub struct Routes {
    /// For each row its experts, the largest share first: `[rows, K]`.
    pub experts: Vec<u32>,
    /// Their shares, `[rows, K]`.
    pub shares: Vec<f32>,
    /// Where each expert's picks begin, and their end: `[E + 1]`.
    offsets: Vec<usize>,
    /// The row of each pick, grouped by expert, rows in order.
    rows: Vec<u32>,
    /// The share of each pick.
    pick_shares: Vec<f32>,
    /// 0, 1, 2, ...: the picks as rows of the experts' inner activations.
    picks: Vec<u32>,
    logits: Buffer,
}

impl Routes {
    /// Room for `max_rows` rows of a model.
    pub fn new(config: &ModelConfig, max_rows: usize) -> Self {
        let picks = max_rows * config.experts_per_token;
        Self {
            experts: Vec::with_capacity(picks),
            shares: Vec::with_capacity(picks),
            offsets: vec![0; config.n_experts + 1],
            rows: Vec::with_capacity(picks),
            pick_shares: Vec::with_capacity(picks),
            picks: (0..picks as u32).collect(),
            logits: Buffer::new(max_rows, config.n_experts),
        }
    }

    /// Groups `experts` and `shares` by expert.
    pub fn group(&mut self, experts_per_token: usize) {
        self.offsets.fill(0);
        for &e in &self.experts {
            self.offsets[e as usize + 1] += 1;
        }
        for e in 1..self.offsets.len() {
            self.offsets[e] += self.offsets[e - 1];
        }
        self.rows.resize(self.experts.len(), 0);
        self.pick_shares.resize(self.experts.len(), 0.0);
        // Filling moves each expert's offset to its end, which is the next one's begin.
        for (i, (&e, &share)) in self.experts.iter().zip(&self.shares).enumerate() {
            let at = &mut self.offsets[e as usize];
            self.rows[*at] = (i / experts_per_token) as u32;
            self.pick_shares[*at] = share;
            *at += 1;
        }
        self.offsets.rotate_right(1);
        self.offsets[0] = 0;
    }

    fn groups<'a>(&'a self, of: &'a [u32]) -> impl Iterator<Item = &'a [u32]> {
        self.offsets.windows(2).map(|w| &of[w[0]..w[1]])
    }

    fn experts_used(&self) -> usize {
        self.offsets.windows(2).filter(|w| w[1] > w[0]).count()
    }
}

/// [`Ops`] on the CPU, with the KV cache's element `E`: float32 for `exact`, float16 for `fast`.
pub struct CpuOps<E> {
    config: ModelConfig,
    engine: Engine,
    rope: Rope,
    inputs: Inputs,
    /// 0, 1, 2, ...: all rows of a step.
    all_rows: Vec<u32>,
    cos: Vec<f32>,
    sin: Vec<f32>,
    /// The sum over experts `[rows, H]`.
    combined: Vec<f32>,
    profile: Option<Profile>,
    element: PhantomData<E>,
}

impl<E: Element> CpuOps<E> {
    /// Operations of a model for steps of at most `max_rows` rows.
    pub fn new(config: &ModelConfig, engine: Engine, max_rows: usize, profile: bool) -> Self {
        let half = config.head_dim / 2;
        Self {
            config: config.clone(),
            engine,
            rope: Rope::new(config),
            inputs: Inputs::default(),
            all_rows: (0..max_rows as u32).collect(),
            cos: Vec::with_capacity(max_rows * half),
            sin: Vec::with_capacity(max_rows * half),
            combined: Vec::with_capacity(max_rows * config.hidden_dim),
            profile: profile.then(Profile::default),
            element: PhantomData,
        }
    }

    /// Times so far, if they were asked for.
    pub fn profile(&self) -> Option<&Profile> {
        self.profile.as_ref()
    }

    fn timed<R>(&mut self, stage: Stage, cost: Cost, run: impl FnOnce(&mut Self) -> R) -> R {
        let start = Instant::now();
        let result = run(self);
        if let Some(profile) = &mut self.profile {
            profile.add(stage, start.elapsed(), cost);
        }
        result
    }

    /// All rows of `source` times a dense matrix.
    fn dense(&mut self, source: &Buffer, w: &Packed, epilogue: &impl Epilogue) {
        let all = &self.all_rows[..source.rows()];
        self.inputs
            .encode(self.engine, w.format, &source.values, w.cols, std::iter::once(all));
        self.engine.multiply(w, &self.inputs, epilogue);
    }
}

impl<E: Element> CpuOps<E> {
    /// The exact summary without most of the exact logits: an estimate in float32, whose error is bounded, leaves a
    /// few rows of the matrix that can hold the largest; only those are summed in float64. Gives up where there is no
    /// bound.
    fn screen(&mut self, t: &Buffer, w: &Packed, output: &mut StepOutput) -> bool {
        let norm = |x: &[f32]| x.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>().sqrt() as f32;
        let bound = estimate_error(w.cols);
        let errors: Vec<f32> = t.values.chunks_exact(t.width).map(|x| norm(x) * bound).collect();
        if w.cols > MAX_ESTIMATE_COLUMNS || !errors.iter().all(|e| e.is_finite()) {
            return false;
        }
        self.timed(Stage::Unembed, product_cost(w, 1, t.rows()), |ops| {
            let norms = w.row_norms.get_or_init(|| ops.engine.row_norms(w));
            let screen = Screen {
                vocab: w.rows,
                norms,
                errors: &errors,
                all: Mutex::new(vec![Candidates::default(); t.rows()]),
            };
            ops.engine
                .estimate(w, &mut ops.inputs, &t.values, &ops.all_rows[..t.rows()], &screen);
            let all = screen.all.into_inner().unwrap_or_else(PoisonError::into_inner);
            let rows = t.values.par_chunks_exact(t.width).zip(all).zip(&mut output.greedy);
            rows.for_each(|((x, mut candidates), greedy)| {
                candidates.prune();
                candidates.rows.sort_unstable_by_key(|&(row, _)| row);
                for (row, _) in candidates.rows {
                    let logit = exact_dot(w, row as usize, x);
                    if logit > greedy.logit || greedy.token == NOTHING.token && logit == greedy.logit {
                        *greedy = Greedy { token: row, logit };
                    }
                }
            });
        });
        for greedy in &mut output.greedy {
            greedy.token = if greedy.token == NOTHING.token { 0 } else { greedy.token };
        }
        true
    }
}

/// Rows of the unembedding whose logits may be the largest.
#[derive(Clone)]
struct Candidates {
    /// No largest logit lies below this.
    least: f32,
    /// Rows, and what their logits cannot exceed.
    rows: Vec<(u32, f32)>,
}

impl Default for Candidates {
    fn default() -> Self {
        Self {
            least: f32::NEG_INFINITY,
            rows: Vec::new(),
        }
    }
}

impl Candidates {
    /// Candidates kept before those that have fallen behind are dropped.
    const MANY: usize = 64;

    /// Takes a row whose logit is at most `most`, NaN if that is not known.
    fn add(&mut self, row: u32, most: f32) {
        self.rows.push((row, most));
        if self.rows.len().is_multiple_of(Self::MANY) {
            self.prune();
        }
    }

    fn prune(&mut self) {
        let least = self.least;
        // NaN, of a row without a bound, is never less.
        self.rows
            .retain(|&(_, most)| !matches!(most.partial_cmp(&least), Some(std::cmp::Ordering::Less)));
    }
}

/// Whether a row is out of the running; NaN, of a row without a bound, never is.
fn is_less(most: f32, least: f32) -> bool {
    most < least
}

/// An error from which on sums may have overflowed, so that it bounds nothing.
const BOUNDLESS: f32 = 1e29;

/// Finds the candidates of each input.
struct Screen<'a> {
    vocab: usize,
    /// Of the matrix's rows.
    norms: &'a [Sums],
    /// The bound of the estimate's error for a row of norm 1, for each input.
    errors: &'a [f32],
    all: Mutex<Vec<Candidates>>,
}

impl Epilogue for Screen<'_> {
    type State = Vec<Candidates>;

    fn begin(&self) -> Vec<Candidates> {
        // What other workers have found spares this one its first candidates.
        let all = self.all.lock().unwrap_or_else(PoisonError::into_inner);
        let fresh = |found: &Candidates| Candidates {
            least: found.least,
            rows: Vec::new(),
        };
        all.iter().map(fresh).collect()
    }

    #[inline(always)]
    unsafe fn finish<S: Simd>(&self, state: &mut Vec<Candidates>, at: At, sums: &Sums) {
        let candidates = &mut state[at.input];
        let (norms, error, least) = (&self.norms[at.tile], self.errors[at.input], candidates.least);
        // Products that underflow are off by more than their share.
        let error = |norm: f32| norm * error + f32::MIN_POSITIVE;
        let behind = |sum: f32, error: f32| (sum + error < least) & (error < BOUNDLESS);
        let mut ahead = 0;
        for i in 0..TILE {
            ahead |= u32::from(!behind(sums[i], error(norms[i])));
        }
        if ahead == 0 {
            return;
        }
        let first = at.tile * TILE;
        let rows = 0..TILE.min(self.vocab - first);
        for i in rows.clone() {
            let error = error(norms[i]);
            if error < BOUNDLESS && sums[i] - error > candidates.least {
                candidates.least = sums[i] - error;
            }
        }
        for i in rows {
            let error = error(norms[i]);
            let most = if error < BOUNDLESS { sums[i] + error } else { f32::NAN };
            if !is_less(most, candidates.least) {
                candidates.add((first + i) as u32, most);
            }
        }
    }

    fn end(&self, state: Vec<Candidates>) {
        let mut all = self.all.lock().unwrap_or_else(PoisonError::into_inner);
        for (all, mine) in all.iter_mut().zip(state) {
            all.least = all.least.max(mine.least);
            all.rows.extend(mine.rows);
        }
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
    type Buffer = Buffer;
    type Routes = Routes;
    type KvCache = KvCache;

    fn embed(&mut self, plan: &StepPlan, table: &Packed, x: &mut Buffer) -> Result<()> {
        x.set_rows(plan.rows());
        self.timed(Stage::Embed, buffer_cost(2 * x.values.len(), 0), |_| {
            let rows = RowMajor.tile_rows();
            for (row, &token) in x.values.chunks_exact_mut(table.cols).zip(&plan.tokens) {
                let tile = table.tile(0, token as usize / rows);
                let bytes = if table.format == Format::F32 { 4 } else { 2 };
                let source = &tile[token as usize % rows * table.cols * bytes..][..table.cols * bytes];
                RowMajor.read(table.format, table.cols, source, row);
            }
        });
        Ok(())
    }

    fn norm(&mut self, x: &Buffer, weight: &Vec<f32>, t: &mut Buffer) -> Result<()> {
        t.set_rows(x.rows());
        let cost = buffer_cost(2 * x.values.len(), 4);
        self.timed(Stage::Norm, cost, |ops| {
            let rows = t
                .values
                .par_chunks_exact_mut(x.width)
                .zip(x.values.par_chunks_exact(x.width));
            rows.with_min_len(4).for_each(|(t, x)| {
                ops.engine.level.run(Norm {
                    precision: ops.engine.precision,
                    x,
                    weight,
                    t,
                })
            });
        });
        Ok(())
    }

    fn qkv(&mut self, t: &Buffer, w: &Packed, bias: &Vec<f32>, qkv: &mut Buffer) -> Result<()> {
        qkv.set_rows(t.rows());
        self.timed(Stage::Qkv, product_cost(w, 1, t.rows()), |ops| {
            ops.dense(
                t,
                w,
                &AddBias {
                    bias,
                    out: Shared::new(&mut qkv.values),
                    onto: false,
                },
            );
        });
        Ok(())
    }

    fn rope_store(&mut self, plan: &StepPlan, layer: usize, qkv: &mut Buffer, kv: &mut KvCache) -> Result<()> {
        let cost = buffer_cost(2 * qkv.values.len(), 2);
        self.timed(Stage::RopeStore, cost, |ops| {
            let half = ops.config.head_dim / 2;
            if layer == 0 {
                ops.cos.resize(plan.rows() * half, 0.0);
                ops.sin.resize(plan.rows() * half, 0.0);
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
                    ops.engine.level.run(RotateStore::<E> {
                        qkv: &mut qkv.values[row * qkv.width..][..qkv.width],
                        q_dim: ops.config.q_dim(),
                        cos: &ops.cos[at.clone()],
                        sin: &ops.sin[at],
                        kv,
                        layer,
                        block,
                        slot: position % BLOCK_TOKENS,
                        element: PhantomData,
                    });
                }
            }
        });
        Ok(())
    }

    fn attention(
        &mut self,
        plan: &StepPlan,
        layer: usize,
        qkv: &Buffer,
        sinks: &Vec<f32>,
        kv: &KvCache,
        out: &mut Buffer,
    ) -> Result<()> {
        out.set_rows(plan.rows());
        let window = self.config.window(layer).unwrap_or(usize::MAX);
        let seen = |position: usize| (position + 1).saturating_sub(window)..position + 1;
        let positions: usize = plan.positions.iter().map(|&p| seen(p as usize).len()).sum();
        let cost = Cost {
            bytes: (positions * 2 * self.config.kv_dim() * E::BYTES) as u64,
            flops: (positions * 4 * self.config.q_dim()) as u64,
        };
        self.timed(Stage::Attention, cost, |ops| {
            let (d, kv_heads) = (ops.config.head_dim, ops.config.n_kv_heads);
            let group = ops.config.n_attn_heads / kv_heads;
            let shared = Shared::new(&mut out.values);
            let rows: Vec<(&Chunk, usize)> = plan
                .chunks
                .iter()
                .flat_map(|c| (0..c.rows).map(move |i| (c, i)))
                .collect();
            (0..rows.len() * kv_heads).into_par_iter().for_each(|task| {
                let ((chunk, i), head) = (rows[task / kv_heads], task % kv_heads);
                let row = chunk.first_row + i;
                // SAFETY: each task has its own row and heads.
                let out = unsafe { shared.slice((row * kv_heads + head) * group * d, group * d) };
                SCRATCH.with_borrow_mut(|scratch| {
                    ops.engine.level.run(Attend::<E> {
                        kv,
                        plan,
                        chunk,
                        layer,
                        head,
                        positions: seen(chunk.first_position + i),
                        queries: &qkv.row(row)[head * group * d..][..group * d],
                        sinks: &sinks[head * group..][..group],
                        head_dim: d,
                        scratch,
                        out,
                        precision: ops.engine.precision,
                        element: PhantomData,
                    });
                });
            });
        });
        Ok(())
    }

    fn attn_out(&mut self, a: &Buffer, w: &Packed, bias: &Vec<f32>, x: &mut Buffer) -> Result<()> {
        self.timed(Stage::AttnOut, product_cost(w, 1, a.rows()), |ops| {
            ops.dense(
                a,
                w,
                &AddBias {
                    bias,
                    out: Shared::new(&mut x.values),
                    onto: true,
                },
            );
        });
        Ok(())
    }

    fn route(&mut self, t: &Buffer, w: &Packed, bias: &Vec<f32>, routes: &mut Routes) -> Result<()> {
        routes.logits.set_rows(t.rows());
        self.timed(Stage::Router, product_cost(w, 1, t.rows()), |ops| {
            // The router's input stays float32: a rounded one sends tokens to other experts.
            let all = &ops.all_rows[..t.rows()];
            ops.inputs
                .encode(ops.engine, Format::F32, &t.values, w.cols, std::iter::once(all));
            ops.engine.multiply(
                w,
                &ops.inputs,
                &AddBias {
                    bias,
                    out: Shared::new(&mut routes.logits.values),
                    onto: false,
                },
            );
            let k = ops.config.experts_per_token;
            routes.experts.clear();
            routes.shares.clear();
            for logits in routes.logits.values.chunks_exact(ops.config.n_experts) {
                pick_largest(logits, k, &mut routes.experts, &mut routes.shares);
            }
            routes.group(k);
        });
        Ok(())
    }

    fn mlp1(&mut self, t: &Buffer, routes: &Routes, w: &Packed, bias: &Vec<f32>, h: &mut Buffer) -> Result<()> {
        h.set_rows(routes.rows.len());
        self.timed(
            Stage::Mlp1,
            product_cost(w, routes.experts_used(), routes.rows.len()),
            |ops| {
                ops.inputs
                    .encode(ops.engine, w.format, &t.values, w.cols, routes.groups(&routes.rows));
                ops.engine.multiply(
                    w,
                    &ops.inputs,
                    &SwiGlu {
                        bias,
                        limit: ops.config.swiglu_limit,
                        precision: ops.engine.precision,
                        width: ops.config.intermediate_dim,
                        out: Shared::new(&mut h.values),
                    },
                );
            },
        );
        Ok(())
    }

    fn mlp2(&mut self, h: &Buffer, routes: &Routes, w: &Packed, bias: &Vec<f32>, x: &mut Buffer) -> Result<()> {
        self.timed(
            Stage::Mlp2,
            product_cost(w, routes.experts_used(), routes.rows.len()),
            |ops| {
                let picks = &routes.picks[..routes.rows.len()];
                ops.inputs
                    .encode(ops.engine, w.format, &h.values, w.cols, routes.groups(picks));
                ops.combined.clear();
                ops.combined.resize(x.values.len(), 0.0);
                ops.engine.multiply_in_order(
                    w,
                    &ops.inputs,
                    &Combine {
                        bias,
                        shares: &routes.pick_shares,
                        rows: &routes.rows,
                        width: w.rows,
                        out: Shared::new(&mut ops.combined),
                    },
                );
                for (x, sum) in x.values.iter_mut().zip(&ops.combined) {
                    *x += sum;
                }
            },
        );
        Ok(())
    }

    fn select(&mut self, plan: &StepPlan, x: &Buffer, selected: &mut Buffer) -> Result<()> {
        selected.set_rows(plan.logits.len());
        for (out, wanted) in selected.values.chunks_exact_mut(x.width).zip(&plan.logits) {
            out.copy_from_slice(x.row(wanted.row));
        }
        Ok(())
    }

    fn unembed(&mut self, t: &Buffer, w: &Packed, want: Want, output: &mut StepOutput) -> Result<()> {
        let rows = t.rows();
        output.greedy.clear();
        output.greedy.resize(rows, NOTHING);
        output
            .logits
            .resize(if want == Want::Logits { rows * w.rows } else { 0 }, 0.0);
        if rows == 0 {
            return Ok(());
        }
        if want == Want::Greedy && self.engine.precision == Precision::Exact && self.screen(t, w, output) {
            return Ok(());
        }
        self.timed(Stage::Unembed, product_cost(w, 1, rows), |ops| {
            let epilogue = Unembed {
                vocab: w.rows,
                inputs: rows,
                logits: (want == Want::Logits).then(|| Shared::new(&mut output.logits)),
                greedy: Mutex::new(&mut output.greedy),
            };
            ops.dense(t, w, &epilogue);
        });
        for greedy in &mut output.greedy {
            if greedy.token == NOTHING.token {
                greedy.token = 0;
            }
        }
        Ok(())
    }
}

thread_local! {
    /// A worker's scores; they grow to the longest context and stay.
    static SCRATCH: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
}

/// One row's norm.
struct Norm<'a> {
    precision: Precision,
    x: &'a [f32],
    weight: &'a [f32],
    t: &'a mut [f32],
}

impl Kernel for Norm<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self) {
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
    slot: usize,
    element: PhantomData<E>,
}

impl<E: Element> Kernel for RotateStore<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self) {
        let d = 2 * self.cos.len();
        let kv_dim = (self.qkv.len() - self.q_dim) / 2;
        let (rotated, values) = self.qkv.split_at_mut(self.q_dim + kv_dim);
        for head in rotated.chunks_exact_mut(d) {
            rotate(head, self.cos, self.sin);
        }
        let keys = rotated[self.q_dim..].chunks_exact(d);
        for (head, (key, value)) in keys.zip(values.chunks_exact(d)).enumerate() {
            // SAFETY: under `Level::run`.
            unsafe {
                self.kv
                    .store::<S, E>(self.layer, self.block, head, self.slot, key, value)
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

/// `out = sums + bias`, or `out += sums + bias`.
struct AddBias<'a> {
    bias: &'a [f32],
    out: Shared<'a, f32>,
    onto: bool,
}

impl Epilogue for AddBias<'_> {
    type State = ();

    fn begin(&self) {}

    #[inline(always)]
    unsafe fn finish<S: Simd>(&self, (): &mut (), at: At, sums: &Sums) {
        let width = self.bias.len();
        let first = at.tile * TILE;
        let bias = &self.bias[first..width.min(first + TILE)];
        // SAFETY: no other worker has this tile of this row.
        let out = unsafe { self.out.slice(at.row * width + first, bias.len()) };
        for ((out, sum), bias) in out.iter_mut().zip(sums).zip(bias) {
            let v = sum + bias;
            *out = if self.onto { *out + v } else { v };
        }
    }

    fn end(&self, (): ()) {}
}

/// `out = gate * sigmoid(1.702 gate) * (up + 1)`, the gates in the first sixteen lanes, their ups in the others.
struct SwiGlu<'a> {
    /// `[E, 2 I]`, alternating gate and up.
    bias: &'a [f32],
    limit: f32,
    precision: Precision,
    /// `I`
    width: usize,
    out: Shared<'a, f32>,
}

impl Epilogue for SwiGlu<'_> {
    type State = ();

    fn begin(&self) {}

    #[inline(always)]
    unsafe fn finish<S: Simd>(&self, (): &mut (), at: At, sums: &Sums) {
        let first = at.tile * LANES;
        let n = LANES.min(self.width - first);
        let bias = &self.bias[2 * (at.member * self.width + first)..][..2 * n];
        let (mut gates, mut ups) = ([0.0_f32; LANES], [0.0_f32; LANES]);
        for i in 0..n {
            // A comparison, not `min`, which would drop a NaN.
            let gate = sums[i] + bias[2 * i];
            let up = sums[LANES + i] + bias[2 * i + 1];
            gates[i] = if gate > self.limit { self.limit } else { gate };
            ups[i] = up.clamp(-self.limit, self.limit);
        }
        let mut y = [0.0; LANES];
        match self.precision {
            Precision::Exact => {
                for i in 0..n {
                    let sigmoid = 1.0 / (1.0 + (-1.702 * gates[i]).exp());
                    y[i] = gates[i] * sigmoid * (ups[i] + 1.0);
                }
            }
            // SAFETY: under `Level::run`; the arrays have sixteen elements.
            Precision::Fast => unsafe {
                let gate = S::load(gates.as_ptr());
                let e = S::exp(S::mul(gate, S::splat(-1.702)));
                let silu = S::div(gate, S::add(S::splat(1.0), e));
                S::store(y.as_mut_ptr(), S::fma(silu, S::load(ups.as_ptr()), silu));
            },
        }
        // SAFETY: no other worker has this tile of this pick.
        unsafe { self.out.slice(at.input * self.width + first, n) }.copy_from_slice(&y[..n]);
    }

    fn end(&self, (): ()) {}
}

/// `out += share * (sums + bias)`, called for one expert after the other.
struct Combine<'a> {
    /// `[E, H]`
    bias: &'a [f32],
    shares: &'a [f32],
    rows: &'a [u32],
    /// `H`
    width: usize,
    out: Shared<'a, f32>,
}

impl Epilogue for Combine<'_> {
    type State = ();

    fn begin(&self) {}

    #[inline(always)]
    unsafe fn finish<S: Simd>(&self, (): &mut (), at: At, sums: &Sums) {
        let first = at.tile * TILE;
        let n = TILE.min(self.width - first);
        let bias = &self.bias[at.member * self.width + first..][..n];
        let (row, share) = (self.rows[at.input] as usize, self.shares[at.input]);
        // SAFETY: no other worker has these columns.
        let out = unsafe { self.out.slice(row * self.width + first, n) };
        let mut y = [0.0_f32; TILE];
        for ((y, sum), bias) in y.iter_mut().zip(sums).zip(bias) {
            *y = sum + bias;
        }
        let mut agg = [0.0_f32; TILE];
        agg[..n].copy_from_slice(out);
        for half in [0, LANES] {
            // SAFETY: under `Level::run`; the arrays have two vectors.
            unsafe {
                let sum = S::fma(
                    S::splat(share),
                    S::load(y[half..].as_ptr()),
                    S::load(agg[half..].as_ptr()),
                );
                S::store(agg[half..].as_mut_ptr(), sum);
            }
        }
        out.copy_from_slice(&agg[..n]);
    }

    fn end(&self, (): ()) {}
}

/// What a row's summary is before its first logit.
const NOTHING: Greedy = Greedy {
    token: u32::MAX,
    logit: f32::NEG_INFINITY,
};

/// Each row's largest logit, and the whole row if it is wanted.
struct Unembed<'a> {
    vocab: usize,
    inputs: usize,
    /// `[inputs, vocab]`
    logits: Option<Shared<'a, f32>>,
    greedy: Mutex<&'a mut Vec<Greedy>>,
}

impl Epilogue for Unembed<'_> {
    type State = Vec<Greedy>;

    fn begin(&self) -> Vec<Greedy> {
        vec![NOTHING; self.inputs]
    }

    #[inline(always)]
    unsafe fn finish<S: Simd>(&self, best: &mut Vec<Greedy>, at: At, sums: &Sums) {
        let first = at.tile * TILE;
        let sums = &sums[..TILE.min(self.vocab - first)];
        let largest = sums.iter().fold(f32::NEG_INFINITY, |m, &s| if s > m { s } else { m });
        let best = &mut best[at.input];
        // The first -inf counts too, if nothing larger comes; NaN never does.
        if (largest > best.logit || best.token == NOTHING.token)
            && let Some(i) = sums.iter().position(|&s| s == largest)
        {
            *best = Greedy {
                token: (first + i) as u32,
                logit: largest,
            };
        }
        if let Some(logits) = &self.logits {
            // SAFETY: no other worker has this tile of this row.
            unsafe { logits.slice(at.row * self.vocab + first, sums.len()) }.copy_from_slice(sums);
        }
    }

    fn end(&self, state: Vec<Greedy>) {
        let mut all = self.greedy.lock().unwrap_or_else(PoisonError::into_inner);
        for (all, mine) in all.iter_mut().zip(state) {
            // Workers end in any order: on a tie the lower index wins.
            if mine.logit > all.logit || mine.logit == all.logit && mine.token < all.token {
                *all = mine;
            }
        }
    }
}
