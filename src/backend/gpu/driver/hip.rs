//! AMD devices, through the HIP runtime of ROCm 5.6 to 7.
//!
//! What differs from one ROCm to another is avoided: properties are read by symbols that name their struct's version,
//! and hipGraphUpload is not called, so that a graph's first launch uploads it.

mod api;

use super::vendor::calls::{Calls, Code, PEER_ALREADY_ENABLED};
use super::vendor::{Vendor, check, count, device_name};
use super::{
    Device, DevicePtr, Driver, FunctionHandle, GraphHandle, KernelLaunch, Link, ListedDevice, StreamHandle,
    no_launch_together,
};
use crate::error::{Error, GpuFault, Result};
use api::{Api, HipTypes};
use std::collections::HashSet;
use std::ffi::{c_int, c_void};
use std::ptr::null_mut;
use std::sync::{Arc, Mutex, PoisonError};

/// All devices.
pub fn list() -> Result<Vec<ListedDevice>> {
    let api = api::api()?;
    let count = count::<Hip>(&api.calls)?;
    if count > 0 {
        check_version(api)?;
    }
    (0..count).map(|ordinal| describe(api, ordinal)).collect()
}

/// Opens a device.
pub fn open(ordinal: usize) -> Result<Arc<dyn Driver>> {
    let api = api::api()?;
    check_version(api)?;
    Ok(Arc::new(Hip {
        api,
        device: describe(api, ordinal)?.device,
        name: device_name::<Hip>(ordinal),
        peers: Mutex::default(),
    }))
}

/// A name of a device that is the same for all processes of the machine: its PCI address.
pub fn shared_name(ordinal: usize) -> Result<String> {
    let (code, address) = api::api()?.pci_address(ordinal as c_int)?;
    check::<Hip>(&device_name::<Hip>(ordinal), code, || "hipDeviceGetPCIBusId".into())?;
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
    check::<Hip>(Hip::RUNTIME, unsafe { (api.runtime_version)(&mut version) }, || {
        "hipRuntimeGetVersion".into()
    })?;
    if version >= OLDEST {
        return Ok(());
    }
    let (major, minor) = (version / 10_000_000, version / 100_000 % 100);
    Err(Error::Gpu {
        device: Hip::RUNTIME.into(),
        call: format!("hipRuntimeGetVersion: HIP {major}.{minor} ({version})"),
        fault: GpuFault::OldRuntime,
        code: None,
    })
}

fn describe(api: &Api, ordinal: usize) -> Result<ListedDevice> {
    let (code, properties) = api.properties(ordinal as c_int);
    check::<Hip>(&device_name::<Hip>(ordinal), code, || {
        format!("hipGetDeviceProperties({ordinal})")
    })?;
    Ok(ListedDevice {
        device: Device {
            runtime: Hip::RUNTIME,
            ordinal,
            name: properties.name,
            arch: properties.arch,
            multiprocessors: properties.multiprocessors,
        },
        total_bytes: properties.total_bytes,
    })
}

impl Hip {
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
            // SAFETY: takes no pointers.
            let code = unsafe { (self.api.enable_peer)(peer as c_int, 0) };
            if code != PEER_ALREADY_ENABLED {
                self.check(code, || format!("hipDeviceEnablePeerAccess({peer})"))?;
            }
        }
        peers.insert(peer);
        Ok(())
    }
}

impl Vendor for Hip {
    type Types = HipTypes;
    const RUNTIME: &str = "hip";

