//! What drivers of NVIDIA's and AMD's devices have in common: [`Driver`] for whatever has their calls.

pub mod calls;

use super::{
    Captured, Device, DeviceMemory, DevicePtr, Driver, EventHandle, FunctionHandle, GraphHandle, KernelLaunch, Link,
    ModuleHandle, Pinned, StreamHandle, no_launch_together,
};
use crate::error::{Error, GpuFault, Result};
use calls::{Calls, Code, Raw, Types};
use std::ffi::CString;
use std::ptr::null_mut;
use std::thread;
use std::time::{Duration, Instant};

/// A device of a runtime that has the common calls, and what it does in a way of its own.
///
/// # Safety
///
/// As of [`Driver`].
pub trait Vendor: Send + Sync {
    /// The runtime's types.
    type Types: Types;
    /// `hip` or `cuda`.
    const RUNTIME: &'static str;

    /// What a code means.
    fn fault(code: Code) -> GpuFault;
    /// The device's properties.
    fn properties(&self) -> &Device;
    /// For errors: `cuda:0`.
    fn name(&self) -> &str;
    /// The common calls.
    fn calls(&self) -> &Calls<Self::Types>;
    /// Makes the device current in this thread. Every call does it, which asks first; caching the answer would be wrong
    /// as soon as the program makes another device current.
    fn enter(&self) -> Result<()>;
    /// How it reaches another device of the runtime.
    fn link_to(&self, ordinal: usize) -> Result<Link>;
    /// Queues a copy from another device of the runtime.
    ///
    /// # Safety
    /// See the trait.
    unsafe fn copy_from(
        &self,
        to: DevicePtr,
        ordinal: usize,
        from: DevicePtr,
        bytes: usize,
        stream: StreamHandle,
    ) -> Result<()>;
    /// Whether the loader may be given an image that is no ELF file.
    fn takes(_image: &[u8]) -> bool {
        false
    }
    /// Lets a kernel be launched with so much dynamic shared memory.
    fn allow_shared(&self, function: FunctionHandle, name: &str, bytes: u32) -> Result<()>;
    /// Queues a kernel.
    ///
    /// # Safety
    /// See the trait.
    unsafe fn queue(&self, launch: &KernelLaunch<'_>, stream: StreamHandle) -> Result<()>;
    /// See [`Driver::blocks_together`].
    fn together(&self, _function: FunctionHandle, _threads: u32, _shared_bytes: u32) -> Result<usize> {
        Ok(0)
    }
    /// See [`Driver::launch_together`].
    ///
    /// # Safety
    /// See the trait.
    unsafe fn queue_together(&self, _launch: &KernelLaunch<'_>, _stream: StreamHandle) -> Result<()> {
        Err(no_launch_together(Self::RUNTIME))
    }
    /// Makes a graph that can be launched of a captured one.
    fn instantiate(&self, graph: <Self::Types as Types>::Graph, stream: StreamHandle) -> Result<GraphHandle>;

    /// `Ok` for success, else the typed error of this call.
    fn check(&self, code: Code, call: impl FnOnce() -> String) -> Result<()> {
        check::<Self>(self.name(), code, call)
    }
}

/// `Ok` for success, else the typed error of a call at `device`.
pub fn check<V: Vendor + ?Sized>(device: &str, code: Code, call: impl FnOnce() -> String) -> Result<()> {
    if code == 0 {
        return Ok(());
    }
    Err(Error::Gpu {
        device: device.to_owned(),
        call: call(),
        fault: V::fault(code),
        code: Some(code),
    })
}

/// For errors: `cuda:0`.
pub fn device_name<V: Vendor>(ordinal: usize) -> String {
    format!("{}:{ordinal}", V::RUNTIME)
}

/// The C string in a buffer.
pub fn text(buffer: &[u8]) -> String {
    let end = buffer.iter().position(|&byte| byte == 0).unwrap_or(buffer.len());
    String::from_utf8_lossy(&buffer[..end]).into_owned()
}

/// The number of devices; 0 where the runtime says that there is none.
pub fn count<V: Vendor>(calls: &Calls<V::Types>) -> Result<usize> {
    let call = &calls.device_count;
    let mut count = 0;
    // SAFETY: writes one int.
    let code = unsafe { (call.function)(&mut count) };
    match check::<V>(V::RUNTIME, code, || call.name.into()) {
        Err(Error::Gpu {
            fault: GpuFault::NoDevice,
            ..
        }) => Ok(0),
        counted => counted.map(|()| count as usize),
    }
}

/// Does this until it has been done, or for as long as `limit`.
fn poll(limit: Duration, is_done: impl Fn() -> Result<bool>) -> Result<bool> {
    let begin = Instant::now();
    while !is_done()? {
        if begin.elapsed() > limit {
            return Ok(false);
        }
        thread::sleep(Duration::from_millis(1));
    }
    Ok(true)
}

/// The ordinal of a peer device, which must be of the same runtime.
fn peer_ordinal<V: Vendor>(of: &V, peer: &dyn Driver) -> Result<usize> {
    let peer = peer.device();
    if peer.runtime == V::RUNTIME {
        return Ok(peer.ordinal);
    }
    Err(Error::Internal(format!(
        "{} cannot copy from {}:{}, a device of another runtime",
        of.name(),
        peer.runtime,
        peer.ordinal
    )))
}

/// A loader is given only an image's address and trusts its header, so the image must be an ELF file.
fn check_elf(device: &str, image: &[u8]) -> Result<()> {
    const HEADER_BYTES: usize = 64;
    if image.len() >= HEADER_BYTES && image.starts_with(b"\x7fELF") {
        return Ok(());
    }
    Err(Error::Gpu {
        device: device.to_owned(),
        call: format!("loading a code object of {} bytes", image.len()),
        fault: GpuFault::InvalidImage,
        code: None,
    })
}

impl<V: Vendor> Driver for V {
    fn device(&self) -> &Device {
        self.properties()
    }

