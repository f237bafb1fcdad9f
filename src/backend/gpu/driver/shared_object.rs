//! A runtime's shared object and what it lacks.

use crate::error::{Error, GpuFault, Result};
use libloading::os::unix::Library;

/// A function of the runtime's library.
///
/// # Safety
///
/// `T` is the symbol's type.
pub unsafe fn symbol<T: Copy>(runtime: &str, library: &Library, name: &str) -> Result<T> {
    // SAFETY: the caller guarantees the type.
    let found = unsafe { library.get::<T>(name) };
    found
        .map(|found| *found)
        .map_err(|_| no_driver(runtime, format!("dlsym({name})")))
}

/// The runtime is not there, or not whole.
pub fn no_driver(runtime: &str, call: String) -> Error {
    Error::Gpu {
        device: runtime.into(),
        call,
        fault: GpuFault::NoDriver,
        code: None,
    }
}
