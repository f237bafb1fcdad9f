//! RAII owners of a driver's memory, streams, events and graphs.

use super::driver::{DevicePtr, Driver, EventHandle, GraphHandle, Pinned, StreamHandle};
use super::layout::TypedPtr;
use crate::error::Result;
use crate::memory::{self, Purpose};
use bytemuck::{AnyBitPattern, NoUninit, Pod};
use std::marker::PhantomData;
use std::sync::Arc;
use std::time::Duration;

/// A device's driver, shared by everything allocated from it.
pub type SharedDriver = Arc<dyn Driver>;

/// Device memory for values of type `T`, by default bytes.
pub struct DeviceBuffer<T = u8> {
    driver: SharedDriver,
    at: DevicePtr,
    bytes: usize,
    holds: PhantomData<fn() -> T>,
}

impl<T> DeviceBuffer<T> {
    /// `n` values, at least a byte, of undefined content.
    pub fn new(driver: &SharedDriver, n: usize) -> Result<Self> {
        let bytes = (n * size_of::<T>()).max(1);
        let at = driver.alloc(bytes)?;
        Ok(Self {
            driver: driver.clone(),
            at,
            bytes,
            holds: PhantomData,
        })
    }

    /// `n` values whose bytes are zeros.
    pub fn zeroed(stream: &Stream, n: usize) -> Result<Self> {
        let buffer = Self::new(&stream.driver, n)?;
        // SAFETY: the range is the whole buffer, which lives until the stream has been waited for.
        unsafe { stream.driver.fill(buffer.at, 0, buffer.bytes, stream.handle) }?;
        stream.synchronize()?;
        Ok(buffer)
    }

    /// A buffer with a copy of `values`.
    pub fn of(stream: &Stream, values: &[T]) -> Result<Self>
    where
        T: NoUninit,
    {
        let bytes: &[u8] = bytemuck::cast_slice(values);
        let buffer = Self::new(&stream.driver, values.len())?;
        // SAFETY: both ranges have these bytes and live until the stream has been waited for.
        unsafe {
            stream
                .driver
                .copy_to_device(buffer.at, bytes.as_ptr(), bytes.len(), stream.handle)
        }?;
        stream.synchronize()?;
        Ok(buffer)
    }

    /// Its address.
    pub fn at(&self) -> DevicePtr {
        self.at
    }

    /// Its address, for kernels that take values of this type.
    pub fn values(&self) -> TypedPtr<T> {
        TypedPtr::new(self.at)
    }

    /// Its size.
    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

impl<T> Drop for DeviceBuffer<T> {
    fn drop(&mut self) {
        // SAFETY: nobody else has the address; `free` waits for queued work. On a lost device nothing is left to free.
        let _ = unsafe { self.driver.free(self.at) };
    }
}

/// Copies `n` values from device memory to the host; waits for the stream.
///
/// # Safety
/// The values lie at `from` once the work queued on the stream is done.
pub unsafe fn to_host<T: Pod>(stream: &Stream, from: DevicePtr, n: usize) -> Result<Vec<T>> {
    let mut values = memory::filled(T::zeroed(), n, Purpose::Step)?;
    let (to, bytes) = (values.as_mut_ptr().cast(), size_of_val(values.as_slice()));
    // SAFETY: both ranges have these bytes; `values` lives until the stream has been waited for, or is leaked below.
    let queued = unsafe { stream.driver.copy_to_host(to, from, bytes, stream.handle) };
    let copied = queued.and_then(|()| stream.synchronize());
    if let Err(error) = copied {
        // Leaked: without having waited, the copy may still be running.
        std::mem::forget(values);
        return Err(error);
    }
    Ok(values)
}

/// Pinned host memory, mapped into the device's address space, for values of type `T`, by default bytes.
pub struct PinnedBuffer<T = u8> {
    driver: SharedDriver,
    pinned: Pinned,
    n: usize,
    holds: PhantomData<fn() -> T>,
}

// SAFETY: plain memory; its users order accesses, as `read` and `write` require.
unsafe impl<T> Send for PinnedBuffer<T> {}
// SAFETY: as above.
unsafe impl<T> Sync for PinnedBuffer<T> {}

impl<T: AnyBitPattern + NoUninit> PinnedBuffer<T> {
    /// `n` values, at least one, whose bytes are zeros.
    pub fn zeroed(driver: &SharedDriver, n: usize) -> Result<Self> {
        let n = n.max(1);
        let pinned = driver.alloc_pinned(n * size_of::<T>())?;
        Ok(Self {
            driver: driver.clone(),
            pinned,
            n,
            holds: PhantomData,
        })
    }

