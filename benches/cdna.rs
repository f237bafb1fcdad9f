//! The time of a step on a CDNA GPU, estimated by a model, since it has not been measured on one.
//!
//!     cargo bench --profile dev --bench cdna --features hip
//!
//! A matrix product's blocks are assigned in order to compute units that hold eight waves. A compute unit multiplies at
//! the share of its peak that llvm-mca gives for the kernel's inner loop (`LLVM_MCA` names the program), with one block
//! or with two. A product takes at least the time in which its weights and activations cross memory, and any other
//! kernel takes the time of its bytes. Each launch takes a fixed time. Tokens select experts at random, with a fixed
//! seed; half of the layers attend to the window, the others to all keys. Kernels do not overlap. "At least": without
//! launches, and with products at the peak or at the memory's rate.

#![allow(missing_docs)]

#[path = "../tests/common/amd_loops.rs"]
mod amd_loops;

use amd_loops::{functions, loops};
use getp::backend::gpu::args::Format;
use getp::backend::gpu::catalogue::{Kernel, Op};
use getp::backend::gpu::code_objects::CODE_OBJECTS;
use getp::backend::gpu::driver::DeviceMemory;
use getp::backend::gpu::family;
use getp::backend::gpu::group::demand::Demand;
use getp::backend::gpu::launch::Launch;
use getp::backend::gpu::shapes::{GemmShape, Kind, Numbers, Product, SortGatherLaunch};
use getp::backend::gpu::stage::{Common, bucket};
use getp::backend::gpu::target::Target;
use getp::config::ModelConfig;
use getp::options::Options;
use rand::SeedableRng;
use rand::seq::index::sample;
use rand_chacha::ChaCha8Rng;
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::io::Write;
use std::process::{Command, Stdio};

const ARCH: &str = "gfx90a";
const COMPUTE_UNITS: usize = 104;
const HERTZ: f64 = 1.7e9;
const BYTES_A_SECOND: f64 = 1.3e12;
const LAUNCH: f64 = 5e-6;
/// upload, embed, norm, unembedding and argmax.
const STEP_LAUNCHES: usize = 5;
/// Keys of a row in the middle of a sequence of 32 + 992 tokens.
const KEYS: usize = 528;
/// Between two devices of a group, in each direction.
const LINK_BYTES_A_SECOND: f64 = 50e9;
const DEVICE_MEMORY: DeviceMemory = DeviceMemory {
    free: 65_000 << 20,
    total: 65_536 << 20,
};

const WAVES_AT_ONCE: usize = 8;
const SIMDS: f64 = 4.0;
const WAVE: usize = 64;
const TOKENS: usize = 16;
/// MFMAs for 64 columns, 32 rows and 16 tokens, and the issue slots (4 clocks each) that an MFMA takes.
const CHUNK_MFMAS: usize = 8;
const MFMA_SLOTS: f64 = 8.0;
const SLOT: f64 = 4.0 / HERTZ;

/// The share of the matrix cores' peak in each kernel's inner loop, by the number of 16-token steps that the loop
/// computes. llvm-mca is run when a share is first needed.
struct Shares {
    loops: BTreeMap<String, Vec<(usize, String)>>,
    known: RefCell<BTreeMap<(String, usize), f64>>,
}

impl Shares {
    fn new() -> Self {
        let mut found = BTreeMap::<String, Vec<(usize, String)>>::new();
        for object in CODE_OBJECTS.iter().filter(|object| object.arch == ARCH) {
            for function in functions(object) {
                // The loop of a tiled kernel has three chunks of 64 columns. Kernels named n16 compute 16 tokens.
                let stream = function.name.ends_with("_n16");
                for inner in loops(&function) {
                    let steps = if stream { 1 } else { inner.mfmas() / (3 * CHUNK_MFMAS) };
                    let text: Vec<_> = inner.way.iter().map(|i| slot(&i.text)).collect();
                    let line = (steps, text.join("\n") + "\n");
                    found.entry(function.name.clone()).or_default().push(line);
                }
            }
        }
        let known = RefCell::default();
        Self { loops: found, known }
    }

