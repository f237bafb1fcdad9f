//! Launches of the kernels that multiply no packed weights: of those that every family has, and of those that a
//! family's table has in their place for few or many rows. Their head comments say why they are so; a block beyond the
//! step's rows returns at once.

use super::args::WIRE_ROWS;
use super::catalogue::{Kernel, Op};
use super::launch::Launch;
use super::shapes::{GemmLaunch, GemmShape, Product};
use super::target::Target;
use crate::config::ModelConfig;

/// Enough blocks that a thread copies one or two pieces of a plan of 100 KB.
const UPLOAD_BLOCKS: usize = 8;
/// Shared memory of Hopper's multiprocessors, whose blocks form clusters, and what is kept of it for each block.
const MULTIPROCESSOR_SHARED: usize = 228 * 1024;
const BLOCK_RESERVED: usize = 1024;
/// Enough for every multiprocessor of any card, of kernels that stride over a tensor.
const MOST_STRIDING_BLOCKS: usize = 2048;
/// Values of it that a thread takes at once.
const STRIDE: usize = 8;

impl Target {
    /// `upload`
    pub fn upload(&self) -> Launch {
        self.blocks(Op::Upload, UPLOAD_BLOCKS)
    }

    /// `embed`
    pub fn embed(&self, rows: usize) -> Launch {
        self.blocks(Op::Embed, rows)
    }

    /// `rmsnorm`
    pub fn norm(&self, rows: usize) -> Launch {
        self.blocks(Op::Norm, rows)
    }

    /// A norm that adds the experts' outputs to so many rows that a family has a kernel for them, in `fast`.
    pub fn norm_rows(&self, config: &ModelConfig, rows: usize) -> Option<Launch> {
        self.for_many(Op::Norm, config, rows)
            .map(|kernel| Launch::new(kernel, rows))
    }

    /// The same of so few rows that a family has a kernel for them.
    pub fn norm_few(&self, config: &ModelConfig, rows: usize) -> Option<Launch> {
        let fits = |kernel: &&'static Kernel| rows <= kernel.most_rows && kernel.takes(config).is_ok();
        self.kernels(Op::Norm, None)
            .find(fits)
            .map(|kernel| Launch::new(kernel, rows))
    }

    /// Norm and router of so many rows that a family has a kernel for them, in `fast` and with a BF16 router: clusters of
    /// blocks, which take the rows in turn where there are more than run at once. (On an H200 of 132 multiprocessors those
    /// are 30 clusters of four, or 62 with two blocks each.)
    pub fn norm_route_rows(&self, config: &ModelConfig, rows: usize) -> Option<Launch> {
        let kernel = self.for_many(Op::NormRoute, config, rows)?;
        let clusters = rows.div_ceil(kernel.cluster * kernel.per_block);
        let resident = MULTIPROCESSOR_SHARED / (kernel.shared_bytes + BLOCK_RESERVED);
        let at_once = self.multiprocessors * resident * 9 / 10 / kernel.cluster;
        Some(Launch::new(kernel, kernel.cluster * clusters.min(at_once.max(1))))
    }

    /// `settle`
    pub fn settle(&self, rows: usize) -> Launch {
        self.blocks(Op::Settle, rows)
    }

    /// `rope_store`
    pub fn rope_store(&self, rows: usize) -> Launch {
        self.blocks(Op::RopeStore, rows)
    }

    /// `route`
    pub fn route(&self, rows: usize) -> Launch {
        self.shares(Op::Route, rows)
    }

    /// `norm_route`, for rows of which each can have a multiprocessor.
    pub fn norm_route(&self, rows: usize) -> Option<Launch> {
        (rows <= self.multiprocessors).then(|| self.blocks(Op::NormRoute, rows))
    }

    /// Norm and router of so few rows that a family has clusters of blocks for them, in `fast` and with a BF16 router: the
    /// largest clusters of which each row has one at once. Where none are, they take the rows in turn, at most as many each
    /// as a cluster has blocks.
    pub fn norm_route_few(&self, config: &ModelConfig, rows: usize) -> Option<Launch> {
        let fits =
            |kernel: &&'static Kernel| kernel.cluster > 0 && rows <= kernel.most_rows && kernel.takes(config).is_ok();
        let fitting = || self.kernels(Op::NormRoute, None).filter(fits);
        let at_once = fitting().filter(|kernel| rows <= self.clusters_at_once(kernel));
        let largest = at_once.max_by_key(|kernel| kernel.cluster);
        let kernel = largest.or_else(|| fitting().min_by_key(|kernel| kernel.cluster))?;
        let clusters = self.clusters_at_once(kernel).max(rows.div_ceil(kernel.cluster));
        Some(Launch::new(kernel, kernel.cluster * clusters.min(rows)))
    }

