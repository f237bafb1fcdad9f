//! Sends weights from the checkpoint to all devices: the host packs into pinned host memory while earlier buffers are
//! copied.
//!
//! One thread, the [`Packer`], packs tensor after tensor on all cores into a few pinned buffers. Another thread, with
//! [`Staging`], queues the copies of each buffer to every device that holds the tensor, and the kernels that rearrange
//! it. A buffer returns to the packer when all these devices have read it. So the host never holds more of the model
//! than these buffers, and each packed byte is read once per device.

use super::args::WIRE_ROWS;
use super::context::Context;
use super::driver::DevicePtr;
use super::memory::{Event, PinnedBuffer};
use crate::checkpoint::{Checkpoint, Field, Tensor, TensorId};
use crate::config::ModelConfig;
use crate::error::{Error, Result};
use crate::memory::{self, Purpose};
use crate::model::{Load, Weights};
use crate::weights::{Findings, Layout, NonFinite, RowMajor, WeightFormat, first_format, least_bytes, pack_tiles};
use crossbeam_channel::{Receiver, Sender, bounded};
use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// One being packed, one packed, one being copied, one queued for copying.
const BUFFERS: usize = 4;
/// Hundreds of tiles, enough for all cores, and half a millisecond of PCIe.
const BUFFER_BYTES: usize = 32 << 20;

/// The tensors of an array that a layer has: one, or one an expert.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OfLayer {
    /// The array.
    pub array: Field,
    /// The layer; 0 where the array does not count by it.
    pub layer: usize,
}

impl OfLayer {
    /// The tensors, all of one shape.
    pub fn ids(self, config: &ModelConfig) -> Result<Vec<TensorId>> {
        memory::collect(self.array.of_layer(self.layer, config), Purpose::Checkpoint)
    }
}

/// What the packer sends. The parcels of a layer's matrices follow each other.
pub enum Parcel {
    /// Matrices begin, or begin anew in a wider format.
    Begin {
        /// Which.
        of: OfLayer,
        /// Of the packed values.
        format: WeightFormat,
    },
    /// Their next tiles, and those tiles' bytes.
    Tiles(PinnedBuffer, usize),
    /// They are complete.
    End {
        /// Bytes they have in the checkpoint.
        read_bytes: u64,
        /// What the packer has found in their values.
        found: Findings,
    },
    /// Vectors, which are small.
    Vectors {
        /// Which.
        of: OfLayer,
        /// One after the other.
        values: Vec<f32>,
        /// Bytes they have in the checkpoint.
        read_bytes: u64,
    },
    /// Packing has failed; nothing follows.
    Failed(Error),
}

/// The two ends, connected by channels: of a checkpoint's weights, its layers in this order.
pub fn pair<'a>(
    contexts: &'a [&'a Context],
    checkpoint: &'a dyn Checkpoint,
    order: &'a [usize],
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
        order,
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
    order: &'a [usize],
    free: Receiver<PinnedBuffer>,
    /// A buffer received and not used.
    spare: Option<PinnedBuffer>,
    parcels: Sender<Parcel>,
    /// Time spent packing.
    busy: Duration,
}

/// Why packing stopped.
pub enum Stop {
    /// The receiver is gone.
    Gone,
    /// Something failed.
    Failed(Error),
}

impl From<Error> for Stop {
    fn from(error: Error) -> Self {
        Self::Failed(error)
    }
}

impl Load for Packer<'_> {
    type Matrix = ();
    type Vector = ();
    type Error = Stop;

    fn matrix(&mut self, array: Field, layer: usize) -> Result<(), Stop> {
        let of = OfLayer { array, layer };
        let tensors = self.tensors(of)?;
        let mut found = Findings::default();
        let mut format = first_format(tensors[0].cols, WeightFormat::expected(array.holds()));
        loop {
            self.send(Parcel::Begin { of, format })?;
            (found.non_finite, found.fingerprint) = (None, 0); // all is packed again
            self.tiles(&tensors, format, &mut found)?;
            match found.needs.take() {
                Some(wider) => format = wider,
                None => break,
            }
        }
        self.send(Parcel::End {
            read_bytes: read_bytes(&tensors),
            found,
        })
    }

    fn vector(&mut self, array: Field, layer: usize) -> Result<(), Stop> {
        let of = OfLayer { array, layer };
        let tensors = self.tensors(of)?;
        let mut values = Vec::new();
        for tensor in &tensors {
            tensor.extend_f32(&mut values)?;
        }
        self.send(Parcel::Vectors {
            of,
            values,
            read_bytes: read_bytes(&tensors),
        })
    }
}

fn read_bytes(tensors: &[Tensor<'_>]) -> u64 {
    tensors.iter().map(Tensor::len_bytes).sum()
}

impl<'a> Packer<'a> {
    /// Packs everything, or until the other end is gone; returns the seconds spent packing, without waiting.
    pub fn run(mut self) -> f64 {
        if let Err(Stop::Failed(error)) = Weights::load(self.order.iter().copied(), &mut self) {
            let _ = self.send(Parcel::Failed(error));
        }
        self.busy.as_secs_f64()
    }

    fn tensors(&self, of: OfLayer) -> Result<Vec<Tensor<'a>>> {
        let ids = of.ids(self.checkpoint.config())?;
        memory::try_collect(ids.iter().map(|&id| self.checkpoint.tensor(id)), Purpose::Checkpoint)
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
            found.fingerprint = found.fingerprint.wrapping_add(here.fingerprint);
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
    /// The packer's next parcel; `None` if there are no more.
    pub fn next(&self) -> Option<Parcel> {
        self.parcels.recv().ok()
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
