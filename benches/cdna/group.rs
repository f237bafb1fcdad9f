//! Devices that make a replica together: their layers, and what the scheduler may do with them.

use crate::model::Model;
use getp::backend::gpu::catalogue::Elements;
use getp::backend::gpu::group::demand::Demand;
use getp::backend::gpu::group::fit::ENOUGH;
use getp::backend::gpu::kv::page_bytes;
use getp::backend::gpu::stage::Common;
use getp::kv_blocks::{KvBlocks, block_bytes};
use getp::options::Options;
use getp::scheduler::{Limits, steps_at_once};
use std::ops::Range;

/// The layers of so many devices, with steps of so many rows and room for so many sequences of the model's `seq_len`.
pub fn cut(model: &Model<'_>, devices: usize, rows: usize, sequences: usize) -> Option<Vec<Range<usize>>> {
    let options = Options {
        max_batch: Some(rows),
        ..Options::default()
    };
    Devices::new(model, &options, devices).cut(sequences)
}

/// A replica.
pub struct Group {
    /// Of each device.
    pub layers: Vec<Range<usize>>,
    pub limits: Limits,
}

impl Group {
    /// Of as few devices as the model fits with `options` of their number, cut as the library cuts it.
    pub fn smallest(model: &Model<'_>, options: &dyn Fn(usize) -> Options) -> Self {
        let fewer = |&n: &usize| Some(n / 2).filter(|&n| n > 0);
        let of_size = |devices: usize| {
            let options = options(devices);
            let devices = Devices::new(model, &options, devices);
            let most = ENOUGH.min(devices.common.logits_rows);
            let layers = std::iter::successors(Some(most), fewer).find_map(|n| devices.cut(n))?;
            let limits = devices.limits(&layers);
            Some(Self { layers, limits })
        };
        let mut sizes = 1..=model.config.n_layers;
        sizes.find_map(of_size).expect("the model fits some devices")
    }
}

/// Devices of a card.
struct Devices<'a> {
    model: &'a Model<'a>,
    options: &'a Options,
    common: Common,
    count: usize,
}

impl<'a> Devices<'a> {
    fn new(model: &'a Model<'_>, options: &'a Options, count: usize) -> Self {
        Self {
            common: Common::new(model.config, options, Elements::F16, count),
            model,
            options,
            count,
        }
    }

    fn demand(&self) -> Demand<'_> {
        Demand {
            common: &self.common,
            target: &self.model.target,
        }
    }

    fn cut(&self, sequences: usize) -> Option<Vec<Range<usize>>> {
        let memory = vec![self.model.card.memory(); self.count];
        self.demand().cut(&memory, sequences, self.options)
    }

    /// Blocks for which a stage has memory.
    fn kv_blocks(&self, layers: &Range<usize>) -> KvBlocks {
        // All but the cache is what it takes with a cache of known size, which is larger than any tensor.
        const MIB: usize = 4096;
        let known = Options {
            kv_mb: MIB,
            ..self.options.clone()
        };
        let memory = self.model.card.memory();
        let config = &self.common.config;
        let page_bytes = page_bytes(config, self.common.numbers.kv, &self.model.target);
        let within = |sequences: usize| {
            let all = self.demand().bytes(layers, sequences, &known, memory.total);
            let left = (memory.free + ((MIB as u64) << 20)).saturating_sub(all);
            self.common
                .kv_blocks(self.options, block_bytes(config, layers, page_bytes), left as usize)
        };
        // What attention leaves grows with the cache.
        let most = within(0);
        within((most.full * most.tokens).div_ceil(config.seq_len))
    }

    /// The limits that the engine gives the scheduler of such a replica.
    fn limits(&self, layers: &[Range<usize>]) -> Limits {
        let common = &self.common;
        let blocks = layers.iter().map(|layers| self.kv_blocks(layers));
        let blocks = blocks.reduce(|a, b| KvBlocks {
            full: a.full.min(b.full),
            window: a.window.min(b.window),
            ..a
        });
        let blocks = blocks.expect("a group has devices");
        Limits {
            max_batch: common.logits_rows.min(common.rows) * steps_at_once(common.depth),
            step_tokens: common.rows,
            chunk_tokens: common.chunk_tokens,
            max_logits_rows: common.logits_rows,
            max_positions: common.capacity(blocks).positions,
            block_tokens: blocks.tokens,
            full_blocks: blocks.full,
            window_blocks: blocks.window,
            sliding_window: common.config.sliding_window,
            has_full_layers: true,
            record_all: false,
            share_beginnings: true,
            share_answers: false,
            depth: common.depth,
            plans_ahead: true,
        }
    }
}
