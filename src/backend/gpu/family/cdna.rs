//! CDNA (`kernels/cdna`): which kernel a product gets, and how it is launched.
//!
//! A wave does 32 weight rows times a tile of tokens. A token's sum is the same in every tile, so tiles are chosen by
//! speed alone: the largest that is made for so many rows ([`super::verdict::largest_tile`]).
//!
//! * `n16` streams weights past up to 16 tokens, without LDS: reading weights is all the work.
//! * `n64` and `n128` keep tokens in LDS. The larger the tile, the fewer instructions decode weights beside each MFMA,
//!   and the fewer waves a SIMD holds to hide latency.
//! * A block is four waves side by side (128 weight rows share a tile of tokens); of dense products with few rows
//!   fewer, as their 90 to 160 row blocks would otherwise leave compute units without work.
//! * qkv and attn_out make few blocks, of which the last round may fill the device only in part. Their `n64` and `n128`
//!   spread a step's rows over all tiles of the grid, and the number of tiles is chosen by how long all rounds take.
//! * How experts' rows are cut into tiles of `n64` and `n128` sort says, which knows their counts
//!   (`kernels/expert_cuts.h`).

use super::verdict::Verdict;
use super::{Family, MORE_ROWS, NEEDS_BF16, block_a_row, blocks_of_tiles, most_tiles, spans};
use crate::backend::gpu::catalogue::{self, Kernel, Op};
use crate::backend::gpu::shapes::{ExpertCuts, GemmLaunch, GemmShape, NormRouteShape};

/// See the module.
#[derive(Debug)]
pub struct Cdna;

/// Waves that a compute unit works on at once: two a SIMD, as registers or LDS allow.
const WAVES_AT_ONCE: usize = 8;
/// Lanes of a wave.
const WAVE: usize = 64;
/// Tokens of an MFMA.
const STEP: usize = 16;

impl Family for Cdna {
    fn table(&self) -> &'static catalogue::Table {
        &catalogue::cdna::TABLE
    }

    /// MI200's memory channels alias on powers of two: heads of a page, read by blocks that run together, would meet on
    /// the same ones.
    fn kv_head_padding(&self) -> usize {
        768
    }

    /// SIMDs, each of which wants waves of its own to cover memory's latency.
    fn attention_items_at_once(&self, multiprocessors: usize) -> usize {
        4 * multiprocessors
    }

    /// A row's heads fill half of the matrix cores' columns.
    fn attends_to_two_rows(&self) -> bool {
        true
    }

    /// A lane has four pairs of one head.
    fn pairs_heads(&self, head_dim: usize) -> bool {
        head_dim.is_multiple_of(8)
    }

    /// Rows that do not have a multiprocessor each share them, in `fast` with a BF16 router.
    fn norm_route(&self, shape: &NormRouteShape, kernels: &[&'static Kernel]) -> Vec<Verdict> {
        let of_one = block_a_row(shape);
        let of = |kernel: &&'static Kernel| match (kernel.per_block, of_one) {
            (0, _) => of_one,
            (_, Verdict::Taken(_, reason)) => Verdict::Passed(reason),
            _ if !shape.fast_bf16 => Verdict::Refused(NEEDS_BF16),
            (rows, _) => Verdict::Taken(shape.rows.div_ceil(rows), MORE_ROWS),
        };
        kernels.iter().map(of).collect()
    }

    /// In `fast`. Tokens go through registers to LDS, so each may come from anywhere.
    fn indexes_rows(&self, kernel: &Kernel) -> bool {
        kernel.op == Op::Mlp1 && kernel.terms == 1
    }

    /// In `fast`, where tokens are in LDS.
    fn cuts(&self, kernel: &Kernel, multiprocessors: usize) -> Option<ExpertCuts> {
        let takes = matches!(kernel.op, Op::Mlp1 | Op::Mlp2) && kernel.terms == 1 && kernel.tokens > STEP;
        takes.then(|| ExpertCuts {
            tile_steps: kernel.tokens / STEP,
            places: multiprocessors * WAVES_AT_ONCE / (kernel.threads / WAVE),
        })
    }

    fn product(&self, shape: &GemmShape, kernel: &'static Kernel, multiprocessors: usize) -> GemmLaunch {
        let tiles = match kernel.cut.spreads {
            true => fewest_rounds(shape, kernel, multiprocessors),
            false => most_tiles(shape, kernel) + self.cuts(kernel, multiprocessors).map_or(0, |_| one_more(shape)),
        };
        blocks_of_tiles(shape, kernel, tiles, spans(shape, kernel, self.block_rows()))
    }
}

/// Tiles that cuts may have beyond the fewest: of half of the experts one each.
fn one_more(shape: &GemmShape) -> usize {
    shape.rows.min(shape.groups) / 2
}

