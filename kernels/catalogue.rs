//! All kernels. A family has one table: for each kernel its operation, what it is made for, how it is launched and its
//! limits. From it the build generates the products' kernels, and `catalogue.h`, which gives hand-written kernels their
//! threads, shared memory and limits; the host chooses from it. So neither can name what the other lacks.
//!
//! Plain constants: the build (`build_support`) and the crate (`backend::gpu::catalogue`) include this file alike. They
//! are Rust and not C, as the choice and the build need them as values, and only the compilers need text.

#[path = "ampere/catalogue.rs"]
pub mod ampere;
#[path = "cdna/catalogue.rs"]
pub mod cdna;
#[path = "generic/catalogue.rs"]
pub mod generic;
#[path = "hopper/catalogue.rs"]
pub mod hopper;
#[path = "mma/sizes.rs"]
pub mod mma;
#[path = "shared.rs"]
mod shared;

pub use shared::{MATRIX_HEADS, NORM_FEW, NORM_THREADS, SHARED, shared};

/// Every family. A device is of the first that has it, and of which there is code for it.
pub static TABLES: &[&Table] = &[&cdna::TABLE, &hopper::TABLE, &ampere::TABLE, &generic::TABLE];

/// A family of devices, with kernels of its own in `kernels/NAME`.
#[derive(Debug)]
pub struct Table {
    /// The folder's name.
    pub name: &'static str,
    /// What it runs on.
    pub platforms: &'static [Platform],
    /// Kinds of its devices that documents and `getp check` speak of.
    pub cards: &'static [Card],
    /// Lanes of a wave.
    pub wave: usize,
    /// Whether its kernels wait for their predecessors by themselves (`after_predecessor` in `gpu/`), so that they may
    /// start before those have ended.
    pub overlaps: bool,
    /// FP16's later terms are scaled by two to this power where matrix cores flush subnormals to zero (`TERM_SHIFT` in
    /// `gpu/`); 0 where they do not.
    pub term_shift: usize,
    /// Whether sort cuts experts' rows into tiles, as products of its own take them.
    pub cuts_experts: bool,
    /// `[a, b]`: a float32 sum of n products on the matrix cores has an error of at most `n / a + b` times 2^-24 of the
    /// sum of their magnitudes.
    pub sum_error: [f64; 2],
    /// How `exact` adds sums of slabs of K: `None`, each of one slab, in float64.
    pub exact_sums: Option<ExactSums>,
    /// Its kernels, first those of [`shared`].
    pub kernels: &'static [Kernel],
}

/// A runtime that a family's devices have.
#[derive(Debug)]
pub struct Platform {
    /// What compiles its kernels.
    pub toolchain: Toolchain,
    /// The architectures to compile for, unless the environment names others.
    pub architectures: &'static [&'static str],
    /// How the names of architectures begin: of its devices, and of others to compile for.
    pub devices: &'static [&'static str],
}

/// A kind of device.
#[derive(Clone, Copy, Debug)]
pub struct Card {
    /// What it is called.
    pub name: &'static str,
    /// Its memory as it is sold.
    pub gb: u64,
    /// Its memory as the runtime counts it.
    pub mib: u64,
    /// Multiprocessors (compute units).
    pub multiprocessors: usize,
}

/// One of so many gigabytes, and MiB, of memory.
pub const fn card(name: &'static str, gb: u64, mib: u64, multiprocessors: usize) -> Card {
    Card {
        name,
        gb,
        mib,
        multiprocessors,
    }
}

/// Sums of `exact` that are added in float32.
#[derive(Clone, Copy, Debug)]
pub struct ExactSums {
    /// With MXFP4 weights: slabs whose products are added up in one accumulator of the matrix cores, which are then
    /// added one after the other.
    pub chained: usize,
    /// With 16-bit weights: slabs whose sums are added up before what comes of these is.
    pub together: usize,
}

/// [`Table::term_shift`] where matrix cores flush subnormals to zero: it brings the least FP16 term of a value near
/// its first one.
pub const FLUSHING_TERM_SHIFT: usize = 11;

/// The families that have an architecture, by how its name begins, and their platforms.
pub fn platforms_of(arch: &str) -> impl Iterator<Item = (&'static Table, &'static Platform)> {
    let all = TABLES
        .iter()
        .flat_map(|family| family.platforms.iter().map(|platform| (*family, platform)));
    all.filter(|(_, platform)| platform.devices.iter().any(|prefix| arch.starts_with(prefix)))
}

/// The first of them, whose kernels are compiled for it.
pub fn platform_of(arch: &str) -> Option<(&'static Table, &'static Platform)> {
    platforms_of(arch).next()
}

