//! What a range of layers asks of a device: memory, and time. The times' ratios meet those of two stages on an H200
//! within 3 %.

use super::cut::cut;
use crate::backend::gpu::args::{ExpertCut, PARTIAL_FLOATS};
use crate::backend::gpu::attention_runs::max_partials;
use crate::backend::gpu::driver::DeviceMemory;
use crate::backend::gpu::kv::page_bytes;
use crate::backend::gpu::ops::{SLACK_ROWS, slots, y_elements};
use crate::backend::gpu::stage::{Common, reserved_bytes};
use crate::backend::gpu::target::Target;
use crate::config::ModelConfig;
use crate::kv_blocks::block_bytes;
use crate::options::Options;
use crate::tensors::{Field, Holds, TensorId};
use crate::weights::{RowMajor, WeightFormat};
use std::ops::Range;

/// Bytes that a device's memory moves in a second, and operations that its matrix cores do, of the products below: an
/// H200's, as the benches' records have them. Other devices' are in a like proportion.
const BYTES_PER_S: f64 = 4.2e12;
const FLOPS_PER_S: f64 = 7.5e14;
/// By how much a stage's parts take longer than the device's rates say.
#[derive(Clone, Copy, Debug)]
pub struct Factors {
    /// Of what a layer's weights take.
    pub weights: f64,
    /// Of what its products take, partly beside the weights.
    pub products: f64,
    /// Of the longer of the two of the unembedding: alone it comes close to it, in long runs of all kernels not.
    pub head: f64,
}

/// Found by `cargo bench --bench gpu --features cuda -- demand`; the unit test has what was measured.
pub const FACTORS: Factors = Factors {
    weights: 1.17,
    products: 1.18,
    head: 1.27,
};

/// Seconds of a stage's parts by the device's rates.
#[derive(Clone, Copy, Debug, Default)]
pub struct Parts {
    /// The layers' weights.
    pub weights: f64,
    /// Their products.
    pub products: f64,
    /// The unembedding.
    pub head: f64,
    /// Keys, values and the embedding, which take what the rates say.
    pub others: f64,
}

impl Parts {
    /// Seconds of the stage.
    pub fn seconds(&self, factors: &Factors) -> f64 {
        let scaled = factors.weights * self.weights + factors.products * self.products + factors.head * self.head;
        scaled + self.others
    }
}

/// A model on devices of a kind.
pub struct Demand<'a> {
    /// The model, and the sizes of steps.
    pub common: &'a Common,
    /// The device.
    pub target: &'a Target,
}

