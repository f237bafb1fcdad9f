//! What the products' inner loops allow. A kernel multiplies one chunk a block with a sum so long that its epilogue,
//! its search for work and its first bytes do not count: what is left is copies, decoding and multiplications, as they
//! are in the engine. Each loop runs for two seconds: the last part is what the card sustains at its power cap. (After
//! half a second it still draws more than that.)
//!
//! From these rates follows what whole workloads could reach: products at their loops' rate with experts chosen evenly,
//! attention to prompts at the rate at which its products and exponentials run side by side, keys, values and the other
//! kernels' rows at the rate at which a loop of few tokens reads its weights, a launch for each kernel, one after the
//! other, and the requests' prompts at the rate of a large step. As many sequences run as have room in the memory
//! beside the weights: a run's beginning and end are not counted. With `--precision exact` all that is `exact`'s: its
//! loops multiply each term, and keys, values and outputs of experts are float32. With `--group N` the workloads are
//! those of a group of N devices like the first: as many steps at a time, each of an Nth of the sequences, pass through
//! stages that are equal.
//!
//! With `--whole` whole runs of the requests are played, too, their beginning and end included (`loops/whole.rs`).

mod rates;
mod whole;

use super::{Args, parameter};
use crate::workload::{AT_ONCE, WORKLOADS, Workload};
use getp::backend::gpu::args::{GemmArgs, MXFP4_SLAB_BYTES, SLAB, W16_SLAB_BYTES};
use getp::backend::gpu::catalogue::Elements;
use getp::backend::gpu::context::{Capture, Context};
use getp::backend::gpu::launch::Launch;
use getp::backend::gpu::layout::TypedPtr;
use getp::backend::gpu::memory::{DeviceBuffer, Event};
use getp::backend::gpu::peaks::{peak_args, peak_flops};
use getp::backend::gpu::shapes::{GemmShape, MatrixForm, Numbers, Product};
use getp::backend::gpu::stage::numbers;
use getp::config::ModelConfig;
use getp::options::Options;
use half::f16;
use rand::{Rng, RngCore, SeedableRng};
use rand_chacha::ChaCha8Rng;
use rates::DeviceRates;
use std::cell::RefCell;
use std::collections::HashMap;
use std::time::{Duration, Instant};
use whole::{ByLoops, Runs, Whole};

/// Slabs along K, some twenty times a model's.
const SLABS: usize = 1000;
/// Blocks that read the same tokens, as in the engine, and blocks that read the same weights of a layer's own matrices.
const SHARING: usize = 12;
const WARM_UP: Duration = Duration::from_millis(1600);
const TIMED: Duration = Duration::from_millis(400);
/// Rows of a step of prompts.
const PROMPT_ROWS: usize = 8192;
/// Of the kernel that measures attention's peak: some milliseconds.
const PEAK_ITERATIONS: i32 = 4000;
/// Operations a second of `exact`'s attention to prompts: those of the float64 matrix cores by the data sheet.
const EXACT_ATTENTION_FLOPS: f64 = 67e12;

#[derive(clap::Args)]
pub struct Part {
    /// Workloads; by default all but that of shared beginnings.
    names: Vec<String>,
    /// Numbers of requests instead of the workload's.
    #[arg(long, value_delimiter = ',')]
    requests: Vec<usize>,
    /// The most requests that run at once.
    #[arg(long, default_value_t = AT_ONCE)]
    at_once: usize,
    /// Play whole runs, too.
    #[arg(long)]
    whole: bool,
}

pub fn run(args: &Args, part: &Part) -> anyhow::Result<()> {
    let config = args.config();
    let options = args.options()?;
    let numbers = numbers(&options, Elements::F16);
    let measured = if args.group > 0 { 1 } else { usize::MAX };
    for driver in super::usable(&options)?.into_iter().take(measured) {
        let context = args.context(driver)?;
        let name = context.target.family.table().name;
        anyhow::ensure!(LOOPS.contains(&name), "{name} has no loops to measure");
        println!("{}, {}", context.name(), context.driver.device().name);
        let rng = ChaCha8Rng::seed_from_u64(1).into();
        Loops {
            context: &context,
            config: &config,
            numbers,
            options: &options,
            group: args.group.max(1),
            rng,
            measured: RefCell::default(),
        }
        .print(part)?;
    }
    Ok(())
}