    /// For the kernel's smallest loop that computes at least `steps` steps: the steps that it computes, and its share.
    fn of(&self, kernel: &str, steps: usize) -> (usize, f64) {
        let sizes = &self.loops[kernel];
        let fits = sizes.iter().filter(|(size, _)| *size >= steps);
        let (size, text) = fits.min_by_key(|(size, _)| *size).expect("a tile holds its tokens");
        let mut known = self.known.borrow_mut();
        let share = known.entry((kernel.to_owned(), *size)).or_insert_with(|| share(text));
        (*size, *share)
    }
}

/// Replaces waits and branches by an instruction that takes one issue slot: llvm-mca would make a wait for LDS also
/// wait for loads from memory.
fn slot(text: &str) -> String {
    let alone = text.starts_with("s_waitcnt") || text.starts_with("s_cbranch") || text.starts_with("s_branch");
    String::from(if alone { "s_nop 0" } else { text })
}

fn share(text: &str) -> f64 {
    const ROUNDS: usize = 20;
    let program = std::env::var("LLVM_MCA").unwrap_or_else(|_| "llvm-mca-22".into());
    let mut child = Command::new(&program)
        .args([
            "-mtriple=amdgcn",
            &format!("-mcpu={ARCH}"),
            &format!("-iterations={ROUNDS}"),
        ])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap_or_else(|error| panic!("{program}: {error}; apt-get install llvm-22, or name one in LLVM_MCA"));
    let mut input = child.stdin.take().expect("piped");
    input.write_all(text.as_bytes()).expect("llvm-mca reads all");
    drop(input);
    let output = child.wait_with_output().expect("llvm-mca ends");
    let output = String::from_utf8_lossy(&output.stdout);
    let cycles = output
        .split("Total Cycles:")
        .nth(1)
        .and_then(|rest| rest.split_whitespace().next());
    let cycles: f64 = cycles.expect("llvm-mca takes the loop").parse().expect("a number");
    text.matches("v_mfma").count() as f64 * MFMA_SLOTS * ROUNDS as f64 / cycles
}

/// A matrix product of a step.
struct Timed {
    seconds: f64,
    /// What its bytes or its operations at the matrix cores' peak take, whichever is longer.
    least: f64,
    /// The share of the device's matrix core peak that it reaches, not counting padding.
    share: f64,
    kernel: String,
}

/// Seconds of a layer, and of the rest of a step.
struct Parts {
    layer: f64,
    rest: f64,
}

struct Model<'a> {
    config: &'a ModelConfig,
    target: Target,
    shares: &'a Shares,
}

