//! A family with no kernels of its own: the plain kernels and plain attention, which every family has, run every model.

use super::answers::{Run, answer, options, prompts};
use super::ops::{model, odd, replica_on, tiny, walk};
use super::synthetic::{Dense, Experts, Synthetic, SyntheticCheckpoint, Temperament};
use getp::backend::cpu;
use getp::backend::gpu::catalogue::{self, Elements, Kernel, SHARED, shared};
use getp::backend::gpu::context::Context;
use getp::backend::gpu::driver::simt::{Setup, System};
use getp::backend::gpu::family::Family;
use getp::backend::gpu::open::context_as;
use getp::batch::Want;
use getp::config::ModelConfig;
use getp::options::Precision;
use std::sync::Arc;

/// All that a family has to say.
#[derive(Debug)]
struct MadeUp;

static KERNELS: [Kernel; SHARED] = shared(64);

static TABLE: catalogue::Table = catalogue::Table {
    name: "made_up",
    platforms: &[],
    cards: &[],
    wave: 64,
    overlaps: true,
    // As the machine that runs it stores terms, and adds up 64 lanes' shares.
    term_shift: catalogue::FLUSHING_TERM_SHIFT,
    cuts_experts: false,
    sum_error: [64.0, 16.0],
    exact_sums: None,
    kernels: &KERNELS,
};

impl Family for MadeUp {
    fn table(&self) -> &'static catalogue::Table {
        &TABLE
    }
}

fn context() -> Arc<Context> {
    let system = System::new(&Setup::default());
    context_as(system.driver(0).unwrap(), &MadeUp).unwrap()
}

/// The smallest model, and one whose heads are those that matrix cores' attention takes.
fn configs() -> [ModelConfig; 2] {
    let small = ModelConfig {
        vocab_size: 301,
        n_experts: 6,
        n_layers: 3,
        seq_len: 160,
        sliding_window: 32,
        ..ModelConfig::preset_7m()
    };
    let grouped = ModelConfig {
        hidden_dim: 160,
        intermediate_dim: 96,
        head_dim: 64,
        n_attn_heads: 16,
        n_kv_heads: 2,
        ..small.clone()
    };
    [small, grouped]
}

#[test]
fn whole_models_give_the_tokens_of_the_cpu() {
    for config in configs() {
        for (dense, experts) in [(Dense::Bf16, Experts::Mxfp4), (Dense::Bf16, Experts::Bf16)] {
            let synthetic = Synthetic {
                dense,
                experts,
                ..Synthetic::new(&config, 31, Temperament::Tame).unwrap()
            };
            let checkpoint = SyntheticCheckpoint::widened(&synthetic.check().unwrap());
            let exact = options(Precision::Exact, 3, 40);
            let run = Run {
                more: 12,
                want: Want::Tokens,
                record_all: false,
                ends: true,
                share_beginnings: true,
                preempts: false,
            };
            let prompts = prompts(&config, 5);
            let mut cpu = cpu::open(&checkpoint, &exact).unwrap();
            let expected = answer(&mut *cpu, &config, &prompts, run);
            let (mut plain, _) = replica_on(context(), &checkpoint, &exact);
            let answers = answer(&mut plain, &config, &prompts, run);
            assert_eq!(answers.tokens.len(), prompts.len());
            assert_eq!(answers.tokens, expected.tokens, "{dense:?}, {experts:?}");
        }
    }
}

#[test]
fn every_operation_keeps_to_its_bound() {
    for config in [tiny(), odd()] {
        let checkpoint = model(&config, Dense::Bf16, Experts::Mxfp4);
        for precision in [Precision::Fast, Precision::Exact] {
            walk(
                context(),
                &checkpoint,
                precision,
                Elements::F16,
                &format!("plain, {precision:?}"),
            );
        }
    }
}
