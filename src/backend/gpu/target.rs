//! What the kernels of a device look like from outside: layouts and limits. Pure functions of shapes.

use super::args::{MXFP4_SLAB_BYTES, SLAB, W16_SLAB_BYTES};
use super::catalogue::{Elements, Kernel, Op, PackedFormat};
use super::code_objects;
use super::driver::Device;
use super::family::{self, Family};
use super::shapes::{MatrixForm, Numbers, PackedShape, Product};
use crate::config::ModelConfig;
use crate::error::{Error, GpuFault, Result};
use crate::tensors::TensorId;
use crate::weights::WeightFormat;

/// See the module.
#[derive(Clone, Copy, Debug)]
pub struct Target {
    /// Which kernels.
    pub family: &'static dyn Family,
    /// Multiprocessors (compute units).
    pub multiprocessors: usize,
}

/// Exponents of the smallest and the largest normal FP16 number.
const F16_EXPONENTS: (i32, i32) = (-14, 15);
/// How far the smallest subnormal's exponent is below that of the smallest normal number.
const F16_SUBNORMALS: i32 = 10;

impl Target {
    /// The target of a device, of a family of which the library has code for it.
    pub fn of(device: &Device) -> Result<Self> {
        let has_code = |family: &str| code_objects::runs(family, &device.arch);
        let family = family::of(&device.arch, has_code).ok_or_else(|| Error::Gpu {
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

    /// Whether the family has no products of its own.
    pub fn is_plain(&self) -> bool {
        let mut kernels = self.family.table().kernels.iter();
        kernels.all(|kernel| kernel.weights.is_none())
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

    /// The kernels of an operation that multiplies weights packed so with activations of so many terms.
    pub(super) fn products(
        &self,
        op: Op,
        weights: PackedFormat,
        elements: Elements,
        terms: usize,
    ) -> impl Iterator<Item = &'static Kernel> {
        self.kernels(op, Some(elements))
            .filter(move |kernel| kernel.weights == Some(weights) && kernel.terms == terms)
    }

    /// Whether the family has kernels for a product of a matrix of so many rows, packed so. What it has none for, the
    /// plain kernels multiply.
    pub fn multiplies(
        &self,
        product: Product,
        weights: PackedFormat,
        elements: Elements,
        terms: usize,
        rows: usize,
    ) -> bool {
        let mut kernels = self.products(product.op(), weights, elements, terms);
        self.family.holds(product, rows) && kernels.next().is_some()
    }

    /// How a tensor that comes in this format is held: packed, if the family has kernels for all products of it.
    pub fn form(&self, tensor: TensorId, format: WeightFormat, config: &ModelConfig, numbers: &Numbers) -> MatrixForm {
        let wire = MatrixForm::Wire(format);
        let packed = match (format, tensor) {
            (WeightFormat::Mxfp4, _) => MatrixForm::Mxfp4,
            (WeightFormat::Bf16, TensorId::Qkv { .. }) => self.qkv_held(config, numbers.exact),
            (WeightFormat::Bf16, _) => MatrixForm::W16,
            (WeightFormat::F32, _) => return wire,
        };
        let [rows, _] = tensor.shape(config);
        let products = Product::of(tensor);
        let multiplies = |weights| {
            let mut products = products.iter();
            products.all(|&product| self.multiplies(product, weights, numbers.elements, numbers.terms, rows))
        };
        match packed.packed() {
            Some(weights) if !products.is_empty() && multiplies(weights) => packed,
            _ => wire,
        }
    }

    /// Query rows of a tile of prefill attention.
    pub fn prefill_rows(&self) -> usize {
        self.kernels(Op::AttentionPrefill, None)
            .next()
            .map_or(1, |kernel| kernel.per_block)
    }

    /// Items of decode attention that run at once where all multiprocessors are busy.
    pub fn attention_items_at_once(&self) -> usize {
        self.family.attention_items_at_once(self.multiprocessors)
    }

    /// Rows up to which decode attention shares an item's units out by itself; 0 if it never does.
    pub fn attention_team_rows(&self) -> usize {
        self.family.team_rows()
    }

    /// Rows of an item of the kernel for keys that several decoding rows see, over a cache of this format; 0 if there
    /// is none that takes the model.
    pub fn shared_rows(&self, config: &ModelConfig, kv: Elements) -> usize {
        let mut kernels = self.attention_kernels(Op::AttentionShared, config, kv).into_iter();
        kernels.next().map_or(0, |kernel| kernel.per_block)
    }

    /// The bucket of a step's items of decode attention.
    pub fn decode_items(&self, items: usize) -> usize {
        self.family.decode_items(items)
    }

    /// The power of two that brings 16-bit weights into FP16's range; `None` if there is none. Exponents of the
    /// tensor's smallest and largest values, and of the largest value of the row whose largest is smallest.
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
    pub fn qkv_held(&self, config: &ModelConfig, exact: bool) -> MatrixForm {
        if !exact && self.family.pairs_heads(config.head_dim) {
            MatrixForm::Heads
        } else {
            MatrixForm::W16
        }
    }

    /// A packed matrix in row blocks: for each and each 64 K, MXFP4 as codes and one scale for each 32.
    pub fn packed(&self, weights: PackedFormat, rows: usize, cols: usize) -> PackedShape {
        let block_rows = self.family.block_rows();
        let row_blocks = rows.div_ceil(block_rows);
        let block_bytes = match weights {
            PackedFormat::Mxfp4 => block_rows * MXFP4_SLAB_BYTES,
            PackedFormat::W16 => block_rows * W16_SLAB_BYTES,
        };
        PackedShape {
            row_blocks,
            bytes: row_blocks * cols.div_ceil(SLAB) * block_bytes,
        }
    }
}
