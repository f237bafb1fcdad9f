//! A kernel of the catalogue, and how many blocks of it.

use super::catalogue::Kernel;

/// See the module.
#[derive(Clone, Copy, Debug)]
pub struct Launch {
    /// The kernel, which knows its threads and shared memory.
    pub kernel: &'static Kernel,
    /// Blocks.
    pub blocks: usize,
}

impl Launch {
    /// So many blocks of a kernel.
    pub fn new(kernel: &'static Kernel, blocks: usize) -> Self {
        Self { kernel, blocks }
    }
}
