//! Requests that arrive while others run on a device: each gets the tokens and log-probabilities that it gets alone, to
//! the bit.

use super::answers::options;
use super::grammar::ByChance;
use super::synthetic::{SyntheticCheckpoint, Temperament};
use getp::backend::gpu;
use getp::config::ModelConfig;
use getp::engine::{Ask, Ending, Engine, Event, Service};
use getp::error::Error;
use getp::options::{Options, Precision};
use getp::request::{End, EndTokens, LogProbs, Sampling, Score};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use std::sync::Arc;
use std::time::{Duration, Instant};

const VOCAB: usize = 301;
const POSITIONS: usize = 64;

/// The grammar of the request with this tag, if it has one.
fn by_chance(tag: u64) -> ByChance {
    ByChance {
        vocab: VOCAB as u32,
        seed: tag,
    }
}

fn random_ask(rng: &mut ChaCha8Rng, tag: u64) -> Ask {
    let any = |rng: &mut ChaCha8Rng| rng.random_range(0..VOCAB as u32);
    let prompt: Vec<u32> = (0..rng.random_range(1..40)).map(|_| any(rng)).collect();
    let stops: Vec<u32> = (0..[0, 0, 12][rng.random_range(0..3)]).map(|_| any(rng)).collect();
    Ask {
        max_positions: Some((prompt.len() + rng.random_range(0..12)).min(POSITIONS)),
        prompt,
        min_tokens: [0, 0, 4][rng.random_range(0..3)],
        sampling: Sampling {
            temperature: [0.0, 0.0, 0.2, 1.0, 40.0][rng.random_range(0..5)],
            topp: [1.0, 0.9, 0.3][rng.random_range(0..3)],
            rng_state: rng.random_range(1..u64::MAX),
        },
        ends: Arc::new(EndTokens::with_stops(&[], stops)),
        logprobs: match rng.random_range(0..3) {
            0 => LogProbs {
                answer: rng.random_bool(0.8),
                prompt: rng.random_bool(0.5),
                top: [0, 1, 20][rng.random_range(0..3)],
            },
            _ => LogProbs::default(),
        },
        grammar: match rng.random_range(0..3) {
            0 => Some(Arc::new(by_chance(tag))),
            _ => None,
        },
        tag,
        tokens_per_event: [0, 1, 5][rng.random_range(0..3)],
    }
}

/// What a request has got.
#[derive(Default, Debug, PartialEq)]
struct Got {
    tokens: Vec<u32>,
    prompt_scores: Vec<Score>,
    scores: Vec<Score>,
    /// `None` if it was cancelled.
    end: Option<End>,
}

impl Got {
    /// Takes an event; true if it is the last.
    fn hear(&mut self, event: Event) -> bool {
        self.tokens.extend(event.tokens);
        self.prompt_scores.extend(event.prompt_scores);
        self.scores.extend(event.scores);
        let is_last = event.end.is_some();
        match event.end {
            None | Some(Ending::Cancelled) => {}
            Some(Ending::Answered(end)) => self.end = Some(end),
            Some(other) => panic!("request {}: {other:?}", event.number),
        }
        is_last
    }
}

fn next(service: &Service) -> Event {
    let deadline = Instant::now() + Duration::from_secs(300);
    service.next(Some(deadline)).expect("an event")
}

fn alone(service: &Service, ask: &Ask) -> Got {
    let mut got = Got::default();
    service.submit(ask.clone()).unwrap();
    while !got.hear(next(service)) {}
    got
}

/// All of them, submitted a few at a time while others run; some are cancelled at some time.
fn together(service: &Service, asks: &[Ask], rng: &mut ChaCha8Rng) -> Vec<Got> {
    let mut got: Vec<Got> = asks.iter().map(|_| Got::default()).collect();
    let mut numbers: Vec<usize> = Vec::new();
    let mut ended = 0;
    while ended < asks.len() {
        for _ in 0..rng.random_range(0..5) {
            if let Some(ask) = asks.get(numbers.len()) {
                numbers.push(service.submit(ask.clone()).unwrap());
            }
        }
        if !numbers.is_empty() && rng.random_bool(0.15) {
            service.cancel(numbers[rng.random_range(0..numbers.len())]).unwrap();
        }
        if ended < numbers.len() {
            let event = next(service);
            ended += usize::from(got[event.number - numbers[0]].hear(event));
        }
    }
    got
}

#[test]
fn whatever_arrives_beside_them_requests_get_what_they_get_alone() {
    let config = ModelConfig {
        vocab_size: VOCAB,
        seq_len: POSITIONS,
        n_layers: 2,
        ..ModelConfig::preset_7m()
    };
    let checkpoint = SyntheticCheckpoint::new(&config, 6, Temperament::Tame).unwrap();
    let options = Options {
        threads: 2,
        kv_mb: 16,
        ..options(Precision::Fast, 6, 24)
    };
    let replicas = gpu::open::open(super::drivers(), &checkpoint, &options).unwrap();
    let mut engine = Engine::new(replicas, &config, options).unwrap();
    let service = engine.service().unwrap();
    let no_other = |_: &Options| Err(Error::State("no device is left".into()));
    let (mut whole, mut cancelled, mut scored) = (0, 0, 0);
    std::thread::scope(|scope| {
        let serving = scope.spawn(|| engine.serve_all(&service, &no_other));
        let tried = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            // Thousands of requests take a device a minute.
            let seeds = if std::env::var_os("GETP_TEST_DEVICE").is_some() {
                100
            } else {
                2
            };
            for seed in 0..seeds {
                let rng = &mut ChaCha8Rng::seed_from_u64(seed);
                let asks: Vec<Ask> = (0..24).map(|tag| random_ask(rng, tag)).collect();
                let expected: Vec<Got> = asks.iter().map(|ask| alone(&service, ask)).collect();
                for (ask, got) in asks.iter().zip(&expected).filter(|(ask, _)| ask.grammar.is_some()) {
                    assert!(by_chance(ask.tag).has(&got.tokens), "seed {seed}, request {}", ask.tag);
                }
                for (i, (got, expected)) in together(&service, &asks, rng).iter().zip(&expected).enumerate() {
                    scored += got.scores.len() + got.prompt_scores.len();
                    if got.end.is_some() {
                        whole += 1;
                        assert_eq!(got, expected, "seed {seed}, request {i}");
                    } else {
                        cancelled += 1;
                        assert!(expected.tokens.starts_with(&got.tokens), "seed {seed}, request {i}");
                        assert!(expected.scores.starts_with(&got.scores));
                        assert!(expected.prompt_scores.starts_with(&got.prompt_scores));
                    }
                }
            }
        }));
        service.close();
        serving.join().unwrap().unwrap();
        tried.unwrap();
    });
    assert!(
        whole > 20 && cancelled > 0 && scored > 100,
        "{whole} {cancelled} {scored}"
    );
}
