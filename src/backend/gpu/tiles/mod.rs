//! Which kernel a product gets and how it is launched: per target a pure function of the shape.

pub mod cdna;
pub mod hopper;

use super::args::Format;
use super::target::{GemmShape, Product};
use super::weights::Kind;

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
