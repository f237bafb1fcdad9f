//! A tiny model in memory, as a program has it: structs, the weights they point to, requests, answers.

#![allow(dead_code, reason = "real devices need a part of it")]

use super::fake::{self, Program, VOCAB};
use super::synthetic::{Dense, Experts, Synthetic, Temperament};
use getp::abi::lifecycle::{self, Backends};
use getp::abi::types::{Config, RunState, TransformerWeights};
use getp::backend::cpu;
use getp::checkpoint::{Field, TensorLayout, config_to_bytes};
use getp::config::ModelConfig;
use getp::error::Result;
use std::ffi::{c_int, c_void};

/// Prompts of several lengths.
const PROMPTS: [&str; 6] = ["ab", "a longer prompt, ab", "x", "0123456789", "abab", "q"];

/// How tokens are drawn.
#[derive(Clone, Copy, Debug)]
pub struct Drawing {
    temperature: f32,
    topp: f32,
}

impl Drawing {
    /// The most likely token.
    pub const GREEDY: Self = Self::new(0.0, 0.9);
    /// From a nucleus that the device finds.
    pub const NUCLEUS: Self = Self::new(1.0, 0.9);
    /// From a nucleus for which the host fetches most rows.
    pub const WIDE: Self = Self::new(0.127, 0.9999999);
    /// From all tokens.
    pub const ALL: Self = Self::new(1.0, 1.0);

    const fn new(temperature: f32, topp: f32) -> Self {
        Self { temperature, topp }
    }
}

/// The smallest model that has everything in it, with the vocabulary of [`fake`].
fn released(n_layers: usize) -> Synthetic {
    let config = ModelConfig {
        vocab_size: VOCAB,
        n_layers,
        n_experts: 4,
        experts_per_token: 2,
        seq_len: 32,
        sliding_window: 16,
        ..ModelConfig::preset_7m()
    };
    Synthetic::new(&config, 5, Temperament::Tame).unwrap()
}

/// A model's weights as float32 arrays, and what is asked of it.
pub struct Model {
    config: ModelConfig,
    prompts: &'static [&'static str],
    /// Positions each request may be fed.
    steps: usize,
    layout: TensorLayout,
    /// A `.bin` file, in words so that its values are aligned.
    words: Vec<u32>,
}

impl Model {
    /// A layer of either kind, and more requests than a step takes.
    pub fn new() -> Self {
        Self::of(&released(2), &PROMPTS, 24)
    }

    /// The same model with other types than released models have.
    pub fn wide(dense: Dense, experts: Experts) -> Self {
        let synthetic = Synthetic {
            dense,
            experts,
            ..released(2)
        };
        Self::of(&synthetic, &PROMPTS[..3], 24)
    }

    /// The types of released models, except that the last value of an array is not exact in them.
    pub fn with_last(field: Field, value: f32) -> Self {
        let mut model = Self::of(&released(2), &PROMPTS[..3], 24);
        let end = model.layout.in_file(field).end;
        model.words[end / 4 - 1] = value.to_bits();
        model
    }

    /// For tests that run it a thousand times: each device has a few steps of several sequences and of one.
    pub fn least(n_layers: usize) -> Self {
        Self::of(&released(n_layers), &["x", "0123", "ab"], 5)
    }

    fn of(synthetic: &Synthetic, prompts: &'static [&'static str], steps: usize) -> Self {
        let (config, dir) = (synthetic.config.clone(), tempfile::tempdir().unwrap());
        let path = dir.path().join("model.bin");
        synthetic.write_bin(&path, &|_| ()).unwrap();
        let bytes = std::fs::read(path).unwrap();
        let words = bytes.as_chunks().0.iter().map(|&word| u32::from_le_bytes(word));
        Self {
            layout: TensorLayout::new(config.clone()).unwrap(),
            config,
            prompts,
            steps,
            words: words.collect(),
        }
    }

    /// A program that has this model and asks these things of it.
    pub fn program(&self, drawing: Drawing) -> Program {
        let mut program = Program::new(self.prompts, self.steps);
        program.sampler.temperature = drawing.temperature;
        program.sampler.topp = drawing.topp;
        // SAFETY: fifteen numbers of four bytes either way.
        program.transformer.config = unsafe { std::mem::transmute::<[u8; 60], Config>(config_to_bytes(&self.config)) };
        program.transformer.weights = TransformerWeights::from_arrays(self.arrays());
        program.transformer.state = RunState::from_arrays([std::ptr::dangling_mut::<f32>().cast(); 21]);
        program
    }

    fn arrays(&self) -> [*mut c_void; Field::COUNT] {
        let mut arrays = [std::ptr::null_mut(); Field::COUNT];
        for field in Field::IN_FILE_ORDER {
            let start = self.layout.in_file(field).start;
            arrays[field as usize] = (&raw const self.words[start / 4]).cast_mut().cast();
        }
        arrays
    }

    /// What the CPU answers.
    pub fn expected(&self, drawing: Drawing) -> Vec<Vec<c_int>> {
        let mut program = self.program(drawing);
        let backends = Backends {
            open: &|checkpoint, options| Ok(vec![cpu::open(checkpoint, options)?]),
            fallback: &cpu::open,
            join: &|| Ok(None),
        };
        warm_up(&mut program, &backends).unwrap();
        inference(&mut program, &backends).unwrap();
        fake::finish(&mut program).unwrap();
        program.rows()
    }
}

/// `warm_up`.
pub fn warm_up(program: &mut Program, backends: &Backends<'_>) -> Result<()> {
    fake::quiet();
    let (transformer, tokenizer) = (&raw mut *program.transformer, &raw mut *program.tokenizer);
    // SAFETY: the program's own structs.
    unsafe { lifecycle::warm_up(transformer, tokenizer, backends) }
}

/// `inference`.
pub fn inference(program: &mut Program, backends: &Backends<'_>) -> Result<i64> {
    let (transformer, tokenizer) = (&raw mut *program.transformer, &raw mut *program.tokenizer);
    let (sampler, requests) = (&raw mut program.sampler, &raw mut program.requests);
    // SAFETY: the program's own structs.
    unsafe { lifecycle::inference(transformer, tokenizer, sampler, requests, backends) }
}

/// Devices that serve a program.
pub fn replicas(program: &Program) -> usize {
    lifecycle::with_engine(&raw const *program.transformer, |engine| engine.replicas().count()).unwrap()
}
