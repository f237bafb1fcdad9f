//! A kernel of the catalogue, and how many blocks of it.

use super::catalogue::Kernel;

/// See the module.
#[derive(Clone, Copy, Debug)]
pub struct Launch {
    /// The kernel, which knows its threads and shared memory.
    pub kernel: &'static Kernel,
    /// Blocks.
    pub blocks: usize,
    /// See [`super::driver::KernelLaunch::overlap`].
    pub overlap: bool,
}

impl Launch {
    /// So many blocks of a kernel, which may start before its predecessor has ended.
    pub fn new(kernel: &'static Kernel, blocks: usize) -> Self {
        Self {
            kernel,
            blocks,
            overlap: true,
        }
    }

    /// The same, behind the end of its predecessor.
    pub fn apart(self) -> Self {
        Self { overlap: false, ..self }
    }
}
