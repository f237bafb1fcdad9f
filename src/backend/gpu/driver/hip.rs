//! AMD devices, through the HIP runtime of ROCm 5.6 to 7.
//!
//! What differs from one ROCm to another is avoided: properties are read by symbols that name their struct's version,
//! and hipGraphUpload is not called, so that a graph's first launch uploads it.

mod api;

use super::{
    Captured, Device, DeviceMemory, DevicePtr, Driver, EventHandle, Found, FunctionHandle, GraphHandle, Launch, Link,
    ModuleHandle, Pinned, StreamHandle,
};
use crate::error::{Error, GpuFault, Result};
use api::{Api, Code};
use std::collections::HashSet;
use std::ffi::{CString, c_int, c_void};
use std::ptr::null_mut;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

const RUNTIME: &str = "hip";

/// All devices.
pub fn list() -> Result<Vec<Found>> {
    let api = api::api()?;
    let mut count = 0;
    // SAFETY: writes one int.
    let counted = check(RUNTIME, unsafe { (api.device_count)(&mut count) }, || {
        "hipGetDeviceCount".into()
    });
    match counted {
        Err(Error::Gpu {
            fault: GpuFault::NoDevice,
            ..
        }) => return Ok(Vec::new()),
        counted => counted?,
    }
    if count > 0 {
        check_version(api)?;
    }
    (0..count as usize).map(|ordinal| describe(api, ordinal)).collect()
}

/// Opens a device.
pub fn open(ordinal: usize) -> Result<Arc<dyn Driver>> {
    let api = api::api()?;
    check_version(api)?;
    Ok(Arc::new(Hip {
        api,
        device: describe(api, ordinal)?.device,
        name: device_name(ordinal),
        peers: Mutex::default(),
    }))
}

/// A name of a device that is the same for all processes of the machine: its PCI address.
pub fn shared_name(ordinal: usize) -> Result<String> {
    let (code, address) = api::api()?.pci_address(ordinal as c_int)?;
    check(&device_name(ordinal), code, || "hipDeviceGetPCIBusId".into())?;
    Ok(address)
}

struct Hip {
    api: &'static Api,
    device: Device,
    /// For errors: `hip:0`.
    name: String,
    /// Ordinals of the devices to which peer access has been set up.
    peers: Mutex<HashSet<usize>>,
}

/// Before ROCm 5.6 `hipModuleLaunchKernel` runs at once while its stream is captured, and the graph lacks it: each
/// launch of the graph would repeat what the kernels have computed then.
fn check_version(api: &Api) -> Result<()> {
    /// 5.6 as `HIP_VERSION`: major * 10^7 + minor * 10^5 + patch.
    const OLDEST: c_int = 50_600_000;
    let mut version = 0;
    // SAFETY: writes one int.
    check(RUNTIME, unsafe { (api.runtime_version)(&mut version) }, || {
        "hipRuntimeGetVersion".into()
    })?;
    if version >= OLDEST {
        return Ok(());
    }
    let (major, minor) = (version / 10_000_000, version / 100_000 % 100);
    Err(Error::Gpu {
        device: RUNTIME.into(),
        call: format!("hipRuntimeGetVersion: HIP {major}.{minor} ({version})"),
        fault: GpuFault::OldRuntime,
        code: None,
    })
}

fn device_name(ordinal: usize) -> String {
    format!("{RUNTIME}:{ordinal}")
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
        code: Some(code as i32),
    })
}

fn fault(code: Code) -> GpuFault {
    match code {
        // 1052 is the HSA runtime out of memory.
        2 | 1052 => GpuFault::OutOfMemory,
        // Not initialized; the kernel's driver is older than the library.
        3 | 35 => GpuFault::NoDriver,
        100 | 101 => GpuFault::NoDevice,
        // Deinitialized, an earlier launch failed, ECC, illegal address, timeout, context destroyed, assertion, launch
        // failed, unknown, the HSA runtime failed.
        4 | 53 | 214 | 700 | 702 | 709 | 710 | 719 | 999 | 1053 => GpuFault::LostDevice,
        200 => GpuFault::InvalidImage,
        209 => GpuFault::NoBinary,
        // Invalid kernel file, source or file not found, shared object not initialized.
        218 | 300 | 301 | 303 => GpuFault::LoadFailed,
        // Invalid device function, symbol not found in the shared object, not found.
        98 | 302 | 500 => GpuFault::NoKernel,
        900..=907 => GpuFault::Capture,
        _ => GpuFault::Other,
    }
}

