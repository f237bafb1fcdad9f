//! What the choice of a kernel depends on, and what is chosen.

use super::catalogue::{Elements, Op, PackedFormat};
use super::launch::Launch;
use crate::tensors::TensorId;
use crate::weights::WeightFormat;

/// How a replica computes.
#[derive(Clone, Copy, Debug)]
pub struct Numbers {
    /// Of activations: FP16 or BF16.
    pub elements: Elements,
    /// Of keys, values and queries: the same in `fast`, float32 in `exact`.
    pub kv: Elements,
    /// Terms an activation: 1 in `fast`.
    pub terms: usize,
    /// Products, norms and attention as close to the float32 baseline as a GPU can, see docs/precision.md.
    pub exact: bool,
}

impl Numbers {
    /// In `fast` or in `exact`, with activations in this format, of which `exact` has two FP16 or three BF16 terms.
    pub fn new(elements: Elements, exact: bool) -> Self {
        let terms = match (exact, elements) {
            (false, _) => 1,
            (true, Elements::Bf16) => 3,
            (true, _) => 2,
        };
        Self {
            elements,
            kv: if exact { Elements::F32 } else { elements },
            terms,
            exact,
        }
    }
}

/// How blocks take experts' tiles.
#[derive(Clone, Copy, Debug)]
pub struct ExpertCuts {
    /// The most steps of 16 rows of a tile.
    pub tile_steps: usize,
    /// Blocks that the device works on at once.
    pub places: usize,
}

/// The shape of a step: what of it the choice and the grids of kernels depend on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct StepShape {
    /// At least its rows.
    pub rows: usize,
    /// At least its rows whose logits are wanted.
    pub logits_rows: usize,
    /// At least its items of decode attention, full or windowed; 0 if it has none.
    pub decode_items: usize,
    /// Whether there are items of keys that several decoding rows see.
    pub shares_keys: bool,
    /// Whether there are items of whole rows of any length.
    pub whole_rows: bool,
    /// At least its tiles of prefill attention; 0 if it has none.
    pub prefill_tiles: usize,
    /// Whether whole rows of logits are wanted.
    pub logits: bool,
    /// How many tokens may be sampled, if not all.
    pub drawable: Option<usize>,
    /// Whether tokens are drawn from them.
    pub draws: bool,
    /// Whether some are scored.
    pub scores: bool,
}

/// How a device holds a matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MatrixForm {
    /// MXFP4, packed for the matrix cores.
    Mxfp4,
    /// 16 bits a value, packed for the matrix cores.
    W16,
    /// The same, the rows in pairs half a head apart.
    Heads,
    /// The wire format: matrices for the plain kernels, and those whose rows are looked up one by one.
    Wire(WeightFormat),
}

impl MatrixForm {
    /// The format in which it is packed for the matrix cores; `None` in the wire format.
    pub const fn packed(self) -> Option<PackedFormat> {
        match self {
            Self::Mxfp4 => Some(PackedFormat::Mxfp4),
            Self::W16 | Self::Heads => Some(PackedFormat::W16),
            Self::Wire(_) => None,
        }
    }
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

impl Product {
    /// Every product.
    pub const ALL: [Self; 6] = [
        Self::Qkv,
        Self::AttnOut,
        Self::Mlp1,
        Self::Mlp2,
        Self::Greedy,
        Self::Logits,
    ];

    /// Those that a tensor's matrix is multiplied in; none if it is read otherwise.
    pub fn of(tensor: TensorId) -> &'static [Self] {
        match tensor {
            TensorId::Qkv { .. } => &[Self::Qkv],
            TensorId::AttnOut { .. } => &[Self::AttnOut],
            TensorId::Mlp1 { .. } => &[Self::Mlp1],
            TensorId::Mlp2 { .. } => &[Self::Mlp2],
            TensorId::Unembedding => &[Self::Greedy, Self::Logits],
            _ => &[],
        }
    }

    /// What the matrix cores' kernels do for it.
    pub(super) fn op(self) -> Op {
        match self {
            Self::Qkv => Op::Qkv,
            Self::AttnOut => Op::AttnOut,
            Self::Mlp1 => Op::Mlp1,
            Self::Mlp2 => Op::Mlp2,
            Self::Greedy => Op::GreedyLogits,
            Self::Logits => Op::Logits,
        }
    }
}