    fn memory(&self) -> Result<DeviceMemory> {
        self.enter()?;
        let call = &self.calls().memory_info;
        let (mut free, mut total) = (0usize, 0usize);
        // SAFETY: writes two sizes.
        let code = unsafe { (call.function)(&mut free, &mut total) };
        self.check(code, || call.name.into())?;
        Ok(DeviceMemory {
            free: free as u64,
            total: total as u64,
        })
    }

    fn alloc(&self, bytes: usize) -> Result<DevicePtr> {
        self.enter()?;
        let call = &self.calls().alloc;
        let mut at = Raw::of(0);
        // SAFETY: writes one address. For 0 bytes CUDA fails and HIP gives NULL.
        let code = unsafe { (call.function)(&mut at, bytes.max(1)) };
        self.check(code, || format!("{}({bytes} bytes)", call.name))?;
        Ok(DevicePtr(at.raw()))
    }

    unsafe fn free(&self, at: DevicePtr) -> Result<()> {
        self.enter()?;
        let call = &self.calls().free;
        // SAFETY: the caller guarantees that `at` came from `alloc` and is used no more.
        let code = unsafe { (call.function)(Raw::of(at.0)) };
        self.check(code, || call.name.into())
    }

    fn alloc_pinned(&self, bytes: usize) -> Result<Pinned> {
        self.enter()?;
        let calls = self.calls();
        let call = &calls.alloc_host;
        let mut host = null_mut();
        let flags = calls::HOST_PORTABLE | calls::HOST_MAPPED;
        // SAFETY: writes one pointer. CUDA refuses 0 bytes.
        let code = unsafe { (call.function)(&mut host, bytes.max(1), flags) };
        self.check(code, || format!("{}({bytes} bytes)", call.name))?;
        // SAFETY: just allocated with that many bytes.
        unsafe { host.cast::<u8>().write_bytes(0, bytes) };
        let call = &calls.host_address;
        let mut device = Raw::of(0);
        // SAFETY: `host` is mapped; writes one address.
        let code = unsafe { (call.function)(&mut device, host, 0) };
        let pinned = Pinned {
            host: host.cast(),
            device: DevicePtr(device.raw()),
        };
        if let Err(error) = self.check(code, || call.name.into()) {
            // SAFETY: allocated above and not used. The first error is the one returned.
            let _ = unsafe { self.free_pinned(pinned) };
            return Err(error);
        }
        Ok(pinned)
    }

