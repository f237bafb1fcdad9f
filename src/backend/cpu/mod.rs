//! The CPU backend. It is used where no GPU can be, and its `exact` is the reference for the GPU backend.

mod attention;
mod buffers;
mod epilogue;
mod gemm;
mod inputs;
mod kv;
mod mode;
mod ops;
mod products;
mod screen;
mod shared;
mod tiles;

use buffers::OVERFLOW;
pub use buffers::{Buffer, Queries, ResidualMemory, Routed, Routes};
pub use kv::{BLOCK_TOKENS, Element, KvCache, layer_bytes};
pub use mode::ComputeMode;
pub use ops::CpuOps;
pub use tiles::Tiles;

use crate::batch::{StepOutput, StepPlan, Want};
use crate::checkpoint::{Checkpoint, Tensor};
use crate::config::ModelConfig;
use crate::error::{Error, Result};
use crate::kv_blocks::{KvBlocks, block_bytes};
use crate::memory::{self, Purpose};
use crate::model::{Activations, Load, Scratch, Weights, forward};
use crate::options::{Options, Precision, StepLimits};
use crate::profile::Profile;
use crate::replica::{Pointers, Replica};
use crate::simd::Level;
use crate::tensors::{Field, Holds, TensorId};
use crate::weights::{Layout, NonFinite, PackReport, Packed, RowMajor, WeightFormat, fingerprint_of, pack};
use crate::workers::Workers;
use half::f16;
use std::ptr::null_mut;
use std::time::Instant;

/// A model's weights on the CPU.
pub type CpuWeights = Weights<Packed, Vec<f32>>;

/// Opens a replica on the CPU.
pub fn open(checkpoint: &dyn Checkpoint, options: &Options) -> Result<Box<dyn Replica>> {
    let precision = options.precision.unwrap_or(Precision::Exact);
    let mode = ComputeMode {
        level: Level::detect(),
        precision,
    };
    Ok(match precision {
        Precision::Exact => Box::new(CpuReplica::<f32>::open(checkpoint, options, mode)?),
        Precision::Fast => Box::new(CpuReplica::<f16>::open(checkpoint, options, mode)?),
    })
}

/// One copy of the model in host memory, with its worker threads.
pub struct CpuReplica<E: Element> {
    workers: Workers,
    mode: ComputeMode,
    weights: CpuWeights,
    report: PackReport,
    ops: CpuOps<E>,
    activations: Activations<ResidualMemory, Buffer>,
    kv: KvCache,
    max_rows: usize,
    max_logits_rows: usize,
}

impl<E: Element> CpuReplica<E> {
    /// Packs the weights and allocates a step's activations and the KV cache.
    pub fn open(checkpoint: &dyn Checkpoint, options: &Options, mode: ComputeMode) -> Result<Self> {
        let config = checkpoint.config().clone();
        let workers = Workers::start("getp worker", options.threads)?;
        workers.pool().broadcast(|_| ops::prepare_thread());
        let limits = options.step_limits(StepLimits::CPU);
        let (max_rows, max_logits_rows) = (limits.step_tokens, limits.max_batch);
        // Activations before packing, which takes long, so that lack of memory shows at once. The KV cache last, since
        // its size depends on the memory that packing leaves free.
        let ops = CpuOps::new(&config, mode, max_rows, options.profile)?;
        let activations = activations(&config, max_rows)?;
        let (weights, report) = workers.pool().install(|| load(checkpoint))?;
        let blocks = kv_blocks(&config, options, E::BYTES)?;
        Ok(Self {
            ops,
            activations,
            kv: KvCache::new(&config, blocks, E::BYTES)?,
            workers,
            mode,
            weights,
            report,
            max_rows,
            max_logits_rows,
        })
    }
}

/// Allocates the activations of steps of at most `max_rows` rows.
pub fn activations(config: &ModelConfig, max_rows: usize) -> Result<Activations<ResidualMemory, Buffer>> {
    let picks = max_rows.checked_mul(config.experts_per_token);
    let picks = picks.ok_or(OVERFLOW)?;
    Ok(Activations {
        x: ResidualMemory::new(config, max_rows)?,
        scratch: Scratch {
            t: Buffer::new(max_rows, config.hidden_dim)?,
            qkv: Buffer::new(max_rows, config.qkv_dim())?,
            attention: Buffer::new(max_rows, config.q_dim())?,
            h: Buffer::new(picks, config.intermediate_dim)?,
        },
    })
}

impl<E: Element> Replica for CpuReplica<E> {
    fn describe(&self) -> String {
        let name = self.mode.level.name();
        let precision = match self.mode.precision {
            Precision::Exact => "exact",
            Precision::Fast => "fast",
        };
        format!(
            "CPU, {name}, {} threads, {precision}",
            self.workers.pool().current_num_threads()
        )
    }

    fn pack_report(&self) -> &PackReport {
        &self.report
    }

    fn kv_blocks(&self) -> KvBlocks {
        self.kv.blocks()
    }

    fn kv_bytes(&self) -> u64 {
        self.kv.len_bytes() as u64
    }

    fn max_step_tokens(&self) -> usize {
        self.max_rows
    }

    /// One prompt chunk may fill the step.
    fn chunk_tokens(&self) -> usize {
        self.max_rows
    }

    fn max_logits_rows(&self) -> usize {
        self.max_logits_rows
    }

