//! Any GPU (`kernels/generic`), by the kernels that every family has.

use super::Family;
use crate::backend::gpu::catalogue;

/// See the module.
#[derive(Debug)]
pub struct Generic;

impl Family for Generic {
    fn table(&self) -> &'static catalogue::Table {
        &catalogue::generic::TABLE
    }
}
