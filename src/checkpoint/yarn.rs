//! What a configuration says of YaRN (Peng et al. 2023) beside theta, factor and context, as two numbers the rotary
//! embedding can take: the ends of its ramp, and the concentration.

use std::f64::consts::PI;

/// YaRN's parameters, as configurations give them.
pub(super) struct Yarn {
    pub head_dim: usize,
    pub theta: f64,
    pub factor: f64,
    /// Positions before scaling.
    pub context: usize,
    /// Pairs that turn more often within the context are kept.
    pub beta_fast: f64,
    /// Pairs that turn less often are slowed by the factor.
    pub beta_slow: f64,
}

/// The numbers the eval program has built in.
const PROGRAM_BETAS: [f64; 2] = [32.0, 1.0];

impl Yarn {
    /// The pairs, counted from 0 and with fractions, that turn `beta_fast` and `beta_slow` times within the context.
    pub fn ends(&self) -> [f64; 2] {
        let pair = |turns: f64| {
            let period = self.context as f64 / (turns * 2.0 * PI);
            self.head_dim as f64 * period.ln() / (2.0 * self.theta.ln())
        };
        [pair(self.beta_fast), pair(self.beta_slow)]
    }

    /// [`ModelConfig::yarn_ramp`] of these ends; `exact` says that they are what [`Yarn::ends`] gave.
    pub fn ramp(&self, ends: [f64; 2], exact: bool) -> Option<[f32; 2]> {
        let is_program = exact && [self.beta_fast, self.beta_slow] == PROGRAM_BETAS;
        // Two equal ends are a step.
        const STEP: f64 = 0.001;
        let [low, high] = ends;
        let high = if low == high { high + STEP } else { high };
        (!is_program && self.factor > 1.0).then_some([low as f32, high as f32])
    }
}

/// The concentration of a factor: `0.1 m ln s + 1`, or 1 where nothing is scaled.
pub(super) fn concentration(factor: f64, mscale: f64) -> f64 {
    if factor > 1.0 {
        0.1 * mscale * factor.ln() + 1.0
    } else {
        1.0
    }
}
