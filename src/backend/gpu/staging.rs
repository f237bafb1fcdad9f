//! Sends weights from the checkpoint to all devices: the host packs into pinned host memory while earlier buffers are
//! copied.
//!
//! One thread, the [`Packer`], packs tensor after tensor on all cores into a few pinned buffers. Another thread, with
//! [`Staging`], queues the copies of each buffer to every device that holds the tensor, and the kernels that rearrange it.
//! A buffer returns to the packer when all these devices have read it. So the host never holds more of the model than these
//! buffers, and each packed byte is read once per device.

use super::args::WIRE_ROWS;
use super::context::Context;
use super::driver::DevicePtr;
use super::memory::{Event, PinnedBuffer};
use crate::checkpoint::{Checkpoint, Tensor, TensorId};
use crate::config::ModelConfig;
use crate::error::{Error, Result};
use crate::memory::{self, Purpose};
use crate::weights::{Findings, Layout, NonFinite, RowMajor, WeightFormat, first_format, least_bytes, pack_tiles};
use crossbeam_channel::{Receiver, Sender, bounded};
use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// One being packed, one packed, one being copied, one queued for copying.
const BUFFERS: usize = 4;
/// Hundreds of tiles, enough for all cores, and half a millisecond of PCIe.
const BUFFER_BYTES: usize = 32 << 20;

/// A tensor to be sent: one matrix, or the matrices of all experts of a layer.
pub struct Job {
    /// Its matrices, all of one shape.
    pub ids: Vec<TensorId>,
    /// The format it has in released checkpoints.
    pub expected: WeightFormat,
}

/// What the packer sends, in order.
pub enum Parcel {
    /// A tensor begins, or begins anew in a wider format.
    Begin {
        /// Its first matrix.
        id: TensorId,
        /// Of the packed values.
        format: WeightFormat,
    },
    /// The tensor's next tiles, and their bytes.
    Tiles(PinnedBuffer, usize),
    /// The tensor is complete.
    End {
        /// Bytes it has in the checkpoint.
        read_bytes: u64,
        /// What the packer has found in its values.
        found: Findings,
    },
    /// Packing has failed; nothing follows.
    Failed(Error),
}

/// The two ends, connected by channels.
pub fn pair<'a>(
    contexts: &'a [&'a Context],
    checkpoint: &'a dyn Checkpoint,
    jobs: Vec<Job>,
) -> Result<(Packer<'a>, Staging<'a>)> {
    let (give_back, free) = bounded(BUFFERS);
    let (sender, parcels) = bounded(BUFFERS);
    if let Some(first) = contexts.first() {
        for _ in 0..BUFFERS {
            // All devices of a runtime read pinned memory, whichever it was allocated for.
            let buffer = PinnedBuffer::zeroed(&first.driver, buffer_bytes(checkpoint.config()))?;
            let _ = give_back.send(buffer); // there is room for all
        }
    }
    let packer = Packer {
        checkpoint,
        jobs,
        free,
        spare: None,
        parcels: sender,
        busy: Duration::ZERO,
    };
    let staging = Staging {
        contexts,
        parcels,
        give_back,
        under_way: VecDeque::with_capacity(BUFFERS),
        sent_bytes: 0,
        link_us: 0.0,
    };
    Ok((packer, staging))
}

/// A small model needs no large buffers; any needs room for a tile.
fn buffer_bytes(config: &ModelConfig) -> usize {
    let widest = config.hidden_dim.max(config.intermediate_dim).max(config.q_dim());
    let tile = RowMajor.tile_bytes(WeightFormat::F32, widest);
    let share = least_bytes(config) as usize / BUFFERS;
    share.clamp(tile, BUFFER_BYTES.max(tile))
}

/// The end that packs.
pub struct Packer<'a> {
    checkpoint: &'a dyn Checkpoint,
    jobs: Vec<Job>,
    free: Receiver<PinnedBuffer>,
    /// A buffer received and not used.
    spare: Option<PinnedBuffer>,
    parcels: Sender<Parcel>,
    /// Time spent packing.
    busy: Duration,
}

/// Why packing stopped.
enum Stop {
    /// The receiver is gone.
    Gone,
    Failed(Error),
}

impl From<Error> for Stop {
    fn from(error: Error) -> Self {
        Self::Failed(error)
    }
}

