//! The model's mathematics, once for all backends.

use super::weights::{Head, LayerWeights, Weights};
use crate::batch::{StepPlan, Want};
use crate::error::Result;
use crate::ops::Ops;
use std::ops::Range;

/// A contiguous range of a model's layers, with what stands before and behind it. One device may run them all, or
/// several devices one range each.
pub struct StageWeights<'w, M, V> {
    /// What embeds the tokens; `None` where `x` comes from the stage before.
    pub embedding: Option<&'w M>,
    /// The first layer's index in the model.
    pub first_layer: usize,
    /// One a layer.
    pub layers: &'w [LayerWeights<M, V>],
    /// What gives the logits; `None` where another stage follows, which takes `x`.
    pub head: Option<&'w Head<M, V>>,
}

impl<M, V> Weights<M, V> {
    /// All its layers.
    pub fn whole(&self) -> StageWeights<'_, M, V> {
        self.stage(self.range())
    }

    /// These layers, with what stands before the first and behind the last one.
    pub fn stage(&self, layers: Range<usize>) -> StageWeights<'_, M, V> {
        let all = self.range();
        StageWeights {
            embedding: self.embedding.as_ref().filter(|_| layers.start == all.start),
            first_layer: layers.start,
            head: self.head.as_ref().filter(|_| layers.end == all.end),
            layers: &self.layers[layers.start - all.start..layers.end - all.start],
        }
    }
}

/// Memory of one step's activations.
pub struct Activations<S, B> {
    /// The residual stream `[T, H]`.
    pub x: S,
    /// What lives within a layer.
    pub scratch: Scratch<B>,
}

/// Memory of what lives within a layer.
pub struct Scratch<B> {
    /// The residual stream after a norm `[T, H]`.
    pub t: B,
    /// `[T, D * (Nq + 2 Nkv)]`
    pub qkv: B,
    /// Attention's output `[T, D * Nq]`.
    pub attention: B,
    /// Inside the experts `[T * K, I]`.
    pub h: B,
}

/// Runs a stage on the tokens of `plan` or, if it is not the first, on the rows that lie in `a.x`. The last stage
/// leaves the step's output with `ops`; the others leave their rows in `a.x`.
pub fn forward<O: Ops>(
    ops: &mut O,
    stage: &StageWeights<'_, O::Matrix, O::Vector>,
    plan: &StepPlan,
    a: &mut Activations<O::ResidualMemory, O::Buffer>,
    kv: &mut O::KvCache,
    want: Want,
) -> Result<()> {
    let x = enter(ops, stage, plan, &mut a.x)?;
    let x = forward_layers(ops, stage, plan, x, &mut a.scratch, kv)?;
    leave(ops, stage, plan, x, &mut a.scratch, want)
}

/// What stands before the layers.
pub fn enter<'x, O: Ops>(
    ops: &mut O,
    stage: &StageWeights<'_, O::Matrix, O::Vector>,
    plan: &StepPlan,
    x: &'x mut O::ResidualMemory,
) -> Result<O::Residual<'x>> {
    match stage.embedding {
        Some(table) => ops.embed(plan, table, x),
        None => ops.resume(plan, x),
    }
}

/// All layers.
pub fn forward_layers<'x, O: Ops>(
    ops: &mut O,
    stage: &StageWeights<'_, O::Matrix, O::Vector>,
    plan: &StepPlan,
    mut x: O::Residual<'x>,
    scratch: &mut Scratch<O::Buffer>,
    kv: &mut O::KvCache,
) -> Result<O::Residual<'x>> {
    for (layer, w) in (stage.first_layer..).zip(stage.layers) {
        x = forward_layer(ops, w, layer, plan, x, scratch, kv)?;
    }
    Ok(x)
}

/// What stands behind the layers.
pub fn leave<O: Ops>(
    ops: &mut O,
    stage: &StageWeights<'_, O::Matrix, O::Vector>,
    plan: &StepPlan,
    x: O::Residual<'_>,
    scratch: &mut Scratch<O::Buffer>,
    want: Want,
) -> Result<()> {
    let Some(head) = stage.head else {
        return ops.settle(x).map(drop);
    };
    let t = ops.norm_wanted(plan, x, &head.norm, &mut scratch.t)?;
    ops.unembed(plan, t, &head.unembedding, want)
}

/// One layer: attention and experts, each added to the residual stream.
pub fn forward_layer<'x, O: Ops>(
    ops: &mut O,
    w: &LayerWeights<O::Matrix, O::Vector>,
    layer: usize,
    plan: &StepPlan,
    x: O::Residual<'x>,
    scratch: &mut Scratch<O::Buffer>,
    kv: &mut O::KvCache,
) -> Result<O::Residual<'x>> {
    let Scratch { t, qkv, attention, h } = scratch;
    let (x, normed) = ops.norm(x, &w.attn_norm, t)?;
    let qkv = ops.qkv(normed, &w.qkv, &w.qkv_bias, qkv)?;
    let queries = ops.rope_store(plan, layer, qkv, kv)?;
    let attended = ops.attention(plan, queries, &w.sinks, kv, attention)?;
    let x = ops.attn_out(attended, &w.attn_out, &w.attn_out_bias, x)?;

    let routed = ops.route(x, &w.ffn_norm, &w.router, &w.router_bias, t)?;
    let gated = ops.mlp1(&routed, &w.mlp1, &w.mlp1_bias, h)?;
    ops.mlp2(gated, routed, &w.mlp2, &w.mlp2_bias)
}