    unsafe fn free_pinned(&self, pinned: Pinned) -> Result<()> {
        self.enter()?;
        let call = &self.calls().free_host;
        // SAFETY: the caller guarantees that it came from `alloc_pinned` and is used no more.
        let code = unsafe { (call.function)(pinned.host.cast()) };
        self.check(code, || call.name.into())
    }

    fn stream(&self) -> Result<StreamHandle> {
        self.enter()?;
        let call = &self.calls().create_stream;
        let mut stream = Raw::of(0);
        // SAFETY: writes one handle.
        let code = unsafe { (call.function)(&mut stream, calls::STREAM_NON_BLOCKING) };
        self.check(code, || call.name.into())?;
        Ok(StreamHandle(stream.raw()))
    }

    fn free_stream(&self, stream: StreamHandle) -> Result<()> {
        self.enter()?;
        let call = &self.calls().destroy_stream;
        // SAFETY: handles come from `stream`.
        let code = unsafe { (call.function)(Raw::of(stream.0)) };
        self.check(code, || call.name.into())
    }

    fn synchronize(&self, stream: StreamHandle) -> Result<()> {
        self.enter()?;
        let call = &self.calls().synchronize_stream;
        // SAFETY: the handle is live.
        let code = unsafe { (call.function)(Raw::of(stream.0)) };
        self.check(code, || call.name.into())
    }

    fn synchronize_within(&self, stream: StreamHandle, limit: Duration) -> Result<bool> {
        self.enter()?;
        let call = &self.calls().query_stream;
        poll(limit, || {
            // SAFETY: the handle is live.
            match unsafe { (call.function)(Raw::of(stream.0)) } {
                calls::NOT_READY => Ok(false),
                code => self.check(code, || call.name.into()).map(|()| true),
            }
        })
    }

    fn event(&self, timing: bool) -> Result<EventHandle> {
        self.enter()?;
        let call = &self.calls().create_event;
        let mut event = Raw::of(0);
        let flags = if timing { 0 } else { calls::EVENT_DISABLE_TIMING };
        // SAFETY: writes one handle.
        let code = unsafe { (call.function)(&mut event, flags) };
        self.check(code, || call.name.into())?;
        Ok(EventHandle(event.raw()))
    }

    fn free_event(&self, event: EventHandle) -> Result<()> {
        self.enter()?;
        let call = &self.calls().destroy_event;
        // SAFETY: handles come from `event`.
        let code = unsafe { (call.function)(Raw::of(event.0)) };
        self.check(code, || call.name.into())
    }

    fn record(&self, event: EventHandle, stream: StreamHandle) -> Result<()> {
        self.enter()?;
        let call = &self.calls().record_event;
        // SAFETY: both handles are live.
        let code = unsafe { (call.function)(Raw::of(event.0), Raw::of(stream.0)) };
        self.check(code, || call.name.into())
    }

    fn wait(&self, stream: StreamHandle, event: EventHandle) -> Result<()> {
        self.enter()?;
        let call = &self.calls().wait_event;
        // SAFETY: both handles are live.
        let code = unsafe { (call.function)(Raw::of(stream.0), Raw::of(event.0), 0) };
        self.check(code, || call.name.into())
    }

    fn synchronize_event(&self, event: EventHandle) -> Result<()> {
        self.enter()?;
        let call = &self.calls().synchronize_event;
        // SAFETY: the handle is live.
        let code = unsafe { (call.function)(Raw::of(event.0)) };
        self.check(code, || call.name.into())
    }

