//! The model's operations, in the model's words.
//!
//! A backend implements [`Ops`]; [`crate::model::forward`] is written once over it. Operations may be queued
//! rather than run: only what [`Ops::unembed`] hands out is read by the host. Rows of activations are the rows
//! of the step's plan.

use crate::batch::StepPlan;
use crate::error::Result;
use crate::replica::{StepOutput, Want};

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
    /// Activations `[rows, width]`.
    type Buffer;
    /// The experts each row is sent to, and their shares, grouped by expert.
    type Routes;
    /// The paged KV cache.
    type KvCache;

    /// `x[T, H]` = the rows of `table[V, H]` that the plan's tokens name.
    fn embed(&mut self, plan: &StepPlan, table: &Self::Matrix, x: &mut Self::Buffer) -> Result<()>;

    /// `t = x / sqrt(mean(x^2) + 1e-5) * weight`, row by row `[.., H]`.
    fn norm(&mut self, x: &Self::Buffer, weight: &Self::Vector, t: &mut Self::Buffer) -> Result<()>;

    /// `qkv[T, D * (Nq + 2 Nkv)] = t[T, H] w^T + bias`.
    fn qkv(&mut self, t: &Self::Buffer, w: &Self::Matrix, bias: &Self::Vector, qkv: &mut Self::Buffer) -> Result<()>;

    /// Rotates queries and keys in `qkv` by their positions and writes keys and values into the cache.
    fn rope_store(
        &mut self,
        plan: &StepPlan,
        layer: usize,
        qkv: &mut Self::Buffer,
        kv: &mut Self::KvCache,
    ) -> Result<()>;

    /// `out[T, D * Nq]`: each query head's softmax, with its sink, over the cached positions up to its own (in a
    /// windowed layer, of the window), times their values.
    fn attention(
        &mut self,
        plan: &StepPlan,
        layer: usize,
        qkv: &Self::Buffer,
        sinks: &Self::Vector,
        kv: &Self::KvCache,
        out: &mut Self::Buffer,
    ) -> Result<()>;

    /// `x[T, H] += a[T, D * Nq] w^T + bias`.
    fn attn_out(&mut self, a: &Self::Buffer, w: &Self::Matrix, bias: &Self::Vector, x: &mut Self::Buffer)
    -> Result<()>;

    /// The `K` largest of `t[T, H] w^T + bias` in each row (ties: lower index first), shares by their softmax.
    fn route(
        &mut self,
        t: &Self::Buffer,
        w: &Self::Matrix,
        bias: &Self::Vector,
        routes: &mut Self::Routes,
    ) -> Result<()>;

    /// [`Self::norm`], and [`Self::route`] of what it gives.
    #[allow(clippy::too_many_arguments, reason = "two operations at once")]
    fn norm_route(
        &mut self,
        x: &Self::Buffer,
        weight: &Self::Vector,
        t: &mut Self::Buffer,
        w: &Self::Matrix,
        bias: &Self::Vector,
        routes: &mut Self::Routes,
    ) -> Result<()> {
        self.norm(x, weight, t)?;
        self.route(t, w, bias, routes)
    }

    /// `h[T * K, I]`: for each row and each of its experts the gated unit of `t[T, H] w[e]^T + bias[e]`.
    fn mlp1(
        &mut self,
        t: &Self::Buffer,
        routes: &Self::Routes,
        w: &Self::Matrix,
        bias: &Self::Vector,
        h: &mut Self::Buffer,
    ) -> Result<()>;

    /// `x[T, H] += ` the sum over each row's experts, in order of their index, of its share times
    /// `h[.., I] w[e]^T + bias[e]`.
    fn mlp2(
        &mut self,
        h: &Self::Buffer,
        routes: &Self::Routes,
        w: &Self::Matrix,
        bias: &Self::Vector,
        x: &mut Self::Buffer,
    ) -> Result<()>;

    /// `selected` = the rows of `x` whose logits the plan wants.
    fn select(&mut self, plan: &StepPlan, x: &Self::Buffer, selected: &mut Self::Buffer) -> Result<()>;

    /// Logits `t[.., H] w^T`, or their summary, for the host.
    fn unembed(&mut self, t: &Self::Buffer, w: &Self::Matrix, want: Want, output: &mut StepOutput) -> Result<()>;
}
