//! Runs whole batches through the engine, and prints the rates.

use crate::watched::{self, SharedNotes, Watched};
use crate::workload::{AT_ONCE, WORKLOADS, Workload};
use getp::backend::gpu::replica::GpuReplica;
use getp::config::ModelConfig;
use getp::engine::{Ask, Ending, Engine, Service, Stats};
use getp::options::Options;
use getp::profile::{Spread, StepTimes};
use getp::random::request_seed;
use getp::replica::Replica;
use getp::request::{EndTokens, LogProbs, Sampling};
use getp::requests::Requests;
use getp::tokenizer::Tokenizer;
use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;
use std::time::{Duration, Instant};

#[derive(clap::Args)]
pub struct Args {
    /// Workloads; by default W1, W2, W3, W3p and W4. The others: W2x, P8k, P32k, W5, W6, W7, S (a shared beginning), S0
    /// (S with nothing shared) and M (lengths of all kinds; made for `--temperature 1 --topp 1`).
    names: Vec<String>,
    /// Runs of each workload; the median is printed.
    #[arg(long, default_value_t = 1)]
    repeats: usize,
    /// 0 is greedy; otherwise tokens are sampled.
    #[arg(long, default_value_t = 0.0)]
    temperature: f32,
    /// Top-p; with 1 all tokens can be sampled.
    #[arg(long, default_value_t = 0.9)]
    topp: f32,
    /// Print how long device and host compute and wait for each other, too.
    #[arg(long)]
    overlap: bool,
    /// Numbers of requests, one run each, instead of the workload's.
    #[arg(long, value_delimiter = ',')]
    requests: Vec<usize>,
    /// The most requests that run at once; by default all, up to 1,536.
    #[arg(long)]
    at_once: Option<usize>,
    /// Divides the number of output tokens, for a shorter run.
    #[arg(long, default_value_t = 1)]
    shorten: usize,
    /// Submit the requests one by one to an open batch, and take each token as an event; the hash is the same.
    #[arg(long)]
    batch: bool,
    /// With `--batch`: one in so many requests is sampled at the temperature, the others are greedy.
    #[arg(long, default_value_t = 1)]
    drawn_one_in: usize,
    /// With `--batch`: log-probabilities of each answer's tokens, with so many of the most probable ones.
    #[arg(long)]
    logprobs: Option<usize>,
}

/// Workloads that are run if none is named.
const USUAL: [&str; 5] = ["W1", "W2", "W3", "W3p", "W4"];

pub fn run(args: &super::Args, part: &Args) -> anyhow::Result<()> {
    let is_wanted = |name| match part.names.as_slice() {
        [] => USUAL.contains(&name),
        names => names.iter().any(|wanted| wanted == name),
    };
    // An engine's KV cache is divided for sequences of one length. And end tokens end answers or are ignored in all of
    // its runs.
    let config = args.config();
    let mut engines: BTreeMap<_, Vec<_>> = BTreeMap::new();
    for w in WORKLOADS.iter().filter(|w| is_wanted(w.name)) {
        let wanted = engines.entry((w.mixed, w.seq_len(&config))).or_default();
        wanted.extend(w.with(&part.requests));
    }
    for ((_, seq_len), wanted) in engines {
        let config = ModelConfig {
            seq_len,
            ..config.clone()
        };
        run_in_one_engine(args, part, &config, &wanted)?;
    }
    Ok(())
}

fn run_in_one_engine(args: &super::Args, part: &Args, config: &ModelConfig, wanted: &[Workload]) -> anyhow::Result<()> {
    let options = args.options()?;
    // Devices share the requests: replicas among themselves, and those of a group among their steps.
    let devices = args.devices(&options)?.len();
    let at_once = part.at_once.map(|at_once| at_once.div_ceil(devices));
    let usual = wanted.iter().map(|w| w.max_batch(AT_ONCE, devices)).max();
    let options = Options {
        max_batch: at_once.or(usual),
        ignore_end: !wanted.iter().any(|w| w.mixed),
        ..options
    };
    let start = Instant::now();
    let mut replicas = args.replicas(config, &options)?;
    if part.overlap {
        let mut devices = replicas
            .iter_mut()
            .filter_map(|replica| GpuReplica::of_mut(&mut **replica));
        devices.try_for_each(GpuReplica::time_steps)?;
    }
    println!(
        "{} layers, made in {:.1} s",
        config.n_layers,
        start.elapsed().as_secs_f64()
    );
    for replica in &replicas {
        let blocks = replica.kv_blocks();
        println!("KV cache: {} blocks of {} positions", blocks.count, blocks.tokens);
    }
    let notes = SharedNotes::default();
    let watch = |replica| Box::new(Watched::new(replica, notes.clone())) as Box<dyn Replica>;
    let replicas = replicas.into_iter().map(watch).collect();
    let tokenizer = tokenizer(config.vocab_size)?;
    let mut engine = Engine::new(replicas, config, options)?;
    println!(
        "{:<5}{:>10}{:>8}{:>8}{:>11}{:>12}{:>10}{:>10}",
        "", "requests", "prompt", "output", "seconds", "tokens/s", "answers", "hash"
    );
    for w in wanted {
        let before = Overlap::of(&engine);
        let mut runs: Vec<_> = (0..part.repeats.max(1))
            .map(|repeat| w.run(&mut engine, &tokenizer, &notes, part, repeat))
            .collect::<Result<_, _>>()?;
        let hash = runs[0].hash;
        runs.sort_by(|a, b| a.seconds.total_cmp(&b.seconds));
        let run = &runs[runs.len() / 2];
        let counted = run.tokens + if w.output == 1 { run.prompt_tokens } else { 0 };
        println!(
            "{:<5}{:>10}{:>8}{:>8}{:>11.3}{:>12.1}{:>10}  {:08x}",
            w.name,
            w.requests,
            run.prompt_tokens / w.requests as u64,
            run.tokens / w.requests as u64,
            run.seconds,
            counted as f64 / run.seconds,
            run.different,
            hash,
        );
        if let Some(line) = run.without_tail.as_ref().filter(|_| w.output > 1) {
            println!("     {line}");
        }
        print_spread(&engine)?;
        if part.overlap {
            print_overlap(&before, &Overlap::of(&engine));
        }
    }
    Ok(())
}

