//! Kernels compiled for the CPU: a shared library as the code object. See `kernels/gpu/simt.h`.

use libloading::Library as SharedLibrary;
use std::collections::BTreeMap;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::Arc;

/// In which order a block's threads run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Schedule {
    /// Each thread until it waits for the others: the fastest order.
    InOrder,
    /// A random runnable thread, by seed.
    Random(u64),
    /// A random wave as far as it can run, by seed: missing barriers give wrong results.
    OneWaveFirst(u64),
}

type KernelFn = unsafe extern "C" fn(*const c_void);
type LaunchFn = unsafe extern "C" fn(
    KernelFn,
    c_int,
    c_int,
    c_int,
    *const c_void,
    c_int,
    c_int,
    c_int,
    u64,
    *mut c_char,
    c_int,
) -> c_int;

/// The policy bit that asks for `after_predecessor` in every thread: SIMT_OVERLAPS.
const OVERLAPS: c_int = 16;
const MESSAGE_BYTES: usize = 512;

/// A loaded code object.
pub struct Library {
    library: SharedLibrary,
    launch: LaunchFn,
}

impl Drop for Library {
    /// Frees the machine's stacks. Neither the process's exit nor unloading the library does.
    fn drop(&mut self) {
        // SAFETY: simt.cpp defines it so.
        if let Ok(trim) = unsafe { self.library.get::<unsafe extern "C" fn()>(b"simt_trim\0") } {
            // SAFETY: it leaves alone what others use who have loaded the same library.
            unsafe { trim() };
        }
    }
}

/// A kernel of one.
pub struct LoadedKernel {
    library: Arc<Library>,
    at: KernelFn,
    pub name: String,
    /// The most dynamic shared memory of a launch.
    pub shared_bytes: u32,
}

/// A launch: everything by value, as it waits in a queue.
#[derive(Clone)]
pub struct SimtLaunch {
    pub kernel: Arc<LoadedKernel>,
    pub grid: u32,
    pub block: u32,
    pub shared_bytes: u32,
    pub args: Arc<[u8]>,
    pub overlap: bool,
}

impl Library {
    /// Loads the shared library whose path is the image.
    pub fn load(image: &[u8]) -> Result<Arc<Self>, String> {
        let path = std::str::from_utf8(image).map_err(|_| "the image is not a library's path".to_owned())?;
        // SAFETY: a library of kernels; its constructors register them.
        let library = unsafe { SharedLibrary::new(path) }.map_err(|e| e.to_string())?;
        // SAFETY: simt.h declares it so.
        let launch = *unsafe { library.get::<LaunchFn>(b"simt_launch\0") }.map_err(|e| e.to_string())?;
        Ok(Arc::new(Self { library, launch }))
    }

    /// The names of its kernels, and the threads that each was made for.
    pub fn made(&self) -> Result<BTreeMap<String, usize>, String> {
        type Made = unsafe extern "C" fn(c_int, *mut *const c_char, *mut c_int) -> c_int;
        // SAFETY: simt.cpp defines it so.
        let made = *unsafe { self.library.get::<Made>(b"simt_kernel_made\0") }.map_err(|e| e.to_string())?;
        let mut kernels = BTreeMap::new();
        let (mut name, mut threads) = (std::ptr::null(), 0);
        // SAFETY: writes one of each.
        while unsafe { made(kernels.len() as c_int, &mut name, &mut threads) } != 0 {
            // SAFETY: a string of the library's own, which ends with NUL.
            let name = unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned();
            if kernels.insert(name.clone(), threads as usize).is_some() {
                return Err(format!("{name} is there twice"));
            }
        }
        Ok(kernels)
    }

    /// Finds a kernel.
    pub fn kernel(self: &Arc<Self>, name: &str, shared_bytes: u32) -> Result<Arc<LoadedKernel>, String> {
        // SAFETY: kernels are exported so; whatever else has this name simt_launch refuses.
        let at = *unsafe { self.library.get::<KernelFn>(name.as_bytes()) }.map_err(|e| e.to_string())?;
        Ok(Arc::new(LoadedKernel {
            library: self.clone(),
            at,
            name: name.to_owned(),
            shared_bytes,
        }))
    }
}

impl SimtLaunch {
    /// Runs the launch; an error says what went wrong.
    ///
    /// # Safety
    /// The arguments are the kernel's, and what they point to is live.
    pub unsafe fn run(&self, schedule: Schedule, turn: u64, threads: usize) -> Result<(), String> {
        let (policy, seed) = match schedule {
            Schedule::InOrder => (0, 0),
            Schedule::Random(seed) => (1, seed.wrapping_add(turn)),
            Schedule::OneWaveFirst(seed) => (2, seed.wrapping_add(turn)),
        };
        let flags = if self.overlap { OVERLAPS } else { 0 };
        let mut message = [0u8; MESSAGE_BYTES];
        // SAFETY: the message buffer is as long as said; for the rest our caller vouches.
        let failed = unsafe {
            (self.kernel.library.launch)(
                self.kernel.at,
                self.grid as c_int,
                self.block as c_int,
                self.shared_bytes as c_int,
                self.args.as_ptr().cast(),
                self.args.len() as c_int,
                threads as c_int,
                policy | flags,
                seed,
                message.as_mut_ptr().cast(),
                MESSAGE_BYTES as c_int,
            )
        };
        if failed == 0 {
            return Ok(());
        }
        let text = CStr::from_bytes_until_nul(&message).map(CStr::to_string_lossy);
        Err(text.unwrap_or_default().into_owned())
    }
}