fn describe(api: &Api, ordinal: usize) -> Result<Found> {
    let (code, properties) = api.properties(ordinal as c_int);
    check(&device_name(ordinal), code, || {
        format!("hipGetDeviceProperties({ordinal})")
    })?;
    Ok(Found {
        device: Device {
            runtime: RUNTIME,
            ordinal,
            name: properties.name,
            arch: properties.arch,
            multiprocessors: properties.multiprocessors,
        },
        total_bytes: properties.total_bytes,
    })
}

impl Hip {
    fn check(&self, code: Code, call: impl FnOnce() -> String) -> Result<()> {
        check(&self.name, code, call)
    }

    /// Makes the device current in this thread. The query is cheap; caching it would be wrong as soon as the program
    /// makes another device current.
    fn enter(&self) -> Result<()> {
        let ours = self.device.ordinal as c_int;
        let mut current = -1;
        // SAFETY: writes one int.
        self.check(unsafe { (self.api.current_device)(&mut current) }, || {
            "hipGetDevice".into()
        })?;
        if current == ours {
            return Ok(());
        }
        // SAFETY: takes no pointers.
        self.check(unsafe { (self.api.set_device)(ours) }, || {
            format!("hipSetDevice({ours})")
        })
    }

    /// Instantiates a captured graph and counts its nodes.
    fn instantiate(&self, graph: api::Graph) -> Result<Captured> {
        let mut nodes = 0;
        // SAFETY: `graph` is what a capture ended with; writes one size, and no nodes to NULL.
        let code = unsafe { (self.api.graph_nodes)(graph, null_mut(), &mut nodes) };
        self.check(code, || "hipGraphGetNodes".into())?;
        let mut exec = null_mut();
        // SAFETY: as above; the node that fails and the log are not wanted.
        let code = unsafe { (self.api.instantiate_graph)(&mut exec, graph, null_mut(), null_mut(), 0) };
        self.check(code, || "hipGraphInstantiate".into())?;
        Ok(Captured {
            graph: GraphHandle(exec as u64),
            nodes,
        })
    }

    /// Enables peer access to another device, if the machine has it. Without it the runtime copies through the host.
    fn reach(&self, peer: usize) -> Result<()> {
        let mut peers = self.peers.lock().unwrap_or_else(PoisonError::into_inner);
        if peers.contains(&peer) {
            return Ok(());
        }
        let mut can = 0;
        // SAFETY: writes one int.
        let code = unsafe { (self.api.can_access_peer)(&mut can, self.device.ordinal as c_int, peer as c_int) };
        self.check(code, || format!("hipDeviceCanAccessPeer({peer})"))?;
        if can != 0 {
            const ALREADY_ENABLED: Code = 704;
            // SAFETY: takes no pointers.
            let code = unsafe { (self.api.enable_peer)(peer as c_int, 0) };
            if code != ALREADY_ENABLED {
                self.check(code, || format!("hipDeviceEnablePeerAccess({peer})"))?;
            }
        }
        peers.insert(peer);
        Ok(())
    }
}

fn address(at: DevicePtr) -> *mut c_void {
    at.0 as *mut c_void
}

impl Driver for Hip {
    fn device(&self) -> &Device {
        &self.device
    }

    fn memory(&self) -> Result<DeviceMemory> {
        self.enter()?;
        let (mut free, mut total) = (0usize, 0usize);
        // SAFETY: writes two sizes.
        self.check(unsafe { (self.api.memory_info)(&mut free, &mut total) }, || {
            "hipMemGetInfo".into()
        })?;
        Ok(DeviceMemory {
            free: free as u64,
            total: total as u64,
        })
    }

    fn alloc(&self, bytes: usize) -> Result<DevicePtr> {
        self.enter()?;
        let mut at = null_mut();
        // SAFETY: writes one address. For 0 bytes it would be NULL.
        self.check(unsafe { (self.api.alloc)(&mut at, bytes.max(1)) }, || {
            format!("hipMalloc({bytes} bytes)")
        })?;
        Ok(DevicePtr(at as u64))
    }

