//! Models at the kernels' limits give right answers. One beyond a limit a device is not used, and a line says why.

use super::answers::{Run, answer, options, prompts};
use super::open_on;
use super::synthetic::{SyntheticCheckpoint, Temperament};
use getp::backend::cpu;
use getp::backend::gpu::device_choice::{self, Needs, Runtime};
use getp::backend::gpu::discover;
use getp::backend::gpu::driver::simt::{Setup, System};
use getp::backend::gpu::driver::{Device, ListedDevice};
use getp::backend::gpu::target::Target;
use getp::batch::Want;
use getp::config::ModelConfig;
use getp::options::{DeviceChoice, Options, Precision, StepLimits};

fn tiny() -> ModelConfig {
    ModelConfig {
        vocab_size: 130,
        intermediate_dim: 32,
        n_experts: 4,
        experts_per_token: 2,
        n_layers: 1,
        seq_len: 128,
        ..ModelConfig::preset_7m()
    }
}

/// A model at one of the limits of the kernels that the SIMT machine has.
fn at_limits() -> [(&'static str, ModelConfig); 4] {
    let hidden = ModelConfig {
        hidden_dim: 6144,
        ..tiny()
    };
    let experts = ModelConfig {
        n_experts: 256,
        experts_per_token: 8,
        ..tiny()
    };
    let widest_heads = ModelConfig {
        head_dim: 128,
        ..tiny()
    };
    let narrowest_heads = ModelConfig { head_dim: 8, ..tiny() };
    [
        ("hidden", hidden),
        ("experts", experts),
        ("widest heads", widest_heads),
        ("narrowest heads", narrowest_heads),
    ]
}

#[test]
fn models_at_the_limits_give_the_cpus_tokens() {
    for (name, config) in at_limits() {
        let checkpoint = SyntheticCheckpoint::new(&config, 5, Temperament::Tame).unwrap();
        let prompts = prompts(&config, 3);
        let run = Run {
            more: 6,
            want: Want::Tokens,
            record_all: false,
            ends: true,
            share_beginnings: false,
            preempts: false,
        };
        let mut on_cpu = cpu::open(&checkpoint, &options(Precision::Exact, 3, 16)).unwrap();
        let expected = answer(&mut *on_cpu, &config, &prompts, run);
        let system = System::new(&Setup::default());
        let driver = system.driver(0).unwrap();
        let mut replica = open_on(vec![driver], &checkpoint, &options(Precision::Exact, 3, 16));
        let answers = answer(&mut *replica, &config, &prompts, run);
        assert_eq!(answers.tokens, expected.tokens, "{name}");
    }
}

/// Models one beyond each limit, and the line about them.
fn beyond_limits() -> [(ModelConfig, &'static str); 5] {
    let hidden = ModelConfig {
        hidden_dim: 6145,
        ..tiny()
    };
    let experts = ModelConfig {
        n_experts: 257,
        ..tiny()
    };
    let experts_per_token = ModelConfig {
        n_experts: 16,
        experts_per_token: 9,
        ..tiny()
    };
    let wide_heads = ModelConfig {
        head_dim: 136,
        ..tiny()
    };
    let odd_heads = ModelConfig { head_dim: 12, ..tiny() };
    [
        (hidden, "hidden_dim is 6145; its kernel rmsnorm takes at most 6144"),
        (experts, "n_experts is 257; its kernel route takes at most 256"),
        (
            experts_per_token,
            "experts_per_token is 9; its kernel route takes at most 8",
        ),
        (
            wide_heads,
            "head_dim is 136; its kernel attention_plain_f32 takes at most 128",
        ),
        (odd_heads, "head_dim is 12; its kernel rope_store takes multiples of 8"),
    ]
}

#[test]
fn a_device_named_for_a_model_beyond_a_limit_is_refused() {
    for (config, words) in beyond_limits() {
        let options = Options {
            device: "simt:0".parse().unwrap(),
            ..Options::default()
        };
        let config = config.check().unwrap();
        let refused = discover::usable(&options, Some(&config))
            .err()
            .expect(words)
            .to_string();
        let start = "GETP_DEVICE asks for simt:0 (CPU as a SIMT machine, simt): ";
        assert!(
            refused.starts_with(&format!("{start}{words}; choose another")),
            "{refused}"
        );
    }
}

#[test]
fn auto_runs_a_model_beyond_a_limit_on_the_cpu_and_says_why() {
    let system = System::new(&Setup::default());
    let driver = system.driver(0).unwrap();
    let runtimes = [Runtime {
        name: "simt",
        found: Ok(vec![ListedDevice {
            device: driver.device().clone(),
            total_bytes: driver.memory().unwrap().total,
        }]),
    }];
    for (config, words) in beyond_limits() {
        let supports = |device: &Device| Target::of(device).unwrap().supports(&config, &StepLimits::GPU);
        let needs = Needs {
            code: &["simt"],
            runs: &|_| true,
            is_plain: &|_| false,
            bytes: 0,
            asked_by: "GETP_DEVICE",
            supports: &supports,
        };
        let chosen = device_choice::choose(&DeviceChoice::Auto, &runtimes, &needs).unwrap();
        assert!(chosen.devices.is_empty());
        let line = format!("running on the CPU: simt:0 (CPU as a SIMT machine, simt) is not used: {words}");
        assert_eq!(chosen.lines, [line]);
    }
}