impl Model<'_> {
    fn shape(&self, product: Product, rows: usize) -> GemmShape {
        let c = self.config;
        let queries = c.head_dim * c.n_attn_heads;
        let (n, groups, rows) = match product {
            Product::Qkv => (queries + 2 * c.head_dim * c.n_kv_heads, 1, rows),
            Product::AttnOut => (c.hidden_dim, 1, rows),
            Product::Mlp1 => (2 * c.intermediate_dim, c.n_experts, rows * c.experts_per_token),
            Product::Mlp2 => (c.hidden_dim, c.n_experts, rows * c.experts_per_token),
            Product::Greedy | Product::Logits => (c.vocab_size, 1, rows),
        };
        let kind = match product {
            Product::Mlp1 | Product::Mlp2 => Kind::Mxfp4,
            Product::Qkv => self.target.qkv_kind(c, false),
            _ => Kind::W16,
        };
        let row_blocks = self.target.packed(kind, n, c.hidden_dim).row_blocks;
        GemmShape {
            product,
            kind,
            format: Format::F16,
            terms: 1,
            rows,
            groups,
            n,
            row_blocks,
        }
    }

    /// `counts`: rows of each group (expert); `bucket`: the number of rows that the step's graph is captured for.
    fn product(&self, product: Product, bucket: usize, counts: &[usize]) -> Timed {
        let shape = self.shape(product, bucket);
        let Launch { kernel, blocks, .. } = self.target.gemm(&shape).expect("a kernel").launch;
        let sorts = match product {
            Product::Mlp1 => self.sort_mlp1(bucket),
            _ => None,
        };
        let kernel = sorts.unwrap_or(kernel);
        let (name, waves) = (kernel.name(), kernel.threads / WAVE);
        let spans = shape.row_blocks.div_ceil(waves);
        let tiles = |rows: usize| match kernel.spreads() {
            true => blocks / spans,
            false => rows.div_ceil(kernel.tokens),
        };
        let columns = match product {
            Product::AttnOut => self.config.head_dim * self.config.n_attn_heads,
            Product::Mlp2 => self.config.intermediate_dim,
            _ => self.config.hidden_dim,
        };
        let chunks = columns.div_ceil(64);
        let slots = (chunks * CHUNK_MFMAS) as f64 * MFMA_SLOTS * SLOT;
        let mut blocks = Vec::new();
        for &rows in counts.iter().filter(|&&rows| rows > 0) {
            let (steps, tiles) = (rows.div_ceil(TOKENS), tiles(rows));
            for _ in 0..spans {
                let sizes = (0..tiles).map(|tile| steps * (tile + 1) / tiles - steps * tile / tiles);
                let times = sizes.filter(|&steps| steps > 0).map(|steps| {
                    let (steps, share) = self.shares.of(&name, steps);
                    steps as f64 * slots / share * waves as f64 / SIMDS
                });
                match kernel.op {
                    Op::SortMlp1 => blocks.push(times.sum()),
                    _ => blocks.extend(times),
                }
            }
        }
        let crossing = self.product_bytes(&shape, columns, counts) as f64 / BYTES_A_SECOND;
        let seconds = last_end(&blocks, waves).max(crossing);
        let wanted = counts.iter().sum::<usize>() as f64 / TOKENS as f64 * shape.row_blocks as f64 * slots;
        let at_peak = wanted / (COMPUTE_UNITS as f64 * SIMDS);
        Timed {
            seconds,
            least: at_peak.max(crossing),
            share: at_peak / seconds,
            kernel: name,
        }
    }

    /// Bytes moved: weights of the groups that have rows, activations in and out.
    fn product_bytes(&self, shape: &GemmShape, columns: usize, counts: &[usize]) -> usize {
        let weights = self.target.packed(shape.kind, shape.n, columns).bytes;
        let out = match shape.product {
            Product::Qkv | Product::Logits => 4 * shape.n,
            Product::AttnOut => 2 * 4 * shape.n, // reads and writes the residual stream
            Product::Mlp1 => shape.n,            // gate and up become one value of two bytes
            Product::Mlp2 => 2 * shape.n,
            Product::Greedy => 0,
        };
        let groups = counts.iter().filter(|&&rows| rows > 0).count();
        groups * weights + counts.iter().sum::<usize>() * (2 * columns + out)
    }

    /// mlp1 of a step whose rows no other kernel sorts.
    fn sort_mlp1(&self, bucket: usize) -> Option<&'static Kernel> {
        let shape = self.shape(Product::Mlp1, bucket);
        self.target.sort_mlp1(&shape, bucket).map(|launch| launch.kernel)
    }

    /// Bytes that a row moves in a layer's other kernels.
    fn row_bytes(&self, bucket: usize) -> usize {
        let c = self.config;
        let (float, half) = (4 * c.hidden_dim, 2 * c.hidden_dim);
        let (queries, keys) = (c.head_dim * c.n_attn_heads, c.head_dim * c.n_kv_heads);
        let routed = c.experts_per_token * half;
        let norm_of_sum = float + routed + float + half;
        let rope_store = (4 + 2) * (queries + 2 * keys);
        let attention = (2 + 2) * queries;
        let norm = float + half + float;
        let route = float;
        let gather = match self.sort_mlp1(bucket) {
            Some(_) => 0,
            None => half + routed,
        };
        norm_of_sum + rope_store + attention + norm + route + gather
    }

    fn cache_bytes(&self) -> f64 {
        let c = self.config;
        let keys = (KEYS + KEYS.min(c.sliding_window)) as f64 / 2.0;
        keys * (2 * 2 * c.head_dim * c.n_kv_heads) as f64
    }

    fn counts(&self, rows: usize) -> Vec<usize> {
        let mut random = ChaCha8Rng::seed_from_u64(1);
        let mut counts = vec![0; self.config.n_experts];
        for _ in 0..rows {
            for expert in sample(&mut random, self.config.n_experts, self.config.experts_per_token) {
                counts[expert] += 1;
            }
        }
        counts
    }

    /// Launches of a layer, of the kernels that the host chooses.
    fn layer_launches(&self, bucket: usize) -> usize {
        let qkv = self.shape(Product::Qkv, bucket);
        let qkv = self.target.gemm(&qkv).expect("a kernel").launch.kernel;
        let qkv_and_rope = if qkv.op == Op::QkvStore { 1 } else { 2 };
        let fast = Numbers::new(Format::F16, false);
        let norm_and_route = match self
            .target
            .norm_route(self.config, &fast, Kind::Wire(Format::Bf16), bucket)
        {
            Some(_) => 1,
            None => 2,
        };
        let sort_and_gather = match self.sort_mlp1(bucket) {
            Some(_) => 0,
            None => match self.target.sort_gather(bucket, 1) {
                SortGatherLaunch::Together(_) => 1,
                SortGatherLaunch::Apart { .. } => 2,
            },
        };
        let norm_attention_and_out = 3;
        let experts = 2;
        norm_attention_and_out + qkv_and_rope + norm_and_route + sort_and_gather + experts
    }

    /// The times of a layer and of the rest of a step, and what both take at least.
    fn step(&self, bucket: usize, rows: usize) -> [Parts; 2] {
        let counts = self.counts(rows);
        let products = [
            (Product::Qkv, self.product(Product::Qkv, bucket, &[rows])),
            (Product::AttnOut, self.product(Product::AttnOut, bucket, &[rows])),
            (Product::Mlp1, self.product(Product::Mlp1, bucket, &counts)),
            (Product::Mlp2, self.product(Product::Mlp2, bucket, &counts)),
            (Product::Greedy, self.product(Product::Greedy, bucket, &[rows])),
        ];
        for (_, timed) in &products {
            let Timed {
                seconds, share, kernel, ..
            } = timed;
            println!(
                "    {kernel:<34} {:>8.0} us  {:>3.0} % of the peak",
                seconds * 1e6,
                share * 100.0
            );
        }
        let cache = rows as f64 * self.cache_bytes() / BYTES_A_SECOND;
        let other = (rows * self.row_bytes(bucket)) as f64 / BYTES_A_SECOND;
        println!(
            "    keys and values {:>27.0} us\n    other bytes {:>31.0} us",
            cache * 1e6,
            other * 1e6
        );
        let launches = self.layer_launches(bucket);
        println!("    {launches:>2} launches {:>29.0} us", launches as f64 * LAUNCH * 1e6);
        let parts = |seconds: fn(&Timed) -> f64, launch: f64| Parts {
            layer: products[..4].iter().map(|(_, timed)| seconds(timed)).sum::<f64>()
                + cache
                + other
                + launches as f64 * launch,
            rest: seconds(&products[4].1) + STEP_LAUNCHES as f64 * launch,
        };
        [parts(|timed| timed.seconds, LAUNCH), parts(|timed| timed.least, 0.0)]
    }
}

