//! NVIDIA devices, through the CUDA driver API.
//!
//! A device's primary context is used, which the program and its other libraries share. Every call first makes it
//! current in the calling thread. Launches pass the argument struct as one buffer; those that may overlap have the
//! attribute of programmatic dependent launch (PDL), which a captured graph keeps as a programmatic edge.

mod api;

use super::{
    Captured, Device, DeviceMemory, DevicePtr, Driver, EventHandle, Found, FunctionHandle, GraphHandle, Launch, Link,
    ModuleHandle, Pinned, StreamHandle,
};
use crate::error::{Error, GpuFault, Result};
use api::{Address, Api, Code, Handle, LaunchAttribute, LaunchConfig, Ordinal};
use std::collections::HashMap;
use std::ffi::{CString, c_int, c_uint, c_void};
use std::ptr::{null, null_mut};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

const RUNTIME: &str = "cuda";

/// All devices; no context is created.
pub fn list() -> Result<Vec<Found>> {
    let api = match api::api() {
        Err(Error::Gpu {
            fault: GpuFault::NoDevice,
            ..
        }) => return Ok(Vec::new()),
        api => api?,
    };
    let mut count = 0;
    // SAFETY: writes one int.
    check(RUNTIME, unsafe { (api.device_count)(&mut count) }, || {
        "cuDeviceGetCount".into()
    })?;
    (0..count as usize).map(|ordinal| describe(api, ordinal)).collect()
}

/// Opens a device.
pub fn open(ordinal: usize) -> Result<Arc<dyn Driver>> {
    let api = api::api()?;
    let device = describe(api, ordinal)?.device;
    let context = Context::retain(api, ordinal)?;
    Ok(Arc::new(Cuda {
        api,
        device,
        name: device_name(ordinal),
        context,
        peers: Mutex::default(),
    }))
}

/// A name of a device, or of the instance of one, that is the same for all processes of the machine.
pub fn shared_name(ordinal: usize) -> Result<String> {
    let api = api::api()?;
    let (code, uuid) = api.uuid(device_of(api, ordinal)?)?;
    check(&device_name(ordinal), code, || "cuDeviceGetUuid_v2".into())?;
    Ok(uuid.iter().map(|byte| format!("{byte:02x}")).collect())
}

struct Cuda {
    api: &'static Api,
    device: Device,
    /// For errors: `cuda:0`.
    name: String,
    context: Context,
    /// Contexts of the devices copied from, by ordinal.
    peers: Mutex<HashMap<usize, Context>>,
}

/// A device's primary context, released on drop.
struct Context {
    api: &'static Api,
    device: Ordinal,
    handle: u64,
}

impl Context {
    fn retain(api: &'static Api, ordinal: usize) -> Result<Self> {
        let name = device_name(ordinal);
        let device = device_of(api, ordinal)?;
        let mut handle = null_mut();
        // SAFETY: writes one handle.
        let code = unsafe { (api.retain_context)(&mut handle, device) };
        check(&name, code, || "cuDevicePrimaryCtxRetain".into())?;
        Ok(Self {
            api,
            device,
            handle: handle as u64,
        })
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: retained once in `retain`. A failure leaves a context that ends with the process.
        unsafe { (self.api.release_context)(self.device) };
    }
}

fn device_name(ordinal: usize) -> String {
    format!("{RUNTIME}:{ordinal}")
}

fn device_of(api: &Api, ordinal: usize) -> Result<Ordinal> {
    let mut device = 0;
    // SAFETY: writes one int.
    let code = unsafe { (api.device)(&mut device, ordinal as c_int) };
    check(&device_name(ordinal), code, || format!("cuDeviceGet({ordinal})"))?;
    Ok(device)
}

