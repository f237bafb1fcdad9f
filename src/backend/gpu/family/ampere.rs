//! Ampere and what came after it (`kernels/ampere`): which kernel a product gets, and how it is launched.
//!
//! A block does a tile of tokens for a span of weight rows, several units of 16. A token's sum is the same in every
//! tile, so tiles are chosen by speed alone: the largest that may be taken for so many rows, and of qkv and attn_out
//! with many rows that with which the busiest multiprocessor is done first.

use super::mma::{self, BLOCK_ROWS, BlocksOf};
use super::verdict::{Verdict, cheapest, largest_tile};
use super::{Family, NEEDS_BF16, block_a_row, spans};
use crate::backend::gpu::catalogue::{self, Kernel};
use crate::backend::gpu::shapes::{DecodeShape, GemmShape, NormRouteShape, Product};

/// See the module.
#[derive(Debug)]
pub struct Ampere;

/// Blocks of decode attention a multiprocessor, as many as an H100's shared memory holds: those of four warps, and
/// those of two.
const BLOCKS: BlocksOf = BlocksOf {
    teams: 2,
    pairs: 5,
    alone: 2,
};
const ALONE: &str = "of more rows each warp has an item";
const LESS_CODE: &str = "another has less code and gives the same bits";

impl Family for Ampere {
    fn table(&self) -> &'static catalogue::Table {
        &catalogue::ampere::TABLE
    }

    /// Persistent blocks. With the fewest rows, and with few windows, their warps work together, else each alone.
    fn attention_decode(&self, kernels: &[&'static Kernel], shape: &DecodeShape) -> Vec<Verdict> {
        mma::attention_decode(kernels, shape, &BLOCKS, |_| Ok(ALONE))
    }

    fn decode_items(&self, items: usize) -> usize {
        mma::decode_items(items)
    }

    /// In `fast` with a BF16 router the last one that takes the model.
    fn norm_route(&self, shape: &NormRouteShape, kernels: &[&'static Kernel]) -> Vec<Verdict> {
        let last = kernels.len().saturating_sub(1);
        let of = |i| match i {
            _ if i == last && shape.fast_bf16 => block_a_row(shape),
            0 if !shape.fast_bf16 => block_a_row(shape),
            _ if shape.fast_bf16 => Verdict::Passed(LESS_CODE),
            _ => Verdict::Refused(NEEDS_BF16),
        };
        (0..kernels.len()).map(of).collect()
    }

    fn mxfp4_f16_scales(&self) -> (i32, i32) {
        mma::MXFP4_F16_SCALES
    }

    fn holds(&self, _product: Product, rows: usize) -> bool {
        mma::holds(rows)
    }

    fn pairs_heads(&self, head_dim: usize) -> bool {
        mma::pairs_heads(head_dim)
    }

    fn block_rows(&self) -> usize {
        BLOCK_ROWS
    }

    /// By the largest tile made for so many rows; of a layer's own matrices and many rows by the one that takes least.
    fn verdicts(&self, shape: &GemmShape, kernels: &[&'static Kernel], multiprocessors: usize) -> Vec<Verdict> {
        let by_size = largest_tile(shape, kernels);
        let largest = cheapest(&by_size).map_or(0, |i| kernels[i].tokens);
        if !matches!(shape.product, Product::Qkv | Product::AttnOut) || largest < MANY {
            return by_size;
        }
        let of = |kernel: &&'static Kernel| match kernel.tokens {
            MANY.. => Verdict::Costs(time(kernel, shape, multiprocessors)),
            _ => Verdict::Passed(FOR_FEW),
        };
        kernels.iter().map(of).collect()
    }
}

/// Tokens of tiles for many rows.
const MANY: usize = 64;
const FOR_FEW: &str = "it is faster only with few rows";
/// What a block takes beside its products, in tokens.
const BLOCK_COST: usize = 16;

/// When the busiest multiprocessor is done with a layer's own matrix, at a step's most rows and at an eighth less:
/// counts of rows are known by their bucket alone.
fn time(kernel: &Kernel, shape: &GemmShape, multiprocessors: usize) -> usize {
    let of_rows = |rows: usize| {
        let tiles = rows.max(1).div_ceil(kernel.tokens);
        let rounds = (tiles * spans(shape, kernel, BLOCK_ROWS)).div_ceil(multiprocessors);
        rounds * kernel.cut.rows * (rows.div_ceil(tiles) + BLOCK_COST)
    };
    of_rows(shape.rows) + of_rows(shape.rows - shape.rows / 8)
}

#[cfg(test)]
mod tests {
    use super::super::verdict::taken;
    use super::*;
    use crate::backend::gpu::catalogue::Elements;
    use crate::backend::gpu::launch::Launch;
    use crate::backend::gpu::shapes::MatrixForm;
    use crate::backend::gpu::target::Target;
    use crate::config::ModelConfig;

    /// An A100.
    const TARGET: Target = Target {
        family: &Ampere,
        multiprocessors: 108,
    };

    fn launched(product: Product, rows: usize) -> (String, usize) {
        let shape = GemmShape::of_20b(product, rows, Elements::F16, 1, BLOCK_ROWS);
        let form = match product {
            Product::Qkv => MatrixForm::Heads,
            _ => shape.form,
        };
        let launch = TARGET.gemm(&GemmShape { form, ..shape }).unwrap().launch;
        (launch.kernel.name(), launch.blocks)
    }

    #[test]
    fn tiles_grow_with_rows() {
        let lines: Vec<_> = [1, 32, 256, 1024]
            .iter()
            .flat_map(|&rows| Product::ALL[..5].iter().map(move |&product| (product, rows)))
            .map(|(product, rows)| {
                let (name, blocks) = launched(product, rows);
                format!("{rows} {name} {blocks}")
            })
            .collect();
        assert_eq!(
            lines,
            [
                "1 qkv_store_w16_f16x1_n8 320",
                "1 attn_out_w16_f16x1_n8 180",
                "1 mlp1_mxfp4_f16x1_n8 360",
                "1 mlp2_mxfp4_f16x1_n8 180",
                "1 unembed_greedy_w16_f16x1_n8 3142",
                "32 qkv_store_w16_f16x1_n32 160",
                "32 attn_out_w16_f16x1_n32 90",
                "32 mlp1_mxfp4_f16x1_n8 4320",
                "32 mlp2_mxfp4_f16x1_n8 2160",
                "32 unembed_greedy_w16_f16x1_n32 1571",
                "256 qkv_w16_f16x1_n128 80",
                "256 attn_out_w16_f16x1_n64 92",
                "256 mlp1_mxfp4_f16x1_n64 2160",
                "256 mlp2_mxfp4_f16x1_n64 1104",
                "256 unembed_greedy_w16_f16x1_n128 3142",
                "1024 qkv_w16_f16x1_n128 320",
                "1024 attn_out_w16_f16x1_n64 368",
                "1024 mlp1_mxfp4_f16x1_n128 2880",
                "1024 mlp2_mxfp4_f16x1_n128 1472",
                "1024 unembed_greedy_w16_f16x1_n128 12568",
            ]
        );
    }

    /// A single row is normed by the product of queries, keys and values.
    #[test]
    fn a_row_is_normed_by_its_product() {
        let norm_qkv = |rows, form| {
            let shape = GemmShape::of_20b(Product::Qkv, rows, Elements::F16, 1, BLOCK_ROWS);
            let launch = TARGET.norm_qkv(&ModelConfig::preset_20b(), &GemmShape { form, ..shape });
            launch.map(|launch| (launch.kernel.name(), launch.blocks))
        };
        assert_eq!(norm_qkv(1, MatrixForm::Heads), Some(("norm_qkv_f16".to_owned(), 107)));
        assert_eq!(norm_qkv(2, MatrixForm::Heads), None);
        assert_eq!(norm_qkv(1, MatrixForm::W16), None);
    }

    /// Multiprocessors have work to the end: so many of them in all rounds of a layer's own matrices with many rows.
    #[test]
    fn layers_fill_the_device() {
        for rows in [512, 1024, 1536, 2048, 8192] {
            for product in [Product::Qkv, Product::AttnOut] {
                let shape = GemmShape::of_20b(product, rows, Elements::F16, 1, BLOCK_ROWS);
                let Launch { kernel, blocks, .. } = TARGET.gemm(&shape).unwrap().launch;
                let rounds = blocks.div_ceil(TARGET.multiprocessors);
                let places = rounds * TARGET.multiprocessors * kernel.cut.rows * kernel.tokens;
                let filled = (rows * shape.n) as f64 / places as f64;
                assert!(filled > 0.7, "{product:?} of {rows} rows: {filled:.2}");
            }
        }
    }

    /// A decoding step's blocks are as many as run at once, however many rows there are.
    #[test]
    fn decode_attention_is_persistent() {
        let kernels: Vec<_> = TARGET.family.table().kernels.iter().collect();
        let kernels: Vec<_> = kernels
            .into_iter()
            .filter(|kernel| kernel.op == catalogue::Op::AttentionDecode)
            .collect();
        let launched = |rows, windowed| {
            let shape = DecodeShape {
                items: 1,
                rows,
                kv_heads: 8,
                windowed,
                whole_rows: false,
                multiprocessors: 108,
            };
            let verdicts = TARGET.family.attention_decode(&kernels, &shape);
            let said: Vec<_> = kernels.iter().copied().zip(verdicts).collect();
            let launch = taken(&said).unwrap();
            (launch.kernel.variant, launch.blocks)
        };
        assert_eq!(launched(8, false), ("team", 216));
        assert_eq!(launched(9, true), ("pair", 540));
        assert_eq!(launched(9, false), ("many", 216));
        assert_eq!(launched(65, true), ("many", 216));
    }
}
