//! What the products' inner loops allow. A kernel multiplies one chunk a block with a sum so long that its epilogue,
//! its search for work and its first bytes do not count: what is left is copies, decoding and multiplications, as they
//! are in the engine. Each loop runs for two seconds: the last part is what the card sustains at its power cap. (After
//! half a second it still draws more than that.)
//!
//! From these rates follows what whole workloads could reach: products at their loops' rate with experts chosen evenly,
//! attention to prompts at the rate at which its products and exponentials run side by side, keys, values and the other
//! kernels' rows at the rate at which a loop of few tokens reads its weights, a launch for each kernel, one after the
//! other, and the requests' prompts at the rate of a large step. With `--precision exact`
//! all that is `exact`'s: its loops multiply each term, and keys, values and outputs of experts are float32.

use super::Args;
use getp::backend::gpu::args::{GemmArgs, MXFP4_SLAB_BYTES, PEAK_FLOPS, PeakArgs, SLAB, W16_SLAB_BYTES};
use getp::backend::gpu::catalogue::Elements;
use getp::backend::gpu::context::{Capture, Context};
use getp::backend::gpu::layout::TypedPtr;
use getp::backend::gpu::memory::{DeviceBuffer, Event};
use getp::backend::gpu::shapes::{GemmShape, MatrixForm, Numbers, Product};
use getp::backend::gpu::stage::numbers;
use getp::config::ModelConfig;
use half::f16;
use rand::{Rng, RngCore, SeedableRng};
use rand_chacha::ChaCha8Rng;
use std::cell::RefCell;
use std::time::{Duration, Instant};

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

pub fn run(args: &Args) -> anyhow::Result<()> {
    let config = args.config();
    let options = args.options()?;
    let numbers = numbers(&options, Elements::F16);
    for driver in super::usable(&options)? {
        let context = args.context(driver)?;
        anyhow::ensure!(
            context.target.family.table().name == "hopper",
            "{} has no loops to measure",
            context.name()
        );
        println!("{}, {}", context.name(), context.driver.device().name);
        let rng = ChaCha8Rng::seed_from_u64(1).into();
        Loops {
            context: &context,
            config: &config,
            numbers,
            rng,
        }
        .print()?;
    }
    Ok(())
}

const PRODUCTS: [Product; 5] = [
    Product::Qkv,
    Product::AttnOut,
    Product::Mlp1,
    Product::Mlp2,
    Product::Greedy,
];

/// A held of step.
struct Step {
    rows: usize,
    /// Keys that a row of a full layer attends to, on average.
    keys: f64,
    /// Kernels of a layer.
    launches: f64,
    /// Rows of prompts for each of its rows, over the workload.
    prompts: f64,
}

/// Those of W1, W2, W3, prompts of 1,024, and W4.
const STEPS: [Step; 5] = [
    step(32, 528.0, 9.0, 32.0 / 992.0),
    step(890, 528.0, 10.0, 32.0 / 992.0),
    step(256, 1536.0, 10.0, 1.0),
    step(PROMPT_ROWS, 512.0, 11.0, 0.0),
    step(1, 160.0, 7.0, 32.0 / 256.0),
];

const fn step(rows: usize, keys: f64, launches: f64, prompts: f64) -> Step {
    Step {
        rows,
        keys,
        launches,
        prompts,
    }
}

/// What memory, prompts' attention and launches allow.
struct Floor {
    bytes_per_s: f64,
    attention_flops_per_s: f64,
    launch_s: f64,
}

/// A loop's time for a block of 64 weight rows, a slab and a tile of tokens, all multiprocessors together; and the
/// tiles of an expert, or of a layer's own matrix.
struct Rate {
    seconds: f64,
    tiles: usize,
}

struct Loops<'a> {
    context: &'a Context,
    config: &'a ModelConfig,
    numbers: Numbers,
    rng: RefCell<ChaCha8Rng>,
}

