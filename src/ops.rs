//! The model's operations, in the model's words.
//!
//! A backend implements [`Ops`]; [`crate::model::forward`] is written once over it. Operations may be queued rather
//! than run. Of what they compute the host reads the step's output alone, once the step is collected. Rows of
//! activations are the rows of the step's plan.
//!
//! # The order of operations
//!
//! An operation takes memory and gives the value that it leaves there. Every value has a type of its own, which only
//! the operations that may use it take; it borrows its memory, so that nothing overwrites it before it is used.
//! Operations in a wrong order therefore do not compile. Through each layer the residual stream goes like this:
//!
//! ```text
//! Residual ──norm──► Settled ──attn_out──► Settled ──route──► Routed ──mlp2──► Residual
//! ```
//!
//! A [`Residual`](Ops::Residual) may have a sum outstanding: what a layer's experts gave, which the backend adds when
//! the stream is read next. [`norm`](Ops::norm) and [`settle`](Ops::settle) add it to every row;
//! [`norm_wanted`](Ops::norm_wanted) adds it to the rows that it reads, and ends the stream.
//!
//! ```
//! # use getp::{error::Result, model::LayerWeights, ops::Ops};
//! fn experts<'x, O: Ops>(
//!     ops: &mut O,
//!     w: &LayerWeights<O::Matrix, O::Vector>,
//!     x: O::Settled<'x>,
//!     [t, h]: [&mut O::Buffer; 2],
//! ) -> Result<O::Residual<'x>> {
//!     let x = ops.route(x, &w.ffn_norm, &w.router, &w.router_bias, t)?;
//!     let h = ops.mlp1(&x, &w.mlp1, &w.mlp1_bias, h)?;
//!     ops.mlp2(h, x, &w.mlp2, &w.mlp2_bias)
//! }
//! ```
//!
//! The experts' outstanding sum cannot be lost by routing again:
//!
//! ```compile_fail,E0308
//! # use getp::{error::Result, model::LayerWeights, ops::Ops};
//! fn twice<'x, O: Ops>(
//!     ops: &mut O,
//!     w: &LayerWeights<O::Matrix, O::Vector>,
//!     x: O::Residual<'x>,
//!     [t, h]: [&mut O::Buffer; 2],
//! ) -> Result<O::Residual<'x>> {
//!     let x = ops.route(x, &w.ffn_norm, &w.router, &w.router_bias, t)?;
//!     let h = ops.mlp1(&x, &w.mlp1, &w.mlp1_bias, h)?;
//!     ops.mlp2(h, x, &w.mlp2, &w.mlp2_bias)
//! }
//! ```
//!
//! Attention is not added once the rows are on their way to the experts:
//!
//! ```compile_fail,E0382
//! # use getp::{error::Result, model::LayerWeights, ops::Ops};
//! fn late<'x, O: Ops>(
//!     ops: &mut O,
//!     w: &LayerWeights<O::Matrix, O::Vector>,
//!     a: O::Attended<'_>,
//!     x: O::Settled<'x>,
//!     [t, h]: [&mut O::Buffer; 2],
//! ) -> Result<O::Residual<'x>> {
//!     let routed = ops.route(x, &w.ffn_norm, &w.router, &w.router_bias, t)?;
//!     ops.attn_out(a, &w.attn_out, &w.attn_out_bias, x)?;
//!     let h = ops.mlp1(&routed, &w.mlp1, &w.mlp1_bias, h)?;
//!     ops.mlp2(h, routed, &w.mlp2, &w.mlp2_bias)
//! }
//! ```
//!
//! Rows of all tokens are not unembedded where those whose logits are wanted must be:
//!
//! ```compile_fail,E0308
//! # use getp::{batch::{StepPlan, Want}, error::Result, model::Head, ops::Ops};
//! fn all<O: Ops>(
//!     ops: &mut O,
//!     plan: &StepPlan,
//!     w: &Head<O::Matrix, O::Vector>,
//!     x: O::Residual<'_>,
//!     t: &mut O::Buffer,
//! ) -> Result<()> {
//!     let (_, t) = ops.norm(x, &w.norm, t)?;
//!     ops.unembed(plan, t, &w.unembedding, Want::Tokens)
//! }
//! ```
//!
//! And no value is used after its memory was written to again:
//!
//! ```compile_fail,E0499
//! # use getp::{error::Result, model::LayerWeights, ops::Ops};
//! fn stale<O: Ops>(
//!     ops: &mut O,
//!     w: &LayerWeights<O::Matrix, O::Vector>,
//!     x: O::Residual<'_>,
//!     [t, qkv]: [&mut O::Buffer; 2],
//! ) -> Result<()> {
//!     let (x, normed) = ops.norm(x, &w.attn_norm, t)?;
//!     ops.route(x, &w.ffn_norm, &w.router, &w.router_bias, t)?;
//!     ops.qkv(normed, &w.qkv, &w.qkv_bias, qkv).map(drop)
//! }
//! ```

use crate::batch::{StepPlan, Want};
use crate::error::Result;

/// The operations of one step.
///
/// Shapes: `T` rows in the step, `H` hidden, `D` head width, `Nq`/`Nkv` heads, `E` experts, `K` of them a token,
/// `I` intermediate, `V` vocabulary. Activations are rounded as the backend's precision says; `x`, the residual
/// stream, is float32 everywhere.
pub trait Ops {
    /// Packed weights: one matrix, or the experts' matrices of a layer.
    type Matrix;
    /// Float32 weights: a bias, a norm, the sinks.
    type Vector;
    /// The paged KV cache.
    type KvCache;
    /// Memory of activations `[rows, width]`.
    type Buffer;
    /// Memory of the residual stream `x[T, H]`, and of what becomes of its rows at the experts.
    type ResidualMemory;

