//! Which kernel each operation gets, and how many blocks of it: one function an operation, in the order of a step. What
//! is a family's own the family says. Pure functions of shapes.
//!
//! Where a family's table has several kernels for an operation, the columns of their rows tell them apart. The kernels'
//! head comments say why their grids are so; a block beyond the step's rows returns at once.

use super::args::{PackArgs, WIRE_ROWS};
use super::catalogue::{Elements, Kernel, Op, PackedFormat};
use super::family::spans;
use super::family::verdict::{ANOTHER, FOR_MORE, HOLDS_FEWER, NO_OTHER, Said, Verdict, cheapest, taken};
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

const MADE_FOR_ROWS: &str = "it is made for so many rows";
const MADE_FOR_SUMS: &str = "it is made for `fast`, where the experts' outputs are added and attention alone follows";
const MADE_FOR_PAIRS: &str = "it is made for `fast`, and weights whose rows are in pairs half a head apart";
const NORMS_TOO: &str =
    "it norms the row, too, in each layer but a stage's first, which has no experts' outputs to add";
const FASTER: &str = "one that is faster takes such heads";
const FOR_EXACT: &str = "it is made for `exact`";
const FOR_FAST: &str = "matrix cores attend in `fast`, to heads that all kernels for it take";
const NO_ROW_DECODES: &str = "no row decodes";
const OF_MANY: &str = "several rows see the same keys, which it reads once for them";
const NO_ROWS_SHARE: &str = "no rows share keys of full layers";
const NO_PROMPTS: &str = "there are no prompts";

impl Target {
    /// Brings the plan to the device.
    pub fn upload(&self) -> Launch {
        self.blocks(Op::Upload, UPLOAD_BLOCKS)
    }

    /// Tokens become rows.
    pub fn embed(&self, rows: usize) -> Launch {
        self.blocks(Op::Embed, rows)
    }

    /// A norm.
    pub fn norm(&self, config: &ModelConfig, numbers: &Numbers, work: &NormWork, rows: usize) -> Launch {
        taken(&self.norm_verdicts(config, numbers, work, rows)).expect("every family has one for any norm")
    }

    /// What is said of each kernel for a norm. In `fast`, one that adds the experts' outputs has kernels for few and
    /// for many rows.
    pub fn norm_verdicts(&self, config: &ModelConfig, numbers: &Numbers, work: &NormWork, rows: usize) -> Vec<Said> {
        let NormWork {
            adds,
            wanted_only,
            for_router,
        } = *work;
        let made_for_sums = adds && !wanted_only && !for_router && !numbers.exact;
        let plain = self.kernel(Op::Norm);
        let others = || {
            self.of_model(Op::Norm, config)
                .filter(|kernel| kernel.index != plain.index)
        };
        let fits = |kernel: &&Kernel| made_for_sums && kernel.holds(rows) && kernel.least_rows <= rows;
        let best = others().filter(fits);
        let best = best.max_by_key(|kernel| (kernel.is_for_few(rows), kernel.least_rows));
        let of_plain = match best {
            Some(_) => Verdict::Passed(ANOTHER),
            None => Verdict::Taken(rows, NO_OTHER),
        };
        let of = |kernel: &'static Kernel| match best {
            Some(best) if best.index == kernel.index => Verdict::Taken(rows, MADE_FOR_ROWS),
            _ if !made_for_sums => Verdict::Refused(MADE_FOR_SUMS),
            _ if !kernel.holds(rows) => Verdict::Refused(HOLDS_FEWER),
            _ if kernel.least_rows > rows => Verdict::Passed(FOR_MORE),
            _ => Verdict::Passed(ANOTHER),
        };
        let of_others = others().map(|kernel| (kernel, of(kernel)));
        [(plain, of_plain)].into_iter().chain(of_others).collect()
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
    pub fn verdicts(&self, shape: &GemmShape) -> Vec<Said> {
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

    /// A norm that adds, the product behind it and [`Op::RopeStore`] in one kernel, where there is one for so many rows
    /// and weights held so.
    pub fn norm_qkv(&self, config: &ModelConfig, shape: &GemmShape) -> Option<Launch> {
        taken(&self.norm_qkv_verdicts(config, shape))
    }

    /// What is said of each kernel for all three.
    pub fn norm_qkv_verdicts(&self, config: &ModelConfig, shape: &GemmShape) -> Vec<Said> {
        let of = |kernel: &'static Kernel| match kernel {
            _ if !kernel.holds(shape.rows) => Verdict::Refused(HOLDS_FEWER),
            _ if shape.form != MatrixForm::Heads || shape.terms > 1 => Verdict::Refused(MADE_FOR_PAIRS),
            _ => Verdict::Taken(self.spans(shape, kernel), NORMS_TOO),
        };
        let mine = |kernel: &&'static Kernel| kernel.elements == Some(shape.elements);
        let kernels = self.of_model(Op::NormQkv, config).filter(mine);
        kernels.map(|kernel| (kernel, of(kernel))).collect()
    }

