//! The speed of the CPU backend, and the limits of the machine.
//!
//!     cargo bench --bench cpu -- [machine] [ops] [pack] [ties] [model] [requests] [--layers N] [--threads N]
//!         [--precision exact|fast] [--directory DIRECTORY]
//!
//! `machine` measures the memory's read bandwidth and the peak rate of the dot products the kernels use; `ops` times
//! the matrix products at the 20b shapes over batch sizes; `pack` the exact packing, of float32 or, with `--directory`,
//! of a model's directory beside copying as many bytes; `ties` the argmax of `exact` where logits are equal; `model`
//! prefill and decoding of a model of the 20b shape with few layers; `requests` what the engine itself takes for a
//! request. Times are medians of alternating runs.

#![allow(missing_docs)]

#[path = "cpu/pack.rs"]
mod packing;
#[path = "../tests/common/synthetic.rs"]
mod synthetic;

use clap::Parser;
use getp::backend::cpu::{self, Buffer, ComputeMode, CpuOps, Tiles};
use getp::batch::{Greedy, StepOutput, StepPlan, Want};
use getp::checkpoint::{Part, Tensor, Values};
use getp::config::ModelConfig;
use getp::engine::{Ask, Ending, Engine, Service, limits};
use getp::kv_blocks::KvBlocks;
use getp::memory::Purpose;
use getp::ops::Ops;
use getp::options::{Options, Precision, Print};
use getp::profile::{Operation, Profile};
use getp::replica::{Pointers, Replica};
use getp::request::{EndTokens, LogProbs, Request, Sampling};
use getp::scheduler::Scheduler;
use getp::simd::{Avx512, Level, Simd};
use getp::weights::{Bytes, PackReport, WeightFormat, pack};
use half::{bf16, f16};
use std::hint::black_box;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};
use synthetic::{Synthetic, SyntheticCheckpoint, Temperament};

#[derive(Parser)]
struct Args {
    /// Which parts to run: machine, ops, pack, ties, model, requests (all by default).
    parts: Vec<String>,
    /// Layers of the model.
    #[arg(long, default_value_t = 4)]
    layers: usize,
    /// Threads; 0 is one a core.
    #[arg(long, default_value_t = 0)]
    threads: usize,
    /// exact or fast
    #[arg(long, default_value = "fast")]
    precision: String,
    /// Times each measurement is taken.
    #[arg(long, default_value_t = 5)]
    repeats: usize,
    /// Rows of a step for `ops`.
    #[arg(long, value_delimiter = ',', default_value = "1,2,4,8,16,32,64,128,512")]
    rows: Vec<usize>,
    /// What `pack` packs instead of float32 in memory.
    #[arg(long)]
    directory: Option<PathBuf>,
    /// Cargo passes it.
    #[arg(long, hide = true)]
    bench: bool,
}

impl Args {
    fn wants(&self, part: &str) -> bool {
        self.parts.is_empty() || self.parts.iter().any(|p| p == part)
    }

    fn threads(&self) -> usize {
        match self.threads {
            0 => std::thread::available_parallelism().map_or(1, usize::from),
            n => n,
        }
    }

    fn precision(&self) -> Precision {
        if self.precision == "exact" {
            Precision::Exact
        } else {
            Precision::Fast
        }
    }
}

fn main() -> anyhow::Result<()> {
    let args = Args::parse();
    rayon::ThreadPoolBuilder::new()
        .num_threads(args.threads())
        .build_global()?;
    println!("{} threads, {}", args.threads(), args.precision);
    if args.wants("machine") {
        machine(&args);
    }
    if args.wants("ops") {
        layer(&args)?;
    }
    if args.wants("pack") {
        match &args.directory {
            Some(directory) => packing::of_directory(directory, args.repeats)?,
            None => packing::of_float32(args.repeats)?,
        }
    }
    if args.wants("ties") {
        ties(&args)?;
    }
    if args.wants("model") {
        model(&args)?;
    }
    if args.wants("requests") {
        requests(&args)?;
    }
    Ok(())
}

