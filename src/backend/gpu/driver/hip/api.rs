//! The entry points of libamdhip64 that are used, loaded at run time: the library runs with and without ROCm.
//!
//! hip-sys gives types and constants, and the compiler checks the types below against its declarations; nothing links
//! to its functions. Their result, a Rust enum of HIP 5.4's codes, is a plain number here: a code of a newer runtime
//! would be undefined behaviour as that enum.

use super::super::vendor::calls::{self, Call, Calls, Code, Symbols, Types, no_driver, symbol};
use super::super::vendor::{Vendor, text};
use super::Hip;
use crate::error::Result;
use hip_sys::hiprt;
use libloading::os::unix::{Library, RTLD_LAZY, RTLD_LOCAL};
use std::ffi::{OsStr, c_char, c_int, c_uint, c_void};
use std::mem::offset_of;
use std::path::PathBuf;
use std::sync::OnceLock;

pub use hiprt::hipDeviceAttribute_t::hipDeviceAttributeCooperativeLaunch as COOPERATIVE_LAUNCH;
pub use hiprt::{hipFunction_t as Function, hipGraph_t as Graph, hipGraphExec_t as GraphExec, hipStream_t as Stream};

const RUNTIME: &str = Hip::RUNTIME;

/// `HSA_AMD_LINK_INFO_TYPE_XGMI`
pub const LINK_XGMI: u32 = 4;

pub const LAUNCH_BUFFER_POINTER: *mut c_void = std::ptr::without_provenance_mut(1);
pub const LAUNCH_BUFFER_SIZE: *mut c_void = std::ptr::without_provenance_mut(2);
pub const LAUNCH_END: *mut c_void = std::ptr::without_provenance_mut(3);

/// hip-sys's types of the calls that CUDA has, too.
pub struct HipTypes;

impl Types for HipTypes {
    type Address = *mut c_void;
    type Stream = Stream;
    type Event = hiprt::hipEvent_t;
    type Module = hiprt::hipModule_t;
    type Function = Function;
    type Graph = Graph;
    type GraphExec = GraphExec;
    type GraphNode = hiprt::hipGraphNode_t;
    type CaptureMode = hiprt::hipStreamCaptureMode;
    const CAPTURE_THREAD_LOCAL: Self::CaptureMode = hiprt::hipStreamCaptureMode::hipStreamCaptureModeThreadLocal;
}

const _: () = {
    assert!(hiprt::hipError_t::hipErrorNotReady as Code == calls::NOT_READY);
    assert!(hiprt::hipError_t::hipErrorPeerAccessAlreadyEnabled as Code == calls::PEER_ALREADY_ENABLED);
    assert!(hiprt::hipStreamNonBlocking == calls::STREAM_NON_BLOCKING);
    assert!(hiprt::hipEventDisableTiming == calls::EVENT_DISABLE_TIMING);
    assert!(hiprt::hipHostMallocPortable == calls::HOST_PORTABLE);
    assert!(hiprt::hipHostMallocMapped == calls::HOST_MAPPED);
};

macro_rules! common {
    ($($name:ident = $function:ident;)*) => {
        const SYMBOLS: Symbols = Symbols {
            $($name: stringify!($function),)*
        };

        // The types are hip-sys's.
        const _: Calls<HipTypes, hiprt::hipError_t> = Calls {
            $($name: Call {
                name: "",
                function: hiprt::$function,
            },)*
        };
    };
}

common! {
    device_count = hipGetDeviceCount;
    memory_info = hipMemGetInfo;
    alloc = hipMalloc;
    free = hipFree;
    alloc_host = hipHostMalloc;
    free_host = hipHostFree;
    host_address = hipHostGetDevicePointer;
    copy_to_device = hipMemcpyHtoDAsync;
    copy_to_host = hipMemcpyDtoHAsync;
    copy = hipMemcpyDtoDAsync;
    fill = hipMemsetD8Async;
    create_stream = hipStreamCreateWithFlags;
    destroy_stream = hipStreamDestroy;
    synchronize_stream = hipStreamSynchronize;
    query_stream = hipStreamQuery;
    wait_event = hipStreamWaitEvent;
    create_event = hipEventCreateWithFlags;
    destroy_event = hipEventDestroy;
    record_event = hipEventRecord;
    synchronize_event = hipEventSynchronize;
    elapsed_ms = hipEventElapsedTime;
    load_module = hipModuleLoadData;
    unload_module = hipModuleUnload;
    function = hipModuleGetFunction;
    begin_capture = hipStreamBeginCapture;
    end_capture = hipStreamEndCapture;
    graph_nodes = hipGraphGetNodes;
    destroy_graph = hipGraphDestroy;
    launch_graph = hipGraphLaunch;
    destroy_graph_exec = hipGraphExecDestroy;
}

