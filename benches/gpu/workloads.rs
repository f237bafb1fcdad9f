//! Runs whole batches through the engine, and prints the rates.

use getp::backend::gpu::replica::GpuReplica;
use getp::engine::{Engine, Stats};
use getp::profile::{Spread, StepTimes};
use getp::request::Sampling;
use getp::requests::Requests;
use getp::tokenizer::Tokenizer;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::time::{Duration, Instant};

#[derive(clap::Args)]
pub struct Args {
    /// Workloads; by default all but W2x, P8k and P32k.
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
    /// Divides the number of output tokens, for a shorter run.
    #[arg(long, default_value_t = 1)]
    shorten: usize,
}

#[derive(Clone, Copy)]
struct Workload {
    name: &'static str,
    requests: usize,
    prompt: usize,
    output: usize,
    /// Whether prompt tokens are counted too.
    prefill: bool,
}

const fn workload(name: &'static str, requests: usize, prompt: usize, output: usize) -> Workload {
    Workload {
        name,
        requests,
        prompt,
        output,
        prefill: output == 1,
    }
}

const WORKLOADS: [Workload; 8] = [
    workload("W1", 32, 32, 992),
    workload("W2", 890, 32, 992),
    workload("W2x", 1536, 32, 992),
    workload("W3", 256, 1024, 1024),
    workload("W3p", 256, 1024, 1),
    workload("W4", 1, 32, 256),
    workload("P8k", 32, 8192, 1),
    workload("P32k", 8, 32_768, 1),
];

/// Workloads that are not run unless they are named.
const ON_REQUEST: [&str; 3] = ["W2x", "P8k", "P32k"];

pub fn run(args: &super::Args, part: &Args) -> anyhow::Result<()> {
    let mut config = args.config();
    let wanted: Vec<_> = WORKLOADS
        .iter()
        .filter(|w| {
            part.names.iter().any(|name| name == w.name) || (part.names.is_empty() && !ON_REQUEST.contains(&w.name))
        })
        .flat_map(|w| w.with(&part.requests))
        .collect();
    let longest = wanted.iter().map(|w| w.prompt + w.output).max();
    config.seq_len = config.seq_len.max(longest.unwrap_or(0));
    let most = wanted.iter().map(|w| w.requests).max().unwrap_or(1);
    let options = args.options()?;
    // Devices share the requests: replicas among themselves, and those of a group among their steps.
    let devices = args.devices(&options)?.len();
    let options = getp::options::Options {
        max_batch: Some(most.div_ceil(devices)),
        step_tokens: Some(8192),
        ..options
    };
    let start = Instant::now();
    let mut replicas = args.replicas(&config, &options)?;
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
    let tokenizer = tokenizer(config.vocab_size)?;
    let mut engine = Engine::new(replicas, &config, options)?;
    println!(
        "{:<5}{:>10}{:>8}{:>8}{:>11}{:>12}{:>10}{:>10}",
        "", "requests", "prompt", "output", "seconds", "tokens/s", "answers", "hash"
    );
    for w in wanted {
        let before = Overlap::of(&engine);
        let mut runs: Vec<_> = (0..part.repeats.max(1))
            .map(|_| w.run(&mut engine, &tokenizer, part))
            .collect::<Result<_, _>>()?;
        runs.sort_by(|a, b| a.seconds.total_cmp(&b.seconds));
        let run = &runs[runs.len() / 2];
        println!(
            "{:<5}{:>10}{:>8}{:>8}{:>11.3}{:>12.1}{:>10}  {:08x}",
            w.name,
            w.requests,
            w.prompt,
            run.tokens / w.requests as u64,
            run.seconds,
            (run.tokens + if w.prefill { w.requests * w.prompt } else { 0 } as u64) as f64 / run.seconds,
            run.different,
            run.hash,
        );
        print_spread(&engine)?;
        if part.overlap {
            print_overlap(&before, &Overlap::of(&engine));
        }
    }
    Ok(())
}

/// Prints how evenly the random router selects experts: if it is uneven, the rates are not those of a trained model.
fn print_spread(engine: &Engine) -> anyhow::Result<()> {
    for replica in engine.replicas().filter_map(GpuReplica::of) {
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
        let replicas = engine.replicas().filter_map(GpuReplica::of);
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
    /// Number of different answers.
    different: usize,
    /// Of all answers: the same in runs whose answers are the same.
    hash: u32,
}

impl Workload {
    /// It with these numbers of requests, or as it is if there are none.
    fn with(&self, requests: &[usize]) -> Vec<Self> {
        let own = [self.requests];
        let requests = if requests.is_empty() { &own } else { requests };
        requests.iter().map(|&requests| Self { requests, ..*self }).collect()
    }

    fn run(&self, engine: &mut Engine, tokenizer: &Tokenizer, part: &Args) -> anyhow::Result<Run> {
        let output = (self.output / part.shorten).max(1);
        // The last token sampled is no input.
        let steps = self.prompt + output - 1;
        let slot = 4 * (steps + 1);
        let mut prompts = vec![0_u8; self.requests * slot];
        for (request, prompt) in prompts.chunks_exact_mut(slot).enumerate() {
            fill_prompt(&mut prompt[..self.prompt], request as u64);
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
        let start = Instant::now();
        let outcome = engine.inference(tokenizer, &mut sampling, &mut requests, &no_other)?;
        let seconds = start.elapsed().as_secs_f64();
        if let Some(failure) = outcome.failure {
            return Err(failure.into());
        }
        let mut hasher = DefaultHasher::new();
        rows.hash(&mut hasher);
        let mut answers: Vec<_> = rows.chunks_exact(steps + 1).collect();
        answers.sort_unstable();
        answers.dedup();
        Ok(Run {
            seconds,
            tokens: outcome.tokens,
            different: answers.len(),
            hash: hasher.finish() as u32,
        })
    }
}

/// A benchmark has no fallback for failed devices.
fn no_other(_: &getp::options::Options) -> getp::error::Result<Box<dyn getp::replica::Replica>> {
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
