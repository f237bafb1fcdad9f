//! What a family of devices does in its own way, beside the kernels of its table: one file a family. Pure functions of
//! shapes.

mod ampere;
mod cdna;
mod generic;
mod hopper;
mod mma;
pub mod verdict;

use super::args::WIRE_ROWS;
use super::catalogue::{self, Kernel, Op, Workers};
use super::launch::Launch;
use super::shapes::{DecodeShape, ExpertCuts, GemmLaunch, GemmShape, NormRouteShape, Product};
use std::fmt::Debug;
use verdict::{ANOTHER, Verdict};

const BLOCK_AN_ITEM: &str = "each KV head of an item has a block";
const BLOCK_A_ROW: &str = "each row can have a multiprocessor";
const MORE_ROWS: &str = "there are more rows than multiprocessors";
const NEEDS_BF16: &str = "it is made for `fast` with a BF16 router";

/// See the module.
pub trait Family: Debug + Sync {
    /// Its kernels.
    fn table(&self) -> &'static catalogue::Table;

    /// Bytes between one KV head's part of a page and the next.
    fn kv_head_padding(&self) -> usize {
        0
    }

    /// Items of decode attention that run at once where all multiprocessors are busy.
    fn attention_items_at_once(&self, multiprocessors: usize) -> usize {
        multiprocessors
    }

