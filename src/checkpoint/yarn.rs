//! YaRN (Peng et al. 2023): from a configuration's parameters to the ends of the ramp and to the concentration, which
//! the rotary embedding takes beside theta, factor and context.

use std::f64::consts::PI;

/// YaRN's parameters in a configuration.
pub(super) struct Yarn {
    pub head_dim: usize,
    pub theta: f64,
    pub factor: f64,
    /// Context length before scaling.
    pub context: usize,
    /// Pairs of dimensions that rotate more often than this within the context keep their frequency.
    pub beta_fast: f64,
    /// The frequency of pairs that rotate less often than this within the context is divided by the factor.
    pub beta_slow: f64,
}

/// `beta_fast` and `beta_slow` in the eval program, where they are constants.
const PROGRAM_BETAS: [f64; 2] = [32.0, 1.0];

impl Yarn {
    /// The indices of the pairs that rotate `beta_fast` and `beta_slow` times within the context, from 0, with
    /// fractions.
    pub fn ends(&self) -> [f64; 2] {
        let pair = |turns: f64| {
            let period = self.context as f64 / (turns * 2.0 * PI);
            self.head_dim as f64 * period.ln() / (2.0 * self.theta.ln())
        };
        [pair(self.beta_fast), pair(self.beta_slow)]
    }

    /// The value of `ModelConfig::yarn_ramp` for these ends: `None` without scaling, and if the eval program computes
    /// the same ramp itself. `exact`: the ends are those of [`Yarn::ends`], not rounded or clamped.
    pub fn ramp(&self, ends: [f64; 2], exact: bool) -> Option<[f32; 2]> {
        let is_program = exact && [self.beta_fast, self.beta_slow] == PROGRAM_BETAS;
        // With two equal ends the ramp would divide by 0; this makes it a step.
        const STEP: f64 = 0.001;
        let [low, high] = ends;
        let high = if low == high { high + STEP } else { high };
        (!is_program && self.factor > 1.0).then_some([low as f32, high as f32])
    }
}

/// YaRN's concentration for scaling factor s and `mscale` m: `0.1 m ln s + 1`, or 1 if s is at most 1.
pub(super) fn concentration(factor: f64, mscale: f64) -> f64 {
    if factor > 1.0 {
        0.1 * mscale * factor.ln() + 1.0
    } else {
        1.0
    }
}