/// Prints how evenly the random router selects experts: if it is uneven, the rates are not those of a trained model.
fn print_spread(engine: &Engine) -> anyhow::Result<()> {
    for replica in engine.replicas().filter_map(watched::gpu) {
        let mut spread = Spread::default();
        spread.add(&replica.expert_rows()?);
        println!(
            "     busiest expert of the last layer: {:.2} times the mean",
            spread.busiest()
        );
    }
    Ok(())
}

/// Times of devices and host since the engine was made.
struct Overlap {
    /// By device.
    devices: Vec<StepTimes>,
    host: Stats,
}

impl Overlap {
    fn of(engine: &Engine) -> Self {
        let replicas = engine.replicas().filter_map(watched::gpu);
        Self {
            devices: replicas.flat_map(GpuReplica::step_times).collect(),
            host: engine.stats(),
        }
    }
}

/// Prints milliseconds a step of each device. Copying and sampling are hidden if devices are hardly ever idle.
fn print_overlap(before: &Overlap, after: &Overlap) {
    for (i, (before, after)) in before.devices.iter().zip(&after.devices).enumerate() {
        let steps = (after.steps - before.steps).max(1) as f64;
        let time = |of: fn(&StepTimes) -> Duration| (of(after) - of(before)).as_secs_f64() * 1e3 / steps;
        let (computing, idle) = (time(|times| times.computing), time(|times| times.idle));
        println!(
            "     device {i}: {steps} steps; ms a step: computes {computing:.3}, idle {idle:.3} ({:.1} %); logits copied {:.3} \
             after",
            100.0 * idle / (computing + idle),
            time(|times| times.copying),
        );
    }
    let host = |of: fn(&Stats) -> f64| of(&after.host) - of(&before.host);
    println!(
        "     host, seconds of all replicas: waits {:.3}, draws {:.3}",
        host(|stats| stats.waiting_seconds),
        host(|stats| stats.drawing_seconds)
    );
}

struct Run {
    seconds: f64,
    tokens: u64,
    prompt_tokens: u64,
    /// Number of different answers.
    different: usize,
    /// Of all answers: the same in runs whose answers are the same.
    hash: u32,
    /// The rate until the last request started, if that says anything.
    without_tail: Option<String>,
}

impl Workload {
    /// Each repeat has prompts of its own: the blocks of the last one's may still be there.
    fn run(
        &self,
        engine: &mut Engine,
        tokenizer: &Tokenizer,
        notes: &SharedNotes,
        part: &Args,
        repeat: usize,
    ) -> anyhow::Result<Run> {
        let salt = (repeat as u64) << 32;
        let lengths = self.lengths(part.shorten)?;
        let steps = self.steps(part.shorten);
        let slot = 4 * (steps + 1);
        let mut prompts = vec![0_u8; self.requests * slot];
        for ((request, prompt), lengths) in prompts.chunks_exact_mut(slot).enumerate().zip(&lengths) {
            fill_prompt(&mut prompt[..lengths.prompt], salt | request as u64);
            fill_prompt(&mut prompt[..self.shared], salt);
            if self.mixed {
                watched::write_number(prompt, request);
            }
        }
        let mut rows = vec![-1_i32; self.requests * (steps + 1)];
        // SAFETY: both buffers have the sizes passed, and outlive the call.
        let mut requests = unsafe {
            Requests::from_raw(
                self.requests as i32,
                4,
                steps as i32,
                prompts.as_ptr(),
                rows.as_mut_ptr(),
            )
        }?;
        let mut sampling = Sampling {
            temperature: part.temperature,
            topp: part.topp,
            rng_state: 1,
        };
        let prompt_tokens = lengths.iter().map(|lengths| lengths.prompt as u64).sum();
        *notes.lock() = watched::Notes {
            ends: if self.mixed { lengths.clone() } else { Vec::new() },
            steps: Vec::new(),
        };
        let start = Instant::now();
        let (tokens, seconds) = if part.batch {
            let prompts = prompts
                .chunks_exact(slot)
                .zip(&lengths)
                .map(|(prompt, lengths)| &prompt[..lengths.prompt]);
            through_batch(engine, prompts, steps, part, &mut rows)?
        } else {
            let outcome = engine.inference(tokenizer, &mut sampling, &mut requests, &no_other)?;
            if let Some(failure) = outcome.failure {
                return Err(failure.into());
            }
            (outcome.tokens, start.elapsed().as_secs_f64())
        };
        let mut hasher = DefaultHasher::new();
        rows.hash(&mut hasher);
        let mut answers: Vec<_> = rows.chunks_exact(steps + 1).collect();
        answers.sort_unstable();
        answers.dedup();
        Ok(Run {
            seconds,
            tokens,
            prompt_tokens,
            different: answers.len(),
            hash: hasher.finish() as u32,
            without_tail: notes.lock().without_tail(start).map(|part| part.to_string()),
        })
    }
}

