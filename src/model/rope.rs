//! Rotary embedding with YaRN's frequencies, in float32 as the eval program computes it.

use crate::config::ModelConfig;
use crate::error::Result;
use crate::memory::{self, Purpose};

/// Frequencies of the rotated pairs.
#[derive(Clone, Debug)]
pub struct Rope {
    inverse: Vec<f32>,
    concentration: f32,
}

impl Rope {
    /// The model's frequencies (YaRN, Peng et al. 2023): pairs that turn less than once over the original context
    /// are slowed by the scaling factor, pairs that turn more than 32 times are kept, those between are mixed. Where
    /// the checkpoint gives the mixed pairs or the concentration, its numbers are taken.
    pub fn new(config: &ModelConfig) -> Result<Self> {
        let half = config.head_dim / 2;
        let (theta, scale) = (config.rope_theta, config.rope_scaling_factor);
        let frequency = |i: usize| theta.powf((2 * i) as f32 / config.head_dim as f32);
        if scale <= 1.0 {
            return Ok(Self {
                inverse: memory::collect((0..half).map(|i| 1.0 / frequency(i)), Purpose::Step)?,
                concentration: config.rope_concentration.unwrap_or(1.0),
            });
        }
        // The pair whose wave turns `n` times within the original context.
        let pair = |n: f32| {
            let turns = f64::from(config.initial_context_length as f32) / (f64::from(n) * 2.0 * std::f64::consts::PI);
            half as f32 * (turns as f32).ln() / theta.ln()
        };
        let [low, high] = config.yarn_ramp.unwrap_or_else(|| [pair(32.0), pair(1.0)]);
        let inverse = (0..half).map(|i| {
            let kept = 1.0 - ((i as f32 - low) / (high - low)).clamp(0.0, 1.0);
            let fast = 1.0 / frequency(i);
            let slow = 1.0 / (scale * frequency(i));
            slow * (1.0 - kept) + fast * kept
        });
        Ok(Self {
            inverse: memory::collect(inverse, Purpose::Step)?,
            concentration: config.rope_concentration.unwrap_or_else(|| 0.1 * scale.ln() + 1.0),
        })
    }

    /// Writes cos and sin of each pair's angle at `position`, times the concentration: `[D / 2]` each.
    pub fn angles(&self, position: u32, cos: &mut [f32], sin: &mut [f32]) {
        for ((inverse, cos), sin) in self.inverse.iter().zip(cos).zip(sin) {
            let angle = position as f32 * inverse;
            *cos = angle.cos() * self.concentration;
            *sin = angle.sin() * self.concentration;
        }
    }
}
