//! The time to sample from whole rows of logits on the host. It is hidden if it is less than the device takes for the
//! other half of the batch.

use getp::batch::Draw;
use getp::random;
use getp::sampler::{Row, Sampler};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use rand_distr::StandardNormal;
use rayon::prelude::*;
use std::time::Instant;

/// Of all rows that are sampled.
const TEMPERATURE: f32 = 0.8;

#[derive(clap::Args)]
pub struct Args {
    /// Rows of a step: half of W2.
    #[arg(long, default_value_t = 445)]
    rows: usize,
    /// Steps of each kind; the fastest counts.
    #[arg(long, default_value_t = 5)]
    repeats: usize,
}

pub fn run(args: &super::Args, part: &Args) {
    let vocab = args.config().vocab_size;
    let threads = rayon::current_num_threads();
    println!(
        "{} rows of {vocab} logits, {threads} threads; milliseconds a step",
        part.rows
    );
    println!("{:<42}{:>12}{:>12}", "", "row by row", "together");
    // Random weights give normally distributed logits, of which half are in the nucleus; a trained model's are peaked.
    for (name, spread, sure) in [
        ("a model's rows", 2.5, 18.0),
        ("flat rows, as random weights give", 1.0, 0.0),
    ] {
        let logits = logits(part.rows, vocab, spread, sure);
        for topp in [0.9, 1.0] {
            let alone = fastest(part.repeats, || step(&logits, vocab, topp, threads, each_alone));
            let together = fastest(part.repeats, || {
                step(&logits, vocab, topp, threads, Sampler::sample_rows)
            });
            println!("{:<42}{alone:>12.1}{together:>12.1}", format!("{name}, topp {topp}"));
        }
    }
}

fn each_alone(sampler: &mut Sampler, rows: &mut [Row<'_>]) {
    for row in rows {
        row.token = sampler.sample(row.logits, row.draw);
    }
}

/// Milliseconds to sample from all rows, consecutive ones on a thread, as the engine does.
fn step(
    logits: &[f32],
    vocab: usize,
    topp: f32,
    threads: usize,
    draw: impl Fn(&mut Sampler, &mut [Row<'_>]) + Sync,
) -> f64 {
    let mut rows: Vec<_> = logits
        .chunks_exact(vocab)
        .zip(1..)
        .map(|(logits, row)| Row {
            logits,
            largest: logits.iter().copied().fold(f32::NEG_INFINITY, f32::max),
            draw: Draw {
                temperature: TEMPERATURE,
                topp,
                coin: random::coin(row, 0),
            },
            token: 0,
        })
        .collect();
    let mut samplers: Vec<_> = (0..threads)
        .map(|_| {
            let mut sampler = Sampler::new(vocab);
            sampler.make_room(TEMPERATURE, topp).unwrap();
            sampler
        })
        .collect();
    let run = rows.len().div_ceil(threads);
    // Each sampler runs once before the measurement, so that its memory is there.
    rows.par_chunks_mut(1)
        .take(threads)
        .zip(&mut samplers)
        .for_each(|(rows, sampler)| draw(sampler, rows));
    let start = Instant::now();
    rows.par_chunks_mut(run)
        .zip(&mut samplers)
        .for_each(|(rows, sampler)| draw(sampler, rows));
    start.elapsed().as_secs_f64() * 1e3
}

fn fastest(repeats: usize, run: impl Fn() -> f64) -> f64 {
    (0..repeats.max(1)).map(|_| run()).fold(f64::INFINITY, f64::min)
}

/// Normally distributed logits, of which eight in each row are about `sure`.
fn logits(rows: usize, vocab: usize, spread: f32, sure: f32) -> Vec<f32> {
    let mut values = vec![0.0_f32; rows * vocab];
    values.par_chunks_mut(vocab).enumerate().for_each(|(row, values)| {
        let mut rng = ChaCha8Rng::seed_from_u64(row as u64);
        values.fill_with(|| spread * rng.sample::<f32, _>(StandardNormal));
        for i in 0..8 {
            values[rng.random_range(0..vocab)] = sure - i as f32;
        }
    });
    values
}
