//! Devices that make a replica together: their layers, and what the scheduler may do with them.

#![allow(dead_code, reason = "each benchmark that includes this uses a part")]

use getp::backend::gpu::catalogue::Elements;
use getp::backend::gpu::driver::DeviceMemory;
use getp::backend::gpu::group::demand::Demand;
use getp::backend::gpu::group::fit::ENOUGH;
use getp::backend::gpu::group::steps::with_length_foreseen;
use getp::backend::gpu::kv::page_bytes;
use getp::backend::gpu::stage::Common;
use getp::backend::gpu::target::Target;
use getp::config::ModelConfig;
use getp::kv_blocks::{KvBlocks, block_bytes};
use getp::options::Options;
use getp::scheduler::{Limits, steps_at_once};
use std::ops::Range;

/// A model on devices of a kind.
#[derive(Clone, Copy)]
pub struct Kind<'a> {
    pub config: &'a ModelConfig,
    pub target: &'a Target,
    /// Of each device.
    pub memory: DeviceMemory,
}

impl Kind<'_> {
    /// The options of a replica of so many devices: alone, one may have long steps.
    pub fn with_length(&self, options: &Options, devices: usize) -> Options {
        if devices > 1 {
            return options.clone();
        }
        with_length_foreseen(options, self.config, self.target, Elements::F16, self.memory.free)
    }

    /// The layers of so many devices, with steps of so many rows and room for so many sequences of the model's
    /// `seq_len`.
    pub fn cut(&self, devices: usize, rows: usize, sequences: usize) -> Option<Vec<Range<usize>>> {
        let options = Options {
            max_batch: Some(rows),
            ..Options::default()
        };
        Devices::new(self, &options, devices).cut(sequences)
    }
}

/// A replica.
pub struct Group {
    /// Of each device.
    pub layers: Vec<Range<usize>>,
    pub limits: Limits,
}

impl Group {
    /// Of so many devices, cut as the library cuts it; `None` if the model does not fit them.
    pub fn of(kind: &Kind<'_>, options: &Options, count: usize) -> Option<Self> {
        let fewer = |&n: &usize| Some(n / 2).filter(|&n| n > 0);
        let devices = Devices::new(kind, options, count);
        let most = ENOUGH.min(devices.common.logits_rows);
        let layers = std::iter::successors(Some(most), fewer).find_map(|n| devices.cut(n))?;
        let limits = devices.limits(&layers);
        Some(Self { layers, limits })
    }

    /// Of as few devices as the model fits with `options` of their number.
    pub fn smallest(kind: &Kind<'_>, options: &dyn Fn(usize) -> Options) -> Self {
        let mut sizes = 1..=kind.config.n_layers;
        let of_size = |devices| Self::of(kind, &options(devices), devices);
        sizes.find_map(of_size).expect("the model fits some devices")
    }
}

/// As many devices as a replica has.
struct Devices<'a> {
    kind: &'a Kind<'a>,
    options: &'a Options,
    common: Common,
    count: usize,
}

impl<'a> Devices<'a> {
    fn new(kind: &'a Kind<'_>, options: &'a Options, count: usize) -> Self {
        Self {
            common: Common::new(kind.config, options, Elements::F16, count),
            kind,
            options,
            count,
        }
    }

    fn demand(&self) -> Demand<'_> {
        Demand {
            common: &self.common,
            target: self.kind.target,
        }
    }

    fn cut(&self, sequences: usize) -> Option<Vec<Range<usize>>> {
        let memory = vec![self.kind.memory; self.count];
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
        let memory = self.kind.memory;
        let config = &self.common.config;
        let page_bytes = page_bytes(config, self.common.numbers.kv, self.kind.target);
        let within = |sequences: usize| {
            let all = self.demand().bytes(layers, sequences, &known, memory.total);
            let left = (memory.free + ((MIB as u64) << 20)).saturating_sub(all);
            self.common
                .kv_blocks(self.options, block_bytes(config, layers, page_bytes), left as usize)
        };
        // What attention leaves grows with the cache.
        let most = within(0);
        within((most.count * most.tokens).div_ceil(config.seq_len))
    }

    /// The limits that the engine gives the scheduler of such a replica.
    fn limits(&self, layers: &[Range<usize>]) -> Limits {
        let common = &self.common;
        let blocks = layers.iter().map(|layers| self.kv_blocks(layers));
        let blocks = blocks.min_by_key(|blocks| blocks.count).expect("a group has devices");
        Limits {
            max_batch: common.logits_rows.min(common.rows) * steps_at_once(common.depth),
            step_tokens: common.rows,
            chunk_tokens: common.chunk_tokens,
            max_logits_rows: common.logits_rows,
            max_positions: common.capacity(blocks).positions,
            block_tokens: blocks.tokens,
            blocks: blocks.count,
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
