//! Stages of a step, what they cost and how long they took.

use std::time::Duration;

/// A stage of the model's forward pass, as the profile names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs)] // the variants are the operations of `model::forward`
pub enum Stage {
    Embed,
    Norm,
    Qkv,
    RopeStore,
    Attention,
    AttnOut,
    Router,
    Mlp1,
    Mlp2,
    Unembed,
}

/// Every stage, in the order of the forward pass.
pub const STAGES: [Stage; 10] = [
    Stage::Embed,
    Stage::Norm,
    Stage::Qkv,
    Stage::RopeStore,
    Stage::Attention,
    Stage::AttnOut,
    Stage::Router,
    Stage::Mlp1,
    Stage::Mlp2,
    Stage::Unembed,
];

impl Stage {
    /// The name in the table.
    pub fn name(self) -> &'static str {
        match self {
            Stage::Embed => "embed",
            Stage::Norm => "norm",
            Stage::Qkv => "qkv",
            Stage::RopeStore => "rope_store",
            Stage::Attention => "attention",
            Stage::AttnOut => "attn_out",
            Stage::Router => "router",
            Stage::Mlp1 => "mlp1_swiglu",
            Stage::Mlp2 => "mlp2_combine",
            Stage::Unembed => "unembed",
        }
    }
}

/// What a call of a stage has to move and to compute, at the least.
#[derive(Clone, Copy, Debug, Default)]
pub struct Cost {
    /// Bytes read and written in the device's memory.
    pub bytes: u64,
    /// Floating-point operations; a multiply-add is two.
    pub flops: u64,
}

/// Sums over the calls of one stage.
#[derive(Clone, Copy, Debug, Default)]
pub struct StageTotal {
    /// Calls.
    pub calls: u64,
    /// Time in them.
    pub time: Duration,
    /// Their cost.
    pub cost: Cost,
}

/// Sums by stage.
#[derive(Clone, Debug, Default)]
pub struct Profile {
    totals: [StageTotal; STAGES.len()],
}

impl Profile {
    /// Counts one call.
    pub fn add(&mut self, stage: Stage, time: Duration, cost: Cost) {
        let total = &mut self.totals[stage as usize];
        total.calls += 1;
        total.time += time;
        total.cost.bytes += cost.bytes;
        total.cost.flops += cost.flops;
    }

    /// The sums of one stage.
    pub fn total(&self, stage: Stage) -> StageTotal {
        self.totals[stage as usize]
    }

    /// The table: stage, calls, total seconds, average microseconds, share, GB/s, GFLOP/s.
    pub fn table(&self) -> String {
        let all: f64 = self.totals.iter().map(|t| t.time.as_secs_f64()).sum();
        let mut out = format!(
            "{:<14}{:>9}{:>10}{:>12}{:>8}{:>9}{:>10}\n",
            "stage", "calls", "total s", "average us", "share", "GB/s", "GFLOP/s"
        );
        for stage in STAGES {
            let t = self.total(stage);
            if t.calls == 0 {
                continue;
            }
            let seconds = t.time.as_secs_f64();
            let per_second = |n: u64| if seconds > 0.0 { n as f64 / seconds * 1e-9 } else { 0.0 };
            out += &format!(
                "{:<14}{:>9}{:>10.3}{:>12.1}{:>7.1}%{:>9.1}{:>10.1}\n",
                stage.name(),
                t.calls,
                seconds,
                seconds / t.calls as f64 * 1e6,
                if all > 0.0 { 100.0 * seconds / all } else { 0.0 },
                per_second(t.cost.bytes),
                per_second(t.cost.flops),
            );
        }
        out + &format!("{:<14}{:>9}{all:>10.3}\n", "all stages", "")
    }
}
