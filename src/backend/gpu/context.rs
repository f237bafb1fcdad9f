//! A device made ready: its stream, its kernels, and what differs per target.

mod capture;

pub use capture::Capture;

use super::catalogue::{self, Kernel, Op};
use super::code_objects::Image;
use super::driver::{self, FunctionHandle, ModuleHandle};
use super::launch::Launch;
use super::memory::{SharedDriver, Stream};
use super::target::Target;
use crate::error::{Error, GpuFault, Result};
use crate::memory::{self, Purpose};
use bytemuck::NoUninit;
use capture::Capturing;
use std::sync::Mutex;

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
    capturing: Mutex<Capturing>,
}

impl Context {
    /// Loads a target's kernels.
    pub fn open(driver: SharedDriver, target: Target, images: &[Image]) -> Result<Self> {
        Ok(Self {
            stream: Stream::new(&driver)?,
            kernels: Kernels::load(&driver, target.family.table(), images)?,
            target,
            capturing: Mutex::default(),
            driver,
        })
    }

    /// Its name in errors, for example `cuda:0`.
    pub fn name(&self) -> String {
        let device = self.driver.device();
        format!("{}:{}", device.runtime, device.ordinal)
    }

    /// Queues a kernel, or notes it for the graph that is captured.
    ///
    /// # Safety
    /// `args` is the kernel's struct, and the memory it points to is live and large enough until the stream has done
    /// it.
    pub unsafe fn launch<A: NoUninit>(&self, launch: Launch, args: &A) -> Result<()> {
        let Launch {
            kernel,
            blocks,
            overlap,
        } = launch;
        let launch = driver::KernelLaunch {
            function: self.kernels.functions[kernel.index],
            grid: blocks.max(1) as u32,
            block: kernel.threads as u32,
            shared_bytes: kernel.shared_bytes as u32,
            args: bytemuck::bytes_of(args),
            overlap: overlap && self.target.family.table().overlaps,
        };
        let stream = self.launch_stream();
        // SAFETY: as our caller vouches.
        unsafe { self.driver.launch(&launch, stream) }
    }

    /// How many blocks of a kernel the device runs at once, one a multiprocessor; 0 where none may wait for another.
    pub fn blocks_together(&self, kernel: &Kernel) -> Result<usize> {
        let (function, shared_bytes) = (self.kernels.functions[kernel.index], kernel.shared_bytes as u32);
        let here = self
            .driver
            .blocks_together(function, kernel.threads as u32, shared_bytes)?;
        Ok(here.min(1) * self.target.multiprocessors)
    }

    /// Queues a kernel whose blocks wait for each other.
    ///
    /// # Safety
    /// As of [`Self::launch`].
    pub unsafe fn launch_together<A: NoUninit>(&self, launch: Launch, args: &A) -> Result<()> {
        let Launch { kernel, blocks, .. } = launch;
        let launch = driver::KernelLaunch {
            function: self.kernels.functions[kernel.index],
            grid: blocks as u32,
            block: kernel.threads as u32,
            shared_bytes: kernel.shared_bytes as u32,
            args: bytemuck::bytes_of(args),
            overlap: false,
        };
        // SAFETY: as our caller vouches.
        unsafe { self.driver.launch_together(&launch, self.stream.handle) }
    }
}

/// The kernels of a device's family, loaded.
pub struct Kernels {
    driver: SharedDriver,
    modules: Vec<ModuleHandle>,
    /// In the order of the family's table.
    functions: Vec<FunctionHandle>,
}

impl Kernels {
    fn load(driver: &SharedDriver, family: &catalogue::Table, images: &[Image]) -> Result<Self> {
        let mut kernels = Self {
            driver: driver.clone(),
            modules: memory::room(images.len(), Purpose::Step)?,
            functions: memory::room(family.kernels.len(), Purpose::Step)?,
        };
        for image in images {
            kernels.modules.push(driver.load_module(image.bytes)?);
        }
        for kernel in family.kernels {
            let function = kernels.find(kernel, images)?;
            kernels.functions.push(function);
        }
        Ok(kernels)
    }

    fn find(&self, kernel: &Kernel, images: &[Image]) -> Result<FunctionHandle> {
        let module = images.iter().position(|image| image.holds(kernel.file));
        let Some(module) = module else {
            return Err(Error::Gpu {
                device: format!("{}:{}", self.driver.device().runtime, self.driver.device().ordinal),
                call: format!("looking for the code object of {}", kernel.file),
                fault: GpuFault::NoKernel,
                code: None,
            });
        };
        // Whether the device has shared memory for one launch is asked for later.
        let shared_bytes = if kernel.op == Op::OneLaunch {
            0
        } else {
            kernel.shared_bytes as u32
        };
        self.driver.function(self.modules[module], &kernel.name(), shared_bytes)
    }
}

impl Drop for Kernels {
    fn drop(&mut self) {
        for &module in &self.modules {
            let _ = self.driver.free_module(module);
        }
    }
}