fn describe(api: &Api, ordinal: usize) -> Result<Found> {
    let at = device_name(ordinal);
    let device = device_of(api, ordinal)?;
    let attribute = |which: c_int| -> Result<c_int> {
        let mut value = 0;
        // SAFETY: writes one int.
        let code = unsafe { (api.device_attribute)(&mut value, which, device) };
        check(&at, code, || format!("cuDeviceGetAttribute({which})"))?;
        Ok(value)
    };
    let mut name = [0u8; 256];
    // SAFETY: writes at most as many bytes as it is told, NUL included.
    let code = unsafe { (api.device_name)(name.as_mut_ptr().cast(), name.len() as c_int, device) };
    check(&at, code, || "cuDeviceGetName".into())?;
    let mut total = 0usize;
    // SAFETY: writes one size.
    let code = unsafe { (api.device_total)(&mut total, device) };
    check(&at, code, || "cuDeviceTotalMem".into())?;
    let major = attribute(api::ATTRIBUTE_CAPABILITY_MAJOR)?;
    let minor = attribute(api::ATTRIBUTE_CAPABILITY_MINOR)?;
    Ok(Found {
        device: Device {
            runtime: RUNTIME,
            ordinal,
            name: super::text(&name),
            arch: format!("sm_{major}{minor}"),
            multiprocessors: attribute(api::ATTRIBUTE_MULTIPROCESSORS)? as usize,
        },
        total_bytes: total as u64,
    })
}

/// `Ok` for success, else the typed error of a call at `device`.
fn check(device: &str, code: Code, call: impl FnOnce() -> String) -> Result<()> {
    if code == 0 {
        return Ok(());
    }
    Err(Error::Gpu {
        device: device.to_owned(),
        call: call(),
        fault: fault(code),
        code: Some(code),
    })
}

fn fault(code: Code) -> GpuFault {
    match code {
        2 => GpuFault::OutOfMemory,
        // A stub of the library; library and kernel module that do not fit each other.
        34 | 36 | 803 | 804 => GpuFault::NoDriver,
        100 | 101 => GpuFault::NoDevice,
        // Deinitialized, unavailable, ECC, NVLink, contained.
        4 | 46 | 214 | 220 | 226 => GpuFault::LostDevice,
        // Illegal address, timeout, context destroyed, assertion, hardware stack, illegal instruction, misaligned
        // address, address space, program counter, launch failed, tensor memory leak, external device, unknown: each
        // ends the context.
        700 | 702 | 709 | 710 | 714..=719 | 721 | 911 | 999 => GpuFault::LostDevice,
        // Damaged, or PTX of a newer version than the driver's.
        200 | 222 => GpuFault::InvalidImage,
        209 => GpuFault::NoBinary,
        // Invalid PTX, no compiler for it or not allowed, invalid source, file not found, shared object not
        // initialized.
        218 | 221 | 223 | 300 | 301 | 303 => GpuFault::LoadFailed,
        // Symbol not found in the shared object, not found.
        302 | 500 => GpuFault::NoKernel,
        900..=907 => GpuFault::Capture,
        _ => GpuFault::Other,
    }
}

impl Cuda {
    fn check(&self, code: Code, call: impl FnOnce() -> String) -> Result<()> {
        check(&self.name, code, call)
    }

    /// Makes the device's context current in this thread. The query costs nanoseconds; caching it would be wrong as
    /// soon as the program makes another context current.
    fn enter(&self) -> Result<()> {
        let ours = self.context.handle as Handle;
        let mut current = null_mut();
        // SAFETY: writes one handle.
        self.check(unsafe { (self.api.current_context)(&mut current) }, || {
            "cuCtxGetCurrent".into()
        })?;
        if current == ours {
            return Ok(());
        }
        // SAFETY: the context is retained as long as `self` lives.
        self.check(unsafe { (self.api.set_context)(ours) }, || "cuCtxSetCurrent".into())
    }

    /// The context of another device, with peer access to its memory if the machine has it. Without it the driver
    /// copies through the host.
    fn peer_context(&self, ordinal: usize) -> Result<Handle> {
        let mut peers = self.peers.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(peer) = peers.get(&ordinal) {
            return Ok(peer.handle as Handle);
        }
        let peer = Context::retain(self.api, ordinal)?;
        let mut can = 0;
        // SAFETY: writes one int.
        let code = unsafe { (self.api.can_access_peer)(&mut can, self.context.device, peer.device) };
        self.check(code, || format!("cuDeviceCanAccessPeer({ordinal})"))?;
        if can != 0 {
            const ALREADY_ENABLED: Code = 704;
            // SAFETY: both contexts are retained.
            let code = unsafe { (self.api.enable_peer)(peer.handle as Handle, 0) };
            if code != ALREADY_ENABLED {
                self.check(code, || format!("cuCtxEnablePeerAccess({ordinal})"))?;
            }
        }
        let handle = peer.handle as Handle;
        peers.insert(ordinal, peer);
        Ok(handle)
    }