    /// Rotates queries and keys, and stores them and values, where [`Op::QkvStore`] has not.
    pub fn rope_store(&self, rows: usize) -> Launch {
        self.blocks(Op::RopeStore, rows)
    }

    /// One layer's attention: of keys that several decoding rows see, of rows that decode, and of prompts. `exact` and
    /// heads that the matrix cores' kernels do not take have one kernel for all.
    pub fn attention(
        &self,
        config: &ModelConfig,
        kv: Elements,
        exact: bool,
        work: &AttentionWork,
    ) -> Result<[Option<Launch>; 3]> {
        let said = self.attention_verdicts(config, kv, exact, work);
        let of = |op: Op| {
            let mine = said.iter().copied().filter(|(kernel, _)| kernel.op == op);
            taken(&mine.collect::<Vec<_>>())
        };
        let (shared, prefill) = (of(Op::AttentionShared), of(Op::AttentionPrefill));
        let others = [Op::AttentionDecode, Op::AttentionExact, Op::AttentionPlain];
        let rows = others.into_iter().find_map(of);
        if rows.is_none() && (work.items > 0 || prefill.is_none() && work.tiles > 0) {
            return Err(self.lacks((Op::AttentionPlain, kv)));
        }
        if let Some(launch) = prefill {
            // Persistent blocks count the tiles by themselves.
            countable(Launch::new(launch.kernel, work.tiles * config.n_kv_heads))?;
        }
        let [shared, rows, prefill] = [shared, rows, prefill].map(|launch| launch.map(countable).transpose());
        Ok([shared?, rows?, prefill?])
    }