    /// A step computes on the host's own cores, so preparing the next one meanwhile gains nothing.
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

    /// Runs the step; its output stays with the operations until it is collected.
    fn submit(&mut self, plan: &StepPlan, want: Want) -> Result<()> {
        let Self {
            workers,
            weights,
            ops,
            activations,
            kv,
            ..
        } = self;
        workers
            .pool()
            .install(|| forward(ops, &weights.whole(), plan, activations, kv, want))
    }

    fn collect(&mut self, output: &mut StepOutput) -> Result<()> {
        std::mem::swap(&mut self.ops.output, output);
        Ok(())
    }

    fn profile(&self) -> Option<&Profile> {
        self.ops.profile()
    }

    fn pointers(&self) -> Pointers {
        let w = &self.weights;
        let matrix = |p: &Packed| p.bytes.as_ptr().cast_mut().cast();
        let vector = |v: &Vec<f32>| v.as_ptr().cast_mut().cast();
        let buffer = |b: &Buffer| b.values().as_ptr().cast_mut().cast();
        let (x, a) = (&self.activations.x.x, &self.activations.scratch);
        let mut state = [null_mut(); 21];
        for (field, pointer) in [
            (0, buffer(x)),
            (1, buffer(&a.t)),
            (2, buffer(&a.attention)),
            (7, buffer(&a.h)),
            (12, buffer(&a.qkv)),
            (18, self.kv.address()),
        ] {
            state[field] = pointer;
        }
        Pointers {
            weights: w.pointers(matrix, vector),
            state,
        }
    }
}

/// The number of KV blocks: for as many sequences of the model's length as may run at once, or as memory allows.
fn kv_blocks(config: &ModelConfig, options: &Options, element_bytes: usize) -> Result<KvBlocks> {
    let limits = options.step_limits(StepLimits::CPU);
    let bytes = options.kv_bytes(|| Ok(available_bytes() / 2 / options.processes()))?;
    Ok(KvBlocks::within(
        config,
        BLOCK_TOKENS,
        limits.step_tokens,
        block_bytes(config, &(0..config.n_layers), layer_bytes(config, element_bytes)),
        bytes,
        limits.max_batch,
        options.longest_sequence(config),
    ))
}

/// Memory that the system can give without swapping, in bytes.
fn available_bytes() -> usize {
    let kilobytes = std::fs::read_to_string("/proc/meminfo").ok().and_then(|text| {
        let line = text.lines().find(|l| l.starts_with("MemAvailable:"))?;
        line.split_whitespace().nth(1)?.parse::<usize>().ok()
    });
    kilobytes.map_or(1 << 30, |k| k << 10)
}

/// Packs a checkpoint for the CPU.
pub fn load(checkpoint: &dyn Checkpoint) -> Result<(CpuWeights, PackReport)> {
    let start = Instant::now();
    let mut loader = Loader {
        checkpoint,
        report: PackReport::default(),
    };
    let weights = Weights::load(0..checkpoint.config().n_layers, &mut loader)?;
    let mut report = loader.report;
    report.seconds = start.elapsed().as_secs_f64();
    Ok((weights, report))
}

/// Packs tensors and keeps the report.
struct Loader<'a> {
    checkpoint: &'a dyn Checkpoint,
    report: PackReport,
}

impl Loader<'_> {
    /// An array's tensors of a layer.
    fn ids(&self, array: Field, layer: usize) -> Result<Vec<TensorId>> {
        memory::collect(array.of_layer(layer, self.checkpoint.config()), Purpose::Checkpoint)
    }
}

impl Load for Loader<'_> {
    type Matrix = Packed;
    type Vector = Vec<f32>;
    type Error = Error;

    fn matrix(&mut self, array: Field, layer: usize) -> Result<Packed> {
        let ids = self.ids(array, layer)?;
        let expected = WeightFormat::expected(array.holds());
        let layout: &dyn Layout = match array.holds() {
            Holds::Lookup => &RowMajor,
            Holds::Expert { gated: true } => &Tiles { gated: true },
            _ => &Tiles { gated: false },
        };
        let tensors = ids.iter().map(|&id| self.checkpoint.tensor(id));
        let tensors = memory::try_collect(tensors, Purpose::Checkpoint)?;
        let packed = pack(&tensors, expected, layout)?;
        self.report.read_bytes += tensors.iter().map(Tensor::len_bytes).sum::<u64>();
        let (format, bytes, remark) = (packed.format.name(), packed.bytes.len(), packed.remark(expected));
        self.report
            .note(&ids, format, bytes, remark, packed.non_finite, packed.fingerprint);
        Ok(packed)
    }

    fn vector(&mut self, array: Field, layer: usize) -> Result<Vec<f32>> {
        let ids = self.ids(array, layer)?;
        let mut values = Vec::new();
        for &id in &ids {
            let tensor = self.checkpoint.tensor(id)?;
            self.report.read_bytes += tensor.len_bytes();
            tensor.extend_f32(&mut values)?;
        }
        let non_finite = NonFinite::of_vectors(array, &values, ids.len());
        let (format, bytes, fingerprint) = (WeightFormat::F32.name(), 4 * values.len(), fingerprint_of(&values));
        self.report.note(&ids, format, bytes, None, non_finite, fingerprint);
        Ok(values)
    }
}
