//! A device made ready: its stream, its kernels, and what differs per target.

use super::driver::{FunctionHandle, Launch, ModuleHandle};
use super::memory::{SharedDriver, Stream};
use super::target::Target;
use crate::error::{Error, GpuFault, Result};
use crate::memory::{self, Purpose};
use bytemuck::NoUninit;
use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

/// One device, ready to be given work.
pub struct Context {
    /// Its runtime.
    pub driver: SharedDriver,
    /// Where its work goes, in order.
    pub stream: Stream,
    /// Its kernels.
    pub kernels: Kernels,
    /// What the kernels for it look like from outside.
    pub target: Target,
}

/// Blocks, threads and shared memory of a launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grid {
    /// Blocks.
    pub blocks: usize,
    /// Threads of a block.
    pub threads: usize,
    /// Bytes of shared memory asked for at launch.
    pub shared_bytes: usize,
}

impl Grid {
    /// A grid without shared memory asked for at launch.
    pub fn new(blocks: usize, threads: usize) -> Self {
        Self {
            blocks,
            threads,
            shared_bytes: 0,
        }
    }

    /// The same with shared memory asked for at launch.
    pub fn with_shared(self, shared_bytes: usize) -> Self {
        Self { shared_bytes, ..self }
    }
}

impl Context {
    /// Loads the kernels.
    pub fn open(driver: SharedDriver, images: &[&[u8]]) -> Result<Self> {
        let target = Target::of(driver.device());
        Ok(Self {
            stream: Stream::new(&driver)?,
            kernels: Kernels::load(&driver, images)?,
            target,
            driver,
        })
    }

    /// Its name in errors, for example `cuda:0`.
    pub fn name(&self) -> String {
        let device = self.driver.device();
        format!("{}:{}", device.runtime, device.ordinal)
    }

    /// Queues a kernel.
    ///
    /// # Safety
    /// `args` is the kernel's struct, and the memory it points to is live and large enough until the stream has done it.
    pub unsafe fn launch<A: NoUninit>(&self, kernel: &str, grid: Grid, args: &A) -> Result<()> {
        let shared_bytes = grid.shared_bytes as u32;
        let launch = Launch {
            function: self.kernels.get(kernel, shared_bytes)?,
            grid: grid.blocks.max(1) as u32,
            block: grid.threads as u32,
            shared_bytes,
            args: bytemuck::bytes_of(args),
            overlap: true,
        };
        // SAFETY: as our caller vouches.
        unsafe { self.driver.launch(&launch, self.stream.handle) }
    }
}

/// The kernels of a device's code objects, found by name.
pub struct Kernels {
    driver: SharedDriver,
    modules: Vec<ModuleHandle>,
    found: Mutex<HashMap<(String, u32), FunctionHandle>>,
}

impl Kernels {
    fn load(driver: &SharedDriver, images: &[&[u8]]) -> Result<Self> {
        let mut kernels = Self {
            driver: driver.clone(),
            modules: Vec::with_capacity(images.len()),
            found: Mutex::default(),
        };
        for image in images {
            kernels.modules.push(driver.load_module(image)?);
        }
        Ok(kernels)
    }

    /// The kernel of that name, to be launched with so much shared memory.
    pub fn get(&self, name: &str, shared_bytes: u32) -> Result<FunctionHandle> {
        let mut found = self.found.lock().unwrap_or_else(PoisonError::into_inner);
        let key = (name.to_owned(), shared_bytes);
        if let Some(&function) = found.get(&key) {
            return Ok(function);
        }
        for &module in &self.modules {
            match self.driver.function(module, name, shared_bytes) {
                Ok(function) => {
                    let more = found.try_reserve(1);
                    more.map_err(|_| memory::lacking::<FunctionHandle>(found.len() + 1, Purpose::Step))?;
                    found.insert(key, function);
                    return Ok(function);
                }
                Err(Error::Gpu {
                    fault: GpuFault::BadCode,
                    ..
                }) => {}
                Err(other) => return Err(other),
            }
        }
        Err(Error::Gpu {
            device: format!("{}:{}", self.driver.device().runtime, self.driver.device().ordinal),
            call: format!("looking for the kernel {name}"),
            fault: GpuFault::BadCode,
            code: None,
        })
    }
}

impl Drop for Kernels {
    fn drop(&mut self) {
        for &module in &self.modules {
            let _ = self.driver.free_module(module);
        }
    }
}