/// Families whose kernels of products are known here.
const LOOPS: [&str; 2] = ["hopper", "ampere"];

const PRODUCTS: [Product; 5] = [
    Product::Qkv,
    Product::AttnOut,
    Product::Mlp1,
    Product::Mlp2,
    Product::Greedy,
];

fn is_of_experts(product: Product) -> bool {
    matches!(product, Product::Mlp1 | Product::Mlp2)
}

/// Bytes of a slab of 64 weight rows.
fn block_bytes(product: Product) -> usize {
    let of_row = if is_of_experts(product) {
        MXFP4_SLAB_BYTES
    } else {
        W16_SLAB_BYTES
    };
    64 * of_row
}

/// Of the memory beside the weights, what the KV cache has.
const OF_KV_CACHE: f64 = 0.95;

/// A workload while it has as many sequences as it can.
struct Steady {
    name: &'static str,
    /// Rows of a step of decoding sequences; 0 if prompts are all there is.
    rows: usize,
    /// Keys that such a row attends to in a full layer, on average over the answers.
    keys: f64,
    /// Rows of prompts for each of them.
    prompts: f64,
    /// Keys that a row of prompts attends to.
    prompt_keys: f64,
}

impl Steady {
    /// `room`: how many sequences of so many positions have room in a step, of which so many pass through a group.
    fn of(workload: &Workload, at_once: usize, steps: usize, room: impl Fn(f64) -> usize) -> anyhow::Result<Self> {
        let lengths = workload.lengths(1)?;
        let sum = |of: &dyn Fn(f64, f64) -> f64| -> f64 {
            lengths.iter().map(|one| of(one.prompt as f64, one.output as f64)).sum()
        };
        let (prompts, outputs) = (sum(&|prompt, _| prompt), sum(&|_, output| output));
        let keys = sum(&|prompt, output| output * (prompt + output / 2.0)) / outputs;
        Ok(Self {
            name: workload.name,
            rows: match workload.output {
                1 => 0,
                _ => (lengths.len() / steps).min(at_once).min(room(keys)),
            },
            keys,
            prompts: prompts / outputs,
            prompt_keys: sum(&|prompt, _| prompt * prompt / 2.0) / prompts,
        })
    }
}

/// A loop's time for a block of 64 weight rows, a slab and a tile of tokens, all multiprocessors together; and the
/// tiles of an expert, or of a layer's own matrix.
struct Rate {
    seconds: f64,
    tiles: usize,
}

/// Blocks that run at once, and the units of 16 weight rows of each.
struct Blocks {
    at_once: usize,
    units: usize,
}

struct Loops<'a> {
    context: &'a Context,
    config: &'a ModelConfig,
    numbers: Numbers,
    options: &'a Options,
    /// Devices of a replica.
    group: usize,
    rng: RefCell<ChaCha8Rng>,
    /// Seconds that loops have been measured to take, see [`Rate`]; by their kernels, tokens of a tile, and tiles.
    measured: RefCell<HashMap<(String, usize, usize), f64>>,
}

