//! The model's mathematics, once for all backends.

use super::ModelConfig;
use crate::batch::StepPlan;
use crate::error::Result;
use crate::ops::Ops;
use crate::replica::{StepOutput, Want};
use std::ffi::c_void;
use std::ptr::null_mut;

/// One layer's weights.
pub struct LayerWeights<M, V> {
    /// `[H]`
    pub attn_norm: V,
    /// `[D * (Nq + 2 Nkv), H]`
    pub qkv: M,
    /// `[D * (Nq + 2 Nkv)]`
    pub qkv_bias: V,
    /// `[Nq]`
    pub sinks: V,
    /// `[H, D * Nq]`
    pub attn_out: M,
    /// `[H]`
    pub attn_out_bias: V,
    /// `[H]`
    pub ffn_norm: V,
    /// `[E, H]`
    pub router: M,
    /// `[E]`
    pub router_bias: V,
    /// `[E][2 I, H]`, rows alternating gate and up
    pub mlp1: M,
    /// `[E, 2 I]`
    pub mlp1_bias: V,
    /// `[E][H, I]`
    pub mlp2: M,
    /// `[E, H]`
    pub mlp2_bias: V,
}

/// The model's weights.
pub struct Weights<M, V> {
    /// `[V, H]`
    pub embedding: M,
    /// One a layer.
    pub layers: Vec<LayerWeights<M, V>>,
    /// `[H]`
    pub out_norm: V,
    /// `[V, H]`
    pub unembedding: M,
}

impl<M, V> LayerWeights<M, V> {
    fn try_map<A, B>(
        &mut self,
        m: &mut impl FnMut(&mut M) -> Option<A>,
        v: &mut impl FnMut(&mut V) -> Option<B>,
    ) -> Option<LayerWeights<A, B>> {
        Some(LayerWeights {
            attn_norm: v(&mut self.attn_norm)?,
            qkv: m(&mut self.qkv)?,
            qkv_bias: v(&mut self.qkv_bias)?,
            sinks: v(&mut self.sinks)?,
            attn_out: m(&mut self.attn_out)?,
            attn_out_bias: v(&mut self.attn_out_bias)?,
            ffn_norm: v(&mut self.ffn_norm)?,
            router: m(&mut self.router)?,
            router_bias: v(&mut self.router_bias)?,
            mlp1: m(&mut self.mlp1)?,
            mlp1_bias: v(&mut self.mlp1_bias)?,
            mlp2: m(&mut self.mlp2)?,
            mlp2_bias: v(&mut self.mlp2_bias)?,
        })
    }
}

impl<M, V> Weights<M, V> {
    /// The same of what `m` makes of each matrix and `v` of each vector; the first failure is the whole's.
    pub fn try_map<A, B>(
        &mut self,
        mut m: impl FnMut(&mut M) -> Option<A>,
        mut v: impl FnMut(&mut V) -> Option<B>,
    ) -> Option<Weights<A, B>> {
        Some(Weights {
            embedding: m(&mut self.embedding)?,
            layers: self
                .layers
                .iter_mut()
                .map(|layer| layer.try_map(&mut m, &mut v))
                .collect::<Option<_>>()?,
            out_norm: v(&mut self.out_norm)?,
            unembedding: m(&mut self.unembedding)?,
        })
    }
}

impl<M, V> Weights<M, V> {
    /// Addresses of each kind of tensor in its first layer, in the order of the C struct's fields; NULL without layers.
    pub fn pointers(
        &self,
        matrix: impl Fn(&M) -> *mut c_void,
        vector: impl Fn(&V) -> *mut c_void,
    ) -> [*mut c_void; 16] {
        let first = self.layers.first();
        let m = |of: fn(&LayerWeights<M, V>) -> &M| first.map_or(null_mut(), |layer| matrix(of(layer)));
        let v = |of: fn(&LayerWeights<M, V>) -> &V| first.map_or(null_mut(), |layer| vector(of(layer)));
        [
            matrix(&self.embedding),
            v(|l| &l.attn_norm),
            v(|l| &l.ffn_norm),
            m(|l| &l.qkv),
            m(|l| &l.attn_out),
            v(|l| &l.qkv_bias),
            v(|l| &l.attn_out_bias),
            v(|l| &l.sinks),
            m(|l| &l.router),
            v(|l| &l.router_bias),
            m(|l| &l.mlp1),
            m(|l| &l.mlp2),
            v(|l| &l.mlp1_bias),
            v(|l| &l.mlp2_bias),
            vector(&self.out_norm),
            matrix(&self.unembedding),
        ]
    }
}

/// The activations of one step.
pub struct Activations<B, R> {
    /// The residual stream `[T, H]`.
    pub x: B,
    /// The residual stream after a norm `[T, H]`.
    pub t: B,
    /// `[T, D * (Nq + 2 Nkv)]`
    pub qkv: B,
    /// Attention's output `[T, D * Nq]`.
    pub attention: B,
    /// The experts of each row.
    pub routes: R,
    /// Inside the experts `[T * K, I]`.
    pub h: B,
    /// The rows whose logits are wanted `[.., H]`.
    pub selected: B,
}

/// Runs the tokens of `plan` through the model.
#[allow(clippy::too_many_arguments, reason = "each is a part of the replica that owns it")]
pub fn forward<O: Ops>(
    ops: &mut O,
    config: &ModelConfig,
    weights: &Weights<O::Matrix, O::Vector>,
    plan: &StepPlan,
    a: &mut Activations<O::Buffer, O::Routes>,
    kv: &mut O::KvCache,
    want: Want,
    output: &mut StepOutput,
) -> Result<()> {
    ops.embed(plan, &weights.embedding, &mut a.x)?;
    for (layer, w) in weights.layers.iter().enumerate().take(config.n_layers) {
        forward_layer(ops, w, layer, plan, a, kv)?;
    }
    ops.select(plan, &a.x, &mut a.selected)?;
    ops.norm(&a.selected, &weights.out_norm, &mut a.t)?;
    ops.unembed(&a.t, &weights.unembedding, want, output)
}

/// One layer: attention and experts, each added to the residual stream `a.x`.
pub fn forward_layer<O: Ops>(
    ops: &mut O,
    w: &LayerWeights<O::Matrix, O::Vector>,
    layer: usize,
    plan: &StepPlan,
    a: &mut Activations<O::Buffer, O::Routes>,
    kv: &mut O::KvCache,
) -> Result<()> {
    ops.norm(&a.x, &w.attn_norm, &mut a.t)?;
    ops.qkv(&a.t, &w.qkv, &w.qkv_bias, &mut a.qkv)?;
    ops.rope_store(plan, layer, &mut a.qkv, kv)?;
    ops.attention(plan, layer, &a.qkv, &w.sinks, kv, &mut a.attention)?;
    ops.attn_out(&a.attention, &w.attn_out, &w.attn_out_bias, &mut a.x)?;

    ops.norm_route(&a.x, &w.ffn_norm, &mut a.t, &w.router, &w.router_bias, &mut a.routes)?;
    ops.mlp1(&a.t, &a.routes, &w.mlp1, &w.mlp1_bias, &mut a.h)?;
    ops.mlp2(&a.h, &a.routes, &w.mlp2, &w.mlp2_bias, &mut a.x)
}
