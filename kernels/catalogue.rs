//! The kernels there are. A family has one table: for each kernel its operation, what it is made for, how it is launched
//! and what it can take. The build makes the products' kernels from it, and `catalogue.h`, from which the kernels that are
//! written out have their threads, shared memory and limits; the host chooses from it. So neither can name what the other
//! lacks.
//!
//! Plain constants: the build (`build_support`) and the crate (`backend::gpu::catalogue`) include this file alike.

#[path = "cdna/catalogue.rs"]
pub mod cdna;
#[path = "hopper/catalogue.rs"]
pub mod hopper;

/// Every family.
pub static FAMILIES: &[&Family] = &[&cdna::FAMILY, &hopper::FAMILY];

/// Devices with kernels of their own, in `kernels/NAME`.
#[derive(Debug)]
pub struct Family {
    /// The folder's name.
    pub name: &'static str,
    /// What compiles its kernels.
    pub toolchain: Toolchain,
    /// What they are compiled for, if nobody says otherwise.
    pub architectures: &'static [&'static str],
    /// How the names of its devices' architectures begin.
    pub devices: &'static [&'static str],
    /// Lanes of a wave.
    pub wave: usize,
    /// FP16's later terms are scaled by two to this power where matrix cores flush subnormals (`TERM_SHIFT` of its words in
    /// `gpu/`); 0 where they compute with them.
    pub term_shift: usize,
    /// `[a, b]`: a float32 sum of n products on the matrix cores is off by at most `n / a + b` times 2^-24 of the sum of
    /// their sizes.
    pub sum_error: [f64; 2],
    /// Its kernels, those of [`shared`] first.
    pub kernels: &'static [Kernel],
}

/// The family of an architecture's devices.
pub fn family_of(arch: &str) -> Option<&'static Family> {
    let mine = |family: &&&Family| family.devices.iter().any(|prefix| arch.starts_with(prefix));
    FAMILIES.iter().find(mine).copied()
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
    /// Adds what the experts gave, and norms.
    Norm "rmsnorm",
    /// Adds what the experts gave.
    Settle "settle",
    /// The router.
    Route "route",
    /// [`Op::Norm`] and [`Op::Route`], for few rows.
    NormRoute "norm_route",
    /// Slots for rows and their experts.
    Sort "sort",
    /// Copies rows to their slots.
    Gather "gather",
    /// [`Op::Sort`] and [`Op::Gather`], for few rows.
    SortGather "sort_gather",
    /// Rotates queries and keys, and fills the cache.
    RopeStore "rope_store",
    /// Attention without matrix cores.
    AttentionPlain "attention_plain",
    /// Attention over a float32 cache.
    AttentionExact "attention_exact",
    /// Attention of rows that decode.
    AttentionDecode "attention_decode",
    /// Attention of prompts.
    AttentionPrefill "attention_prefill",
    /// Queries, keys and values.
    Qkv "qkv",
    /// Attention's output projection.
    AttnOut "attn_out",
    /// The experts' first matrix with the gated unit.
    Mlp1 "mlp1",
    /// The experts' second matrix.
    Mlp2 "mlp2",
    /// The unembedding, the largest logit of each row.
    GreedyLogits "unembed_greedy",
    /// The unembedding, all logits.
    Logits "unembed_logits",
    /// [`Op::Qkv`] of weights on the wire's form.
    PlainQkv "plain_qkv",
    /// [`Op::AttnOut`] of weights on the wire's form.
    PlainAttnOut "plain_attn_out",
    /// [`Op::Mlp1`] of weights on the wire's form.
    PlainMlp1 "plain_mlp1",
    /// [`Op::Mlp2`] of weights on the wire's form.
    PlainMlp2 "plain_mlp2",
    /// [`Op::Logits`] of weights on the wire's form.
    PlainLogits "plain_logits",
    /// Each row's largest logit, from what [`Op::GreedyLogits`] left.
    Argmax "argmax",
    /// Each row's largest logit, from all of them.
    ArgmaxLogits "argmax_logits",
    /// A token from each row of logits.
    Draw "draw",
    /// A tensor's smallest and largest exponents.
    Range "range",
    /// From the wire to what products read: [`Weights`] says what.
    Pack "pack",
    /// Made-up weights.
    Synthesize "synthesize",
    /// What the matrix cores do at most.
    MatrixPeak "matrix_peak",
}