impl Packer<'_> {
    /// Packs everything, or until the other end is gone; returns the seconds spent packing, without waiting.
    pub fn run(mut self) -> f64 {
        for job in std::mem::take(&mut self.jobs) {
            match self.tensor(&job) {
                Ok(()) => {}
                Err(Stop::Gone) => break,
                Err(Stop::Failed(error)) => {
                    let _ = self.send(Parcel::Failed(error));
                    break;
                }
            }
        }
        self.busy.as_secs_f64()
    }

    fn tensor(&mut self, job: &Job) -> Result<(), Stop> {
        let tensors = job.ids.iter().map(|&id| self.checkpoint.tensor(id));
        let tensors = memory::try_collect(tensors, Purpose::Checkpoint)?;
        let mut found = Findings::default();
        let mut format = first_format(tensors[0].cols, job.expected);
        loop {
            let id = job.ids[0];
            self.send(Parcel::Begin { id, format })?;
            (found.non_finite, found.print) = (None, 0); // the whole tensor is packed again
            self.tiles(&tensors, format, &mut found)?;
            match found.needs.take() {
                Some(wider) => format = wider,
                None => break,
            }
        }
        self.send(Parcel::End {
            read_bytes: tensors.iter().map(Tensor::len_bytes).sum(),
            found,
        })
    }

    /// Packs all tiles in this format, up to a value that does not fit.
    fn tiles(&mut self, tensors: &[Tensor<'_>], format: WeightFormat, found: &mut Findings) -> Result<(), Stop> {
        let tile_bytes = RowMajor.tile_bytes(format, tensors[0].cols);
        let tiles = tensors.len() * tensors[0].rows.div_ceil(WIRE_ROWS);
        let mut first = 0;
        while first < tiles {
            let mut buffer = self.buffer()?;
            let n = (buffer.bytes() / tile_bytes).min(tiles - first);
            // SAFETY: nobody else has the buffer, and every device's copy from it has been waited for.
            let bytes = unsafe { &mut buffer.write()[..n * tile_bytes] };
            let start = Instant::now();
            let here = pack_tiles(tensors, format, &RowMajor, first, bytes)?;
            self.busy += start.elapsed();
            found.misfit = found.misfit.take().or(here.misfit);
            found.non_finite = NonFinite::merge(found.non_finite, here.non_finite);
            found.print = found.print.wrapping_add(here.print);
            if here.needs.is_some() {
                found.needs = here.needs;
                self.spare = Some(buffer);
                return Ok(());
            }
            self.send(Parcel::Tiles(buffer, n * tile_bytes))?;
            first += n;
        }
        Ok(())
    }

    fn buffer(&mut self) -> Result<PinnedBuffer, Stop> {
        match self.spare.take() {
            Some(buffer) => Ok(buffer),
            None => self.free.recv().map_err(|_| Stop::Gone),
        }
    }

    fn send(&self, parcel: Parcel) -> Result<(), Stop> {
        self.parcels.send(parcel).map_err(|_| Stop::Gone)
    }
}

/// The end that copies to the devices.
pub struct Staging<'a> {
    contexts: &'a [&'a Context],
    parcels: Receiver<Parcel>,
    give_back: Sender<PinnedBuffer>,
    /// Buffers with copies in flight, oldest first.
    under_way: VecDeque<UnderWay>,
    /// Bytes sent, each tensor once.
    sent_bytes: u64,
    /// Microseconds of all copies, summed over devices.
    link_us: f64,
}

/// A buffer, and the events before and after each device's copy.
struct UnderWay {
    buffer: PinnedBuffer,
    copies: Vec<[Event; 2]>,
}

impl Staging<'_> {
    /// The packer's next message.
    pub fn next(&self) -> Result<Parcel> {
        let gone = |_| Error::Internal("packing has ended before the last tensor".into());
        self.parcels.recv().map_err(gone)
    }

    /// Queues copies of a buffer's first `bytes` bytes, each to an address on the device of that number. Keeps one copy
    /// queued behind the running one; older buffers return to the packer.
    pub fn send(&mut self, buffer: PinnedBuffer, bytes: usize, to: &[(usize, DevicePtr)]) -> Result<()> {
        let host = buffer.host();
        // If anything fails from here on, the buffer lives until its copies are done.
        self.under_way.push_back(UnderWay {
            buffer,
            copies: Vec::with_capacity(to.len()),
        });
        for &(device, to) in to {
            let context = self.contexts[device];
            let (driver, stream) = (&context.driver, &context.stream);
            let copy = [Event::new(driver, true)?, Event::new(driver, true)?];
            copy[0].record(stream)?;
            // SAFETY: both sides have these bytes; the buffer is kept until the copy is waited for.
            unsafe { driver.copy_to_device(to, host, bytes, stream.handle) }?;
            copy[1].record(stream)?;
            if let Some(last) = self.under_way.back_mut() {
                last.copies.push(copy);
            }
        }
        self.sent_bytes += bytes as u64;
        self.wait(1)
    }

    /// Waits until at most `left` buffers have copies in flight.
    pub fn wait(&mut self, left: usize) -> Result<()> {
        while self.under_way.len() > left {
            let Some(oldest) = self.under_way.front() else { break };
            for [begin, end] in &oldest.copies {
                end.synchronize()?;
                self.link_us += end.since_us(begin)?;
            }
            if let Some(read) = self.under_way.pop_front() {
                let _ = self.give_back.send(read.buffer); // without a packer it is dropped
            }
        }
        Ok(())
    }

    /// Bytes sent, each tensor counted once, and the seconds of all copies.
    pub fn sent(&self) -> (u64, f64) {
        (self.sent_bytes, self.link_us * 1e-6)
    }
}

impl Drop for Staging<'_> {
    fn drop(&mut self) {
        if self.under_way.is_empty() {
            return;
        }
        for context in self.contexts {
            // A lost device reads nothing any more.
            let _ = context.stream.synchronize();
        }
    }
}