fn median(mut seconds: Vec<f64>) -> f64 {
    seconds.sort_by(f64::total_cmp);
    seconds[seconds.len() / 2]
}

fn time(run: impl FnOnce()) -> f64 {
    let start = Instant::now();
    run();
    start.elapsed().as_secs_f64()
}

// ---- machine

/// Memory to read, in huge pages like the weights.
fn memory() -> Bytes {
    let mut memory = Bytes::zeroed_in_huge_pages(2 << 30, Purpose::Step).expect("2 GiB");
    memory.chunks_mut(1 << 20).for_each(|chunk| chunk.fill(1));
    memory
}

/// GB/s of all threads reading `memory` once.
fn read_rate(memory: &Bytes, threads: usize) -> f64 {
    let (words, _) = memory.as_chunks::<8>();
    let seconds = time(|| {
        std::thread::scope(|scope| {
            for part in words.chunks(words.len() / threads) {
                scope.spawn(|| black_box(Level::detect().run(Read(part))));
            }
        });
    });
    memory.len() as f64 / seconds * 1e-9
}

fn machine(args: &Args) {
    let memory = memory();
    let rates = (0..args.repeats.max(5)).map(|_| read_rate(&memory, args.threads()));
    println!("memory read: {:.1} GB/s", median(rates.collect()));
    if let Some(avx512) = Avx512::new() {
        for (name, integer) in [("BF16 dot product", false), ("16-bit integer dot product", true)] {
            let count = 20_000_000_usize;
            let runs = (0..args.repeats).map(|_| {
                time(|| {
                    std::thread::scope(|scope| {
                        for _ in 0..args.threads() {
                            scope.spawn(|| black_box(avx512.vectorize(Dots { count, integer })));
                        }
                    });
                })
            });
            let flops = (count * 12 * 64 * args.threads()) as f64;
            println!("{name} peak: {:.0} GFLOP/s", flops / median(runs.collect()) * 1e-9);
        }
    }
}

/// Reads memory once.
struct Read<'a>(&'a [[u8; 8]]);

impl getp::simd::VectorCode for Read<'_> {
    type Output = u64;

    #[inline(always)]
    fn run<S: Simd>(self, _: S) -> u64 {
        let mut out = [0.0_f32; 16];
        // SAFETY: `S` was detected; each load is of sixteen words of a chunk.
        unsafe {
            let mut sums = [S::i_zero(); 4];
            for chunk in self.0.as_chunks::<32>().0 {
                for (i, sum) in sums.iter_mut().enumerate() {
                    *sum = S::i_add(*sum, S::i_load(chunk.as_ptr().add(8 * i).cast()));
                }
            }
            let sum = sums
                .into_iter()
                .reduce(|a, b| S::i_add(a, b))
                .map_or(S::splat(0.0), |sum| S::from_bits(sum));
            S::store(out.as_mut_ptr(), sum);
        }
        out.iter().fold(0, |all, v| all ^ u64::from(v.to_bits()))
    }
}

/// Twelve independent chains of dot products.
struct Dots {
    count: usize,
    integer: bool,
}

impl getp::simd::VectorCode for Dots {
    type Output = f32;

    #[inline(always)]
    fn run<S: Simd>(self, _: S) -> f32 {
        let x = [0_u32; 16];
        // SAFETY: `S` was detected and has the dot products; the pointers are to sixteen elements.
        unsafe {
            let w = S::i_load(x.as_ptr());
            let mut out = [0.0; 16];
            if self.integer {
                let mut acc = [S::i_zero(); 12];
                for _ in 0..self.count {
                    acc.iter_mut().for_each(|a| *a = S::dot_i16(*a, w, x.as_ptr()));
                }
                acc.into_iter()
                    .for_each(|a| S::store(out.as_mut_ptr(), S::add(S::load(out.as_ptr()), S::i_to_f(a))));
            } else {
                let mut acc = [S::splat(0.0); 12];
                for _ in 0..self.count {
                    acc.iter_mut().for_each(|a| *a = S::dot_bf16(*a, w, x.as_ptr()));
                }
                acc.into_iter()
                    .for_each(|a| S::store(out.as_mut_ptr(), S::add(S::load(out.as_ptr()), a)));
            }
            out.iter().sum()
        }
    }
}

