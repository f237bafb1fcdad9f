//! The kernels of a layer, as the library chooses them for a device and steps of so many rows.

use getp::backend::gpu::catalogue::Op;
use getp::backend::gpu::shapes::{
    GemmShape, MatrixForm, Mlp1Launch, NormRouteLaunch, Numbers, Product, SortGatherLaunch,
};
use getp::backend::gpu::target::Target;
use getp::config::ModelConfig;
use getp::weights::WeightFormat;

/// What they are chosen for: a model with weights as released ones have them.
pub struct Chosen<'a> {
    pub target: &'a Target,
    pub config: &'a ModelConfig,
    pub numbers: Numbers,
}

impl Chosen<'_> {
    /// A product.
    pub fn shape(&self, product: Product, rows: usize) -> GemmShape {
        let Numbers {
            elements, terms, exact, ..
        } = self.numbers;
        let form = match product {
            Product::Mlp1 | Product::Mlp2 => MatrixForm::Mxfp4,
            Product::Qkv => self.target.qkv_held(self.config, exact),
            _ => MatrixForm::W16,
        };
        self.target
            .product_shape(self.config, product, form, elements, terms, rows)
    }

    /// Whether queries, keys and values are rotated and stored by the kernel of their product.
    pub fn stores(&self, rows: usize) -> bool {
        let qkv = self.shape(Product::Qkv, rows);
        self.target.gemm(&qkv).expect("a kernel").launch.kernel.op == Op::QkvStore
    }

    /// mlp1, and how it gets its rows.
    pub fn mlp1(&self, rows: usize) -> Mlp1Launch {
        let shape = self.shape(Product::Mlp1, rows);
        let launch = self.target.gemm(&shape).expect("a kernel").launch;
        self.target.mlp1(&shape, rows, launch)
    }

    /// Norm and router in one kernel, where they are.
    pub fn norm_route(&self, rows: usize) -> Option<NormRouteLaunch> {
        let router = MatrixForm::Wire(WeightFormat::Bf16);
        self.target.norm_route(self.config, &self.numbers, router, rows)
    }

    /// Launches of a layer that is not a stage's first.
    pub fn launches(&self, rows: usize) -> usize {
        let norm_route = self.norm_route(rows);
        let sends = norm_route.as_ref().is_some_and(|launch| launch.sends);
        let sort_and_gather = match (self.mlp1(rows), self.target.sort_gather(rows, 1)) {
            _ if sends => 0,
            (Mlp1Launch::Sorting(_), _) => 0,
            (Mlp1Launch::Indexing(..), _) | (_, SortGatherLaunch::Together(_)) => 1,
            (_, SortGatherLaunch::Apart { .. }) => 2,
        };
        let norm_qkv = self.target.norm_qkv(self.config, &self.shape(Product::Qkv, rows));
        let norm = if norm_qkv.is_some() { 0 } else { 1 };
        let attention_and_out = 2;
        let experts = 2;
        let qkv_and_rope = if self.stores(rows) { 1 } else { 2 };
        let norm_and_route = if norm_route.is_some() { 1 } else { 2 };
        norm + attention_and_out + qkv_and_rope + norm_and_route + sort_and_gather + experts
    }
}
