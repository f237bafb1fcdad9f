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
//! `cargo bench --bench gpu -- kernel qkv --why` prints what is said of every tile.

use super::MOST_UNITS;
use crate::backend::gpu::args::SLAB;
use crate::backend::gpu::catalogue::{Kernel, Op};
use crate::backend::gpu::family::mma::{BLOCK_ROWS, UNIT_ROWS};
use crate::backend::gpu::family::verdict::FOR_MORE;
use crate::backend::gpu::family::verdict::Verdict::{self, Costs, Passed, Refused};
use crate::backend::gpu::shapes::GemmShape;

const IN_GROUPS: &str = "it stores outputs in groups, and their number is no multiple of one";
const NOT_EARLY: &str = "all rows fit a tile whose weights are on their way before the tokens are there";
const FOR_FEWER: &str = "another is faster where experts have so many rows";
const NARROW: &str = "a busy expert has more rows than it holds, and a wider tile holds more of them";

/// What is said of the tile of each of these kernels, all of which hold so many rows.
pub(super) fn verdicts(shape: &GemmShape, kernels: &[&'static Kernel], multiprocessors: usize) -> Vec<Verdict> {
    let of = |kernel: &&'static Kernel| match shape.of_experts() {
        true => of_experts(kernel, kernels, busiest(shape)),
        false => of_all_rows(kernel, kernels, shape, multiprocessors),
    };
    kernels.iter().map(of).collect()
}

/// Of the tiles made for the most rows that a busy expert has, the narrowest that holds them, or the widest.
fn of_experts(kernel: &Kernel, kernels: &[&'static Kernel], busiest: usize) -> Verdict {
    let from = |kernel: &&&Kernel| kernel.least_rows <= busiest;
    let most = kernels.iter().filter(from).map(|kernel| kernel.least_rows).max();
    let like = kernels.iter().filter(|other| other.least_rows == kernel.least_rows);
    let widest = like.map(|kernel| kernel.tokens).max();
    if kernel.least_rows > busiest {
        Passed(FOR_MORE)
    } else if Some(kernel.least_rows) < most {
        Passed(FOR_FEWER)
    } else if kernel.tokens < busiest && Some(kernel.tokens) < widest {
        Passed(NARROW)
    } else {
        Costs(kernel.tokens)
    }
}

/// Where a tile made for so few rows has room for all (FP16: up to 128, BF16: 16, `exact`: 8), the narrowest of these
/// is taken: its weights are on their way before the tokens are there. For more rows it is the tile that is done first.
fn of_all_rows(kernel: &Kernel, kernels: &[&'static Kernel], shape: &GemmShape, multiprocessors: usize) -> Verdict {
    let stores = |kernel: &Kernel| shape.n.is_multiple_of(kernel.cut.outputs);
    if !stores(kernel) {
        Refused(IN_GROUPS)
    } else if kernel.most_rows.is_some() {
        Costs(kernel.tokens)
    } else if kernels.iter().any(|other| stores(other) && other.most_rows.is_some()) {
        Passed(NOT_EARLY)
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

/// When the busiest multiprocessor is done: rounds of chunks, each of so many weight rows times the tile's tokens and
/// their terms, unless these arrive more slowly (the unit of time is also that in which 128 bytes of a row or token
/// arrive, some 70 a cycle),
/// or the pipeline's stages do. What rotates and stores behind a tile of qkv counts, too (of attn_out alike for all).
fn time(kernel: &Kernel, shape: &GemmShape, rows: usize, multiprocessors: usize) -> usize {
    let all = shape.row_blocks * MOST_UNITS;
    let (tokens, chunk) = (kernel.tokens, kernel.cut.rows / UNIT_ROWS);
    let tiles = rows.max(1).div_ceil(tokens);
    let rounds = (tiles * all.div_ceil(chunk)).div_ceil(multiprocessors);
    let units = all.div_ceil(rounds * multiprocessors / tiles);
    let multiplied = (UNIT_ROWS * units).next_multiple_of(kernel.cut.multiple) * tokens / BLOCK_ROWS;
    let arriving = shape.terms * rows.div_ceil(tiles) + UNIT_ROWS * units;
    let stages = kernel.shared_bytes / ((shape.terms * tokens + UNIT_ROWS * chunk) * 2 * SLAB);
    let round = ROUND + (shape.terms * multiplied).max(arriving).max(ARRIVAL / stages.max(1));
    match kernel.op {
        Op::QkvStore => rounds * (round + STORING),
        _ => rounds * round + rows / STORED_ROWS,
    }
}
