//! The time of kernels, from bytes, operations and launches.

use crate::card::Card;
use crate::chosen::Chosen;
use crate::cuts::{Cut, cut};
use crate::group::Kind;
use crate::layer;
use crate::shares::{SLAB_RUNS, Shares};
use crate::units::{SIMDS, WAVE, last_end};
use getp::backend::gpu::args::{DIE_BLOCKS, PrefillTile};
use getp::backend::gpu::attention_plan::plan_prefill;
use getp::backend::gpu::catalogue::{Elements, Kernel, Op};
use getp::backend::gpu::launch::Launch;
use getp::backend::gpu::shapes::{GemmShape, Mlp1Launch, Numbers, Product};
use getp::backend::gpu::target::Target;
use getp::config::ModelConfig;
use std::collections::{BTreeMap, BTreeSet};

pub const LAUNCH: f64 = 5e-6;
/// Tokens, or keys of attention, of an MFMA's product.
const TOKENS: usize = 16;

/// A matrix product of a step.
pub struct Timed {
    pub seconds: f64,
    /// What its bytes or its operations at the matrix cores' peak take, whichever is longer.
    pub least: f64,
    /// The share of the device's matrix core peak that it reaches, not counting padding.
    pub share: f64,
    /// Seconds in which what the dies read crosses the cache that they share.
    pub reading: f64,
    pub kernel: String,
}

/// A layer without its attention.
pub struct Layer {
    /// qkv, attn_out, mlp1, mlp2.
    pub products: [Timed; 4],
    /// Seconds of the bytes of all other kernels.
    pub other: f64,
    /// Launches, one of attention's among them.
    pub launches: usize,
}

impl Layer {
    pub fn seconds(&self) -> f64 {
        let products: f64 = self.products.iter().map(|timed| timed.seconds).sum();
        products + self.other + self.launches as f64 * LAUNCH
    }

    pub fn least(&self) -> f64 {
        self.products.iter().map(|timed| timed.least).sum::<f64>() + self.other
    }
}

/// Which die has a block, by its number, as `die_order` in `kernels/cdna/work.h` says.
struct Order {
    blocks: usize,
    neighbours: usize,
    dies: usize,
}

impl Order {
    fn new(kernel: &Kernel, blocks: usize, spans: usize, dies: usize, counts: &[usize]) -> Self {
        let tiles = match (kernel.cut.spreads, counts) {
            _ if kernel.tokens == TOKENS => None,
            (true, _) => Some(blocks / spans),
            (false, &[rows]) => Some(rows.div_ceil(kernel.tokens)),
            _ => {
                return Self {
                    blocks,
                    neighbours: DIE_BLOCKS,
                    dies,
                };
            }
        };
        Self {
            blocks: tiles.map_or(0, |tiles| tiles * spans),
            neighbours: tiles.unwrap_or(1),
            dies,
        }
    }

    fn die_of(&self, number: usize) -> usize {
        let round = self.neighbours * self.dies;
        match number < self.blocks / round * round {
            true => number % round / self.neighbours,
            false => number % self.dies,
        }
    }
}

pub struct Model<'a> {
    pub config: &'a ModelConfig,
    pub card: &'a Card,
    pub target: Target,
    pub shares: &'a Shares,
}

