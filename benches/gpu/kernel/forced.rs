//! A device's family, but with one kernel alone for an operation: so the library launches that very one, or, where it
//! never would, another that is told by its name.

use super::ladder::{Ladder, is_plain};
use getp::backend::gpu::catalogue::{self, Kernel, Op};
use getp::backend::gpu::family::Family;
use getp::backend::gpu::family::verdict::Verdict;
use getp::backend::gpu::shapes::{DecodeShape, ExpertCuts, GemmLaunch, GemmShape, NormRouteShape, Product};

/// See the module.
#[derive(Debug)]
pub struct Forced {
    family: &'static dyn Family,
    table: &'static catalogue::Table,
    kernel: Kernel,
}

impl Forced {
    /// Lives as long as the process, as every family does.
    pub fn new(family: &'static dyn Family, ladder: Ladder, kernel: &'static Kernel) -> &'static Self {
        let all = family.table();
        let kept = all.kernels.iter().filter(|other| stays(other, ladder, kernel));
        let numbered = kept.enumerate().map(|(index, kept)| Kernel {
            index,
            // From so many rows on it is faster than others, which are not there.
            least_rows: if kept.index == kernel.index {
                kept.least_rows.min(1)
            } else {
                kept.least_rows
            },
            ..*kept
        });
        let table = catalogue::Table {
            kernels: Vec::leak(numbered.collect()),
            ..*all
        };
        Box::leak(Box::new(Self {
            family,
            table: Box::leak(Box::new(table)),
            kernel: *kernel,
        }))
    }

    /// Whether a product gets the kernel if it gets this one: mlp1 that sorts is taken for that with its tile.
    fn stands_for(&self, other: &Kernel) -> bool {
        let forced = match self.kernel.op {
            Op::SortMlp1 => Kernel {
                op: Op::Mlp1,
                ..self.kernel
            },
            _ => self.kernel,
        };
        forced.name() == other.name()
    }
}

/// Whether a kernel stays in the table where `forced` is to do the operation. The plain ones do: every family has them,
/// and they come last. So do other tiles of a product, which tell how its weights are packed.
fn stays(kernel: &Kernel, ladder: Ladder, forced: &Kernel) -> bool {
    if kernel.index == forced.index || !ladder.ops().contains(&kernel.op) {
        return true;
    }
    match kernel.op {
        Op::NormRoute => kernel.variant.is_empty() && forced.op == Op::NormRoute,
        Op::SortMlp1 | Op::NormQkv => false,
        _ => is_plain(kernel) || kernel.weights.is_some() && (forced.weights.is_some() || forced.op == Op::NormQkv),
    }
}

impl Family for Forced {
    fn table(&self) -> &'static catalogue::Table {
        self.table
    }

    fn kv_head_padding(&self) -> usize {
        self.family.kv_head_padding()
    }

    fn attention_items_at_once(&self, multiprocessors: usize) -> usize {
        self.family.attention_items_at_once(multiprocessors)
    }

    fn attention_decode(&self, kernels: &[&'static Kernel], shape: &DecodeShape) -> Vec<Verdict> {
        self.family.attention_decode(kernels, shape)
    }

    fn attends_to_two_rows(&self) -> bool {
        self.family.attends_to_two_rows()
    }

    fn prefill_blocks(&self, tiles: usize, multiprocessors: usize) -> usize {
        self.family.prefill_blocks(tiles, multiprocessors)
    }

    fn decode_items(&self, items: usize) -> usize {
        self.family.decode_items(items)
    }

    fn norm_route(&self, shape: &NormRouteShape, kernels: &[&'static Kernel]) -> Vec<Verdict> {
        self.family.norm_route(shape, kernels)
    }

    fn mxfp4_f16_scales(&self) -> (i32, i32) {
        self.family.mxfp4_f16_scales()
    }

    fn holds(&self, product: Product, rows: usize) -> bool {
        self.family.holds(product, rows)
    }

    fn pairs_heads(&self, head_dim: usize) -> bool {
        self.family.pairs_heads(head_dim)
    }

    fn indexes_rows(&self, kernel: &Kernel) -> bool {
        self.family.indexes_rows(kernel)
    }

    fn cuts(&self, kernel: &Kernel, multiprocessors: usize) -> Option<ExpertCuts> {
        self.family.cuts(kernel, multiprocessors)
    }

    fn block_rows(&self) -> usize {
        self.family.block_rows()
    }

    /// The forced one, unless it must not run.
    fn verdicts(&self, shape: &GemmShape, kernels: &[&'static Kernel], multiprocessors: usize) -> Vec<Verdict> {
        let mut said = self.family.verdicts(shape, kernels, multiprocessors);
        let may = |(kernel, verdict): (&&'static Kernel, &Verdict)| {
            self.stands_for(kernel) && !matches!(verdict, Verdict::Refused(_))
        };
        if let Some(forced) = kernels.iter().zip(&said).position(may) {
            said.fill(Verdict::Passed("another is forced"));
            said[forced] = Verdict::Costs(0);
        }
        said
    }

    fn product(&self, shape: &GemmShape, kernel: &'static Kernel, multiprocessors: usize) -> GemmLaunch {
        self.family.product(shape, kernel, multiprocessors)
    }
}
