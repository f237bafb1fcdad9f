//! NVIDIA devices, through the CUDA driver API.
//!
//! A device's primary context is used, which the program and its other libraries share. Every call first makes it
//! current in the calling thread. Launches pass the argument struct as one buffer; those that may overlap have the
//! attribute of programmatic dependent launch (PDL), which a captured graph keeps as a programmatic edge.

mod api;

use super::vendor::calls::{Calls, Code, PEER_ALREADY_ENABLED};
use super::vendor::{Vendor, check, count, device_name, text};
use super::{Device, DevicePtr, Driver, FunctionHandle, GraphHandle, KernelLaunch, Link, ListedDevice, StreamHandle};
use crate::error::{Error, GpuFault, Result};
use api::{Api, CudaTypes, Handle, LaunchAttribute, LaunchConfig, Ordinal};
use std::collections::HashMap;
use std::ffi::{c_int, c_uint, c_void};
use std::ptr::null_mut;
use std::sync::{Arc, Mutex, PoisonError};

/// All devices; no context is created.
pub fn list() -> Result<Vec<ListedDevice>> {
    let api = match api::api() {
        Err(Error::Gpu {
            fault: GpuFault::NoDevice,
            ..
        }) => return Ok(Vec::new()),
        api => api?,
    };
    (0..count::<Cuda>(&api.calls)?)
        .map(|ordinal| describe(api, ordinal))
        .collect()
}

/// Opens a device.
pub fn open(ordinal: usize) -> Result<Arc<dyn Driver>> {
    let api = api::api()?;
    let device = describe(api, ordinal)?.device;
    let context = Context::retain(api, ordinal)?;
    Ok(Arc::new(Cuda {
        api,
        device,
        name: device_name::<Cuda>(ordinal),
        context,
        peers: Mutex::default(),
    }))
}

