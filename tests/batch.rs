//! Requests that arrive while others run: each gets the tokens that it would get alone, whatever runs beside it, in
//! whatever order they arrive, whoever is cancelled and whichever device fails.

mod fake;
#[path = "common/grammar.rs"]
mod grammar;

use fake::{Control, Program, VOCAB, greedy, logits};
use getp::batch::Draw;
use getp::checkpoint::config_from_bytes;
use getp::engine::{Ask, Ending, Engine, Event, Service};
use getp::options::Options;
use getp::random::{random_f32, request_seed};
use getp::request::{End, EndTokens, LogProbs, Sampling, Score};
use getp::sampler;
use grammar::ByChance;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use std::collections::BTreeMap;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::{Arc, Barrier, Mutex};
use std::time::{Duration, Instant};

/// Far longer than anything here takes.
const FOR_EVER: Duration = Duration::from_secs(120);

/// Calls `work` while an engine of these replicas serves a service; gives what the engine said.
fn with_service<T>(control: &Arc<Control>, work: impl FnOnce(&Service) -> T) -> (T, getp::error::Result<()>) {
    fake::quiet();
    fake::silent();
    let options = Options {
        threads: 1,
        ..Options::default()
    };
    let config = config_from_bytes(&Program::new(&["x"], 1).transformer.config.to_bytes()).unwrap();
    let mut engine = Engine::new(control.open(&options).unwrap(), &config, options).unwrap();
    let service = engine.service().unwrap();
    let reopen = |options: &Options| control.fallback(options);
    std::thread::scope(|scope| {
        let serving = scope.spawn(|| {
            let serve = || engine.serve_all(&service, &reopen);
            let served = std::panic::catch_unwind(std::panic::AssertUnwindSafe(serve));
            if !matches!(served, Ok(Ok(()))) {
                service.fail(getp::error::Error::State(format!("{served:?}")));
            }
            served.unwrap()
        });
        // The service is closed also where the test fails, or it would wait for ever.
        let closed = Closed(&service);
        let done = work(&service);
        drop(closed);
        (done, serving.join().unwrap())
    })
}

struct Closed<'a>(&'a Service);

impl Drop for Closed<'_> {
    fn drop(&mut self) {
        self.0.close();
    }
}

fn ask(prompt: &[u32], max_tokens: usize) -> Ask {
    Ask {
        prompt: prompt.to_vec(),
        max_positions: Some(prompt.len() + max_tokens - 1),
        min_tokens: 0,
        sampling: Sampling::GREEDY,
        ends: Arc::new(EndTokens::new(&EndTokens::RELEASED)),
        logprobs: LogProbs::default(),
        grammar: None,
        tag: 0,
        tokens_per_event: 1,
    }
}

