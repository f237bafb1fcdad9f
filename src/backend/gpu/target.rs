//! What the kernels of a target look like from outside: names, grids, layouts, limits. Pure functions of shapes.

use super::args::{self, PackArgs};
use super::context::Grid;
use super::driver::Device;
use super::grids;
use super::tiles::{cdna, hopper};
use super::weights::Kind;

/// A family of devices with kernels of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Family {
    /// NVIDIA's sm_90: wgmma and bulk copies.
    Hopper,
    /// AMD's gfx9 with MFMA, and the CPU that plays one.
    Cdna,
}

/// See the module.
#[derive(Clone, Copy, Debug)]
pub struct Target {
    /// Which kernels.
    pub family: Family,
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
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GemmLaunch {
    /// The kernel.
    pub kernel: String,
    /// Its grid.
    pub grid: Grid,
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

/// Keys and values of one head in a page, at 16 bits and 64 dims.
const HOPPER_TILE_BYTES: usize = 2 * 64 * 64 * 2;
const BARRIER_BYTES: usize = 8;

/// Exponents of the largest and the smallest normal FP16 number.
const F16_EXPONENTS: (i32, i32) = (-14, 15);

impl Target {
    /// The target of a device.
    pub fn of(device: &Device) -> Self {
        Self {
            family: if device.arch.starts_with("sm_") {
                Family::Hopper
            } else {
                Family::Cdna
            },
            multiprocessors: device.multiprocessors.max(1),
        }
    }

    /// Lanes of a wave.
    pub fn wave(&self) -> usize {
        match self.family {
            Family::Hopper => 32,
            Family::Cdna => 64,
        }
    }

    /// Bytes between one key head's part of a page and the next. MI200's memory channels alias on powers of two: heads of a
    /// page, read by blocks that run together, would meet on the same ones.
    pub fn kv_head_padding(&self) -> usize {
        match self.family {
            Family::Hopper => 0,
            Family::Cdna => 768,
        }
    }

    /// Attention over a float32 cache by the matrix cores, for heads that [`Self::attention_decode`] takes; CDNA has the plain
    /// kernel alone.
    pub fn attention_exact(&self, rows: usize, kv_heads: usize) -> Option<(&'static str, Grid)> {
        match self.family {
            Family::Hopper => Some(("attention_exact", Grid::new(rows * kv_heads, 128))),
            Family::Cdna => None,
        }
    }

    /// Rows a block of `route` takes.
    pub fn route_rows(&self) -> usize {
        match self.family {
            Family::Hopper => 8,
            Family::Cdna => 4,
        }
    }

    /// Query rows of a tile of prefill attention.
    pub fn prefill_rows(&self) -> usize {
        match self.family {
            Family::Hopper => 16,
            Family::Cdna => 32,
        }
    }

    /// Processors that decode attention is balanced over: Hopper's persistent blocks, one a multiprocessor; CDNA's SIMDs, each
    /// of which wants waves of its own to cover memory's latency.
    pub fn attention_processors(&self) -> usize {
        match self.family {
            Family::Hopper => self.multiprocessors,
            Family::Cdna => 4 * self.multiprocessors,
        }
    }

    /// Decode attention of at most so many items of at most so many rows.
    pub fn attention_decode(
        &self,
        format: args::Format,
        items: usize,
        rows: usize,
        kv_heads: usize,
    ) -> (&'static str, Grid) {
        let f16 = format == args::Format::F16;
        match self.family {
            // Persistent blocks whose warps work alone. With few rows a warp keeps two tiles on the way, with many one,
            // as more warps fit then.
            Family::Hopper => {
                let few = rows * kv_heads < 4 * self.multiprocessors;
                let (warps, stages) = if few { (6, 2) } else { (8, 1) };
                let kernel = match (f16, few) {
                    (true, true) => "attention_decode_f16_few",
                    (true, false) => "attention_decode_f16_many",
                    (false, true) => "attention_decode_bf16_few",
                    (false, false) => "attention_decode_bf16_many",
                };
                let shared_bytes = warps * stages * (HOPPER_TILE_BYTES + BARRIER_BYTES);
                (
                    kernel,
                    Grid::new(self.multiprocessors, 32 * warps).with_shared(shared_bytes),
                )
            }
            // A wave an item.
            Family::Cdna => {
                let kernel = if f16 {
                    "attention_decode_f16"
                } else {
                    "attention_decode_bf16"
                };
                (kernel, Grid::new(items * kv_heads, 64))
            }
        }
    }

    /// The bucket of a step's items of decode attention: persistent kernels do not care how many there are.
    pub fn decode_items(&self, items: usize) -> usize {
        match self.family {
            Family::Hopper => items.min(1),
            Family::Cdna => items,
        }
    }

    /// Prefill attention of so many tiles.
    pub fn attention_prefill(&self, format: args::Format, tiles: usize, kv_heads: usize) -> (&'static str, Grid) {
        let kernel = match format {
            args::Format::F16 => "attention_prefill_f16",
            _ => "attention_prefill_bf16",
        };
        let grid = Grid::new(tiles * kv_heads, 256);
        match self.family {
            // The queries, and a ring of four tiles of keys and values with two barriers each.
            Family::Hopper => {
                let queries = self.prefill_rows() * 8 * 128;
                (
                    kernel,
                    grid.with_shared(queries + 4 * (HOPPER_TILE_BYTES + 2 * BARRIER_BYTES)),
                )
            }
            Family::Cdna => (kernel, grid),
        }
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
        // MI200's MFMA flushes subnormals; Hopper's wgmma computes with them, down to 2^-24.
        let floor = match self.family {
            Family::Hopper => low - 10,
            Family::Cdna => low,
        };
        (smallest + shift >= low || weakest_row + shift - 24 >= floor).then_some(shift)
    }

    /// The power of two that brings MXFP4 scales into the range in which they decode to FP16 exactly.
    pub fn mxfp4_shift(&self, smallest: i32, largest: i32) -> Option<i32> {
        let (low, high) = match self.family {
            Family::Hopper => hopper::MXFP4_F16_SCALES,
            Family::Cdna => cdna::MXFP4_F16_SCALES,
        };
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

    /// Whether the matrix cores' kernels take a matrix of so many rows: Hopper's store outputs in pairs. Others go through
    /// the plain kernels.
    pub fn holds(&self, rows: usize) -> bool {
        self.family != Family::Hopper || rows.is_multiple_of(2)
    }

    /// A packed matrix.
    pub fn packed(&self, kind: Kind, rows: usize, cols: usize) -> PackedShape {
        match self.family {
            Family::Hopper => hopper::packed(kind, rows, cols),
            Family::Cdna => cdna::packed(kind, rows, cols),
        }
    }

    /// The kernel that packs it.
    pub fn pack_kernel(&self, kind: Kind, args: &PackArgs) -> (&'static str, Grid) {
        match self.family {
            Family::Hopper => hopper::pack_kernel(kind, args),
            Family::Cdna => cdna::pack_kernel(kind, args),
        }
    }

    /// The kernel of a product.
    pub fn gemm(&self, shape: &GemmShape) -> GemmLaunch {
        if matches!(shape.kind, Kind::Wire(_)) {
            return grids::plain_gemm(shape, self);
        }
        match self.family {
            Family::Hopper => hopper::gemm(shape, self.multiprocessors),
            Family::Cdna => cdna::gemm(shape, self.multiprocessors),
        }
    }
}