    fn fault(code: Code) -> GpuFault {
        match code {
            // 1052 is the HSA runtime out of memory.
            2 | 1052 => GpuFault::OutOfMemory,
            // Not initialized; the kernel's driver is older than the library.
            3 | 35 => GpuFault::NoDriver,
            100 | 101 => GpuFault::NoDevice,
            // Deinitialized, an earlier launch failed, ECC, illegal address, timeout, context destroyed, assertion,
            // launch failed, unknown, the HSA runtime failed.
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

    fn properties(&self) -> &Device {
        &self.device
    }

    fn name(&self) -> &str {
        &self.name
    }

    fn calls(&self) -> &Calls<HipTypes> {
        &self.api.calls
    }

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

    fn link_to(&self, ordinal: usize) -> Result<Link> {
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
            // Runtimes that know nothing of a link, as in some containers, have devices all the same: they count as
            // far.
            distance: match code {
                0 => hops.saturating_add(slower),
                _ => u32::MAX,
            },
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
        self.reach(ordinal)?;
        let (to, from) = (to.0 as *mut c_void, from.0 as *const c_void);
        let (ours, theirs) = (self.device.ordinal as c_int, ordinal as c_int);
        // SAFETY: both ranges are valid until the stream has done the copy, as the caller guarantees.
        let code = unsafe { (self.api.copy_peer)(to, ours, from, theirs, bytes, stream.0 as api::Stream) };
        self.check(code, || format!("hipMemcpyPeerAsync({bytes} bytes from {theirs})"))
    }

    /// HIP needs no attribute for the dynamic size of the LDS.
    fn allow_shared(&self, _function: FunctionHandle, _name: &str, _bytes: u32) -> Result<()> {
        Ok(())
    }

    unsafe fn queue(&self, launch: &KernelLaunch<'_>, stream: StreamHandle) -> Result<()> {
        let KernelLaunch {
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

    fn together(&self, function: FunctionHandle, threads: u32, shared_bytes: u32) -> Result<usize> {
        let mut may = 0;
        // SAFETY: writes one int.
        let code = unsafe { (self.api.attribute)(&mut may, api::COOPERATIVE_LAUNCH, self.device.ordinal as c_int) };
        self.check(code, || {
            "hipDeviceGetAttribute(hipDeviceAttributeCooperativeLaunch)".into()
        })?;
        if may == 0 || self.api.launch_together.is_none() {
            return Ok(0);
        }
        let (function, mut blocks) = (function.0 as api::Function, 0);
        // SAFETY: the handle is live; writes one int.
        let code = unsafe { (self.api.occupancy)(&mut blocks, function, threads as c_int, shared_bytes as usize) };
        self.check(code, || {
            format!("hipModuleOccupancyMaxActiveBlocksPerMultiprocessor({threads} threads)")
        })?;
        Ok(blocks as usize)
    }

    unsafe fn queue_together(&self, launch: &KernelLaunch<'_>, stream: StreamHandle) -> Result<()> {
        let KernelLaunch {
            grid,
            block,
            shared_bytes,
            ..
        } = *launch;
        const NAME: &str = "hipModuleLaunchCooperativeKernel";
        let call = self.api.launch_together.ok_or_else(|| no_launch_together(&self.name))?;
        let mut params = [launch.args.as_ptr().cast_mut().cast()];
        let (function, stream) = (launch.function.0 as api::Function, stream.0 as api::Stream);
        // SAFETY: the caller guarantees that the arguments are the kernel's struct, its only parameter; they are copied
        // before the call ends.
        let code = unsafe {
            call(
                function,
                grid,
                1,
                1,
                block,
                1,
                1,
                shared_bytes,
                stream,
                params.as_mut_ptr(),
            )
        };
        self.check(code, || {
            format!("{NAME}({grid} blocks of {block}, {shared_bytes} bytes shared)")
        })
    }

    fn instantiate(&self, graph: api::Graph, _stream: StreamHandle) -> Result<GraphHandle> {
        let mut exec: api::GraphExec = null_mut();
        // SAFETY: `graph` is what a capture ended with; the node that fails and the log are not wanted.
        let code = unsafe { (self.api.instantiate_graph)(&mut exec, graph, null_mut(), null_mut(), 0) };
        self.check(code, || "hipGraphInstantiate".into())?;
        Ok(GraphHandle(exec as u64))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_become_faults() {
        for (code, expected) in super::super::FAULTS_OF_ALL {
            assert_eq!(Hip::fault(code), expected, "{code}");
        }
    }
}