fn random_ask(rng: &mut ChaCha8Rng, tag: u64) -> Ask {
    let prompt: Vec<u32> = (0..[1, 3, 30][rng.random_range(0..3)])
        .map(|_| rng.random_range(0..VOCAB as u32))
        .collect();
    let stops: Vec<u32> = (0..[0, 0, 20][rng.random_range(0..3)])
        .map(|_| rng.random_range(0..VOCAB as u32))
        .collect();
    Ask {
        min_tokens: [0, 0, 4, 100][rng.random_range(0..4)],
        sampling: Sampling {
            temperature: [0.0, 0.0, 0.5, 1.0][rng.random_range(0..4)],
            topp: [1.0, 0.9, 0.0][rng.random_range(0..3)],
            rng_state: rng.random_range(1..u64::MAX),
        },
        ends: Arc::new(EndTokens::with_stops(&EndTokens::RELEASED, stops)),
        logprobs: match rng.random_range(0..4) {
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
        tokens_per_event: [0, 1, 1, 5][rng.random_range(0..4)],
        ..ask(&prompt, [1, 2, 10, 60][rng.random_range(0..4)])
    }
}

/// The grammar of the request with this tag, if it has one.
fn by_chance(tag: u64) -> ByChance {
    ByChance {
        vocab: VOCAB as u32,
        seed: tag,
    }
}

/// What the request gets alone, by the evaluation program's loop, which samples a token again that its grammar forbids.
fn alone(ask: &Ask, end_every: u32) -> (Vec<u32>, End) {
    let mut state = ask.sampling.rng_state;
    let mut sampler = sampler::Sampler::new(VOCAB);
    let Sampling { temperature, topp, .. } = ask.sampling;
    sampler.make_room(temperature, topp).unwrap();
    let mut answer = Vec::new();
    let mut token = ask.prompt[0];
    for position in 0..ask.max_positions.unwrap() {
        let logits = logits(token, position as u32);
        if let Some(&next) = ask.prompt.get(position + 1) {
            token = next;
            continue;
        }
        let before = state;
        token = if ask.sampling.is_greedy() {
            greedy(&logits, end_every)
        } else {
            let coin = random_f32(&mut state);
            let draw = Draw {
                temperature,
                topp,
                coin,
            };
            sampler.sample(&logits, draw)
        };
        let place = |token: &u32| by_chance(ask.tag).has(&[&answer[..], &[*token]].concat());
        if ask.grammar.is_some() && !place(&token) {
            let allowed: Vec<u32> = (0..VOCAB as u32).filter(place).collect();
            let of_these: Vec<f32> = allowed.iter().map(|&token| logits[token as usize]).collect();
            let coin = random_f32(&mut request_seed(before, 1));
            let draw = Draw {
                temperature,
                topp,
                coin,
            };
            token = allowed[sampler.sample(&of_these, draw) as usize];
        }
        answer.push(token);
        if let Some(end) = ask.ends.end(token).filter(|_| answer.len() >= ask.min_tokens) {
            return (answer, end);
        }
    }
    (answer, End::Length)
}

/// The log-probability of the token behind each of these, in float64, and of the most probable ones.
fn scores(tokens: &[u32], top: usize) -> Vec<Score> {
    let score = |(position, pair): (usize, &[u32])| {
        let logits = logits(pair[0], position as u32);
        let sum: f64 = logits.iter().map(|&logit| f64::from(logit).exp()).sum();
        let logprob = |id: usize| (f64::from(logits[id]) - sum.ln()) as f32;
        let mut ids: Vec<usize> = (0..VOCAB).collect();
        ids.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]));
        Score {
            token: pair[1],
            // An end token of the released models is none of the fake's vocabulary.
            logprob: if (pair[1] as usize) < VOCAB {
                logprob(pair[1] as usize)
            } else {
                f32::NAN
            },
            top: ids[..top].iter().map(|&id| (id as u32, logprob(id))).collect(),
        }
    };
    tokens.windows(2).enumerate().map(score).collect()
}

fn assert_scores(found: &[Score], expected: &[Score]) {
    let near = |a: f32, b: f32| (a - b).abs() < 1e-5;
    assert_eq!(found.len(), expected.len());
    let near = |a: f32, b: f32| near(a, b) || a.is_nan() && b.is_nan();
    for (found, expected) in found.iter().zip(expected) {
        assert_eq!(found.token, expected.token);
        assert!(near(found.logprob, expected.logprob), "{found:?} {expected:?}");
        assert_eq!(found.top.len(), expected.top.len());
        for (found, expected) in found.top.iter().zip(&expected.top) {
            assert!(found.0 == expected.0 && near(found.1, expected.1));
        }
    }
}

/// The events of requests, put together.
#[derive(Default)]
struct Heard {
    answers: BTreeMap<usize, (Vec<u32>, Option<Ending>)>,
    /// Scores of prompts, and of answers.
    scores: BTreeMap<usize, [Vec<Score>; 2]>,
}

impl Heard {
    fn hear(&mut self, event: Event) {
        let [prompt_scores, answer_scores] = self.scores.entry(event.number).or_default();
        prompt_scores.extend(event.prompt_scores);
        answer_scores.extend(event.scores);
        let (tokens, end) = self.answers.entry(event.number).or_default();
        assert!(end.is_none(), "an event after the last one");
        let is_last = event.end.is_some();
        assert!(
            is_last || event.tokens.len() >= event.ticket.tokens_per_event.max(1),
            "too few tokens"
        );
        assert!(
            is_last || event.ticket.tokens_per_event > 0,
            "the whole answer was wanted"
        );
        tokens.extend(event.tokens);
        assert_eq!(tokens.len(), event.n_tokens);
        let times = event.times;
        assert_eq!(times.first_token.is_some(), event.n_tokens > 0);
        let in_order = [
            Some(times.submitted),
            times.started,
            times.first_token,
            times.last_token,
        ];
        assert!(in_order.iter().flatten().is_sorted());
        *end = event.end;
    }
}

fn next(service: &Service) -> Event {
    service.next(Some(Instant::now() + FOR_EVER)).expect("an event")
}

