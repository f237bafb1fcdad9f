//! Writes a file of random prompts for `c_examples/mlperf.cpp`: its first line is their number, and each further line
//! is a sample, the seed of its random numbers and then the token ids of its prompt, with a space between two numbers.
//!
//!     make_samples samples.txt
//!     make_samples tiny-samples.txt --count 64 --vocab 512 --scale 0.02
//!
//! A prompt's length is drawn from a lognormal distribution, cut at the greatest length. Ids are drawn evenly.

use anyhow::{Context, Result, ensure};
use clap::Parser;
use rand::Rng;
use rand::distr::Distribution;
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::SeedableRng;
use rand_distr::LogNormal;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::PathBuf;

/// Writes a file of random prompts of token ids. The same options give the same file.
#[derive(Parser)]
struct Args {
    /// The file to write.
    out: PathBuf,
    /// Samples; by default as many as MLPerf's performance data of gpt-oss-120b has.
    #[arg(long, default_value_t = 6396)]
    count: usize,
    /// Ids are from 0 to below this; by default the ordinary tokens of o200k_harmony.
    #[arg(long, default_value_t = 199_998, value_parser = clap::value_parser!(u32).range(1..))]
    vocab: u32,
    #[command(flatten)]
    lengths: Lengths,
    /// Chooses the samples.
    #[arg(long, default_value_t = 0)]
    seed: u64,
}

/// How long prompts are.
#[derive(clap::Args)]
struct Lengths {
    /// Mean length before lengths are cut, in tokens.
    #[arg(long, default_value_t = 1000.0)]
    mean: f64,
    /// Standard deviation of the length's logarithm.
    #[arg(long, default_value_t = 0.7)]
    sigma: f64,
    /// The greatest length.
    #[arg(long, default_value_t = 4096.0)]
    most: f64,
    /// Lengths are multiplied by this at last, for models with a short context.
    #[arg(long, default_value_t = 1.0)]
    scale: f64,
}

fn main() -> Result<()> {
    let args = Args::parse();
    let out = args.out.display();
    let file = File::create(&args.out).with_context(|| format!("cannot create {out}"))?;
    let tokens = write(&mut BufWriter::new(file), &args).with_context(|| format!("cannot write {out}"))?;
    println!("{out}: {} samples, {tokens} tokens", args.count);
    Ok(())
}

/// Writes all samples; gives the number of their tokens.
fn write(out: &mut impl Write, args: &Args) -> Result<usize> {
    let lengths = args.lengths.distribution()?;
    let mut rng = ChaCha8Rng::seed_from_u64(args.seed);
    let mut tokens = 0;
    writeln!(out, "{}", args.count)?;
    for _ in 0..args.count {
        write!(out, "{}", rng.random::<u64>())?;
        let length = args.lengths.cut(lengths.sample(&mut rng));
        for _ in 0..length {
            write!(out, " {}", rng.random_range(0..args.vocab))?;
        }
        writeln!(out)?;
        tokens += length;
    }
    out.flush()?;
    Ok(tokens)
}

impl Lengths {
    /// Of lengths before they are cut and scaled.
    fn distribution(&self) -> Result<LogNormal<f64>> {
        let Self {
            mean,
            sigma,
            most,
            scale,
        } = *self;
        let all = [mean, sigma, most, scale];
        ensure!(
            all.iter().all(|number| number.is_finite() && *number > 0.0),
            "--mean, --sigma, --most and --scale must be finite and above 0"
        );
        // The mean of a lognormal distribution is exp(mu + sigma^2 / 2).
        Ok(LogNormal::new(mean.ln() - sigma * sigma / 2.0, sigma)?)
    }

    /// The tokens of a prompt of a length that was drawn.
    fn cut(&self, length: f64) -> usize {
        ((length.min(self.most) * self.scale).round() as usize).max(1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn samples(options: &[&str]) -> String {
        let args = Args::parse_from(["make_samples", "out"].iter().chain(options));
        let mut out = Vec::new();
        write(&mut out, &args).unwrap();
        String::from_utf8(out).unwrap()
    }

    fn lengths(samples: &str) -> Vec<f64> {
        // Without the seed.
        let length = |line: &str| (line.split(' ').count() - 1) as f64;
        samples.lines().skip(1).map(length).collect()
    }

    #[test]
    fn lengths_have_the_distribution_that_is_stated() {
        let lengths = lengths(&samples(&["--count", "4000", "--most", "1e9", "--vocab", "10"]));
        let n = lengths.len() as f64;
        let logs: Vec<f64> = lengths.iter().map(|length| length.ln()).collect();
        let mean_log = logs.iter().sum::<f64>() / n;
        let sigma = (logs.iter().map(|log| (log - mean_log).powi(2)).sum::<f64>() / n).sqrt();
        // A length's standard deviation is mean * sqrt(exp(sigma^2) - 1), so that of the mean of 4,000 is 12.6, and
        // that of the logarithms' is sigma / sqrt(2 * 4000); the bounds are four of each.
        let mean = lengths.iter().sum::<f64>() / n;
        assert!((mean - 1000.0).abs() < 51.0, "mean {mean}");
        assert!((sigma - 0.7).abs() < 0.032, "sigma {sigma}");
    }

    #[test]
    fn lengths_are_cut_and_scaled() {
        let options = ["--count", "500", "--most", "2000", "--scale", "0.02", "--vocab", "10"];
        let lengths = lengths(&samples(&options));
        assert_eq!(lengths.len(), 500);
        assert_eq!(lengths.iter().copied().fold(0.0, f64::max), 40.0);
        assert!(lengths.iter().all(|&length| length >= 1.0));
    }

    #[test]
    fn a_file_depends_on_its_options_alone() {
        let options = ["--count", "20", "--vocab", "512", "--scale", "0.02"];
        let file = samples(&options);
        assert_eq!(file, samples(&options));
        assert!(file.starts_with("20\n") && file.ends_with('\n') && file.lines().count() == 21);
        let ids = file.lines().skip(1).flat_map(|line| line.split(' ').skip(1));
        assert!(ids.map(|id| id.parse::<u32>().unwrap()).all(|id| id < 512));
        assert_ne!(file, samples(&[&options[..], &["--seed", "1"]].concat()));
    }
}
