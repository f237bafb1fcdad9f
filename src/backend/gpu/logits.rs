//! Logits on the device, and their way to the host.
//!
//! Each step in flight has a buffer of logits in device memory. If the device samples or scores, a kernel writes the
//! tokens, or what log-probabilities take, to pinned host memory, and the host fetches only the rows where the kernel
//! could not. If the host samples, a second stream copies all rows to pinned host memory while the next step fills
//! another buffer. The host reads the rows there: [`HostRows`] are reference counted, and a buffer that nobody holds is
//! used again. Two buffers suffice if the host drops a step's rows before it submits the next step.

use super::args::Scored;
use super::layout::TypedPtr;
use super::memory::{DeviceBuffer, Event, PinnedBuffer, SharedDriver, Stream};
use crate::batch::FoundScore;
use crate::error::{Error, Result};
use std::array;
use std::sync::{Arc, Mutex, PoisonError};

/// See the module.
pub struct LogitsPath {
    // Dropped first: dropping it waits for copies in flight.
    stream: Stream,
    device: Vec<DeviceBuffer<f32>>,
    /// Sampled tokens `[turns][rows]`.
    drawn: PinnedBuffer<i32>,
    /// What rows are scored by `[turns][rows]`.
    scores: PinnedBuffer<Scored>,
    host: Mutex<Vec<Arc<HostRows>>>,
    rows: usize,
    row_bytes: usize,
}

/// Rows in pinned host memory. [`StepEnd::wait`] returns them, after their copy.
pub struct HostRows {
    memory: PinnedBuffer,
    bytes: usize,
}

/// A step's event, and the rows that are copied to the host after the step, if any.
pub struct StepEnd {
    done: Event,
    rows: Option<Arc<HostRows>>,
}

impl StepEnd {
    /// A step without rows; `done` is recorded at its end.
    pub fn without_rows(done: Event) -> Self {
        Self { done, rows: None }
    }

    /// Whether it is copied.
    pub fn has_rows(&self) -> bool {
        self.rows.is_some()
    }

    /// Waits for the step and the copy.
    pub fn synchronize(&self) -> Result<()> {
        self.done.synchronize()
    }

    /// Waits for the step and the copy; the event can then be used again.
    pub fn wait(self) -> Result<(Event, Option<Arc<HostRows>>)> {
        self.synchronize()?;
        Ok((self.done, self.rows))
    }
}

impl AsRef<[f32]> for HostRows {
    fn as_ref(&self) -> &[f32] {
        // SAFETY: the device has written it before, and writes again only when nobody holds it.
        let bytes = unsafe { self.memory.read() };
        bytemuck::cast_slice(&bytes[..self.bytes])
    }
}

/// Where a step leaves its logits.
#[derive(Clone, Copy, Debug, Default)]
pub struct LogitsAt {
    /// Whole rows.
    pub rows: TypedPtr<f32>,
    /// The token sampled from each row, or -1, in pinned host memory `[turns][turn_rows]`.
    pub drawn: TypedPtr<i32>,
    /// What rows are scored by, in pinned host memory `[turns][turn_rows]`.
    pub scores: TypedPtr<Scored>,
    /// Rows of a turn.
    pub turn_rows: usize,
}

impl LogitsPath {
    /// Buffers for `turns` steps in flight, of `rows` rows each.
    pub fn new(driver: &SharedDriver, turns: usize, rows: usize, vocab: usize) -> Result<Self> {
        let buffers = (0..turns).map(|_| DeviceBuffer::new(driver, rows * vocab));
        Ok(Self {
            stream: Stream::new(driver)?,
            device: buffers.collect::<Result<_>>()?,
            drawn: PinnedBuffer::zeroed(driver, turns * rows)?,
            scores: PinnedBuffer::zeroed(driver, turns * rows)?,
            host: Mutex::default(),
            rows,
            row_bytes: 4 * vocab,
        })
    }

    /// Where its copies are queued.
    pub fn stream(&self) -> &Stream {
        &self.stream
    }

