//! One trait for a GPU's runtime: memory, streams, events, modules, launches, graphs.
//!
//! Handles are plain numbers here; [`super::memory`] wraps them in RAII owners. Every call checks the runtime's return
//! code and returns a typed [`crate::error::Error::Gpu`]. A driver belongs to one device and may be called from any
//! thread.

#[cfg(feature = "cuda")]
pub mod cuda;
#[cfg(feature = "hip")]
pub mod hip;
pub mod limited;
#[cfg(feature = "simt")]
pub mod simt;
#[cfg(any(feature = "cuda", feature = "hip"))]
mod vendor;

#[cfg(all(test, any(feature = "cuda", feature = "hip")))]
use crate::error::GpuFault;
use crate::error::{Error, Result};
use bytemuck::{Pod, Zeroable};
use std::time::Duration;

/// A device's properties.
#[derive(Clone, Debug)]
pub struct Device {
    /// The runtime: `hip`, `cuda` or `simt`.
    pub runtime: &'static str,
    /// The runtime's number of the device.
    pub ordinal: usize,
    /// The product's name.
    pub name: String,
    /// The architecture: `gfx90a`, `sm_90`, `simt`.
    pub arch: String,
    /// Multiprocessors (compute units).
    pub multiprocessors: usize,
}

/// A device there is.
#[derive(Clone, Debug)]
pub struct ListedDevice {
    /// What is known of it.
    pub device: Device,
    /// Its memory.
    pub total_bytes: u64,
}

/// A device's memory in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceMemory {
    /// Free bytes.
    pub free: u64,
    /// Total bytes.
    pub total: u64,
}

/// How a device reaches another one of its runtime.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Link {
    /// Whether its copies reach the other one's memory, which [`Driver::copy_from_peer`] needs.
    pub direct: bool,
    /// The less, the faster. It only compares links of one runtime.
    pub distance: u32,
}

#[cfg(any(feature = "cuda", feature = "hip"))]
impl Link {
    /// A device's own memory: runtimes refuse to tell of it.
    const TO_ITSELF: Self = Self {
        direct: true,
        distance: 0,
    };
}

/// An address in device memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Pod, Zeroable)]
#[repr(transparent)]
pub struct DevicePtr(pub u64);

impl DevicePtr {
    /// NULL.
    pub const NULL: Self = Self(0);

    /// The address `bytes` further on.
    #[allow(clippy::should_implement_trait, reason = "named as pointers name it")]
    pub fn add(self, bytes: usize) -> Self {
        Self(self.0 + bytes as u64)
    }
}

/// Pinned host memory, mapped into the device's address space.
#[derive(Clone, Copy, Debug)]
pub struct Pinned {
    /// Its address on the host.
    pub host: *mut u8,
    /// Its address on the device.
    pub device: DevicePtr,
}

macro_rules! handles {
    ($($(#[$doc:meta])* $name:ident),*) => {$(
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[repr(transparent)]
        pub struct $name(pub u64);
    )*};
}

handles!(
    /// A stream.
    StreamHandle,
    /// An event.
    EventHandle,
    /// A loaded code object.
    ModuleHandle,
    /// A kernel of a module.
    FunctionHandle,
    /// An instantiated graph.
    GraphHandle
);

/// What a capture has made.
#[derive(Clone, Copy, Debug)]
pub struct Captured {
    /// The graph.
    pub graph: GraphHandle,
    /// Its nodes: kernels, copies and fills.
    pub nodes: usize,
}

/// One kernel launch.
#[derive(Clone, Copy, Debug)]
pub struct KernelLaunch<'a> {
    /// The kernel.
    pub function: FunctionHandle,
    /// Blocks.
    pub grid: u32,
    /// Threads of a block.
    pub block: u32,
    /// Bytes of dynamic shared memory; at most what [`Driver::function`] was given.
    pub shared_bytes: u32,
    /// The bytes of the argument struct.
    pub args: &'a [u8],
    /// Programmatic dependent launch (PDL) on NVIDIA: the kernel may start before the previous one has ended, as it
    /// calls `after_predecessor`. No effect elsewhere.
    pub overlap: bool,
}

/// Where [`Driver::blocks_together`] is 0 such launches are not asked for.
fn no_launch_together(name: &str) -> Error {
    Error::Internal(format!("{name} has no launch of blocks that wait for each other"))
}

/// A device's runtime.
///
/// # Safety
///
/// Callers of the unsafe functions guarantee that addresses are live and large enough until the stream has done the
/// work, and that launches pass their kernel's argument struct.
pub trait Driver: Send + Sync {
    /// The device's properties.
    fn device(&self) -> &Device;
    /// Free and total memory.
    fn memory(&self) -> Result<DeviceMemory>;

    /// Device memory, aligned to 256 bytes. Its content is undefined.
    fn alloc(&self, bytes: usize) -> Result<DevicePtr>;
    /// Frees device memory; waits for work that may use it.
    ///
    /// # Safety
    /// See the trait.
    unsafe fn free(&self, at: DevicePtr) -> Result<()>;
    /// Pinned host memory, zeroed, aligned to 256 bytes.
    fn alloc_pinned(&self, bytes: usize) -> Result<Pinned>;
    /// Frees pinned host memory.
    ///
    /// # Safety
    /// See the trait.
    unsafe fn free_pinned(&self, pinned: Pinned) -> Result<()>;