    /// Instantiates and uploads a captured graph, so that its first launch is as fast as later ones; counts its nodes.
    fn instantiate(&self, graph: Handle, stream: StreamHandle) -> Result<Captured> {
        let mut nodes = 0;
        // SAFETY: `graph` is what a capture ended with; writes one size, and no nodes to NULL.
        let code = unsafe { (self.api.graph_nodes)(graph, null_mut(), &mut nodes) };
        self.check(code, || "cuGraphGetNodes".into())?;
        let mut exec = null_mut();
        // SAFETY: as above.
        self.check(unsafe { (self.api.instantiate_graph)(&mut exec, graph, 0) }, || {
            "cuGraphInstantiate".into()
        })?;
        let captured = Captured {
            graph: GraphHandle(exec as u64),
            nodes,
        };
        // SAFETY: instantiated above; the stream is live and not captured any more.
        let uploaded = self.check(unsafe { (self.api.upload_graph)(exec, handle(stream.0)) }, || {
            "cuGraphUpload".into()
        });
        match uploaded {
            Ok(()) => Ok(captured),
            Err(error) => {
                // The first error is the one returned.
                let _ = self.free_graph(captured.graph);
                Err(error)
            }
        }
    }
}

fn handle(of: u64) -> Handle {
    of as Handle
}

impl Driver for Cuda {
    fn device(&self) -> &Device {
        &self.device
    }

    fn memory(&self) -> Result<DeviceMemory> {
        self.enter()?;
        let (mut free, mut total) = (0usize, 0usize);
        // SAFETY: writes two sizes.
        self.check(unsafe { (self.api.memory_info)(&mut free, &mut total) }, || {
            "cuMemGetInfo".into()
        })?;
        Ok(DeviceMemory {
            free: free as u64,
            total: total as u64,
        })
    }

    fn alloc(&self, bytes: usize) -> Result<DevicePtr> {
        self.enter()?;
        let mut at: Address = 0;
        // SAFETY: writes one address. The call refuses 0 bytes.
        self.check(unsafe { (self.api.alloc)(&mut at, bytes.max(1)) }, || {
            format!("cuMemAlloc({bytes} bytes)")
        })?;
        Ok(DevicePtr(at))
    }

    unsafe fn free(&self, at: DevicePtr) -> Result<()> {
        self.enter()?;
        // SAFETY: the caller guarantees that `at` came from `alloc` and is used no more.
        self.check(unsafe { (self.api.free)(at.0) }, || "cuMemFree".into())
    }

    fn alloc_pinned(&self, bytes: usize) -> Result<Pinned> {
        self.enter()?;
        let call = || format!("cuMemHostAlloc({bytes} bytes)");
        let mut host = null_mut();
        let flags = api::HOST_PORTABLE | api::HOST_DEVICE_MAP;
        // SAFETY: writes one pointer. The call refuses 0 bytes.
        self.check(unsafe { (self.api.alloc_host)(&mut host, bytes.max(1), flags) }, call)?;
        // SAFETY: just allocated with that many bytes.
        unsafe { host.cast::<u8>().write_bytes(0, bytes) };
        let mut device: Address = 0;
        // SAFETY: `host` is mapped; writes one address.
        let mapped = self.check(unsafe { (self.api.host_address)(&mut device, host, 0) }, || {
            "cuMemHostGetDevicePointer".into()
        });
        let pinned = Pinned {
            host: host.cast(),
            device: DevicePtr(device),
        };
        if let Err(error) = mapped {
            // SAFETY: allocated above and not used. The first error is the one returned.
            let _ = unsafe { self.free_pinned(pinned) };
            return Err(error);
        }
        Ok(pinned)
    }