impl Demand<'_> {
    /// The layers of each of these devices, if the model fits them beside a KV cache for so many sequences: so that the
    /// slowest stage is as fast as can be.
    pub fn cut(&self, memory: &[DeviceMemory], sequences: usize, options: &Options) -> Option<Vec<Range<usize>>> {
        let fits = |stage: usize, layers: &Range<usize>| {
            let DeviceMemory { free, total } = memory[stage];
            self.bytes(layers, sequences, options, total) <= free
        };
        let layers = self.common.config.n_layers;
        cut(layers, memory.len(), |layers| self.seconds(layers), fits)
    }

    /// Device memory of a stage with a KV cache for so many sequences of the model's `seq_len`; what is left to the
    /// runtime, and to logits of a run that draws, included.
    pub fn bytes(&self, layers: &Range<usize>, sequences: usize, options: &Options, total_bytes: u64) -> u64 {
        let weights = self.weight_bytes(layers);
        let logits = if self.is_last(layers) {
            self.common.logits_bytes()
        } else {
            0
        };
        let beside = self.workspace_bytes(layers, sequences) + self.kv_bytes(layers, sequences, options) + logits;
        weights + beside.max(self.wire_bytes(layers)) + reserved_bytes(total_bytes)
    }

    fn is_last(&self, layers: &Range<usize>) -> bool {
        layers.end == self.common.config.n_layers
    }

    /// The weights of these layers in the formats that released models have.
    pub fn weight_bytes(&self, layers: &Range<usize>) -> u64 {
        let config = &self.common.config;
        let of_array = |array: Field| {
            let [all, members] = array.counts(config);
            let here = (0..all).filter(|&layer| layers.contains(&array.goes_with(layer, config)));
            here.count() * members * self.tensor_bytes(array.id(0, 0))
        };
        Field::IN_FILE_ORDER.into_iter().map(of_array).sum::<usize>() as u64
    }

    fn tensor_bytes(&self, id: TensorId) -> usize {
        let [rows, cols] = id.shape(&self.common.config);
        match id.place().0.holds() {
            Holds::Norm | Holds::Bias => 4 * rows * cols,
            Holds::Lookup | Holds::Router => 2 * rows * cols,
            holds => {
                let format = WeightFormat::expected(holds);
                let Common { config, numbers, .. } = self.common;
                match self.target.form(id, format, config, numbers).packed() {
                    Some(weights) => self.target.packed(weights, rows, cols).bytes,
                    None => RowMajor.bytes(format, rows, cols),
                }
            }
        }
    }

    /// The largest tensor as it comes from the host.
    fn wire_bytes(&self, layers: &Range<usize>) -> u64 {
        let c = &self.common.config;
        let bytes = |format, id: TensorId| {
            let [rows, cols] = id.shape(c);
            RowMajor.bytes(format, rows, cols)
        };
        let (layer, expert) = (0, 0);
        let tables = if layers.start == 0 || self.is_last(layers) {
            bytes(WeightFormat::Bf16, TensorId::Unembedding)
        } else {
            0
        };
        let experts = c.n_experts * bytes(WeightFormat::Mxfp4, TensorId::Mlp1 { layer, expert });
        tables.max(experts) as u64
    }

    /// Activations, and what operations use among themselves: mostly what follows from the rows of a step, and for
    /// attention from the keys of so many sequences.
    pub fn workspace_bytes(&self, layers: &Range<usize>, sequences: usize) -> u64 {
        let Common {
            config: c,
            numbers,
            rows,
            ..
        } = self.common;
        let (rows, terms, slots) = (*rows, numbers.terms, slots(c, *rows));
        let tiled = |rows: usize, width: usize| 2 * terms * (rows + SLACK_ROWS) * width.next_multiple_of(64);
        let keys = self
            .common
            .keys_of(sequences * self.common.kv_blocks_of(c.seq_len).all());
        let partials = max_partials(keys, c.n_kv_heads, self.target.attention_items_at_once());
        let hops = usize::from(layers.start > 0) + usize::from(!self.is_last(layers));
        let bytes = 4 * rows * c.hidden_dim * (2 + hops)
            + tiled(rows, c.hidden_dim)
            + 4 * rows * c.qkv_dim()
            + tiled(rows, c.q_dim())
            + tiled(slots, c.intermediate_dim)
            + tiled(slots, c.hidden_dim)
            + slots * c.hidden_dim * y_elements(numbers).bytes()
            + rows * c.q_dim() * numbers.kv.bytes()
            + 4 * PARTIAL_FLOATS * partials * c.n_kv_heads
            + 4 * slots
            + 2 * size_of::<ExpertCut>() * c.n_experts
            + 4 * c.head_dim * c.longest().min(131_072);
        bytes as u64
    }

    /// Keys and values of so many sequences, or what the user has set.
    fn kv_bytes(&self, layers: &Range<usize>, sequences: usize, options: &Options) -> u64 {
        if options.kv_mb > 0 {
            return (options.kv_mb as u64) << 20;
        }
        let (config, numbers) = (&self.common.config, &self.common.numbers);
        let block_bytes = block_bytes(config, layers, page_bytes(config, numbers.kv, self.target));
        (sequences * self.common.kv_blocks_of(config.seq_len).all() * block_bytes) as u64
    }

    /// Seconds that a stage takes, compared with other ranges of layers, in steps of as many rows as there may be.
    pub fn seconds(&self, layers: &Range<usize>) -> f64 {
        self.parts(layers).seconds(&FACTORS)
    }

    /// What a stage's seconds come from.
    pub fn parts(&self, layers: &Range<usize>) -> Parts {
        let c = &self.common.config;
        let rows = self.common.logits_rows as f64;
        let values = |id: TensorId| id.shape(c).into_iter().product::<usize>() as f64;
        let mut parts = Parts::default();
        for layer in layers.clone() {
            let dense = values(TensorId::Qkv { layer }) + values(TensorId::AttnOut { layer });
            let expert = values(TensorId::Mlp1 { layer, expert: 0 }) + values(TensorId::Mlp2 { layer, expert: 0 });
            let (k, experts) = (c.experts_per_token as f64, c.n_experts as f64);
            let hit = experts * (1.0 - (1.0 - k / experts).powf(rows));
            let keys = c.window(layer).unwrap_or(usize::MAX).min(mean_keys(c)) as f64;
            let kv = rows * keys * (2 * c.kv_dim() * self.common.numbers.kv.bytes()) as f64;
            parts.weights += (2.0 * dense + hit * expert * 17.0 / 32.0) / BYTES_PER_S;
            parts.products += 2.0 * rows * (dense + k * expert) / FLOPS_PER_S;
            parts.others += kv / BYTES_PER_S;
        }
        if self.is_last(layers) {
            let table = values(TensorId::Unembedding);
            parts.head = (2.0 * table / BYTES_PER_S).max(2.0 * rows * table / FLOPS_PER_S);
        }
        if layers.start == 0 {
            parts.others += rows * 6.0 * c.hidden_dim as f64 / BYTES_PER_S;
        }
        parts
    }
}