    fn elapsed_us(&self, from: EventHandle, to: EventHandle) -> Result<f64> {
        self.enter()?;
        let call = &self.calls().elapsed_ms;
        let mut ms = 0f32;
        // SAFETY: both handles are live; writes one float.
        let code = unsafe { (call.function)(&mut ms, Raw::of(from.0), Raw::of(to.0)) };
        self.check(code, || call.name.into())?;
        Ok(f64::from(ms) * 1e3)
    }

    unsafe fn copy_to_device(&self, to: DevicePtr, from: *const u8, bytes: usize, stream: StreamHandle) -> Result<()> {
        self.enter()?;
        let call = &self.calls().copy_to_device;
        // SAFETY: both ranges are valid until the stream has done the copy, as the caller guarantees; `from` is only
        // read.
        let code = unsafe { (call.function)(Raw::of(to.0), from.cast_mut().cast(), bytes, Raw::of(stream.0)) };
        self.check(code, || format!("{}({bytes} bytes)", call.name))
    }

    unsafe fn copy_to_host(&self, to: *mut u8, from: DevicePtr, bytes: usize, stream: StreamHandle) -> Result<()> {
        self.enter()?;
        let call = &self.calls().copy_to_host;
        // SAFETY: both ranges are valid until the stream has done the copy, as the caller guarantees.
        let code = unsafe { (call.function)(to.cast(), Raw::of(from.0), bytes, Raw::of(stream.0)) };
        self.check(code, || format!("{}({bytes} bytes)", call.name))
    }

    unsafe fn copy(&self, to: DevicePtr, from: DevicePtr, bytes: usize, stream: StreamHandle) -> Result<()> {
        self.enter()?;
        let call = &self.calls().copy;
        // SAFETY: both ranges are valid until the stream has done the copy, as the caller guarantees.
        let code = unsafe { (call.function)(Raw::of(to.0), Raw::of(from.0), bytes, Raw::of(stream.0)) };
        self.check(code, || format!("{}({bytes} bytes)", call.name))
    }

    fn link(&self, peer: &dyn Driver) -> Result<Link> {
        let ordinal = peer_ordinal(self, peer)?;
        if ordinal == self.properties().ordinal {
            return Ok(Link::TO_ITSELF);
        }
        self.link_to(ordinal)
    }

    unsafe fn copy_from_peer(
        &self,
        to: DevicePtr,
        peer: &dyn Driver,
        from: DevicePtr,
        bytes: usize,
        stream: StreamHandle,
    ) -> Result<()> {
        self.enter()?;
        let ordinal = peer_ordinal(self, peer)?;
        // SAFETY: as the caller guarantees.
        unsafe { self.copy_from(to, ordinal, from, bytes, stream) }
    }

    unsafe fn fill(&self, to: DevicePtr, byte: u8, bytes: usize, stream: StreamHandle) -> Result<()> {
        self.enter()?;
        let call = &self.calls().fill;
        // SAFETY: the range is valid until the stream has filled it, as the caller guarantees.
        let code = unsafe { (call.function)(Raw::of(to.0), byte, bytes, Raw::of(stream.0)) };
        self.check(code, || format!("{}({bytes} bytes)", call.name))
    }

    fn load_module(&self, image: &[u8]) -> Result<ModuleHandle> {
        if !V::takes(image) {
            check_elf(self.name(), image)?;
        }
        self.enter()?;
        let call = &self.calls().load_module;
        let mut module = Raw::of(0);
        // SAFETY: the image is a whole ELF file, which says its own length, or the runtime finds its end; writes one
        // handle.
        let code = unsafe { (call.function)(&mut module, image.as_ptr().cast()) };
        self.check(code, || format!("{}({} bytes)", call.name, image.len()))?;
        Ok(ModuleHandle(module.raw()))
    }

    fn free_module(&self, module: ModuleHandle) -> Result<()> {
        self.enter()?;
        let call = &self.calls().unload_module;
        // SAFETY: handles come from `load_module`.
        let code = unsafe { (call.function)(Raw::of(module.0)) };
        self.check(code, || call.name.into())
    }