/// The family whose kernels are compiled for an architecture.
pub fn table_of(arch: &str) -> Option<&'static Table> {
    platform_of(arch).map(|(family, _)| family)
}

/// A compiler and a runtime.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Toolchain {
    /// nvcc.
    Cuda,
    /// hipcc, or clang with an AMD target.
    Hip,
}

macro_rules! operations {
    ($($(#[$doc:meta])* $op:ident $name:literal,)*) => {
        /// What a kernel does; `args.h` says more.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum Op { $($(#[$doc])* $op,)* }

        impl Op {
            /// How its kernels' names begin.
            pub const fn name(self) -> &'static str {
                match self { $(Self::$op => $name,)* }
            }
        }
    };
}

operations! {
    /// Brings a step's plan to the device.
    Upload "upload",
    /// Tokens become rows.
    Embed "embed",
    /// Adds the experts' outputs to the residual stream, and RMSNorm.
    Norm "rmsnorm",
    /// Adds the experts' outputs to the residual stream.
    Settle "settle",
    /// The router.
    Route "route",
    /// [`Op::Norm`] and [`Op::Route`].
    NormRoute "norm_route",
    /// Sorts (row, expert) pairs by expert: gives each a slot.
    Sort "sort",
    /// Copies rows to their slots.
    Gather "gather",
    /// [`Op::Sort`] and [`Op::Gather`], for few rows.
    SortGather "sort_gather",
    /// Rotary embedding of queries and keys, and writes to the KV cache.
    RopeStore "rope_store",
    /// Attention without matrix cores.
    AttentionPlain "attention_plain",
    /// Attention over a float32 cache.
    AttentionExact "attention_exact",
    /// Attention of rows that decode.
    AttentionDecode "attention_decode",
    /// Its part that several rows share: keys that all of them see.
    AttentionShared "attention_shared",
    /// Attention of prompts.
    AttentionPrefill "attention_prefill",
    /// Queries, keys and values.
    Qkv "qkv",
    /// [`Op::Qkv`] and [`Op::RopeStore`].
    QkvStore "qkv_store",
    /// [`Op::Norm`] and [`Op::QkvStore`], for a single row.
    NormQkv "norm_qkv",
    /// Attention's output projection.
    AttnOut "attn_out",
    /// The experts' first matrix with the gated unit.
    Mlp1 "mlp1",
    /// [`Op::Sort`] and [`Op::Mlp1`], for few rows, which are read where they are.
    SortMlp1 "sort_mlp1",
    /// The experts' second matrix.
    Mlp2 "mlp2",
    /// The unembedding with a fused argmax: each row's candidates.
    GreedyLogits "unembed_greedy",
    /// The unembedding, all logits.
    Logits "unembed_logits",
    /// [`Op::Qkv`] with weights in the wire format.
    PlainQkv "plain_qkv",
    /// [`Op::AttnOut`] with weights in the wire format.
    PlainAttnOut "plain_attn_out",
    /// [`Op::Mlp1`] with weights in the wire format.
    PlainMlp1 "plain_mlp1",
    /// [`Op::Mlp2`] with weights in the wire format.
    PlainMlp2 "plain_mlp2",
    /// [`Op::Logits`] with weights in the wire format.
    PlainLogits "plain_logits",
    /// Each row's argmax, from the candidates of [`Op::GreedyLogits`].
    Argmax "argmax",
    /// Each row's argmax, from all logits.
    ArgmaxLogits "argmax_logits",
    /// Samples a token from each row of logits.
    Draw "draw",
    /// The same, from the rows that [`Op::Draw`] leaves: those with a wide nucleus.
    DrawWide "draw_wide",
    /// What log-probabilities take, of rows of logits.
    Score "score",
    /// The layers of a step of few decoding rows, from [`Op::Norm`] to [`Op::Mlp2`].
    OneLaunch "one_launch",
    /// A tensor's smallest and largest exponents.
    Range "range",
    /// Packs weights from the wire format to the products' layout, a kernel per [`PackedFormat`].
    Pack "pack",
    /// Measures the matrix cores' peak throughput, for profiles.
    MatrixPeak "matrix_peak",
    /// Measures what products and exponentials of prefill attention reach side by side, for profiles.
    AttentionPeak "attention_peak",
}

/// Formats of packed weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PackedFormat {
    /// 16 bits each.
    W16,
    /// Codes of four bits and a scale for each 32.
    Mxfp4,
}

/// Number formats of activations, or of keys and values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Elements {
    /// FP16.
    F16,
    /// Bfloat16.
    Bf16,
    /// Float32.
    F32,
}