/// When the last block ends. Each block in order goes to the compute unit that has a free place first. Blocks on one
/// compute unit share its rate; a wave has at most a SIMD's.
fn last_end(blocks: &[f64], waves: usize) -> f64 {
    let places = WAVES_AT_ONCE / waves;
    let mut units = vec![(0.0, Vec::<f64>::new()); COMPUTE_UNITS];
    for &block in blocks {
        let free_at = |(now, running): &(f64, Vec<f64>)| match running.len() < places {
            true => *now,
            false => now + running.iter().copied().fold(f64::MAX, f64::min) * running.len() as f64,
        };
        let rank = |unit: &(f64, Vec<f64>)| (free_at(unit), unit.1.len());
        let next = units
            .iter_mut()
            .min_by(|a, b| rank(a).partial_cmp(&rank(b)).expect("times are numbers"));
        let (now, running) = next.expect("there are compute units");
        if running.len() == places {
            let least = running.iter().copied().fold(f64::MAX, f64::min);
            *now += least * running.len() as f64;
            running.iter_mut().for_each(|left| *left -= least);
            running.retain(|left| *left > 1e-12);
        }
        running.push(block);
    }
    let alone = SIMDS / waves as f64;
    let ends = units.iter().map(|(now, running)| {
        let longest = running.iter().copied().fold(0.0, f64::max);
        now + running.iter().sum::<f64>().max(longest * alone)
    });
    ends.fold(0.0, f64::max)
}

