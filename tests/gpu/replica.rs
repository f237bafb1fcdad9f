//! Whole models: the tokens are the CPU backend's, for any batch.

use super::answers::{Run, answer, options, prompts};
use super::open;
use super::synthetic::{SyntheticCheckpoint, Temperament};
use getp::backend::cpu;
use getp::batch::Want;
use getp::config::ModelConfig;
use getp::options::Precision;

fn tiny() -> ModelConfig {
    ModelConfig {
        vocab_size: 777,
        seq_len: 128,
        ..ModelConfig::preset_7m()
    }
}

/// So many requests, each with answers of up to so many tokens.
fn gives_the_cpus_tokens(requests: usize, more: usize) {
    let config = tiny();
    let checkpoint = SyntheticCheckpoint::new(&config, 5, Temperament::Tame).unwrap();
    let prompts = prompts(&config, requests);
    let run = |want| Run {
        more,
        want,
        record_all: false,
        ends: true,
        share_beginnings: false,
        preempts: false,
    };
    let mut on_cpu = cpu::open(&checkpoint, &options(Precision::Exact, 7, 64)).unwrap();
    let expected = answer(&mut *on_cpu, &config, &prompts, run(Want::Tokens));
    for precision in [Precision::Exact, Precision::Fast] {
        for (max_batch, step_tokens, want) in [(7, 64, Want::Tokens), (2, 16, Want::Logits)] {
            let mut replica = open(&checkpoint, &options(precision, max_batch, step_tokens));
            let answers = answer(&mut *replica, &config, &prompts, run(want));
            assert_eq!(
                answers.tokens, expected.tokens,
                "{precision:?}, batch {max_batch}, {want:?}"
            );
        }
    }
}

#[test]
fn a_tiny_model_gives_the_cpus_tokens() {
    gives_the_cpus_tokens(7, 40);
}

/// The same kernels in a seventh of the time; tests/programs/amd.sh runs it as AMD's machine code.
#[test]
fn a_few_steps_give_the_cpus_tokens() {
    gives_the_cpus_tokens(3, 3);
}