impl Elements {
    /// Bytes of an element.
    pub const fn bytes(self) -> usize {
        match self {
            Self::F16 | Self::Bf16 => 2,
            Self::F32 => 4,
        }
    }
}

/// A dimension that a kernel may have a limit for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dimension {
    /// Width of the residual stream.
    Hidden,
    /// Experts of a layer.
    Experts,
    /// Experts of a token.
    ExpertsPerToken,
    /// Width of a head.
    HeadDim,
    /// Query heads that share a KV head.
    HeadsPerKvHead,
    /// Rows of the projection to queries, keys and values.
    QkvDim,
}

impl Dimension {
    /// Its name in `catalogue.h`, if kernels are made to measure for it.
    pub const fn name(self) -> Option<&'static str> {
        match self {
            Self::Hidden => Some("HIDDEN"),
            Self::Experts => Some("EXPERTS"),
            Self::ExpertsPerToken => Some("EXPERTS_PER_TOKEN"),
            Self::HeadDim => Some("HEAD_DIM"),
            Self::HeadsPerKvHead => Some("HEADS_PER_KV_HEAD"),
            Self::QkvDim => None,
        }
    }
}

/// A limit of a kernel on a dimension.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Limit {
    /// At most so much.
    AtMost(Dimension, usize),
    /// Multiples of this.
    MultipleOf(Dimension, usize),
    /// This alone.
    Exactly(Dimension, usize),
}

/// Where a kernel's code comes from.
#[allow(
    clippy::large_enum_variant,
    reason = "there is one table, and most of its rows are made"
)]
#[derive(Clone, Copy, Debug)]
pub enum Source {
    /// Hand-written in its file.
    Written,
    /// A line that the build writes into its file: `maker(name, threads, shared bytes, operation, weights, elements,
    /// terms, tokens, most rows, parameters ..)`. The maker is a macro of the family's `gemm.h`.
    Made {
        /// The macro.
        maker: &'static str,
        /// Those of its own.
        parameters: Parameters,
    },
}

/// A value that a maker takes: of these nothing but the macro makes anything.
#[derive(Clone, Copy, Debug)]
pub enum Value {
    /// A number.
    Number(usize),
    /// A name of the family's headers.
    Word(&'static str),
}

impl std::fmt::Display for Value {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Number(number) => number.fmt(f),
            Self::Word(word) => word.fmt(f),
        }
    }
}