    /// Clusters that run side by side: a multiprocessor holds 512 of their threads. The blocks of a cluster run within
    /// one of the device's groups of 16 to 18 multiprocessors (GPC), some of which may be missing there: a quarter of
    /// as many clusters of eight as all multiprocessors together hold finds no place.
    fn clusters_at_once(&self, kernel: &Kernel) -> usize {
        self.multiprocessors * 512 * 3 / 4 / (kernel.threads * kernel.cluster)
    }

    /// `sort`
    pub fn sort(&self, rows: usize) -> Launch {
        self.shares(Op::Sort, rows)
    }

    /// `gather`
    pub fn gather(&self, rows: usize, k_blocks: usize) -> Launch {
        let rows = self.shares(Op::Gather, rows);
        Launch::new(rows.kernel, rows.blocks * k_blocks)
    }

    /// `sort_gather`, if it does for so many rows: each of its blocks sorts them all, and a launch is saved.
    pub fn sort_gather(&self, rows: usize, k_blocks: usize) -> Option<Launch> {
        let blocks = self.shares(Op::SortGather, rows);
        let few = rows <= blocks.kernel.most_rows;
        few.then(|| Launch::new(blocks.kernel, blocks.blocks * k_blocks))
    }

    /// `argmax`
    pub fn argmax(&self, rows: usize) -> Launch {
        self.shares(Op::Argmax, rows)
    }

    /// `argmax_logits`
    pub fn argmax_logits(&self, rows: usize) -> Launch {
        self.blocks(Op::ArgmaxLogits, rows)
    }

    /// `draw`
    pub fn draw(&self, rows: usize) -> Launch {
        self.blocks(Op::Draw, rows)
    }

    /// `draw_wide`
    pub fn draw_wide(&self, rows: usize) -> Launch {
        self.blocks(Op::DrawWide, rows)
    }

    /// `score`
    pub fn score(&self, rows: usize) -> Launch {
        self.blocks(Op::Score, rows)
    }

    /// `range`, of a tensor of so many values.
    pub fn range(&self, values: usize) -> Launch {
        self.striding(Op::Range, values)
    }

    /// `synthesize`, of a tensor of so many values.
    pub fn synthesize(&self, values: usize) -> Launch {
        self.striding(Op::Synthesize, values)
    }

    /// `matrix_peak`
    pub fn matrix_peak(&self) -> Launch {
        self.blocks(Op::MatrixPeak, 2 * self.multiprocessors)
    }

    /// `plain_*`: products of weights on the wire's form. A block takes 32 outputs; where that fills the device too little,
    /// several share them.
    pub(super) fn plain_gemm(&self, shape: &GemmShape) -> GemmLaunch {
        let tiles = shape.n.div_ceil(WIRE_ROWS) * shape.groups;
        let splits = (4 * self.multiprocessors).div_ceil(tiles).min(shape.rows.max(1));
        let op = match shape.product {
            Product::Qkv => Op::PlainQkv,
            Product::AttnOut => Op::PlainAttnOut,
            Product::Mlp1 => Op::PlainMlp1,
            Product::Mlp2 => Op::PlainMlp2,
            Product::Greedy | Product::Logits => Op::PlainLogits,
        };
        GemmLaunch {
            launch: self.blocks(op, tiles * splits),
            candidates: shape.n,
            parts: (tiles * splits) as u64,
        }
    }

    fn blocks(&self, op: Op, blocks: usize) -> Launch {
        Launch::new(self.kernel(op), blocks)
    }

    /// Blocks that take several rows each.
    fn shares(&self, op: Op, rows: usize) -> Launch {
        let kernel = self.kernel(op);
        Launch::new(kernel, rows.div_ceil(kernel.per_block))
    }

    /// The kernel of an operation for the most rows that are at most so many, if there is one that takes the model.
    fn for_many(&self, op: Op, config: &ModelConfig, rows: usize) -> Option<&'static Kernel> {
        let fits = |kernel: &&'static Kernel| (1..=rows).contains(&kernel.from_rows) && kernel.takes(config).is_ok();
        self.kernels(op, None)
            .filter(fits)
            .max_by_key(|kernel| kernel.from_rows)
    }

    fn striding(&self, op: Op, values: usize) -> Launch {
        let kernel = self.kernel(op);
        let blocks = values.div_ceil(STRIDE * kernel.threads);
        Launch::new(kernel, blocks.min(MOST_STRIDING_BLOCKS))
    }
}