impl Model<'_> {
    /// It on devices of the card.
    pub fn kind(&self) -> Kind<'_> {
        Kind {
            config: self.config,
            target: &self.target,
            memory: self.card.memory(),
        }
    }

    /// Seconds in which the matrix core of a SIMD multiplies so many runs.
    fn runs(&self, count: usize) -> f64 {
        count as f64 * self.shares.run_slots * 4.0 / self.card.hertz
    }

    /// The kernels that the library chooses.
    fn chosen(&self) -> Chosen<'_> {
        Chosen {
            target: &self.target,
            config: self.config,
            numbers: Numbers::new(Elements::F16, false),
        }
    }

    /// `counts`: rows of each group (expert); `bucket`: the number of rows that the step's graph is captured for.
    pub fn product(&self, product: Product, bucket: usize, counts: &[usize]) -> Timed {
        let shape = self.chosen().shape(product, bucket);
        let Launch { kernel, blocks, .. } = match product {
            Product::Mlp1 => self.chosen().mlp1(bucket).launch(),
            _ => self.target.gemm(&shape).expect("a kernel").launch,
        };
        let (name, waves) = (kernel.name(), kernel.threads / WAVE);
        let spans = shape.row_blocks.div_ceil(waves);
        let cuts = match self.target.cuts(kernel) {
            Some(how) => cut(counts, &how, spans),
            None => {
                let tiles = |rows: usize| match kernel.cut.spreads {
                    true => blocks / spans,
                    false => rows.div_ceil(kernel.tokens),
                };
                let groups = (0..counts.len()).filter(|&group| counts[group] > 0);
                let cut = |group: usize| Cut {
                    group,
                    tiles: tiles(counts[group]),
                };
                groups.map(cut).collect()
            }
        };
        let columns = layer::columns(self.config, product);
        // Of 16 tokens and a wave's 32 weight rows.
        let step = self.runs(columns.div_ceil(64) * SLAB_RUNS);
        // Of each die.
        let order = Order::new(kernel, blocks, spans, self.card.dies, counts);
        let mut blocks = vec![Vec::new(); self.card.dies];
        let (mut weights, mut tokens) = (BTreeSet::new(), BTreeMap::new());
        let mut number = 0;
        for Cut { group, tiles } in cuts {
            let steps = counts[group].div_ceil(TOKENS);
            let sizes = (0..tiles).map(|tile| steps / tiles + usize::from(tile < steps % tiles));
            let times = sizes.map(|steps| {
                let (steps, share) = if steps > 0 {
                    self.shares.of(&name, steps)
                } else {
                    (0, 1.0)
                };
                (steps, steps as f64 * step / share * waves as f64 / SIMDS)
            });
            let mut times: Vec<(usize, f64)> = times.collect();
            if kernel.op == Op::SortMlp1 {
                times = vec![(steps, times.iter().map(|(_, seconds)| seconds).sum())];
            }
            for span in 0..spans {
                for (tile, &(steps, seconds)) in times.iter().enumerate() {
                    let die = order.die_of(number);
                    number += 1;
                    if steps > 0 {
                        blocks[die].push(seconds);
                        weights.insert((die, group, span));
                        tokens.insert((die, group, tile), steps * TOKENS);
                    }
                }
            }
        }
        let crossing = self.product_bytes(&shape, columns, counts) as f64 / self.card.bytes_a_second();
        // What each die reads of it, once.
        let span_bytes = layer::weight_bytes(&self.target, &shape, columns) / spans;
        let read = weights.len() * span_bytes + tokens.values().sum::<usize>() * 2 * columns;
        let reading = read as f64 / self.card.cache_bytes_a_second();
        let ends = blocks
            .iter()
            .map(|blocks| last_end(self.card.compute_units / self.card.dies, blocks, waves));
        let seconds = ends.fold(crossing.max(reading), f64::max);
        let wanted = counts.iter().sum::<usize>() as f64 / TOKENS as f64 * shape.row_blocks as f64 * step;
        let at_peak = wanted / (self.card.compute_units as f64 * SIMDS);
        Timed {
            seconds,
            least: at_peak.max(crossing),
            share: at_peak / seconds,
            reading,
            kernel: name,
        }
    }

    /// Bytes moved: weights of the groups that have rows, activations in and out.
    fn product_bytes(&self, shape: &GemmShape, columns: usize, counts: &[usize]) -> usize {
        let weights = layer::weight_bytes(&self.target, shape, columns);
        let out = match shape.product {
            Product::Qkv if self.chosen().stores(shape.rows) => 2 * shape.n,
            Product::Qkv | Product::Logits => 4 * shape.n,
            Product::AttnOut => 2 * 4 * shape.n, // reads and writes the residual stream
            Product::Mlp1 => shape.n,            // gate and up become one value of two bytes
            Product::Mlp2 => 2 * shape.n,
            Product::Greedy => 0,
        };
        let groups = counts.iter().filter(|&&rows| rows > 0).count();
        groups * weights + counts.iter().sum::<usize>() * (2 * columns + out)
    }

    /// Bytes that a row moves in a layer's other kernels.
    fn row_bytes(&self, bucket: usize) -> usize {
        let c = self.config;
        let (float, half) = (4 * c.hidden_dim, 2 * c.hidden_dim);
        let (queries, keys) = (c.head_dim * c.n_attn_heads, c.head_dim * c.n_kv_heads);
        let routed = c.experts_per_token * half;
        let norm_of_sum = float + routed + float + half;
        let rope_store = match self.chosen().stores(bucket) {
            true => 0,
            false => (4 + 2) * (queries + 2 * keys),
        };
        let attention = (2 + 2) * queries;
        let router_input = match self.chosen().norm_route(bucket) {
            Some(_) => 0,
            None => float + float,
        };
        let norm = float + half;
        let gather = match self.chosen().mlp1(bucket) {
            Mlp1Launch::Gathered(_) => half + routed,
            _ => 0,
        };
        norm_of_sum + rope_store + attention + norm + router_input + gather
    }

    pub fn layer(&self, bucket: usize, rows: usize) -> Layer {
        let counts = layer::expert_rows(self.config, rows);
        Layer {
            products: [
                self.product(Product::Qkv, bucket, &[rows]),
                self.product(Product::AttnOut, bucket, &[rows]),
                self.product(Product::Mlp1, bucket, &counts),
                self.product(Product::Mlp2, bucket, &counts),
            ],
            other: (rows * self.row_bytes(bucket)) as f64 / self.card.bytes_a_second(),
            launches: self.chosen().launches(bucket),
        }
    }

    /// Seconds in which a layer's keys and values of so many positions, summed over rows, cross memory.
    pub fn reading(&self, keys: f64) -> f64 {
        let c = self.config;
        keys * (2 * 2 * c.head_dim * c.n_kv_heads) as f64 / self.card.bytes_a_second()
    }

    /// Seconds of the residual stream's way from a device of a group to the next.
    pub fn hop(&self, rows: usize) -> f64 {
        (4 * rows * self.config.hidden_dim) as f64 / self.card.link_bytes_a_second
    }

    /// Seconds of a layer's attention of prompts, chunks `(first position, rows)` of them. A wave takes 16 keys after
    /// 16 in the kernel's inner loop; a block takes as long as the wave of its last rows.
    pub fn prompts(&self, chunks: &[(usize, usize)], window: Option<usize>) -> f64 {
        let kernel = self.prefill_kernel();
        let waves = kernel.threads / WAVE;
        let wave_rows = kernel.per_block / waves;
        let (runs, share) = self.shares.of_innermost(&kernel.name());
        let step = self.runs(runs) / share * waves as f64 / SIMDS;
        let numbered = chunks.iter().enumerate();
        let mut tiles = Vec::new();
        plan_prefill(
            numbered.map(|(i, &(position, rows))| (i, position, rows)),
            kernel.per_block,
            &mut tiles,
        )
        .expect("memory for tiles");
        let steps = |tile: &PrefillTile| {
            let begin = chunks[tile.chunk as usize].0 + tile.first as usize;
            let end = begin + tile.rows as usize;
            let of_wave = |first: usize| {
                let seen_from = window.map_or(0, |window| (first + 1).saturating_sub(window));
                let last = end.min(first + wave_rows) - 1;
                last / TOKENS - seen_from / TOKENS + 1
            };
            (begin..end).step_by(wave_rows).map(of_wave).max().unwrap_or(0)
        };
        let of_tile = |tile| vec![steps(tile) as f64 * step; self.config.n_kv_heads];
        let blocks: Vec<f64> = tiles.iter().flat_map(of_tile).collect();
        last_end(self.card.compute_units, &blocks, waves)
    }

    /// The share of the matrix cores' peak in the inner loop of attention of prompts.
    pub fn prompts_share(&self) -> f64 {
        self.shares.of_innermost(&self.prefill_kernel().name()).1
    }

    fn prefill_kernel(&self) -> &'static Kernel {
        let mut kernels = self.target.family.table().kernels.iter();
        let is_it = |kernel: &&Kernel| kernel.op == Op::AttentionPrefill && kernel.elements == Some(Elements::F16);
        kernels.find(is_it).expect("the family has one")
    }
}
