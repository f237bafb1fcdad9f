//! The model's dimensions and constants, and sizes derived from them.

use crate::error::{Error, Result};

/// Dimensions and constants of a gpt-oss model. The library computes only with configurations that have passed
/// [`ModelConfig::check`].
#[derive(Clone, Debug, PartialEq)]
pub struct ModelConfig {
    /// Tokens in the vocabulary.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_dim: usize,
    /// Experts in each layer.
    pub n_experts: usize,
    /// Experts that the router selects for each token.
    pub experts_per_token: usize,
    /// Width of an expert's inner activations.
    pub intermediate_dim: usize,
    /// Layers.
    pub n_layers: usize,
    /// Width of an attention head.
    pub head_dim: usize,
    /// Query heads.
    pub n_attn_heads: usize,
    /// Key and value heads; each serves `n_attn_heads / n_kv_heads` query heads.
    pub n_kv_heads: usize,
    /// Positions the checkpoint was exported for.
    pub seq_len: usize,
    /// Context length before YaRN's scaling.
    pub initial_context_length: usize,
    /// The model's context length, the most tokens of a prompt. `None` if the checkpoint's format does not have it,
    /// like the program's: there prompts are cut at `initial_context_length`.
    pub context_length: Option<usize>,
    /// Base of the rotary frequencies.
    pub rope_theta: f32,
    /// YaRN's scaling factor; 1 is plain rotary embedding.
    pub rope_scaling_factor: f32,
    /// First and last pair of dimensions of YaRN's ramp between kept and scaled frequencies. `None` is the eval
    /// program's: the pairs that rotate 32 times and once within `initial_context_length`, not rounded.
    pub yarn_ramp: Option<[f32; 2]>,
    /// YaRN's factor of cos and sin. `None` is the eval program's: `0.1 ln s + 1` for a scaling factor `s` above 1,
    /// else 1.
    pub rope_concentration: Option<f32>,
    /// Positions that a sliding-window layer attends to; 0 if there is no such layer.
    pub sliding_window: usize,
    /// Limit that gate and up are clamped to in the experts' SwiGLU.
    pub swiglu_limit: f32,
}

/// The largest value of any dimension: enough for any model of this kind, and so small that products of two dimensions
/// are far from overflow.
const MAX_DIM: usize = 1 << 24;

impl ModelConfig {
    /// A tiny model, for tests.
    pub fn preset_7m() -> Self {
        Self {
            hidden_dim: 32,
            intermediate_dim: 64,
            n_layers: 2,
            head_dim: 32,
            n_attn_heads: 2,
            n_kv_heads: 1,
            ..Self::preset_20b()
        }
    }

    /// gpt-oss-20b.
    pub fn preset_20b() -> Self {
        Self {
            vocab_size: 201_088,
            hidden_dim: 2880,
            n_experts: 32,
            experts_per_token: 4,
            intermediate_dim: 2880,
            n_layers: 24,
            head_dim: 64,
            n_attn_heads: 64,
            n_kv_heads: 8,
            seq_len: 2048,
            initial_context_length: 4096,
            context_length: None,
            rope_theta: 150_000.0,
            rope_scaling_factor: 32.0,
            yarn_ramp: None,
            rope_concentration: None,
            sliding_window: 128,
            swiglu_limit: 7.0,
        }
    }

    /// gpt-oss-120b.
    pub fn preset_120b() -> Self {
        Self {
            n_layers: 36,
            n_experts: 128,
            ..Self::preset_20b()
        }
    }

    /// Checks the fields: fails if a value is not possible, alone or together with others.
    pub fn check(self) -> Result<Self> {
        let dims = [
            ("vocab_size", self.vocab_size),
            ("hidden_dim", self.hidden_dim),
            ("n_experts", self.n_experts),
            ("experts_per_token", self.experts_per_token),
            ("intermediate_dim", self.intermediate_dim),
            ("n_layers", self.n_layers),
            ("head_dim", self.head_dim),
            ("n_attn_heads", self.n_attn_heads),
            ("n_kv_heads", self.n_kv_heads),
            ("seq_len", self.seq_len),
            ("initial_context_length", self.initial_context_length),
            ("context_length", self.context_length.unwrap_or(1)),
        ];
        for (field, value) in dims {
            if value == 0 || value > MAX_DIM {
                return Err(wrong(field, value, format!("it must lie in 1..={MAX_DIM}")));
            }
        }
        if self.sliding_window > MAX_DIM {
            return Err(wrong(
                "sliding_window",
                self.sliding_window,
                format!("it must lie in 0..={MAX_DIM}"),
            ));
        }
        if self.experts_per_token > self.n_experts {
            return Err(wrong(
                "experts_per_token",
                self.experts_per_token,
                format!("there are {} experts", self.n_experts),
            ));
        }
        if !self.head_dim.is_multiple_of(2) {
            return Err(wrong(
                "head_dim",
                self.head_dim,
                "rotary embedding needs an even one".into(),
            ));
        }
        if !self.n_attn_heads.is_multiple_of(self.n_kv_heads) {
            return Err(wrong(
                "n_kv_heads",
                self.n_kv_heads,
                format!("it must divide n_attn_heads, {}", self.n_attn_heads),
            ));
        }
        for (field, value, least) in [
            ("rope_theta", self.rope_theta, 1.0),
            ("rope_scaling_factor", self.rope_scaling_factor, 0.0),
            ("swiglu_limit", self.swiglu_limit, 0.0),
        ] {
            if !value.is_finite() || value <= least {
                return Err(wrong(field, value, format!("it must be finite and above {least}")));
            }
        }
        if let Some(ramp) = self
            .yarn_ramp
            .filter(|[low, high]| !(high - low).is_finite() || high == low)
        {
            return Err(wrong(
                "yarn_ramp",
                format!("{ramp:?}"),
                "it must be finite, with two ends".into(),
            ));
        }
        if let Some(value) = self
            .rope_concentration
            .filter(|value| !value.is_finite() || *value <= 0.0)
        {
            return Err(wrong(
                "rope_concentration",
                value,
                "it must be finite and above 0".into(),
            ));
        }
        Ok(self)
    }

