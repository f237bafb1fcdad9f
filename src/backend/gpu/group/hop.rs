//! The way of the residual stream from one device to the next.
//!
//! A stage leaves its rows in a buffer beside its activations, and a stream of their own brings them to a buffer beside
//! the next stage's, from where that one takes them when it begins the step. So the sender may go on with the next step
//! as soon as its rows are aside, and the receiver may still compute the step before while they arrive: the two buffers
//! are the double buffer of the hop. Copies within a device are a hundredth of a step at most.

use super::super::driver::DevicePtr;
use super::super::memory::{DeviceBuffer, Event, PinnedBuffer, SharedDriver, Stream};
use crate::error::{Error, Result};

/// See the module.
pub struct Hop {
    // Dropped first, which waits for what is on its way.
    way: Way,
    leaving: DeviceBuffer,
    arrived: DeviceBuffer,
    /// The rows are in `arrived`, and have left `leaving`.
    landed: Event,
    /// The rows have been taken from `arrived`.
    taken: Event,
}

/// How rows cross.
enum Way {
    /// The receiver's copies reach the sender's memory.
    Direct(Stream),
    /// By way of the host.
    Pinned {
        /// The rows are in `leaving`.
        left: Event,
        out: Stream,
        back: Stream,
        host: PinnedBuffer,
    },
}

impl Hop {
    /// A way for at most `bytes` bytes.
    pub fn new(from: &SharedDriver, to: &SharedDriver, bytes: usize) -> Result<Self> {
        let way = if to.link(&**from)?.direct {
            Way::Direct(Stream::new(to)?)
        } else {
            Way::Pinned {
                left: Event::new(from, false)?,
                out: Stream::new(from)?,
                back: Stream::new(to)?,
                host: PinnedBuffer::zeroed(from, bytes)?,
            }
        };
        Ok(Self {
            way,
            leaving: DeviceBuffer::new(from, bytes)?,
            arrived: DeviceBuffer::new(to, bytes)?,
            landed: Event::new(to, false)?,
            taken: Event::new(to, false)?,
        })
    }

    /// Queues the way of `bytes` bytes from `x`, behind what the sender's stream has, to `next_x`, before what the
    /// receiver's stream will have. `end`, an event of the sender's device, marks where that has done its part.
    pub fn queue(
        &self,
        (from, x): (&Stream, DevicePtr),
        (to, next_x): (&Stream, DevicePtr),
        bytes: usize,
        end: &Event,
    ) -> Result<()> {
        if bytes > self.leaving.bytes() {
            return Err(Error::Internal(format!(
                "no room for {bytes} bytes between two devices"
            )));
        }
        let (leaving, arrived) = (self.leaving.at(), self.arrived.at());
        from.wait(&self.landed)?;
        // SAFETY: both have these bytes; the replica keeps all of them until its streams are done.
        unsafe { from.driver.copy(leaving, x, bytes, from.handle) }?;
        match &self.way {
            Way::Direct(stream) => {
                end.record(from)?;
                stream.wait(end)?;
                stream.wait(&self.taken)?;
                let driver = &stream.driver;
                // SAFETY: as above.
                unsafe { driver.copy_from_peer(arrived, &*from.driver, leaving, bytes, stream.handle) }?;
                self.landed.record(stream)?;
            }
            Way::Pinned { left, out, back, host } => {
                left.record(from)?;
                out.wait(left)?;
                // SAFETY: as above; what `host` held has landed, for which the sender's stream waited.
                unsafe { out.driver.copy_to_host(host.host(), leaving, bytes, out.handle) }?;
                end.record(out)?;
                back.wait(end)?;
                back.wait(&self.taken)?;
                // SAFETY: as above.
                unsafe { back.driver.copy_to_device(arrived, host.host(), bytes, back.handle) }?;
                self.landed.record(back)?;
            }
        }
        to.wait(&self.landed)?;
        // SAFETY: as above.
        unsafe { to.driver.copy(next_x, arrived, bytes, to.handle) }?;
        self.taken.record(to)
    }

    /// Where its copies between the devices are queued.
    pub fn streams(&self) -> impl Iterator<Item = &Stream> {
        let (one, other) = match &self.way {
            Way::Direct(stream) => (stream, None),
            Way::Pinned { out, back, .. } => (out, Some(back)),
        };
        [one].into_iter().chain(other)
    }
}
