//! Which tile a product gets: whether each may be taken, and what it costs. An element's sum is the same in every tile,
//! so they are chosen by speed alone. A tile `n` takes up to `n` tokens of one group past the weights at once:
//!
//! * Too narrow, and a second tile decodes the same weights again (they come from L2, not from DRAM).
//! * Too wide, and the accumulators leave no registers for several weight blocks a warpgroup, so copies get small and
//!   fewer warps hide each other's decoding; wgmma also multiplies columns that nobody wants.
//!
//! A step's rows are only known up to its bucket. Tiles that must hold all rows follow the bucket, the others the rows
//! a step of it is likely to have: 890 rows come as 1024, and a tile fit for 1024 costs them a quarter more time.
//!
//! `cargo test --lib choices_can_be_printed -- --nocapture` prints what is said of every tile.

use super::MOST_UNITS;
use crate::backend::gpu::args::SLAB;
use crate::backend::gpu::catalogue::{Kernel, Op};
use crate::backend::gpu::shapes::{GemmShape, Product};
use std::fmt;

/// What is said of a tile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    /// The cheapest is taken, of equals the first. The unit is the same for all tiles of a product.
    Costs(usize),
    /// It may not be taken, for this reason.
    Refused(&'static str),
}
use Verdict::{Costs, Refused};

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Costs(cost) => write!(f, "costs {cost}"),
            Refused(reason) => write!(f, "refused: {reason}"),
        }
    }
}

const NARROWER_IN_ALL: &str = "it is for fewer rows in all";
const IN_FOURS: &str = "it stores outputs in fours, and their number is no multiple of four";
const NOT_EARLY: &str = "all rows fit a tile whose weights are on their way before the tokens are there";
const FOR_MORE: &str = "it is faster only where experts have more rows";
const FOR_FEWER: &str = "another is faster where experts have so many rows";
const NARROW: &str = "a busy expert has more rows than it holds, and a wider tile holds more of them";

/// The tile of one of these kernels.
pub(super) fn choose(
    shape: &GemmShape,
    kernels: &[&'static Kernel],
    multiprocessors: usize,
) -> Option<&'static Kernel> {
    let cost = |(kernel, verdict)| match verdict {
        Costs(cost) => Some((cost, kernel)),
        Refused(_) => None,
    };
    let all = verdicts(shape, kernels, multiprocessors).filter_map(cost);
    all.min_by_key(|(cost, _)| *cost).map(|(_, kernel)| kernel)
}

