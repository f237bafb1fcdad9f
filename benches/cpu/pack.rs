//! The exact packing: of float32 in memory, or of a directory, beside copying as many bytes.

use crate::synthetic::{Synthetic, SyntheticCheckpoint, Temperament};
use crate::{median, processor_seconds, shape, time};
use getp::backend::cpu::{self, Tiles};
use getp::checkpoint::{Checkpoint, Field, SafetensorsCheckpoint, Tensor, TensorId, Values};
use getp::error::Result;
use getp::memory::Purpose;
use getp::tensors::Holds;
use getp::weights::{Bytes, Layout, RowMajor, WeightFormat, first_format, pack_tiles};
use rayon::prelude::*;
use std::path::Path;

/// As large as a buffer that GPUs' weights are packed into (`backend/gpu/staging.rs`).
const BUFFER_BYTES: usize = 32 << 20;

/// Bytes that a thread copies at a time.
const COPY_BYTES: usize = 1 << 20;

/// Of one layer that has been widened to float32.
pub fn of_float32(repeats: usize) -> anyhow::Result<()> {
    let widened = SyntheticCheckpoint::widened(&Synthetic::new(&shape(1), 1, Temperament::Tame)?);
    let runs = (0..repeats).map(|_| {
        let (_, report) = cpu::load(&widened).expect("a synthetic model packs");
        report.read_bytes as f64 / report.seconds * 1e-9
    });
    println!("packing: {:.1} GB/s of float32", median(runs.collect()));
    Ok(())
}

/// A way to pack, or to copy, all matrices.
type Turn = fn(&dyn Checkpoint) -> Result<()>;

/// Of a directory whose files are in memory. Each turn maps them anew, as `warm_up` does. To new memory, as for the
/// CPU; and to one buffer, as for GPUs. The fastest turns count, and those that took the least of the processors' time:
/// others may be at work on the machine.
pub fn of_directory(directory: &Path, repeats: usize) -> anyhow::Result<()> {
    let turns: [(&str, Turn); 5] = [
        ("CPU, new memory", |checkpoint| cpu::load(checkpoint).map(drop)),
        ("copy, new memory", copy_to_new),
        ("CPU, one buffer", |checkpoint| {
            pack_to_buffer(checkpoint, &Tiles { gated: true })
        }),
        ("GPU, one buffer", |checkpoint| pack_to_buffer(checkpoint, &RowMajor)),
        ("copy, one buffer", copy_to_buffer),
    ];
    let mut rates = turns.map(|_| [0.0_f64; 2]);
    for round in 0..=repeats {
        for ((_, turn), rate) in turns.iter().zip(&mut rates) {
            let checkpoint = SafetensorsCheckpoint::open(directory)?;
            let all = TensorId::all(checkpoint.config()).map(|id| Ok(checkpoint.tensor(id)?.len_bytes()));
            let bytes: u64 = all.sum::<Result<u64>>()?;
            if round == 0 {
                // Reads the files into memory, and takes the memory that the next turns take from a virtual machine's
                // host.
                copy_to_new(&checkpoint)?;
                continue;
            }
            let mut done = Ok(());
            let before = processor_seconds();
            let seconds = time(|| done = turn(&checkpoint));
            for (rate, seconds) in rate.iter_mut().zip([seconds, processor_seconds() - before]) {
                *rate = rate.max(bytes as f64 * 1e-9 / seconds);
            }
            done?;
        }
    }
    for ((what, _), [rate, of_processor]) in turns.iter().zip(rates) {
        println!("{what:<18}{rate:>6.2} GB/s of the directory,{of_processor:>6.2} GB a second of a processor");
    }
    Ok(())
}

fn copy_to_new(checkpoint: &dyn Checkpoint) -> Result<()> {
    let mut kept = Vec::new();
    each_matrix(checkpoint, |_, tensors| {
        let len = tensors.iter().map(Tensor::len_bytes).sum::<u64>() as usize;
        let mut memory = Bytes::zeroed_in_huge_pages(len, Purpose::Weights)?;
        let mut rest = &mut *memory;
        let mut copies = Vec::new();
        for from in slices(tensors) {
            let (to, behind) = rest.split_at_mut(from.len());
            copies.push((from, to));
            rest = behind;
        }
        copies.into_par_iter().for_each(|(from, to)| to.copy_from_slice(from));
        kept.push(memory);
        Ok(())
    })
}

fn pack_to_buffer(checkpoint: &dyn Checkpoint, layout: &dyn Layout) -> Result<()> {
    let mut buffer = vec![0; BUFFER_BYTES];
    each_matrix(checkpoint, |expected, tensors| {
        let format = first_format(tensors[0].cols, expected);
        let tile_bytes = layout.tile_bytes(format, tensors[0].cols);
        let tiles = tensors.len() * tensors[0].rows.div_ceil(layout.tile_rows());
        let in_buffer = buffer.len() / tile_bytes;
        for first in (0..tiles).step_by(in_buffer) {
            let bytes = &mut buffer[..in_buffer.min(tiles - first) * tile_bytes];
            let found = pack_tiles(tensors, format, layout, first, bytes)?;
            assert!(
                found.needs.is_none(),
                "its tensors are in the formats of released models"
            );
        }
        Ok(())
    })
}

fn copy_to_buffer(checkpoint: &dyn Checkpoint) -> Result<()> {
    let mut buffer = vec![0; BUFFER_BYTES];
    each_matrix(checkpoint, |_, tensors| {
        for some in slices(tensors).chunks(BUFFER_BYTES / COPY_BYTES) {
            let copies = some.par_iter().zip(buffer.par_chunks_mut(COPY_BYTES));
            copies.for_each(|(from, to)| to[..from.len()].copy_from_slice(from));
        }
        Ok(())
    })
}

/// Gives all matrices that an array has of a layer, and the format expected of them.
fn each_matrix(
    checkpoint: &dyn Checkpoint,
    mut take: impl FnMut(WeightFormat, &[Tensor<'_>]) -> Result<()>,
) -> Result<()> {
    let config = checkpoint.config();
    for field in Field::IN_FILE_ORDER {
        if matches!(field.holds(), Holds::Norm | Holds::Bias) {
            continue;
        }
        let [layers, _] = field.counts(config);
        for layer in 0..layers {
            let tensors = field.of_layer(layer, config).map(|id| checkpoint.tensor(id));
            take(
                WeightFormat::expected(field.holds()),
                &tensors.collect::<Result<Vec<_>>>()?,
            )?;
        }
    }
    Ok(())
}

/// The tensors' bytes in pieces.
fn slices<'a>(tensors: &[Tensor<'a>]) -> Vec<&'a [u8]> {
    let parts = tensors.iter().flat_map(|tensor| &tensor.parts);
    let bytes = parts.flat_map(|part| match part.values {
        Values::F32(bytes) | Values::Bf16(bytes) => [bytes, &[]],
        Values::Mxfp4 { blocks, scales } => [blocks, scales],
        Values::Columns(columns) => [columns.bytes, &[]],
    });
    bytes.flat_map(|bytes| bytes.chunks(COPY_BYTES)).collect()
}
