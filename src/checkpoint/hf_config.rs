//! The `config.json` of a Hugging Face directory.

use std::path::Path;

use serde::Deserialize;

use crate::error::{self, Error};
use crate::model::ModelConfig;

/// The most positions taken from `max_position_embeddings`. gpt-oss allows 131072, but `seq_len` only sizes the
/// default KV cache.
const MAX_SEQ_LEN: usize = 4096;

/// The fields that matter here, under their own names.
#[derive(Deserialize)]
struct HfConfig {
    vocab_size: usize,
    hidden_size: usize,
    num_local_experts: usize,
    num_experts_per_tok: Option<usize>,
    experts_per_token: Option<usize>,
    intermediate_size: usize,
    num_hidden_layers: usize,
    head_dim: usize,
    num_attention_heads: usize,
    num_key_value_heads: usize,
    max_position_embeddings: usize,
    initial_context_length: Option<usize>,
    rope_theta: f32,
    rope_scaling: Option<RopeScaling>,
    sliding_window: Option<usize>,
    swiglu_limit: f32,
    layer_types: Option<Vec<String>>,
    rms_norm_eps: Option<f32>,
}

#[derive(Deserialize)]
struct RopeScaling {
    factor: f32,
    original_max_position_embeddings: Option<usize>,
    beta_fast: Option<f32>,
    beta_slow: Option<f32>,
    truncate: Option<bool>,
}

/// Reads and checks a `config.json`. What the model's mathematics holds fixed must be there as it holds it.
pub(super) fn read(path: &Path) -> error::Result<ModelConfig> {
    let text = std::fs::read(path).map_err(|e| Error::io(path, e))?;
    let wrong = |why: String| Error::format(path.display().to_string(), why);
    let hf: HfConfig = serde_json::from_slice(&text).map_err(|e| wrong(e.to_string()))?;
    hf.check_fixed().map_err(wrong)?;
    let layer_types = hf.layer_types.clone();
    let config = hf.into_config().map_err(wrong)?.check()?;
    check_layer_types(&config, layer_types.as_deref()).map_err(wrong)?;
    Ok(config)
}

impl HfConfig {
    /// Refuses constants other than the ones built into the mathematics.
    fn check_fixed(&self) -> Result<(), String> {
        let scaling = self.rope_scaling.as_ref();
        let constants = [
            ("rms_norm_eps", self.rms_norm_eps, 1e-5),
            ("rope_scaling.beta_fast", scaling.and_then(|s| s.beta_fast), 32.0),
            ("rope_scaling.beta_slow", scaling.and_then(|s| s.beta_slow), 1.0),
        ];
        for (name, value, fixed) in constants {
            if let Some(value) = value.filter(|&value| value != fixed) {
                return Err(format!("{name} is {value}; only {fixed} is supported"));
            }
        }
        if scaling.and_then(|s| s.truncate) == Some(true) {
            return Err("rope_scaling.truncate is true; only false is supported".into());
        }
        Ok(())
    }

    fn into_config(self) -> Result<ModelConfig, String> {
        let experts_per_token = same("num_experts_per_tok", self.num_experts_per_tok, self.experts_per_token)?;
        let original = self
            .rope_scaling
            .as_ref()
            .and_then(|s| s.original_max_position_embeddings);
        let initial_context_length = same("initial_context_length", self.initial_context_length, original)?;
        Ok(ModelConfig {
            vocab_size: self.vocab_size,
            hidden_dim: self.hidden_size,
            n_experts: self.num_local_experts,
            experts_per_token,
            intermediate_dim: self.intermediate_size,
            n_layers: self.num_hidden_layers,
            head_dim: self.head_dim,
            n_attn_heads: self.num_attention_heads,
            n_kv_heads: self.num_key_value_heads,
            seq_len: self.max_position_embeddings.min(MAX_SEQ_LEN),
            initial_context_length,
            rope_theta: self.rope_theta,
            rope_scaling_factor: self.rope_scaling.map_or(1.0, |s| s.factor),
            sliding_window: self.sliding_window.unwrap_or(0),
            swiglu_limit: self.swiglu_limit,
        })
    }
}

/// A value that files give under one name, another or both.
fn same(name: &str, value: Option<usize>, alias: Option<usize>) -> Result<usize, String> {
    match (value, alias) {
        (Some(a), Some(b)) if a != b => Err(format!("{name} is given twice, as {a} and as {b}")),
        (Some(value), _) | (None, Some(value)) => Ok(value),
        (None, None) => Err(format!("missing field `{name}`")),
    }
}

/// Refuses any other alternation of layers than the one built in. Files that name no types mean that one.
fn check_layer_types(config: &ModelConfig, types: Option<&[String]>) -> Result<(), String> {
    let Some(types) = types else { return Ok(()) };
    if types.len() != config.n_layers {
        return Err(format!(
            "layer_types has {} entries for {} layers",
            types.len(),
            config.n_layers
        ));
    }
    for (layer, found) in types.iter().enumerate() {
        let expected = match config.window(layer) {
            Some(_) => "sliding_attention",
            None => "full_attention",
        };
        if found != expected {
            return Err(format!(
                "layer_types[{layer}] is {found}; only {expected} is supported there"
            ));
        }
    }
    Ok(())
}