    /// Creates a stream that does not synchronize with the default stream.
    fn stream(&self) -> Result<StreamHandle>;
    /// Destroys a stream.
    fn free_stream(&self, stream: StreamHandle) -> Result<()>;
    /// Waits until a stream's work so far is done; returns errors of that work.
    fn synchronize(&self, stream: StreamHandle) -> Result<()>;
    /// [`Driver::synchronize`], but no longer than this; false if the work was not done in time.
    fn synchronize_within(&self, stream: StreamHandle, limit: Duration) -> Result<bool>;
    /// Creates an event; only one with `timing` can be asked for times.
    fn event(&self, timing: bool) -> Result<EventHandle>;
    /// Destroys an event.
    fn free_event(&self, event: EventHandle) -> Result<()>;
    /// Records an event after the stream's work so far. While the stream is captured, the event becomes part of the
    /// graph.
    fn record(&self, event: EventHandle, stream: StreamHandle) -> Result<()>;
    /// Makes the stream's later work wait for an event.
    fn wait(&self, stream: StreamHandle, event: EventHandle) -> Result<()>;
    /// Waits on the host for an event; returns errors of the work before it.
    fn synchronize_event(&self, event: EventHandle) -> Result<()>;
    /// Microseconds from one event to another; both are done.
    fn elapsed_us(&self, from: EventHandle, to: EventHandle) -> Result<f64>;

    /// Queues a copy from host memory.
    ///
    /// # Safety
    /// See the trait.
    unsafe fn copy_to_device(&self, to: DevicePtr, from: *const u8, bytes: usize, stream: StreamHandle) -> Result<()>;
    /// Queues a copy to host memory.
    ///
    /// # Safety
    /// See the trait.
    unsafe fn copy_to_host(&self, to: *mut u8, from: DevicePtr, bytes: usize, stream: StreamHandle) -> Result<()>;
    /// Queues a copy within the device.
    ///
    /// # Safety
    /// See the trait.
    unsafe fn copy(&self, to: DevicePtr, from: DevicePtr, bytes: usize, stream: StreamHandle) -> Result<()>;
    /// How this device reaches another one of the same runtime.
    fn link(&self, peer: &dyn Driver) -> Result<Link>;
    /// Queues a copy from another device of the same runtime that is [linked](Driver::link) directly.
    ///
    /// # Safety
    /// See the trait.
    unsafe fn copy_from_peer(
        &self,
        to: DevicePtr,
        peer: &dyn Driver,
        from: DevicePtr,
        bytes: usize,
        stream: StreamHandle,
    ) -> Result<()>;
    /// Queues filling memory with one byte.
    ///
    /// # Safety
    /// See the trait.
    unsafe fn fill(&self, to: DevicePtr, byte: u8, bytes: usize, stream: StreamHandle) -> Result<()>;

    /// Loads a code object.
    fn load_module(&self, image: &[u8]) -> Result<ModuleHandle>;
    /// Unloads a code object.
    fn free_module(&self, module: ModuleHandle) -> Result<()>;
    /// Finds a kernel that will be launched with at most `shared_bytes` bytes of dynamic shared memory.
    fn function(&self, module: ModuleHandle, name: &str, shared_bytes: u32) -> Result<FunctionHandle>;
    /// Queues a kernel.
    ///
    /// # Safety
    /// See the trait.
    unsafe fn launch(&self, launch: &KernelLaunch<'_>, stream: StreamHandle) -> Result<()>;
    /// How many blocks of this kernel a multiprocessor runs at once; 0 where none may wait for another.
    fn blocks_together(&self, _function: FunctionHandle, _threads: u32, _shared_bytes: u32) -> Result<usize> {
        Ok(0)
    }
    /// Queues a kernel whose blocks all run at once, so that one may wait for another. There are no more of them than
    /// [`Driver::blocks_together`] says.
    ///
    /// # Safety
    /// See the trait.
    unsafe fn launch_together(&self, _launch: &KernelLaunch<'_>, _stream: StreamHandle) -> Result<()> {
        Err(no_launch_together(self.device().runtime))
    }

    /// Begins to capture the stream: its work is recorded in a graph and not executed.
    fn begin_capture(&self, stream: StreamHandle) -> Result<()>;
    /// Ends a capture, also after a failure within it. `GpuFault::Capture`:
    /// the capture was invalidated, by another thread's call for example, and the stream may refuse all work from now
    /// on, as HIP's do.
    fn end_capture(&self, stream: StreamHandle) -> Result<Captured>;
    /// Queues a launch of a graph.
    ///
    /// # Safety
    /// See the trait.
    unsafe fn launch_graph(&self, graph: GraphHandle, stream: StreamHandle) -> Result<()>;
    /// Destroys a graph.
    fn free_graph(&self, graph: GraphHandle) -> Result<()>;
}

/// Error codes that HIP and CUDA share.
#[cfg(all(test, any(feature = "cuda", feature = "hip")))]
const FAULTS_OF_ALL: [(i32, GpuFault); 17] = [
    (2, GpuFault::OutOfMemory),
    (100, GpuFault::NoDevice),
    (214, GpuFault::LostDevice),
    (700, GpuFault::LostDevice),
    (719, GpuFault::LostDevice),
    (200, GpuFault::InvalidImage),
    (209, GpuFault::NoBinary),
    (218, GpuFault::LoadFailed),
    (303, GpuFault::LoadFailed),
    (302, GpuFault::NoKernel),
    (500, GpuFault::NoKernel),
    (900, GpuFault::Capture),
    (901, GpuFault::Capture),
    (907, GpuFault::Capture),
    (908, GpuFault::Other),
    (1, GpuFault::Other),
    (12_345, GpuFault::Other),
];