impl Loops<'_> {
    fn print(&self) -> anyhow::Result<()> {
        println!(
            "{:<16}{:>6}{:>32}{:>11}{:>9}{:>11}{:>9}",
            "", "rows", "kernel", "TFLOP/s", "TB/s", "sustained", "TB/s"
        );
        let bytes_per_s = 64.0 * W16_SLAB_BYTES as f64 / self.rate(Product::Greedy, 1)?.seconds;
        let floor = Floor {
            bytes_per_s,
            attention_flops_per_s: self.attention()?,
            launch_s: self.launch()?,
        };
        println!(
            "reads {:.2} TB/s, attention to prompts {:.0} TFLOP/s, a launch {:.2} us; us a layer:",
            floor.bytes_per_s * 1e-12,
            floor.attention_flops_per_s * 1e-12,
            floor.launch_s * 1e6
        );
        let rows = STEPS
            .iter()
            .map(|step| Ok(self.seconds(step, &floor)? / step.rows as f64));
        let rows = rows.collect::<anyhow::Result<Vec<_>>>()?;
        let of_prompts = STEPS.iter().position(|step| step.rows == PROMPT_ROWS);
        let prompt = rows[of_prompts.expect("a step of prompts")];
        println!("allowed, tokens/s");
        for ((name, step), row) in ["W1", "W2", "W3", "W3p", "W4"].into_iter().zip(STEPS).zip(rows) {
            println!("{name:<3}{:>10.0}", 1.0 / (row + step.prompts * prompt));
        }
        Ok(())
    }

    /// Seconds that a step takes at least.
    fn seconds(&self, step: &Step, floor: &Floor) -> anyhow::Result<f64> {
        let (c, rows, prompts) = (self.config, step.rows as f64, step.rows == PROMPT_ROWS);
        let mut products = [0.0; 5];
        for (seconds, product) in products.iter_mut().zip(PRODUCTS) {
            // A step of prompts wants the logits of a few rows alone.
            if !(prompts && product == Product::Greedy) {
                let rate = self.rate(product, step.rows)?;
                *seconds = rate.seconds * rate.tiles as f64 * self.blocks(product, step.rows);
            }
        }
        let [qkv, attn_out, mlp1, mlp2, unembedding] = products;
        // Every other layer has a window.
        let keys = (step.keys + step.keys.min(c.sliding_window as f64)) / 2.0;
        let key_bytes = if self.numbers.exact { 8.0 } else { 4.0 };
        let attention = if prompts {
            rows * keys * 4.0 * c.q_dim() as f64 / floor.attention_flops_per_s
        } else {
            rows * keys * key_bytes * (c.n_kv_heads * c.head_dim) as f64 / floor.bytes_per_s
        };
        // Norms read the stream, four 16-bit outputs and write both; queries, keys and values are read in float32 and
        // written in 16 bits; a row is copied for four experts. In `exact` outputs, keys and values are float32, rows
        // have two terms, and the router reads float32 rows.
        let (stream_bytes, qkv_bytes) = if self.numbers.exact { (64, 8) } else { (34, 6) };
        let others = rows * (stream_bytes * c.hidden_dim + qkv_bytes * c.qkv_dim()) as f64 / floor.bytes_per_s;
        // With many rows `exact` has no kernel that norms and routes.
        let separate = self.numbers.exact && step.rows > self.context.target.multiprocessors;
        let launches = (step.launches + f64::from(separate)) * floor.launch_s;
        let layer = qkv + attn_out + mlp1 + mlp2 + attention + others + launches;
        println!(
            "{} rows of {} keys: {:.1}; experts {:.1}, qkv and attn_out {:.1}, attention {:.1}, other kernels' rows {:.1}, \
             launches {:.1}; unembedding {:.0}",
            step.rows,
            step.keys,
            layer * 1e6,
            (mlp1 + mlp2) * 1e6,
            (qkv + attn_out) * 1e6,
            attention * 1e6,
            others * 1e6,
            launches * 1e6,
            unembedding * 1e6
        );
        Ok(c.n_layers as f64 * layer + unembedding)
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

    fn rate(&self, product: Product, rows: usize) -> anyhow::Result<Rate> {
        let experts = matches!(product, Product::Mlp1 | Product::Mlp2);
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
        let launch = self.context.target.gemm(&shape)?.launch;
        let parameter = |name| launch.kernel.parameter(name);
        // In row blocks, of which units are quarters.
        let chunk = match (parameter("BLOCKS"), parameter("UNITS")) {
            (Some(blocks), _) => (launch.kernel.threads / 128 - 1) * blocks,
            (_, Some(units)) => units.div_ceil(4),
            _ => anyhow::bail!("{} is no product of a tile", launch.kernel.name()),
        };
        let tokens = launch.kernel.tokens;
        let of_group = all.div_ceil(groups);
        let tiles = of_group.div_ceil(tokens);
        let share = match tiles {
            1 => of_group,
            _ => of_group.div_ceil(tiles).next_multiple_of(8),
        };
        let blocks = self.context.target.multiprocessors;
        // Weights that `columns` tiles share, or groups of a tile each.
        let columns = match (experts, tiles) {
            (false, 1) => 1,
            (false, _) if product == Product::Greedy => tiles,
            _ => blocks / SHARING,
        };
        let row_blocks = blocks / columns * chunk;
        let matrices = if experts { columns } else { 1 };
        let tiles_rows = if experts { share } else { share * columns };
        let unit_bytes = 64 * if experts { MXFP4_SLAB_BYTES } else { W16_SLAB_BYTES };
        let weight_bytes = matrices * SLABS * row_blocks * unit_bytes;
        let n = row_blocks * 64;
        let stream = &self.context.stream;
        let weights = self.random(weight_bytes, unit_bytes, experts)?;
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
        };
        // SAFETY: all memory has the sizes that the arguments say, and lives until the stream has been waited for.
        let [short, long] = self.time(|| Ok(unsafe { self.context.launch(launch, &args) }?))?;
        let chunks = (blocks / columns * columns * chunk * SLABS) as f64;
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
        Ok(Rate {
            seconds: long / chunks,
            tiles,
        })
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
        let never = DeviceBuffer::<u8>::zeroed(&self.context.stream, 1)?;
        let args = PeakArgs {
            out: TypedPtr::new(never.at()),
            iterations: PEAK_ITERATIONS,
            never: 0,
        };
        // SAFETY: the kernel writes nothing.
        let [_, long] = self.time(|| Ok(unsafe { self.context.launch(launch, &args) }?))?;
        Ok(launch.blocks as f64 * f64::from(PEAK_ITERATIONS) * PEAK_FLOPS as f64 / long)
    }

    /// Seconds that a kernel that does nothing adds to a graph.
    fn launch(&self) -> anyhow::Result<f64> {
        let context = self.context;
        let kernel = context.target.matrix_peak();
        let kernel = kernel.ok_or_else(|| anyhow::anyhow!("no kernel measures the matrix cores' peak"))?;
        let never = DeviceBuffer::<u8>::zeroed(&context.stream, 1)?;
        let args = PeakArgs {
            out: TypedPtr::new(never.at()),
            iterations: 0,
            never: 0,
        };
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
