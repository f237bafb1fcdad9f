//! Whole rows of logits on their way to the host.
//!
//! A step leaves them in one of two buffers on the device; a stream of their own copies them to pinned memory while the
//! next step fills the other one. The host reads them where they land: [`HostRows`] are lent, and those that nobody
//! holds any more are written to again. Whoever gives them back before the next step is submitted needs two of them.

use super::driver::DevicePtr;
use super::memory::{DeviceBuffer, Event, PinnedBuffer, SharedDriver, Stream};
use crate::error::{Error, Result};
use std::sync::Arc;

/// See the module.
pub struct LogitsPath {
    // Dropped first, which waits for what is on its way.
    stream: Stream,
    device: [DeviceBuffer; 2],
    host: Vec<Arc<HostRows>>,
    bytes: usize,
}

/// Rows in pinned memory. Only who waited for their copy is given them.
pub struct HostRows {
    memory: PinnedBuffer,
    bytes: usize,
}

impl AsRef<[f32]> for HostRows {
    fn as_ref(&self) -> &[f32] {
        // SAFETY: the device wrote to it while only the path and the step under way had it; both are done.
        let bytes = unsafe { self.memory.read() };
        bytemuck::cast_slice(&bytes[..self.bytes])
    }
}

impl LogitsPath {
    /// Room for `bytes` bytes a step.
    pub fn new(driver: &SharedDriver, bytes: usize) -> Result<Self> {
        Ok(Self {
            stream: Stream::new(driver)?,
            device: [DeviceBuffer::new(driver, bytes)?, DeviceBuffer::new(driver, bytes)?],
            host: Vec::new(),
            bytes,
        })
    }

    /// The most bytes of a step.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Where steps of this parity leave them.
    pub fn device(&self, parity: usize) -> DevicePtr {
        self.device[parity].at()
    }

    /// Copies the first `bytes` bytes of that parity's behind `done`, which marks the end of their step and from now on that
    /// of the copy: they may be read when it has come.
    pub fn send(&mut self, parity: usize, bytes: usize, done: &Event) -> Result<Arc<HostRows>> {
        let from = self.device(parity);
        let at = self.free_rows()?;
        let (driver, stream) = (self.stream.driver.clone(), self.stream.handle);
        let rows = Arc::get_mut(&mut self.host[at]).filter(|_| bytes <= self.bytes);
        let rows = rows.ok_or_else(|| Error::Internal(format!("no room for {bytes} bytes of logits")))?;
        rows.bytes = bytes;
        driver.wait(stream, done.handle)?;
        // SAFETY: both have room for `self.bytes`; nobody else has the host's, and the caller keeps what is returned.
        unsafe { driver.copy_to_host(rows.memory.host(), from, bytes, stream) }?;
        done.record(&self.stream)?;
        Ok(self.host[at].clone())
    }

    /// Some that nobody holds.
    fn free_rows(&mut self) -> Result<usize> {
        if let Some(at) = self.host.iter_mut().position(|rows| Arc::get_mut(rows).is_some()) {
            return Ok(at);
        }
        self.host.push(Arc::new(HostRows {
            memory: PinnedBuffer::zeroed(&self.stream.driver, self.bytes)?,
            bytes: 0,
        }));
        Ok(self.host.len() - 1)
    }
}