    /// Its address on the device.
    pub fn values(&self) -> TypedPtr<T> {
        TypedPtr::new(self.pinned.device)
    }

    /// Its address on the host.
    pub fn host(&self) -> *mut u8 {
        self.pinned.host
    }

    /// Its size.
    pub fn bytes(&self) -> usize {
        self.n * size_of::<T>()
    }

    /// Its values.
    ///
    /// # Safety
    /// The device does not write to it while the slice lives.
    pub unsafe fn read(&self) -> &[T] {
        // SAFETY: allocated and zeroed with this length, at a multiple of 256; as our caller vouches.
        unsafe { std::slice::from_raw_parts(self.pinned.host.cast(), self.n) }
    }

    /// Its values.
    ///
    /// # Safety
    /// The device neither reads nor writes it while the slice lives.
    pub unsafe fn write(&mut self) -> &mut [T] {
        // SAFETY: allocated and zeroed with this length, at a multiple of 256; as our caller vouches.
        unsafe { std::slice::from_raw_parts_mut(self.pinned.host.cast(), self.n) }
    }
}

impl<T> Drop for PinnedBuffer<T> {
    fn drop(&mut self) {
        // SAFETY: nobody else has the address; its owner has waited for the streams that use it.
        let _ = unsafe { self.driver.free_pinned(self.pinned) };
    }
}

/// A queue of work in order.
pub struct Stream {
    /// Its device.
    pub driver: SharedDriver,
    /// Its handle.
    pub handle: StreamHandle,
}

impl Stream {
    /// A new stream.
    pub fn new(driver: &SharedDriver) -> Result<Self> {
        Ok(Self {
            driver: driver.clone(),
            handle: driver.stream()?,
        })
    }

    /// Waits for all work queued so far.
    pub fn synchronize(&self) -> Result<()> {
        self.driver.synchronize(self.handle)
    }

    /// Waits for all work queued so far, but no longer than this; false if it was not done in time.
    pub fn synchronize_within(&self, limit: Duration) -> Result<bool> {
        self.driver.synchronize_within(self.handle, limit)
    }

    /// Lets further work wait for what `event` marks now, which may be another device's.
    pub fn wait(&self, event: &Event) -> Result<()> {
        self.driver.wait(self.handle, event.handle)
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        let _ = self.driver.synchronize(self.handle);
        let _ = self.driver.free_stream(self.handle);
    }
}

/// A point in a stream.
pub struct Event {
    driver: SharedDriver,
    /// Its handle.
    pub handle: EventHandle,
}

impl Event {
    /// A new event; `timing`: it can be asked for times.
    pub fn new(driver: &SharedDriver, timing: bool) -> Result<Self> {
        Ok(Self {
            driver: driver.clone(),
            handle: driver.event(timing)?,
        })
    }

    /// Records the event after the stream's work so far.
    pub fn record(&self, stream: &Stream) -> Result<()> {
        self.driver.record(self.handle, stream.handle)
    }

    /// Waits on the host until the recorded work is done.
    pub fn synchronize(&self) -> Result<()> {
        self.driver.synchronize_event(self.handle)
    }

    /// Microseconds from `earlier` to this event; both are done.
    pub fn since_us(&self, earlier: &Event) -> Result<f64> {
        self.driver.elapsed_us(earlier.handle, self.handle)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        let _ = self.driver.free_event(self.handle);
    }
}

/// A captured graph, ready to be launched.
pub struct Graph {
    driver: SharedDriver,
    handle: GraphHandle,
}

impl Graph {
    /// Owns a driver's graph.
    pub fn new(driver: &SharedDriver, handle: GraphHandle) -> Self {
        Self {
            driver: driver.clone(),
            handle,
        }
    }

    /// Queues a launch of the graph.
    ///
    /// # Safety
    /// All memory that its kernels use is live until the stream has executed it.
    pub unsafe fn launch(&self, stream: &Stream) -> Result<()> {
        // SAFETY: as our caller vouches.
        unsafe { self.driver.launch_graph(self.handle, stream.handle) }
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        let _ = self.driver.free_graph(self.handle);
    }
}