    /// Where a step of this turn writes its logits and tokens.
    pub fn at(&self, turn: usize) -> LogitsAt {
        LogitsAt {
            rows: self.device[turn].values(),
            drawn: self.drawn.values(),
            scores: self.scores.values(),
            turn_rows: self.rows,
        }
    }

    /// The tokens that the step of this turn, which is done, has sampled from its first `rows` rows; `None` for a row
    /// that the host has to sample.
    pub fn drawn(&self, turn: usize, rows: usize) -> impl Iterator<Item = Option<u32>> {
        // SAFETY: the step that wrote here is done, and the next of its turn has not been submitted.
        let drawn = unsafe { self.drawn.read() };
        drawn[turn * self.rows..][..rows]
            .iter()
            .map(|&token| u32::try_from(token).ok())
    }

    /// What the step of this turn, which is done, has found of its first `rows` rows; anything of rows not scored.
    pub fn scores(&self, turn: usize, rows: usize) -> impl Iterator<Item = FoundScore> {
        // SAFETY: the step that wrote here is done, and the next of its turn has not been submitted.
        let scores = unsafe { self.scores.read() };
        scores[turn * self.rows..][..rows].iter().map(|found| FoundScore {
            token: found.token.cast_unsigned(),
            logit: found.logit,
            largest: found.largest,
            sum: found.sum,
            top: array::from_fn(|i| (found.top_tokens[i].cast_unsigned(), found.top_logits[i])),
        })
    }

    /// Queues the copy of the first `rows` rows of a turn after `done`, the event at the end of their step; `done` is
    /// then recorded again at the end of the copy.
    pub fn send(&self, turn: usize, rows: usize, done: Event) -> Result<StepEnd> {
        let host = self.free_rows(rows.next_power_of_two().min(self.rows), rows)?;
        self.stream.wait(&done)?;
        self.copy(turn, 0, rows, &host, 0)?;
        done.record(&self.stream)?;
        Ok(StepEnd { done, rows: Some(host) })
    }

    /// Copies the given rows of a turn, whose step is done, to consecutive rows on the host, and waits for them.
    pub fn fetch(&self, turn: usize, rows: &[usize]) -> Result<Arc<HostRows>> {
        let host = self.free_rows(rows.len().next_power_of_two(), rows.len())?;
        let mut copies = rows.iter().enumerate();
        let queued = copies.try_for_each(|(to, &from)| self.copy(turn, from, 1, &host, to));
        // Copies queued before one that failed are waited for as well.
        self.stream.synchronize()?;
        queued.map(|()| host)
    }

    /// Queues the copy of `rows` rows from row `from` of a turn to row `to` of `host`.
    fn copy(&self, turn: usize, from: usize, rows: usize, host: &HostRows, to: usize) -> Result<()> {
        if from + rows > self.rows || (to + rows) * self.row_bytes > host.bytes {
            return Err(Error::Internal(format!(
                "no room for row {from} and {rows} rows of logits"
            )));
        }
        let from = self.device[turn].at().add(from * self.row_bytes);
        let (driver, bytes) = (&self.stream.driver, rows * self.row_bytes);
        // SAFETY: both ranges were checked; nobody else holds the host's rows, and the caller keeps them.
        unsafe {
            let to = host.memory.host().add(to * self.row_bytes);
            driver.copy_to_host(to, from, bytes, self.stream.handle)
        }
    }

    /// A host buffer of `rows` rows that nobody holds; if there is none, a new one with room for at least `room` rows.
    fn free_rows(&self, room: usize, rows: usize) -> Result<Arc<HostRows>> {
        let mut host = self.host.lock().unwrap_or_else(PoisonError::into_inner);
        let bytes = rows * self.row_bytes;
        for at in host.iter_mut() {
            if let Some(free) = Arc::get_mut(at).filter(|free| free.memory.bytes() >= bytes) {
                free.bytes = bytes;
                return Ok(at.clone());
            }
        }
        // The free ones are too small.
        host.retain_mut(|rows| Arc::get_mut(rows).is_none());
        let memory = PinnedBuffer::zeroed(&self.stream.driver, room.min(self.rows).max(rows) * self.row_bytes)?;
        let rows = Arc::new(HostRows { memory, bytes });
        host.push(rows.clone());
        Ok(rows)
    }
}
