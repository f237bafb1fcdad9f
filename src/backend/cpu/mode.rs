//! The instruction set and precision by which kernels of matrix products are chosen, and the encoding of activations
//! that these need.

use crate::options::Precision;
use crate::simd::Level;
use crate::weights::WeightFormat;

/// The most tokens in a block.
pub const MAX_TOKENS: usize = 12;

/// How a kernel reads activations: 32-bit words that hold one column or two.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Encoding {
    /// A float32 for each column.
    #[default]
    F32,
    /// Two bfloat16 for each column pair, the first in the low half.
    Bf16Pairs,
    /// Two 16-bit integers for each column pair, and a scale for each token.
    I16Pairs,
}

impl Encoding {
    pub fn words(self, cols: usize) -> usize {
        if self == Encoding::F32 { cols } else { cols / 2 }
    }
}

/// The instruction set and precision by which kernels are chosen.
#[derive(Clone, Copy, Debug)]
pub struct ComputeMode {
    /// The instruction set.
    pub level: Level,
    /// The precision.
    pub precision: Precision,
}

impl ComputeMode {
    /// How the kernels for weights in `format` need their activations encoded.
    pub fn encoding(self, format: WeightFormat) -> Encoding {
        match (self.precision, self.level, format) {
            (Precision::Fast, Level::Avx512(_), WeightFormat::Bf16) => Encoding::Bf16Pairs,
            (Precision::Fast, Level::Avx512(_), WeightFormat::Mxfp4) => Encoding::I16Pairs,
            _ => Encoding::F32,
        }
    }

    /// The most tokens in a block, as the accumulators fit into the registers. With AVX-512 `exact` takes two registers
    /// of float64 for the sums of a vector, and computes the tile's two vectors one after the other.
    pub fn max_tokens(self) -> usize {
        match (self.level, self.precision) {
            (Level::Avx512(_), Precision::Fast) => MAX_TOKENS,
            (Level::Avx512(_), Precision::Exact) => 8,
            _ => 2,
        }
    }
}