// ---- one layer's products

/// The operations that are matrix products.
const PRODUCTS: [Operation; 6] = [
    Operation::Qkv,
    Operation::AttnOut,
    Operation::Router,
    Operation::Mlp1,
    Operation::Mlp2,
    Operation::Unembed,
];

fn shape(layers: usize) -> ModelConfig {
    ModelConfig {
        n_layers: layers,
        ..ModelConfig::preset_20b()
    }
}

fn layer(args: &Args) -> anyhow::Result<()> {
    let config = shape(1);
    let synthetic = Synthetic::new(&config, 1, Temperament::Tame)?;
    let (weights, _) = cpu::load(&SyntheticCheckpoint::packed(&synthetic))?;
    let engine = ComputeMode {
        level: Level::detect(),
        precision: args.precision(),
    };
    println!("{:<14}{:>6}{:>12}{:>9}{:>10}", "op", "rows", "us", "GB/s", "GFLOP/s");
    for rows in args.rows.clone() {
        let mut activations = cpu::activations(&config, rows).unwrap();
        let (memory, a) = (&mut activations.x, &mut activations.scratch);
        memory.x.set_rows(rows).unwrap();
        for (i, v) in memory.x.values_mut().iter_mut().enumerate() {
            *v = ((i * 7919) % 2003) as f32 / 1000.0 - 1.0;
        }
        let w = &weights.layers[0];
        let mut best = std::collections::HashMap::<&str, (f64, getp::profile::OperationTotal)>::new();
        for _ in 0..args.repeats {
            let mut ops = CpuOps::<f16>::new(&config, engine, rows, true).unwrap();
            let (x, normed) = ops.norm(&mut *memory, &w.attn_norm, &mut a.t)?;
            ops.qkv(normed, &w.qkv, &w.qkv_bias, &mut a.qkv)?;
            a.attention.set_rows(rows).unwrap();
            let x = ops.attn_out(&a.attention, &w.attn_out, &w.attn_out_bias, x)?;
            let routed = ops.route(x, &w.ffn_norm, &w.router, &w.router_bias, &mut a.t)?;
            let gated = ops.mlp1(&routed, &w.mlp1, &w.mlp1_bias, &mut a.h)?;
            ops.mlp2(gated, routed, &w.mlp2, &w.mlp2_bias)?;
            if rows <= 64 {
                ops.unembed(
                    &StepPlan::default(),
                    &a.t,
                    &weights.head.as_ref().expect("the whole model").unembedding,
                    Want::Tokens,
                )?;
            }
            let profile = ops.profile().expect("asked for");
            for operation in PRODUCTS {
                let total = profile.total(operation);
                let seconds = total.time.as_secs_f64();
                if total.calls > 0 && best.get(operation.name()).is_none_or(|b| seconds < b.0) {
                    best.insert(operation.name(), (seconds, total));
                }
            }
        }
        for operation in PRODUCTS {
            if let Some((seconds, total)) = best.get(operation.name()) {
                println!(
                    "{:<14}{rows:>6}{:>12.0}{:>9.1}{:>10.1}",
                    operation.name(),
                    seconds * 1e6,
                    total.cost.bytes as f64 / seconds * 1e-9,
                    total.cost.flops as f64 / seconds * 1e-9
                );
            }
        }
    }
    Ok(())
}

// ---- equal logits

/// Which rows of an unembedding are the same.
type Tied = fn(usize) -> bool;

