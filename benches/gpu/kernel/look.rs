//! Runs steps of a model made for one operation: up to it as `forward` does, then the operation between two events. In
//! the first step its result is compared with float64.

use super::super::bounds::{Bounds, Close, HostMatrix, Worst, combined, in_cache};
use super::super::plans::{chunks, decoding};
use super::super::synthetic::{Dense, Experts, Synthetic, SyntheticCheckpoint, Temperament};
use super::super::wide::Wide;
use super::ladder::{Ladder, Setup};
use getp::backend::gpu::args::KV_PAGE;
use getp::backend::gpu::catalogue::Elements;
use getp::backend::gpu::context::Context;
use getp::backend::gpu::kv::KvCache;
use getp::backend::gpu::memory::DeviceBuffer;
use getp::backend::gpu::open::inspect::open_cut;
use getp::backend::gpu::ops::{Buffer, Gated, GpuOps, Queries, Residual, ResidualMemory, Routed, Settled};
use getp::backend::gpu::profile::Timeline;
use getp::backend::gpu::replica::GpuReplica;
use getp::backend::gpu::weights::{GpuWeights, Matrix, Vector};
use getp::batch::{Greedy, StepPlan, Want};
use getp::checkpoint::{Checkpoint, TensorId};
use getp::config::ModelConfig;
use getp::error::Result;
use getp::kv_blocks::BlockCounts;
use getp::model::{Activations, Head, LayerWeights, Scratch, forward_layer};
use getp::ops::Ops;
use getp::options::{Options, Precision};
use getp::profile::{Profile, Roofline};
use getp::replica::Replica;
use half::{bf16, f16};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use rand_distr::StandardNormal;
use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;
use std::sync::Arc;

/// One with a sliding window and one without.
const LAYERS: usize = 2;
/// Rows of a prompt in a step.
const PROMPT_ROWS: usize = 256;
/// Products that a check multiplies at most, unless two rows have more.
const CHECKED_PRODUCTS: usize = 1 << 30;
/// More than any cache: between two steps the device fills so much, and weights come from memory as they do in a whole
/// model.
const SWEPT_BYTES: usize = 1 << 30;
/// What the cache holds where keys and values are to be written: large numbers, but numbers, in every format.
const STALE: u8 = 0x4b;
/// Random keys and values that fill the cache again and again, no power of two, so that pages differ.
const RANDOM_KEYS: usize = (1 << 20) + 24;

/// A model made for an operation: whatever that does not meet is small.
pub struct Subject {
    pub ladder: Ladder,
    pub setup: Setup,
    pub config: ModelConfig,
    /// Positions before a row, or before a prompt's chunk, where attention is looked at.
    pub context: usize,
    /// Whether that is attention over a sliding window.
    pub windowed: bool,
    pub repeats: usize,
    most_rows: usize,
    /// The most rows of a sequence in a step.
    of_sequence: usize,
    checkpoint: Box<dyn Checkpoint>,
    matrices: RefCell<HashMap<TensorId, Rc<HostMatrix>>>,
}

/// What a step's operation gave and took.
pub struct Measured {
    /// The largest part of its bound that an error is, or what is wrong.
    pub check: std::result::Result<f64, String>,
    pub profile: Profile,
}

/// Steps of a replica.
pub struct Run<'a> {
    subject: &'a Subject,
    context: Arc<Context>,
    replica: GpuReplica,
    want: Want,
    swept: Option<DeviceBuffer>,
}