    fn function(&self, module: ModuleHandle, name: &str, shared_bytes: u32) -> Result<FunctionHandle> {
        self.enter()?;
        let call = &self.calls().function;
        let c_name = CString::new(name).map_err(|_| Error::Internal(format!("kernel name {name:?} has a NUL")))?;
        let mut function = Raw::of(0);
        // SAFETY: the handle is live, the name ends with NUL; writes one handle.
        let code = unsafe { (call.function)(&mut function, Raw::of(module.0), c_name.as_ptr()) };
        self.check(code, || format!("{}({name})", call.name))?;
        let function = FunctionHandle(function.raw());
        self.allow_shared(function, name, shared_bytes)?;
        Ok(function)
    }

    unsafe fn launch(&self, launch: &KernelLaunch<'_>, stream: StreamHandle) -> Result<()> {
        self.enter()?;
        // SAFETY: as the caller guarantees.
        unsafe { self.queue(launch, stream) }
    }

    fn blocks_together(&self, function: FunctionHandle, threads: u32, shared_bytes: u32) -> Result<usize> {
        self.enter()?;
        self.together(function, threads, shared_bytes)
    }

    unsafe fn launch_together(&self, launch: &KernelLaunch<'_>, stream: StreamHandle) -> Result<()> {
        self.enter()?;
        // SAFETY: as the caller guarantees.
        unsafe { self.queue_together(launch, stream) }
    }

    fn begin_capture(&self, stream: StreamHandle) -> Result<()> {
        self.enter()?;
        let call = &self.calls().begin_capture;
        // SAFETY: the handle is live.
        let code = unsafe { (call.function)(Raw::of(stream.0), V::Types::CAPTURE_THREAD_LOCAL) };
        self.check(code, || call.name.into())
    }

    fn end_capture(&self, stream: StreamHandle) -> Result<Captured> {
        self.enter()?;
        let calls = self.calls();
        let mut graph = Raw::of(0);
        // SAFETY: the handle is live; writes one handle, NULL if the capture was invalidated.
        let code = unsafe { (calls.end_capture.function)(Raw::of(stream.0), &mut graph) };
        self.check(code, || calls.end_capture.name.into())?;
        let captured = captured(self, graph, stream);
        // SAFETY: the graph is this capture's; the instantiated one does not depend on it.
        let code = unsafe { (calls.destroy_graph.function)(graph) };
        let destroyed = self.check(code, || calls.destroy_graph.name.into());
        let captured = captured?;
        destroyed.map(|()| captured)
    }

    unsafe fn launch_graph(&self, graph: GraphHandle, stream: StreamHandle) -> Result<()> {
        self.enter()?;
        let call = &self.calls().launch_graph;
        // SAFETY: both handles are live; the caller guarantees that the memory of the graph's work is live.
        let code = unsafe { (call.function)(Raw::of(graph.0), Raw::of(stream.0)) };
        self.check(code, || call.name.into())
    }

    fn free_graph(&self, graph: GraphHandle) -> Result<()> {
        self.enter()?;
        let call = &self.calls().destroy_graph_exec;
        // SAFETY: handles come from `end_capture`.
        let code = unsafe { (call.function)(Raw::of(graph.0)) };
        self.check(code, || call.name.into())
    }
}

/// Instantiates a captured graph and counts its nodes.
fn captured<V: Vendor>(of: &V, graph: <V::Types as Types>::Graph, stream: StreamHandle) -> Result<Captured> {
    let call = &of.calls().graph_nodes;
    let mut nodes = 0;
    // SAFETY: `graph` is what a capture ended with; writes one size, and no nodes to NULL.
    let code = unsafe { (call.function)(graph, null_mut(), &mut nodes) };
    of.check(code, || call.name.into())?;
    let graph = of.instantiate(graph, stream)?;
    Ok(Captured { graph, nodes })
}