/// The argmax of `exact` beside the product that gives all logits.
fn ties(args: &Args) -> anyhow::Result<()> {
    let vocab = ModelConfig::preset_20b().vocab_size;
    let kinds: [(&str, Tied); 5] = [
        ("none", |_| false),
        ("every 32nd", |row| row % 32 == 0),
        ("blocks of 1,000", |row| row / 1000 % 2 == 0),
        ("every other", |row| row % 2 == 0),
        ("all", |_| true),
    ];
    println!(
        "{:<8}{:<17}{:>6}{:>14}{:>16}",
        "hidden", "equal rows", "rows", "argmax, ms", "all logits, ms"
    );
    for (hidden, vocab) in [(ModelConfig::preset_7m().hidden_dim, vocab), (2880, vocab / 8)] {
        let config = ModelConfig {
            hidden_dim: hidden,
            vocab_size: vocab,
            ..ModelConfig::preset_7m()
        };
        let value = |i: usize| bf16::from_f32(((i * 7919) % 2003) as f32 / 1000.0 - 1.0).to_f32();
        for (name, tied) in kinds {
            let values = (0..vocab).flat_map(|row| {
                let first = if tied(row) { 0 } else { row };
                (0..hidden).map(move |i| if first == 0 { 1.0 } else { value(first * hidden + i) })
            });
            let bytes: Vec<u8> = values.flat_map(f32::to_le_bytes).collect();
            let part = Part {
                rows: vocab,
                values: Values::F32(&bytes),
            };
            let tensor = Tensor {
                rows: vocab,
                cols: hidden,
                parts: vec![part],
            };
            let w = pack(&[tensor], WeightFormat::Bf16, &Tiles { gated: false })?;
            for &rows in args.rows.iter().filter(|&&rows| rows <= 128) {
                let mode = ComputeMode {
                    level: Level::detect(),
                    precision: Precision::Exact,
                };
                let mut ops = CpuOps::<f32>::new(&config, mode, rows, false)?;
                let mut t = Buffer::new(rows, hidden)?;
                t.set_rows(rows)?;
                t.values_mut()
                    .iter_mut()
                    .enumerate()
                    .for_each(|(i, t)| *t = 1.0 + value(i) / 8.0);
                let plan = StepPlan::default();
                // The fastest: others may be at work on the machine.
                let mut of = |want| {
                    let mut run = || time(|| ops.unembed(&plan, &t, &w, want).expect("sums"));
                    (0..args.repeats).map(|_| run()).fold(f64::INFINITY, f64::min) * 1e3
                };
                let (argmax, logits) = (of(Want::Tokens), of(Want::Logits));
                println!("{hidden:<8}{name:<17}{rows:>6}{argmax:>14.2}{logits:>16.2}");
            }
        }
    }
    Ok(())
}

// ---- a model

fn model(args: &Args) -> anyhow::Result<()> {
    let config = shape(args.layers);
    let checkpoint = SyntheticCheckpoint::packed(&Synthetic::new(&config, 1, Temperament::Tame)?);
    let options = Options {
        precision: Some(args.precision()),
        threads: args.threads,
        max_batch: Some(32),
        step_tokens: Some(512),
        print: Print::Nothing,
        progress: false,
        profile: true,
        ..Options::default()
    };
    let mut replica = cpu::open(&checkpoint, &options)?;
    drop(checkpoint);
    println!("{} layers, 20b shape; {}", args.layers, replica.describe());
    println!("{:<34}{:>10}{:>12}", "workload", "tok/s", "ms a step");
    for (name, requests, prompt, generated) in [
        ("prompt of 512", 1, 512, 1),
        ("1 sequence", 1, 32, 64),
        ("8 sequences", 8, 32, 64),
        ("32 sequences", 32, 32, 64),
    ] {
        let runs: Vec<_> = (0..args.repeats.min(3))
            .map(|_| generate(&config, &mut *replica, requests, prompt, generated))
            .collect();
        let prefill = median(runs.iter().map(|r| r.0.as_secs_f64()).collect());
        let decode = median(runs.iter().map(|r| r.1.as_secs_f64()).collect());
        if generated == 1 {
            println!("{name:<34}{:>10.1}{:>12.1}", prompt as f64 / prefill, prefill * 1e3);
        } else {
            let steps = generated - 1;
            let rate = (requests * steps) as f64 / decode;
            println!("{name:<34}{rate:>10.1}{:>12.2}", decode / steps as f64 * 1e3);
        }
    }
    if let Some(profile) = replica.profile() {
        print!("{}", profile.table());
    }
    share_of_bandwidth(args, &config, &mut *replica);
    Ok(())
}

