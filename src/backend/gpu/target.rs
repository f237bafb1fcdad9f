//! What the kernels of a device look like from outside: launches, layouts, limits. Pure functions of shapes.

use super::args::{self, MXFP4_SLAB_BYTES, PackArgs, SLAB, W16_SLAB_BYTES};
use super::catalogue::{Elements, Kernel, Op, Weights};
use super::driver::Device;
use super::family::{self, Family};
use super::launch::Launch;
use super::shapes::{AttentionWork, DecodeShape, GemmLaunch, GemmShape, Kind, PackedShape};
use crate::config::ModelConfig;
use crate::error::{Error, GpuFault, Result};

/// See the module.
#[derive(Clone, Copy, Debug)]
pub struct Target {
    /// Which kernels.
    pub family: &'static dyn Family,
    /// Multiprocessors (compute units).
    pub multiprocessors: usize,
}

/// Runtimes count a launch's threads in 32 bits, and kernels the parts of a product's work in 32 with a sign.
const MOST_THREADS: u64 = u32::MAX as u64;
const MOST_PARTS: u64 = i32::MAX as u64;
/// Exponents of the smallest and the largest normal FP16 number.
const F16_EXPONENTS: (i32, i32) = (-14, 15);
/// How far the smallest subnormal's exponent is below that of the smallest normal number.
const F16_SUBNORMALS: i32 = 10;

impl Target {
    /// The target of a device.
    pub fn of(device: &Device) -> Result<Self> {
        let family = family::of(&device.arch).ok_or_else(|| Error::Gpu {
            device: format!("{}:{}", device.runtime, device.ordinal),
            call: format!("looking for kernels for {}", device.arch),
            fault: GpuFault::NoBinary,
            code: None,
        })?;
        Ok(Self {
            family,
            multiprocessors: device.multiprocessors.max(1),
        })
    }

