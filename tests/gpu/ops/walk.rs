//! Runs a step operation by operation. Each result is overwritten with garbage before it is computed, and compared with
//! float64 arithmetic on the operands that the device holds.

use super::bounds::{Bounds, Close, HostMatrix, Worst, combined, in_cache};
use getp::backend::gpu::args::GROUP_ALIGN;
use getp::backend::gpu::catalogue::Op;
use getp::backend::gpu::kv::KvCache;
use getp::backend::gpu::memory::DeviceBuffer;
use getp::backend::gpu::ops::inspect::Sent;
use getp::backend::gpu::ops::{Buffer, GpuOps, Residual, ResidualMemory, Routed, Settled};
use getp::backend::gpu::replica::GpuReplica;
use getp::backend::gpu::weights::{GpuWeights, Matrix};
use getp::batch::{StepPlan, Want};
use getp::checkpoint::Checkpoint;
use getp::config::ModelConfig;
use getp::error::{Error, Result};
use getp::model::{Activations, LayerWeights, Load, Scratch, Weights};
use getp::ops::Ops;
use getp::tensors::Field;

/// A byte of stale keys and values: large numbers, but numbers, in every format.
const STALE: u8 = 0x4b;

/// A model's weights as the oracle takes them.
pub type HostWeights = Weights<HostMatrix, Vec<f32>>;

/// All of a checkpoint's.
pub fn host_weights(checkpoint: &dyn Checkpoint) -> HostWeights {
    HostWeights::load(0..checkpoint.config().n_layers, &mut Host(checkpoint)).unwrap()
}

struct Host<'a>(&'a dyn Checkpoint);

impl Load for Host<'_> {
    type Matrix = HostMatrix;
    type Vector = Vec<f32>;
    type Error = Error;

    fn matrix(&mut self, array: Field, layer: usize) -> Result<HostMatrix> {
        let shape = array.id(layer, 0).shape(self.0.config());
        Ok(HostMatrix::new(self.vector(array, layer)?, shape))
    }

    fn vector(&mut self, array: Field, layer: usize) -> Result<Vec<f32>> {
        let tensors = array.of_layer(layer, self.0.config());
        let values = tensors
            .map(|id| self.0.tensor(id)?.to_f32())
            .collect::<Result<Vec<_>>>()?;
        Ok(values.concat())
    }
}

/// Keys and values of one sequence in one layer, as the cache held them when they were written.
#[derive(Clone, Default)]
struct KeysAndValues {
    keys: Vec<Vec<f64>>,
    values: Vec<Vec<f64>>,
}

/// Expert outputs that no norm has added yet.
struct Pending {
    sent: Sent,
    y: Vec<f32>,
}

/// Steps of one replica.
pub struct Walk {
    pub replica: GpuReplica,
    config: ModelConfig,
    weights: HostWeights,
    bounds: Bounds,
    /// By layer and sequence.
    stored: Vec<Vec<KeysAndValues>>,
    pub worst: Worst,
}

impl Walk {
    pub fn new(replica: GpuReplica, checkpoint: &dyn Checkpoint, bounds: Bounds, sequences: usize) -> Self {
        let config = checkpoint.config().clone();
        Self {
            replica,
            weights: host_weights(checkpoint),
            bounds,
            stored: vec![vec![KeysAndValues::default(); sequences]; config.n_layers],
            worst: Worst::default(),
            config,
        }
    }

    /// Fills the cache with numbers of no meaning.
    pub fn leave_stale_keys(&mut self) {
        self.replica.fill_kv(STALE).unwrap();
    }

    pub fn step(&mut self, plan: &StepPlan, want: Want) {
        let parts = self.replica.begin(plan, want).unwrap();
        let Activations { x, scratch } = parts.activations;
        let mut step = Step {
            ops: parts.ops,
            device: parts.weights,
            scratch,
            kv: parts.kv,
            plan,
            config: &self.config,
            bounds: self.bounds,
            worst: &mut self.worst,
            pending: None,
        };
        let mut x = step.embed(&self.weights, x);
        for (layer, (w, stored)) in self.weights.layers.iter().zip(&mut self.stored).enumerate() {
            let attended = step.attention(layer, w, stored, x);
            x = step.experts(layer, w, attended);
        }
        let logits = step.unembed(&self.weights, want, x);
        let found = self.replica.found(plan).unwrap();
        for (row, (greedy, close)) in found.iter().zip(&logits).enumerate() {
            let of_token = self.bounds.largest(close, greedy.token as usize);
            let of_token = of_token.unwrap_or_else(|why| panic!("row {row}: {why}"));
            self.worst.check("greedy", &[greedy.logit], &[of_token]);
        }
    }
}