/// What a maker takes behind what all take, by the macro's names. The build compares them with the macro.
#[derive(Clone, Copy, Debug)]
pub struct Parameters {
    /// Unused ones have no name.
    named: [(&'static str, Value); 8],
    count: usize,
}

impl Parameters {
    const NONE: Self = Self {
        named: [("", Value::Number(0)); 8],
        count: 0,
    };

    /// Numbers, in the macro's order.
    pub const fn of(list: &[(&'static str, usize)]) -> Self {
        let mut all = Self::NONE;
        while all.count < list.len() {
            let (name, number) = list[all.count];
            all.named[all.count] = (name, Value::Number(number));
            all.count += 1;
        }
        all
    }

    /// Words, likewise.
    pub const fn words(list: &[(&'static str, &'static str)]) -> Self {
        let mut all = Self::NONE;
        while all.count < list.len() {
            let (name, word) = list[all.count];
            all.named[all.count] = (name, Value::Word(word));
            all.count += 1;
        }
        all
    }

    /// And then those.
    pub const fn and(mut self, more: Self) -> Self {
        let mut i = 0;
        while i < more.count {
            self.named[self.count] = more.named[i];
            self.count += 1;
            i += 1;
        }
        self
    }

    /// Names and values, in the macro's order.
    pub fn list(&self) -> impl Iterator<Item = (&'static str, Value)> {
        self.named.into_iter().take(self.count)
    }
}

/// How a product's weight rows and tokens are cut: what the host has to know of that.
#[derive(Clone, Copy, Debug)]
pub struct Cut {
    /// Weight rows that a block takes at a time.
    pub rows: usize,
    /// Matrix cores multiply whole groups of so many of them: a block's rows are rounded up to it for its cost.
    pub multiple: usize,
    /// Outputs are stored in groups of so many: the matrix has a multiple of it.
    pub outputs: usize,
    /// Whether a step's rows are spread over all tiles of the grid, however few they are.
    pub spreads: bool,
    /// Whether a persistent kernel has as few blocks as finish no later than one a multiprocessor would.
    pub fewest_blocks: bool,
}

impl Cut {
    /// Blocks take so many weight rows.
    pub const fn rows(rows: usize) -> Self {
        Self {
            rows,
            multiple: 1,
            outputs: 1,
            spreads: false,
            fewest_blocks: false,
        }
    }
}

/// How warps of decode attention have its jobs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Workers {
    /// Each warp by itself.
    Alone,
    /// Two warps together, in windowed layers.
    Pair,
    /// Four warps together.
    Team,
    /// The warps of a block share out rows of any length, in full layers.
    Block,
}

/// A kernel.
#[derive(Clone, Copy, Debug)]
pub struct Kernel {
    /// What it does.
    pub op: Op,
    /// The format of packed weights, of products and [`Op::Pack`].
    pub weights: Option<PackedFormat>,
    /// The format of activations; of attention, that of the cache.
    pub elements: Option<Elements>,
    /// Terms of an activation, in a product.
    pub terms: usize,
    /// Tokens of a product's tile; of [`Op::OneLaunch`] those of the products whose work it does.
    pub tokens: usize,
    /// A suffix of the name, where kernels are equal in all of the above.
    pub variant: &'static str,
    /// Its source file, below `kernels/`.
    pub file: &'static str,
    /// Hand-written or made by the build.
    pub source: Source,
    /// Threads per block.
    pub threads: usize,
    /// Dynamic shared memory per block, in bytes.
    pub shared_bytes: usize,
    /// What a block has: rows, of plain attention query heads, of packing slabs of a row block; 0 if the grid does not
    /// depend on it.
    pub per_block: usize,
    /// Blocks of a cluster, which reach each other's shared memory; 0 if each is by itself.
    pub cluster: usize,
    /// It is faster than the kernels for fewer rows from so many rows on (rows of an expert, in the experts' products).
    pub least_rows: usize,
    /// The most rows it may be launched for, if not any number.
    pub most_rows: Option<usize>,
    /// Of a product.
    pub cut: Cut,
    /// Of decode attention, and of [`Op::OneLaunch`], where a team is all there is for a job.
    pub workers: Workers,
    /// Whether it reads a step's plan only behind after_predecessor() (`gpu/`), so that it may overlap with the kernel
    /// that fetches the plan. Most read it before.
    pub plan_after_predecessor: bool,
    /// Whether it tells mlp1 a single row's experts before it ends.
    pub tells_picks: bool,
    /// Its limits on the model's dimensions.
    pub limits: &'static [Limit],
    /// Its place in the family's table.
    pub index: usize,
}

impl Kernel {
    /// A hand-written kernel.
    pub const fn written(op: Op, file: &'static str, threads: usize) -> Self {
        Self {
            op,
            weights: None,
            elements: None,
            terms: 0,
            tokens: 0,
            variant: "",
            file,
            source: Source::Written,
            threads,
            shared_bytes: 0,
            per_block: 0,
            cluster: 0,
            least_rows: 0,
            most_rows: None,
            cut: Cut::rows(0),
            workers: Workers::Alone,
            plan_after_predecessor: false,
            tells_picks: false,
            limits: &[],
            index: 0,
        }
    }

    /// With this format of activations, or of the cache.
    pub const fn elements(self, elements: Elements) -> Self {
        Self {
            elements: Some(elements),
            ..self
        }
    }

    /// With packed weights of this format.
    pub const fn weights(self, weights: PackedFormat) -> Self {
        Self {
            weights: Some(weights),
            ..self
        }
    }

    /// With this suffix of its name.
    pub const fn variant(self, variant: &'static str) -> Self {
        Self { variant, ..self }
    }

    /// With so much dynamic shared memory.
    pub const fn shared_bytes(self, shared_bytes: usize) -> Self {
        Self { shared_bytes, ..self }
    }

    /// Doing the work of products whose tiles have so many tokens.
    pub const fn products_of(self, tokens: usize) -> Self {
        Self { tokens, ..self }
    }

    /// With so many rows per block.
    pub const fn per_block(self, per_block: usize) -> Self {
        Self { per_block, ..self }
    }

    /// With so many blocks in a cluster.
    pub const fn cluster(self, cluster: usize) -> Self {
        Self { cluster, ..self }
    }

    /// For at most so many rows.
    pub const fn most_rows(self, most_rows: usize) -> Self {
        Self {
            most_rows: Some(most_rows),
            ..self
        }
    }

    /// Of warps that have their jobs so.
    pub const fn workers(self, workers: Workers) -> Self {
        Self { workers, ..self }
    }

    /// For at least so many rows.
    pub const fn least_rows(self, least_rows: usize) -> Self {
        Self { least_rows, ..self }
    }

    /// Reading the plan only when its predecessor has ended.
    pub const fn plan_after_predecessor(self) -> Self {
        Self {
            plan_after_predecessor: true,
            ..self
        }
    }

    /// Telling mlp1 a single row's experts before it ends.
    pub const fn tells_picks(self) -> Self {
        Self {
            tells_picks: true,
            ..self
        }
    }

    /// With these limits.
    pub const fn limits(self, limits: &'static [Limit]) -> Self {
        Self { limits, ..self }
    }

    /// Whether it may be launched for so many rows.
    pub fn holds(&self, rows: usize) -> bool {
        self.most_rows.is_none_or(|most| rows <= most)
    }

    /// Whether it is made for few rows, and may be launched for so many.
    pub fn is_for_few(&self, rows: usize) -> bool {
        self.most_rows.is_some() && self.holds(rows)
    }

    /// Its name in the code object.
    pub fn name(&self) -> String {
        let mut name = self.op.name().to_owned();
        if let Some(weights) = self.weights {
            name += match weights {
                PackedFormat::W16 => "_w16",
                PackedFormat::Mxfp4 => "_mxfp4",
            };
        }
        if let Some(elements) = self.elements {
            name += match elements {
                Elements::F16 => "_f16",
                Elements::Bf16 => "_bf16",
                Elements::F32 => "_f32",
            };
        }
        if self.terms > 0 {
            name += &format!("x{}_n{}", self.terms, self.tokens);
        }
        if !self.variant.is_empty() {
            name = name + "_" + self.variant;
        }
        name
    }
}

/// A tile of the matrix products: a kernel for each operation, packed format, and elements and terms of activations.
pub struct Tile {
    /// Operations, and the file for each.
    pub ops: &'static [(Op, &'static str)],
    /// Kinds of weights.
    pub weights: &'static [PackedFormat],
    /// Elements and terms of activations.
    pub activations: &'static [(Elements, usize)],
    /// See [`Kernel`].
    pub tokens: usize,
    /// See [`Kernel`].
    pub threads: usize,
    /// See [`Kernel`].
    pub shared_bytes: usize,
    /// See [`Kernel`].
    pub least_rows: usize,
    /// See [`Kernel`].
    pub most_rows: Option<usize>,
    /// See [`Kernel`].
    pub cut: Cut,
    /// See [`Kernel`].
    pub variant: &'static str,
    /// See [`Source::Made`].
    pub maker: &'static str,
    /// See [`Source::Made`].
    pub parameters: Parameters,
}

/// How many kernels tiles are.
pub const fn kernels_of(tiles: &[Tile]) -> usize {
    let (mut count, mut i) = (0, 0);
    while i < tiles.len() {
        count += tiles[i].ops.len() * tiles[i].weights.len() * tiles[i].activations.len();
        i += 1;
    }
    count
}

/// Appends tiles' kernels to a list.
pub const fn with_tiles<const M: usize, const N: usize>(
    kernels: [Kernel; M],
    tiles: &[Tile],
    limits: &'static [Limit],
) -> [Kernel; N] {
    assert!(M + kernels_of(tiles) == N);
    let mut all = with(kernels, []);
    let (mut at, mut i) = (M, 0);
    while i < tiles.len() {
        let tile = &tiles[i];
        let (weights, activations) = (tile.weights.len(), tile.activations.len());
        let mut of = 0;
        while of < tile.ops.len() * weights * activations {
            let (op, file) = tile.ops[of / activations / weights];
            let (elements, terms) = tile.activations[of % activations];
            all[at] = Kernel {
                terms,
                tokens: tile.tokens,
                source: Source::Made {
                    maker: tile.maker,
                    parameters: tile.parameters,
                },
                least_rows: tile.least_rows,
                most_rows: tile.most_rows,
                cut: tile.cut,
                index: at,
                ..Kernel::written(op, file, tile.threads)
                    .weights(tile.weights[of / activations % weights])
                    .elements(elements)
                    .shared_bytes(tile.shared_bytes)
                    .variant(tile.variant)
                    .limits(limits)
            };
            (at, of) = (at + 1, of + 1);
        }
        i += 1;
    }
    all
}

/// Concatenates two lists and numbers the kernels. If N is more than their sum, the rest repeats the first kernel.
pub const fn with<const A: usize, const B: usize, const N: usize>(a: [Kernel; A], b: [Kernel; B]) -> [Kernel; N] {
    let mut all = [a[0]; N];
    let mut i = 0;
    while i < A + B {
        let kernel = if i < A { a[i] } else { b[i - A] };
        all[i] = Kernel { index: i, ..kernel };
        i += 1;
    }
    all
}
