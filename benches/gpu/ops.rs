//! Times every kernel of a step by events on the device, at the real shapes and over batch sizes. Also times whole
//! steps as `inference` queues them: as one graph, where kernels overlap.

use super::plans::{decoding, drawing};
use getp::backend::gpu::replica::GpuReplica;
use getp::batch::{Draw, RowScore, StepOutput, StepPlan, Want};
use getp::options::Options;
use getp::profile::{Cost, LimitedBy, OPERATIONS, Operation, OperationTotal, Roofline, Spread};
use getp::replica::Replica;
use std::time::Instant;

#[derive(clap::Args)]
pub struct Args {
    /// Rows of a step, each a decoding sequence.
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "1,2,4,8,16,32,64,128,256,512,890,1024,1536,2048"
    )]
    rows: Vec<usize>,
    /// Positions before the current one in each sequence.
    #[arg(long, default_value_t = 528)]
    context: usize,
    /// Of these so many are in blocks that all sequences share.
    #[arg(long, default_value_t = 0)]
    shared: usize,
    /// Steps timed for each batch size, after one warm-up step.
    #[arg(long, default_value_t = 5)]
    repeats: usize,
    /// 0 is greedy; otherwise the device samples.
    #[arg(long, default_value_t = 0.0)]
    temperature: f32,
    /// Top-p; with 1 all tokens can be sampled.
    #[arg(long, default_value_t = 0.9)]
    topp: f32,
    /// Rows are scored, with so many of the most probable tokens.
    #[arg(long)]
    logprobs: Option<usize>,
}

impl Args {
    fn draw(&self) -> Draw {
        Draw {
            temperature: self.temperature,
            topp: self.topp,
            coin: 0.5,
        }
    }
}

/// Two layers, one with a sliding window and one without. Their weights are far larger than any cache.
const LAYERS: usize = 2;
/// Steps timed as graphs for each step that is timed kernel by kernel, since they are far shorter.
const GRAPH_STEPS: usize = 10;

pub fn run(args: &super::Args, part: &Args) -> anyhow::Result<()> {
    let mut config = args.config();
    config.n_layers = LAYERS;
    // The KV cache is made for sequences of this length.
    config.seq_len = config.seq_len.max(part.context + 1);
    let most = part.rows.iter().copied().max().unwrap_or(1);
    let options = |profile| {
        anyhow::Ok(Options {
            max_batch: Some(most),
            step_tokens: Some(most),
            profile,
            ..args.options()?
        })
    };
    // One replica after the other: both together would share the memory.
    let mut timed = args.replicas(&config, &options(true)?)?.swap_remove(0);
    println!(
        "{}; {} positions behind each row, {} of them shared; {LAYERS} layers and the unembedding",
        timed.describe(),
        part.context,
        part.shared
    );
    let operations: Vec<_> = part
        .rows
        .iter()
        .map(|&rows| OperationTimes::time(&mut *timed, rows, part))
        .collect::<Result<_, _>>()?;
    let roofline = timed.profile().and_then(|profile| profile.roofline);
    drop(timed);
    let mut queued = args.replicas(&config, &options(false)?)?.swap_remove(0);
    let graphs: Vec<_> = part
        .rows
        .iter()
        .map(|&rows| graph_us(&mut *queued, rows, part))
        .collect::<Result<_, _>>()?;
    print(&part.rows, &operations, &graphs, roofline);
    Ok(())
}

/// Times of steps of one batch size, kernel by kernel.
struct OperationTimes {
    /// In the order of [`OPERATIONS`].
    totals: Vec<OperationTotal>,
    steps: usize,
    /// The rows of the busiest expert, divided by the mean.
    busiest: f64,
}

impl OperationTimes {
    fn time(replica: &mut dyn Replica, rows: usize, part: &Args) -> anyhow::Result<Self> {
        let plan = plan(replica, rows, part)?;
        let mut output = StepOutput::default();
        step(replica, &plan, &mut output, Want::Tokens)?;
        let before = totals(replica);
        let steps = part.repeats.max(1);
        for _ in 0..steps {
            step(replica, &plan, &mut output, Want::Tokens)?;
        }
        let totals = totals(replica)
            .into_iter()
            .zip(&before)
            .map(|(after, before)| OperationTotal {
                calls: after.calls - before.calls,
                time: after.time - before.time,
                cost: Cost {
                    bytes: after.cost.bytes - before.cost.bytes,
                    flops: after.cost.flops - before.cost.flops,
                },
            });
        let mut spread = Spread::default();
        if let Some(device) = GpuReplica::of(replica) {
            spread.add(&device.expert_rows()?);
        }
        Ok(Self {
            totals: totals.collect(),
            steps,
            busiest: spread.busiest(),
        })
    }

    fn seconds(&self) -> f64 {
        self.totals.iter().map(|total| total.time.as_secs_f64()).sum()
    }
}

fn totals(replica: &dyn Replica) -> Vec<OperationTotal> {
    let profile = replica.profile();
    let total = |operation| profile.map_or(OperationTotal::default(), |profile| profile.total(operation));
    OPERATIONS.map(total).to_vec()
}