/// A name of a device, or of the instance of one, that is the same for all processes of the machine.
pub fn shared_name(ordinal: usize) -> Result<String> {
    let api = api::api()?;
    let (code, uuid) = api.uuid(device_of(api, ordinal)?)?;
    check::<Cuda>(&device_name::<Cuda>(ordinal), code, || "cuDeviceGetUuid_v2".into())?;
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
        let name = device_name::<Cuda>(ordinal);
        let device = device_of(api, ordinal)?;
        let mut handle = null_mut();
        // SAFETY: writes one handle.
        let code = unsafe { (api.retain_context)(&mut handle, device) };
        check::<Cuda>(&name, code, || "cuDevicePrimaryCtxRetain".into())?;
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

fn device_of(api: &Api, ordinal: usize) -> Result<Ordinal> {
    let mut device = 0;
    // SAFETY: writes one int.
    let code = unsafe { (api.device)(&mut device, ordinal as c_int) };
    check::<Cuda>(&device_name::<Cuda>(ordinal), code, || {
        format!("cuDeviceGet({ordinal})")
    })?;
    Ok(device)
}

fn describe(api: &Api, ordinal: usize) -> Result<ListedDevice> {
    let at = device_name::<Cuda>(ordinal);
    let device = device_of(api, ordinal)?;
    let attribute = |which: c_int| -> Result<c_int> {
        let mut value = 0;
        // SAFETY: writes one int.
        let code = unsafe { (api.device_attribute)(&mut value, which, device) };
        check::<Cuda>(&at, code, || format!("cuDeviceGetAttribute({which})"))?;
        Ok(value)
    };
    let mut name = [0u8; 256];
    // SAFETY: writes at most as many bytes as it is told, NUL included.
    let code = unsafe { (api.device_name)(name.as_mut_ptr().cast(), name.len() as c_int, device) };
    check::<Cuda>(&at, code, || "cuDeviceGetName".into())?;
    let mut total = 0usize;
    // SAFETY: writes one size.
    let code = unsafe { (api.device_total)(&mut total, device) };
    check::<Cuda>(&at, code, || "cuDeviceTotalMem".into())?;
    let major = attribute(api::ATTRIBUTE_CAPABILITY_MAJOR)?;
    let minor = attribute(api::ATTRIBUTE_CAPABILITY_MINOR)?;
    Ok(ListedDevice {
        device: Device {
            runtime: Cuda::RUNTIME,
            ordinal,
            name: text(&name),
            arch: format!("sm_{major}{minor}"),
            multiprocessors: attribute(api::ATTRIBUTE_MULTIPROCESSORS)? as usize,
        },
        total_bytes: total as u64,
    })
}

impl Cuda {
    /// Queues a kernel with these attributes of its launch.
    ///
    /// # Safety
    /// As of [`Driver::launch`].
    unsafe fn queue_with(
        &self,
        launch: &KernelLaunch<'_>,
        attributes: &[LaunchAttribute],
        stream: StreamHandle,
    ) -> Result<()> {
        let config = LaunchConfig {
            grid: [launch.grid, 1, 1],
            block: [launch.block, 1, 1],
            shared_bytes: launch.shared_bytes,
            stream: stream.0 as Handle,
            attributes: attributes.as_ptr(),
            attribute_count: attributes.len() as c_uint,
        };
        let mut bytes = launch.args.len();
        let mut extra = [
            api::LAUNCH_BUFFER_POINTER,
            launch.args.as_ptr() as *mut c_void,
            api::LAUNCH_BUFFER_SIZE,
            (&raw mut bytes).cast(),
            api::LAUNCH_END,
        ];
        let function = launch.function.0 as Handle;
        // SAFETY: the caller guarantees that the arguments are the kernel's struct; they are copied before the call
        // ends.
        let code = unsafe { (self.api.launch)(&config, function, null_mut(), extra.as_mut_ptr()) };
        self.check(code, || {
            let KernelLaunch {
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

    /// Lets a kernel be launched with so much dynamic shared memory.
    fn set_shared(&self, function: FunctionHandle, bytes: u32) -> Code {
        let which = api::FUNCTION_MAX_DYNAMIC_SHARED_BYTES;
        // SAFETY: the function is one of a loaded module.
        unsafe { (self.api.set_function_attribute)(function.0 as Handle, which, bytes as c_int) }
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
            // SAFETY: both contexts are retained.
            let code = unsafe { (self.api.enable_peer)(peer.handle as Handle, 0) };
            if code != PEER_ALREADY_ENABLED {
                self.check(code, || format!("cuCtxEnablePeerAccess({ordinal})"))?;
            }
        }
        let handle = peer.handle as Handle;
        peers.insert(ordinal, peer);
        Ok(handle)
    }
}

impl Vendor for Cuda {
    type Types = CudaTypes;
    const RUNTIME: &str = "cuda";

    fn fault(code: Code) -> GpuFault {
        match code {
            2 => GpuFault::OutOfMemory,
            // A stub of the library; library and kernel module that do not fit each other.
            34 | 36 | 803 | 804 => GpuFault::NoDriver,
            100 | 101 => GpuFault::NoDevice,
            // Deinitialized, unavailable, ECC, NVLink, contained.
            4 | 46 | 214 | 220 | 226 => GpuFault::LostDevice,
            // Illegal address, timeout, context destroyed, assertion, hardware stack, illegal instruction, misaligned
            // address, address space, program counter, launch failed, tensor memory leak, external device, unknown:
            // each ends the context.
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

    fn properties(&self) -> &Device {
        &self.device
    }

    fn name(&self) -> &str {
        &self.name
    }

    fn calls(&self) -> &Calls<CudaTypes> {
        &self.api.calls
    }

    /// Makes the device's context current in this thread. The query costs nanoseconds.
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

    fn link_to(&self, ordinal: usize) -> Result<Link> {
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

    unsafe fn copy_from(
        &self,
        to: DevicePtr,
        ordinal: usize,
        from: DevicePtr,
        bytes: usize,
        stream: StreamHandle,
    ) -> Result<()> {
        let ours = self.context.handle as Handle;
        let theirs = self.peer_context(ordinal)?;
        // SAFETY: both ranges are valid until the stream has done the copy, as the caller guarantees; both contexts are
        // retained.
        let code = unsafe { (self.api.copy_peer)(to.0, ours, from.0, theirs, bytes, stream.0 as Handle) };
        self.check(code, || format!("cuMemcpyPeerAsync({bytes} bytes from {ordinal})"))
    }

    /// PTX is a text, which begins with a comment and ends with NUL.
    fn takes(image: &[u8]) -> bool {
        image.starts_with(b"//") && image.ends_with(b"\0")
    }

    fn allow_shared(&self, function: FunctionHandle, name: &str, bytes: u32) -> Result<()> {
        if bytes == 0 {
            return Ok(());
        }
        let code = self.set_shared(function, bytes);
        self.check(code, || format!("cuFuncSetAttribute({name}, {bytes} bytes shared)"))
    }

    unsafe fn queue(&self, launch: &KernelLaunch<'_>, stream: StreamHandle) -> Result<()> {
        let attributes: &[_] = if launch.overlap {
            &[LaunchAttribute::OVERLAP]
        } else {
            &[]
        };
        // SAFETY: as the caller guarantees.
        unsafe { self.queue_with(launch, attributes, stream) }
    }

    fn together(&self, function: FunctionHandle, threads: u32, shared_bytes: u32) -> Result<usize> {
        let mut may = 0;
        // SAFETY: writes one int.
        let code =
            unsafe { (self.api.device_attribute)(&mut may, api::ATTRIBUTE_COOPERATIVE_LAUNCH, self.context.device) };
        self.check(code, || {
            format!("cuDeviceGetAttribute({})", api::ATTRIBUTE_COOPERATIVE_LAUNCH)
        })?;
        if may == 0 {
            return Ok(0);
        }
        // Such kernels ask for all shared memory that larger devices have. Others refuse the value.
        const INVALID_VALUE: Code = 1;
        let code = self.set_shared(function, shared_bytes);
        if code == INVALID_VALUE {
            return Ok(0);
        }
        self.check(code, || format!("cuFuncSetAttribute({shared_bytes} bytes shared)"))?;
        let (function, mut blocks) = (function.0 as Handle, 0);
        // SAFETY: the handle is live; writes one int.
        let code = unsafe { (self.api.occupancy)(&mut blocks, function, threads as c_int, shared_bytes as usize) };
        self.check(code, || {
            format!("cuOccupancyMaxActiveBlocksPerMultiprocessor({threads} threads)")
        })?;
        Ok(blocks as usize)
    }

    unsafe fn queue_together(&self, launch: &KernelLaunch<'_>, stream: StreamHandle) -> Result<()> {
        // SAFETY: as the caller guarantees.
        unsafe { self.queue_with(launch, &[LaunchAttribute::TOGETHER], stream) }
    }

    /// Uploads it, too, so that its first launch is as fast as later ones.
    fn instantiate(&self, graph: Handle, stream: StreamHandle) -> Result<GraphHandle> {
        let mut exec = null_mut();
        // SAFETY: `graph` is what a capture ended with; writes one handle.
        self.check(unsafe { (self.api.instantiate_graph)(&mut exec, graph, 0) }, || {
            "cuGraphInstantiate".into()
        })?;
        let graph = GraphHandle(exec as u64);
        // SAFETY: instantiated above; the stream is live and not captured any more.
        let code = unsafe { (self.api.upload_graph)(exec, stream.0 as Handle) };
        if let Err(error) = self.check(code, || "cuGraphUpload".into()) {
            // The first error is the one returned.
            let _ = self.free_graph(graph);
            return Err(error);
        }
        Ok(graph)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_become_faults() {
        for (code, expected) in super::super::FAULTS_OF_ALL {
            assert_eq!(Cuda::fault(code), expected, "{code}");
        }
    }

    #[test]
    fn an_error_names_device_call_and_code() {
        let error = check::<Cuda>("cuda:1", 2, || "cuMemAlloc(64 bytes)".into())
            .unwrap_err()
            .to_string();
        assert!(
            error.starts_with("cuda:1: cuMemAlloc(64 bytes): out of device memory"),
            "{error}"
        );
        assert!(error.ends_with("(code 2)"), "{error}");
    }
}