/// How weights are held.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Weights {
    /// 16 bits each.
    Dense,
    /// Codes of four bits and a scale for each 32.
    Mxfp4,
}

/// What activations, or keys and values, are made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Elements {
    /// FP16.
    F16,
    /// Bfloat16.
    Bf16,
    /// Float32.
    F32,
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
    /// Query heads that share a key head.
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

/// What a kernel can take of a dimension.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Limit {
    /// At most so much.
    AtMost(Dimension, usize),
    /// Multiples of this.
    MultipleOf(Dimension, usize),
    /// This alone.
    Exactly(Dimension, usize),
}

/// Where a kernel's code is.
#[derive(Clone, Copy, Debug)]
pub enum Source {
    /// In its file.
    Written,
    /// A line of its file, which the build makes: `maker(name, threads, shared bytes, operation, weights, elements, terms,
    /// tokens, most rows, parameters ..)`. The maker is a macro of the family's `gemm.h`, which says what the parameters are.
    Made {
        /// The macro.
        maker: &'static str,
        /// What only the kernel's code knows the meaning of.
        parameters: &'static [usize],
    },
}

/// A kernel.
#[derive(Clone, Copy, Debug)]
pub struct Kernel {
    /// What it does.
    pub op: Op,
    /// Of products and [`Op::Pack`].
    pub weights: Option<Weights>,
    /// Of activations; attention's are those of the cache.
    pub elements: Option<Elements>,
    /// Of an activation, in a product.
    pub terms: usize,
    /// Of a product's tile.
    pub tokens: usize,
    /// What tells kernels apart that are alike in all this.
    pub variant: &'static str,
    /// Its source, below `kernels/`.
    pub file: &'static str,
    /// Where in it.
    pub source: Source,
    /// Of a block.
    pub threads: usize,
    /// Shared memory asked for at launch.
    pub shared_bytes: usize,
    /// Shared memory beside that, where it is known without compiling.
    pub static_bytes: Option<usize>,
    /// Rows that a block takes, of plain attention query heads; 0 if that is no part of its launch.
    pub per_block: usize,
    /// From so many rows on (of an expert, in the experts' products) it is faster than kernels made for fewer.
    pub from_rows: usize,
    /// The most rows it may be launched for; 0: any number.
    pub most_rows: usize,
    /// What it can take of the model's dimensions.
    pub limits: &'static [Limit],
    /// Its place in the family's table.
    pub index: usize,
}

impl Kernel {
    /// A kernel that its file writes out.
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
            static_bytes: None,
            per_block: 0,
            from_rows: 0,
            most_rows: 0,
            limits: &[],
            index: 0,
        }
    }

    /// The same for keys and values of these elements.
    pub const fn over(self, elements: Elements) -> Self {
        Self {
            elements: Some(elements),
            ..self
        }
    }

    /// The same for weights held so.
    pub const fn of(self, weights: Weights) -> Self {
        Self {
            weights: Some(weights),
            ..self
        }
    }

    /// The same, of which there are several.
    pub const fn called(self, variant: &'static str) -> Self {
        Self { variant, ..self }
    }

    /// The same with shared memory asked for at launch.
    pub const fn sharing(self, shared_bytes: usize) -> Self {
        Self { shared_bytes, ..self }
    }

    /// The same, a block of which takes so many.
    pub const fn taking(self, per_block: usize) -> Self {
        Self { per_block, ..self }
    }

    /// The same for so many rows at most.
    pub const fn up_to(self, most_rows: usize) -> Self {
        Self { most_rows, ..self }
    }

    /// The same with limits.
    pub const fn within(self, limits: &'static [Limit]) -> Self {
        Self { limits, ..self }
    }

    /// Its name in the code object.
    pub fn name(&self) -> String {
        let mut name = self.op.name().to_owned();
        if let Some(weights) = self.weights {
            name += match weights {
                Weights::Dense => "_dense",
                Weights::Mxfp4 => "_mxfp4",
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

/// A tile of the matrix products: a kernel for each operation, kind of weights, and elements and terms of activations.
pub struct Tile {
    /// Operations, and the file for each.
    pub ops: &'static [(Op, &'static str)],
    /// Kinds of weights.
    pub weights: &'static [Weights],
    /// Elements and terms of activations.
    pub activations: &'static [(Elements, usize)],
    /// See [`Kernel`].
    pub tokens: usize,
    /// See [`Kernel`].
    pub threads: usize,
    /// See [`Kernel`].
    pub shared_bytes: usize,
    /// See [`Kernel`].
    pub from_rows: usize,
    /// See [`Kernel`].
    pub most_rows: usize,
    /// See [`Source::Made`].
    pub maker: &'static str,
    /// See [`Source::Made`].
    pub parameters: &'static [usize],
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
                from_rows: tile.from_rows,
                index: at,
                ..Kernel::written(op, file, tile.threads)
                    .of(tile.weights[of / activations % weights])
                    .over(elements)
                    .sharing(tile.shared_bytes)
                    .up_to(tile.most_rows)
                    .within(limits)
            };
            (at, of) = (at + 1, of + 1);
        }
        i += 1;
    }
    all
}