    unsafe fn free_pinned(&self, pinned: Pinned) -> Result<()> {
        self.enter()?;
        // SAFETY: the caller guarantees that it came from `alloc_pinned` and is used no more.
        self.check(unsafe { (self.api.free_host)(pinned.host.cast()) }, || {
            "cuMemFreeHost".into()
        })
    }

    fn stream(&self) -> Result<StreamHandle> {
        self.enter()?;
        let mut stream = null_mut();
        // SAFETY: writes one handle.
        let code = unsafe { (self.api.create_stream)(&mut stream, api::STREAM_NON_BLOCKING) };
        self.check(code, || "cuStreamCreate".into())?;
        Ok(StreamHandle(stream as u64))
    }

    fn free_stream(&self, stream: StreamHandle) -> Result<()> {
        self.enter()?;
        // SAFETY: handles come from `stream`.
        self.check(unsafe { (self.api.destroy_stream)(handle(stream.0)) }, || {
            "cuStreamDestroy".into()
        })
    }

    fn synchronize(&self, stream: StreamHandle) -> Result<()> {
        self.enter()?;
        // SAFETY: the handle is live.
        self.check(unsafe { (self.api.synchronize_stream)(handle(stream.0)) }, || {
            "cuStreamSynchronize".into()
        })
    }

    fn synchronize_within(&self, stream: StreamHandle, limit: Duration) -> Result<bool> {
        self.enter()?;
        super::poll(limit, || {
            // SAFETY: the handle is live.
            match unsafe { (self.api.query_stream)(handle(stream.0)) } {
                api::NOT_READY => Ok(false),
                code => self.check(code, || "cuStreamQuery".into()).map(|()| true),
            }
        })
    }

    fn event(&self, timing: bool) -> Result<EventHandle> {
        self.enter()?;
        let mut event = null_mut();
        let flags = if timing { 0 } else { api::EVENT_DISABLE_TIMING };
        // SAFETY: writes one handle.
        self.check(unsafe { (self.api.create_event)(&mut event, flags) }, || {
            "cuEventCreate".into()
        })?;
        Ok(EventHandle(event as u64))
    }

    fn free_event(&self, event: EventHandle) -> Result<()> {
        self.enter()?;
        // SAFETY: handles come from `event`.
        self.check(unsafe { (self.api.destroy_event)(handle(event.0)) }, || {
            "cuEventDestroy".into()
        })
    }

    fn record(&self, event: EventHandle, stream: StreamHandle) -> Result<()> {
        self.enter()?;
        // SAFETY: both handles are live.
        let code = unsafe { (self.api.record_event)(handle(event.0), handle(stream.0)) };
        self.check(code, || "cuEventRecord".into())
    }

    fn wait(&self, stream: StreamHandle, event: EventHandle) -> Result<()> {
        self.enter()?;
        // SAFETY: both handles are live.
        let code = unsafe { (self.api.wait_event)(handle(stream.0), handle(event.0), 0) };
        self.check(code, || "cuStreamWaitEvent".into())
    }

    fn synchronize_event(&self, event: EventHandle) -> Result<()> {
        self.enter()?;
        // SAFETY: the handle is live.
        self.check(unsafe { (self.api.synchronize_event)(handle(event.0)) }, || {
            "cuEventSynchronize".into()
        })
    }

    fn elapsed_us(&self, from: EventHandle, to: EventHandle) -> Result<f64> {
        self.enter()?;
        let mut ms = 0f32;
        // SAFETY: both handles are live; writes one float.
        let code = unsafe { (self.api.elapsed_ms)(&mut ms, handle(from.0), handle(to.0)) };
        self.check(code, || "cuEventElapsedTime".into())?;
        Ok(f64::from(ms) * 1e3)
    }

    unsafe fn copy_to_device(&self, to: DevicePtr, from: *const u8, bytes: usize, stream: StreamHandle) -> Result<()> {
        self.enter()?;
        // SAFETY: both ranges are valid until the stream has done the copy, as the caller guarantees.
        let code = unsafe { (self.api.copy_to_device)(to.0, from.cast(), bytes, handle(stream.0)) };
        self.check(code, || format!("cuMemcpyHtoDAsync({bytes} bytes)"))
    }

