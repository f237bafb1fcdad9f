//! What families have in common whose products and attention are those of `kernels/mma`: what weights are packed for,
//! and when warps of decode attention work together.

use crate::backend::gpu::catalogue::{Kernel, Workers};
use crate::backend::gpu::launch::Launch;
use crate::backend::gpu::shapes::DecodeShape;

/// Weight rows of a block of packed weights, of which 16 are a unit.
pub const BLOCK_ROWS: usize = 64;
/// Weight rows of a unit: of mma.sync's operand A.
pub const UNIT_ROWS: usize = 16;

/// Exponents of MXFP4 scales: the largest scale times 2^14 is FP16's largest power of two, half the smallest is its
/// smallest subnormal, with which the matrix cores compute.
pub const MXFP4_F16_SCALES: (i32, i32) = (-23, 1);

/// Whether products take a matrix of so many rows: outputs are stored in pairs.
pub fn holds(rows: usize) -> bool {
    rows.is_multiple_of(2)
}

/// Whether rows of heads are packed in pairs: a unit is eight pairs of one head.
pub fn pairs_heads(head_dim: usize) -> bool {
    head_dim.is_multiple_of(UNIT_ROWS)
}

/// The bucket of a step's items of decode attention: persistent blocks do not care how many there are.
pub fn decode_items(items: usize) -> usize {
    items.min(1)
}

/// Decode attention by persistent blocks whose warps work together: with the fewest rows so many blocks of a team on a
/// multiprocessor, and with few windows so many of a pair. `None` where each warp works alone.
pub fn attention_together(
    kernels: &[&'static Kernel],
    shape: &DecodeShape,
    [teams, pairs]: [usize; 2],
) -> Option<Launch> {
    let holding = |workers| move |kernel: &&&Kernel| kernel.workers == workers && kernel.holds(shape.rows);
    let of = |workers| kernels.iter().find(holding(workers));
    let pair = || of(Workers::Pair).filter(|_| shape.windowed);
    let (kernel, blocks) = match of(Workers::Team) {
        Some(team) => (team, teams),
        None => (pair()?, pairs),
    };
    Some(Launch::new(kernel, blocks * shape.multiprocessors))
}