/// How many tiles take least, at a step's most rows and at an eighth less: counts of rows are known by their bucket
/// alone. Of equals the fewest, which read weights least often. Where weights are read more than twice, tiles have more
/// than two steps of 16 tokens, or they would wait for weights from L2.
fn fewest_rounds(shape: &GemmShape, kernel: &Kernel, compute_units: usize) -> usize {
    let least = shape.rows.div_ceil(kernel.tokens);
    let most = ((shape.rows.div_ceil(STEP) - 1) / 2).max(2);
    let cost = |tiles: usize| {
        let rows = [shape.rows, shape.rows - shape.rows / 8];
        let costs = rows.map(|rows| rounds_cost(rows, tiles, shape.row_blocks, kernel, compute_units));
        costs.iter().sum::<f64>()
    };
    (least..=most)
        .min_by(|&a, &b| cost(a).total_cmp(&cost(b)))
        .expect("at least one tile")
}

/// Blocks go to the device in rounds of as many as it has places for. In a round a wave multiplies 16 tokens after 16,
/// and three quarters of such a step are counted for what it does beside and before: its loop takes a tenth of a step
/// more than its MFMAs on gfx90a, a whole one on gfx950 (`kernels/cdna/mca.py`). Larger and smaller tiles meet on
/// a compute unit: a round takes between the mean and the largest. Where compute units have half of their waves, these
/// have the matrix cores to themselves, of which a loop reaches nine tenths and more alone: a grid of no more blocks
/// takes 0.56 of a round. As the last of several rounds it takes a third less than one, as these do not end at once.
fn rounds_cost(rows: usize, tiles: usize, row_blocks: usize, kernel: &Kernel, compute_units: usize) -> f64 {
    let waves = kernel.threads / WAVE;
    let blocks = tiles * row_blocks.div_ceil(waves);
    let places = compute_units * WAVES_AT_ONCE / waves;
    let last = match blocks % places {
        0 => 0.0,
        _ if blocks <= places / 2 => 0.56,
        few if few <= places / 2 => 0.65,
        _ => 1.0,
    };
    let steps = rows.div_ceil(STEP);
    let tile = (steps as f64 / tiles as f64 + steps.div_ceil(tiles) as f64) / 2.0;
    ((blocks / places) as f64 + last) * (tile + 0.75)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::gpu::args::WIRE_ROWS;
    use crate::backend::gpu::catalogue::{Elements, PackedFormat};
    use crate::backend::gpu::launch::Launch;
    use crate::backend::gpu::shapes::{MatrixForm, Mlp1Launch, PackedShape, Product};
    use crate::backend::gpu::target::Target;

    const TARGET: Target = Target {
        family: &Cdna,
        multiprocessors: 104,
    };

    fn shape_20b(product: Product, rows: usize, terms: usize) -> GemmShape {
        let shape = GemmShape::of_20b(product, rows, Elements::F16, terms, WIRE_ROWS);
        match (product, terms) {
            (Product::Qkv, 1) => GemmShape {
                form: MatrixForm::Heads,
                ..shape
            },
            _ => shape,
        }
    }

    #[test]
    fn tiles_grow_with_rows() {
        let lines: Vec<_> = [1, 32, 256, 1536]
            .iter()
            .flat_map(|&rows| Product::ALL[..5].iter().map(move |&product| (product, rows)))
            .map(|(product, rows)| {
                let Launch { kernel, blocks, .. } = TARGET.gemm(&shape_20b(product, rows, 1)).unwrap().launch;
                format!("{rows} {} {blocks}x{}", kernel.name(), kernel.threads)
            })
            .collect();
        assert_eq!(
            lines,
            [
                "1 qkv_store_w16_f16x1_n16 160x64",
                "1 attn_out_w16_f16x1_n16 90x64",
                "1 mlp1_mxfp4_f16x1_n16 180x256",
                "1 mlp2_mxfp4_f16x1_n16 92x256",
                "1 unembed_greedy_w16_f16x1_n16 1571x256",
                "32 qkv_store_w16_f16x1_n64 160x128",
                "32 attn_out_w16_f16x1_n64 90x128",
                "32 mlp1_mxfp4_f16x1_n16 1800x256",
                "32 mlp2_mxfp4_f16x1_n16 920x256",
                "32 unembed_greedy_w16_f16x1_n64 1571x256",
                "256 qkv_store_w16_f16x1_n128 200x256",
                "256 attn_out_w16_f16x1_n128 92x256",
                "256 mlp1_mxfp4_f16x1_n64 2880x256",
                "256 mlp2_mxfp4_f16x1_n64 1472x256",
                "256 unembed_greedy_w16_f16x1_n128 3142x256",
                "1536 qkv_store_w16_f16x1_n128 600x256",
                "1536 attn_out_w16_f16x1_n128 414x256",
                "1536 mlp1_mxfp4_f16x1_n128 4320x256",
                "1536 mlp2_mxfp4_f16x1_n128 2208x256",
                "1536 unembed_greedy_w16_f16x1_n128 18852x256",
            ]
        );
    }

    /// Up to 64 rows, where experts' weights are streamed: a block for each row block of each expert or pick, and one
    /// that stores the slots.
    #[test]
    fn few_rows_are_sorted_by_mlp1() {
        let sorts = |rows, terms, groups| {
            let shape = GemmShape {
                groups,
                ..shape_20b(Product::Mlp1, rows, terms)
            };
            match TARGET.mlp1(&shape, rows, TARGET.gemm(&shape).unwrap().launch) {
                Mlp1Launch::Sorting(launch) => Some(launch.blocks),
                _ => None,
            }
        };
        for (rows, places) in [(1, 4), (2, 8), (7, 28), (8, 32), (9, 32), (64, 32)] {
            assert_eq!(sorts(rows, 1, 32), Some(1 + 45 * places), "{rows} rows");
        }
        assert_eq!(sorts(65, 1, 32), None);
        assert_eq!([15, 16].map(|rows| sorts(rows, 1, 5).is_some()), [true, false]);
        assert_eq!(sorts(1, 2, 32), None);
        assert!(!TARGET.gathers(Elements::F16, 1, 64) && !TARGET.gathers(Elements::F16, 1, 65));
        assert!(TARGET.gathers(Elements::F16, 2, 1));
    }

    /// However the rows fall on the experts, the grid has a block for every tile.
    #[test]
    fn grids_cover_the_worst_routing() {
        for rows in [0, 1, 3, 31, 64, 200, 890] {
            let shape = shape_20b(Product::Mlp1, rows, 1);
            let Launch { kernel, blocks, .. } = TARGET.gemm(&shape).unwrap().launch;
            let tile = kernel.tokens;
            let cut = |counts: &[usize]| counts.iter().map(|c| c.div_ceil(tile)).sum::<usize>() * 45;
            let mut one_over = vec![0; 32];
            for i in 0..shape.rows {
                // Each expert gets one row, then tiles are filled one after another.
                let at = if i < 32 { i } else { (i - 32) / tile % 32 };
                one_over[at] += 1;
                assert!(cut(&one_over) <= blocks, "{rows} rows, {i}");
            }
            assert!(cut(&[shape.rows]) <= blocks);
        }
    }

    #[test]
    fn few_rows_reach_every_compute_unit() {
        for product in [Product::Qkv, Product::AttnOut] {
            assert!(TARGET.gemm(&shape_20b(product, 1, 1)).unwrap().launch.blocks >= 90);
        }
    }

    /// Of the places of all rounds so many have a wave with rows to multiply, padding counted as none. A round takes as
    /// long as its largest tile.
    fn filled(product: Product, bucket: usize, rows: usize) -> f64 {
        let shape = shape_20b(product, bucket, 1);
        let Launch { kernel, blocks, .. } = TARGET.gemm(&shape).unwrap().launch;
        let waves = kernel.threads / WAVE;
        let tiles = blocks / shape.row_blocks.div_ceil(waves);
        let places = 104 * WAVES_AT_ONCE / waves;
        let largest = rows.div_ceil(STEP).div_ceil(tiles) * STEP;
        let steps = blocks.div_ceil(places) * places * waves * largest;
        (rows * shape.row_blocks) as f64 / steps as f64
    }

    #[test]
    fn dense_products_of_many_rows_fill_the_device() {
        // 450 rows are a step of the bucket of 512, and 890 of that of 1024.
        let cases = [
            (512, 450, 0.73),
            (1024, 890, 0.85),
            (1024, 1024, 0.86),
            (1536, 1536, 0.86),
            (2048, 2048, 0.86),
        ];
        for (bucket, rows, least) in cases {
            for product in [Product::Qkv, Product::AttnOut] {
                let filled = filled(product, bucket, rows);
                assert!(filled >= least, "{product:?} of {rows} rows: {filled:.3}");
            }
        }
    }

    /// 26 tiles would be two small blocks on a compute unit, whose loops read weights twice as often.
    #[test]
    fn a_compute_unit_has_one_large_block_rather_than_two_small_ones() {
        let target = Target {
            multiprocessors: 304,
            ..TARGET
        };
        for rows in [1024, 1536] {
            let shape = shape_20b(Product::AttnOut, rows, 1);
            assert_eq!(target.gemm(&shape).unwrap().launch.blocks, 13 * 23, "{rows} rows");
        }
    }

    /// Tiles hold the most rows of the step, and more than two of them have more than two steps of 16.
    #[test]
    fn tiles_hold_their_rows() {
        for rows in 17..4200 {
            for product in [Product::Qkv, Product::AttnOut] {
                let shape = shape_20b(product, rows, 1);
                let Launch { kernel, blocks, .. } = TARGET.gemm(&shape).unwrap().launch;
                let tiles = blocks / shape.row_blocks.div_ceil(kernel.threads / WAVE);
                let largest = rows.div_ceil(STEP).div_ceil(tiles);
                assert!(kernel.cut.spreads && largest <= kernel.tokens / STEP);
                assert!(tiles <= 2 || largest > 2, "{product:?} of {rows} rows: {tiles} tiles");
            }
        }
    }

    #[test]
    fn matrices_are_filled_up_to_whole_slabs() {
        assert_eq!(TARGET.packed(PackedFormat::Mxfp4, 5760, 2880).bytes, 180 * 45 * 1088);
        assert_eq!(
            TARGET.packed(PackedFormat::W16, 201_088, 32),
            PackedShape {
                row_blocks: 6284,
                bytes: 6284 * 4096
            }
        );
    }
}