    /// What is said of each kernel for decode attention of at most so many items of at most so many rows: one at least,
    /// one of which is taken. By default the first, with a block for each key head of an item.
    fn attention_decode(&self, kernels: &[&'static Kernel], shape: &DecodeShape) -> Vec<Verdict> {
        let of = |i| match i {
            0 => Verdict::Taken(shape.items * shape.kv_heads, BLOCK_AN_ITEM),
            _ => Verdict::Passed(ANOTHER),
        };
        (0..kernels.len()).map(of).collect()
    }

    /// Rows up to which decode attention shares an item's units out by itself: those of its teams.
    fn team_rows(&self) -> usize {
        let teams = |kernel: &&Kernel| kernel.op == Op::AttentionDecode && kernel.workers == Workers::Team;
        let most = self
            .table()
            .kernels
            .iter()
            .filter(teams)
            .filter_map(|kernel| kernel.most_rows);
        most.max().unwrap_or(0)
    }

    /// Whether it has a kernel whose blocks share out rows of any length among their warps.
    fn attends_to_whole_rows(&self) -> bool {
        let mut kernels = self.table().kernels.iter();
        kernels.any(|kernel| kernel.op == Op::AttentionDecode && kernel.workers == Workers::Block)
    }

    /// Whether its decode attention takes items of two rows, whose keys it reads once for both.
    fn attends_to_two_rows(&self) -> bool {
        false
    }

    /// Blocks of prefill attention of so many tiles, one for each KV head.
    fn prefill_blocks(&self, tiles: usize, _multiprocessors: usize) -> usize {
        tiles
    }

    /// The bucket of a step's items of decode attention.
    fn decode_items(&self, items: usize) -> usize {
        items
    }

    /// What is said of each kernel for both norm and router: all there are that take the model. If none is taken, they
    /// are apart. By default the first is while each row can have a multiprocessor.
    fn norm_route(&self, shape: &NormRouteShape, kernels: &[&'static Kernel]) -> Vec<Verdict> {
        let of = |i| match i {
            0 => block_a_row(shape),
            _ => Verdict::Passed(ANOTHER),
        };
        (0..kernels.len()).map(of).collect()
    }

    /// Exponents of MXFP4 scales that decode to FP16 exactly: from where half of it is normal to where six times it is
    /// finite.
    fn mxfp4_f16_scales(&self) -> (i32, i32) {
        (-13, 13)
    }

    /// Whether the family's kernels for a product take a matrix of so many rows. Others go through the plain kernels.
    fn holds(&self, _product: Product, _rows: usize) -> bool {
        true
    }

    /// Whether rows of heads of this width are packed in pairs half a head apart, as [`Op::QkvStore`] takes them.
    fn pairs_heads(&self, _head_dim: usize) -> bool {
        false
    }

    /// Whether this kernel of mlp1 reads a step's rows by their index, so that none gathers them by expert.
    fn indexes_rows(&self, _kernel: &Kernel) -> bool {
        false
    }

    /// How blocks of this kernel take experts' tiles, if they take them as an [`ExpertCut`](super::args::ExpertCut)
    /// says.
    fn cuts(&self, _kernel: &Kernel, _multiprocessors: usize) -> Option<ExpertCuts> {
        None
    }

    /// Weight rows of a row block: those of a tile of the wire.
    fn block_rows(&self) -> usize {
        WIRE_ROWS
    }

    /// What is said of each kernel for a product: all there are for its operation, weights and activations, and for so
    /// many rows, one at least. One of them costs something. By default the largest tile made for so many rows does.
    fn verdicts(&self, shape: &GemmShape, kernels: &[&'static Kernel], _multiprocessors: usize) -> Vec<Verdict> {
        verdict::largest_tile(shape, kernels)
    }

    /// A product by this kernel: a block for each tile of each span of the weight rows that a block takes.
    fn product(&self, shape: &GemmShape, kernel: &'static Kernel, _multiprocessors: usize) -> GemmLaunch {
        blocks_of_tiles(
            shape,
            kernel,
            most_tiles(shape, kernel),
            spans(shape, kernel, self.block_rows()),
        )
    }
}

/// Every family.
pub static FAMILIES: &[&dyn Family] = &[&cdna::Cdna, &hopper::Hopper, &ampere::Ampere, &generic::Generic];

/// The family of this name.
pub fn named(name: &str) -> Option<&'static dyn Family> {
    FAMILIES.iter().find(|family| family.table().name == name).copied()
}

/// The family of an architecture's devices: the first that has them and is there, as `is_there` says of its name, or,
/// where none is, the first that has them.
pub fn of(arch: &str, is_there: impl Fn(&str) -> bool) -> Option<&'static dyn Family> {
    let names = || catalogue::platforms_of(arch).map(|(table, _)| table.name);
    named(names().find(|name| is_there(name)).or_else(|| names().next())?)
}

/// Blocks side by side that have all weight rows, in row blocks of so many.
pub(super) fn spans(shape: &GemmShape, kernel: &Kernel, block_rows: usize) -> usize {
    (shape.row_blocks * block_rows).div_ceil(kernel.cut.rows)
}

/// Tiles that cover the rows, however they fall on the experts: a group's rows in tiles, and one more for each group
/// that is not a multiple.
fn most_tiles(shape: &GemmShape, kernel: &Kernel) -> usize {
    match shape.of_experts() {
        true => shape.rows.min(shape.groups) + shape.rows / kernel.tokens,
        false => shape.rows.div_ceil(kernel.tokens),
    }
}

/// A block for each tile of each span of row blocks, which leaves a candidate for each row of logits.
fn blocks_of_tiles(shape: &GemmShape, kernel: &'static Kernel, tiles: usize, spans: usize) -> GemmLaunch {
    let blocks = tiles * spans;
    GemmLaunch {
        launch: Launch::new(kernel, blocks),
        largest_count: blocks as u64,
        candidates: match shape.product {
            Product::Greedy | Product::Logits => spans,
            _ => 0,
        },
    }
}

/// What is said of a kernel for norm and router that has a block for each row.
fn block_a_row(shape: &NormRouteShape) -> Verdict {
    match shape.rows <= shape.multiprocessors {
        true => Verdict::Taken(shape.rows, BLOCK_A_ROW),
        false => Verdict::Passed(MORE_ROWS),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::gpu::catalogue::Elements;
    use crate::backend::gpu::shapes::MatrixForm;
    use crate::backend::gpu::target::Target;

    #[test]
    fn every_table_has_a_family() {
        for table in catalogue::TABLES {
            for arch in table.platforms.iter().flat_map(|platform| platform.architectures) {
                assert_eq!(of(arch, |_| true).expect("a family").table().name, table.name);
            }
        }
        assert!(of("none", |_| true).is_none());
    }

    /// A device of which a better family has no code runs the last one's.
    #[test]
    fn what_is_not_there_has_no_devices() {
        let last = FAMILIES.last().expect("there are some").table().name;
        let of_two = catalogue::TABLES.iter().flat_map(|table| table.platforms);
        let of_two = of_two.flat_map(|platform| platform.architectures);
        let mut of_two = of_two
            .filter(|arch| catalogue::platforms_of(arch).count() > 1)
            .peekable();
        assert!(of_two.peek().is_some());
        for arch in of_two {
            let family = |is_there: &dyn Fn(&str) -> bool| of(arch, is_there).expect("a family").table().name;
            let better = family(&|_| true);
            assert_ne!(better, last);
            assert_eq!(family(&|name| name == last), last);
            assert_eq!(family(&|_| false), better);
        }
    }

    /// A family that says nothing but its table, that of the first one.
    #[derive(Debug)]
    struct Silent;

    impl Family for Silent {
        fn table(&self) -> &'static catalogue::Table {
            FAMILIES[0].table()
        }
    }

    /// A block for each span of weight rows of each tile that there may be, of the largest tile made for so many rows.
    #[test]
    fn products_have_a_block_for_each_tile() {
        let launched = |product, rows, form| {
            let target = Target {
                family: &Silent,
                multiprocessors: 1,
            };
            let shape = GemmShape {
                form,
                ..GemmShape::of_20b(product, rows, Elements::F16, 1, WIRE_ROWS)
            };
            let found = target.gemm(&shape).unwrap();
            (found.launch.kernel.tokens, found.launch.blocks, found.candidates)
        };
        assert_eq!(launched(Product::AttnOut, 1, MatrixForm::W16), (16, 90, 0));
        assert_eq!(launched(Product::AttnOut, 300, MatrixForm::W16), (128, 3 * 23, 0));
        assert_eq!(
            launched(Product::Mlp2, 32, MatrixForm::Mxfp4),
            (16, (32 + 128 / 16) * 23, 0)
        );
        assert_eq!(launched(Product::Greedy, 20, MatrixForm::W16), (64, 1571, 1571));
    }

    #[test]
    fn kernels_know_their_places_and_have_names_of_their_own() {
        for table in catalogue::TABLES {
            let mut names = std::collections::BTreeSet::new();
            for (i, kernel) in table.kernels.iter().enumerate() {
                assert_eq!(kernel.index, i);
                assert!(names.insert(kernel.name()), "{} is there twice", kernel.name());
            }
        }
    }

    /// The first thing they do is wait for the kernel before them, which may fetch the plan.
    #[test]
    fn sort_cuts_experts_rows_where_products_take_cuts() {
        for family in FAMILIES {
            let table = family.table();
            let takes = table.kernels.iter().any(|kernel| family.cuts(kernel, 104).is_some());
            assert_eq!(takes, table.cuts_experts, "{}", table.name);
        }
    }

    #[test]
    fn kernels_that_read_the_plan_late_wait_first() {
        for kernel in catalogue::TABLES.iter().flat_map(|table| table.kernels) {
            if !kernel.plan_after_predecessor {
                continue;
            }
            let text = std::fs::read_to_string(format!("kernels/{}", kernel.file)).unwrap();
            let (_, body) = text.split_once(&format!("KERNEL({}, ", kernel.name())).unwrap();
            let mut lines = body.lines().skip(1).map(str::trim);
            let first = lines.find(|line| !line.starts_with("SHARED "));
            assert_eq!(first, Some("after_predecessor();"), "{}", kernel.name());
        }
    }
}
