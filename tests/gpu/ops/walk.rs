//! A step, one operation after the other, each result checked against float64 from the operands on the device, and spoilt
//! before it is written.

use super::bounds::{Bounds, Close, F32, HostMatrix, Worst};
use super::oracle::{self, Reals};
use getp::backend::gpu::args::{Format, GROUP_ALIGN};
use getp::backend::gpu::memory::DeviceBuffer;
use getp::backend::gpu::ops::inspect::Sent;
use getp::backend::gpu::replica::GpuReplica;
use getp::backend::gpu::replica::inspect::Parts;
use getp::backend::gpu::weights::Matrix;
use getp::batch::{Chunk, StepPlan};
use getp::checkpoint::{Checkpoint, TensorId};
use getp::model::{LayerWeights, ModelConfig, Rope, Weights};
use getp::ops::Ops;
use getp::replica::{StepOutput, Want};

/// A byte of stale keys and values: large numbers, but numbers, in every format.
const STALE: u8 = 0x4b;

/// A model's weights as the oracle takes them.
pub type HostWeights = Weights<HostMatrix, Vec<f32>>;

/// All of a checkpoint's.
pub fn host_weights(checkpoint: &dyn Checkpoint) -> HostWeights {
    let config = checkpoint.config();
    let get = |id| checkpoint.tensor(id).unwrap().to_f32().unwrap();
    let matrix = |id: TensorId| HostMatrix::new(get(id), id.shape(config));
    let of_experts = |id: &dyn Fn(usize) -> TensorId| (0..config.n_experts).flat_map(|e| get(id(e))).collect();
    let experts = |id: &dyn Fn(usize) -> TensorId| HostMatrix::new(of_experts(id), id(0).shape(config));
    let layer = |layer| LayerWeights {
        attn_norm: get(TensorId::AttnNorm { layer }),
        qkv: matrix(TensorId::Qkv { layer }),
        qkv_bias: get(TensorId::QkvBias { layer }),
        sinks: get(TensorId::Sinks { layer }),
        attn_out: matrix(TensorId::AttnOut { layer }),
        attn_out_bias: get(TensorId::AttnOutBias { layer }),
        ffn_norm: get(TensorId::FfnNorm { layer }),
        router: matrix(TensorId::Router { layer }),
        router_bias: get(TensorId::RouterBias { layer }),
        mlp1: experts(&|expert| TensorId::Mlp1 { layer, expert }),
        mlp1_bias: of_experts(&|expert| TensorId::Mlp1Bias { layer, expert }),
        mlp2: experts(&|expert| TensorId::Mlp2 { layer, expert }),
        mlp2_bias: of_experts(&|expert| TensorId::Mlp2Bias { layer, expert }),
    };
    Weights {
        embedding: matrix(TensorId::Embedding),
        layers: (0..config.n_layers).map(layer).collect(),
        out_norm: get(TensorId::OutNorm),
        unembedding: matrix(TensorId::Unembedding),
    }
}

/// Keys and values of one sequence in one layer, as the cache held them when they were written.
#[derive(Clone, Default)]
struct Stored {
    keys: Vec<Vec<f64>>,
    values: Vec<Vec<f64>>,
}

/// What the experts gave and no norm has added yet.
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
    stored: Vec<Vec<Stored>>,
    pub worst: Worst,
}

impl Walk {
    pub fn new(replica: GpuReplica, checkpoint: &dyn Checkpoint, bounds: Bounds, sequences: usize) -> Self {
        let config = checkpoint.config().clone();
        Self {
            replica,
            weights: host_weights(checkpoint),
            bounds,
            stored: vec![vec![Stored::default(); sequences]; config.n_layers],
            worst: Worst::default(),
            config,
        }
    }

    /// Fills the cache with numbers of no meaning.
    pub fn leave_stale_keys(&mut self) {
        self.replica.fill_kv(STALE).unwrap();
    }

    pub fn step(&mut self, plan: &StepPlan, want: Want) {
        let mut step = Step {
            parts: self.replica.begin(plan, want).unwrap(),
            plan,
            config: &self.config,
            bounds: self.bounds,
            worst: &mut self.worst,
            pending: None,
        };
        step.embed(&self.weights);
        for (layer, (w, stored)) in self.weights.layers.iter().zip(&mut self.stored).enumerate() {
            step.attention(layer, w, stored);
            step.experts(layer, w);
        }
        let logits = step.unembed(&self.weights, want);
        let found = self.replica.found(plan).unwrap();
        for (row, (greedy, close)) in found.iter().zip(&logits).enumerate() {
            let largest = close
                .iter()
                .map(|c| c.value - c.error)
                .fold(f64::NEG_INFINITY, f64::max);
            let of_token = close[greedy.token as usize];
            assert!(
                of_token.value + of_token.error >= largest,
                "row {row}: another logit is larger"
            );
            self.worst.check("greedy", &[greedy.logit], &[of_token]);
        }
    }
}

