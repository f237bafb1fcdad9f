//! Which kernel a product gets and how it is launched: per target a pure function of the shape.

pub mod cdna;
pub mod hopper;

use super::args::{Format, SLAB};
use super::target::{GemmShape, PackedShape, Product};
use super::weights::Kind;

/// A packed matrix in row blocks of so many rows: for each and each 64 K, MXFP4 as codes and one scale for each 32.
fn packed(kind: Kind, rows: usize, cols: usize, block_rows: usize) -> PackedShape {
    let row_blocks = rows.div_ceil(block_rows);
    let block_bytes = match kind {
        Kind::Mxfp4 => block_rows * SLAB / 2 + block_rows * SLAB / 32,
        Kind::Dense => block_rows * SLAB * 2,
        Kind::Wire(_) => unreachable!("stays on the wire's form"),
    };
    PackedShape {
        row_blocks,
        bytes: row_blocks * cols.div_ceil(SLAB) * block_bytes,
    }
}

/// The kernel that packs it, the same on every target.
fn pack_name(kind: Kind) -> &'static str {
    match kind {
        Kind::Mxfp4 => "pack_mxfp4",
        Kind::Dense => "pack_dense",
        Kind::Wire(_) => unreachable!("stays on the wire's form"),
    }
}

/// A product's kernel: operation, weights, activations and their terms, and the tile's tokens, the same on every target.
fn kernel_name(shape: &GemmShape, tokens: usize) -> String {
    let op = match shape.product {
        Product::Qkv => "qkv",
        Product::AttnOut => "attn_out",
        Product::Mlp1 => "mlp1",
        Product::Mlp2 => "mlp2",
        Product::Greedy => "unembed_greedy",
        Product::Logits => "unembed_logits",
    };
    let weights = match shape.kind {
        Kind::Mxfp4 => "mxfp4",
        Kind::Dense => "dense",
        Kind::Wire(_) => unreachable!("products of the wire's form have kernels of their own"),
    };
    let act = match shape.format {
        Format::F16 => "f16",
        Format::Bf16 => "bf16",
        Format::F32 | Format::Mxfp4 => unreachable!("no format of activations"),
    };
    format!("{op}_{weights}_{act}x{}_n{tokens}", shape.terms)
}