    /// The longest sequence that the model supports: its context length, or the initial context length times the
    /// scaling factor.
    pub fn longest(&self) -> usize {
        let scaled = self.initial_context_length as f32 * self.rope_scaling_factor.max(1.0);
        self.context_length.unwrap_or(scaled as usize)
    }

    /// Rows of the query, key and value projection: all query heads, then keys, then values.
    pub fn qkv_dim(&self) -> usize {
        self.head_dim * (self.n_attn_heads + 2 * self.n_kv_heads)
    }

    /// Width of all query heads.
    pub fn q_dim(&self) -> usize {
        self.head_dim * self.n_attn_heads
    }

    /// Width of all key heads, which is also the width of all value heads.
    pub fn kv_dim(&self) -> usize {
        self.head_dim * self.n_kv_heads
    }

    /// The sliding window of `layer`, if it has one: even layers have.
    pub fn window(&self, layer: usize) -> Option<usize> {
        (self.sliding_window > 0 && layer.is_multiple_of(2)).then_some(self.sliding_window)
    }

    /// Whether `layer` has a sliding window.
    pub fn is_windowed(&self, layer: usize) -> bool {
        self.window(layer).is_some()
    }

    /// Number of layers with a sliding window.
    pub fn windowed_layers(&self) -> usize {
        (0..self.n_layers).filter(|&l| self.window(l).is_some()).count()
    }
}

fn wrong(field: &'static str, value: impl ToString, expected: String) -> Error {
    Error::Config {
        field,
        value: value.to_string(),
        expected,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refusal(change: impl FnOnce(&mut ModelConfig)) -> String {
        let mut config = ModelConfig::preset_7m();
        change(&mut config);
        config.check().expect_err("the configuration is wrong").to_string()
    }

    #[test]
    fn presets_are_right() {
        for preset in [
            ModelConfig::preset_7m(),
            ModelConfig::preset_20b(),
            ModelConfig::preset_120b(),
        ] {
            assert!(preset.check().is_ok());
        }
    }

    #[test]
    fn what_the_mathematics_cannot_mean_is_refused_by_name() {
        assert!(refusal(|c| c.n_layers = 0).contains("n_layers is 0"));
        assert!(refusal(|c| c.vocab_size = MAX_DIM + 1).contains("vocab_size is 16777217"));
        assert!(refusal(|c| c.experts_per_token = 33).contains("experts_per_token is 33; there are 32 experts"));
        assert!(refusal(|c| c.head_dim = 31).contains("head_dim is 31"));
        assert!(refusal(|c| c.n_kv_heads = 3).contains("n_kv_heads is 3; it must divide n_attn_heads, 2"));
        assert!(refusal(|c| c.sliding_window = MAX_DIM + 1).contains("sliding_window"));
        assert!(refusal(|c| c.rope_theta = f32::NAN).contains("rope_theta is NaN"));
        assert!(refusal(|c| c.rope_scaling_factor = 0.0).contains("rope_scaling_factor is 0"));
        assert!(refusal(|c| c.swiglu_limit = f32::INFINITY).contains("swiglu_limit is inf"));
        assert!(refusal(|c| c.context_length = Some(0)).contains("context_length is 0"));
        assert!(refusal(|c| c.yarn_ramp = Some([2.0, f32::NAN])).contains("yarn_ramp is [2.0, NaN]"));
        assert!(refusal(|c| c.yarn_ramp = Some([2.0, 2.0])).contains("yarn_ramp"));
        assert!(refusal(|c| c.rope_concentration = Some(0.0)).contains("rope_concentration is 0"));
    }

    #[test]
    fn even_layers_are_windowed() {
        let config = ModelConfig::preset_20b();
        assert_eq!([config.window(0), config.window(1)], [Some(128), None]);
        assert_eq!(config.windowed_layers(), 12);
        let config = ModelConfig {
            sliding_window: 0,
            ..config
        };
        assert_eq!(config.windowed_layers(), 0);
    }
}