/// Runs with many seeds, each on its own replicas; names the seed that failed.
/// Several seeds at once, since most of a run is waiting: each event passes from one thread to another.
fn for_seeds(seeds: u64, test: impl Fn(&mut ChaCha8Rng) + Sync + std::panic::RefUnwindSafe) {
    const AT_ONCE: usize = 8;
    let next = AtomicU64::new(0);
    let some = || {
        loop {
            let seed = next.fetch_add(1, SeqCst);
            if seed >= seeds {
                return;
            }
            // Standard output, since stderr is silent.
            if let Err(panic) = std::panic::catch_unwind(|| test(&mut ChaCha8Rng::seed_from_u64(seed))) {
                println!("seed {seed}");
                std::panic::resume_unwind(panic);
            }
        }
    };
    std::thread::scope(|scope| (0..AT_ONCE).for_each(|_| drop(scope.spawn(some))));
}

fn random_control(rng: &mut ChaCha8Rng) -> Control {
    let replicas = rng.random_range(1..4);
    let draws = rng.random_bool(0.5) && sampler::device_may_draw(1.0);
    let fails = |rng: &mut ChaCha8Rng| rng.random_bool(0.3).then(|| rng.random_range(1..60));
    Control {
        replicas,
        depth: rng.random_range(1..4),
        draws,
        scores: draws && rng.random_bool(0.7),
        host_every: if draws { [0, 2, 9][rng.random_range(0..3)] } else { 0 },
        end_every: if draws { 0 } else { [0, 7, 30][rng.random_range(0..3)] },
        fail_calls: (0..replicas)
            .filter_map(|replica| Some((replica, fails(rng)?)))
            .collect(),
        ..Control::default()
    }
}

#[test]
fn whatever_arrives_beside_them_requests_get_their_own_tokens() {
    for_seeds(300, |rng| {
        let control = Arc::new(random_control(rng));
        let asks: Vec<Ask> = (0..rng.random_range(1..60)).map(|tag| random_ask(rng, tag)).collect();
        let cancels = [0.0, 0.1, 0.5][rng.random_range(0..3)];
        let (heard, served) = with_service(&control, |service| {
            let (mut heard, mut numbers) = (Heard::default(), Vec::new());
            let mut cancelled = Vec::new();
            let mut ended = 0;
            while ended < asks.len() {
                for _ in 0..rng.random_range(0..6) {
                    if let Some(ask) = asks.get(numbers.len()) {
                        numbers.push(service.submit(ask.clone()).unwrap());
                    }
                }
                if !numbers.is_empty() && rng.random_bool(cancels) {
                    let number = rng.random_range(0..numbers.len());
                    service.cancel(number).unwrap();
                    cancelled.push(number);
                }
                if ended == numbers.len() {
                    continue;
                }
                let event = next(service);
                assert_eq!(event.ticket.tag as usize, event.number);
                ended += usize::from(event.end.is_some());
                heard.hear(event);
            }
            assert_eq!(numbers, (0..asks.len()).collect::<Vec<_>>());
            assert_eq!(service.untaken(), 0);
            assert!(service.next(Some(Instant::now())).is_none());
            (heard, cancelled)
        });
        served.unwrap();
        let (heard, cancelled) = heard;
        for (number, (tokens, end)) in heard.answers {
            let ask = &asks[number];
            let (expected, expected_end) = alone(ask, control.end_every);
            let LogProbs { answer, prompt, top } = ask.logprobs;
            let scores = scores(&[ask.prompt.clone(), tokens.clone()].concat(), top);
            let (of_prompt, of_answer) = scores.split_at(ask.prompt.len() - 1);
            let [found_prompt, found_answer] = &heard.scores[&number];
            assert_scores(found_answer, if answer { of_answer } else { &[] });
            let of_prompt = if prompt { of_prompt } else { &[] };
            // A cancelled one may not have come that far.
            let is_whole = matches!(end, Some(Ending::Answered(_)));
            let most = if is_whole { of_prompt.len() } else { found_prompt.len() };
            assert_scores(found_prompt, &of_prompt[..most]);
            match end.unwrap() {
                Ending::Answered(end) => assert_eq!((tokens, end), (expected, expected_end), "request {number}"),
                Ending::Cancelled => {
                    assert!(cancelled.contains(&number));
                    assert_eq!(tokens, expected[..tokens.len()], "request {number}");
                }
                other => panic!("request {number}: {other:?}"),
            }
        }
        assert_eq!(control.opened.load(SeqCst), control.dropped.load(SeqCst));
    });
}

