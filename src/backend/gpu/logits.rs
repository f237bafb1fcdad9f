//! Rows of logits, and what the host is told of them.
//!
//! A step leaves whole rows on the device, in a buffer of its turn: there is one for each step under way. Where they are
//! to be drawn from, a kernel draws from most of them and tells the host the tokens, and the host fetches the other
//! rows. Where all are wanted, a stream of their own copies them to pinned memory while the next step fills another
//! buffer. The host reads them where they land: [`HostRows`] are lent, and those that nobody holds any more are written to again. Whoever gives them back
//! before the next step is submitted needs two of them.

use super::layout::TypedPtr;
use super::memory::{DeviceBuffer, Event, PinnedBuffer, SharedDriver, Stream};
use crate::error::{Error, Result};
use std::sync::{Arc, Mutex, PoisonError};

/// See the module.
pub struct LogitsPath {
    // Dropped first, which waits for what is on its way.
    stream: Stream,
    device: Vec<DeviceBuffer<f32>>,
    /// `[turns][rows]`
    drawn: PinnedBuffer<i32>,
    host: Mutex<Vec<Arc<HostRows>>>,
    rows: usize,
    row_bytes: usize,
}

/// Rows in pinned memory. Only who waited for their copy is given them: see [`Coming`].
pub struct HostRows {
    memory: PinnedBuffer,
    bytes: usize,
}

/// The end of a step, and the rows that are copied to the host behind it, if any are.
pub struct Coming {
    done: Event,
    rows: Option<Arc<HostRows>>,
}

impl Coming {
    /// A step that `done` marks the end of, without rows.
    pub fn without_rows(done: Event) -> Self {
        Self { done, rows: None }
    }

    /// Waits for all of it. The event may mark another step then.
    pub fn wait(self) -> Result<(Event, Option<Arc<HostRows>>)> {
        self.done.synchronize()?;
        Ok((self.done, self.rows))
    }
}

impl AsRef<[f32]> for HostRows {
    fn as_ref(&self) -> &[f32] {
        // SAFETY: the device wrote to it before it was given out, and does so again when nobody has it any more.
        let bytes = unsafe { self.memory.read() };
        bytemuck::cast_slice(&bytes[..self.bytes])
    }
}

/// Where a step leaves its logits.
#[derive(Clone, Copy, Debug, Default)]
pub struct LogitsAt {
    /// Whole rows.
    pub rows: TypedPtr<f32>,
    /// The token drawn from each, or -1, in pinned memory `[turns][drawn_rows]`.
    pub drawn: TypedPtr<i32>,
    /// See [`Self::drawn`].
    pub drawn_rows: usize,
}

impl LogitsPath {
    /// Room for so many rows a step, and so many steps.
    pub fn new(driver: &SharedDriver, turns: usize, rows: usize, vocab: usize) -> Result<Self> {
        let buffers = (0..turns).map(|_| DeviceBuffer::new(driver, rows * vocab));
        Ok(Self {
            stream: Stream::new(driver)?,
            device: buffers.collect::<Result<_>>()?,
            drawn: PinnedBuffer::zeroed(driver, turns * rows)?,
            host: Mutex::default(),
            rows,
            row_bytes: 4 * vocab,
        })
    }

    /// The most rows of a step.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Where steps of this turn leave them.
    pub fn at(&self, turn: usize) -> LogitsAt {
        LogitsAt {
            rows: self.device[turn].values(),
            drawn: self.drawn.values(),
            drawn_rows: self.rows,
        }
    }

    /// What the step of this turn, which is done, has drawn from its first `rows` rows.
    pub fn drawn(&self, turn: usize, rows: usize) -> impl Iterator<Item = Option<u32>> {
        // SAFETY: the step that wrote here is done, and the next of its turn has not been submitted.
        let drawn = unsafe { self.drawn.read() };
        drawn[turn * self.rows..][..rows]
            .iter()
            .map(|&token| u32::try_from(token).ok())
    }

    /// Copies the first `rows` rows of that turn's behind `done`, which marks the end of their step and from now on that
    /// of the copy.
    pub fn send(&self, turn: usize, rows: usize, done: Event) -> Result<Coming> {
        let host = self.free_rows(self.rows, rows)?;
        self.stream.driver.wait(self.stream.handle, done.handle)?;
        self.copy(turn, 0, rows, &host, 0)?;
        done.record(&self.stream)?;
        Ok(Coming { done, rows: Some(host) })
    }

    /// Copies rows of that turn, whose step is done, one behind the other, and waits for them.
    pub fn fetch(&self, turn: usize, rows: &[usize]) -> Result<Arc<HostRows>> {
        let host = self.free_rows(rows.len().next_power_of_two(), rows.len())?;
        let mut copies = rows.iter().enumerate();
        let queued = copies.try_for_each(|(to, &from)| self.copy(turn, from, 1, &host, to));
        // Those queued before one that failed are waited for too.
        self.stream.synchronize()?;
        queued.map(|()| host)
    }

    /// Queues the copy of rows from `from` on to the place of row `to` in the host's memory.
    fn copy(&self, turn: usize, from: usize, rows: usize, host: &HostRows, to: usize) -> Result<()> {
        if from + rows > self.rows || (to + rows) * self.row_bytes > host.bytes {
            return Err(Error::Internal(format!(
                "no room for row {from} and {rows} rows of logits"
            )));
        }
        let from = self.device[turn].at().add(from * self.row_bytes);
        let (driver, bytes) = (&self.stream.driver, rows * self.row_bytes);
        // SAFETY: both have these bytes, as was checked; nobody else has the host's, and the caller keeps it.
        unsafe {
            let to = host.memory.host().add(to * self.row_bytes);
            driver.copy_to_host(to, from, bytes, self.stream.handle)
        }
    }

    /// Some that nobody holds, for `rows` rows; if there are none, new ones for at least `room` rows.
    fn free_rows(&self, room: usize, rows: usize) -> Result<Arc<HostRows>> {
        let mut host = self.host.lock().unwrap_or_else(PoisonError::into_inner);
        let bytes = rows * self.row_bytes;
        for at in host.iter_mut() {
            if let Some(free) = Arc::get_mut(at).filter(|free| free.memory.bytes() >= bytes) {
                free.bytes = bytes;
                return Ok(at.clone());
            }
        }
        // Those that are too small are not needed any more.
        host.retain_mut(|rows| Arc::get_mut(rows).is_none());
        let memory = PinnedBuffer::zeroed(&self.stream.driver, room.min(self.rows).max(rows) * self.row_bytes)?;
        let rows = Arc::new(HostRows { memory, bytes });
        host.push(rows.clone());
        Ok(rows)
    }
}
