//! What the parts of a step take, whatever it has in it.

use crate::layer::STEP_LAUNCHES;
use crate::model::{LAUNCH, Model};
use crate::play::{Costs, Parts, decoding_keys, interpolated};
use getp::backend::gpu::shapes::Product;
use getp::backend::gpu::shared_keys::{PagedRow, Pair, Scratch, pairs};
use getp::backend::gpu::stage::bucket;
use getp::batch::StepPlan;
use std::cell::RefCell;
use std::collections::BTreeMap;

/// Sixteen steps of rows from a power of two to the next: see [`interpolated`].
const COUNTS: usize = 32;

/// By counts of rows: seconds of a layer without attention, and of what stands behind the layers.
pub struct ByModel<'a> {
    model: &'a Model<'a>,
    layers: RefCell<BTreeMap<usize, f64>>,
    heads: RefCell<BTreeMap<usize, f64>>,
}

impl<'a> ByModel<'a> {
    pub fn new(model: &'a Model<'_>) -> Self {
        Self {
            model,
            layers: RefCell::default(),
            heads: RefCell::default(),
        }
    }

    /// Of layers with a window, and without one. Rows that decode read their keys and values, two that share some these
    /// once; prompts compute.
    fn attention(&self, plan: &StepPlan) -> [f64; 2] {
        let window = self.model.config.sliding_window;
        let (decoding, prompts) = plan.chunks.split_at(plan.decode_chunks);
        let rows = decoding.iter().map(|chunk| PagedRow {
            position: chunk.first_position,
            pages: &plan.tables[chunk.full.clone()],
        });
        let mut found = Vec::new();
        pairs(&rows.collect::<Vec<_>>(), &mut Scratch::default(), &mut found).expect("there is memory");
        let once = decoding_keys(plan, usize::MAX) - found.iter().map(Pair::keys).sum::<usize>();
        let mut windowed = self.model.reading(decoding_keys(plan, window) as f64);
        let mut full = self.model.reading(once as f64);
        if !prompts.is_empty() {
            let chunks: Vec<_> = prompts.iter().map(|chunk| (chunk.first_position, chunk.rows)).collect();
            // A layer counts one launch of attention already.
            let launch = if decoding.is_empty() { 0.0 } else { LAUNCH };
            windowed += self.model.prompts(&chunks, Some(window)) + launch;
            full += self.model.prompts(&chunks, None) + launch;
        }
        [windowed, full]
    }
}

impl Costs for ByModel<'_> {
    fn of(&self, plan: &StepPlan) -> anyhow::Result<Parts> {
        let layer = interpolated(&self.layers, plan.rows(), COUNTS, |rows| {
            Ok(self.model.layer(bucket(rows, usize::MAX), rows).seconds())
        })?;
        let head = interpolated(&self.heads, plan.logits.len(), COUNTS, |rows| {
            let product = self.model.product(Product::Greedy, bucket(rows, usize::MAX), &[rows]);
            Ok(product.seconds + STEP_LAUNCHES as f64 * LAUNCH)
        })?;
        let [windowed, full] = self.attention(plan);
        Ok(Parts {
            layer,
            windowed,
            full,
            head,
        })
    }

    fn hop(&self, rows: usize) -> f64 {
        self.model.hop(rows)
    }
}