#[test]
fn many_threads_submit_cancel_and_listen() {
    let control = Arc::new(Control {
        replicas: 3,
        depth: 2,
        ..Control::default()
    });
    let heard = Mutex::new(Heard::default());
    const EACH: usize = 60;
    const THREADS: usize = 4;
    let asks: Vec<Vec<Ask>> = (0..THREADS as u64)
        .map(|thread| {
            let rng = &mut ChaCha8Rng::seed_from_u64(thread);
            (0..EACH as u64)
                .map(|i| random_ask(rng, thread * EACH as u64 + i))
                .collect()
        })
        .collect();
    let tags = Mutex::new(BTreeMap::new());
    let (_, served) = with_service(&control, |service| {
        std::thread::scope(|scope| {
            for asks in &asks {
                scope.spawn(|| {
                    for (i, ask) in asks.iter().enumerate() {
                        let number = service.submit(ask.clone()).unwrap();
                        tags.lock().unwrap().insert(number, ask.tag as usize);
                        if i % 5 == 0 {
                            service.cancel(number).unwrap();
                        }
                    }
                });
            }
            for _ in 0..2 {
                scope.spawn(|| {
                    loop {
                        // The events of one request may come to both, so they are put together in order.
                        let mut heard = heard.lock().unwrap();
                        let is_over = |heard: &Heard| {
                            let answers = &heard.answers;
                            answers.len() == EACH * THREADS && answers.values().all(|(_, end)| end.is_some())
                        };
                        if is_over(&heard) {
                            break;
                        }
                        if let Some(event) = service.next(Some(Instant::now() + Duration::from_millis(1))) {
                            heard.hear(event);
                        }
                    }
                });
            }
        });
    });
    served.unwrap();
    let tags = tags.into_inner().unwrap();
    for (number, (tokens, end)) in heard.into_inner().unwrap().answers {
        let tag = tags[&number];
        let (expected, expected_end) = alone(&asks[tag / EACH][tag % EACH], 0);
        match end.unwrap() {
            Ending::Answered(end) => assert_eq!((tokens, end), (expected, expected_end)),
            Ending::Cancelled if (tag % EACH).is_multiple_of(5) => assert_eq!(tokens, expected[..tokens.len()]),
            other => panic!("{other:?}"),
        }
    }
}

/// A replica that is held in its first step has two requests of eight running; both are cancelled meanwhile, one beside
/// them that waits, too.
#[test]
fn a_cancelled_request_ends_at_once_and_leaves_its_device() {
    let control = Arc::new(Control {
        hold: Some(Barrier::new(2)),
        ..Control::default()
    });
    let (steps, served) = with_service(&control, |service| {
        let endless = ask(&[1, 2, 3], 900);
        let first = service.submit(endless.clone()).unwrap();
        control.hold.as_ref().unwrap().wait();
        let second = service.submit(endless.clone()).unwrap();
        service.cancel(first).unwrap();
        service.cancel(second).unwrap();
        for number in [first, second] {
            let event = next(service);
            assert!(event.number == number && matches!(event.end, Some(Ending::Cancelled)));
        }
        assert!(service.cancel(first).is_ok() && service.cancel(99).is_err());
        // What comes behind them has all the room.
        let last = service.submit(ask(&[9], 3)).unwrap();
        control.hold.as_ref().unwrap().wait();
        let mut tokens = Vec::new();
        while tokens.len() < 3 {
            let event = next(service);
            assert_eq!(event.number, last);
            tokens.extend(event.tokens);
        }
        assert_eq!(tokens, alone(&ask(&[9], 3), 0).0);
        control.steps.load(SeqCst)
    });
    served.unwrap();
    assert!(steps <= 5, "the cancelled ones ran on: {steps} steps");
}

#[test]
fn all_are_cancelled_together() {
    let control = Arc::<Control>::default();
    let (_, served) = with_service(&control, |service| {
        (0..100).for_each(|_| _ = service.submit(ask(&[1], 900)).unwrap());
        service.cancel_all().unwrap();
        for _ in 0..100 {
            let mut event = next(service);
            while event.end.is_none() {
                event = next(service);
            }
            assert!(matches!(event.end, Some(Ending::Cancelled)));
        }
        assert_eq!(service.untaken(), 0);
        // The blocks are back: one that needs all of them runs.
        service.submit(ask(&[1], 64 * 16)).unwrap();
        let mut tokens = 0;
        while tokens < 64 * 16 {
            tokens += next(service).tokens.len();
        }
    });
    served.unwrap();
}

