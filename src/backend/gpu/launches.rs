//! Which kernel each operation gets, and how many blocks of it: one function an operation, in the order of a step. What
//! is a family's own the family says. Pure functions of shapes.
//!
//! Where a family's table has several kernels for an operation, the columns of their rows tell them apart. The kernels'
//! head comments say why their grids are so; a block beyond the step's rows returns at once.

use super::args::{PackArgs, WIRE_ROWS};
use super::catalogue::{Elements, Kernel, Op, PackedFormat};
use super::family::spans;
use super::family::verdict::{HOLDS_FEWER, Verdict, cheapest};
use super::launch::Launch;
use super::shapes::{
    AttentionWork, DecodeShape, ExpertCuts, GemmLaunch, GemmShape, MatrixForm, Mlp1Launch, NormRouteLaunch,
    NormRouteShape, NormWork, Numbers, Product, SortGatherLaunch,
};
use super::target::Target;
use crate::batch::{StepPlan, Want};
use crate::config::ModelConfig;
use crate::error::{Error, Result};
use crate::weights::WeightFormat;

/// Runtimes count a launch's threads in 32 bits, and kernels the parts of a product's work in 32 with a sign.
const MOST_THREADS: u64 = u32::MAX as u64;
const MOST_COUNTED: u64 = i32::MAX as u64;
/// Enough blocks that a thread copies one or two pieces of a plan of 100 KB.
const UPLOAD_BLOCKS: usize = 8;
/// Enough for every multiprocessor of any card, of the kernel that strides over a tensor.
const MOST_STRIDING_BLOCKS: usize = 2048;
/// A few rounds of what a multiprocessor holds, of kernels that pack.
const PACK_ROUNDS: usize = 16;
/// Values of it that a thread takes at once.
const STRIDE: usize = 8;
/// A single row's experts in the word by which the router tells them to mlp1: a byte each.
const PICKS: usize = size_of::<u32>();

impl Target {
    /// Brings the plan to the device.
    pub fn upload(&self) -> Launch {
        self.blocks(Op::Upload, UPLOAD_BLOCKS)
    }

    /// Tokens become rows.
    pub fn embed(&self, rows: usize) -> Launch {
        self.blocks(Op::Embed, rows)
    }

    /// A norm. In `fast`, one that adds the experts' outputs has kernels for few and for many rows.
    pub fn norm(&self, config: &ModelConfig, numbers: &Numbers, work: &NormWork, rows: usize) -> Launch {
        let NormWork {
            adds,
            wanted_only,
            for_router,
        } = *work;
        let made_for_sums = adds && !wanted_only && !for_router && !numbers.exact;
        let few = || self.of_model(Op::Norm, config).find(|kernel| kernel.is_for_few(rows));
        let many = || {
            let fit = self.of_model(Op::Norm, config);
            let fit = fit.filter(|kernel| (1..=rows).contains(&kernel.least_rows));
            fit.max_by_key(|kernel| kernel.least_rows)
        };
        let kernel = if made_for_sums { few().or_else(many) } else { None };
        Launch::new(kernel.unwrap_or_else(|| self.kernel(Op::Norm)), rows)
    }

    /// A product.
    pub fn gemm(&self, shape: &GemmShape) -> Result<GemmLaunch> {
        let Some(weights) = shape.form.packed() else {
            return Ok(self.plain_gemm(shape));
        };
        let kernels: Vec<_> = self.holding(shape, weights).collect();
        let verdicts = self.family.verdicts(shape, &kernels, self.multiprocessors);
        let taken = cheapest(&verdicts).ok_or_else(|| self.lacks(shape))?;
        let found = self.family.product(shape, kernels[taken], self.multiprocessors);
        if found.largest_count > MOST_COUNTED {
            return Err(too_many(found.launch.kernel));
        }
        countable(found.launch)?;
        Ok(found)
    }

    /// Every kernel that could run a product whose weights are packed, and what is said of it.
    pub fn verdicts(&self, shape: &GemmShape) -> Vec<(&'static Kernel, Verdict)> {
        let Some(weights) = shape.form.packed() else {
            return Vec::new();
        };
        let kernels: Vec<_> = self.holding(shape, weights).collect();
        let mut said = self.family.verdicts(shape, &kernels, self.multiprocessors).into_iter();
        let mut of = |kernel: &Kernel| match kernel.holds(shape.rows) {
            true => said.next().expect("one of each that holds the rows"),
            false => Verdict::Refused(HOLDS_FEWER),
        };
        self.made_for(shape, weights)
            .map(|kernel| (kernel, of(kernel)))
            .collect()
    }