/// Answers requests of up to `steps` positions through an open batch, each into its row as `inference` would; gives the
/// number of tokens and the seconds from the first request to the last token.
fn through_batch<'a>(
    engine: &mut Engine,
    prompts: impl ExactSizeIterator<Item = &'a [u8]>,
    steps: usize,
    part: &Args,
    rows: &mut [i32],
) -> anyhow::Result<(u64, f64)> {
    let service = engine.service()?;
    let ends = match engine.options().ignore_end {
        true => EndTokens::default(),
        false => EndTokens::new(&EndTokens::RELEASED),
    };
    std::thread::scope(|scope| {
        let serving = scope.spawn(|| engine.serve_all(&service, &no_other));
        let heard = submit_and_hear(&service, prompts, steps, part, &Arc::new(ends), rows);
        service.close();
        serving
            .join()
            .map_err(|_| anyhow::anyhow!("the batch has panicked"))??;
        heard
    })
}

fn submit_and_hear<'a>(
    service: &Service,
    prompts: impl ExactSizeIterator<Item = &'a [u8]>,
    steps: usize,
    part: &Args,
    ends: &Arc<EndTokens>,
    rows: &mut [i32],
) -> anyhow::Result<(u64, f64)> {
    let start = Instant::now();
    let count = prompts.len();
    for (number, prompt) in prompts.enumerate() {
        let is_drawn = number % part.drawn_one_in == 0;
        service.submit(Ask {
            prompt: prompt.iter().map(|&byte| u32::from(byte)).collect(),
            max_positions: Some(steps),
            grammar: None,
            min_tokens: 0,
            sampling: Sampling {
                temperature: if is_drawn { part.temperature } else { 0.0 },
                topp: part.topp,
                rng_state: request_seed(1, number),
            },
            ends: ends.clone(),
            logprobs: LogProbs {
                answer: part.logprobs.is_some(),
                prompt: false,
                top: part.logprobs.unwrap_or(0),
            },
            tag: 0,
            tokens_per_event: 1,
        })?;
    }
    let (mut ended, mut tokens) = (0, 0);
    let mut filled = vec![0; count];
    while ended < count {
        let event = service
            .next(None)
            .ok_or_else(|| anyhow::anyhow!("the batch is closed"))?;
        let row = &mut rows[event.number * (steps + 1)..][..steps + 1];
        for token in event.tokens {
            row[filled[event.number]] = token.cast_signed();
            filled[event.number] += 1;
            tokens += 1;
        }
        match event.end {
            None => {}
            Some(Ending::Answered(_)) => ended += 1,
            Some(other) => anyhow::bail!("request {}: {other:?}", event.number),
        }
    }
    Ok((tokens, start.elapsed().as_secs_f64()))
}

/// A benchmark has no fallback for failed devices.
fn no_other(_: &Options) -> getp::error::Result<Box<dyn Replica>> {
    Err(getp::error::Error::State("no device is left".into()))
}

/// Fills a prompt with random bytes other than 0, each of which is a token.
fn fill_prompt(prompt: &mut [u8], request: u64) {
    let mut state = request.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0x1234_5678_9abc_def1;
    for byte in prompt {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        *byte = (state >> 32) as u8 % 255 + 1;
    }
}

/// A vocabulary whose first entries are single bytes. The others never occur in a prompt.
fn tokenizer(vocab: usize) -> anyhow::Result<Tokenizer> {
    let bytes = (0..=255_u8).map(|byte| (vec![byte], 0.0));
    let others = (256..vocab).map(|id| (format!("\u{1}{id}").into_bytes(), -1e9_f32));
    Ok(Tokenizer::new(bytes.chain(others), 16)?)
}
