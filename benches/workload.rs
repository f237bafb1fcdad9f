//! The workloads of the benchmarks: how many requests, and how many tokens each has.

#![allow(dead_code, reason = "each benchmark that includes this uses a part")]

use getp::config::ModelConfig;
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use rand_distr::{Distribution, LogNormal};

#[derive(Clone, Copy)]
pub struct Workload {
    pub name: &'static str,
    pub requests: usize,
    /// Tokens; the mean number if lengths are mixed.
    pub prompt: usize,
    /// Likewise.
    pub output: usize,
    /// How many tokens all prompts begin with.
    pub shared: usize,
    /// Whether lengths are lognormal, and answers end before their limit.
    pub mixed: bool,
}

const fn workload(name: &'static str, requests: usize, prompt: usize, output: usize) -> Workload {
    Workload {
        name,
        requests,
        prompt,
        output,
        shared: 0,
        mixed: false,
    }
}

/// W5, W6, W7 and M have as many requests as keep an H100 with the 20b model full for a minute before the last one
/// starts. M's lengths are those of MLPerf's set for gpt-oss-120b as far as they are published; that of prompts is a
/// guess.
pub const WORKLOADS: [Workload; 14] = [
    workload("W1", 32, 32, 992),
    workload("W2", 890, 32, 992),
    workload("W2x", 1536, 32, 992),
    workload("W3", 256, 1024, 1024),
    workload("W3p", 256, 1024, 1),
    workload("W4", 1, 32, 256),
    workload("P8k", 32, 8192, 1),
    workload("P32k", 8, 32_768, 1),
    workload("W5", 384, 1024, 8192),
    workload("W6", 512, 8192, 1024),
    workload("W7", 128, 32_768, 1024),
    Workload {
        shared: 8192,
        ..workload("S", 64, 8448, 256)
    },
    workload("S0", 64, 8448, 256),
    Workload {
        mixed: true,
        ..workload("M", 2048, 1000, 1278)
    },
];

/// Mixed lengths: sigma of the logarithm, and the most.
const MIXED_PROMPTS: (f64, usize) = (0.7, 4096);
const MIXED_ANSWERS: (f64, usize) = (0.8, 10_240);

/// Sequences that run at once by default: logits of more take gigabytes.
pub const AT_ONCE: usize = 1536;
/// The model's context length, as a released directory says; without it prompts are cut at 4,096 tokens.
pub const CONTEXT_LENGTH: usize = 131_072;

/// The tokens of a request.
#[derive(Clone, Copy)]
pub struct Lengths {
    pub prompt: usize,
    pub output: usize,
}

impl Workload {
    /// It with these numbers of requests, or as it is if there are none.
    pub fn with(&self, requests: &[usize]) -> Vec<Self> {
        let own = [self.requests];
        let requests = if requests.is_empty() { &own } else { requests };
        requests.iter().map(|&requests| Self { requests, ..*self }).collect()
    }

    /// The length of sequences that a KV cache is divided for. Mixed ones are hardly ever longer than the model's own.
    pub fn seq_len(&self, config: &ModelConfig) -> usize {
        match self.mixed {
            true => config.seq_len,
            false => config.seq_len.max(self.prompt + self.output),
        }
    }

    /// A model whose KV cache is divided for its sequences.
    pub fn config(&self, model: &ModelConfig) -> ModelConfig {
        ModelConfig {
            seq_len: self.seq_len(model),
            context_length: Some(CONTEXT_LENGTH),
            ..model.clone()
        }
    }

    /// The most rows that decode in a step where so many devices share the requests, each with at most `at_once`.
    pub fn max_batch(&self, at_once: usize, devices: usize) -> usize {
        self.requests.min(at_once * devices).div_ceil(devices)
    }

    /// The tokens of each request.
    pub fn lengths(&self, shorten: usize) -> anyhow::Result<Vec<Lengths>> {
        if !self.mixed {
            let all = Lengths {
                prompt: self.prompt,
                output: (self.output / shorten).max(1),
            };
            return Ok(vec![all; self.requests]);
        }
        let rng = &mut ChaCha8Rng::seed_from_u64(1);
        let prompts = lognormal(self.prompt, MIXED_PROMPTS.0)?;
        let answers = lognormal(self.output, MIXED_ANSWERS.0)?;
        let mut one = || Lengths {
            prompt: (prompts.sample(rng) as usize).clamp(8, MIXED_PROMPTS.1),
            output: ((answers.sample(rng) as usize).min(MIXED_ANSWERS.1) / shorten).max(1),
        };
        Ok((0..self.requests).map(|_| one()).collect())
    }

    /// The most positions of a request; the last token sampled is no input.
    pub fn steps(&self, shorten: usize) -> usize {
        let (prompt, output) = if self.mixed {
            (MIXED_PROMPTS.1, MIXED_ANSWERS.1)
        } else {
            (self.prompt, self.output)
        };
        prompt + (output / shorten).max(1) - 1
    }
}

/// Lengths with this mean.
fn lognormal(mean: usize, sigma: f64) -> anyhow::Result<LogNormal<f64>> {
    Ok(LogNormal::new((mean as f64).ln() - sigma * sigma / 2.0, sigma)?)
}
