//! Hopper (`kernels/hopper`): which kernel a product gets, and how it is launched.
//!
//! Every kernel is persistent: one block a multiprocessor (fewer for attn_out of few rows) with nearly all of its
//! shared memory, whose parts of the work follow from the rows' counts on the device. Which tile a product gets is in
//! `tiles.rs`.

mod clusters;
mod tiles;

use super::mma::{self, BlocksOf};
use super::verdict::Verdict;
use super::{Family, NEEDS_BF16, block_a_row};
use crate::backend::gpu::catalogue::{self, Kernel, Workers};
use crate::backend::gpu::launch::Launch;
use crate::backend::gpu::shapes::{DecodeShape, GemmLaunch, GemmShape, NormRouteShape, Product};

/// See the module.
#[derive(Debug)]
pub struct Hopper;

const BLOCKS: BlocksOf = BlocksOf {
    teams: 1,
    pairs: 3,
    alone: 1,
};
const FEWEST_WARPS: &str = "with few rows the fewest warps have the most tiles on the way";
const MOST_WARPS: &str = "with many rows the most warps fit";
const OTHER_WARPS: &str = "with so many rows another number of warps is faster";

impl Family for Hopper {
    fn table(&self) -> &'static catalogue::Table {
        &catalogue::hopper::TABLE
    }

    /// Persistent blocks. With the fewest rows, and with few windows, their warps work together, else each alone: with
    /// few rows the fewest warps, each with the most tiles on the way.
    fn attention_decode(&self, kernels: &[&'static Kernel], shape: &DecodeShape) -> Vec<Verdict> {
        let alone = kernels.iter().filter(|kernel| kernel.workers == Workers::Alone);
        let threads = alone.map(|kernel| kernel.threads);
        let few = shape.rows * shape.kv_heads < 4 * shape.multiprocessors;
        let (threads, reason) = match few {
            true => (threads.min(), FEWEST_WARPS),
            false => (threads.max(), MOST_WARPS),
        };
        mma::attention_decode(kernels, shape, &BLOCKS, |kernel| {
            (Some(kernel.threads) == threads).then_some(reason).ok_or(OTHER_WARPS)
        })
    }

    /// Persistent blocks, which take tiles from a counter.
    fn prefill_blocks(&self, tiles: usize, multiprocessors: usize) -> usize {
        tiles.min(multiprocessors)
    }

    fn decode_items(&self, items: usize) -> usize {
        mma::decode_items(items)
    }

    /// By clusters of blocks, which multiply a row in parts and round the sums.
    fn norm_route(&self, shape: &NormRouteShape, kernels: &[&'static Kernel]) -> Vec<Verdict> {
        if shape.fast_bf16 {
            return clusters::norm_route(shape, kernels);
        }
        let of = |kernel: &&'static Kernel| match kernel.cluster {
            0 => block_a_row(shape),
            _ => Verdict::Refused(NEEDS_BF16),
        };
        kernels.iter().map(of).collect()
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

    /// wgmma's height, too.
    fn block_rows(&self) -> usize {
        mma::BLOCK_ROWS
    }

    fn verdicts(&self, shape: &GemmShape, kernels: &[&'static Kernel], multiprocessors: usize) -> Vec<Verdict> {
        tiles::verdicts(shape, kernels, multiprocessors)
    }

    fn product(&self, shape: &GemmShape, kernel: &'static Kernel, multiprocessors: usize) -> GemmLaunch {
        let blocks = match kernel.cut.fewest_blocks {
            true => fewest_blocks(shape, multiprocessors),
            false => multiprocessors,
        };
        GemmLaunch {
            launch: Launch::new(kernel, blocks),
            largest_count: largest_count(shape, kernel),
            candidates: match shape.product {
                // A block keeps one candidate for all rows of the matrix it meets.
                Product::Greedy | Product::Logits => multiprocessors,
                _ => 0,
            },
        }
    }
}

/// Weight units of a row block: 16 rows of 16-bit weights, or all 64 of MXFP4.
const MOST_UNITS: usize = mma::BLOCK_ROWS / mma::UNIT_ROWS;

/// The most that kernels/hopper/schedule.h makes of token tiles and weight units: the product of their counts, however
/// the rows fall on the groups. The unembedding's schedule does not multiply them.
fn largest_count(shape: &GemmShape, kernel: &Kernel) -> u64 {
    let tiles = (shape.rows.div_ceil(kernel.tokens) + shape.groups) as u64;
    if matches!(shape.product, Product::Greedy | Product::Logits) {
        return tiles;
    }
    tiles * (shape.row_blocks * MOST_UNITS) as u64
}

/// The fewest blocks of which none has more units than if there were one a multiprocessor.
fn fewest_blocks(shape: &GemmShape, multiprocessors: usize) -> usize {
    let units = (shape.row_blocks * MOST_UNITS).max(1);
    units.div_ceil(units.div_ceil(multiprocessors))
}

#[cfg(test)]
mod tests {
    use super::super::verdict::{Said, taken};
    use super::*;
    use crate::backend::gpu::catalogue::{Elements, Op, PackedFormat};
    use crate::backend::gpu::shapes::{AttentionWork, MatrixForm, NormWork, Numbers, PackedShape};
    use crate::backend::gpu::target::Target;
    use crate::config::ModelConfig;
    use crate::options::StepLimits;
    use crate::tensors::TensorId;
    use crate::weights::WeightFormat;

    const TARGET: Target = Target {
        family: &Hopper,
        multiprocessors: 132,
    };

    fn shape_20b(product: Product, rows: usize, elements: Elements, terms: usize) -> GemmShape {
        let shape = GemmShape::of_20b(product, rows, elements, terms, 64);
        match (product, terms) {
            (Product::Qkv, 1) => GemmShape {
                form: MatrixForm::Heads,
                ..shape
            },
            _ => shape,
        }
    }

    #[test]
    fn it_takes_128_experts() {
        let supports = |experts| {
            let config = ModelConfig {
                n_experts: experts,
                ..ModelConfig::preset_20b()
            };
            TARGET.supports(&config, &StepLimits::GPU)
        };
        assert_eq!(supports(128), Ok(()));
        let why = supports(129).unwrap_err();
        assert!(
            why.starts_with("n_experts is 129; its kernel ") && why.ends_with("takes at most 128"),
            "{why}"
        );
    }

    /// Outputs in pairs: what has an odd number of them stays in the wire format, and all else is packed.
    #[test]
    fn odd_widths_are_for_the_plain_kernels() {
        let config = ModelConfig {
            hidden_dim: 2881,
            ..ModelConfig::preset_20b()
        };
        let (layer, expert) = (0, 0);
        let form = |tensor, format| TARGET.form(tensor, format, &config, &Numbers::new(Elements::F16, true));
        let mxfp4 = MatrixForm::Wire(WeightFormat::Mxfp4);
        assert_eq!(
            form(TensorId::Mlp1 { layer, expert }, WeightFormat::Mxfp4),
            MatrixForm::Mxfp4
        );
        assert_eq!(form(TensorId::Mlp2 { layer, expert }, WeightFormat::Mxfp4), mxfp4);
        let bf16 = MatrixForm::Wire(WeightFormat::Bf16);
        assert_eq!(form(TensorId::Qkv { layer }, WeightFormat::Bf16), MatrixForm::W16);
        assert_eq!(form(TensorId::AttnOut { layer }, WeightFormat::Bf16), bf16);
    }

    #[test]
    fn tiles_grow_with_rows() {
        let lines: Vec<_> = [1, 32, 256, 1024, 1536, 4096]
            .iter()
            .flat_map(|&rows| Product::ALL[..5].iter().map(move |&product| (product, rows)))
            .map(|(product, rows)| {
                let shape = shape_20b(product, rows, Elements::F16, 1);
                let kernel = TARGET.gemm(&shape).unwrap().launch.kernel;
                format!("{rows} {} {}", kernel.name(), kernel.threads)
            })
            .collect();
        assert_eq!(
            lines,
            [
                "1 qkv_store_w16_f16x1_n8 256",
                "1 attn_out_w16_f16x1_n8 256",
                "1 mlp1_mxfp4_f16x1_n8 512",
                "1 mlp2_mxfp4_f16x1_n8 512",
                "1 unembed_greedy_w16_f16x1_n8 384",
                "32 qkv_w16_f16x1_n32 256",
                "32 attn_out_w16_f16x1_n32 256",
                "32 mlp1_mxfp4_f16x1_n8 512",
                "32 mlp2_mxfp4_f16x1_n8 512",
                "32 unembed_greedy_w16_f16x1_n32 384",
                "256 qkv_w16_f16x1_n128_tall 384",
                "256 attn_out_w16_f16x1_n128_tall 384",
                "256 mlp1_mxfp4_f16x1_n56 512",
                "256 mlp2_mxfp4_f16x1_n56 512",
                "256 unembed_greedy_w16_f16x1_n256 384",
                "1024 qkv_w16_f16x1_n112_many 384",
                "1024 attn_out_w16_f16x1_n112_many 512",
                "1024 mlp1_mxfp4_f16x1_n128 640",
                "1024 mlp2_mxfp4_f16x1_n128 640",
                "1024 unembed_greedy_w16_f16x1_n256 384",
                "1536 qkv_store_w16_f16x1_n128_many 384",
                "1536 attn_out_w16_f16x1_n192_many 512",
                "1536 mlp1_mxfp4_f16x1_n192 512",
                "1536 mlp2_mxfp4_f16x1_n160 512",
                "1536 unembed_greedy_w16_f16x1_n256 384",
                "4096 qkv_store_w16_f16x1_n128_many 384",
                "4096 attn_out_w16_f16x1_n112_many 512",
                "4096 mlp1_mxfp4_f16x1_n160 512",
                "4096 mlp2_mxfp4_f16x1_n160 512",
                "4096 unembed_greedy_w16_f16x1_n256 384",
            ]
        );
    }

    /// Few rows, and few windows, have blocks whose warps work together.
    #[test]
    fn decode_attention_by_rows() {
        let mine = |kernel: &&Kernel| kernel.op == Op::AttentionDecode && kernel.elements == Some(Elements::F16);
        let kernels: Vec<_> = Hopper.table().kernels.iter().filter(mine).collect();
        let launch_of = |rows, windowed, whole_rows| {
            let shape = DecodeShape {
                items: 1,
                rows,
                kv_heads: 8,
                windowed,
                whole_rows,
                multiprocessors: 132,
            };
            let said: Vec<_> = kernels
                .iter()
                .copied()
                .zip(Hopper.attention_decode(&kernels, &shape))
                .collect();
            let launch = taken(&said).unwrap();
            (launch.kernel.variant, launch.blocks)
        };
        let launch = |rows, windowed| launch_of(rows, windowed, false);
        assert_eq!([1, 8].map(|rows| launch(rows, false)), [("team", 132); 2]);
        assert_eq!([1, 8].map(|rows| launch(rows, true)), [("team", 132); 2]);
        assert_eq!([9, 64].map(|rows| launch(rows, true)), [("pair", 396); 2]);
        assert_eq!([9, 65].map(|rows| launch(rows, false)), [("few", 132); 2]);
        assert_eq!([65, 66].map(|rows| launch(rows, true)), [("few", 132), ("many", 132)]);
        assert_eq!([9, 900].map(|rows| launch_of(rows, false, true)), [("block", 132); 2]);
        assert_eq!([9, 900].map(|rows| launch_of(rows, true, true).0), ["pair", "many"]);
    }

    /// What is said of the tiles of a few products.
    #[test]
    fn choices_have_reasons() {
        let has = |product, rows, more, line: &str| {
            let shape = GemmShape::of_20b(product, rows, Elements::F16, 1, 64);
            let shape = GemmShape {
                n: shape.n + more,
                ..shape
            };
            let verdicts = TARGET.verdicts(&shape);
            let lines: Vec<_> = verdicts
                .iter()
                .map(|(kernel, verdict)| format!("{} {verdict}", kernel.name()))
                .collect();
            assert!(lines.iter().any(|other| other == line), "{line}: {lines:?}");
        };
        let attn_out = |line| has(Product::AttnOut, 20, 0, line);
        attn_out("attn_out_w16_f16x1_n8 refused: it is for fewer rows in all");
        attn_out("attn_out_w16_f16x1_n32 costs 32");
        attn_out(
            "attn_out_w16_f16x1_n192_many passed over: all rows fit a tile whose weights are on their way before the \
             tokens are there",
        );
        has(
            Product::AttnOut,
            200,
            2,
            "attn_out_w16_f16x1_n128_tall refused: it stores outputs in groups, and their number is no multiple of one",
        );
        has(
            Product::Mlp1,
            600,
            0,
            "mlp1_mxfp4_f16x1_n16 passed over: a busy expert has more rows than it holds, and a wider tile holds more \
             of them",
        );
        has(
            Product::Mlp1,
            600,
            0,
            "mlp1_mxfp4_f16x1_n192 passed over: it is faster only where there are more rows, of an expert or in all",
        );
        has(
            Product::Mlp1,
            8192,
            0,
            "mlp1_mxfp4_f16x1_n64 passed over: another is faster where experts have so many rows",
        );
    }

    /// What is said of kernels for norm, router and attention.
    #[test]
    fn choices_of_other_operations_have_reasons() {
        let config = ModelConfig::preset_20b();
        let fast = Numbers::new(Elements::F16, false);
        let has = |said: Vec<Said>, line: &str| {
            let lines: Vec<_> = said
                .iter()
                .map(|(kernel, verdict)| format!("{} {verdict}", kernel.name()))
                .collect();
            assert!(lines.iter().any(|other| other == line), "{line}: {lines:#?}");
        };
        let adds = NormWork {
            adds: true,
            ..NormWork::default()
        };
        let norm = |rows, line| has(TARGET.norm_verdicts(&config, &fast, &adds, rows), line);
        norm(64, "rmsnorm_few taken: it is made for so many rows");
        norm(65, "rmsnorm taken: no other may be taken");
        norm(65, "rmsnorm_few refused: it is for fewer rows in all");
        norm(512, "rmsnorm_rows taken: it is made for so many rows");
        let router = |rows, line| {
            let bf16 = MatrixForm::Wire(WeightFormat::Bf16);
            has(TARGET.norm_route_verdicts(&config, &fast, bf16, rows), line);
        };
        router(
            8,
            "norm_route_cluster4 passed over: larger clusters have place for each row at once",
        );
        router(
            32,
            "norm_route_cluster8 passed over: its clusters have no place for each row at once",
        );
        router(890, "norm_route_32x32 taken: it is faster than those for fewer rows");
        router(890, "norm_route passed over: clusters are faster");
        let attention = |exact, windowed, line| {
            let work = AttentionWork {
                windowed,
                rows: 32,
                items: 32,
                shares_keys: false,
                whole_rows: false,
                tiles: 0,
            };
            let kv = if exact { Elements::F32 } else { Elements::F16 };
            has(TARGET.attention_verdicts(&config, kv, exact, &work), line);
        };
        attention(
            false,
            true,
            "attention_decode_f16_pair taken: of so few windows two warps share one",
        );
        attention(false, false, "attention_exact refused: it is made for `exact`");
        attention(true, false, "attention_exact taken: it is made for `exact`");
    }

    /// Kernels made for rows of one tile never meet more.
    #[test]
    fn single_tiles_hold_all_rows() {
        for elements in [Elements::F16, Elements::Bf16] {
            for terms in [1, if elements == Elements::F16 { 2 } else { 3 }] {
                for rows in 0..600 {
                    for product in [Product::Qkv, Product::AttnOut, Product::Greedy, Product::Logits] {
                        let shape = shape_20b(product, rows, elements, terms);
                        let kernel = TARGET.gemm(&shape).unwrap().launch.kernel;
                        assert!(kernel.holds(rows), "{product:?} {rows}");
                    }
                }
            }
        }
    }

    /// From 65 to 256 rows tokens are wgmma's rows, unless outputs cannot be stored in fours.
    #[test]
    fn tokens_come_first_where_units_are_few() {
        let first = |product, rows, more| {
            let shape = shape_20b(product, rows, Elements::F16, 1);
            let shape = GemmShape {
                n: shape.n + more,
                ..shape
            };
            TARGET.gemm(&shape).unwrap().launch.kernel.cut.outputs == 4
        };
        for product in [Product::Qkv, Product::AttnOut] {
            assert_eq!(
                [64, 65, 96, 128, 192, 256, 384, 1024].map(|rows| first(product, rows, 0)),
                [false, true, true, true, true, true, false, false]
            );
            assert_eq!([96, 256].map(|rows| first(product, rows, 2)), [false; 2]);
        }
    }

    /// attn_out of few rows leaves the multiprocessors that it does not need to the kernels beside it.
    #[test]
    fn attn_out_of_few_rows_has_the_fewest_blocks() {
        let blocks = |product, rows| {
            let shape = shape_20b(product, rows, Elements::F16, 1);
            TARGET.gemm(&shape).unwrap().launch.blocks
        };
        assert_eq!([1, 8, 9].map(|rows| blocks(Product::AttnOut, rows)), [90, 90, 132]);
        assert_eq!(blocks(Product::Qkv, 1), 132);
    }

    /// Exact products of few rows an expert stay with the narrow tile a little longer. attn_out of 890 rows is one
    /// round of chunks with 112 tokens.
    #[test]
    fn tiles_of_exact_products() {
        let tokens = |product, rows| {
            let shape = shape_20b(product, rows, Elements::F16, 2);
            TARGET.gemm(&shape).unwrap().launch.kernel.tokens
        };
        let mlp1 = |rows| tokens(Product::Mlp1, rows);
        assert_eq!([1, 64, 80, 96, 1024].map(mlp1), [8, 8, 8, 64, 128]);
        let attn_out = |rows| tokens(Product::AttnOut, rows);
        assert_eq!([8, 64, 256, 1024].map(attn_out), [8, 64, 64, 112]);
    }

    #[test]
    fn matrices_are_filled_up_to_whole_blocks() {
        assert_eq!(TARGET.packed(PackedFormat::Mxfp4, 5760, 2880).bytes, 90 * 45 * 2176);
        assert_eq!(
            TARGET.packed(PackedFormat::W16, 201_088, 32),
            PackedShape {
                row_blocks: 3142,
                bytes: 3142 * 8192
            }
        );
    }
}