#[test]
fn what_no_device_takes_is_refused_and_what_only_a_lost_one_took_fails() {
    let control = Arc::new(Control {
        replicas: 2,
        blocks: [(0, 4), (1, 64)].into(),
        fail_calls: vec![(1, 30)],
        ..Control::default()
    });
    let (_, served) = with_service(&control, |service| {
        let too_long = service.submit(ask(&[1], 64 * 16 + 1)).unwrap();
        let event = next(service);
        assert_eq!(event.number, too_long);
        let Some(Ending::Refused(why)) = event.end else {
            panic!()
        };
        assert!(why.to_string().contains("GETP_KV_MB"), "{why}");
        let no_prompt = service.submit(Ask {
            prompt: Vec::new(),
            ..ask(&[1], 1)
        });
        let event = next(service);
        assert_eq!(event.number, no_prompt.unwrap());
        assert!(matches!(event.end, Some(Ending::Refused(_))));
        // The second device fails on its way through this one, and nobody else has room for it.
        let long = service.submit(ask(&[1], 500)).unwrap();
        let mut tokens = 0;
        let end = loop {
            let event = next(service);
            assert_eq!(event.number, long);
            tokens += event.tokens.len();
            if let Some(end) = event.end {
                break end;
            }
        };
        assert!(tokens > 5 && tokens < 30, "{tokens}");
        let Ending::Failed(why) = end else { panic!("{end:?}") };
        assert!(why.to_string().contains("blocks of the KV cache"), "{why}");
        // The others go on.
        service.submit(ask(&[7], 5)).unwrap();
        while next(service).end.is_none() {}
    });
    served.unwrap();
    assert_eq!(control.fallbacks.load(SeqCst), 0);
}

#[test]
fn without_any_device_all_requests_fail_those_too_that_still_come() {
    let control = Arc::new(Control {
        replicas: 2,
        fail_calls: vec![(0, 8), (1, 3)],
        refuse_fallback: 1.into(),
        ..Control::default()
    });
    let (_, served) = with_service(&control, |service| {
        (0..20).for_each(|_| _ = service.submit(ask(&[1, 2], 50)).unwrap());
        let mut failed = 0;
        while failed < 20 {
            match next(service).end {
                Some(Ending::Failed(_)) => failed += 1,
                None => {}
                Some(other) => panic!("{other:?}"),
            }
        }
        service.submit(ask(&[1], 1)).unwrap();
        let end = next(service).end;
        assert!(
            matches!(&end, Some(Ending::Failed(why)) if why.to_string().contains("no fallback")),
            "{end:?}"
        );
    });
    assert!(served.is_err());
}

#[test]
fn an_idle_service_makes_no_steps_and_closing_one_waits_for_no_request() {
    let control = Arc::new(Control {
        replicas: 2,
        ..Control::default()
    });
    let (_, served) = with_service(&control, |service| {
        service.submit(ask(&[1], 2)).unwrap();
        while next(service).end.is_none() {}
        let steps = control.steps.load(SeqCst);
        std::thread::sleep(Duration::from_millis(50));
        assert_eq!(control.steps.load(SeqCst), steps);
        (0..1000).for_each(|_| _ = service.submit(ask(&[1], 1000)).unwrap());
        service.close();
        assert!(service.next(None).is_none(), "who waits is not left waiting");
    });
    served.unwrap();
    assert!(control.steps.load(SeqCst) < 100_000);
}

/// No request waits for ever behind others that keep arriving, a long one among them.
#[test]
fn nobody_starves_while_others_arrive() {
    for depth in [1, 3] {
        let control = Arc::new(Control {
            depth,
            blocks: [(0, 8)].into(),
            ..Control::default()
        });
        let (_, served) = with_service(&control, |service| {
            // It needs all blocks but one.
            let short = || service.submit(ask(&[1, 2], 20)).unwrap();
            (0..20).for_each(|_| _ = short());
            let long = service.submit(ask(&[5], 100)).unwrap();
            let mut arrived = 0;
            loop {
                let event = next(service);
                if event.end.is_none() {
                    continue;
                }
                if event.number == long {
                    break;
                }
                let short = || service.submit(ask(&[1, 2], 20)).unwrap();
                short();
                arrived += 1;
                assert!(arrived < 500, "the long one starves");
            }
        });
        served.unwrap();
    }
}