/// Every kernel, and what is said of its tile.
pub(super) fn verdicts<'a>(
    shape: &'a GemmShape,
    kernels: &'a [&'static Kernel],
    multiprocessors: usize,
) -> impl Iterator<Item = (&'static Kernel, Verdict)> + 'a {
    let of = move |kernel| match shape.product {
        Product::Mlp1 | Product::Mlp2 => of_experts(kernel, kernels, busiest(shape)),
        _ => of_all_rows(kernel, kernels, shape, multiprocessors),
    };
    kernels.iter().map(move |&kernel| (kernel, of(kernel)))
}

/// Of the tiles made for the most rows that a busy expert has, the narrowest that holds them, or the widest.
fn of_experts(kernel: &Kernel, kernels: &[&'static Kernel], busiest: usize) -> Verdict {
    let from = |kernel: &&&Kernel| kernel.least_rows <= busiest;
    let most = kernels.iter().filter(from).map(|kernel| kernel.least_rows).max();
    let like = kernels.iter().filter(|other| other.least_rows == kernel.least_rows);
    let widest = like.map(|kernel| kernel.tokens).max();
    if kernel.least_rows > busiest {
        Refused(FOR_MORE)
    } else if Some(kernel.least_rows) < most {
        Refused(FOR_FEWER)
    } else if kernel.tokens < busiest && Some(kernel.tokens) < widest {
        Refused(NARROW)
    } else {
        Costs(kernel.tokens)
    }
}

/// Where a tile made for so few rows has room for all (FP16: up to 128, BF16: 16, `exact`: 8), the narrowest of these
/// is taken: its weights are on their way before the tokens are there. For more rows it is the tile that is done first.
fn of_all_rows(kernel: &Kernel, kernels: &[&'static Kernel], shape: &GemmShape, multiprocessors: usize) -> Verdict {
    let stores = |kernel: &Kernel| shape.n.is_multiple_of(4) || !tokens_first(kernel);
    let is_single = |kernel: &Kernel| kernel.most_rows > 0 && shape.rows <= kernel.most_rows;
    if !stores(kernel) {
        Refused(IN_FOURS)
    } else if is_single(kernel) {
        Costs(kernel.tokens)
    } else if kernel.most_rows > 0 {
        Refused(NARROWER_IN_ALL)
    } else if kernels.iter().any(|other| stores(other) && is_single(other)) {
        Refused(NOT_EARLY)
    } else {
        let likely = time(kernel, shape, likely(shape.rows), multiprocessors);
        Costs(LIKELY * likely + time(kernel, shape, shape.rows, multiprocessors))
    }
}

/// The rows that a step of a bucket is likely to have. It has more than the next smaller bucket, which is two thirds or
/// three quarters of this one, so about an eighth less than its own.
fn likely(rows: usize) -> usize {
    rows - rows / 8
}

/// The tokens of a busy expert: the mean and one and a half standard deviations of an even routing, so that few experts
/// need a second tile.
fn busiest(shape: &GemmShape) -> usize {
    let mean = likely(shape.rows) as f64 / shape.groups as f64;
    ((mean + 1.5 * mean.sqrt()) as usize).clamp(1, shape.rows.max(1))
}

/// What a round of chunks costs beside its products, and how long a stage is on its way. The unit is the time in which
/// a row block is multiplied with one token for 64 columns: 0.92 ns for qkv, 1.2 for attn_out.
///
/// Measured on an H200 by the two kernels alone, nine tiles of each from 222 to 2,048 rows and six from 3,072 to 8,192
/// (benches/record/h200/2026-11-23-b.md). The unit and the round's cost are fitted by least squares: 5 % off on
/// average. From 50 to 200 the round's cost chooses the same tiles, which take 1 % longer on average than the fastest.
const ROUND: usize = 100;
const ARRIVAL: usize = 930;
/// How much longer a round takes whose chunks are rotated and stored, and rows for which a kernel of its own that does
/// so takes a unit. Of 15 numbers of rows from 600 to 8,192 they choose the faster way for all but 2,560 and 5,120,
/// where it takes 3 and 6 % longer.
const STORING: usize = 42;
const STORED_ROWS: usize = 5;
/// How much more the rows that a step of a bucket is likely to have count than a full bucket.
const LIKELY: usize = 4;

/// Whether tokens are wgmma's rows: no weights but the chunk's own are multiplied then, and outputs are stored in
/// fours.
pub(super) fn tokens_first(kernel: &Kernel) -> bool {
    kernel.parameter("UNITS").is_some()
}

/// Rows of a unit of 16-bit weights.
const UNIT_ROWS: usize = 16;

/// Units of weights in a chunk.
fn chunk_units(kernel: &Kernel) -> usize {
    // One more warpgroup brings what the others multiply.
    let blocks = |of_each| (kernel.threads / 128 - 1) * of_each;
    let units = kernel.parameter("UNITS");
    units.unwrap_or_else(|| MOST_UNITS * kernel.parameter("BLOCKS").map_or(1, blocks))
}

/// When the busiest multiprocessor is done: rounds of chunks, each of so many weight rows times the tile's tokens and
/// their terms, unless these arrive more slowly (the unit of time is also that in which 128 bytes of a row or token
/// arrive, some 70 a cycle),
/// or the pipeline's stages do. What rotates and stores behind a tile of qkv counts, too (of attn_out alike for all).
fn time(kernel: &Kernel, shape: &GemmShape, rows: usize, multiprocessors: usize) -> usize {
    let all = shape.row_blocks * MOST_UNITS;
    let (tokens, chunk) = (kernel.tokens, chunk_units(kernel));
    let tiles = rows.max(1).div_ceil(tokens);
    let rounds = (tiles * all.div_ceil(chunk)).div_ceil(multiprocessors);
    let units = all.div_ceil(rounds * multiprocessors / tiles);
    let multiplied = match tokens_first(kernel) {
        true => units * tokens / MOST_UNITS,
        false => units.div_ceil(MOST_UNITS) * tokens,
    };
    let arriving = shape.terms * rows.div_ceil(tiles) + UNIT_ROWS * units;
    let stages = kernel.shared_bytes / ((shape.terms * tokens + UNIT_ROWS * chunk) * 2 * SLAB);
    let round = ROUND + (shape.terms * multiplied).max(arriving).max(ARRIVAL / stages.max(1));
    match kernel.op {
        Op::QkvStore => rounds * (round + STORING),
        _ => rounds * round + rows / STORED_ROWS,
    }
}