/// Prints the share of the memory's bandwidth that decoding one sequence reaches. Both are measured in turns, since the
/// bandwidth changes from minute to minute on a shared machine.
fn share_of_bandwidth(args: &Args, config: &ModelConfig, replica: &mut dyn Replica) {
    let memory = memory();
    let packed: u64 = replica.pack_report().kinds.iter().map(|kind| kind.bytes).sum();
    let of = |name| {
        replica
            .pack_report()
            .kinds
            .iter()
            .find(|kind| kind.name == name)
            .map_or(0, |kind| kind.bytes)
    };
    let experts = of("w_mlp1") + of("w_mlp2");
    let used = experts * config.experts_per_token as u64 / config.n_experts as u64;
    // Decoding a token reads all weights except the embedding table and the experts that are not selected.
    let step_bytes = packed - of("token_embedding_table") - experts + used;
    let (mut reads, mut steps) = (Vec::new(), Vec::new());
    for _ in 0..args.repeats {
        reads.push(read_rate(&memory, args.threads()));
        let (_, decode) = generate(config, replica, 1, 32, 17);
        steps.push(step_bytes as f64 * 16.0 / decode.as_secs_f64() * 1e-9);
    }
    let shares = reads.iter().zip(&steps).map(|(read, step)| step / read).collect();
    println!(
        "1 sequence reads {:.2} GB a step at {:.1} GB/s; memory read {:.1} GB/s; median share {:.0} %",
        step_bytes as f64 * 1e-9,
        median(steps),
        median(reads),
        100.0 * median(shares)
    );
}

/// The times of prefill and of decoding, for requests that differ and never end early.
fn generate(
    config: &ModelConfig,
    replica: &mut dyn Replica,
    requests: usize,
    prompt: usize,
    generated: usize,
) -> (Duration, Duration) {
    let mut scheduler = Scheduler::new(limits(&*replica, config)).expect("the replica's own limits");
    for request in 0..requests {
        let tokens = (0..prompt)
            .map(|i| ((request * 7919 + i * 104_729) % 199_000) as u32)
            .collect();
        scheduler
            .submit(Request::greedy(request, tokens, prompt + generated - 1))
            .expect("it fits");
    }
    let (mut plan, mut output, mut finished) = (StepPlan::default(), StepOutput::default(), Vec::new());
    let (mut prefill, mut decode) = (Duration::ZERO, Duration::ZERO);
    while scheduler.plan(&mut plan) {
        let start = Instant::now();
        scheduler.begin(&plan);
        replica.submit(&plan, Want::Tokens).expect("a step");
        replica.collect(&mut output).expect("its output");
        let sampled = plan.logits.iter().zip(&output.greedy).filter(|(row, _)| row.sample);
        // End tokens would end a sequence early.
        let sampled: Vec<u32> = sampled.map(|(_, greedy)| greedy.token.min(199_000)).collect();
        scheduler
            .commit(&plan, &sampled, &mut finished)
            .expect("the plan's own outcome");
        let time = start.elapsed();
        if plan.rows() > requests {
            prefill += time
        } else {
            decode += time
        }
    }
    (prefill, decode)
}

// ---- requests

const REQUESTS: usize = 1_000_000;
const PROMPT: usize = 8;

/// A replica that computes nothing: what is left is the engine's own time.
#[derive(Default)]
struct Idle {
    report: PackReport,
    /// Rows with logits of the step in flight.
    rows: usize,
}

impl Replica for Idle {
    fn describe(&self) -> String {
        "a replica that computes nothing".into()
    }

    fn pack_report(&self) -> &PackReport {
        &self.report
    }

    fn kv_blocks(&self) -> KvBlocks {
        KvBlocks {
            tokens: 16,
            count: 8192,
        }
    }

    fn kv_bytes(&self) -> u64 {
        0
    }

    fn max_step_tokens(&self) -> usize {
        2048
    }

    fn chunk_tokens(&self) -> usize {
        512
    }

    fn max_logits_rows(&self) -> usize {
        2048
    }

    fn depth(&self) -> usize {
        1
    }

