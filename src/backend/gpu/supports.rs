//! Whether a family's kernels take a model, asked before a device is used.

use super::catalogue::{Elements, Kernel, Op};
use super::shapes::{AttentionWork, GemmShape, MatrixForm, Product};
use super::target::Target;
use crate::config::ModelConfig;
use crate::options::StepLimits;
use crate::weights::WeightFormat;

impl Target {
    /// Whether the family's kernels take a model in steps as large as these, or why not, in words.
    pub fn supports(&self, config: &ModelConfig, steps: &StepLimits) -> Result<(), String> {
        // Plain attention is there for what the matrix cores' does not take.
        let needed = |kernel: &&Kernel| {
            let attention = matches!(
                kernel.op,
                Op::AttentionDecode | Op::AttentionShared | Op::AttentionPrefill | Op::AttentionExact
            );
            !attention && !kernel.has_substitute()
        };
        for kernel in self.family.table().kernels.iter().filter(needed) {
            kernel.takes(config).map_err(|beyond| beyond.to_string())?;
        }
        // Prompts have fewer tiles than rows.
        let rows = steps.step_tokens;
        let work = AttentionWork {
            windowed: false,
            rows,
            items: rows,
            shares_keys: false,
            whole_rows: false,
            tiles: rows,
        };
        let attention = self.attention(config, Elements::F16, false, &work);
        attention.map_err(|error| error.to_string())?;
        self.largest_products(config, steps)
    }

    /// The products of the largest step have grids that a device can number, whatever the weights turn out to be.
    fn largest_products(&self, config: &ModelConfig, steps: &StepLimits) -> Result<(), String> {
        const ACTIVATIONS: [(Elements, usize); 4] = [
            (Elements::F16, 1),
            (Elements::Bf16, 1),
            (Elements::F16, 2),
            (Elements::Bf16, 3),
        ];
        for product in Product::ALL {
            let experts = matches!(product, Product::Mlp1 | Product::Mlp2);
            let outputs = outputs(config, product);
            let rows = match product {
                Product::Greedy | Product::Logits => steps.max_batch,
                _ => steps.step_tokens,
            };
            let all_forms: &[MatrixForm] = match experts {
                true => &[MatrixForm::Mxfp4, MatrixForm::W16, MatrixForm::Wire(WeightFormat::F32)],
                false => &[MatrixForm::W16, MatrixForm::Wire(WeightFormat::F32)],
            };
            for &form in all_forms {
                for (elements, terms) in ACTIVATIONS {
                    // What the family does not multiply goes through the plain kernels, as float32 does.
                    let multiplies = |weights| self.multiplies(product, weights, elements, terms, outputs);
                    if !form.packed().is_none_or(multiplies) {
                        continue;
                    }
                    let shape = self.product_shape(config, product, form, elements, terms, rows);
                    self.gemm(&shape).map_err(|error| error.to_string())?;
                }
            }
        }
        Ok(())
    }

    /// A model's product in a step of so many rows.
    pub fn product_shape(
        &self,
        config: &ModelConfig,
        product: Product,
        form: MatrixForm,
        elements: Elements,
        terms: usize,
        rows: usize,
    ) -> GemmShape {
        let experts = config.experts_per_token;
        let (groups, rows) = match product {
            Product::Mlp1 | Product::Mlp2 => (config.n_experts, rows * experts),
            _ => (1, rows),
        };
        let n = outputs(config, product);
        GemmShape {
            product,
            form,
            elements,
            terms,
            rows,
            groups,
            n,
            row_blocks: n.div_ceil(self.family.block_rows()),
        }
    }
}

/// Rows of a product's weights.
fn outputs(config: &ModelConfig, product: Product) -> usize {
    match product {
        Product::Qkv => config.qkv_dim(),
        Product::AttnOut | Product::Mlp2 => config.hidden_dim,
        Product::Mlp1 => 2 * config.intermediate_dim,
        Product::Greedy | Product::Logits => config.vocab_size,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::gpu::family::FAMILIES;

    fn targets() -> impl Iterator<Item = Target> {
        let multiprocessors = 132;
        FAMILIES.iter().map(move |&family| Target {
            family,
            multiprocessors,
        })
    }

    #[test]
    fn released_models_run_anywhere() {
        for config in [
            ModelConfig::preset_7m(),
            ModelConfig::preset_20b(),
            ModelConfig::preset_120b(),
        ] {
            for target in targets() {
                assert_eq!(target.supports(&config, &StepLimits::GPU), Ok(()), "{target:?}");
            }
        }
    }

    /// What a family's own products do not take there are plain kernels for.
    #[test]
    fn odd_widths_run_anywhere() {
        let odd = ModelConfig {
            hidden_dim: 2881,
            ..ModelConfig::preset_20b()
        };
        for target in targets() {
            assert_eq!(target.supports(&odd, &StepLimits::GPU), Ok(()), "{target:?}");
        }
    }

    /// The most rows a step may have by its option.
    #[test]
    fn steps_of_more_parts_than_a_grid_can_number_are_refused() {
        let steps = |step_tokens| StepLimits {
            max_batch: 1024,
            step_tokens,
        };
        let config = ModelConfig::preset_120b();
        for target in targets() {
            assert_eq!(target.supports(&config, &steps(65_536)), Ok(()), "{target:?}");
            let why = target.supports(&config, &steps(1 << 26)).unwrap_err();
            assert!(why.contains("lower GETP_STEP_TOKENS"), "{why}");
        }
    }
}