fn main() {
    if !CODE_OBJECTS.iter().any(|object| object.arch == ARCH) {
        println!("no code objects for {ARCH}: build with --features hip");
        return;
    }
    let shares = Shares::new();
    let target = Target {
        family: family::of(ARCH, |_| true).expect("a family has it"),
        multiprocessors: COMPUTE_UNITS,
    };
    let config = ModelConfig::preset_20b();
    let model = Model {
        config: &config,
        target,
        shares: &shares,
    };
    for rows in [1, 2, 4, 8, 16, 32, 64, 256, 890, 1024, 1536] {
        println!("20b, {rows} rows");
        let [step, least] = model
            .step(bucket(rows, usize::MAX), rows)
            .map(|parts| config.n_layers as f64 * parts.layer + parts.rest);
        println!(
            "    a step {:.1} ms: {:.0} tok/s a device; at least {:.1} ms",
            step * 1e3,
            rows as f64 / step,
            least * 1e3
        );
    }
    for (devices, most_rows) in [(2, 512), (2, 1024), (4, 1024), (8, 1024)] {
        print_group(devices, most_rows, target, &shares);
    }
}

/// The 120b on a group of devices, cut as the library cuts it. A step has as many rows as there is memory for, of sequences
/// of 32 + 992 tokens, which take half of what one of the model's length does; at most `most_rows`.
fn print_group(devices: usize, most_rows: usize, target: Target, shares: &Shares) {
    let config = ModelConfig::preset_120b();
    let memory = vec![DEVICE_MEMORY; devices];
    let cut = |rows: usize| {
        let options = Options {
            max_batch: Some(rows),
            ..Options::default()
        };
        let common = Common::new(&config, &options, Format::F16, devices);
        let demand = Demand {
            common: &common,
            target: &target,
        };
        demand.cut(&memory, (rows * devices).div_ceil(2), &options)
    };
    let sizes = (1..=most_rows / 16).rev().map(|n| 16 * n);
    let (rows, cut) = sizes
        .filter_map(|rows| Some((rows, cut(rows)?)))
        .next()
        .expect("the model fits");
    let layers: Vec<_> = cut.iter().map(|layers| layers.len()).collect();
    println!("120b on {devices} devices: layers {layers:?}, each a micro-batch of {rows} rows");
    let model = Model {
        config: &config,
        target,
        shares,
    };
    let hop = (4 * rows * config.hidden_dim) as f64 / LINK_BYTES_A_SECOND;
    let [slowest, least] = model.step(bucket(rows, usize::MAX), rows).map(|parts| {
        let stages = layers.iter().enumerate().map(|(stage, &layers)| {
            let is_last = stage + 1 == devices;
            layers as f64 * parts.layer + if is_last { parts.rest } else { hop }
        });
        stages.fold(0.0, f64::max)
    });
    let tokens_a_second = rows as f64 / slowest;
    println!(
        "    the slowest stage {:.1} ms: {tokens_a_second:.0} tok/s a group, {:.0} on eight devices; at least {:.1} ms",
        slowest * 1e3,
        tokens_a_second * 8.0 / devices as f64,
        least * 1e3
    );
}
