//! The entry points of libcuda that are used, loaded at run time: the library runs with and without an NVIDIA driver.
//!
//! Declared here and not taken from cudarc, whose calls panic where the library or a symbol is missing, and whose
//! result type is a Rust enum: a number it does not know, from a newer driver, would be undefined behaviour.

use super::super::vendor::calls::{Calls, Code, Symbols, Types, no_driver, symbol};
use super::super::vendor::{Vendor, check};
use super::Cuda;
use crate::error::Result;
use libloading::os::unix::Library;
use std::ffi::{c_char, c_int, c_uint, c_ulonglong, c_void};
use std::sync::OnceLock;

/// `CUdevice`.
pub type Ordinal = c_int;
/// `CUdeviceptr`.
type Address = u64;
/// `CUcontext`, `CUstream`, `CUevent`, `CUmodule`, `CUfunction`, `CUgraph`, `CUgraphNode` and `CUgraphExec`: opaque
/// pointers.
pub type Handle = *mut c_void;

const RUNTIME: &str = Cuda::RUNTIME;

pub const ATTRIBUTE_MULTIPROCESSORS: c_int = 16;
pub const ATTRIBUTE_CAPABILITY_MAJOR: c_int = 75;
pub const ATTRIBUTE_CAPABILITY_MINOR: c_int = 76;
pub const ATTRIBUTE_COOPERATIVE_LAUNCH: c_int = 95;
/// `CU_DEVICE_P2P_ATTRIBUTE_PERFORMANCE_RANK`: the less, the faster.
pub const PEER_RANK: c_int = 1;
pub const PEER_ACCESS: c_int = 2;
pub const FUNCTION_MAX_DYNAMIC_SHARED_BYTES: c_int = 8;
pub const LAUNCH_END: *mut c_void = std::ptr::null_mut();
pub const LAUNCH_BUFFER_POINTER: *mut c_void = std::ptr::without_provenance_mut(1);
pub const LAUNCH_BUFFER_SIZE: *mut c_void = std::ptr::without_provenance_mut(2);

/// The types of the calls that HIP has, too.
pub struct CudaTypes;

impl Types for CudaTypes {
    type Address = Address;
    type Stream = Handle;
    type Event = Handle;
    type Module = Handle;
    type Function = Handle;
    type Graph = Handle;
    type GraphExec = Handle;
    type GraphNode = Handle;
    /// `CUstreamCaptureMode`
    type CaptureMode = c_int;
    const CAPTURE_THREAD_LOCAL: c_int = 1;
}

const SYMBOLS: Symbols = Symbols {
    device_count: "cuDeviceGetCount",
    memory_info: "cuMemGetInfo_v2",
    alloc: "cuMemAlloc_v2",
    free: "cuMemFree_v2",
    alloc_host: "cuMemHostAlloc",
    free_host: "cuMemFreeHost",
    host_address: "cuMemHostGetDevicePointer_v2",
    copy_to_device: "cuMemcpyHtoDAsync_v2",
    copy_to_host: "cuMemcpyDtoHAsync_v2",
    copy: "cuMemcpyDtoDAsync_v2",
    fill: "cuMemsetD8Async",
    create_stream: "cuStreamCreate",
    destroy_stream: "cuStreamDestroy_v2",
    synchronize_stream: "cuStreamSynchronize",
    query_stream: "cuStreamQuery",
    wait_event: "cuStreamWaitEvent",
    create_event: "cuEventCreate",
    destroy_event: "cuEventDestroy_v2",
    record_event: "cuEventRecord",
    synchronize_event: "cuEventSynchronize",
    elapsed_ms: "cuEventElapsedTime",
    load_module: "cuModuleLoadData",
    unload_module: "cuModuleUnload",
    function: "cuModuleGetFunction",
    begin_capture: "cuStreamBeginCapture_v2",
    end_capture: "cuStreamEndCapture",
    graph_nodes: "cuGraphGetNodes",
    destroy_graph: "cuGraphDestroy",
    launch_graph: "cuGraphLaunch",
    destroy_graph_exec: "cuGraphExecDestroy",
};

/// `CUlaunchConfig`.
#[repr(C)]
pub struct LaunchConfig {
    pub grid: [c_uint; 3],
    pub block: [c_uint; 3],
    pub shared_bytes: c_uint,
    pub stream: Handle,
    pub attributes: *const LaunchAttribute,
    pub attribute_count: c_uint,
}

/// `CUlaunchAttribute`, whose value is a union of 64 bytes.
#[repr(C, align(8))]
pub struct LaunchAttribute {
    id: c_uint,
    pad: c_uint,
    value: [c_int; 16],
}