    unsafe fn free(&self, at: DevicePtr) -> Result<()> {
        self.enter()?;
        // SAFETY: the caller guarantees that `at` came from `alloc` and is used no more.
        self.check(unsafe { (self.api.free)(address(at)) }, || "hipFree".into())
    }

    fn alloc_pinned(&self, bytes: usize) -> Result<Pinned> {
        self.enter()?;
        let call = || format!("hipHostMalloc({bytes} bytes)");
        let mut host = null_mut();
        let flags = api::hipHostMallocPortable | api::hipHostMallocMapped;
        // SAFETY: writes one pointer.
        self.check(unsafe { (self.api.alloc_host)(&mut host, bytes.max(1), flags) }, call)?;
        // SAFETY: just allocated with that many bytes.
        unsafe { host.cast::<u8>().write_bytes(0, bytes) };
        let mut device = null_mut();
        // SAFETY: `host` is mapped; writes one address.
        let code = unsafe { (self.api.host_address)(&mut device, host, 0) };
        let pinned = Pinned {
            host: host.cast(),
            device: DevicePtr(device as u64),
        };
        if let Err(error) = self.check(code, || "hipHostGetDevicePointer".into()) {
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
            "hipHostFree".into()
        })
    }

    fn stream(&self) -> Result<StreamHandle> {
        self.enter()?;
        let mut stream = null_mut();
        // SAFETY: writes one handle.
        let code = unsafe { (self.api.create_stream)(&mut stream, api::hipStreamNonBlocking) };
        self.check(code, || "hipStreamCreateWithFlags".into())?;
        Ok(StreamHandle(stream as u64))
    }

    fn free_stream(&self, stream: StreamHandle) -> Result<()> {
        self.enter()?;
        // SAFETY: handles come from `stream`.
        self.check(unsafe { (self.api.destroy_stream)(stream.0 as api::Stream) }, || {
            "hipStreamDestroy".into()
        })
    }

    fn synchronize(&self, stream: StreamHandle) -> Result<()> {
        self.enter()?;
        // SAFETY: the handle is live.
        self.check(
            unsafe { (self.api.synchronize_stream)(stream.0 as api::Stream) },
            || "hipStreamSynchronize".into(),
        )
    }

    fn synchronize_within(&self, stream: StreamHandle, limit: Duration) -> Result<bool> {
        self.enter()?;
        super::poll(limit, || {
            // SAFETY: the handle is live.
            match unsafe { (self.api.query_stream)(stream.0 as api::Stream) } {
                api::NOT_READY => Ok(false),
                code => self.check(code, || "hipStreamQuery".into()).map(|()| true),
            }
        })
    }

    fn event(&self, timing: bool) -> Result<EventHandle> {
        self.enter()?;
        let mut event = null_mut();
        let flags = if timing { 0 } else { api::hipEventDisableTiming };
        // SAFETY: writes one handle.
        self.check(unsafe { (self.api.create_event)(&mut event, flags) }, || {
            "hipEventCreateWithFlags".into()
        })?;
        Ok(EventHandle(event as u64))
    }

    fn free_event(&self, event: EventHandle) -> Result<()> {
        self.enter()?;
        // SAFETY: handles come from `event`.
        self.check(unsafe { (self.api.destroy_event)(event.0 as api::Event) }, || {
            "hipEventDestroy".into()
        })
    }

    fn record(&self, event: EventHandle, stream: StreamHandle) -> Result<()> {
        self.enter()?;
        // SAFETY: both handles are live.
        let code = unsafe { (self.api.record_event)(event.0 as api::Event, stream.0 as api::Stream) };
        self.check(code, || "hipEventRecord".into())
    }

    fn wait(&self, stream: StreamHandle, event: EventHandle) -> Result<()> {
        self.enter()?;
        // SAFETY: both handles are live.
        let code = unsafe { (self.api.wait_event)(stream.0 as api::Stream, event.0 as api::Event, 0) };
        self.check(code, || "hipStreamWaitEvent".into())
    }

    fn synchronize_event(&self, event: EventHandle) -> Result<()> {
        self.enter()?;
        // SAFETY: the handle is live.
        self.check(unsafe { (self.api.synchronize_event)(event.0 as api::Event) }, || {
            "hipEventSynchronize".into()
        })
    }

    fn elapsed_us(&self, from: EventHandle, to: EventHandle) -> Result<f64> {
        self.enter()?;
        let mut ms = 0f32;
        // SAFETY: both handles are live; writes one float.
        let code = unsafe { (self.api.elapsed_ms)(&mut ms, from.0 as api::Event, to.0 as api::Event) };
        self.check(code, || "hipEventElapsedTime".into())?;
        Ok(f64::from(ms) * 1e3)
    }

    unsafe fn copy_to_device(&self, to: DevicePtr, from: *const u8, bytes: usize, stream: StreamHandle) -> Result<()> {
        self.enter()?;
        // SAFETY: both ranges are valid until the stream has done the copy, as the caller guarantees; `from` is only
        // read.
        let code =
            unsafe { (self.api.copy_to_device)(address(to), from.cast_mut().cast(), bytes, stream.0 as api::Stream) };
        self.check(code, || format!("hipMemcpyHtoDAsync({bytes} bytes)"))
    }

    unsafe fn copy_to_host(&self, to: *mut u8, from: DevicePtr, bytes: usize, stream: StreamHandle) -> Result<()> {
        self.enter()?;
        // SAFETY: both ranges are valid until the stream has done the copy, as the caller guarantees.
        let code = unsafe { (self.api.copy_to_host)(to.cast(), address(from), bytes, stream.0 as api::Stream) };
        self.check(code, || format!("hipMemcpyDtoHAsync({bytes} bytes)"))
    }

    unsafe fn copy(&self, to: DevicePtr, from: DevicePtr, bytes: usize, stream: StreamHandle) -> Result<()> {
        self.enter()?;
        // SAFETY: both ranges are valid until the stream has done the copy, as the caller guarantees.
        let code = unsafe { (self.api.copy)(address(to), address(from), bytes, stream.0 as api::Stream) };
        self.check(code, || format!("hipMemcpyDtoDAsync({bytes} bytes)"))
    }

    fn link(&self, peer: &dyn Driver) -> Result<Link> {
        let ordinal = super::peer_ordinal(&self.name, RUNTIME, peer)?;
        if ordinal == self.device.ordinal {
            return Ok(Link::TO_ITSELF);
        }
        let (ours, theirs) = (self.device.ordinal as c_int, ordinal as c_int);
        let mut can = 0;
        // SAFETY: writes one int.
        self.check(unsafe { (self.api.can_access_peer)(&mut can, ours, theirs) }, || {
            format!("hipDeviceCanAccessPeer({ordinal})")
        })?;
        let (mut kind, mut hops) = (0, 0);
        // SAFETY: writes two numbers.
        let code = unsafe { (self.api.link)(ours, theirs, &mut kind, &mut hops) };
        let slower = if kind == api::LINK_XGMI { 0 } else { 1 << 16 };
        Ok(Link {
            direct: can != 0,
            // Runtimes that know nothing of a link, as in some containers, have devices all the same: they count as far.
            distance: match code {
                0 => hops.saturating_add(slower),
                _ => u32::MAX,
            },
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
        let theirs = super::peer_ordinal(&self.name, RUNTIME, peer)?;
        self.reach(theirs)?;
        let (to, ours, theirs) = (address(to), self.device.ordinal as c_int, theirs as c_int);
        // SAFETY: both ranges are valid until the stream has done the copy, as the caller guarantees.
        let code = unsafe { (self.api.copy_peer)(to, ours, address(from), theirs, bytes, stream.0 as api::Stream) };
        self.check(code, || format!("hipMemcpyPeerAsync({bytes} bytes from {theirs})"))
    }

    unsafe fn fill(&self, to: DevicePtr, byte: u8, bytes: usize, stream: StreamHandle) -> Result<()> {
        self.enter()?;
        // SAFETY: the range is valid until the stream has filled it, as the caller guarantees.
        let code = unsafe { (self.api.fill)(address(to), byte, bytes, stream.0 as api::Stream) };
        self.check(code, || format!("hipMemsetD8Async({bytes} bytes)"))
    }

    fn load_module(&self, image: &[u8]) -> Result<ModuleHandle> {
        super::check_elf(&self.name, image)?;
        self.enter()?;
        let mut module = null_mut();
        // SAFETY: the image is a whole ELF file, which says its own length; writes one handle.
        let code = unsafe { (self.api.load_module)(&mut module, image.as_ptr().cast()) };
        self.check(code, || format!("hipModuleLoadData({} bytes)", image.len()))?;
        Ok(ModuleHandle(module as u64))
    }

    fn free_module(&self, module: ModuleHandle) -> Result<()> {
        self.enter()?;
        // SAFETY: handles come from `load_module`.
        self.check(unsafe { (self.api.unload_module)(module.0 as api::Module) }, || {
            "hipModuleUnload".into()
        })
    }

    /// HIP needs no attribute for the dynamic size of the LDS.
    fn function(&self, module: ModuleHandle, name: &str, _shared_bytes: u32) -> Result<FunctionHandle> {
        self.enter()?;
        let c_name = CString::new(name).map_err(|_| Error::Internal(format!("kernel name {name:?} has a NUL")))?;
        let mut function = null_mut();
        // SAFETY: the handle is live, the name ends with NUL; writes one handle.
        let code = unsafe { (self.api.function)(&mut function, module.0 as api::Module, c_name.as_ptr()) };
        self.check(code, || format!("hipModuleGetFunction({name})"))?;
        Ok(FunctionHandle(function as u64))
    }

    unsafe fn launch(&self, launch: &Launch<'_>, stream: StreamHandle) -> Result<()> {
        self.enter()?;
        let Launch {
            grid,
            block,
            shared_bytes,
            ..
        } = *launch;
        let mut bytes = launch.args.len();
        let mut extra = [
            api::LAUNCH_BUFFER_POINTER,
            launch.args.as_ptr().cast_mut().cast(),
            api::LAUNCH_BUFFER_SIZE,
            (&raw mut bytes).cast(),
            api::LAUNCH_END,
        ];
        let (function, stream) = (launch.function.0 as api::Function, stream.0 as api::Stream);
        let (params, extra) = (null_mut(), extra.as_mut_ptr());
        // SAFETY: the caller guarantees that the arguments are the kernel's struct; they are copied before the call
        // ends.
        let code = unsafe { (self.api.launch)(function, grid, 1, 1, block, 1, 1, shared_bytes, stream, params, extra) };
        self.check(code, || {
            format!("hipModuleLaunchKernel({grid} blocks of {block}, {shared_bytes} bytes shared, {bytes} bytes of arguments)")
        })
    }

    fn begin_capture(&self, stream: StreamHandle) -> Result<()> {
        self.enter()?;
        // SAFETY: the handle is live. Thread-local mode: other threads' allocations do not invalidate the capture.
        let code = unsafe { (self.api.begin_capture)(stream.0 as api::Stream, api::CAPTURE_THREAD_LOCAL) };
        self.check(code, || "hipStreamBeginCapture".into())
    }

    fn end_capture(&self, stream: StreamHandle) -> Result<Captured> {
        self.enter()?;
        let mut graph = null_mut();
        // SAFETY: the handle is live; writes one handle, NULL if the capture was invalidated.
        let code = unsafe { (self.api.end_capture)(stream.0 as api::Stream, &mut graph) };
        self.check(code, || "hipStreamEndCapture".into())?;
        let captured = self.instantiate(graph);
        // SAFETY: the graph is this capture's; the instantiated one does not depend on it.
        let destroyed = self.check(unsafe { (self.api.destroy_graph)(graph) }, || "hipGraphDestroy".into());
        let captured = captured?;
        destroyed.map(|()| captured)
    }

    unsafe fn launch_graph(&self, graph: GraphHandle, stream: StreamHandle) -> Result<()> {
        self.enter()?;
        // SAFETY: both handles are live; the caller guarantees that the memory of the graph's work is live.
        let code = unsafe { (self.api.launch_graph)(graph.0 as api::GraphExec, stream.0 as api::Stream) };
        self.check(code, || "hipGraphLaunch".into())
    }

    fn free_graph(&self, graph: GraphHandle) -> Result<()> {
        self.enter()?;
        // SAFETY: handles come from `end_capture`.
        self.check(
            unsafe { (self.api.destroy_graph_exec)(graph.0 as api::GraphExec) },
            || "hipGraphExecDestroy".into(),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_become_faults() {
        for (code, expected) in super::super::FAULTS_OF_ALL {
            assert_eq!(fault(code as Code), expected, "{code}");
        }
    }
}
