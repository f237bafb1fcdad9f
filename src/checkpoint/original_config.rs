//! The `config.json` beside the release's original weights, read as gpt-oss's own reference implementation reads it.

use serde_json::{Map, Value};

use super::MAX_SEQ_LEN;
use super::fields::Fate::Used;
use super::fields::{Fields, Refusals, Table};
use super::yarn::Yarn;
use crate::config::ModelConfig;

/// Every field that `config.json` may have.
pub(super) const CONFIG: &Table = &[
    ("num_hidden_layers", Used("36")),
    ("num_experts", Used("128")),
    ("experts_per_token", Used("4")),
    ("vocab_size", Used("201088")),
    ("hidden_size", Used("2880")),
    ("intermediate_size", Used("2880")),
    ("swiglu_limit", Used("7.0")),
    ("head_dim", Used("64")),
    ("num_attention_heads", Used("64")),
    ("num_key_value_heads", Used("8")),
    // 0: all layers attend to all positions.
    ("sliding_window", Used("128")),
    ("initial_context_length", Used("4096")),
    ("rope_theta", Used("150000.0")),
    // 1 or less: no scaling.
    ("rope_scaling_factor", Used("32.0")),
    // Rotations within the context of the pairs at the ramp's ends.
    ("rope_ntk_alpha", Used("1.0")),
    ("rope_ntk_beta", Used("32.0")),
];

/// Fields that Hugging Face's configurations do not have.
const OWN: [&str; 3] = ["rope_scaling_factor", "rope_ntk_alpha", "rope_ntk_beta"];

/// Whether a `config.json` is the release's original: it has no `model_type`, but a field of [`OWN`].
pub(super) fn is_original(object: &Map<String, Value>) -> bool {
    !object.contains_key("model_type") && OWN.iter().any(|field| object.contains_key(*field))
}

/// The configuration that a `config.json` describes, not yet checked.
pub(super) fn config(object: Map<String, Value>) -> Result<ModelConfig, String> {
    let mut refused = Refusals::default();
    let fields = Fields::new(CONFIG, "", object, &mut refused);
    let model = model(&fields, &mut refused);
    refused.finish(model)
}

/// `None` if a field is refused.
fn model(fields: &Fields, refused: &mut Refusals) -> Option<ModelConfig> {
    let mut size = |name| refused.keep(fields.size(name));
    let (vocab_size, hidden_dim) = (size("vocab_size"), size("hidden_size"));
    let (n_experts, experts_per_token) = (size("num_experts"), size("experts_per_token"));
    let (intermediate_dim, n_layers, head_dim) =
        (size("intermediate_size"), size("num_hidden_layers"), size("head_dim"));
    let (n_attn_heads, n_kv_heads) = (size("num_attention_heads"), size("num_key_value_heads"));
    let (sliding_window, context) = (size("sliding_window"), size("initial_context_length"));
    let mut number = |name| refused.keep(fields.number(name));
    let (theta, factor) = (number("rope_theta"), number("rope_scaling_factor"));
    let (beta_fast, beta_slow) = (number("rope_ntk_beta"), number("rope_ntk_alpha"));
    let swiglu_limit = number("swiglu_limit");
    let yarn = Yarn {
        head_dim: head_dim?,
        theta: theta?,
        factor: factor?,
        context: context?,
        beta_fast: beta_fast?,
        beta_slow: beta_slow?,
    };
    let ends = yarn.ends();
    refused.keep(check_ends(&yarn, ends))?;
    let context_length = (yarn.context as f64 * yarn.factor.max(1.0)) as usize;
    Some(ModelConfig {
        vocab_size: vocab_size?,
        hidden_dim: hidden_dim?,
        n_experts: n_experts?,
        experts_per_token: experts_per_token?,
        intermediate_dim: intermediate_dim?,
        n_layers: n_layers?,
        head_dim: yarn.head_dim,
        n_attn_heads: n_attn_heads?,
        n_kv_heads: n_kv_heads?,
        seq_len: context_length.min(MAX_SEQ_LEN),
        initial_context_length: yarn.context,
        context_length: Some(context_length),
        rope_theta: yarn.theta as f32,
        rope_scaling_factor: yarn.factor as f32,
        yarn_ramp: yarn.ramp(ends, true),
        rope_concentration: None,
        sliding_window: sliding_window?,
        swiglu_limit: swiglu_limit? as f32,
    })
}

/// Refuses a ramp that the reference implementation refuses.
fn check_ends(yarn: &Yarn, [low, high]: [f64; 2]) -> Result<(), String> {
    let last = yarn.head_dim as f64 / 2.0 - 1.0;
    if yarn.factor <= 1.0 || 0.0 < low && low < high && high < last {
        return Ok(());
    }
    Err(format!(
        "head_dim {}, initial_context_length {}, rope_theta {}, rope_ntk_beta {} and rope_ntk_alpha {} mix the rotated \
         pairs from {low:.2} to {high:.2}; that must lie between 0 and {last}",
        yarn.head_dim, yarn.context, yarn.theta, yarn.beta_fast, yarn.beta_slow
    ))
}