struct Step<'a> {
    parts: Parts<'a>,
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

    fn x(&self) -> Vec<f32> {
        let a = &self.parts.activations;
        self.parts.ops.read(&a.x, self.rows(), self.config.hidden_dim).unwrap()
    }

    fn t(&self, rows: usize) -> Vec<f32> {
        let a = &self.parts.activations;
        self.parts.ops.read(&a.t, rows, self.config.hidden_dim).unwrap()
    }

    fn embed(&mut self, weights: &HostWeights) {
        let (p, plan) = (&mut self.parts, self.plan);
        p.ops.spoil(&mut p.activations.x).unwrap();
        p.ops.embed(plan, &p.weights.embedding, &mut p.activations.x).unwrap();
        let expected: Vec<f32> = plan
            .tokens
            .iter()
            .flat_map(|&token| weights.embedding.row(token as usize))
            .copied()
            .collect();
        assert_eq!(self.x(), expected, "embed");
    }

    /// Norms `x` or, of a step's end, the rows whose logits are wanted.
    fn norm(&mut self, weight: &DeviceBuffer, host: &[f32], select: Option<&[usize]>) {
        let h = self.config.hidden_dim;
        let before = self.x();
        let p = &mut self.parts;
        p.ops.spoil(&mut p.activations.t).unwrap();
        let input = if select.is_some() {
            &p.activations.selected
        } else {
            &p.activations.x
        };
        p.ops.norm(input, weight, &mut p.activations.t).unwrap();
        let all = (0..self.rows()).collect::<Vec<_>>();
        let rows = select.unwrap_or(&all);
        let combined: Vec<Vec<Close>> = rows
            .iter()
            .map(|&row| self.combined(row, &before[row * h..][..h]))
            .collect();
        if select.is_none() {
            self.worst.check("combine", &self.x(), &combined.concat());
            self.pending = None;
        }
        let normed: Vec<Close> = combined.iter().flat_map(|x| self.normed(x, host)).collect();
        let stored: Vec<Close> = normed.iter().map(|&t| self.bounds.stored(t)).collect();
        let t = self.t(rows.len());
        self.worst.check("norm", &t, &stored);
    }

    /// A row with what its experts gave.
    fn combined(&self, row: usize, x: &[f32]) -> Vec<Close> {
        let (h, k) = (self.config.hidden_dim, self.config.experts_per_token);
        let sum = |(i, &x): (usize, &f32)| {
            let x = f64::from(x);
            let Some(Pending { sent, y }) = &self.pending else {
                return Close::new(x, 0.0);
            };
            let picks = row * k..(row + 1) * k;
            let terms =
                picks.map(|pick| f64::from(sent.shares[pick]) * f64::from(y[sent.slots[pick] as usize * h + i]));
            let sum: f64 = terms.clone().sum();
            let size: f64 = x.abs() + terms.map(f64::abs).sum::<f64>();
            Close::new(x + sum, (k + 2) as f64 * F32 * size)
        };
        x.iter().enumerate().map(sum).collect()
    }

    fn normed(&self, x: &[Close], weight: &[f32]) -> Vec<Close> {
        let values: Vec<f64> = x.iter().map(|x| x.value).collect();
        let root = (values.iter().map(|x| x * x).sum::<f64>() / values.len() as f64 + 1e-5).sqrt();
        // Sums of squares go through a tree of threads, each of which has 16 of them.
        let unit = if self.bounds.numbers.exact { 4.0 } else { 32.0 } * F32;
        let inherited = x.iter().map(|x| x.error).fold(0.0, f64::max) / root;
        let normed = oracle::Arithmetic::norm(Reals, &values, weight);
        let close = |(&t, &w): (&f64, &f32)| Close::new(t, unit * t.abs() + inherited * (f64::from(w.abs()) + t.abs()));
        normed.iter().zip(weight).map(close).collect()
    }

    /// Checks each row of a product.
    fn check_product(&mut self, what: &str, got: &[f32], inputs: &[f32], w: &HostMatrix, bias: &[f32], onto: &[f32]) {
        let (rows, bounds) = (self.rows(), self.bounds);
        let (width, cols) = (got.len() / rows, inputs.len() / rows);
        for row in 0..rows {
            let mut expected = bounds.product(w, 0, bias, &inputs[row * cols..][..cols]);
            if !onto.is_empty() {
                for (y, &x) in expected.iter_mut().zip(&onto[row * width..]) {
                    *y = Close::new(
                        y.value + f64::from(x),
                        y.error + 2.0 * F32 * (y.value.abs() + f64::from(x.abs())),
                    );
                }
            }
            self.worst.check(what, &got[row * width..][..width], &expected);
        }
    }

    fn attention(&mut self, layer: usize, w: &LayerWeights<HostMatrix, Vec<f32>>, stored: &mut [Stored]) {
        let (rows, config) = (self.rows(), self.config);
        let device = &self.parts.weights.layers[layer];
        self.norm(&device.attn_norm, &w.attn_norm, None);

        let p = &mut self.parts;
        let a = &mut *p.activations;
        p.ops.spoil(&mut a.qkv).unwrap();
        p.ops.qkv(&a.t, &device.qkv, &device.qkv_bias, &mut a.qkv).unwrap();
        let qkv = p.ops.read(&a.qkv, rows, config.qkv_dim()).unwrap();
        let t = self.t(rows);
        self.check_product("qkv", &qkv, &t, &w.qkv, &w.qkv_bias, &[]);

        let (p, plan) = (&mut self.parts, self.plan);
        let a = &mut *p.activations;
        p.ops.spoil_workspace().unwrap();
        p.ops.rope_store(plan, layer, &mut a.qkv, p.kv).unwrap();
        let queries = self.rotated(layer, &qkv, stored);

        let p = &mut self.parts;
        let a = &mut *p.activations;
        p.ops.spoil(&mut a.attention).unwrap();
        p.ops
            .attention(plan, layer, &a.qkv, &device.sinks, p.kv, &mut a.attention)
            .unwrap();
        let out = p.ops.read(&a.attention, rows, config.q_dim()).unwrap();
        self.attended(layer, &queries, stored, &w.sinks, &out);

        let before = self.x();
        let p = &mut self.parts;
        let a = &mut *p.activations;
        p.ops
            .attn_out(&a.attention, &device.attn_out, &device.attn_out_bias, &mut a.x)
            .unwrap();
        let after = self.x();
        self.check_product("attn_out", &after, &out, &w.attn_out, &w.attn_out_bias, &before);
    }

    /// Checks queries, keys and values in the cache; keeps the latter and gives the former, without their factor.
    fn rotated(&mut self, layer: usize, qkv: &[f32], stored: &mut [Stored]) -> Vec<f64> {
        let config = self.config;
        let (d, q_dim, width) = (config.head_dim, config.q_dim(), config.qkv_dim());
        let queries = self.parts.ops.queries(self.rows()).unwrap();
        let pages = self.parts.ops.pages(self.parts.kv, layer).unwrap();
        let factor = match self.bounds.numbers.kv {
            Format::F32 => 1.0,
            _ => std::f64::consts::LOG2_E / (d as f64).sqrt(),
        };
        for chunk in &self.plan.chunks {
            for i in 0..chunk.rows {
                let (row, position) = (chunk.first_row + i, chunk.first_position + i);
                let before = &qkv[row * width..][..width];
                let rotated = rotate(config, position, &before[..q_dim + config.kv_dim()]);
                let scaled = |c: &Close| {
                    self.bounds
                        .cached(Close::new(c.value * factor, c.error + 4.0 * F32 * c.value.abs()))
                };
                let expected: Vec<Close> = rotated[..q_dim].iter().map(scaled).collect();
                self.worst.check("queries", &queries[row * q_dim..][..q_dim], &expected);
                let page = page(config, self.plan, chunk, layer, position);
                let of_heads = (0..config.n_kv_heads).map(|head| pages.key_value(page, head, position));
                let [keys, values] = of_heads.fold([vec![], vec![]], |[keys, values]: [Vec<f32>; 2], [k, v]| {
                    [[keys, k].concat(), [values, v].concat()]
                });
                let cached = |c: &Close| self.bounds.cached(*c);
                self.worst
                    .check("keys", &keys, &rotated[q_dim..].iter().map(cached).collect::<Vec<_>>());
                let expected = before[q_dim + config.kv_dim()..].iter();
                let expected: Vec<_> = expected
                    .map(|&v| self.bounds.cached(Close::new(v.into(), 0.0)))
                    .collect();
                self.worst.check("values", &values, &expected);
                let wide = |v: Vec<f32>| v.into_iter().map(f64::from).collect();
                stored[chunk.sequence].keys.push(wide(keys));
                stored[chunk.sequence].values.push(wide(values));
            }
        }
        queries.iter().map(|&q| f64::from(q) / factor).collect()
    }

    fn attended(&mut self, layer: usize, queries: &[f64], stored: &[Stored], sinks: &[f32], out: &[f32]) {
        let config = self.config;
        let (d, q_dim) = (config.head_dim, config.q_dim());
        for chunk in &self.plan.chunks {
            let kept = &stored[chunk.sequence];
            let what = match config.is_windowed(layer) {
                true => "attention, windowed",
                false => "attention, full",
            };
            for i in 0..chunk.rows {
                let (row, end) = (chunk.first_row + i, chunk.first_position + i + 1);
                let first = config.window(layer).map_or(0, |window| end.saturating_sub(window));
                for (head, q) in queries[row * q_dim..][..q_dim].chunks_exact(d).enumerate() {
                    let kv = head / (config.n_attn_heads / config.n_kv_heads) * d;
                    let seen: Vec<_> = (first..end)
                        .map(|p| (&kept.keys[p][kv..kv + d], &kept.values[p][kv..kv + d]))
                        .collect();
                    let expected = self.bounds.attention(q, &seen, sinks[head]);
                    self.worst.check(what, &out[row * q_dim + head * d..][..d], &expected);
                }
            }
        }
    }

    fn experts(&mut self, layer: usize, w: &LayerWeights<HostMatrix, Vec<f32>>) {
        let (rows, config) = (self.rows(), self.config);
        let (h, inner, k) = (config.hidden_dim, config.intermediate_dim, config.experts_per_token);
        let device = &self.parts.weights.layers[layer];
        self.norm(&device.ffn_norm, &w.ffn_norm, None);
        self.router_input(&w.ffn_norm);

        let p = &mut self.parts;
        let a = &mut *p.activations;
        p.ops.spoil_routes(&mut a.routes).unwrap();
        p.ops
            .route(&a.t, &device.router, &device.router_bias, &mut a.routes)
            .unwrap();
        let sent = p.ops.sent(&a.routes, rows).unwrap();
        self.routed(&sent, &w.router, &w.router_bias);
        self.sorted(&sent);
        self.norm_route_at_once(device, &sent);

        let slots = sent.slots.iter().max().map_or(0, |&slot| slot as usize + 1);
        let p = &mut self.parts;
        let a = &mut *p.activations;
        let t = p.ops.read(&a.t, rows, h).unwrap();
        let gathered = p.ops.gathered(&a.routes, slots).unwrap();
        p.ops.spoil(&mut a.h).unwrap();
        p.ops
            .mlp1(&a.t, &a.routes, &device.mlp1, &device.mlp1_bias, &mut a.h)
            .unwrap();
        let units = p.ops.read(&a.h, slots, inner).unwrap();
        p.ops
            .mlp2(&a.h, &a.routes, &device.mlp2, &device.mlp2_bias, &mut a.x)
            .unwrap();
        let y = p.ops.expert_outputs(&a.routes, slots).unwrap();

        for (pick, (&expert, &slot)) in sent.experts.iter().zip(&sent.slots).enumerate() {
            let (row, expert, slot) = (pick / k, expert as usize, slot as usize);
            assert_eq!(gathered[slot * h..][..h], t[row * h..][..h], "gather of row {row}");
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
    }

    /// The same two operations at once give the same bits.
    fn norm_route_at_once(&mut self, w: &LayerWeights<Matrix, DeviceBuffer>, sent: &Sent) {
        let rows = self.rows();
        let t = self.t(rows);
        let p = &mut self.parts;
        let a = &mut *p.activations;
        p.ops.spoil(&mut a.t).unwrap();
        p.ops.spoil_routes(&mut a.routes).unwrap();
        p.ops
            .norm_route(&a.x, &w.ffn_norm, &mut a.t, &w.router, &w.router_bias, &mut a.routes)
            .unwrap();
        assert_eq!(p.ops.sent(&a.routes, rows).unwrap(), *sent);
        assert_eq!(self.t(rows), t);
    }

    /// The router's own float32 input.
    fn router_input(&mut self, weight: &[f32]) {
        let h = self.config.hidden_dim;
        let got = self.parts.ops.router_input(self.rows()).unwrap();
        let x = self.x();
        for (x, got) in x.chunks_exact(h).zip(got.chunks_exact(h)) {
            let x: Vec<Close> = x.iter().map(|&x| Close::new(x.into(), 0.0)).collect();
            let expected = self.normed(&x, weight);
            self.worst.check("router's input", got, &expected);
        }
    }

    fn routed(&mut self, sent: &Sent, router: &HostMatrix, bias: &[f32]) {
        let (h, k) = (self.config.hidden_dim, self.config.experts_per_token);
        let t32 = self.parts.ops.router_input(self.rows()).unwrap();
        for (row, t) in t32.chunks_exact(h).enumerate() {
            let logits = self.bounds.router(router, bias, t);
            let picked: Vec<usize> = sent.experts[row * k..][..k].iter().map(|&e| e as usize).collect();
            assert!(picked.windows(2).all(|pair| pair[0] < pair[1]), "row {row}: {picked:?}");
            let least = picked
                .iter()
                .map(|&e| logits[e].value + logits[e].error)
                .fold(f64::INFINITY, f64::min);
            let left_out = (0..logits.len()).filter(|e| !picked.contains(e));
            for e in left_out {
                assert!(
                    logits[e].value - logits[e].error <= least,
                    "row {row}: {e} is left out of {picked:?}"
                );
            }
            let of_picked: Vec<f64> = picked.iter().map(|&e| logits[e].value).collect();
            let error = picked.iter().map(|&e| logits[e].error).fold(0.0, f64::max);
            let shares = oracle::Arithmetic::softmax(Reals, &of_picked);
            let close = |&share: &f64| Close::new(share, share * ((2.0 * error).exp_m1() + (16 + k) as f64 * F32));
            let expected: Vec<Close> = shares.iter().map(close).collect();
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

    /// Gives what the logits may be.
    fn unembed(&mut self, weights: &HostWeights, want: Want) -> Vec<Vec<Close>> {
        let wanted: Vec<usize> = self.plan.logits.iter().map(|wanted| wanted.row).collect();
        let (vocab, h, plan) = (self.config.vocab_size, self.config.hidden_dim, self.plan);
        let device = self.parts.weights;
        let a = &mut *self.parts.activations;
        self.parts.ops.select(plan, &a.x, &mut a.selected).unwrap();
        self.norm(&device.out_norm, &weights.out_norm, Some(&wanted));
        let p = &mut self.parts;
        let t = &p.activations.t;
        p.ops
            .unembed(t, &device.unembedding, want, &mut StepOutput::default())
            .unwrap();
        let t = self.t(wanted.len());
        let close = |t: &[f32]| self.bounds.product(&weights.unembedding, 0, &[], t);
        let expected: Vec<Vec<Close>> = t.chunks_exact(h).map(close).collect();
        if want == Want::Logits {
            let logits = self.parts.ops.logits(wanted.len()).unwrap();
            for (got, expected) in logits.chunks_exact(vocab).zip(&expected) {
                self.worst.check("logits", got, expected);
            }
        }
        expected
    }
}

fn rotate(config: &ModelConfig, position: usize, heads: &[f32]) -> Vec<Close> {
    let half = config.head_dim / 2;
    let (mut cos, mut sin) = (vec![0.0; half], vec![0.0; half]);
    Rope::new(config).unwrap().angles(position as u32, &mut cos, &mut sin);
    let mut out = vec![Close::new(0.0, 0.0); heads.len()];
    for (head, out) in heads.chunks_exact(2 * half).zip(out.chunks_exact_mut(2 * half)) {
        for i in 0..half {
            let [x, y, cos, sin] = [head[i], head[i + half], cos[i], sin[i]].map(f64::from);
            let close = |a: f64, b: f64| Close::new(a + b, 3.0 * F32 * (a.abs() + b.abs()));
            out[i] = close(x * cos, -y * sin);
            out[i + half] = close(y * cos, x * sin);
        }
    }
    out
}

/// The page of a position in the layer's cache.
fn page(config: &ModelConfig, plan: &StepPlan, chunk: &Chunk, layer: usize, position: usize) -> usize {
    let page = position / getp::backend::gpu::args::KV_PAGE;
    let at = if config.is_windowed(layer) {
        chunk.window.start + page % chunk.window.len()
    } else {
        chunk.full.start + page
    };
    plan.tables[at] as usize
}