impl Subject {
    /// Of a model with this shape, for steps of so many rows at most.
    pub fn new(ladder: Ladder, setup: Setup, shape: ModelConfig, most_rows: usize, part: &super::Args) -> Result<Self> {
        let context = if ladder.is_attention() { part.context } else { 0 };
        let of_sequence = match ladder {
            Ladder::AttentionPrefill => most_rows.min(PROMPT_ROWS),
            _ => 1,
        };
        let config = ModelConfig {
            n_layers: LAYERS,
            seq_len: context + of_sequence,
            context_length: None,
            vocab_size: match ladder {
                Ladder::Unembed => shape.vocab_size,
                _ => shape.vocab_size.min(1024),
            },
            n_experts: match ladder {
                Ladder::Router | Ladder::Mlp1 | Ladder::Mlp2 => shape.n_experts,
                _ => shape.experts_per_token,
            },
            ..shape
        };
        let synthetic = Synthetic {
            config: config.clone(),
            seed: 1,
            temperament: Temperament::Wild,
            dense: Dense::Bf16,
            experts: if setup.w16_experts {
                Experts::Bf16
            } else {
                Experts::Mxfp4
            },
        };
        let model = SyntheticCheckpoint::packed(&synthetic.check()?);
        // A matrix of another operation: this one's plain kernel would take it as it is.
        let wide = match ladder {
            Ladder::Qkv => TensorId::AttnOut { layer: 0 },
            _ => TensorId::Qkv { layer: 0 },
        };
        Ok(Self {
            ladder,
            setup,
            context,
            windowed: part.windowed,
            repeats: part.repeats.max(1),
            most_rows,
            of_sequence,
            checkpoint: match setup.numbers.elements {
                Elements::Bf16 => Box::new(Wide::new(model, wide)),
                _ => Box::new(model),
            },
            config,
            matrices: RefCell::default(),
        })
    }

    /// The layer whose operation is looked at. The unembedding stands behind all.
    fn layer(&self) -> usize {
        match self.ladder {
            Ladder::Unembed => LAYERS,
            ladder if ladder.is_attention() && self.windowed => 0,
            _ => LAYERS - 1,
        }
    }

    fn vector(&self, id: TensorId) -> Result<Vec<f32>> {
        self.checkpoint.tensor(id)?.to_f32()
    }

    fn matrix(&self, id: TensorId) -> Result<Rc<HostMatrix>> {
        if let Some(matrix) = self.matrices.borrow().get(&id) {
            return Ok(matrix.clone());
        }
        let matrix = Rc::new(HostMatrix::new(self.vector(id)?, id.shape(&self.config)));
        self.matrices.borrow_mut().insert(id, matrix.clone());
        Ok(matrix)
    }

    /// The rows that are compared with float64, of so many: all if that is done soon, else some, the first and the last
    /// among them.
    fn checked(&self, rows: usize) -> Vec<usize> {
        let c = &self.config;
        let of_row = match self.ladder {
            Ladder::Norm => c.hidden_dim,
            Ladder::Qkv => c.qkv_dim() * c.hidden_dim,
            // Each key is taken from its page, all of which is read for it.
            Ladder::AttentionDecode | Ladder::AttentionPrefill => 2 * KV_PAGE * c.kv_dim() * c.seq_len,
            Ladder::AttnOut => c.hidden_dim * c.q_dim(),
            Ladder::Router => c.n_experts * c.hidden_dim,
            Ladder::Mlp1 => c.experts_per_token * 2 * c.intermediate_dim * c.hidden_dim,
            Ladder::Mlp2 => c.experts_per_token * c.intermediate_dim * c.hidden_dim,
            Ladder::Unembed => c.vocab_size * c.hidden_dim,
        };
        let some = (CHECKED_PRODUCTS / of_row).max(2);
        match some < rows {
            true => (0..some).map(|i| i * (rows - 1) / (some - 1)).collect(),
            false => (0..rows).collect(),
        }
    }

    /// A replica on a device, whose kernels are those to look at.
    pub fn run(&self, context: Arc<Context>, want: Want, options: &Options) -> anyhow::Result<Run<'_>> {
        let options = Options {
            precision: Some(match self.setup.numbers.exact {
                true => Precision::Exact,
                false => Precision::Fast,
            }),
            max_batch: Some(self.most_rows.div_ceil(self.of_sequence)),
            step_tokens: Some(self.most_rows),
            profile: true,
            ..options.clone()
        };
        let replica = open_cut(vec![context.clone()], &[LAYERS], &*self.checkpoint, &options)?;
        let elements = replica.numbers().elements;
        anyhow::ensure!(
            elements == self.setup.numbers.elements,
            "activations are in {elements:?}, as these kernels take any weights"
        );
        let is_emulated = context.driver.device().runtime == "simt";
        let bytes = SWEPT_BYTES.min(context.driver.memory()?.free as usize / 2);
        let swept = (!is_emulated).then(|| DeviceBuffer::new(&context.driver, bytes));
        Ok(Run {
            subject: self,
            swept: swept.transpose()?,
            context,
            replica,
            want,
        })
    }
}

