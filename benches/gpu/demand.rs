//! Times the two stages of a group, one after the other on one device, and finds the factors that meet them best
//! (`src/backend/gpu/group/demand.rs`). Steps run for seconds, so that the device is as hot as in a long run, and each
//! row sees as many keys as groups are cut for.

use super::Args as Global;
use super::ops::decoding_apart;
use super::random_model::RandomModel;
use getp::backend::gpu::catalogue::Elements;
use getp::backend::gpu::context::Context;
use getp::backend::gpu::driver::limited::limited;
use getp::backend::gpu::group::demand::{Demand, FACTORS, Factors, Parts, mean_keys};
use getp::backend::gpu::open::inspect::open_cut;
use getp::backend::gpu::replica::GpuReplica;
use getp::backend::gpu::stage::Common;
use getp::batch::{StepOutput, StepPlan, Want};
use getp::config::ModelConfig;
use getp::options::Options;
use getp::replica::Replica;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

#[derive(clap::Args)]
pub struct Args {
    /// Models, with `--layers` of each.
    #[arg(long, value_delimiter = ',', default_value = "20b,120b")]
    shapes: Vec<String>,
    /// Rows of a step, each a decoding sequence.
    #[arg(long, value_delimiter = ',', default_value = "128,222,445,890")]
    rows: Vec<usize>,
    /// How long steps run before they are timed, and how long they are.
    #[arg(long, default_value_t = 1.5)]
    seconds: f64,
}

/// A stage's time, and what it comes from.
struct Timed {
    parts: Parts,
    seconds: f64,
}

pub fn run(args: &Global, part: &Args) -> anyhow::Result<()> {
    let options = args.options()?;
    let driver = super::usable(&options)?.swap_remove(0);
    // Each has half of the memory that is free.
    let half = driver.memory()?.free / 2;
    let stage = || args.context(limited(driver.clone(), half, "a stage"));
    let contexts = [stage()?, stage()?];
    println!("{}: ms of the two stages", contexts[0].driver.device().name);
    let mut timed = Vec::new();
    for shape in &part.shapes {
        let config = args.config_of(shape);
        for (rows, stages) in times(&contexts, &config, &options, part)? {
            let [first, second] = &stages;
            println!(
                "{shape}, {rows} rows: {:.2}, {:.2}",
                first.seconds * 1e3,
                second.seconds * 1e3
            );
            timed.extend(stages);
        }
    }
    let found = fit(&timed);
    for (name, factors) in [("as they are", FACTORS), ("found", found)] {
        let ratios = timed.iter().map(|one| one.parts.seconds(&factors) / one.seconds);
        let ratios: Vec<_> = ratios.map(|ratio| format!("{ratio:.2}")).collect();
        println!("{name}: {factors:.2?}; of each time {}", ratios.join(" "));
    }
    Ok(())
}

/// The times of a model's halves, at each number of rows.
fn times(
    contexts: &[Arc<Context>; 2],
    config: &ModelConfig,
    options: &Options,
    part: &Args,
) -> anyhow::Result<Vec<(usize, [Timed; 2])>> {
    let (layers, most) = (config.n_layers, part.rows.iter().copied().max().unwrap_or(1));
    let ends = [layers / 2, layers];
    let options = Options {
        max_batch: Some(most),
        step_tokens: Some(most),
        ..options.clone()
    };
    let model = RandomModel::new(config, 0.0);
    let mut replica = open_cut(contexts.to_vec(), &ends, &model, &options)?;
    drop(model);
    replica.time_steps()?;
    let mut times = Vec::new();
    for &rows in &part.rows {
        let of_step = Options {
            max_batch: Some(rows),
            ..options.clone()
        };
        let common = Common::new(config, &of_step, Elements::F16, 2);
        let demand = Demand {
            common: &common,
            target: &contexts[0].target,
        };
        let plan = decoding_apart(&replica, rows, mean_keys(config))?;
        let [first, second] = seconds(&mut replica, &plan, part)?;
        let timed = |layers: Range<usize>, seconds| Timed {
            parts: demand.parts(&layers),
            seconds,
        };
        times.push((rows, [timed(0..ends[0], first), timed(ends[0]..layers, second)]));
    }
    Ok(times)
}

/// Seconds of the stages in a step, one step after the other.
fn seconds(replica: &mut GpuReplica, plan: &StepPlan, part: &Args) -> anyhow::Result<[f64; 2]> {
    let mut output = StepOutput::default();
    let mut run = |replica: &mut GpuReplica| -> anyhow::Result<()> {
        let begin = Instant::now();
        while begin.elapsed() < Duration::from_secs_f64(part.seconds) {
            replica.submit(plan, Want::Tokens)?;
            replica.collect(&mut output)?;
        }
        Ok(())
    };
    run(replica)?;
    let before = replica.step_times();
    run(replica)?;
    let after = replica.step_times();
    let of = |stage: usize| {
        let (before, after) = (before[stage], after[stage]);
        (after.computing - before.computing).as_secs_f64() / (after.steps - before.steps) as f64
    };
    Ok([of(0), of(1)])
}

/// The factors whose times differ least from those measured, by the squares of their ratios' distances from one.
fn fit(timed: &[Timed]) -> Factors {
    // Normal equations of three unknowns, by elimination.
    let mut rows = [[0.0; 4]; 3];
    for one in timed {
        let Parts {
            weights,
            products,
            head,
            others,
        } = one.parts;
        let terms = [weights, products, head, one.seconds - others].map(|term| term / one.seconds);
        for (row, term) in rows.iter_mut().zip(terms) {
            row.iter_mut().zip(terms).for_each(|(sum, other)| *sum += term * other);
        }
    }
    for pivot in 0..3 {
        let by = rows[pivot];
        for (_, row) in rows.iter_mut().enumerate().filter(|(place, _)| *place != pivot) {
            let factor = row[pivot] / by[pivot];
            row.iter_mut().zip(by).for_each(|(value, of)| *value -= factor * of);
        }
    }
    let [weights, products, head] = [0, 1, 2].map(|place| rows[place][3] / rows[place][place]);
    Factors {
        weights,
        products,
        head,
    }
}