    /// What is said of each kernel for one layer's attention.
    pub fn attention_verdicts(
        &self,
        config: &ModelConfig,
        kv: Elements,
        exact: bool,
        work: &AttentionWork,
    ) -> Vec<Said> {
        let &AttentionWork {
            windowed,
            rows,
            items,
            shares_keys,
            whole_rows,
            tiles,
        } = work;
        let kv_heads = config.n_kv_heads;
        let of = |op| self.attention_kernels(op, config, kv);
        let (plain, exactly) = (of(Op::AttentionPlain), of(Op::AttentionExact));
        let (decode, prefill) = (of(Op::AttentionDecode), of(Op::AttentionPrefill));
        let of_many = of(Op::AttentionShared);
        let on_cores = self.attends_on_cores(config, kv, exact);
        let by_exact = exact && !exactly.is_empty();
        let mut said = Vec::new();
        // Query heads that share a KV head share a block.
        said.extend(plain.into_iter().map(|kernel| match on_cores || by_exact {
            true => (kernel, Verdict::Passed(FASTER)),
            false => {
                let parts = (config.n_attn_heads / kv_heads).div_ceil(kernel.per_block);
                (kernel, Verdict::Taken(rows * kv_heads * parts, NO_OTHER))
            }
        }));
        said.extend(exactly.into_iter().map(|kernel| match by_exact {
            true => (kernel, Verdict::Taken(rows * kv_heads, FOR_EXACT)),
            false => (kernel, Verdict::Refused(FOR_EXACT)),
        }));
        let refused = |why| move |kernel: &&'static Kernel| (*kernel, Verdict::Refused(why));
        let shape = DecodeShape {
            items,
            rows,
            kv_heads,
            windowed,
            whole_rows,
            multiprocessors: self.multiprocessors,
        };
        match (on_cores, items) {
            (false, _) => said.extend(decode.iter().map(refused(FOR_FAST))),
            (true, 0) => said.extend(decode.iter().map(refused(NO_ROW_DECODES))),
            (true, _) => {
                let verdicts = self.family.attention_decode(&decode, &shape);
                said.extend(decode.into_iter().zip(verdicts));
            }
        }
        said.extend(of_many.into_iter().map(|kernel| match shares_keys && !windowed {
            _ if !on_cores => (kernel, Verdict::Refused(FOR_FAST)),
            // Persistent blocks.
            true => (kernel, Verdict::Taken(self.multiprocessors, OF_MANY)),
            false => (kernel, Verdict::Passed(NO_ROWS_SHARE)),
        }));
        match (on_cores, tiles) {
            (false, _) => said.extend(prefill.iter().map(refused(FOR_FAST))),
            (true, 0) => said.extend(prefill.iter().map(refused(NO_PROMPTS))),
            (true, _) => {
                let blocks = self.family.prefill_blocks(tiles * kv_heads, self.multiprocessors);
                said.extend(
                    prefill
                        .into_iter()
                        .map(|kernel| (kernel, Verdict::Taken(blocks, NO_OTHER))),
                );
            }
        }
        said
    }

    pub(super) fn attention_kernels(&self, op: Op, config: &ModelConfig, kv: Elements) -> Vec<&'static Kernel> {
        let takes = |kernel: &&'static Kernel| kernel.takes(config).is_ok();
        self.kernels(op, Some(kv)).filter(takes).collect()
    }

    /// Whether attention runs on the matrix cores.
    pub fn attends_on_cores(&self, config: &ModelConfig, kv: Elements, exact: bool) -> bool {
        let is_there = |op| !self.attention_kernels(op, config, kv).is_empty();
        !exact && is_there(Op::AttentionDecode) && is_there(Op::AttentionPrefill)
    }

    /// Norm and router in one kernel, where there is one for so many rows and a router held so.
    pub fn norm_route(
        &self,
        config: &ModelConfig,
        numbers: &Numbers,
        router: MatrixForm,
        rows: usize,
    ) -> Option<NormRouteLaunch> {
        let launch = taken(&self.norm_route_verdicts(config, numbers, router, rows))?;
        let sends = rows == 1 && self.gathers(numbers.elements, numbers.terms, rows);
        Some(NormRouteLaunch {
            launch,
            sends,
            tells: sends && launch.kernel.tells_picks && config.experts_per_token <= PICKS,
        })
    }

    /// What is said of each kernel for both norm and router. If none is taken, they have a kernel each.
    pub fn norm_route_verdicts(
        &self,
        config: &ModelConfig,
        numbers: &Numbers,
        router: MatrixForm,
        rows: usize,
    ) -> Vec<Said> {
        let shape = NormRouteShape {
            rows,
            fast_bf16: !numbers.exact && router == MatrixForm::Wire(WeightFormat::Bf16),
            multiprocessors: self.multiprocessors,
        };
        let kernels: Vec<_> = self.of_model(Op::NormRoute, config).collect();
        let verdicts = self.family.norm_route(&shape, &kernels);
        kernels.into_iter().zip(verdicts).collect()
    }

    /// The layers of a step of few decoding rows, with experts in this format, where there is a kernel for them.
    pub fn one_launch(
        &self,
        config: &ModelConfig,
        numbers: &Numbers,
        experts: Option<PackedFormat>,
    ) -> Option<&'static Kernel> {
        let fits = |kernel: &&Kernel| kernel.weights == experts && kernel.elements == Some(numbers.elements);
        let fast = !numbers.exact && numbers.kv == numbers.elements;
        self.of_model(Op::OneLaunch, config).filter(fits).find(|_| fast)
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
