//! What the library launches for an operation of a model in whole steps of so many rows: the choice alone, which is a
//! function of a target and a shape and needs no device.

use super::ladder::{Ladder, Setup};
use getp::backend::gpu::attention_plan::{Cuts, Planned, Sharing, plan_decode};
use getp::backend::gpu::attention_runs::{Load, Pieces, RunVerdict, least_run, runs};
use getp::backend::gpu::catalogue::Op;
use getp::backend::gpu::family::verdict::Said;
use getp::backend::gpu::launch::Launch;
use getp::backend::gpu::shapes::{AttentionWork, GemmShape, MatrixForm, NormWork, Product};
use getp::backend::gpu::target::Target;
use getp::config::ModelConfig;
use getp::error::Result;
use getp::tensors::TensorId;
use getp::weights::WeightFormat;

/// The norm that adds the experts' outputs.
const ADDS: NormWork = NormWork {
    adds: true,
    wanted_only: false,
    for_router: false,
};
const ROUTER: MatrixForm = MatrixForm::Wire(WeightFormat::Bf16);

/// What is chosen for.
#[derive(Clone, Copy)]
pub struct Case<'a> {
    pub target: &'a Target,
    pub config: &'a ModelConfig,
    pub ladder: Ladder,
    pub setup: Setup,
    pub windowed: bool,
    pub rows: usize,
    /// Positions before each row.
    pub context: usize,
}

impl Case<'_> {
    /// The products that do the operation: of all logits, and of the largest alone.
    pub fn products(&self) -> &'static [Product] {
        match self.ladder {
            Ladder::Qkv => &[Product::Qkv],
            Ladder::AttnOut => &[Product::AttnOut],
            Ladder::Mlp1 => &[Product::Mlp1],
            Ladder::Mlp2 => &[Product::Mlp2],
            Ladder::Unembed => &[Product::Logits, Product::Greedy],
            _ => &[],
        }
    }

    /// A product's shape, with its matrix in the format that released models have.
    pub fn shape(&self, product: Product) -> GemmShape {
        let (layer, expert) = (0, 0);
        let (tensor, format) = match product {
            Product::Qkv => (TensorId::Qkv { layer }, WeightFormat::Bf16),
            Product::AttnOut => (TensorId::AttnOut { layer }, WeightFormat::Bf16),
            Product::Mlp1 => (TensorId::Mlp1 { layer, expert }, WeightFormat::Mxfp4),
            Product::Mlp2 => (TensorId::Mlp2 { layer, expert }, WeightFormat::Mxfp4),
            Product::Greedy | Product::Logits => (TensorId::Unembedding, WeightFormat::Bf16),
        };
        let format = if self.setup.w16_experts {
            WeightFormat::Bf16
        } else {
            format
        };
        let numbers = &self.setup.numbers;
        let form = self.target.form(tensor, format, self.config, numbers);
        let target = self.target;
        target.product_shape(self.config, product, form, numbers.elements, numbers.terms, self.rows)
    }

    /// What is launched for a product, as `GpuOps` does it.
    pub fn product(&self, product: Product) -> Result<Launch> {
        let shape = self.shape(product);
        let chosen = self.target.gemm(&shape)?.launch;
        Ok(match product {
            Product::Mlp1 => self.target.mlp1(&shape, self.rows, chosen).launch(),
            _ => chosen,
        })
    }

    /// What is said of each kernel that the choice is between.
    pub fn said(&self) -> Result<Vec<Said>> {
        let Self { target, config, .. } = self;
        let numbers = self.setup.numbers;
        Ok(match self.ladder {
            Ladder::Norm => target.norm_verdicts(config, &numbers, &ADDS, self.rows),
            Ladder::Router => target.norm_route_verdicts(config, &numbers, ROUTER, self.rows),
            Ladder::Qkv => {
                let shape = self.shape(Product::Qkv);
                let mut said = target.verdicts(&shape);
                said.extend(target.norm_qkv_verdicts(config, &shape));
                said
            }
            Ladder::AttentionDecode | Ladder::AttentionPrefill => {
                target.attention_verdicts(config, numbers.kv, numbers.exact, &self.attention()?)
            }
            _ => {
                let products = self.products().iter();
                products
                    .flat_map(|&product| target.verdicts(&self.shape(product)))
                    .collect()
            }
        })
    }

    /// Of decode attention: the first key that each row attends to, and the number of its keys.
    fn keys(&self) -> (usize, usize) {
        let all = self.context + 1;
        let seen = if self.windowed { self.config.sliding_window } else { all };
        (all.saturating_sub(seen), all.min(seen))
    }

    /// How long the runs of units are into which rows that decode may be split, and what is said of each.
    pub fn runs(&self) -> [(usize, RunVerdict); 3] {
        let (first, keys) = self.keys();
        let pieces = |run| Pieces::of(self.rows, first, keys, run);
        runs(&self.load(), keys, self.rows * keys, pieces)
    }

    fn load(&self) -> Load {
        Load {
            kv_heads: self.config.n_kv_heads,
            at_once: self.target.attention_items_at_once(),
            least_run: least_run(self.rows, self.target.attention_team_rows()),
            most_partials: usize::MAX,
            by_position: false,
            whole_rows: !self.windowed && self.target.family.attends_to_whole_rows(),
        }
    }

    /// Decode attention's items, or the tiles of as many rows of a prompt.
    fn attention(&self) -> Result<AttentionWork> {
        let (rows, (first, keys)) = (self.rows, self.keys());
        let decodes = self.ladder == Ladder::AttentionDecode;
        let (mut items, mut planned) = (Vec::new(), Planned::default());
        if decodes {
            let contexts = (0..rows).map(|row| (row, first, keys));
            let alone = Sharing::Pairs(&[]);
            planned = plan_decode(contexts, alone, &self.load(), &mut Cuts::default(), &mut items)?;
        }
        Ok(AttentionWork {
            windowed: self.windowed,
            rows,
            items: items.len(),
            shares_keys: false,
            whole_rows: planned.whole > 0,
            tiles: if decodes {
                0
            } else {
                rows.div_ceil(self.target.prefill_rows())
            },
        })
    }

    /// What is launched for the operation; of the unembedding, for what this kernel's kind gives, and of queries, keys
    /// and values also in layers whose norm a kernel of this kind does.
    pub fn launched(&self, op: Op) -> Result<Vec<Launch>> {
        let &Self {
            target,
            config,
            ladder,
            setup,
            rows,
            ..
        } = self;
        let numbers = setup.numbers;
        Ok(match ladder {
            Ladder::Unembed if op == Op::GreedyLogits => vec![self.product(Product::Greedy)?],
            Ladder::Qkv if op == Op::NormQkv => {
                let both = target.norm_qkv(config, &self.shape(Product::Qkv));
                both.into_iter().collect()
            }
            Ladder::Norm => {
                vec![target.norm(config, &numbers, &ADDS, rows)]
            }
            Ladder::Router => {
                let both = target.norm_route(config, &numbers, ROUTER, rows);
                vec![both.map_or_else(|| target.route(rows), |both| both.launch)]
            }
            Ladder::AttentionDecode | Ladder::AttentionPrefill => {
                let launches = target.attention(config, numbers.kv, numbers.exact, &self.attention()?)?;
                launches.into_iter().flatten().collect()
            }
            Ladder::Qkv | Ladder::AttnOut | Ladder::Mlp1 | Ladder::Mlp2 | Ladder::Unembed => {
                vec![self.product(self.products()[0])?]
            }
        })
    }
}