/// What the choice of a product's kernel depends on.
#[derive(Clone, Copy, Debug)]
pub struct GemmShape {
    /// Which product.
    pub product: Product,
    /// How its weights are held.
    pub form: MatrixForm,
    /// Of activations.
    pub elements: Elements,
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

impl GemmShape {
    /// Whether its groups are experts.
    pub fn of_experts(&self) -> bool {
        matches!(self.product, Product::Mlp1 | Product::Mlp2)
    }
}

/// How to launch a product.
#[derive(Clone, Copy, Debug)]
pub struct GemmLaunch {
    /// The kernel and its blocks.
    pub launch: Launch,
    /// Greedy: candidates it leaves for each row.
    pub candidates: usize,
    /// The largest number that the kernel makes of the counts of its tiles and units.
    pub largest_count: u64,
}

/// Which rows a norm reads and what else it does.
#[derive(Clone, Copy, Debug, Default)]
pub struct NormWork {
    /// Adds the experts' outputs to the residual stream.
    pub adds: bool,
    /// Only the rows whose logits are wanted; nothing is stored to the residual stream.
    pub wanted_only: bool,
    /// Stores the router's float32 input, too.
    pub for_router: bool,
}

/// What the choice of a kernel for both norm and router depends on.
#[derive(Clone, Copy, Debug)]
pub struct NormRouteShape {
    /// Rows at most.
    pub rows: usize,
    /// Whether this is `fast`, with a router in BF16.
    pub fast_bf16: bool,
    /// Of the device.
    pub multiprocessors: usize,
}

/// Norm and router by one kernel.
#[derive(Clone, Copy, Debug)]
pub struct NormRouteLaunch {
    /// The kernel and its blocks.
    pub launch: Launch,
    /// Whether it also copies the step's only row to its experts' slots.
    pub sends: bool,
    /// Whether it tells mlp1 that row's experts before it ends.
    pub tells: bool,
}

/// Each row's experts get their slots, and the rows are copied there.
#[derive(Clone, Copy, Debug)]
pub enum SortGatherLaunch {
    /// By one kernel.
    Together(Launch),
    /// By one behind the other.
    Apart {
        /// Gives the slots.
        sort: Launch,
        /// Copies the rows.
        gather: Launch,
    },
}

/// mlp1, by how it gets the step's rows.
#[derive(Clone, Copy, Debug)]
pub enum Mlp1Launch {
    /// Its blocks sort the rows by expert themselves.
    Sorting(Launch),
    /// Reads them by an index that sort makes, which may also cut experts' rows into tiles.
    Indexing(Launch, Option<ExpertCuts>),
    /// Reads copies at their slots.
    Gathered(Launch),
}

impl Mlp1Launch {
    /// The kernel and its blocks.
    pub fn launch(self) -> Launch {
        match self {
            Self::Sorting(launch) | Self::Indexing(launch, _) | Self::Gathered(launch) => launch,
        }
    }
}

/// A packed matrix of the target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PackedShape {
    /// Row blocks.
    pub row_blocks: usize,
    /// Bytes.
    pub bytes: usize,
}

/// What a layer's attention has to do in a step.
#[derive(Clone, Copy, Debug)]
pub struct AttentionWork {
    /// Whether rows see a window of their keys.
    pub windowed: bool,
    /// Rows at most.
    pub rows: usize,
    /// Items of decode attention at most; 0: no row decodes.
    pub items: usize,
    /// Whether there are items of keys that several decoding rows see.
    pub shares_keys: bool,
    /// Whether there are items of whole rows of any length.
    pub whole_rows: bool,
    /// Tiles of prefill attention at most; 0: there are no prompts.
    pub tiles: usize,
}

/// What the launch of decode attention depends on.
#[derive(Clone, Copy, Debug)]
pub struct DecodeShape {
    /// Items at most.
    pub items: usize,
    /// Rows at most.
    pub rows: usize,
    /// Key heads.
    pub kv_heads: usize,
    /// Whether rows see a window of their keys.
    pub windowed: bool,
    /// Whether there are items of whole rows of any length.
    pub whole_rows: bool,
    /// Of the device.
    pub multiprocessors: usize,
}

#[cfg(test)]
impl GemmShape {
    /// A product of the 20b at `rows` rows of a step, its weights in row blocks of `block_rows` rows.
    pub fn of_20b(product: Product, rows: usize, elements: Elements, terms: usize, block_rows: usize) -> Self {
        let (n, groups, rows) = match product {
            Product::Qkv => (5120, 1, rows),
            Product::AttnOut => (2880, 1, rows),
            Product::Mlp1 => (5760, 32, 4 * rows),
            Product::Mlp2 => (2880, 32, 4 * rows),
            Product::Greedy | Product::Logits => (201_088, 1, rows),
        };
        Self {
            product,
            form: if groups > 1 { MatrixForm::Mxfp4 } else { MatrixForm::W16 },
            elements,
            terms,
            rows,
            groups,
            n,
            row_blocks: n.div_ceil(block_rows),
        }
    }
}