/// Microseconds of a step as one graph, while the next one is being queued.
fn graph_us(replica: &mut dyn Replica, rows: usize, part: &Args) -> anyhow::Result<f64> {
    let plan = plan(replica, rows, part)?;
    let mut output = StepOutput::default();
    step(replica, &plan, &mut output, Want::Tokens)?;
    let steps = GRAPH_STEPS * part.repeats.max(1);
    let start = Instant::now();
    replica.submit(&plan, Want::Tokens)?;
    for _ in 1..steps {
        replica.submit(&plan, Want::Tokens)?;
        replica.collect(&mut output)?;
    }
    replica.collect(&mut output)?;
    Ok(start.elapsed().as_secs_f64() * 1e6 / steps as f64)
}

fn step(replica: &mut dyn Replica, plan: &StepPlan, output: &mut StepOutput, want: Want) -> anyhow::Result<()> {
    replica.submit(plan, want)?;
    Ok(replica.collect(output)?)
}

/// A step of so many decoding sequences behind so many positions, each with its own KV blocks.
pub fn decoding_apart(replica: &dyn Replica, rows: usize, context: usize) -> anyhow::Result<StepPlan> {
    let blocks = replica.kv_blocks();
    let full = (context + 1).div_ceil(blocks.tokens);
    let window = full.min(4);
    anyhow::ensure!(
        blocks.count / rows >= full + window,
        "the KV cache has no room for {rows} rows"
    );
    Ok(decoding(rows, context, [full, window], |row| 100 + row as i32))
}

/// The same, drawing and scored as is asked for, with what is shared.
fn plan(replica: &dyn Replica, rows: usize, part: &Args) -> anyhow::Result<StepPlan> {
    let plan = decoding_apart(replica, rows, part.context)?;
    let mut plan = drawing(plan, |_| part.draw());
    let shared = part.shared.min(part.context) / replica.kv_blocks().tokens;
    for chunk in 1..rows {
        let (first, own) = (plan.chunks[0].full.start, plan.chunks[chunk].full.start);
        plan.tables.copy_within(first..first + shared, own);
    }
    let score = part.logprobs.map(|top| RowScore { next: None, top });
    plan.logits.iter_mut().for_each(|row| row.score = score);
    Ok(plan)
}

/// A figure of an operation's calls, which took so many microseconds in all.
type Figure = fn(&OperationTotal, f64) -> f64;

pub const FIGURES: [(&str, Figure); 3] = [
    ("us", |total, us| us / total.calls as f64),
    ("GB/s", |total, us| total.cost.bytes as f64 / us * 1e-3),
    ("TFLOP/s", |total, us| total.cost.flops as f64 / us * 1e-6),
];

/// Percents of the limit that an operation's calls reached. Only the matrix cores are marked, since memory is the limit
/// of most operations.
pub fn share(operation: Operation, total: &OperationTotal, roofline: Roofline) -> String {
    let (share, limit) = roofline.share(operation, total.cost, total.time.as_secs_f64());
    let mark = if limit == LimitedBy::Matrix { "x" } else { " " };
    format!("{:.0}{mark}", 100.0 * share)
}

/// Prints a table for each quantity, with a line for each operation and a column for each number of rows. Values are of
/// one call; for norms and attention they are means over two kinds of calls.
fn print(rows: &[usize], operations: &[OperationTimes], graphs: &[f64], roofline: Option<Roofline>) {
    for (name, figure) in FIGURES {
        head(name, rows);
        by_operation(operations, |_, total| {
            format!("{:.1}", figure(total, total.time.as_secs_f64() * 1e6))
        });
        if name == "us" {
            let all = operations.iter().map(|s| s.seconds() * 1e6 / s.steps as f64);
            line("step, summed", all.map(|us| format!("{us:.0}")));
            line("step, graph", graphs.iter().map(|us| format!("{us:.0}")));
        }
    }
    let Some(roofline) = roofline else { return };
    head("% of the limit", rows);
    by_operation(operations, |operation, total| share(operation, total, roofline));
    line("busiest expert", operations.iter().map(|s| format!("{:.1}", s.busiest)));
    println!("{}; the busiest expert's rows are times the mean's", limits(roofline));
}

/// What shares are of.
pub fn limits(roofline: Roofline) -> String {
    format!(
        "limits: memory {:.0} GB/s, or (x) matrix cores {:.0} TFLOP/s, beside attention's exponentials {:.0}",
        roofline.bytes_per_s * 1e-9,
        roofline.flops_per_s * 1e-12,
        roofline.attention_flops_per_s * 1e-12
    )
}

fn head(name: &str, rows: &[usize]) {
    println!();
    line(name, rows.iter().map(usize::to_string));
}

/// A line for each operation that ran, with a dash for batch sizes at which it was fused into another operation.
fn by_operation(operations: &[OperationTimes], cell: impl Fn(Operation, &OperationTotal) -> String) {
    for (i, operation) in OPERATIONS.iter().enumerate() {
        let totals = || operations.iter().map(|s| &s.totals[i]);
        if totals().any(|total| total.calls > 0) {
            let dash = || String::from("-");
            line(
                operation.name(),
                totals().map(|total| {
                    if total.calls > 0 {
                        cell(*operation, total)
                    } else {
                        dash()
                    }
                }),
            );
        }
    }
}

fn line(name: &str, cells: impl Iterator<Item = String>) {
    let cells: String = cells.map(|cell| format!("{cell:>8}")).collect();
    println!("{name:<14}{cells}");
}
