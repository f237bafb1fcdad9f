//! What the library launches for an operation of a model in whole steps of so many rows: the choice alone, which is a
//! function of a target and a shape and needs no device.

use super::ladder::{Ladder, Setup};
use getp::backend::gpu::catalogue::Op;
use getp::backend::gpu::launch::Launch;
use getp::backend::gpu::shapes::{AttentionWork, GemmShape, MatrixForm, NormWork, Product};
use getp::backend::gpu::target::Target;
use getp::config::ModelConfig;
use getp::error::Result;
use getp::tensors::TensorId;
use getp::weights::WeightFormat;

/// What is chosen for.
#[derive(Clone, Copy)]
pub struct Case<'a> {
    pub target: &'a Target,
    pub config: &'a ModelConfig,
    pub ladder: Ladder,
    pub setup: Setup,
    pub windowed: bool,
    pub rows: usize,
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

    /// What is launched for the operation; of the unembedding, for what this kernel's kind gives.
    pub fn launched(&self, op: Op) -> Result<Vec<Launch>> {
        let &Self {
            target,
            config,
            ladder,
            setup,
            windowed,
            rows,
        } = self;
        let numbers = setup.numbers;
        Ok(match ladder {
            Ladder::Unembed if op == Op::GreedyLogits => vec![self.product(Product::Greedy)?],
            Ladder::Norm => {
                let adds = NormWork {
                    adds: true,
                    ..NormWork::default()
                };
                vec![target.norm(config, &numbers, &adds, rows)]
            }
            Ladder::Router => {
                let both = target.norm_route(config, &numbers, MatrixForm::Wire(WeightFormat::Bf16), rows);
                vec![both.map_or_else(|| target.route(rows), |both| both.launch)]
            }
            Ladder::AttentionDecode | Ladder::AttentionPrefill => {
                let decodes = ladder == Ladder::AttentionDecode;
                let work = AttentionWork {
                    windowed,
                    rows,
                    items: if decodes { rows } else { 0 },
                    tiles: if decodes { 0 } else { rows },
                };
                let launches = target.attention(config, numbers.kv, numbers.exact, &work)?;
                launches.into_iter().flatten().collect()
            }
            Ladder::Qkv | Ladder::AttnOut | Ladder::Mlp1 | Ladder::Mlp2 | Ladder::Unembed => {
                vec![self.product(self.products()[0])?]
            }
        })
    }
}