impl Run<'_> {
    /// What the device can do at most, if it was measured.
    pub fn roofline(&self) -> Option<Roofline> {
        self.replica.profile().and_then(|profile| profile.roofline)
    }

    /// Its device, and what it computes in.
    pub fn describe(&self) -> String {
        self.replica.describe()
    }

    /// Checks and times steps of so many rows.
    pub fn measure(&mut self, rows: usize) -> anyhow::Result<Measured> {
        let plan = self.plan(rows);
        let mut check = Check {
            bounds: Bounds {
                numbers: self.replica.numbers(),
                target: self.context.target,
            },
            worst: Worst::default(),
            rows: self.subject.checked(rows),
            wrong: None,
            logits: Vec::new(),
        };
        self.step(&plan, &mut Watch::default(), Some(&mut check))?;
        if !check.logits.is_empty() {
            check.found(&self.replica.found(&plan)?);
        }
        let mut watch = Watch {
            timeline: Some(Timeline::default()),
        };
        for _ in 0..self.subject.repeats {
            self.sweep()?;
            self.step(&plan, &mut watch, None)?;
        }
        Ok(Measured {
            check: match check.wrong {
                Some(wrong) => Err(wrong),
                None => Ok(check.worst.largest()),
            },
            profile: watch.timeline.map(|timeline| timeline.profile).unwrap_or_default(),
        })
    }

    /// A step of sequences that decode, or of prompts, each with blocks of its own.
    fn plan(&self, rows: usize) -> StepPlan {
        let Subject {
            config,
            context,
            of_sequence,
            ..
        } = self.subject;
        let (tokens, chunk) = (self.replica.kv_blocks().tokens, self.replica.chunk_tokens());
        let blocks = BlockCounts::of_sequence(config, tokens, chunk, config.seq_len);
        let blocks = [blocks.full, blocks.window];
        let token = |row| (row % config.vocab_size) as i32;
        if self.subject.ladder != Ladder::AttentionPrefill {
            return decoding(rows, *context, blocks, token);
        }
        let most = *of_sequence;
        let prompts: Vec<usize> = (0..rows).step_by(most).map(|row| most.min(rows - row)).collect();
        let mut plan = chunks(&prompts, *context, blocks, token);
        // A sequence wants one row's at most.
        plan.logits.truncate(1);
        plan
    }

    /// Has the device's caches hold something else.
    fn sweep(&self) -> Result<()> {
        let stream = &self.context.stream;
        match &self.swept {
            // SAFETY: the buffer has these bytes, and outlives the step, which is waited for.
            Some(swept) => unsafe { stream.driver.fill(swept.at(), 0, swept.bytes(), stream.handle) },
            None => Ok(()),
        }
    }

    fn step(&mut self, plan: &StepPlan, watch: &mut Watch, check: Option<&mut Check>) -> Result<()> {
        let parts = self.replica.begin(plan, self.want)?;
        // What is before the operation is not timed.
        parts.ops.queue.timeline = None;
        if self.subject.ladder.is_attention() && check.is_some() {
            fill_cache(&self.context, parts.kv, self.subject.setup.numbers.kv)?;
        }
        watch.timeline.iter_mut().for_each(Timeline::begin_step);
        let mut step = Step {
            subject: self.subject,
            plan,
            want: self.want,
            ops: parts.ops,
            kv: parts.kv,
            watch,
            check,
        };
        step.run(parts.weights, parts.activations)?;
        self.context.stream.synchronize()?;
        watch.timeline.iter_mut().try_for_each(Timeline::count_times)
    }
}

