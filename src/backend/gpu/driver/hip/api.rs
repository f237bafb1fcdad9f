//! hip-sys's calls, each giving a plain number.
//!
//! hip-sys takes results as a Rust enum of HIP 5.4's codes: a newer runtime's code would be undefined behaviour. So each
//! function, whose arguments the compiler checks against hip-sys here, is called as one that gives an unsigned number,
//! which is what the enum is to C.

use hip_sys::hiprt;
use std::ffi::{c_char, c_int, c_uint, c_void};
use std::mem::transmute;

pub use hiprt::hipDeviceAttribute_t::hipDeviceAttributeMultiprocessorCount as ATTRIBUTE_MULTIPROCESSORS;
pub use hiprt::hipStreamCaptureMode::hipStreamCaptureModeThreadLocal as CAPTURE_THREAD_LOCAL;
pub use hiprt::{
    hipDevice_t as DeviceId, hipDeviceAttribute_t as Attribute, hipEvent_t as Event, hipEventDisableTiming,
    hipFunction_t as Function, hipGraph_t as Graph, hipGraphExec_t as GraphExec, hipGraphNode_t as GraphNode,
    hipHostMallocMapped, hipHostMallocPortable, hipModule_t as Module, hipStream_t as Stream,
    hipStreamCaptureMode as CaptureMode, hipStreamNonBlocking,
};

/// `hipError_t`; 0 is success.
pub type Code = c_uint;

pub const LAUNCH_BUFFER_POINTER: *mut c_void = std::ptr::without_provenance_mut(1);
pub const LAUNCH_BUFFER_SIZE: *mut c_void = std::ptr::without_provenance_mut(2);
pub const LAUNCH_END: *mut c_void = std::ptr::without_provenance_mut(3);

macro_rules! calls {
    ($($name:ident = $function:ident ($($arg:ident: $type:ty),*);)*) => {$(
        /// # Safety
        ///
        /// The HIP function's.
        #[allow(clippy::too_many_arguments, reason = "as many as C's")]
        pub unsafe fn $name($($arg: $type),*) -> Code {
            let typed: unsafe extern "C" fn($($type),*) -> hiprt::hipError_t = hiprt::$function;
            // SAFETY: the enum is `repr(u32)` and passed as such; every bit pattern is a number.
            let call: unsafe extern "C" fn($($type),*) -> Code = unsafe { transmute(typed) };
            // SAFETY: as our caller vouches.
            unsafe { call($($arg),*) }
        }
    )*};
}

calls! {
    device_count = hipGetDeviceCount(count: *mut c_int);
    device_name = hipDeviceGetName(name: *mut c_char, length: c_int, device: DeviceId);
    device_attribute = hipDeviceGetAttribute(value: *mut c_int, which: Attribute, device: c_int);
    device_total = hipDeviceTotalMem(bytes: *mut usize, device: DeviceId);
    current_device = hipGetDevice(device: *mut c_int);
    set_device = hipSetDevice(device: c_int);
    can_access_peer = hipDeviceCanAccessPeer(can: *mut c_int, device: c_int, peer: c_int);
    enable_peer = hipDeviceEnablePeerAccess(peer: c_int, flags: c_uint);
    memory_info = hipMemGetInfo(free: *mut usize, total: *mut usize);
    alloc = hipMalloc(at: *mut *mut c_void, bytes: usize);
    free = hipFree(at: *mut c_void);
    alloc_host = hipHostMalloc(at: *mut *mut c_void, bytes: usize, flags: c_uint);
    free_host = hipHostFree(at: *mut c_void);
    host_address = hipHostGetDevicePointer(device: *mut *mut c_void, host: *mut c_void, flags: c_uint);
    copy_to_device = hipMemcpyHtoDAsync(to: *mut c_void, from: *mut c_void, bytes: usize, stream: Stream);
    copy_to_host = hipMemcpyDtoHAsync(to: *mut c_void, from: *mut c_void, bytes: usize, stream: Stream);
    copy = hipMemcpyDtoDAsync(to: *mut c_void, from: *mut c_void, bytes: usize, stream: Stream);
    copy_peer = hipMemcpyPeerAsync(
        to: *mut c_void, device: c_int, from: *const c_void, peer: c_int, bytes: usize, stream: Stream);
    fill = hipMemsetD8Async(to: *mut c_void, byte: u8, bytes: usize, stream: Stream);
    create_stream = hipStreamCreateWithFlags(stream: *mut Stream, flags: c_uint);
    destroy_stream = hipStreamDestroy(stream: Stream);
    synchronize_stream = hipStreamSynchronize(stream: Stream);
    wait_event = hipStreamWaitEvent(stream: Stream, event: Event, flags: c_uint);
    create_event = hipEventCreateWithFlags(event: *mut Event, flags: c_uint);
    destroy_event = hipEventDestroy(event: Event);
    record_event = hipEventRecord(event: Event, stream: Stream);
    synchronize_event = hipEventSynchronize(event: Event);
    elapsed_ms = hipEventElapsedTime(ms: *mut f32, from: Event, to: Event);
    load_module = hipModuleLoadData(module: *mut Module, image: *const c_void);
    unload_module = hipModuleUnload(module: Module);
    function = hipModuleGetFunction(function: *mut Function, module: Module, name: *const c_char);
    launch = hipModuleLaunchKernel(
        function: Function, grid_x: c_uint, grid_y: c_uint, grid_z: c_uint, block_x: c_uint, block_y: c_uint,
        block_z: c_uint, shared_bytes: c_uint, stream: Stream, params: *mut *mut c_void, extra: *mut *mut c_void);
    begin_capture = hipStreamBeginCapture(stream: Stream, mode: CaptureMode);
    end_capture = hipStreamEndCapture(stream: Stream, graph: *mut Graph);
    destroy_graph = hipGraphDestroy(graph: Graph);
    instantiate_graph = hipGraphInstantiate(
        exec: *mut GraphExec, graph: Graph, node: *mut GraphNode, log: *mut c_char, log_bytes: usize);
    launch_graph = hipGraphLaunch(exec: GraphExec, stream: Stream);
    destroy_graph_exec = hipGraphExecDestroy(exec: GraphExec);
}
