//! What families have in common whose products and attention are those of `kernels/mma`: what weights are packed for,
//! and when warps of decode attention work together.

use super::verdict::{HOLDS_FEWER, NO_OTHER, Verdict};
use crate::backend::gpu::args::PARTIAL_FLOATS;
use crate::backend::gpu::catalogue::{self, Kernel, Workers};
use crate::backend::gpu::shapes::DecodeShape;

const _: () = assert!(catalogue::mma::PARTIAL_BYTES == 4 * PARTIAL_FLOATS);

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

const TEAMS: &str = "of so few rows warps share an item";
const PAIRS: &str = "of so few windows two warps share one";
const WINDOWS: &str = "it is for layers with a window";
const BLOCKS: &str = "of so many keys the warps of a block share out a row";
const NOT_WHOLE: &str = "it is for long rows that are not cut, of full layers";
const TOGETHER: &str = "of so few rows warps work together";

/// Blocks of decode attention on a multiprocessor, by how their warps work.
pub struct BlocksOf {
    /// By teams.
    pub teams: usize,
    /// By pairs.
    pub pairs: usize,
    /// Each warp alone.
    pub alone: usize,
}

/// What is said of kernels for decode attention by persistent blocks. Their warps work together with the fewest rows,
/// and with few windows. Else each works alone: of the kernels for that `alone` says.
pub fn attention_decode(
    kernels: &[&'static Kernel],
    shape: &DecodeShape,
    blocks: &BlocksOf,
    alone: impl Fn(&Kernel) -> Result<&'static str, &'static str>,
) -> Vec<Verdict> {
    let holding = |workers| move |kernel: &&&Kernel| kernel.workers == workers && kernel.holds(shape.rows);
    let by_blocks = shape.whole_rows && !shape.windowed;
    let of = |workers| kernels.iter().find(holding(workers));
    let team = of(Workers::Team);
    let pair = of(Workers::Pair).filter(|_| shape.windowed && team.is_none());
    let taken = |blocks, reason| Verdict::Taken(blocks * shape.multiprocessors, reason);
    let verdict = |kernel: &&'static Kernel| match kernel.workers {
        _ if !kernel.holds(shape.rows) => Verdict::Refused(HOLDS_FEWER),
        Workers::Block if by_blocks => taken(blocks.alone, BLOCKS),
        Workers::Block => Verdict::Passed(NOT_WHOLE),
        _ if by_blocks => Verdict::Passed(BLOCKS),
        Workers::Team => taken(blocks.teams, TEAMS),
        Workers::Pair if pair.is_some() => taken(blocks.pairs, PAIRS),
        Workers::Pair if !shape.windowed => Verdict::Passed(WINDOWS),
        _ if team.or(pair).is_some() => Verdict::Passed(TOGETHER),
        _ => alone(kernel).map_or_else(Verdict::Passed, |reason| taken(blocks.alone, reason)),
    };
    let mut verdicts: Vec<_> = kernels.iter().map(verdict).collect();
    if !verdicts.iter().any(|verdict| matches!(verdict, Verdict::Taken(..))) {
        verdicts[0] = taken(blocks.alone, NO_OTHER);
    }
    verdicts
}
