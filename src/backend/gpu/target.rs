//! What the kernels of a device look like from outside: launches, layouts, limits. Pure functions of shapes.

use super::args::{self, DENSE_SLAB_BYTES, MXFP4_SLAB_BYTES, PackArgs, SLAB};
use super::catalogue::{Elements, Kernel, Op, Weights};
use super::driver::Device;
use super::family::{self, DecodeShape, Family};
use super::launch::Launch;
use super::weights::Kind;
use crate::error::{Error, GpuFault, Result};

/// See the module.
#[derive(Clone, Copy, Debug)]
pub struct Target {
    /// Which kernels.
    pub family: &'static dyn Family,
    /// Multiprocessors (compute units).
    pub multiprocessors: usize,
}

/// A product of the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Product {
    /// Queries, keys and values.
    Qkv,
    /// Attention's output projection, added to the residual stream.
    AttnOut,
    /// The experts' first matrix with the gated unit.
    Mlp1,
    /// The experts' second matrix.
    Mlp2,
    /// The unembedding, the largest logit of each row.
    Greedy,
    /// The unembedding, all logits.
    Logits,
}

impl Product {
    /// What the matrix cores' kernels do for it.
    fn op(self) -> Op {
        match self {
            Self::Qkv => Op::Qkv,
            Self::AttnOut => Op::AttnOut,
            Self::Mlp1 => Op::Mlp1,
            Self::Mlp2 => Op::Mlp2,
            Self::Greedy => Op::GreedyLogits,
            Self::Logits => Op::Logits,
        }
    }
}

/// What the choice of a product's kernel depends on.
#[derive(Clone, Copy, Debug)]
pub struct GemmShape {
    /// Which product.
    pub product: Product,
    /// How its weights are held.
    pub kind: Kind,
    /// Of activations.
    pub format: args::Format,
    /// Terms an activation: 1 in `fast`.
    pub terms: usize,
    /// The most rows of the step; in the experts' products, of all experts together.
    pub rows: usize,
    /// Experts, or 1.
    pub groups: usize,
    /// Outputs.
    pub n: usize,
    /// Row blocks of the weights.
    pub row_blocks: usize,
}

/// How to launch a product.
#[derive(Clone, Copy, Debug)]
pub struct GemmLaunch {
    /// The kernel and its blocks.
    pub launch: Launch,
    /// Greedy: candidates it leaves for each row.
    pub candidates: usize,
}

/// A packed matrix of the target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PackedShape {
    /// Row blocks.
    pub row_blocks: usize,
    /// Bytes.
    pub bytes: usize,
}

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

    /// All kernels of an operation, over these elements if they are given.
    fn kernels(&self, op: Op, elements: Option<Elements>) -> impl Iterator<Item = &'static Kernel> {
        let kernels = self.family.table().kernels.iter();
        kernels.filter(move |kernel| kernel.op == op && (elements.is_none() || kernel.elements == elements))
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

    /// Attention over a float32 cache by the matrix cores, for heads that [`Self::attention_decode`] takes; without it
    /// there is the plain kernel.
    pub fn attention_exact(&self, rows: usize, kv_heads: usize) -> Option<Launch> {
        let kernel = self.kernels(Op::AttentionExact, None).next()?;
        Some(Launch::new(kernel, rows * kv_heads))
    }

    /// Decode attention of at most so many items of at most so many rows.
    pub fn attention_decode(&self, format: args::Format, items: usize, rows: usize, kv_heads: usize) -> Result<Launch> {
        let kernels: Vec<_> = self.kernels(Op::AttentionDecode, Some(elements(format))).collect();
        if kernels.is_empty() {
            return Err(self.lacks((Op::AttentionDecode, format)));
        }
        let shape = DecodeShape {
            items,
            rows,
            kv_heads,
            multiprocessors: self.multiprocessors,
        };
        Ok(self.family.attention_decode(&kernels, &shape))
    }

    /// The bucket of a step's items of decode attention.
    pub fn decode_items(&self, items: usize) -> usize {
        self.family.decode_items(items)
    }

    /// Prefill attention of so many tiles.
    pub fn attention_prefill(&self, format: args::Format, tiles: usize, kv_heads: usize) -> Result<Launch> {
        let kernel = self.kernels(Op::AttentionPrefill, Some(elements(format))).next();
        let kernel = kernel.ok_or_else(|| self.lacks((Op::AttentionPrefill, format)))?;
        Ok(Launch::new(kernel, tiles * kv_heads))
    }

    /// Attention without matrix cores: query heads that share a key head share a block.
    pub fn attention_plain(&self, format: args::Format, rows: usize, heads: usize, kv_heads: usize) -> Result<Launch> {
        let kernel = self.kernels(Op::AttentionPlain, Some(elements(format))).next();
        let kernel = kernel.ok_or_else(|| self.lacks((Op::AttentionPlain, format)))?;
        let parts = (heads / kv_heads).div_ceil(kernel.per_block);
        Ok(Launch::new(kernel, rows * kv_heads * parts))
    }

    /// The power of two that brings dense values into FP16's range; `None` if there is none. Exponents of the tensor's
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

    /// A packed matrix in row blocks: for each and each 64 K, MXFP4 as codes and one scale for each 32.
    pub fn packed(&self, kind: Kind, rows: usize, cols: usize) -> PackedShape {
        let block_rows = self.family.block_rows();
        let row_blocks = rows.div_ceil(block_rows);
        let block_bytes = match weights(kind) {
            Weights::Mxfp4 => block_rows * MXFP4_SLAB_BYTES,
            Weights::Dense => block_rows * DENSE_SLAB_BYTES,
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
        let kernels: Vec<_> = self
            .kernels(shape.product.op(), Some(elements(shape.format)))
            .filter(|kernel| kernel.weights == Some(weights) && kernel.terms == terms)
            .collect();
        if kernels.is_empty() {
            return Err(self.lacks(shape));
        }
        Ok(self.family.product(shape, &kernels, self.multiprocessors))
    }
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
        Kind::Dense => Weights::Dense,
        Kind::Wire(_) => unreachable!("the wire's form has kernels of its own"),
    }
}
