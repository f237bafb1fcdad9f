//! What a step takes on each device of a group, whatever it has in it.

use crate::layer::STEP_LAUNCHES;
use crate::model::{LAUNCH, Model};
use getp::backend::gpu::shapes::Product;
use getp::backend::gpu::shared_keys::{PagedRow, Pair, Scratch, pairs};
use getp::backend::gpu::stage::bucket;
use getp::batch::StepPlan;
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ops::Range;

/// By counts of rows: seconds of a layer without attention, and of what stands behind the layers.
pub struct Costs<'a> {
    model: &'a Model<'a>,
    layers: RefCell<BTreeMap<usize, f64>>,
    heads: RefCell<BTreeMap<usize, f64>>,
}

/// A model's layers with a window, and without one.
struct Kinds {
    windowed: f64,
    full: f64,
}

impl<'a> Costs<'a> {
    pub fn new(model: &'a Model<'_>) -> Self {
        Self {
            model,
            layers: RefCell::default(),
            heads: RefCell::default(),
        }
    }

    /// Seconds of a step on the devices that have these layers.
    pub fn of(&self, plan: &StepPlan, devices: &[Range<usize>]) -> Vec<f64> {
        let config = self.model.config;
        let layer = interpolated(&self.layers, plan.rows(), |rows| {
            self.model.layer(bucket(rows, usize::MAX), rows).seconds()
        });
        let head = interpolated(&self.heads, plan.logits.len(), |rows| {
            let product = self.model.product(Product::Greedy, bucket(rows, usize::MAX), &[rows]);
            product.seconds + STEP_LAUNCHES as f64 * LAUNCH
        });
        let attention = self.attention(plan);
        let of_stage = |layers: &Range<usize>| {
            let windowed = layers.clone().filter(|&layer| config.is_windowed(layer)).count();
            let full = layers.len() - windowed;
            let head = if layers.end == config.n_layers { head } else { 0.0 };
            layers.len() as f64 * layer + windowed as f64 * attention.windowed + full as f64 * attention.full + head
        };
        devices.iter().map(of_stage).collect()
    }

    /// Rows that decode read their keys and values, two that share some these once; prompts compute.
    fn attention(&self, plan: &StepPlan) -> Kinds {
        let window = self.model.config.sliding_window;
        let (decoding, prompts) = plan.chunks.split_at(plan.decode_chunks);
        let (mut seen, mut all) = (0, 0);
        for chunk in decoding {
            let keys = chunk.first_position + 1;
            seen += keys.min(window);
            all += keys;
        }
        let rows = decoding.iter().map(|chunk| PagedRow {
            position: chunk.first_position,
            pages: &plan.tables[chunk.full.clone()],
        });
        let mut found = Vec::new();
        pairs(&rows.collect::<Vec<_>>(), &mut Scratch::default(), &mut found).expect("there is memory");
        all -= found.iter().map(Pair::keys).sum::<usize>();
        let mut kinds = Kinds {
            windowed: self.model.reading(seen as f64),
            full: self.model.reading(all as f64),
        };
        if !prompts.is_empty() {
            let chunks: Vec<_> = prompts.iter().map(|chunk| (chunk.first_position, chunk.rows)).collect();
            // A layer counts one launch of attention already.
            let launch = if decoding.is_empty() { 0.0 } else { LAUNCH };
            kinds.windowed += self.model.prompts(&chunks, Some(window)) + launch;
            kinds.full += self.model.prompts(&chunks, None) + launch;
        }
        kinds
    }
}

/// What so many rows cost, between the nearest of 16 to 32 counts for each power of two, each computed once.
fn interpolated(known: &RefCell<BTreeMap<usize, f64>>, rows: usize, of: impl Fn(usize) -> f64) -> f64 {
    let step = (rows.next_power_of_two() / 32).max(1);
    let at = |rows| *known.borrow_mut().entry(rows).or_insert_with(|| of(rows));
    let below = rows / step * step;
    match rows - below {
        0 => at(below),
        more => at(below) + (at(below + step) - at(below)) * more as f64 / step as f64,
    }
}
