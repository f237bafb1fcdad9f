//! What a kernel can take of a model's dimensions.

use super::catalogue::{Dimension, Kernel, Limit, Op};
use crate::config::ModelConfig;
use std::fmt;

/// A dimension that a kernel cannot take.
#[derive(Clone, Copy, Debug)]
pub struct Beyond {
    /// Which kernel.
    pub kernel: &'static Kernel,
    /// What it takes.
    pub limit: Limit,
    /// What the model has.
    pub value: usize,
}

impl fmt::Display for Beyond {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (dimension, takes) = match self.limit {
            Limit::AtMost(dimension, most) => (dimension, format!("at most {most}")),
            Limit::MultipleOf(dimension, of) => (dimension, format!("multiples of {of}")),
            Limit::Exactly(dimension, value) => (dimension, format!("{value}")),
        };
        let (name, kernel) = (field(dimension), self.kernel.name());
        write!(f, "{name} is {}; its kernel {kernel} takes {takes}", self.value)
    }
}

/// A dimension as the model's configuration names it.
fn field(dimension: Dimension) -> &'static str {
    match dimension {
        Dimension::Hidden => "hidden_dim",
        Dimension::Experts => "n_experts",
        Dimension::ExpertsPerToken => "experts_per_token",
        Dimension::HeadDim => "head_dim",
        Dimension::HeadsPerKvHead => "n_attn_heads / n_kv_heads",
        Dimension::QkvDim => "head_dim * (n_attn_heads + 2 * n_kv_heads)",
    }
}

fn value(dimension: Dimension, config: &ModelConfig) -> usize {
    match dimension {
        Dimension::Hidden => config.hidden_dim,
        Dimension::Experts => config.n_experts,
        Dimension::ExpertsPerToken => config.experts_per_token,
        Dimension::HeadDim => config.head_dim,
        Dimension::HeadsPerKvHead => config.n_attn_heads / config.n_kv_heads,
        Dimension::QkvDim => config.qkv_dim(),
    }
}

impl Kernel {
    /// Whether another kernel of the operation, or one for each of its parts, serves where this one, made for few or
    /// many rows, does not take the model.
    pub fn has_substitute(&self) -> bool {
        let varies = !self.variant.is_empty() && matches!(self.op, Op::Norm | Op::NormRoute);
        varies || matches!(self.op, Op::NormQkv | Op::OneLaunch)
    }

    /// Whether the kernel takes a model, or the first dimension that it does not.
    pub fn takes(&'static self, config: &ModelConfig) -> Result<(), Beyond> {
        self.limits.iter().try_for_each(|&limit| self.keeps(limit, config))
    }

    /// Whether a model is within one of the kernel's limits.
    fn keeps(&'static self, limit: Limit, config: &ModelConfig) -> Result<(), Beyond> {
        let (value, good) = match limit {
            Limit::AtMost(dimension, most) => {
                let value = value(dimension, config);
                (value, value <= most)
            }
            Limit::MultipleOf(dimension, of) => {
                let value = value(dimension, config);
                (value, value.is_multiple_of(of))
            }
            Limit::Exactly(dimension, only) => {
                let value = value(dimension, config);
                (value, value == only)
            }
        };
        let kernel = self;
        if good {
            Ok(())
        } else {
            Err(Beyond { kernel, limit, value })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::gpu::catalogue;

    /// A model with one dimension set.
    fn with(dimension: Dimension, value: usize) -> ModelConfig {
        let mut config = ModelConfig::preset_20b();
        match dimension {
            Dimension::Hidden => config.hidden_dim = value,
            Dimension::Experts => config.n_experts = value,
            Dimension::ExpertsPerToken => config.experts_per_token = value,
            Dimension::HeadDim => config.head_dim = value,
            Dimension::HeadsPerKvHead => config.n_attn_heads = value * config.n_kv_heads,
            Dimension::QkvDim => {
                (config.head_dim, config.n_kv_heads) = (1, 1);
                config.n_attn_heads = value - 2;
            }
        }
        config
    }

    #[test]
    fn every_kernel_takes_its_limits_and_not_one_beyond() {
        let kernels = catalogue::TABLES.iter().flat_map(|family| family.kernels);
        for kernel in kernels {
            for &limit in kernel.limits {
                let (dimension, good, bad) = match limit {
                    Limit::AtMost(dimension, most) => (dimension, most, most + 1),
                    Limit::MultipleOf(dimension, of) => (dimension, 2 * of, 2 * of + 1),
                    Limit::Exactly(dimension, only) => (dimension, only, only + 1),
                };
                // Others of its limits may be passed by the rest of the model.
                let one = |value| kernel.keeps(limit, &with(dimension, value));
                assert!(one(good).is_ok(), "{} {limit:?}", kernel.name());
                let beyond = one(bad).expect_err("beyond the limit").to_string();
                let words = format!("{} is {bad}; its kernel {} takes ", field(dimension), kernel.name());
                assert!(beyond.starts_with(&words), "{beyond}");
            }
        }
    }
}
