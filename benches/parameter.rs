//! What models of a family's kernels need of what a row of its table says to the macro alone.

use getp::backend::gpu::catalogue::{Kernel, Source, Value};

/// The number that a kernel's maker takes by this name.
pub fn number(kernel: &Kernel, name: &str) -> Option<usize> {
    let Source::Made { parameters, .. } = kernel.source else {
        return None;
    };
    parameters.list().find_map(|(of, value)| match value {
        Value::Number(number) if of == name => Some(number),
        _ => None,
    })
}