    unsafe fn copy_to_host(&self, to: *mut u8, from: DevicePtr, bytes: usize, stream: StreamHandle) -> Result<()> {
        self.enter()?;
        // SAFETY: both ranges are valid until the stream has done the copy, as the caller guarantees.
        let code = unsafe { (self.api.copy_to_host)(to.cast(), from.0, bytes, handle(stream.0)) };
        self.check(code, || format!("cuMemcpyDtoHAsync({bytes} bytes)"))
    }

    unsafe fn copy(&self, to: DevicePtr, from: DevicePtr, bytes: usize, stream: StreamHandle) -> Result<()> {
        self.enter()?;
        // SAFETY: both ranges are valid until the stream has done the copy, as the caller guarantees.
        let code = unsafe { (self.api.copy)(to.0, from.0, bytes, handle(stream.0)) };
        self.check(code, || format!("cuMemcpyDtoDAsync({bytes} bytes)"))
    }

    fn link(&self, peer: &dyn Driver) -> Result<Link> {
        let ordinal = super::peer_ordinal(&self.name, RUNTIME, peer)?;
        if ordinal == self.device.ordinal {
            return Ok(Link::TO_ITSELF);
        }
        let theirs = device_of(self.api, ordinal)?;
        let attribute = |which: c_int| -> Result<c_int> {
            let mut value = 0;
            // SAFETY: writes one int.
            let code = unsafe { (self.api.peer_attribute)(&mut value, which, self.context.device, theirs) };
            self.check(code, || format!("cuDeviceGetP2PAttribute({which}, {ordinal})"))?;
            Ok(value)
        };
        Ok(Link {
            direct: attribute(api::PEER_ACCESS)? != 0,
            distance: attribute(api::PEER_RANK)?.max(0).cast_unsigned(),
        })
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
        let ordinal = super::peer_ordinal(&self.name, RUNTIME, peer)?;
        let ours = self.context.handle as Handle;
        let theirs = self.peer_context(ordinal)?;
        // SAFETY: both ranges are valid until the stream has done the copy, as the caller guarantees; both contexts are
        // retained.
        let code = unsafe { (self.api.copy_peer)(to.0, ours, from.0, theirs, bytes, handle(stream.0)) };
        self.check(code, || format!("cuMemcpyPeerAsync({bytes} bytes from {ordinal})"))
    }

    unsafe fn fill(&self, to: DevicePtr, byte: u8, bytes: usize, stream: StreamHandle) -> Result<()> {
        self.enter()?;
        // SAFETY: the range is valid until the stream has filled it, as the caller guarantees.
        let code = unsafe { (self.api.fill)(to.0, byte, bytes, handle(stream.0)) };
        self.check(code, || format!("cuMemsetD8Async({bytes} bytes)"))
    }

    fn load_module(&self, image: &[u8]) -> Result<ModuleHandle> {
        // PTX is a text, which begins with a comment and ends with NUL.
        if !(image.starts_with(b"//") && image.ends_with(b"\0")) {
            super::check_elf(&self.name, image)?;
        }
        self.enter()?;
        let mut module = null_mut();
        // SAFETY: the image is a whole ELF file, which says its own length, or a text that ends; writes one handle.
        let code = unsafe { (self.api.load_module)(&mut module, image.as_ptr().cast()) };
        self.check(code, || format!("cuModuleLoadData({} bytes)", image.len()))?;
        Ok(ModuleHandle(module as u64))
    }

    fn free_module(&self, module: ModuleHandle) -> Result<()> {
        self.enter()?;
        // SAFETY: handles come from `load_module`.
        self.check(unsafe { (self.api.unload_module)(handle(module.0)) }, || {
            "cuModuleUnload".into()
        })
    }

    fn function(&self, module: ModuleHandle, name: &str, shared_bytes: u32) -> Result<FunctionHandle> {
        self.enter()?;
        let c_name = CString::new(name).map_err(|_| Error::Internal(format!("kernel name {name:?} has a NUL")))?;
        let mut function = null_mut();
        // SAFETY: the handle is live, the name ends with NUL; writes one handle.
        let code = unsafe { (self.api.function)(&mut function, handle(module.0), c_name.as_ptr()) };
        self.check(code, || format!("cuModuleGetFunction({name})"))?;
        if shared_bytes > 0 {
            let which = api::FUNCTION_MAX_DYNAMIC_SHARED_BYTES;
            // SAFETY: found above.
            let code = unsafe { (self.api.set_function_attribute)(function, which, shared_bytes as c_int) };
            self.check(code, || {
                format!("cuFuncSetAttribute({name}, {shared_bytes} bytes shared)")
            })?;
        }
        Ok(FunctionHandle(function as u64))
    }

