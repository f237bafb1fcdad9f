//! A device of which only some memory is to be used.

use super::{
    Captured, Device, DeviceMemory, DevicePtr, Driver, EventHandle, FunctionHandle, GraphHandle, KernelLaunch, Link,
    ModuleHandle, Pinned, StreamHandle,
};
use crate::error::{Error, GpuFault, Result};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// `driver`, but with at most `bytes` bytes of device memory, as the option `limit` says. Code, graphs and the
/// runtime's own memory do not count: for them some is always left free.
pub fn limited(driver: Arc<dyn Driver>, bytes: u64, limit: &'static str) -> Arc<dyn Driver> {
    Arc::new(Limited {
        driver,
        bytes,
        limit,
        used: Mutex::default(),
    })
}

struct Limited {
    driver: Arc<dyn Driver>,
    bytes: u64,
    limit: &'static str,
    used: Mutex<Used>,
}

/// What has been handed out and not given back.
#[derive(Default)]
struct Used {
    bytes: u64,
    sizes: HashMap<u64, u64>,
}

impl Limited {
    fn used(&self) -> MutexGuard<'_, Used> {
        // Every change is whole.
        self.used.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn full(&self, bytes: usize, free: u64) -> Error {
        let Device { runtime, ordinal, .. } = self.driver.device();
        Error::Gpu {
            device: format!("{runtime}:{ordinal}"),
            call: format!("{bytes} bytes, {free} of {} are free", self.limit),
            fault: GpuFault::OutOfMemory,
            code: None,
        }
    }
}

/// Calls that go to the device as they are.
macro_rules! passed_on {
    ($($name:ident($($arg:ident: $type:ty),*) -> $output:ty;)*) => {$(
        fn $name(&self, $($arg: $type),*) -> $output {
            self.driver.$name($($arg),*)
        }
    )*};
    (unsafe $($name:ident($($arg:ident: $type:ty),*) -> $output:ty;)*) => {$(
        unsafe fn $name(&self, $($arg: $type),*) -> $output {
            // SAFETY: as our caller vouches.
            unsafe { self.driver.$name($($arg),*) }
        }
    )*};
}

impl Driver for Limited {
    fn memory(&self) -> Result<DeviceMemory> {
        let DeviceMemory { free, total } = self.driver.memory()?;
        Ok(DeviceMemory {
            free: free.min(self.bytes.saturating_sub(self.used().bytes)),
            total: total.min(self.bytes),
        })
    }

    fn alloc(&self, bytes: usize) -> Result<DevicePtr> {
        let mut used = self.used();
        let (size, free) = (bytes as u64, self.bytes.saturating_sub(used.bytes));
        if size > free || used.sizes.try_reserve(1).is_err() {
            return Err(self.full(bytes, free));
        }
        let at = self.driver.alloc(bytes)?;
        used.bytes += size;
        used.sizes.insert(at.0, size);
        Ok(at)
    }

    unsafe fn free(&self, at: DevicePtr) -> Result<()> {
        // SAFETY: as our caller vouches.
        let freed = unsafe { self.driver.free(at) };
        let mut used = self.used();
        used.bytes -= used.sizes.remove(&at.0).unwrap_or(0);
        freed
    }

    passed_on! {
        device() -> &Device;
        alloc_pinned(bytes: usize) -> Result<Pinned>;
        stream() -> Result<StreamHandle>;
        free_stream(stream: StreamHandle) -> Result<()>;
        synchronize(stream: StreamHandle) -> Result<()>;
        synchronize_within(stream: StreamHandle, limit: Duration) -> Result<bool>;
        event(timing: bool) -> Result<EventHandle>;
        free_event(event: EventHandle) -> Result<()>;
        record(event: EventHandle, stream: StreamHandle) -> Result<()>;
        wait(stream: StreamHandle, event: EventHandle) -> Result<()>;
        synchronize_event(event: EventHandle) -> Result<()>;
        elapsed_us(from: EventHandle, to: EventHandle) -> Result<f64>;
        link(peer: &dyn Driver) -> Result<Link>;
        load_module(image: &[u8]) -> Result<ModuleHandle>;
        free_module(module: ModuleHandle) -> Result<()>;
        function(module: ModuleHandle, name: &str, shared_bytes: u32) -> Result<FunctionHandle>;
        blocks_together(function: FunctionHandle, threads: u32, shared_bytes: u32) -> Result<usize>;
        begin_capture(stream: StreamHandle) -> Result<()>;
        end_capture(stream: StreamHandle) -> Result<Captured>;
        free_graph(graph: GraphHandle) -> Result<()>;
    }

    passed_on! { unsafe
        free_pinned(pinned: Pinned) -> Result<()>;
        copy_to_device(to: DevicePtr, from: *const u8, bytes: usize, stream: StreamHandle) -> Result<()>;
        copy_to_host(to: *mut u8, from: DevicePtr, bytes: usize, stream: StreamHandle) -> Result<()>;
        copy(to: DevicePtr, from: DevicePtr, bytes: usize, stream: StreamHandle) -> Result<()>;
        copy_from_peer(to: DevicePtr, peer: &dyn Driver, from: DevicePtr, bytes: usize, stream: StreamHandle) -> Result<()>;
        fill(to: DevicePtr, byte: u8, bytes: usize, stream: StreamHandle) -> Result<()>;
        launch(launch: &KernelLaunch<'_>, stream: StreamHandle) -> Result<()>;
        launch_together(launch: &KernelLaunch<'_>, stream: StreamHandle) -> Result<()>;
        launch_graph(graph: GraphHandle, stream: StreamHandle) -> Result<()>;
    }
}