    /// The kernels for a product with such weights, first those that also rotate and store: of equals the first is
    /// taken.
    fn made_for(&self, shape: &GemmShape, weights: PackedFormat) -> impl Iterator<Item = &'static Kernel> {
        let storing = (shape.form == MatrixForm::Heads).then_some(Op::QkvStore);
        let ops = storing.into_iter().chain([shape.product.op()]);
        ops.flat_map(move |op| self.products(op, weights, shape.elements, shape.terms))
    }

    fn holding(&self, shape: &GemmShape, weights: PackedFormat) -> impl Iterator<Item = &'static Kernel> {
        self.made_for(shape, weights).filter(|kernel| kernel.holds(shape.rows))
    }

    /// Products of weights in the wire format. A block takes 32 outputs; where that fills the device too little,
    /// several share them.
    fn plain_gemm(&self, shape: &GemmShape) -> GemmLaunch {
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
            largest_count: (tiles * splits) as u64,
        }
    }

    /// Rotates queries and keys, and stores them and values, where [`Op::QkvStore`] has not.
    pub fn rope_store(&self, rows: usize) -> Launch {
        self.blocks(Op::RopeStore, rows)
    }

    /// One layer's attention: that of rows that decode, and that of prompts. `exact` and heads that the matrix cores'
    /// kernels do not take have one kernel for both.
    pub fn attention(
        &self,
        config: &ModelConfig,
        kv: Elements,
        exact: bool,
        work: &AttentionWork,
    ) -> Result<[Option<Launch>; 2]> {
        let &AttentionWork {
            windowed,
            rows,
            items,
            tiles,
        } = work;
        let kv_heads = config.n_kv_heads;
        let of = |op| -> Vec<&'static Kernel> {
            let mine = |kernel: &&'static Kernel| kernel.takes(config).is_ok();
            self.kernels(op, Some(kv)).filter(mine).collect()
        };
        let (exactly, decode, prefill) = (
            of(Op::AttentionExact),
            of(Op::AttentionDecode),
            of(Op::AttentionPrefill),
        );
        if let ([kernel, ..], true) = (exactly.as_slice(), exact) {
            return Ok([Some(countable(Launch::new(kernel, rows * kv_heads))?), None]);
        }
        let ([_, ..], [tile, ..], false) = (decode.as_slice(), prefill.as_slice(), exact) else {
            // Query heads that share a KV head share a block.
            let plain = of(Op::AttentionPlain);
            let kernel = plain.first().ok_or_else(|| self.lacks((Op::AttentionPlain, kv)))?;
            let parts = (config.n_attn_heads / kv_heads).div_ceil(kernel.per_block);
            return Ok([Some(countable(Launch::new(kernel, rows * kv_heads * parts))?), None]);
        };
        let shape = DecodeShape {
            items,
            rows,
            kv_heads,
            windowed,
            multiprocessors: self.multiprocessors,
        };
        let decode = (items > 0).then(|| self.family.attention_decode(&decode, &shape));
        let prefill = (tiles > 0).then(|| countable(Launch::new(tile, tiles * kv_heads)));
        let prefill = prefill.transpose()?.map(|all| Launch {
            blocks: self.family.prefill_blocks(all.blocks, self.multiprocessors),
            ..all
        });
        Ok([decode.map(countable).transpose()?, prefill])
    }

    /// Norm and router in one kernel, where there is one for so many rows and a router held so.
    pub fn norm_route(
        &self,
        config: &ModelConfig,
        numbers: &Numbers,
        router: MatrixForm,
        rows: usize,
    ) -> Option<NormRouteLaunch> {
        let shape = NormRouteShape {
            rows,
            on_matrix_cores: !numbers.exact && router == MatrixForm::Wire(WeightFormat::Bf16),
            multiprocessors: self.multiprocessors,
        };
        let kernels: Vec<_> = self.of_model(Op::NormRoute, config).collect();
        let launch = self.family.norm_route(&shape, &kernels)?;
        let sends = rows == 1 && self.gathers(numbers.elements, numbers.terms, rows);
        Some(NormRouteLaunch {
            launch,
            sends,
            tells: sends && launch.kernel.cluster > 0 && config.experts_per_token <= PICKS,
        })
    }

    /// The router alone.
    pub fn route(&self, rows: usize) -> Launch {
        self.shares(Op::Route, rows)
    }

    /// Rows to their experts' slots. For few rows each block of one kernel sorts them all, and a launch is saved.
    pub fn sort_gather(&self, rows: usize, k_blocks: usize) -> SortGatherLaunch {
        let of_slabs = |op| {
            let Launch { kernel, blocks, .. } = self.shares(op, rows);
            Launch::new(kernel, blocks * k_blocks)
        };
        let together = of_slabs(Op::SortGather);
        if together.kernel.holds(rows) {
            return SortGatherLaunch::Together(together);
        }
        SortGatherLaunch::Apart {
            sort: self.sort(rows),
            gather: of_slabs(Op::Gather),
        }
    }

    /// Rows get their slots.
    pub fn sort(&self, rows: usize) -> Launch {
        self.shares(Op::Sort, rows)
    }

    /// How blocks of this kernel take experts' tiles, if sort cuts these.
    pub fn cuts(&self, kernel: &Kernel) -> Option<ExpertCuts> {
        self.family.cuts(kernel, self.multiprocessors)
    }

    /// Whether every mlp1 of a step of so many rows reads gathered ones. Others find them, or read them by an index.
    pub fn gathers(&self, elements: Elements, terms: usize, rows: usize) -> bool {
        let mut of_terms = self
            .kernels(Op::Mlp1, Some(elements))
            .filter(|kernel| kernel.terms == terms);
        let finds = self.finding(elements, terms, rows).next().is_some();
        !finds && !of_terms.any(|kernel| self.family.indexes_rows(kernel))
    }

    /// mlp1 of a step of so many rows that are not at their slots yet, for which [`Self::gemm`] has `chosen` a kernel.
    /// One that sorts has its weights and its tile.
    pub fn mlp1(&self, shape: &GemmShape, rows: usize, chosen: Launch) -> Mlp1Launch {
        let Launch { kernel, .. } = chosen;
        let alike = |sorting: &&Kernel| sorting.weights == kernel.weights && sorting.tokens == kernel.tokens;
        if let Some(sorting) = self.finding(shape.elements, shape.terms, rows).find(alike) {
            let blocks = 1 + shape.rows.min(shape.groups) * self.spans(shape, sorting);
            return Mlp1Launch::Sorting(Launch::new(sorting, blocks));
        }
        match self.family.indexes_rows(kernel) {
            true => Mlp1Launch::Indexing(chosen, self.cuts(kernel)),
            false => Mlp1Launch::Gathered(chosen),
        }
    }

    /// Blocks of this kernel that have all weight rows of a product.
    pub fn spans(&self, shape: &GemmShape, kernel: &Kernel) -> usize {
        spans(shape, kernel, self.family.block_rows())
    }

    fn finding(&self, elements: Elements, terms: usize, rows: usize) -> impl Iterator<Item = &'static Kernel> {
        let fits = move |kernel: &&Kernel| kernel.terms == terms && kernel.holds(rows);
        self.kernels(Op::SortMlp1, Some(elements)).filter(fits)
    }

    /// Adds the experts' outputs to the residual stream.
    pub fn settle(&self, rows: usize) -> Launch {
        self.blocks(Op::Settle, rows)
    }

    /// The unembedding by weights held so: only the matrix cores' kernels summarize rows as they go, and they know
    /// nothing of tokens that may not be sampled.
    pub fn unembedding(&self, unembedding: MatrixForm, plan: &StepPlan, want: Want) -> Product {
        let whole_rows = want == Want::Logits
            || want.draws(plan)
            || want.scores(plan)
            || want.keeps_logits(plan)
            || plan.drawable.is_some();
        if whole_rows || unembedding.packed().is_none() {
            Product::Logits
        } else {
            Product::Greedy
        }
    }

    /// The most candidates for a row's largest logit that any kernel leaves in steps with so many rows of logits.
    pub fn most_candidates(
        &self,
        config: &ModelConfig,
        numbers: &Numbers,
        unembedding: MatrixForm,
        most_rows: usize,
    ) -> Result<usize> {
        if unembedding.packed().is_none() {
            return Ok(1);
        }
        let rows = (0..).map(|i| 1 << i).take_while(|&rows| rows < 2 * most_rows);
        let mut most = 1;
        for rows in rows {
            for product in [Product::Greedy, Product::Logits] {
                let shape = self.product_shape(config, product, unembedding, numbers.elements, numbers.terms, rows);
                most = most.max(self.gemm(&shape)?.candidates);
            }
        }
        Ok(most)
    }

    /// Each row's largest logit: of all logits, or of the candidates that the unembedding leaves.
    pub fn argmax(&self, of_logits: bool, rows: usize) -> Launch {
        match of_logits {
            true => self.blocks(Op::ArgmaxLogits, rows),
            false => self.shares(Op::Argmax, rows),
        }
    }

    /// Tokens sampled from rows of logits, and then from those of them that have a wide nucleus.
    pub fn draw(&self, rows: usize) -> [Launch; 2] {
        [Op::Draw, Op::DrawWide].map(|op| self.blocks(op, rows))
    }

    /// What log-probabilities take.
    pub fn score(&self, rows: usize) -> Launch {
        self.blocks(Op::Score, rows)
    }

    /// The exponents of a tensor of so many values.
    pub fn range(&self, values: usize) -> Launch {
        let kernel = self.kernel(Op::Range);
        let blocks = values.div_ceil(STRIDE * kernel.threads);
        Launch::new(kernel, blocks.min(MOST_STRIDING_BLOCKS))
    }

    /// Packs a tensor.
    pub fn pack(&self, weights: PackedFormat, args: &PackArgs) -> Result<Launch> {
        let mine = |kernel: &&Kernel| kernel.weights == Some(weights);
        let kernel = self.kernels(Op::Pack, None).find(mine);
        let kernel = kernel.ok_or_else(|| self.lacks((Op::Pack, weights)))?;
        let slabs = args.members as usize * args.row_blocks as usize * args.k_blocks as usize;
        let blocks = slabs.div_ceil(kernel.per_block);
        Ok(Launch::new(kernel, blocks.min(PACK_ROUNDS * self.multiprocessors)))
    }

    /// The matrix cores' peak, if the family has a kernel that measures it.
    pub fn matrix_peak(&self) -> Option<Launch> {
        let kernel = self.kernels(Op::MatrixPeak, None).next()?;
        Some(Launch::new(kernel, 2 * self.multiprocessors))
    }

    /// The peak of prefill attention in `fast`, if the family has a kernel that measures it.
    pub fn attention_peak(&self) -> Option<Launch> {
        let kernel = self.kernels(Op::AttentionPeak, None).next()?;
        Some(Launch::new(kernel, 2 * self.multiprocessors))
    }

    /// The kernels of an operation that take the model.
    fn of_model(&self, op: Op, config: &ModelConfig) -> impl Iterator<Item = &'static Kernel> {
        self.kernels(op, None).filter(|kernel| kernel.takes(config).is_ok())
    }

    fn blocks(&self, op: Op, blocks: usize) -> Launch {
        Launch::new(self.kernel(op), blocks)
    }

    /// Blocks that take several rows each.
    fn shares(&self, op: Op, rows: usize) -> Launch {
        let kernel = self.kernel(op);
        Launch::new(kernel, rows.div_ceil(kernel.per_block))
    }

    fn lacks(&self, what: impl std::fmt::Debug) -> Error {
        Error::Internal(format!("{} has no kernel for {what:?}", self.family.table().name))
    }
}

/// A launch whose threads a runtime can count.
fn countable(launch: Launch) -> Result<Launch> {
    let threads = launch.blocks as u64 * launch.kernel.threads as u64;
    if threads > MOST_THREADS {
        return Err(too_many(launch.kernel));
    }
    Ok(launch)
}

fn too_many(kernel: &Kernel) -> Error {
    let name = kernel.name();
    Error::State(format!(
        "the largest step has more work for {name} than a grid can number; lower GETP_STEP_TOKENS"
    ))
}
