//! What is said of a kernel that could do an operation: the choice is made of nothing else, so it can be printed.

use crate::backend::gpu::catalogue::Kernel;
use crate::backend::gpu::launch::Launch;
use crate::backend::gpu::shapes::GemmShape;
use std::fmt;

/// See the module.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The cheapest is taken, of equals the first. The unit is the same for all kernels of a product.
    Costs(usize),
    /// It is taken, in so many blocks, for this reason.
    Taken(usize, &'static str),
    /// It could run, but another is taken, for this reason.
    Passed(&'static str),
    /// It must not run, for this reason.
    Refused(&'static str),
}
use Verdict::{Costs, Passed, Refused, Taken};

/// A kernel, and what is said of it.
pub type Said = (&'static Kernel, Verdict);

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Costs(cost) => write!(f, "costs {cost}"),
            Taken(_, reason) => write!(f, "taken: {reason}"),
            Passed(reason) => write!(f, "passed over: {reason}"),
            Refused(reason) => write!(f, "refused: {reason}"),
        }
    }
}

/// Of any kernel made for few rows.
pub const HOLDS_FEWER: &str = "it is for fewer rows in all";
/// Where another is made for so few rows.
pub const FOR_MORE: &str = "it is faster only where there are more rows, of an expert or in all";
/// Of any kernel beside one that is made for so many rows.
pub const ANOTHER: &str = "another is made for so many rows";
/// Of any kernel that there is no choice but to take.
pub const NO_OTHER: &str = "no other may be taken";
const SMALLER: &str = "a larger tile is made for so many rows, too";

/// The launch of the kernel that is taken, if one is. Of equals it is the first.
pub fn taken(said: &[Said]) -> Option<Launch> {
    said.iter().find_map(|&(kernel, verdict)| match verdict {
        Taken(blocks, _) => Some(Launch::new(kernel, blocks)),
        _ => None,
    })
}

/// The place of a product's kernel that is taken.
pub fn cheapest(verdicts: &[Verdict]) -> Option<usize> {
    let cost = |(i, verdict): (usize, &Verdict)| match verdict {
        Costs(cost) => Some((*cost, i)),
        _ => None,
    };
    verdicts.iter().enumerate().filter_map(cost).min().map(|(_, i)| i)
}

/// By the largest tile made for so many rows. Experts get few of a step's rows each: their mean counts, and any count
/// works.
pub fn largest_tile(shape: &GemmShape, kernels: &[&'static Kernel]) -> Vec<Verdict> {
    let rows = match shape.of_experts() {
        true => shape.rows.div_ceil(shape.groups),
        false => shape.rows,
    };
    let least = kernels.iter().map(|kernel| kernel.least_rows).min().unwrap_or(0);
    let fits = |kernel: &Kernel| kernel.least_rows <= rows.max(least);
    let fitting = kernels.iter().filter(|kernel| fits(kernel));
    let largest = fitting.map(|kernel| kernel.tokens).max();
    let of = |kernel: &&Kernel| match kernel {
        kernel if !fits(kernel) => Passed(FOR_MORE),
        kernel if Some(kernel.tokens) < largest => Passed(SMALLER),
        kernel => Costs(kernel.tokens),
    };
    kernels.iter().map(of).collect()
}