/// Keys that a row sees in a full layer, for a model of this `seq_len`: half of a sequence is there on average, and
/// most are half as long as they may be.
pub fn mean_keys(config: &ModelConfig) -> usize {
    config.seq_len / 4
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::gpu::catalogue::Elements;
    use crate::backend::gpu::group::fit::cards;

    fn targets() -> impl Iterator<Item = (&'static str, Target)> {
        cards().into_iter().map(|(card, family)| {
            let multiprocessors = card.multiprocessors;
            (
                card.name,
                Target {
                    family,
                    multiprocessors,
                },
            )
        })
    }

    /// The card that times were measured on.
    fn h200() -> Target {
        let (_, target) = targets().find(|(card, _)| *card == "H200").expect("a family has it");
        target
    }

    fn common(config: &ModelConfig, max_batch: usize, stages: usize) -> Common {
        let options = Options {
            max_batch: Some(max_batch),
            ..Options::default()
        };
        Common::new(config, &options, Elements::F16, stages)
    }

    #[test]
    fn weights_are_counted_as_they_are() {
        for (card, target) in targets() {
            for (config, gb) in [(ModelConfig::preset_20b(), 13.8), (ModelConfig::preset_120b(), 65.2)] {
                let common = common(&config, 1024, 1);
                let demand = Demand {
                    common: &common,
                    target: &target,
                };
                let all = demand.weight_bytes(&(0..config.n_layers)) as f64 * 1e-9;
                assert!((all / gb - 1.0).abs() < 0.03, "{card}: {all} GB");
                let halves = demand.weight_bytes(&(0..10)) + demand.weight_bytes(&(10..config.n_layers));
                assert_eq!(halves, demand.weight_bytes(&(0..config.n_layers)));
            }
        }
    }

    /// Milliseconds of the halves of a model on one H200, at so many rows a step, as the benchmark found them with the
    /// factors.
    #[test]
    fn times_are_those_measured() {
        let (of_20b, of_120b) = (ModelConfig::preset_20b(), ModelConfig::preset_120b());
        for (config, rows, measured) in [
            (&of_20b, 128, [2.69, 3.00]),
            (&of_20b, 222, [3.13, 3.55]),
            (&of_20b, 445, [4.69, 5.49]),
            (&of_20b, 890, [7.14, 8.82]),
            (&of_120b, 128, [9.59, 9.87]),
            (&of_120b, 222, [10.48, 10.90]),
            (&of_120b, 445, [13.70, 14.55]),
            (&of_120b, 890, [17.54, 19.28]),
        ] {
            let (common, target) = (common(config, rows, 2), h200());
            let demand = Demand {
                common: &common,
                target: &target,
            };
            let cut = config.n_layers / 2;
            let stages = [0..cut, cut..config.n_layers];
            let times = stages.map(|layers| demand.seconds(&layers) * 1e3);
            for (time, measured) in times.iter().zip(measured) {
                assert!((time / measured - 1.0).abs() < 0.1, "{rows} rows: {times:?} ms");
            }
            // What the cut goes by.
            let (ratio, measured) = (times[0] / times[1], measured[0] / measured[1]);
            assert!(
                (ratio / measured - 1.0).abs() < 0.03,
                "{rows} rows: {ratio}, {measured}"
            );
        }
    }

    #[test]
    fn stages_take_equally_long() {
        let config = ModelConfig::preset_120b();
        let target = h200();
        let memory = DeviceMemory {
            free: 140 << 30,
            total: 141 << 30,
        };
        for stages in 2..=8 {
            let common = common(&config, 1024, stages);
            let demand = Demand {
                common: &common,
                target: &target,
            };
            let cut = demand.cut(&vec![memory; stages], 256, &Options::default()).unwrap();
            let times: Vec<_> = cut.iter().map(|layers| demand.seconds(layers)).collect();
            let slowest = times.iter().copied().fold(0.0, f64::max);
            let mean = times.iter().sum::<f64>() / stages as f64;
            // To a layer.
            assert!(slowest - mean <= demand.seconds(&(1..2)), "{stages}: {times:?}");
        }
    }
}