/// Fills a cache with random keys and values.
fn fill_cache(context: &Context, kv: &KvCache, elements: Elements) -> Result<()> {
    let mut rng = ChaCha8Rng::seed_from_u64(2);
    let mut bytes = Vec::new();
    for _ in 0..RANDOM_KEYS {
        let value: f32 = rng.sample(StandardNormal);
        match elements {
            Elements::F32 => bytes.extend(value.to_le_bytes()),
            Elements::Bf16 => bytes.extend(bf16::from_f32(value).to_le_bytes()),
            _ => bytes.extend(f16::from_f32(value).to_le_bytes()),
        }
    }
    let stream = &context.stream;
    let source = DeviceBuffer::of(stream, &bytes)?;
    for at in (0..kv.bytes()).step_by(bytes.len()) {
        let n = bytes.len().min(kv.bytes() - at);
        // SAFETY: both ranges are within their buffers, which live until the stream has been waited for.
        unsafe { stream.driver.copy(kv.at().add(at), source.at(), n, stream.handle) }?;
    }
    stream.synchronize()
}

/// Times the operation alone.
#[derive(Default)]
struct Watch {
    /// `None`: it is only queued.
    timeline: Option<Timeline>,
}

impl Watch {
    fn time<T>(&mut self, ops: &mut GpuOps, queue: impl FnOnce(&mut GpuOps) -> Result<T>) -> Result<T> {
        ops.queue.timeline = self.timeline.take();
        let queued = queue(ops);
        self.timeline = ops.queue.timeline.take();
        queued
    }
}

/// Compares with float64.
struct Check {
    bounds: Bounds,
    worst: Worst,
    rows: Vec<usize>,
    /// The first value beyond its bound.
    wrong: Option<String>,
    /// Rows of logits, where the device has told the largest alone.
    logits: Vec<(usize, Vec<Close>)>,
}

impl Check {
    fn see(&mut self, what: &str, row: usize, got: &[f32], expected: &[Close]) {
        let compared = self.worst.compare(&format!("row {row}, {what}"), got, expected);
        self.note(compared);
    }

    fn note(&mut self, compared: std::result::Result<(), String>) {
        self.wrong = self.wrong.take().or(compared.err());
    }

    /// The largest logits.
    fn found(&mut self, greedy: &[Greedy]) {
        for (row, logits) in std::mem::take(&mut self.logits) {
            let Greedy { token, logit } = greedy[row];
            match self.bounds.largest(&logits, token as usize) {
                Ok(close) => self.see("largest logit", row, &[logit], &[close]),
                Err(why) => self.note(Err(format!("row {row}: {why}"))),
            }
        }
    }
}

struct Step<'a> {
    subject: &'a Subject,
    plan: &'a StepPlan,
    want: Want,
    ops: &'a mut GpuOps,
    kv: &'a mut KvCache,
    watch: &'a mut Watch,
    check: Option<&'a mut Check>,
}