/// One list behind another, numbered. What is left of N is as the first kernel.
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

/// How many kernels every family has.
pub const SHARED: usize = 23;

const NORM: Limit = Limit::AtMost(Dimension::Hidden, 6144);
const EXPERTS: Limit = Limit::AtMost(Dimension::Experts, 256);
const EXPERTS_PER_TOKEN: Limit = Limit::AtMost(Dimension::ExpertsPerToken, 8);
/// Heads are read in pieces of eight; places in a row of all heads are 32-bit numbers.
const ROPE: &[Limit] = &[
    Limit::MultipleOf(Dimension::HeadDim, 8),
    Limit::AtMost(Dimension::QkvDim, 1 << 30),
];
const NORM_THREADS: usize = 384;
const PLAIN_HEADS: &[Limit] = &[
    Limit::AtMost(Dimension::HeadDim, 128),
    Limit::MultipleOf(Dimension::HeadDim, 8),
];

/// Those in `kernels/*.hip`, one source for all families, for waves of so many lanes.
pub const fn shared(wave: usize) -> [Kernel; SHARED] {
    use Elements::{Bf16, F16, F32};
    let plain = 8 * wave;
    let attention = Kernel::written(Op::AttentionPlain, "attention_plain.hip", 256)
        .taking(8)
        .within(PLAIN_HEADS);
    // As many rows as a thread has registers for, and on AMD as leave room for a second block's shared memory.
    let route_rows = if wave == 32 { 8 } else { 4 };
    [
        Kernel::written(Op::Upload, "upload.hip", 1024),
        Kernel::written(Op::Embed, "embed.hip", 256),
        Kernel::written(Op::Norm, "norm.hip", NORM_THREADS).within(&[NORM]),
        Kernel::written(Op::Settle, "settle.hip", NORM_THREADS),
        Kernel::written(Op::Route, "route.hip", 8 * wave)
            .taking(route_rows)
            .within(&[EXPERTS, EXPERTS_PER_TOKEN]),
        Kernel::written(Op::NormRoute, "norm_route.hip", NORM_THREADS).within(&[NORM, EXPERTS, EXPERTS_PER_TOKEN]),
        Kernel::written(Op::Sort, "sort.hip", 1024).within(&[EXPERTS]),
        Kernel::written(Op::Gather, "gather.hip", 256).taking(32),
        Kernel::written(Op::SortGather, "sort_gather.hip", 256)
            .taking(32)
            .up_to(128)
            .within(&[EXPERTS, EXPERTS_PER_TOKEN]),
        Kernel::written(Op::RopeStore, "rope_store.hip", 256).within(ROPE),
        attention.over(F32),
        attention.over(F16),
        attention.over(Bf16),
        Kernel::written(Op::PlainQkv, "gemm_plain.hip", plain),
        Kernel::written(Op::PlainAttnOut, "gemm_plain.hip", plain),
        Kernel::written(Op::PlainMlp1, "gemm_plain.hip", plain),
        Kernel::written(Op::PlainMlp2, "gemm_plain.hip", plain),
        Kernel::written(Op::PlainLogits, "gemm_plain.hip", plain),
        Kernel::written(Op::Argmax, "argmax.hip", 1024).taking(8),
        Kernel::written(Op::ArgmaxLogits, "argmax.hip", 1024),
        Kernel::written(Op::Draw, "draw.hip", 256),
        Kernel::written(Op::Range, "pack_range.hip", 256),
        Kernel::written(Op::Synthesize, "synthesize.hip", 256),
    ]
}