macro_rules! api {
    ($($name:ident = $function:ident ($($arg:ty),*);)*) => {
        /// libamdhip64's calls.
        pub struct Api {
            pub calls: Calls<HipTypes>,
            $(pub $name: unsafe extern "C" fn($($arg),*) -> Code,)*
            /// What launches blocks that wait for each other, if this runtime has it.
            pub launch_together: Option<LaunchTogether>,
            get_properties: GetProperties,
            layout: &'static Layout,
            // Last, so that it is dropped after the pointers into it.
            _library: Library,
        }

        // The types are hip-sys's.
        $(const _: unsafe extern "C" fn($($arg),*) -> hiprt::hipError_t = hiprt::$function;)*

        impl Api {
            fn load() -> Result<Self> {
                let library = open_library()?;
                let (get_properties, layout) = properties_of(&library)?;
                Ok(Self {
                    // SAFETY: the types are those of hip_runtime_api.h for these symbols, which ROCm 5 to 7 agree on;
                    // the result, an enum there, is passed as a number of 32 bits.
                    calls: unsafe { Calls::load(RUNTIME, &library, &SYMBOLS) }?,
                    // SAFETY: as above.
                    $($name: unsafe { symbol(RUNTIME, &library, stringify!($function)) }?,)*
                    // SAFETY: the type is that of hip_runtime_api.h in all ROCms that have it.
                    launch_together: unsafe { symbol(RUNTIME, &library, "hipModuleLaunchCooperativeKernel") }.ok(),
                    get_properties,
                    layout,
                    _library: library,
                })
            }
        }
    };
}

api! {
    runtime_version = hipRuntimeGetVersion(*mut c_int);
    current_device = hipGetDevice(*mut c_int);
    set_device = hipSetDevice(c_int);
    can_access_peer = hipDeviceCanAccessPeer(*mut c_int, c_int, c_int);
    enable_peer = hipDeviceEnablePeerAccess(c_int, c_uint);
    link = hipExtGetLinkTypeAndHopCount(c_int, c_int, *mut u32, *mut u32);
    copy_peer = hipMemcpyPeerAsync(*mut c_void, c_int, *const c_void, c_int, usize, Stream);
    launch = hipModuleLaunchKernel(
        Function, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, Stream, *mut *mut c_void, *mut *mut c_void);
    attribute = hipDeviceGetAttribute(*mut c_int, hiprt::hipDeviceAttribute_t, c_int);
    occupancy = hipModuleOccupancyMaxActiveBlocksPerMultiprocessor(*mut c_int, Function, c_int, usize);
    instantiate_graph = hipGraphInstantiate(*mut GraphExec, Graph, *mut hiprt::hipGraphNode_t, *mut c_char, usize);
}

/// What is used of `hipDeviceProp_t`.
pub struct Properties {
    pub name: String,
    /// For example `gfx90a`, without the features that may follow it (`:sramecc+:xnack-`).
    pub arch: String,
    pub total_bytes: u64,
    pub multiprocessors: usize,
}

type GetProperties = unsafe extern "C" fn(*mut c_void, c_int) -> Code;

/// Where `hipDeviceProp_t` has its fields.
struct Layout {
    total_bytes: usize,
    multiprocessors: usize,
    arch: usize,
}

/// Bytes of a name, NUL included; the product's is the struct's first field in both layouts.
const NAME_BYTES: usize = 256;
/// More than either struct takes (792 and 1,472 bytes).
const PROPERTIES_BYTES: usize = 4096;

/// What `hipGetDeviceProperties` fills in: the struct of ROCm 5, also in later ROCms that have the symbol.
const R0000: Layout = Layout {
    total_bytes: offset_of!(hiprt::hipDeviceProp_t, totalGlobalMem),
    multiprocessors: offset_of!(hiprt::hipDeviceProp_t, multiProcessorCount),
    arch: offset_of!(hiprt::hipDeviceProp_t, gcnArchName),
};

/// What `hipGetDevicePropertiesR0600` fills in: the struct of ROCm 6 and 7, which hip-sys does not have.
const R0600: Layout = Layout {
    total_bytes: 288,
    multiprocessors: 388,
    arch: 1160,
};

/// The symbol names the struct's version, so that the layout is known whatever runtime answers.
fn properties_of(library: &Library) -> Result<(GetProperties, &'static Layout)> {
    // SAFETY: both take the struct's address and the device's number.
    match unsafe { symbol(RUNTIME, library, "hipGetDevicePropertiesR0600") } {
        Ok(function) => Ok((function, &R0600)),
        // SAFETY: as above.
        Err(_) => unsafe { symbol(RUNTIME, library, "hipGetDeviceProperties") }.map(|function| (function, &R0000)),
    }
}

