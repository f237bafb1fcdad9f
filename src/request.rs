//! A request: what is asked of the model for one prompt.
//!
//! It is a value that goes from whoever asks through the queue to the scheduler of a replica, and back if that replica
//! fails. What comes of it is an [`Answer`].

use crate::error::{Error, Result};
use crate::grammar::Grammar;
use std::sync::Arc;

/// How tokens are sampled.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampling {
    /// 0 is greedy: the token of the largest logit, whatever `topp` is.
    pub temperature: f32,
    /// Nucleus sampling keeps the most probable tokens whose probabilities sum to more than this; outside of (0, 1) all
    /// tokens can be sampled.
    pub topp: f32,
    /// The state of the random number generator before the answer's first token.
    pub rng_state: u64,
}

impl Sampling {
    /// The token of the largest logit.
    pub const GREEDY: Self = Self {
        temperature: 0.0,
        topp: 0.0,
        rng_state: 0,
    };

    /// What needs the most memory to sample: a nucleus that may hold all tokens.
    pub const WIDEST: Self = Self {
        temperature: 1.0,
        topp: 1.0 - f32::EPSILON / 2.0,
        rng_state: 1,
    };

    /// What the evaluation program's `main` would have put into its sampler for these numbers, and a line on each that
    /// is another one, or that hardly anybody wants. Fails for NaN, for which the program has no answer.
    pub fn as_main_would(temperature: f32, topp: f32, rng_state: u64) -> Result<(Self, Vec<String>)> {
        let refuse = |field: &str, instead| Err(Error::format("Sampler", format!("{field} is NaN; use {instead}")));
        let mut lines = Vec::new();
        let mut sampling = Self {
            temperature,
            topp,
            rng_state,
        };
        if temperature.is_nan() {
            return refuse("temperature", "0, which is greedy, or a number above it");
        }
        if temperature < 0.0 {
            sampling.temperature = 0.0;
            lines.push(format!(
                "the sampler's temperature is {temperature}; 0, which is greedy, is used instead"
            ));
        }
        if sampling.is_greedy() {
            return Ok((sampling, lines));
        }
        if temperature.is_infinite() {
            lines.push("the sampler's temperature is infinite, so that all tokens are equally probable".into());
        }
        if topp.is_nan() {
            return refuse("topp", "a number, 1 to sample from all tokens");
        }
        if !(0.0..=1.0).contains(&topp) {
            sampling.topp = 0.9;
            lines.push(format!(
                "the sampler's topp is {topp}, which is not within 0 and 1; 0.9 is used instead"
            ));
        }
        if rng_state == 0 {
            let line = "the sampler's rng_state is 0, which its generator never leaves: request 0 draws \
                        the number 0 for every token; set another state";
            lines.push(line.into());
        }
        Ok((sampling, lines))
    }

    /// Whether each token is the argmax of its logits.
    pub fn is_greedy(&self) -> bool {
        self.temperature == 0.0
    }
}

/// Tokens that end answers. The answer has them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EndTokens {
    ends: Vec<u32>,
    /// Ascending: a request may have thousands.
    stops: Vec<u32>,
}

impl EndTokens {
    /// Those of the released models, as the evaluation program knows them.
    pub const RELEASED: [u32; 2] = [199_999, 200_002];

    /// The model's end tokens.
    pub fn new(ends: &[u32]) -> Self {
        Self::with_stops(ends, Vec::new())
    }

    /// The model's end tokens, and tokens at which a request is to stop.
    pub fn with_stops(ends: &[u32], mut stops: Vec<u32>) -> Self {
        stops.sort_unstable();
        let ends = ends.to_vec();
        Self { ends, stops }
    }

    /// How an answer ends with this token; `None` if it goes on.
    pub fn end(&self, token: u32) -> Option<End> {
        if self.ends.contains(&token) {
            return Some(End::EndToken(token));
        }
        self.stops
            .binary_search(&token)
            .is_ok()
            .then_some(End::StopToken(token))
    }
}

/// How an answer ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// With one of the model's end tokens.
    EndToken(u32),
    /// With a token at which the request was to stop.
    StopToken(u32),
    /// It has as many tokens as it may have.
    Length,
}

/// How a request's answer is handed over.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Outlet {
    /// As a whole, when it is complete: an [`Answer`].
    #[default]
    Whole,
    /// Token by token: as a [`Sampled`] each.
    Tokens,
}

/// Of which tokens the log-probabilities are wanted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LogProbs {
    /// Of each token of the answer.
    pub answer: bool,
    /// Of each token of the prompt but the first, whose probability is not defined.
    pub prompt: bool,
    /// So many of the most probable tokens at each place, at most [`MOST_TOP`](crate::batch::MOST_TOP).
    pub top: usize,
}

/// The log-probability of a token: the natural logarithm of its share in the softmax of the logits, whatever the
/// temperature is.
#[derive(Clone, Debug, PartialEq)]
pub struct Score {
    /// The token.
    pub token: u32,
    /// Its log-probability.
    pub logprob: f32,
    /// The most probable tokens and theirs, the most probable one first, and of equal ones that of the smallest id.
    pub top: Vec<(u32, f32)>,
}

/// What is asked of the model for one prompt.
#[derive(Clone, Debug, PartialEq)]
pub struct Request {
    /// What its answer is known by.
    pub number: usize,
    /// The prompt's tokens.
    pub prompt: Vec<u32>,
    /// The most positions that are fed to the model: the prompt's, then the answer's. The token sampled at the last one
    /// is part of the answer.
    pub max_positions: usize,
    /// How its tokens are sampled.
    pub sampling: Sampling,
    /// Tokens that end its answer.
    pub ends: Arc<EndTokens>,
    /// Before the answer has so many tokens, none ends it.
    pub min_tokens: usize,
    /// How its answer is handed over.
    pub outlet: Outlet,
    /// Which log-probabilities are handed over, if its tokens are.
    pub logprobs: LogProbs,
    /// What its answer must be like.
    pub grammar: Option<Arc<dyn Grammar>>,
    /// How many tokens at the prompt's end are the answer's: a replica that failed has handed them over.
    pub answered: usize,
    /// Of its first rows, how many such a replica had computed, or had shared with others.
    pub lost: usize,
}

impl Request {
    /// A greedy request that ends as the released models' answers do.
    pub fn greedy(number: usize, prompt: Vec<u32>, max_positions: usize) -> Self {
        Self {
            number,
            prompt,
            max_positions,
            sampling: Sampling::GREEDY,
            ends: Arc::new(EndTokens::new(&EndTokens::RELEASED)),
            min_tokens: 0,
            outlet: Outlet::Whole,
            logprobs: LogProbs::default(),
            grammar: None,
            answered: 0,
            lost: 0,
        }
    }
}

/// What came of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answer {
    /// The request's number.
    pub number: usize,
    /// The tokens sampled, with the end token if there was one.
    pub tokens: Vec<u32>,
    /// The state of the request's random number generator behind them.
    pub rng_state: u64,
}

/// A token of a request whose answer is handed over token by token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sampled {
    /// The request's number.
    pub number: usize,
    /// The token.
    pub token: u32,
    /// How the answer ends with it; `None` if it goes on.
    pub end: Option<End>,
}