impl Step<'_> {
    /// The model's forward pass until the operation has run.
    fn run(&mut self, weights: &GpuWeights, activations: &mut Activations<ResidualMemory, Buffer>) -> Result<()> {
        let Activations { x, scratch } = activations;
        let (ladder, layer) = (self.subject.ladder, self.subject.layer());
        let mut x = self.ops.embed(self.plan, part(&weights.embedding), x)?;
        for (layer, w) in weights.layers.iter().enumerate().take(layer) {
            x = forward_layer(self.ops, w, layer, self.plan, x, scratch, self.kv)?;
        }
        let Scratch { t, qkv, attention, h } = scratch;
        let Some(w) = weights.layers.get(layer) else {
            return self.unembed(part(&weights.head), x, t);
        };
        if ladder == Ladder::Norm {
            return self.norm(x, &w.attn_norm, t);
        }
        if ladder == Ladder::Qkv {
            return self.qkv(x, w, t, qkv);
        }
        let (x, t_attn) = self.ops.norm(x, &w.attn_norm, t)?;
        let projected = self.ops.qkv(t_attn, &w.qkv, &w.qkv_bias, qkv)?;
        let queries = self.ops.rope_store(self.plan, layer, projected, self.kv)?;
        if ladder.is_attention() {
            return self.attention(queries, &w.sinks, attention);
        }
        let attended = self.ops.attention(self.plan, queries, &w.sinks, self.kv, attention)?;
        if ladder == Ladder::AttnOut {
            return self.attn_out(attended, w, x);
        }
        let x = self.ops.attn_out(attended, &w.attn_out, &w.attn_out_bias, x)?;
        match ladder {
            Ladder::Router => self.router(x, w, t),
            Ladder::Mlp1 => self.mlp1(x, w, t, h),
            _ => {
                let routed = self.ops.route(x, &w.ffn_norm, &w.router, &w.router_bias, t)?;
                let gated = self.ops.mlp1(&routed, &w.mlp1, &w.mlp1_bias, h)?;
                self.mlp2(gated, routed, w)
            }
        }
    }

    fn rows(&self) -> usize {
        self.plan.rows()
    }

    /// Rows of the residual stream.
    fn stream(&self, memory: &ResidualMemory) -> Result<Vec<f32>> {
        self.ops.read(&memory.x, self.rows(), self.subject.config.hidden_dim)
    }

    /// A row plus the outputs of its experts.
    fn combined(&self, memory: &ResidualMemory) -> Result<Vec<Vec<Close>>> {
        let (h, k) = (self.subject.config.hidden_dim, self.subject.config.experts_per_token);
        let x = self.stream(memory)?;
        let sent = self.ops.sent(&memory.routes, self.rows())?;
        let y = self.ops.expert_outputs(&memory.routes, slots(&sent.slots))?;
        let of_row = |(row, x): (usize, &[f32])| {
            let picks = row * k..(row + 1) * k;
            let outputs = picks.map(|pick| (sent.shares[pick], &y[sent.slots[pick] as usize * h..][..h]));
            combined(x, &outputs.collect::<Vec<_>>())
        };
        Ok(x.chunks_exact(h).enumerate().map(of_row).collect())
    }

    fn norm(&mut self, mut x: Residual<'_>, weight: &Vector, t: &mut Buffer) -> Result<()> {
        let Some(check) = self.check.take() else {
            let run = |ops: &mut GpuOps| ops.norm(x, weight, t).and_then(|(_, t)| ops.normed(t).map(drop));
            return self.watch.time(self.ops, run);
        };
        let expected = self.combined(x.memory())?;
        self.ops.spoil(t)?;
        let (mut x, t) = self.watch.time(self.ops, |ops| {
            let (x, t) = ops.norm(x, weight, t)?;
            Ok((x, ops.normed(t)?))
        })?;
        let (h, layer) = (self.subject.config.hidden_dim, self.subject.layer());
        let weight = self.subject.vector(TensorId::AttnNorm { layer })?;
        let (stream, t) = (self.stream(x.memory())?, self.ops.read(t, self.rows(), h)?);
        for row in check.rows.clone() {
            check.see("stream", row, &stream[row * h..][..h], &expected[row]);
            let stored = check.bounds.stored_norm(&expected[row], &weight);
            check.see("norm", row, &t[row * h..][..h], &stored);
        }
        Ok(())
    }

    fn qkv(
        &mut self,
        mut x: Residual<'_>,
        w: &LayerWeights<Matrix, Vector>,
        t: &mut Buffer,
        qkv: &mut Buffer,
    ) -> Result<()> {
        let (rows, layer) = (self.rows(), self.subject.layer());
        let check = self.check.take();
        let mut summed = Vec::new();
        if check.is_some() {
            summed = self.combined(x.memory())?;
            self.ops.spoil(t)?;
            self.ops.spoil(qkv)?;
            self.ops.spoil_workspace()?;
            self.ops.fill_kv(self.kv, STALE)?;
        }
        let (mut x, is_in_memory, projected) = self.watch.time(self.ops, |ops| {
            let (x, t) = ops.norm(x, &w.attn_norm, t)?;
            Ok((x, t.is_in_memory(), ops.qkv(t, &w.qkv, &w.qkv_bias, qkv)?))
        })?;
        let seen = match check {
            Some(_) => self.ops.projected(&projected, rows)?,
            None => None,
        };
        let (plan, kv) = (self.plan, &mut *self.kv);
        self.watch
            .time(self.ops, |ops| ops.rope_store(plan, layer, projected, kv))?;
        let Some(check) = check else {
            return Ok(());
        };
        let c = &self.subject.config;
        let (h, width, q_dim) = (c.hidden_dim, c.qkv_dim(), c.q_dim());
        let stream = self.stream(x.memory())?;
        if !is_in_memory {
            // A norm by itself gives the same rows.
            let settled = self.ops.resume(plan, x.memory())?;
            let (_, normed) = self.ops.norm(settled, &w.attn_norm, t)?;
            self.ops.normed(normed)?;
        }
        let t = self.ops.read(t, rows, h)?;
        let norm = self.subject.vector(TensorId::AttnNorm { layer })?;
        let (queries, pages) = (self.ops.queries(rows)?, self.ops.pages(self.kv, layer)?);
        let w = self.subject.matrix(TensorId::Qkv { layer })?;
        let bias = self.subject.vector(TensorId::QkvBias { layer })?;
        for row in check.rows.clone() {
            check.see("stream", row, &stream[row * h..][..h], &summed[row]);
            let stored = check.bounds.stored_norm(&summed[row], &norm);
            check.see("norm", row, &t[row * h..][..h], &stored);
            let mut expected = check.bounds.product(&w, 0, &bias, &t[row * h..][..h]);
            // Where one kernel multiplies and stores, the product is not seen: its bound is added to what is stored.
            if let Some(seen) = &seen {
                let seen = &seen[row * width..][..width];
                check.see("product", row, seen, &expected);
                expected = seen.iter().copied().map(Close::exactly).collect();
            }
            // Each row is a chunk.
            let chunk = &plan.chunks[row];
            let position = chunk.first_position;
            let [q, keys, values] = check.bounds.rotated(c, position, &expected);
            let [own_keys, own_values] = in_cache(c, &pages, plan, chunk, layer, position);
            check.see("queries", row, &queries[row * q_dim..][..q_dim], &q);
            check.see("keys", row, &own_keys, &keys);
            check.see("values", row, &own_values, &values);
        }
        Ok(())
    }

    fn attention(&mut self, queries: Queries<'_>, sinks: &Vector, out: &mut Buffer) -> Result<()> {
        let (rows, layer, plan) = (self.rows(), self.subject.layer(), self.plan);
        let check = self.check.take();
        if check.is_some() {
            self.ops.spoil(out)?;
        }
        let kv = &*self.kv;
        let out = self
            .watch
            .time(self.ops, |ops| ops.attention(plan, queries, sinks, kv, out))?;
        let Some(check) = check else {
            return Ok(());
        };
        let c = &self.subject.config;
        let q_dim = c.q_dim();
        let (queries, pages) = (self.ops.queries(rows)?, self.ops.pages(kv, layer)?);
        let out = self.ops.read(out, rows, q_dim)?;
        let sinks = self.subject.vector(TensorId::Sinks { layer })?;
        let factor = check.bounds.query_factor(c.head_dim);
        let wide = |values: &[f32]| values.iter().copied().map(f64::from).collect::<Vec<f64>>();
        for row in check.rows.clone() {
            let chunk = plan.chunks.iter().rfind(|chunk| chunk.first_row <= row);
            let chunk = chunk.expect("every row is of a chunk");
            let end = chunk.first_position + row - chunk.first_row + 1;
            let first = c.window(layer).map_or(0, |window| end.saturating_sub(window));
            let mut seen = [vec![Vec::new(); first], vec![Vec::new(); first]];
            for position in first..end {
                let stored = in_cache(c, &pages, plan, chunk, layer, position);
                seen.iter_mut().zip(&stored).for_each(|(seen, of)| seen.push(wide(of)));
            }
            let q: Vec<f64> = wide(&queries[row * q_dim..][..q_dim]);
            let q: Vec<f64> = q.iter().map(|q| q / factor).collect();
            let expected = check.bounds.attended(c, layer, &q, [&seen[0], &seen[1]], &sinks);
            check.see("attention", row, &out[row * q_dim..][..q_dim], &expected);
        }
        Ok(())
    }

    fn attn_out(&mut self, a: &Buffer, w: &LayerWeights<Matrix, Vector>, mut x: Settled<'_>) -> Result<()> {
        let c = &self.subject.config;
        let (rows, h, q_dim, layer) = (self.rows(), c.hidden_dim, c.q_dim(), self.subject.layer());
        let check = self.check.take();
        let before = match check {
            Some(_) => self.stream(x.memory())?,
            None => Vec::new(),
        };
        let multiply = |ops: &mut GpuOps| ops.attn_out(a, &w.attn_out, &w.attn_out_bias, x);
        let mut x = self.watch.time(self.ops, multiply)?;
        let Some(check) = check else {
            return Ok(());
        };
        let (after, a) = (self.stream(x.memory())?, self.ops.read(a, rows, q_dim)?);
        let w = self.subject.matrix(TensorId::AttnOut { layer })?;
        let bias = self.subject.vector(TensorId::AttnOutBias { layer })?;
        for row in check.rows.clone() {
            let product = check.bounds.product(&w, 0, &bias, &a[row * q_dim..][..q_dim]);
            let onto = product.into_iter().zip(&before[row * h..]);
            let expected: Vec<Close> = onto.map(|(y, &x)| y.onto(x)).collect();
            check.see("sum", row, &after[row * h..][..h], &expected);
        }
        Ok(())
    }

    fn router(&mut self, mut x: Settled<'_>, w: &LayerWeights<Matrix, Vector>, t: &mut Buffer) -> Result<()> {
        let c = &self.subject.config;
        let (rows, h, k) = (self.rows(), c.hidden_dim, c.experts_per_token);
        let layer = self.subject.layer();
        let check = self.check.take();
        let mut input = Vec::new();
        if check.is_some() {
            // A kernel for both keeps the router's input to itself: that of kernels apart is the same.
            let apart = self.ops.resume(self.plan, x.memory())?;
            let apart = self.ops.settle(apart)?;
            self.ops
                .norm_then_route(apart, &w.ffn_norm, &w.router, &w.router_bias, t)?;
            input = self.ops.router_input(rows)?;
            self.ops.spoil(t)?;
            self.ops.spoil_routes(&mut x.memory().routes)?;
        }
        let route = |ops: &mut GpuOps| ops.route(x, &w.ffn_norm, &w.router, &w.router_bias, t);
        let mut routed = self.watch.time(self.ops, route)?;
        let Some(check) = check else {
            return Ok(());
        };
        let x = self.stream(routed.memory())?;
        let sent = self.ops.sent(&routed.memory().routes, rows)?;
        let t = self.ops.read(t, rows, h)?;
        let norm = self.subject.vector(TensorId::FfnNorm { layer })?;
        let router = self.subject.matrix(TensorId::Router { layer })?;
        let bias = self.subject.vector(TensorId::RouterBias { layer })?;
        for row in check.rows.clone() {
            let x = combined(&x[row * h..][..h], &[]);
            let input = &input[row * h..][..h];
            check.see("norm", row, &t[row * h..][..h], &check.bounds.stored_norm(&x, &norm));
            check.see("router's input", row, input, &check.bounds.normed(&x, &norm));
            let picked: Vec<usize> = sent.experts[row * k..][..k].iter().map(|&e| e as usize).collect();
            let logits = check.bounds.router(&router, &bias, input);
            match check.bounds.shares(&logits, &picked) {
                Ok(shares) => check.see("shares", row, &sent.shares[row * k..][..k], &shares),
                Err(why) => check.note(Err(format!("row {row}: {why}"))),
            }
        }
        Ok(())
    }

    fn mlp1(
        &mut self,
        mut x: Settled<'_>,
        w: &LayerWeights<Matrix, Vector>,
        t: &mut Buffer,
        h: &mut Buffer,
    ) -> Result<()> {
        let c = &self.subject.config;
        let (rows, hidden, inner, k) = (self.rows(), c.hidden_dim, c.intermediate_dim, c.experts_per_token);
        let layer = self.subject.layer();
        let check = self.check.take();
        if check.is_some() {
            self.ops.spoil_routes(&mut x.memory().routes)?;
            self.ops.spoil(h)?;
        }
        let route = |ops: &mut GpuOps| ops.route(x, &w.ffn_norm, &w.router, &w.router_bias, t);
        let mut routed = self.watch.time(self.ops, route)?;
        let h = self
            .watch
            .time(self.ops, |ops| ops.mlp1(&routed, &w.mlp1, &w.mlp1_bias, h))?;
        let Some(check) = check else {
            return Ok(());
        };
        let sent = self.ops.sent(&routed.memory().routes, rows)?;
        let (t, units) = (
            self.ops.read(t, rows, hidden)?,
            self.ops.read(h.memory(), slots(&sent.slots), inner)?,
        );
        for row in check.rows.clone() {
            for pick in row * k..(row + 1) * k {
                let (expert, slot) = (sent.experts[pick] as usize, sent.slots[pick] as usize);
                let w = self.subject.matrix(TensorId::Mlp1 { layer, expert })?;
                let bias = self.subject.vector(TensorId::Mlp1Bias { layer, expert })?;
                let pairs = check.bounds.product(&w, 0, &bias, &t[row * hidden..][..hidden]);
                let expected = check.bounds.gated(&pairs, c.swiglu_limit);
                check.see("unit", row, &units[slot * inner..][..inner], &expected);
            }
        }
        Ok(())
    }

    fn mlp2(&mut self, h: Gated<'_>, mut x: Routed<'_>, w: &LayerWeights<Matrix, Vector>) -> Result<()> {
        let c = &self.subject.config;
        let (rows, hidden, inner, k) = (self.rows(), c.hidden_dim, c.intermediate_dim, c.experts_per_token);
        let layer = self.subject.layer();
        let check = self.check.take();
        let sent = match check {
            Some(_) => Some(self.ops.sent(&x.memory().routes, rows)?),
            None => None,
        };
        let multiply = |ops: &mut GpuOps| ops.mlp2(h, x, &w.mlp2, &w.mlp2_bias);
        let mut x = self.watch.time(self.ops, multiply)?;
        let (Some(check), Some(sent)) = (check, sent) else {
            return Ok(());
        };
        let slots = slots(&sent.slots);
        let units = self.ops.read(h.memory(), slots, inner)?;
        let y = self.ops.expert_outputs(&x.memory().routes, slots)?;
        for row in check.rows.clone() {
            for pick in row * k..(row + 1) * k {
                let (expert, slot) = (sent.experts[pick] as usize, sent.slots[pick] as usize);
                let w = self.subject.matrix(TensorId::Mlp2 { layer, expert })?;
                let bias = self.subject.vector(TensorId::Mlp2Bias { layer, expert })?;
                let outputs = check.bounds.product(&w, 0, &bias, &units[slot * inner..][..inner]);
                let expected: Vec<Close> = outputs.iter().map(|&y| check.bounds.output(y)).collect();
                check.see("output", row, &y[slot * hidden..][..hidden], &expected);
            }
        }
        Ok(())
    }

    fn unembed(&mut self, head: &Head<Matrix, Vector>, x: Residual<'_>, t: &mut Buffer) -> Result<()> {
        let (plan, want, rows) = (self.plan, self.want, self.plan.logits.len());
        let check = self.check.take();
        let t = self.ops.norm_wanted(plan, x, &head.norm, t)?;
        self.watch
            .time(self.ops, |ops| ops.unembed(plan, t, &head.unembedding, want))?;
        let Some(check) = check else {
            return Ok(());
        };
        let c = &self.subject.config;
        let (h, vocab) = (c.hidden_dim, c.vocab_size);
        let t = self.ops.read(t, rows, h)?;
        let logits = match want {
            Want::Logits => Some(self.ops.logits(rows)?),
            _ => None,
        };
        let w = self.subject.matrix(TensorId::Unembedding)?;
        for row in check.rows.clone() {
            let expected = check.bounds.product(&w, 0, &[], &t[row * h..][..h]);
            match &logits {
                Some(logits) => check.see("logits", row, &logits[row * vocab..][..vocab], &expected),
                None => check.logits.push((row, expected)),
            }
        }
        Ok(())
    }
}

/// Slots up to the last one that a row has.
fn slots(of_picks: &[i32]) -> usize {
    of_picks.iter().max().map_or(0, |&slot| slot as usize + 1)
}

/// A part of the weights, all of which one device has.
fn part<T>(of: &Option<T>) -> &T {
    of.as_ref().expect("one device has the whole model")
}