impl Api {
    /// What the runtime says of a device; all zero where it fails.
    pub fn properties(&self, device: c_int) -> (Code, Properties) {
        let mut words = [0u64; PROPERTIES_BYTES / 8];
        // SAFETY: writes one struct, for which there is room; words are aligned as its widest fields are.
        let code = unsafe { (self.get_properties)(words.as_mut_ptr().cast(), device) };
        let bytes: &[u8] = bytemuck::cast_slice(&words);
        let text = |at: usize| text(&bytes[at..at + NAME_BYTES]);
        let arch = text(self.layout.arch);
        let properties = Properties {
            name: text(0),
            arch: arch.split(':').next().unwrap_or_default().to_owned(),
            total_bytes: bytemuck::pod_read_unaligned(&bytes[self.layout.total_bytes..][..8]),
            multiprocessors: bytemuck::pod_read_unaligned::<i32>(&bytes[self.layout.multiprocessors..][..4]) as usize,
        };
        (code, properties)
    }
}

/// `hipModuleLaunchCooperativeKernel`, which takes arguments by their addresses alone.
pub type LaunchTogether = unsafe extern "C" fn(
    Function,
    c_uint,
    c_uint,
    c_uint,
    c_uint,
    c_uint,
    c_uint,
    c_uint,
    Stream,
    *mut *mut c_void,
) -> Code;

impl Api {
    /// A device's PCI address. Asked for by name, since only ranks that share devices need it.
    pub fn pci_address(&self, device: c_int) -> Result<(Code, String)> {
        type GetAddress = unsafe extern "C" fn(*mut c_char, c_int, c_int) -> Code;
        // SAFETY: the type is that of hip_runtime_api.h for this symbol, which ROCm 5 to 7 agree on.
        let get: GetAddress = unsafe { symbol(RUNTIME, &self._library, "hipDeviceGetPCIBusId") }?;
        let mut address = [0u8; 64];
        // SAFETY: writes at most as many bytes as it is told, NUL included.
        let code = unsafe { get(address.as_mut_ptr().cast(), address.len() as c_int, device) };
        Ok((code, text(&address)))
    }
}

/// libamdhip64, loaded once; it stays loaded.
pub fn api() -> Result<&'static Api> {
    static API: OnceLock<Api> = OnceLock::new();
    if let Some(api) = API.get() {
        return Ok(api);
    }
    let api = Api::load()?;
    Ok(API.get_or_init(|| api))
}

/// Newest first: ROCm 7, 6, 5, and whatever a developer's link names.
const SONAMES: [&str; 4] = [
    "libamdhip64.so.7",
    "libamdhip64.so.6",
    "libamdhip64.so.5",
    "libamdhip64.so",
];

/// The one that the program has loaded, as two runtimes in one process do not agree; or else that of `$ROCM_PATH`; or
/// else the newest that the dynamic loader finds or /opt/rocm has.
fn open_library() -> Result<Library> {
    const NOLOAD: c_int = libc::RTLD_NOLOAD;
    for name in SONAMES {
        // SAFETY: what is loaded already is not initialized again.
        if let Ok(library) = unsafe { Library::open(Some(name), RTLD_LAZY | RTLD_LOCAL | NOLOAD) } {
            return Ok(library);
        }
    }
    let rocm = std::env::var_os("ROCM_PATH").map(|rocm| PathBuf::from(rocm).join("lib"));
    let chosen = SONAMES.iter().filter_map(|name| Some(rocm.as_ref()?.join(name)));
    let found = SONAMES
        .iter()
        .flat_map(|name| [name.into(), PathBuf::from("/opt/rocm/lib").join(name)]);
    let mut why = None;
    for path in chosen.chain(found) {
        // SAFETY: the initialization of AMD's runtime has no preconditions.
        match unsafe { Library::open(Some(&path), RTLD_LAZY | RTLD_LOCAL) } {
            Ok(library) => return Ok(library),
            Err(error) => why = why.or(broken(path.as_os_str(), &error)),
        }
    }
    Err(no_driver(
        RUNTIME,
        format!("dlopen({})", why.unwrap_or_else(|| SONAMES.join(", "))),
    ))
}

/// What is wrong with a library that is there: the loader's text begins with the name that it lacks.
fn broken(path: &OsStr, error: &libloading::Error) -> Option<String> {
    let libloading::Error::DlOpen { source } = error else {
        return None;
    };
    let text = source.to_string();
    let absent = text.starts_with(&*path.to_string_lossy()) && text.contains("No such file");
    (!absent).then_some(text)
}