    unsafe fn launch(&self, launch: &Launch<'_>, stream: StreamHandle) -> Result<()> {
        self.enter()?;
        let config = LaunchConfig {
            grid: [launch.grid, 1, 1],
            block: [launch.block, 1, 1],
            shared_bytes: launch.shared_bytes,
            stream: handle(stream.0),
            attributes: if launch.overlap {
                &LaunchAttribute::OVERLAP
            } else {
                null()
            },
            attribute_count: c_uint::from(launch.overlap),
        };
        let mut bytes = launch.args.len();
        let mut extra = [
            api::LAUNCH_BUFFER_POINTER,
            launch.args.as_ptr() as *mut c_void,
            api::LAUNCH_BUFFER_SIZE,
            (&raw mut bytes).cast(),
            api::LAUNCH_END,
        ];
        // SAFETY: the caller guarantees that the arguments are the kernel's struct; they are copied before the call
        // ends.
        let code = unsafe { (self.api.launch)(&config, handle(launch.function.0), null_mut(), extra.as_mut_ptr()) };
        self.check(code, || {
            let Launch {
                grid,
                block,
                shared_bytes,
                ..
            } = launch;
            format!(
                "cuLaunchKernelEx({grid} blocks of {block}, {shared_bytes} bytes shared, {bytes} bytes of arguments)"
            )
        })
    }

    fn begin_capture(&self, stream: StreamHandle) -> Result<()> {
        self.enter()?;
        // SAFETY: the handle is live. Thread-local mode: other threads' allocations do not invalidate the capture.
        let code = unsafe { (self.api.begin_capture)(handle(stream.0), api::CAPTURE_THREAD_LOCAL) };
        self.check(code, || "cuStreamBeginCapture".into())
    }

    fn end_capture(&self, stream: StreamHandle) -> Result<Captured> {
        self.enter()?;
        let mut graph = null_mut();
        // SAFETY: the handle is live; writes one handle, NULL if the capture was invalidated.
        let code = unsafe { (self.api.end_capture)(handle(stream.0), &mut graph) };
        self.check(code, || "cuStreamEndCapture".into())?;
        let captured = self.instantiate(graph, stream);
        // SAFETY: the graph is this capture's; the instantiated one does not depend on it.
        let destroyed = self.check(unsafe { (self.api.destroy_graph)(graph) }, || "cuGraphDestroy".into());
        let captured = captured?;
        destroyed.map(|()| captured)
    }

    unsafe fn launch_graph(&self, graph: GraphHandle, stream: StreamHandle) -> Result<()> {
        self.enter()?;
        // SAFETY: both handles are live; the caller guarantees that the memory of the graph's work is live.
        self.check(
            unsafe { (self.api.launch_graph)(handle(graph.0), handle(stream.0)) },
            || "cuGraphLaunch".into(),
        )
    }

    fn free_graph(&self, graph: GraphHandle) -> Result<()> {
        self.enter()?;
        // SAFETY: handles come from `end_capture`.
        self.check(unsafe { (self.api.destroy_graph_exec)(handle(graph.0)) }, || {
            "cuGraphExecDestroy".into()
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_become_faults() {
        for (code, expected) in super::super::FAULTS_OF_ALL {
            assert_eq!(fault(code), expected, "{code}");
        }
    }

    #[test]
    fn an_error_names_device_call_and_code() {
        let error = check("cuda:1", 2, || "cuMemAlloc(64 bytes)".into())
            .unwrap_err()
            .to_string();
        assert!(
            error.starts_with("cuda:1: cuMemAlloc(64 bytes): out of device memory"),
            "{error}"
        );
        assert!(error.ends_with("(code 2)"), "{error}");
    }
}
