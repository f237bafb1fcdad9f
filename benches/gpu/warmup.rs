//! The speed of `warm_up` from a float32 checkpoint in host memory or a Hugging Face directory: the rates of packing
//! and of the bus.

use crate::synthetic::{Synthetic, SyntheticCheckpoint, Temperament};
use getp::backend::gpu;
use getp::checkpoint::{Checkpoint, Part, SafetensorsCheckpoint, Tensor, TensorId, Values};
use getp::config::ModelConfig;
use getp::error::{Error, Result};
use rayon::prelude::*;
use std::collections::HashMap;
use std::path::PathBuf;
use std::time::Instant;

#[derive(clap::Args)]
pub struct Args {
    /// The most host memory for the checkpoint in GiB; layers that do not fit are left out.
    #[arg(long, default_value_t = 96)]
    host_gib: usize,
    /// A directory to read instead of making a checkpoint.
    #[arg(long)]
    model: Option<PathBuf>,
    /// Number of measurements.
    #[arg(long, default_value_t = 3)]
    repeats: usize,
}

pub fn run(args: &super::Args, part: &Args) -> anyhow::Result<()> {
    let options = args.options()?;
    let checkpoint: Box<dyn Checkpoint> = match &part.model {
        Some(directory) => Box::new(SafetensorsCheckpoint::open(directory)?),
        None => {
            let mut config = args.config();
            config.n_layers = layers_that_fit(&config, part.host_gib << 30);
            Box::new(Copies::new(config)?)
        }
    };
    println!("{} layers", checkpoint.config().n_layers);
    println!(
        "{:<12}{:>9}{:>10}{:>11}{:>12}{:>10}{:>12}",
        "", "seconds", "read GB", "read GB/s", "pack GB/s", "sent GB", "link GB/s"
    );
    for round in 1..=part.repeats {
        let drivers = super::usable(&options)?;
        let start = Instant::now();
        let replicas = gpu::open::open(drivers, &*checkpoint, &options)?;
        let seconds = start.elapsed().as_secs_f64();
        let report = replicas[0].pack_report();
        let sent = report.sent.ok_or_else(|| anyhow::anyhow!("nothing was sent"))?;
        let (read, sent_bytes) = (report.read_bytes as f64 * 1e-9, sent.bytes as f64 * 1e-9);
        println!(
            "{:<12}{seconds:>9.2}{read:>10.1}{:>11.1}{:>12.1}{sent_bytes:>10.1}{:>12.1}",
            format!("{} x{round}", replicas.len()),
            read / report.seconds,
            read / sent.pack_seconds,
            sent_bytes / sent.link_seconds,
        );
    }
    Ok(())
}

fn layers_that_fit(config: &ModelConfig, bytes: usize) -> usize {
    let with = |n_layers| {
        let config = ModelConfig {
            n_layers,
            ..config.clone()
        };
        let values = TensorId::all(&config).map(|id| id.shape(&config).iter().product::<usize>());
        4 * values.sum::<usize>()
    };
    let (one, layer) = (with(1), with(2) - with(1));
    (1 + bytes.saturating_sub(one) / layer).min(config.n_layers)
}

/// A model whose layers all have the first one's values. Each layer has its own memory, so that reading the model is as
/// much work as reading a real one.
struct Copies {
    config: ModelConfig,
    first: SyntheticCheckpoint,
    /// The tensors of each other layer, by the ids that they have in the first.
    others: Vec<HashMap<TensorId, Vec<u8>>>,
}

impl Copies {
    fn new(config: ModelConfig) -> Result<Self> {
        let one = ModelConfig {
            n_layers: 1,
            ..config.clone()
        };
        let first = SyntheticCheckpoint::widened(&Synthetic::new(&one, 1, Temperament::Tame)?);
        let ids: Vec<_> = TensorId::all(&one).filter(|&id| is_layered(id)).collect();
        let copy = |&id: &TensorId| Ok((id, bytes_of(&first.tensor(id)?)?.to_vec()));
        let others = (1..config.n_layers).map(|_| ids.par_iter().map(copy).collect());
        let others = others.collect::<Result<_>>()?;
        Ok(Self { config, first, others })
    }
}

/// Whether the tensor belongs to a layer.
fn is_layered(first: TensorId) -> bool {
    let (field, _, expert) = first.place();
    field.id(1, expert) != first
}

fn bytes_of<'a>(tensor: &Tensor<'a>) -> Result<&'a [u8]> {
    match tensor.parts.as_slice() {
        [
            Part {
                values: Values::F32(bytes),
                ..
            },
        ] => Ok(bytes),
        _ => Err(Error::Internal("a tensor that is not float32".into())),
    }
}

impl Checkpoint for Copies {
    fn config(&self) -> &ModelConfig {
        &self.config
    }

    fn tensor(&self, id: TensorId) -> Result<Tensor<'_>> {
        let (field, layer, expert) = id.place();
        let in_first = field.id(0, expert);
        let Some(bytes) = layer.checked_sub(1).and_then(|other| self.others[other].get(&in_first)) else {
            return self.first.tensor(in_first);
        };
        let [rows, cols] = id.shape(&self.config);
        let values = Values::F32(bytes);
        Ok(Tensor {
            rows,
            cols,
            parts: vec![Part { rows, values }],
        })
    }
}