    fn draws(&self) -> bool {
        false
    }

    fn scores(&self) -> bool {
        false
    }

    fn decodes_as_prompts(&self) -> bool {
        true
    }

    fn submit(&mut self, plan: &StepPlan, _: Want) -> getp::error::Result<()> {
        self.rows = plan.logits.len();
        Ok(())
    }

    fn collect(&mut self, output: &mut StepOutput) -> getp::error::Result<()> {
        output.greedy.clear();
        output.greedy.resize(self.rows, Greedy { token: 1, logit: 1.0 });
        Ok(())
    }

    fn profile(&self) -> Option<&Profile> {
        None
    }

    fn pointers(&self) -> Pointers {
        Pointers {
            weights: [std::ptr::null_mut(); 16],
            state: [std::ptr::null_mut(); 21],
        }
    }
}

/// Seconds of processor time of all threads so far.
fn processor_seconds() -> f64 {
    // SAFETY: all zeros is a value of this struct, and the call fills it.
    let usage = unsafe {
        let mut usage: libc::rusage = std::mem::zeroed();
        libc::getrusage(libc::RUSAGE_SELF, &mut usage);
        usage
    };
    let seconds = |time: libc::timeval| time.tv_sec as f64 + time.tv_usec as f64 * 1e-6;
    seconds(usage.ru_utime) + seconds(usage.ru_stime)
}

/// One thread submits requests of 8 + 1 tokens, another takes the events, a third serves them.
fn requests(args: &Args) -> anyhow::Result<()> {
    let options = Options {
        print: Print::Nothing,
        progress: false,
        ..Options::default()
    };
    let mut runs = Vec::new();
    for _ in 0..args.repeats.min(3) {
        let mut engine = Engine::new(vec![Box::<Idle>::default()], &ModelConfig::preset_7m(), options.clone())?;
        let service = engine.service()?;
        let processor = processor_seconds();
        let start = Instant::now();
        let reopen = |_: &Options| Err(getp::error::Error::State("no device is left".into()));
        std::thread::scope(|scope| {
            let serving = scope.spawn(|| engine.serve_all(&service, &reopen));
            let submitting = scope.spawn(|| submit_all(&service));
            let heard = hear_all(&service);
            service.close();
            let served = serving.join().map_err(|_| anyhow::anyhow!("the engine has panicked"));
            let submitted = submitting.join().map_err(|_| anyhow::anyhow!("it has panicked"));
            heard.and(served?.map_err(Into::into)).and(submitted?)
        })?;
        runs.push((start.elapsed().as_secs_f64(), processor_seconds() - processor));
    }
    let each = |seconds: Vec<f64>| 1e6 * median(seconds) / REQUESTS as f64;
    println!(
        "{REQUESTS} requests of {PROMPT} + 1 tokens, nothing computed: {:.2} us each, {:.2} us of processor time in all threads",
        each(runs.iter().map(|run| run.0).collect()),
        each(runs.iter().map(|run| run.1).collect()),
    );
    Ok(())
}

fn submit_all(service: &Service) -> anyhow::Result<()> {
    let ends = Arc::new(EndTokens::new(&EndTokens::RELEASED));
    for number in 0..REQUESTS {
        service.submit(Ask {
            prompt: (0..PROMPT).map(|i| (number + i) as u32 % 199_000).collect(),
            max_positions: Some(PROMPT),
            grammar: None,
            min_tokens: 0,
            sampling: Sampling::GREEDY,
            ends: ends.clone(),
            logprobs: LogProbs::default(),
            tag: number as u64,
            tokens_per_event: 1,
        })?;
    }
    Ok(())
}

fn hear_all(service: &Service) -> anyhow::Result<()> {
    for _ in 0..REQUESTS {
        let event = service
            .next(None)
            .ok_or_else(|| anyhow::anyhow!("the batch is closed"))?;
        anyhow::ensure!(
            matches!(event.end, Some(Ending::Answered(_))) && event.tokens.len() == 1,
            "request {}: {:?}",
            event.number,
            event.end
        );
    }
    Ok(())
}