impl Loops<'_> {
    fn print(&self, part: &Part) -> anyhow::Result<()> {
        println!(
            "{:<16}{:>6}{:>32}{:>11}{:>9}{:>11}{:>9}",
            "", "rows", "kernel", "TFLOP/s", "TB/s", "sustained", "TB/s"
        );
        let bytes_per_s = block_bytes(Product::Greedy) as f64 / self.rate(Product::Greedy, 1)?.seconds;
        let rates = DeviceRates {
            config: self.config,
            target: &self.context.target,
            numbers: self.numbers,
            bytes_per_s,
            attention_flops_per_s: self.attention()?,
            launch_s: self.launch()?,
        };
        println!(
            "reads {:.2} TB/s, attention to prompts {:.0} TFLOP/s, a launch {:.2} us; us a layer:",
            rates.bytes_per_s * 1e-12,
            rates.attention_flops_per_s * 1e-12,
            rates.launch_s * 1e6
        );
        let of_prompts = self.others(PROMPT_ROWS, &rates)?;
        let room = self.room(&rates)?;
        let mut allowed = Vec::new();
        let is_wanted = |name: &str| part.names.is_empty() || part.names.iter().any(|wanted| wanted == name);
        // Prompts with shared beginnings are not all computed.
        let workloads = WORKLOADS.iter().filter(|workload| workload.shared == 0);
        let wanted = workloads.filter(|workload| is_wanted(workload.name));
        let wanted: Vec<_> = wanted.flat_map(|workload| workload.with(&part.requests)).collect();
        for workload in &wanted {
            let steady = Steady::of(workload, part.at_once, self.group, &room)?;
            let keys = PROMPT_ROWS as f64 * self.keys(steady.prompt_keys);
            let prompt = of_prompts + rates.prompts_attention(keys);
            let prompt = self.config.n_layers as f64 * prompt / PROMPT_ROWS as f64;
            allowed.push(match steady.rows {
                0 => (steady.name, 0, 1.0 / prompt),
                rows => {
                    let row = self.seconds(&steady, &rates)? / rows as f64;
                    (steady.name, rows, 1.0 / (row + steady.prompts * prompt))
                }
            });
        }
        println!(
            "allowed while rows as many as have room are there, tokens/s (those of prompts where there are no others)"
        );
        for (name, rows, rate) in allowed {
            println!("{name:<4}{rows:>6} rows a step{:>10.0}", rate * self.group as f64);
        }
        if part.whole {
            self.print_whole(&wanted, part.at_once, &rates)?;
        }
        Ok(())
    }

    /// Plays whole runs, and prints them behind what is measured for them.
    fn print_whole(&self, workloads: &[Workload], at_once: usize, rates: &DeviceRates<'_>) -> anyhow::Result<()> {
        let product = |product, rows| self.product(product, rows);
        let whole = Whole {
            costs: ByLoops::new(rates, &product),
            options: self.options,
            memory: self.context.driver.memory()?,
            devices: self.group,
        };
        let play = |&workload: &Workload| whole.play(workload, at_once);
        let played: Vec<_> = workloads.iter().map(play).collect::<anyhow::Result<_>>()?;
        println!("whole runs, tokens/s (of prompts alone, theirs, too)");
        played.iter().for_each(Runs::print);
        Ok(())
    }

    /// How many sequences of so many positions a step has room for, beside the weights.
    fn room(&self, rates: &DeviceRates<'_>) -> anyhow::Result<impl Fn(f64) -> usize> {
        let c = self.config;
        let weights = |product| {
            let (groups, n, k) = self.shape(product);
            (groups * n.div_ceil(64) * k.div_ceil(SLAB) * block_bytes(product)) as f64
        };
        let [qkv, attn_out, mlp1, mlp2, unembedding] = PRODUCTS.map(weights);
        // The embedding has as many bytes as the unembedding.
        let weights = c.n_layers as f64 * (qkv + attn_out + mlp1 + mlp2) + 2.0 * unembedding;
        // A group's steps share the memory of all, and each device has its part of the weights.
        let bytes = OF_KV_CACHE * (self.context.driver.memory()?.free as f64 - weights / self.group as f64);
        // Every other layer has a window.
        let key_bytes = c.n_layers as f64 / 2.0 * rates.kv_bytes();
        let window = c.sliding_window as f64;
        Ok(move |positions: f64| (bytes / key_bytes / (positions + window)) as usize)
    }

    /// Keys of a layer on average, of which every other one has a window.
    fn keys(&self, full: f64) -> f64 {
        (full + full.min(self.config.sliding_window as f64)) / 2.0
    }

    /// Seconds that a step of decoding sequences takes at least.
    fn seconds(&self, steady: &Steady, rates: &DeviceRates<'_>) -> anyhow::Result<f64> {
        let attention = rates.reading(steady.rows as f64 * self.keys(steady.keys));
        let unembedding = self.product(Product::Greedy, steady.rows)?;
        println!(
            "{}: of these {:.0} keys: attention {:.1}; unembedding {:.0}",
            steady.name,
            steady.keys,
            attention * 1e6,
            unembedding * 1e6
        );
        let layer = self.others(steady.rows, rates)? + attention;
        Ok(self.config.n_layers as f64 * layer + unembedding)
    }

    /// Seconds that a product takes at least.
    fn product(&self, product: Product, rows: usize) -> anyhow::Result<f64> {
        let rate = self.rate(product, rows)?;
        Ok(rate.seconds * rate.tiles as f64 * self.blocks(product, rows))
    }

    /// Seconds that a layer takes at least, but for its attention.
    fn others(&self, rows: usize, rates: &DeviceRates<'_>) -> anyhow::Result<f64> {
        let qkv = self.product(Product::Qkv, rows)?;
        let attn_out = self.product(Product::AttnOut, rows)?;
        let mlp1 = self.product(Product::Mlp1, rows)?;
        let mlp2 = self.product(Product::Mlp2, rows)?;
        let others = rates.other_rows(rows);
        let launches = rates.launches(rows);
        println!(
            "{rows} rows: experts {:.1}, qkv and attn_out {:.1}, other kernels' rows {:.1}, launches {:.1}",
            (mlp1 + mlp2) * 1e6,
            (qkv + attn_out) * 1e6,
            others * 1e6,
            launches * 1e6,
        );
        Ok(qkv + attn_out + mlp1 + mlp2 + others + launches)
    }

    /// Groups, and outputs and inputs of a product.
    fn shape(&self, product: Product) -> (usize, usize, usize) {
        let c = self.config;
        match product {
            Product::Qkv => (1, c.qkv_dim(), c.hidden_dim),
            Product::AttnOut => (1, c.hidden_dim, c.q_dim()),
            Product::Mlp1 => (c.n_experts, 2 * c.intermediate_dim, c.hidden_dim),
            Product::Mlp2 => (c.n_experts, c.hidden_dim, c.intermediate_dim),
            Product::Greedy | Product::Logits => (1, c.vocab_size, c.hidden_dim),
        }
    }

    /// Blocks of 64 weight rows times slabs, of the groups that some of the rows choose.
    fn blocks(&self, product: Product, rows: usize) -> f64 {
        let (groups, n, k) = self.shape(product);
        let (groups, chosen) = (groups as f64, self.config.experts_per_token as f64);
        let read = match product {
            Product::Mlp1 | Product::Mlp2 => groups * (1.0 - (1.0 - chosen / groups).powi(rows as i32)),
            _ => 1.0,
        };
        read * n as f64 / 64.0 * k as f64 / SLAB as f64
    }

    fn is_hopper(&self) -> bool {
        self.context.target.family.table().name == "hopper"
    }

    /// The blocks of a kernel that run at once on all multiprocessors.
    fn at_once(&self, launch: &Launch) -> anyhow::Result<Blocks> {
        let kernel = launch.kernel;
        let one_each = |units| Blocks {
            at_once: self.context.target.multiprocessors,
            units,
        };
        let rows = kernel.cut.rows;
        match (self.is_hopper(), parameter::number(kernel, "BLOCKS")) {
            (true, _) if rows > 0 => Ok(one_each(rows.next_multiple_of(64) / 16)),
            (false, Some(blocks)) => Ok(Blocks {
                at_once: blocks * self.context.target.multiprocessors,
                units: rows / 16,
            }),
            _ => anyhow::bail!("{} is no product of a tile", kernel.name()),
        }
    }

    fn rate(&self, product: Product, rows: usize) -> anyhow::Result<Rate> {
        let experts = is_of_experts(product);
        let (groups, n, _) = self.shape(product);
        let all = if experts {
            rows * self.config.experts_per_token
        } else {
            rows
        };
        let form = if experts { MatrixForm::Mxfp4 } else { MatrixForm::W16 };
        let shape = GemmShape {
            product,
            form,
            elements: self.numbers.elements,
            terms: self.numbers.terms,
            rows: all,
            groups,
            n,
            row_blocks: n.div_ceil(64),
        };
        let mut launch = self.context.target.gemm(&shape)?.launch;
        let Blocks { at_once: blocks, units } = self.at_once(&launch)?;
        let tokens = launch.kernel.tokens;
        let of_group = all.div_ceil(groups);
        let tiles = of_group.div_ceil(tokens);
        let share = match tiles {
            1 => of_group,
            _ => of_group.div_ceil(tiles).next_multiple_of(8),
        };
        let key = (launch.kernel.name(), share, tiles);
        if let Some(&seconds) = self.measured.borrow().get(&key) {
            return Ok(Rate { seconds, tiles });
        }
        // Weights that `columns` tiles share, or groups of a tile each.
        let columns = match (experts, tiles) {
            (false, 1) => 1,
            (false, _) if product == Product::Greedy => tiles,
            _ => blocks / SHARING,
        };
        let row_blocks = (blocks / columns * units).div_ceil(4);
        let blocks = columns * (4 * row_blocks).div_ceil(units);
        if !self.is_hopper() {
            launch.blocks = blocks;
        }
        let matrices = if experts { columns } else { 1 };
        let tiles_rows = if experts { share } else { share * columns };
        let block_bytes = block_bytes(product);
        let weight_bytes = matrices * SLABS * row_blocks * block_bytes;
        let n = row_blocks * 64;
        let stream = &self.context.stream;
        let weights = self.random(weight_bytes, block_bytes, experts)?;
        let in_rows = (tiles_rows + 256).next_multiple_of(8);
        let term = in_rows * SLAB * SLABS;
        let input = self.random(2 * term * self.numbers.terms, 8192, false)?;
        let bias = DeviceBuffer::<f32>::zeroed(stream, matrices * n)?;
        let out = DeviceBuffer::<f32>::zeroed(stream, in_rows * n.max(2 * blocks))?;
        let group_rows = if experts {
            vec![share as i32; matrices]
        } else {
            vec![tiles_rows as i32]
        };
        let (counts, zeros) = (
            DeviceBuffer::of(stream, &group_rows)?,
            DeviceBuffer::of(stream, &vec![0_i32; matrices])?,
        );
        let args = GemmArgs {
            weights: weights.values(),
            bias: bias.values(),
            input: TypedPtr::new(input.at()),
            in_term: term as i64,
            rows: counts.values(),
            offsets: zeros.values().only_if(experts),
            out: out.values(),
            tiled: TypedPtr::new(out.at()),
            tiled_term: 0,
            y: TypedPtr::new(out.at()),
            best: out.values(),
            best_index: TypedPtr::new(out.at().add(4 * in_rows * blocks)),
            groups: matrices as i32,
            n: n as i32,
            k_blocks: SLABS as i32,
            row_blocks: row_blocks as i32,
            in_rows: in_rows as i32,
            tiled_rows: in_rows as i32,
            best_rows: in_rows as i32,
            scale: 1.0,
            limit: self.config.swiglu_limit,
            format: self.numbers.elements.into(),
            cols: 0,
            weight_format: 0,
            terms: self.numbers.terms as i16,
            half: 0,
            picked: 0,
            picks: TypedPtr::NULL,
            slot_rows: TypedPtr::NULL,
            cuts: TypedPtr::NULL,
        };
        // SAFETY: all memory has the sizes that the arguments say, and lives until the stream has been waited for.
        let [short, long] = self.time(|| Ok(unsafe { self.context.launch(launch, &args) }?))?;
        let chunks = (columns * row_blocks * SLABS) as f64;
        let flops = chunks * 2.0 * 64.0 * SLAB as f64 * (share * self.numbers.terms) as f64;
        println!(
            "{:<16}{rows:>6}{:>32}{:>11.0}{:>9.2}{:>11.0}{:>9.2}",
            format!("{product:?} {share} x {tiles}"),
            launch.kernel.name(),
            flops / short * 1e-12,
            weight_bytes as f64 / short * 1e-12,
            flops / long * 1e-12,
            weight_bytes as f64 / long * 1e-12
        );
        let seconds = long / chunks;
        self.measured.borrow_mut().insert(key, seconds);
        Ok(Rate { seconds, tiles })
    }

    /// Seconds of a launch by itself, and of one of many on end.
    fn time(&self, launch: impl Fn() -> anyhow::Result<()>) -> anyhow::Result<[f64; 2]> {
        let context = self.context;
        let run = |times: usize| -> anyhow::Result<f64> {
            let (start, end) = (Event::new(&context.driver, true)?, Event::new(&context.driver, true)?);
            start.record(&context.stream)?;
            (0..times).try_for_each(|_| launch())?;
            end.record(&context.stream)?;
            end.synchronize()?;
            Ok(end.since_us(&start)? * 1e-6 / times as f64)
        };
        run(1)?;
        std::thread::sleep(Duration::from_millis(50));
        let short = run(1)?;
        let begin = Instant::now();
        let many = (TIMED.as_secs_f64() / short).ceil() as usize;
        while begin.elapsed() < WARM_UP {
            run(many)?;
        }
        Ok([short, run(many)?])
    }

    /// Operations a second of attention to prompts.
    fn attention(&self) -> anyhow::Result<f64> {
        if self.numbers.exact {
            return Ok(EXACT_ATTENTION_FLOPS);
        }
        let launch = self.context.target.attention_peak();
        let launch = launch.ok_or_else(|| anyhow::anyhow!("no kernel measures attention's peak"))?;
        let args = peak_args(PEAK_ITERATIONS);
        // SAFETY: the kernel writes nothing.
        let [_, long] = self.time(|| Ok(unsafe { self.context.launch(launch, &args) }?))?;
        Ok(peak_flops(launch, &args) / long)
    }

    /// Seconds that a kernel that does nothing adds to a graph.
    fn launch(&self) -> anyhow::Result<f64> {
        let context = self.context;
        let kernel = context.target.matrix_peak();
        let kernel = kernel.ok_or_else(|| anyhow::anyhow!("no kernel measures the matrix cores' peak"))?;
        let args = peak_args(0);
        let launches = 200;
        // SAFETY: the kernel reads and writes nothing.
        let queue = || (0..launches).try_for_each(|_| unsafe { context.launch(kernel, &args) });
        let Capture::Graph(graph) = context.capture(queue)? else {
            anyhow::bail!("no graph could be captured");
        };
        // SAFETY: as above.
        let [_, long] = self.time(|| Ok(unsafe { graph.launch(&context.stream) }?))?;
        Ok(long / launches as f64)
    }

    /// Device memory of random content, which repeats after some megabytes: MXFP4 codes with scales around one, or FP16
    /// of deviation one.
    fn random(&self, bytes: usize, unit: usize, codes: bool) -> anyhow::Result<DeviceBuffer<u8>> {
        let mut rng = self.rng.borrow_mut();
        let length = (16 << 20) / unit * unit;
        let mut first = vec![0_u8; length.min(bytes.next_multiple_of(unit))];
        for block in first.chunks_exact_mut(unit) {
            if codes {
                rng.fill_bytes(block);
                // The high byte of FP16's 2^6 or 2^7.
                let scales = unit - unit / 17;
                block[scales..]
                    .iter_mut()
                    .for_each(|byte| *byte = if *byte & 1 == 0 { 0x54 } else { 0x58 });
            } else {
                for value in block.chunks_exact_mut(2) {
                    let sum: f32 = (0..4).map(|_| rng.random::<f32>() - 0.5).sum();
                    value.copy_from_slice(&f16::from_f32(sum * 1.7).to_le_bytes());
                }
            }
        }
        let stream = &self.context.stream;
        let all = DeviceBuffer::<u8>::new(&stream.driver, bytes.next_multiple_of(unit))?;
        let source = DeviceBuffer::of(stream, &first)?;
        for at in (0..all.bytes()).step_by(first.len()) {
            let n = first.len().min(all.bytes() - at);
            // SAFETY: both ranges are within their buffers, which live until the stream has been waited for.
            unsafe { stream.driver.copy(all.at().add(at), source.at(), n, stream.handle) }?;
        }
        stream.synchronize()?;
        Ok(all)
    }
}