struct Step<'a> {
    ops: &'a mut GpuOps,
    device: &'a GpuWeights,
    scratch: &'a mut Scratch<Buffer>,
    kv: &'a mut KvCache,
    plan: &'a StepPlan,
    config: &'a ModelConfig,
    bounds: Bounds,
    worst: &'a mut Worst,
    pending: Option<Pending>,
}

impl Step<'_> {
    fn rows(&self) -> usize {
        self.plan.rows()
    }

    fn x(&self, memory: &ResidualMemory) -> Vec<f32> {
        self.ops.read(&memory.x, self.rows(), self.config.hidden_dim).unwrap()
    }

    fn t(&self, rows: usize) -> Vec<f32> {
        self.ops.read(&self.scratch.t, rows, self.config.hidden_dim).unwrap()
    }

    fn embed<'x>(&mut self, weights: &HostWeights, memory: &'x mut ResidualMemory) -> Residual<'x> {
        self.ops.spoil(&mut memory.x).unwrap();
        let table = self.device.embedding.as_ref().unwrap();
        let mut x = self.ops.embed(self.plan, table, memory).unwrap();
        let tokens = self.plan.tokens.iter();
        let expected: Vec<f32> = tokens
            .flat_map(|&token| weights.embedding.as_ref().unwrap().row(token as usize))
            .copied()
            .collect();
        assert_eq!(self.x(x.memory()), expected, "embed");
        x
    }

    /// Checks `x` after the outstanding expert outputs have been added.
    fn settled(&mut self, memory: &ResidualMemory, combined: &[Vec<Close>]) {
        let x = self.x(memory);
        self.worst.check("combine", &x, &combined.concat());
        self.pending = None;
    }

    /// Checks that `t` has the norms of these rows.
    fn check_norm(&mut self, rows: &[Vec<Close>], weight: &[f32]) {
        let stored: Vec<Close> = rows.iter().flat_map(|x| self.bounds.stored_norm(x, weight)).collect();
        let t = self.t(rows.len());
        self.worst.check("norm", &t, &stored);
    }

    /// Rows plus their experts' outputs.
    fn combined(&self, x: &[f32]) -> Vec<Vec<Close>> {
        let rows = x.chunks_exact(self.config.hidden_dim).enumerate();
        rows.map(|(row, x)| self.combined_row(row, x)).collect()
    }

    /// A row plus its experts' outputs.
    fn combined_row(&self, row: usize, x: &[f32]) -> Vec<Close> {
        let (h, k) = (self.config.hidden_dim, self.config.experts_per_token);
        let Some(Pending { sent, y }) = &self.pending else {
            return combined(x, &[]);
        };
        let picks = row * k..(row + 1) * k;
        let outputs = picks.map(|pick| (sent.shares[pick], &y[sent.slots[pick] as usize * h..][..h]));
        combined(x, &outputs.collect::<Vec<_>>())
    }

    /// Checks each row of a product.
    fn check_product(&mut self, what: &str, got: &[f32], inputs: &[f32], w: &HostMatrix, bias: &[f32], onto: &[f32]) {
        let (rows, bounds) = (self.rows(), self.bounds);
        let (width, cols) = (got.len() / rows, inputs.len() / rows);
        for row in 0..rows {
            let mut expected = bounds.product(w, 0, bias, &inputs[row * cols..][..cols]);
            if !onto.is_empty() {
                for (y, &x) in expected.iter_mut().zip(&onto[row * width..]) {
                    *y = y.onto(x);
                }
            }
            self.worst.check(what, &got[row * width..][..width], &expected);
        }
    }

    fn attention<'x>(
        &mut self,
        layer: usize,
        w: &LayerWeights<HostMatrix, Vec<f32>>,
        stored: &mut [KeysAndValues],
        mut x: Residual<'x>,
    ) -> Settled<'x> {
        let (rows, config, plan) = (self.rows(), self.config, self.plan);
        let device = &self.device.layers[layer];
        let combined = self.combined(&self.x(x.memory()));
        self.ops.spoil(&mut self.scratch.t).unwrap();
        self.ops.spoil(&mut self.scratch.qkv).unwrap();
        self.ops.spoil_workspace().unwrap();
        self.ops.spoil(&mut self.scratch.attention).unwrap();
        let (mut x, t) = self.ops.norm(x, &device.attn_norm, &mut self.scratch.t).unwrap();
        let is_in_memory = t.is_in_memory();
        let projected = self
            .ops
            .qkv(t, &device.qkv, &device.qkv_bias, &mut self.scratch.qkv)
            .unwrap();
        let product = self.ops.projected(&projected, rows).unwrap();
        let queries = self.ops.rope_store(plan, layer, projected, self.kv).unwrap();
        self.ops
            .attention(plan, queries, &device.sinks, self.kv, &mut self.scratch.attention)
            .unwrap();
        self.settled(x.memory(), &combined);
        if !is_in_memory {
            // A norm by itself gives the same rows.
            let settled = self.ops.resume(plan, x.memory()).unwrap();
            let (_, t) = self.ops.norm(settled, &device.attn_norm, &mut self.scratch.t).unwrap();
            self.ops.normed(t).unwrap();
        }
        self.check_norm(&combined, &w.attn_norm);
        let t = self.t(rows);
        let rows_of_t = t.chunks_exact(config.hidden_dim);
        let expected = rows_of_t.flat_map(|t| self.bounds.product(&w.qkv, 0, &w.qkv_bias, t));
        let mut qkv: Vec<Close> = expected.collect();
        // Where one kernel multiplies and stores, the product is not seen: its bound is added to what is stored.
        if let Some(values) = product {
            self.worst.check("qkv", &values, &qkv);
            qkv = values.into_iter().map(Close::exactly).collect();
        }
        let queries = self.rotated(layer, &qkv, stored);
        let out = self.ops.read(&self.scratch.attention, rows, config.q_dim()).unwrap();
        self.attended(layer, &queries, stored, &w.sinks, &out);

        let before = self.x(x.memory());
        let mut x = self
            .ops
            .attn_out(&self.scratch.attention, &device.attn_out, &device.attn_out_bias, x)
            .unwrap();
        let after = self.x(x.memory());
        self.check_product("attn_out", &after, &out, &w.attn_out, &w.attn_out_bias, &before);
        x
    }

    /// Checks queries, and keys and values in the cache. Keeps keys and values; returns queries, unscaled.
    fn rotated(&mut self, layer: usize, qkv: &[Close], stored: &mut [KeysAndValues]) -> Vec<f64> {
        let config = self.config;
        let (q_dim, width) = (config.q_dim(), config.qkv_dim());
        let all = self.ops.queries(self.rows()).unwrap();
        let pages = self.ops.pages(self.kv, layer).unwrap();
        for chunk in &self.plan.chunks {
            for i in 0..chunk.rows {
                let (row, position) = (chunk.first_row + i, chunk.first_position + i);
                let [queries, keys, values] = self.bounds.rotated(config, position, &qkv[row * width..][..width]);
                self.worst.check("queries", &all[row * q_dim..][..q_dim], &queries);
                let [own_keys, own_values] = in_cache(config, &pages, self.plan, chunk, layer, position);
                self.worst.check("keys", &own_keys, &keys);
                self.worst.check("values", &own_values, &values);
                let wide = |v: Vec<f32>| v.into_iter().map(f64::from).collect();
                stored[chunk.slot].keys.push(wide(own_keys));
                stored[chunk.slot].values.push(wide(own_values));
            }
        }
        let factor = self.bounds.query_factor(config.head_dim);
        all.iter().map(|&q| f64::from(q) / factor).collect()
    }

    fn attended(&mut self, layer: usize, queries: &[f64], stored: &[KeysAndValues], sinks: &[f32], out: &[f32]) {
        let config = self.config;
        let q_dim = config.q_dim();
        for chunk in &self.plan.chunks {
            let kept = &stored[chunk.slot];
            let what = match config.is_windowed(layer) {
                true => "attention, windowed",
                false => "attention, full",
            };
            for i in 0..chunk.rows {
                let (row, end) = (chunk.first_row + i, chunk.first_position + i + 1);
                let seen = [&kept.keys[..end], &kept.values[..end]];
                let q = &queries[row * q_dim..][..q_dim];
                let expected = self.bounds.attended(config, layer, q, seen, sinks);
                self.worst.check(what, &out[row * q_dim..][..q_dim], &expected);
            }
        }
    }

    fn experts<'x>(
        &mut self,
        layer: usize,
        w: &LayerWeights<HostMatrix, Vec<f32>>,
        mut x: Settled<'x>,
    ) -> Residual<'x> {
        let (rows, config) = (self.rows(), self.config);
        let (h, inner, k) = (config.hidden_dim, config.intermediate_dim, config.experts_per_token);
        let device = &self.device.layers[layer];
        let before = self.x(x.memory());
        let sent = self.routed_one_by_one(device, w, x.memory());
        let t = self.t(rows);
        let (mut routed, sent) = self.routed_at_once(device, w, x, &sent, &t);
        assert_eq!(self.x(routed.memory()), before, "a router changes nothing");

        self.ops.spoil(&mut self.scratch.h).unwrap();
        let (mlp1, bias) = (&device.mlp1, &device.mlp1_bias);
        let gated = self.ops.mlp1(&routed, mlp1, bias, &mut self.scratch.h).unwrap();
        // Few rows may be sorted by mlp1, and are gathered by none then.
        let picked = sent;
        let sent = self.ops.sent(&routed.memory().routes, rows).unwrap();
        assert!(sent.experts == picked.experts && sent.shares == picked.shares);
        let slots = sent.slots.iter().max().map_or(0, |&slot| slot as usize + 1);
        let gathered = self.ops.gathered(&routed.memory().routes, slots).unwrap();
        let gathers = gathered.iter().any(|value| !value.is_nan());
        let units = self.ops.read(gated.memory(), slots, inner).unwrap();
        let (mlp2, bias) = (&device.mlp2, &device.mlp2_bias);
        let mut x = self.ops.mlp2(gated, routed, mlp2, bias).unwrap();
        self.sorted(&sent);
        let y = self.ops.expert_outputs(&x.memory().routes, slots).unwrap();

        for (pick, (&expert, &slot)) in sent.experts.iter().zip(&sent.slots).enumerate() {
            let (row, expert, slot) = (pick / k, expert as usize, slot as usize);
            assert!(
                !gathers || gathered[slot * h..][..h] == t[row * h..][..h],
                "gather of row {row}"
            );
            let (first, second) = (&w.mlp1_bias[expert * 2 * inner..], &w.mlp2_bias[expert * h..]);
            let pairs = self.bounds.product(&w.mlp1, expert, first, &t[row * h..][..h]);
            let expected = self.bounds.gated(&pairs, config.swiglu_limit);
            let unit = &units[slot * inner..][..inner];
            self.worst.check("mlp1", unit, &expected);
            let outputs = self.bounds.product(&w.mlp2, expert, second, unit);
            let expected: Vec<Close> = outputs.iter().map(|&y| self.bounds.output(y)).collect();
            self.worst.check("mlp2", &y[slot * h..][..h], &expected);
        }
        self.pending = Some(Pending { sent, y });
        x
    }

    /// The norm and the router as kernels of their own.
    fn routed_one_by_one(
        &mut self,
        device: &LayerWeights<Matrix, DeviceBuffer<f32>>,
        w: &LayerWeights<HostMatrix, Vec<f32>>,
        memory: &mut ResidualMemory,
    ) -> Sent {
        let combined = self.combined(&self.x(memory));
        self.ops.spoil(&mut self.scratch.t).unwrap();
        self.ops.spoil_routes(&mut memory.routes).unwrap();
        let x = self.ops.resume(self.plan, memory).unwrap();
        let x = self.ops.settle(x).unwrap();
        let (norm, router, bias) = (&device.ffn_norm, &device.router, &device.router_bias);
        let mut routed = self
            .ops
            .norm_then_route(x, norm, router, bias, &mut self.scratch.t)
            .unwrap();
        let sent = self.ops.sent(&routed.memory().routes, self.rows()).unwrap();
        self.check_norm(&combined, &w.ffn_norm);
        self.router_input(&w.ffn_norm, routed.memory());
        self.routed(&sent, &w.router, &w.router_bias);
        sent
    }

    /// The fused kernels. They give the same bits, but for a router on the matrix cores, in `fast`.
    fn routed_at_once<'x>(
        &mut self,
        device: &LayerWeights<Matrix, DeviceBuffer<f32>>,
        w: &LayerWeights<HostMatrix, Vec<f32>>,
        mut x: Settled<'x>,
        apart: &Sent,
        t: &[f32],
    ) -> (Routed<'x>, Sent) {
        self.ops.spoil(&mut self.scratch.t).unwrap();
        self.ops.spoil_routes(&mut x.memory().routes).unwrap();
        let mut routed = self
            .ops
            .route(
                x,
                &device.ffn_norm,
                &device.router,
                &device.router_bias,
                &mut self.scratch.t,
            )
            .unwrap();
        let sent = self.ops.sent(&routed.memory().routes, self.rows()).unwrap();
        let mut kernels = self.bounds.target.family.table().kernels.iter();
        // Clusters of blocks have sums of their own.
        let one = kernels.all(|kernel| kernel.op != Op::NormRoute || kernel.cluster == 0);
        if self.bounds.numbers.exact || one {
            assert_eq!(sent, *apart);
        } else {
            self.routed(&sent, &w.router, &w.router_bias);
        }
        assert_eq!(self.t(self.rows()), t);
        (routed, sent)
    }

    /// The router's own float32 input.
    fn router_input(&mut self, weight: &[f32], memory: &ResidualMemory) {
        let h = self.config.hidden_dim;
        let got = self.ops.router_input(self.rows()).unwrap();
        let x = self.x(memory);
        for (x, got) in x.chunks_exact(h).zip(got.chunks_exact(h)) {
            let expected = self.bounds.normed(&combined(x, &[]), weight);
            self.worst.check("router's input", got, &expected);
        }
    }

    fn routed(&mut self, sent: &Sent, router: &HostMatrix, bias: &[f32]) {
        let (h, k) = (self.config.hidden_dim, self.config.experts_per_token);
        let t32 = self.ops.router_input(self.rows()).unwrap();
        for (row, t) in t32.chunks_exact(h).enumerate() {
            let logits = self.bounds.router(router, bias, t);
            let picked: Vec<usize> = sent.experts[row * k..][..k].iter().map(|&e| e as usize).collect();
            let expected = self.bounds.shares(&logits, &picked);
            let expected = expected.unwrap_or_else(|why| panic!("row {row}: {why}"));
            self.worst.check("shares", &sent.shares[row * k..][..k], &expected);
        }
    }

    /// Each expert's slots are consecutive, in order of rows, from a multiple of `GROUP_ALIGN` on.
    fn sorted(&self, sent: &Sent) {
        let mut counts = vec![0; self.config.n_experts];
        for (&expert, &slot) in sent.experts.iter().zip(&sent.slots) {
            let expert = expert as usize;
            assert_eq!(slot, sent.offsets[expert] + counts[expert], "expert {expert}");
            counts[expert] += 1;
        }
        assert_eq!(sent.counts, counts);
        assert_eq!(sent.offsets[0], 0);
        for (expert, count) in counts.iter().enumerate() {
            let (begin, end) = (sent.offsets[expert], sent.offsets[expert + 1]);
            assert!(
                begin % GROUP_ALIGN as i32 == 0 && end >= begin + count,
                "expert {expert}: {:?}",
                sent.offsets
            );
        }
    }

    /// Returns the logits and their bounds. Every other step calls `settle` first, as where a device's layers end.
    fn unembed(&mut self, weights: &HostWeights, want: Want, mut x: Residual<'_>) -> Vec<Vec<Close>> {
        let wanted: Vec<usize> = self.plan.logits.iter().map(|wanted| wanted.row).collect();
        let (vocab, h, plan) = (self.config.vocab_size, self.config.hidden_dim, self.plan);
        let combined = self.combined(&self.x(x.memory()));
        let rows: Vec<_> = wanted.iter().map(|&row| combined[row].clone()).collect();
        self.ops.spoil(&mut self.scratch.t).unwrap();
        let device = self.device.head.as_ref().unwrap();
        let head = weights.head.as_ref().unwrap();
        let (norm, t) = (&device.norm, &mut self.scratch.t);
        if want == Want::Logits {
            let mut settled = self.ops.settle(x).unwrap();
            let x = self.ops.resume(plan, settled.memory()).unwrap();
            self.ops.norm_wanted(plan, x, norm, t).unwrap();
            self.settled(settled.memory(), &combined);
        } else {
            self.ops.norm_wanted(plan, x, norm, t).unwrap();
        }
        self.check_norm(&rows, &head.norm);
        let (t, matrix) = (&self.scratch.t, &device.unembedding);
        self.ops.unembed(plan, t, matrix, want).unwrap();
        let t = self.t(wanted.len());
        let close = |t: &[f32]| self.bounds.product(&head.unembedding, 0, &[], t);
        let expected: Vec<Vec<Close>> = t.chunks_exact(h).map(close).collect();
        if want == Want::Logits {
            let logits = self.ops.logits(wanted.len()).unwrap();
            for (got, expected) in logits.chunks_exact(vocab).zip(&expected) {
                self.worst.check("logits", got, expected);
            }
        }
        expected
    }
}