    /// The kernel of an operation that every family has one of.
    pub(super) fn kernel(&self, op: Op) -> &'static Kernel {
        let mut kernels = self.kernels(op, None);
        kernels.next().expect("every family has it")
    }

    /// All kernels of an operation, over these elements if they are given and it has several.
    pub(super) fn kernels(&self, op: Op, elements: Option<Elements>) -> impl Iterator<Item = &'static Kernel> {
        let kernels = self.family.table().kernels.iter();
        let of = move |kernel: &Kernel| elements.is_none() || kernel.elements.is_none() || kernel.elements == elements;
        kernels.filter(move |kernel| kernel.op == op && of(kernel))
    }

    fn lacks(&self, what: impl std::fmt::Debug) -> Error {
        Error::Internal(format!("{} has no kernel for {what:?}", self.family.table().name))
    }

    /// Query rows of a tile of prefill attention.
    pub fn prefill_rows(&self) -> usize {
        self.kernels(Op::AttentionPrefill, None)
            .next()
            .map_or(1, |kernel| kernel.per_block)
    }

    /// Processors that decode attention is balanced over.
    pub fn attention_processors(&self) -> usize {
        self.family.attention_processors(self.multiprocessors)
    }

    /// Rows up to which decode attention shares an item's units out by itself; 0 if it never does.
    pub fn attention_team_rows(&self) -> usize {
        self.family.team_rows()
    }

    /// One layer's attention: that of rows that decode, and that of prompts. `exact` and heads that the matrix cores'
    /// kernels do not take have one kernel for both.
    pub fn attention(
        &self,
        config: &ModelConfig,
        kv: args::Format,
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
            self.kernels(op, Some(elements(kv))).filter(mine).collect()
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
            // Query heads that share a key head share a block.
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

    /// The bucket of a step's items of decode attention.
    pub fn decode_items(&self, items: usize) -> usize {
        self.family.decode_items(items)
    }

    /// The power of two that brings 16-bit weights into FP16's range; `None` if there is none. Exponents of the tensor's
    /// smallest and largest values, and of the largest value of the row whose largest is smallest.
    ///
    /// FP16 holds every bfloat16 value of its normal range exactly. Values so small that they leave it are as good as
    /// exact where the row's sum rounds at a larger scale in float32: 24 bits below the row's largest weight.
    pub fn f16_shift(&self, smallest: i32, largest: i32, weakest_row: i32) -> Option<i32> {
        if smallest > largest {
            return Some(0); // all zeros
        }
        let (low, high) = F16_EXPONENTS;
        if smallest >= low && largest <= high {
            return Some(0);
        }
        let shift = high - largest;
        let floor = if self.flushes_subnormals() {
            low
        } else {
            low - F16_SUBNORMALS
        };
        (smallest + shift >= low || weakest_row + shift - 24 >= floor).then_some(shift)
    }

    /// Whether the matrix cores take FP16's subnormals as zeros.
    pub fn flushes_subnormals(&self) -> bool {
        self.family.table().term_shift > 0
    }

    /// The power of two that brings MXFP4 scales into the range in which they decode to FP16 exactly.
    pub fn mxfp4_shift(&self, smallest: i32, largest: i32) -> Option<i32> {
        let (low, high) = self.family.mxfp4_f16_scales();
        if smallest > largest {
            return Some(0);
        }
        let shift = if smallest >= low && largest <= high {
            0
        } else {
            high - largest
        };
        (smallest + shift >= low).then_some(shift)
    }

    /// How 16-bit weights of queries, keys and values are packed.
    pub fn qkv_kind(&self, config: &ModelConfig, exact: bool) -> Kind {
        if !exact && self.family.pairs_heads(config.head_dim) {
            Kind::Heads
        } else {
            Kind::W16
        }
    }

    /// A packed matrix in row blocks: for each and each 64 K, MXFP4 as codes and one scale for each 32.
    pub fn packed(&self, kind: Kind, rows: usize, cols: usize) -> PackedShape {
        let block_rows = self.family.block_rows();
        let row_blocks = rows.div_ceil(block_rows);
        let block_bytes = match weights(kind) {
            Weights::Mxfp4 => block_rows * MXFP4_SLAB_BYTES,
            Weights::W16 => block_rows * W16_SLAB_BYTES,
        };
        PackedShape {
            row_blocks,
            bytes: row_blocks * cols.div_ceil(SLAB) * block_bytes,
        }
    }

    /// The kernel that packs it.
    pub fn pack(&self, kind: Kind, args: &PackArgs) -> Result<Launch> {
        let mine = |kernel: &&Kernel| kernel.weights == Some(weights(kind));
        let kernel = self.kernels(Op::Pack, None).find(mine);
        let kernel = kernel.ok_or_else(|| self.lacks((Op::Pack, kind)))?;
        Ok(Launch::new(kernel, self.family.pack_blocks(kernel, args)))
    }

    /// The kernel of a product.
    pub fn gemm(&self, shape: &GemmShape) -> Result<GemmLaunch> {
        if matches!(shape.kind, Kind::Wire(_)) {
            return Ok(self.plain_gemm(shape));
        }
        let (weights, terms) = (weights(shape.kind), shape.terms);
        let made_for = |op| {
            self.kernels(op, Some(elements(shape.format)))
                .filter(move |kernel| kernel.weights == Some(weights) && kernel.terms == terms)
        };
        let mut kernels: Vec<_> = made_for(shape.product.op()).collect();
        if shape.kind == Kind::Heads {
            let holds = |kernel: &&Kernel| kernel.most_rows == 0 || shape.rows <= kernel.most_rows;
            kernels.splice(..0, made_for(Op::QkvStore).filter(holds)); // of equals the first is taken
        }
        if kernels.is_empty() {
            return Err(self.lacks(shape));
        }
        let found = self.family.product(shape, &kernels, self.multiprocessors);
        if found.parts > MOST_PARTS {
            return Err(too_many(found.launch.kernel));
        }
        countable(found.launch)?;
        Ok(found)
    }

    /// Whether mlp1 of a step of so many rows may find its experts' rows by itself.
    pub fn finds_rows(&self, format: args::Format, terms: usize, rows: usize) -> bool {
        self.finding(format, terms, rows).next().is_some()
    }

    /// mlp1 that does, in a step of so many rows: with the weights and the tile of the kernel that [`Self::gemm`] gives.
    pub fn sort_mlp1(&self, shape: &GemmShape, rows: usize) -> Option<Launch> {
        let sorted = self.gemm(shape).ok()?.launch.kernel;
        let alike = |kernel: &&Kernel| kernel.weights == sorted.weights && kernel.tokens == sorted.tokens;
        let kernel = self.finding(shape.format, shape.terms, rows).find(alike)?;
        let spans = shape.row_blocks.div_ceil(kernel.threads / self.family.table().wave);
        Some(Launch::new(kernel, 1 + shape.rows.min(shape.groups) * spans))
    }

    fn finding(&self, format: args::Format, terms: usize, rows: usize) -> impl Iterator<Item = &'static Kernel> {
        let fits = move |kernel: &&Kernel| kernel.terms == terms && rows <= kernel.most_rows;
        self.kernels(Op::SortMlp1, Some(elements(format))).filter(fits)
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

/// The catalogue's word for a format of activations or of the cache.
fn elements(format: args::Format) -> Elements {
    match format {
        args::Format::F16 => Elements::F16,
        args::Format::Bf16 => Elements::Bf16,
        args::Format::F32 => Elements::F32,
        args::Format::Mxfp4 => unreachable!("neither activations nor a cache are MXFP4"),
    }
}

fn weights(kind: Kind) -> Weights {
    match kind {
        Kind::Mxfp4 => Weights::Mxfp4,
        Kind::W16 | Kind::Heads => Weights::W16,
        Kind::Wire(_) => unreachable!("the wire's form has kernels of its own"),
    }
}