const _: () = assert!(size_of::<LaunchConfig>() == 56 && size_of::<LaunchAttribute>() == 72);

impl LaunchAttribute {
    /// `CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION`: programmatic dependent launch (PDL).
    pub const OVERLAP: Self = Self::switched_on(6);
    /// `CU_LAUNCH_ATTRIBUTE_COOPERATIVE`: all blocks are on the device at once.
    pub const TOGETHER: Self = Self::switched_on(2);

    const fn switched_on(id: c_uint) -> Self {
        let mut value = [0; 16];
        value[0] = 1;
        Self { id, pad: 0, value }
    }
}

macro_rules! api {
    ($($name:ident = $symbol:literal ($($arg:ty),*);)*) => {
        /// libcuda's calls.
        pub struct Api {
            pub calls: Calls<CudaTypes>,
            $(pub $name: unsafe extern "C" fn($($arg),*) -> Code,)*
            // Last, so that it is dropped after the pointers into it.
            _library: Library,
        }

        impl Api {
            fn load() -> Result<Self> {
                let library = open_library()?;
                Ok(Self {
                    // SAFETY: the types are those of cuda.h (12.0 on) for these symbols, as are those below.
                    calls: unsafe { Calls::load(RUNTIME, &library, &SYMBOLS) }?,
                    // SAFETY: as above.
                    $($name: unsafe { symbol(RUNTIME, &library, $symbol) }?,)*
                    _library: library,
                })
            }
        }
    };
}

api! {
    init = "cuInit" (c_uint);
    device = "cuDeviceGet" (*mut Ordinal, c_int);
    device_name = "cuDeviceGetName" (*mut c_char, c_int, Ordinal);
    device_attribute = "cuDeviceGetAttribute" (*mut c_int, c_int, Ordinal);
    device_total = "cuDeviceTotalMem_v2" (*mut usize, Ordinal);
    can_access_peer = "cuDeviceCanAccessPeer" (*mut c_int, Ordinal, Ordinal);
    peer_attribute = "cuDeviceGetP2PAttribute" (*mut c_int, c_int, Ordinal, Ordinal);
    retain_context = "cuDevicePrimaryCtxRetain" (*mut Handle, Ordinal);
    release_context = "cuDevicePrimaryCtxRelease_v2" (Ordinal);
    current_context = "cuCtxGetCurrent" (*mut Handle);
    set_context = "cuCtxSetCurrent" (Handle);
    enable_peer = "cuCtxEnablePeerAccess" (Handle, c_uint);
    copy_peer = "cuMemcpyPeerAsync" (Address, Handle, Address, Handle, usize, Handle);
    set_function_attribute = "cuFuncSetAttribute" (Handle, c_int, c_int);
    occupancy = "cuOccupancyMaxActiveBlocksPerMultiprocessor" (*mut c_int, Handle, c_int, usize);
    launch = "cuLaunchKernelEx" (*const LaunchConfig, Handle, *mut *mut c_void, *mut *mut c_void);
    instantiate_graph = "cuGraphInstantiateWithFlags" (*mut Handle, Handle, c_ulonglong);
    upload_graph = "cuGraphUpload" (Handle, Handle);
}

impl Api {
    /// A device's UUID. Asked for by name, since only ranks that share devices need it.
    pub fn uuid(&self, device: Ordinal) -> Result<(Code, [u8; 16])> {
        type GetUuid = unsafe extern "C" fn(*mut [u8; 16], Ordinal) -> Code;
        // SAFETY: the type is that of cuda.h for this symbol.
        let get: GetUuid = unsafe { symbol(RUNTIME, &self._library, "cuDeviceGetUuid_v2") }?;
        let mut uuid = [0; 16];
        // SAFETY: writes 16 bytes.
        let code = unsafe { get(&mut uuid, device) };
        Ok((code, uuid))
    }
}

/// libcuda, loaded and initialized once; it stays loaded.
pub fn api() -> Result<&'static Api> {
    static API: OnceLock<Api> = OnceLock::new();
    if let Some(api) = API.get() {
        return Ok(api);
    }
    let api = Api::load()?;
    // SAFETY: takes no pointers; may be called any number of times.
    check::<Cuda>(RUNTIME, unsafe { (api.init)(0) }, || "cuInit".into())?;
    Ok(API.get_or_init(|| api))
}

fn open_library() -> Result<Library> {
    let name = "libcuda.so.1";
    // SAFETY: the initialization of NVIDIA's driver library has no preconditions.
    unsafe { Library::new(name) }.map_err(|_| no_driver(RUNTIME, format!("dlopen({name})")))
}