    /// The residual stream; what a layer's experts gave may be outstanding.
    type Residual<'x>;
    /// The residual stream, to which nothing is outstanding.
    type Settled<'x>;
    /// The residual stream, and the experts that each row is sent to with what they take.
    type Routed<'x, 't>;
    /// `[T, H]`: the residual stream after attention's norm, which may be outstanding.
    type Normed<'m>;
    /// `[T, D * (Nq + 2 Nkv)]`: queries, keys and values; the product may be outstanding.
    type Projected<'m>;
    /// `[T, D * Nq]`: a layer's rotated queries, whose keys and values are in the cache.
    type Queries<'m>;
    /// `[T, D * Nq]`: what attention gave.
    type Attended<'m>;
    /// `[T * K, I]`: the gated units inside the experts.
    type Gated<'m>;
    /// `[.., H]`: the rows whose logits the plan wants, after the last norm.
    type LogitsRows<'m>;

    /// `x[T, H]` = the rows of `table[V, H]` that the plan's tokens name.
    fn embed<'x>(
        &mut self,
        plan: &StepPlan,
        table: &Self::Matrix,
        x: &'x mut Self::ResidualMemory,
    ) -> Result<Self::Residual<'x>>;

    /// `x[T, H]` as the [settled](Self::settle) stream of the layers before lies in its memory.
    fn resume<'x>(&mut self, plan: &StepPlan, x: &'x mut Self::ResidualMemory) -> Result<Self::Residual<'x>>;

    /// Adds what is outstanding to `x`; `t = x / sqrt(mean(x^2) + 1e-5) * weight`, row by row. A backend that norms and
    /// [multiplies](Self::qkv) at once leaves both to the product.
    fn norm<'x, 't>(
        &mut self,
        x: Self::Residual<'x>,
        weight: &Self::Vector,
        t: &'t mut Self::Buffer,
    ) -> Result<(Self::Settled<'x>, Self::Normed<'t>)>;

    /// `qkv[T, D * (Nq + 2 Nkv)] = t[T, H] w^T + bias`. A backend that multiplies and [stores](Self::rope_store) at
    /// once leaves the product outstanding.
    fn qkv<'m>(
        &mut self,
        t: Self::Normed<'m>,
        w: &Self::Matrix,
        bias: &Self::Vector,
        qkv: &'m mut Self::Buffer,
    ) -> Result<Self::Projected<'m>>;

    /// Rotates queries and keys by their positions and writes keys and values into the cache of `layer`.
    fn rope_store<'m>(
        &mut self,
        plan: &StepPlan,
        layer: usize,
        qkv: Self::Projected<'m>,
        kv: &mut Self::KvCache,
    ) -> Result<Self::Queries<'m>>;

    /// `out[T, D * Nq]`: each query head's softmax, with its sink, over the cached positions up to its own (in a
    /// windowed layer, of the window), times their values.
    fn attention<'m>(
        &mut self,
        plan: &StepPlan,
        queries: Self::Queries<'_>,
        sinks: &Self::Vector,
        kv: &Self::KvCache,
        out: &'m mut Self::Buffer,
    ) -> Result<Self::Attended<'m>>;

    /// `x[T, H] += a[T, D * Nq] w^T + bias`.
    fn attn_out<'x>(
        &mut self,
        a: Self::Attended<'_>,
        w: &Self::Matrix,
        bias: &Self::Vector,
        x: Self::Settled<'x>,
    ) -> Result<Self::Settled<'x>>;

    /// `t` = the norm of `x` by the weights `norm`; each row goes to the experts of the `K` largest of
    /// `t[T, H] w^T + bias` (ties: lower index first), with shares by their softmax.
    fn route<'x, 't>(
        &mut self,
        x: Self::Settled<'x>,
        norm: &Self::Vector,
        w: &Self::Matrix,
        bias: &Self::Vector,
        t: &'t mut Self::Buffer,
    ) -> Result<Self::Routed<'x, 't>>;

    /// `h[T * K, I]`: for each row and each of its experts the gated unit of `t[T, H] w[e]^T + bias[e]`.
    fn mlp1<'m>(
        &mut self,
        x: &Self::Routed<'_, '_>,
        w: &Self::Matrix,
        bias: &Self::Vector,
        h: &'m mut Self::Buffer,
    ) -> Result<Self::Gated<'m>>;

    /// `x[T, H] += ` the sum over each row's experts, in order of their index, of its share times
    /// `h[.., I] w[e]^T + bias[e]`. The sum may stay outstanding.
    fn mlp2<'x>(
        &mut self,
        h: Self::Gated<'_>,
        x: Self::Routed<'x, '_>,
        w: &Self::Matrix,
        bias: &Self::Vector,
    ) -> Result<Self::Residual<'x>>;

    /// Adds what is outstanding to `x`, all of which then lies in its memory: the end of layers that others follow.
    fn settle<'x>(&mut self, x: Self::Residual<'x>) -> Result<Self::Settled<'x>>;

    /// The rows of `x` whose logits the plan wants, what is outstanding included, after the norm by `weight`.
    fn norm_wanted<'t>(
        &mut self,
        plan: &StepPlan,
        x: Self::Residual<'_>,
        weight: &Self::Vector,
        t: &'t mut Self::Buffer,
    ) -> Result<Self::LogitsRows<'t>>;

    /// Logits `t[.., H] w^T` of the plan's logits rows, their summary, or tokens sampled from them. They stay with the
    /// backend, whose replica hands them to the host when the step is [collected](crate::replica::Replica::collect).
    fn unembed(&mut self, plan: &StepPlan, t: Self::LogitsRows<'_>, w: &Self::Matrix, want: Want) -> Result<()>;
}
