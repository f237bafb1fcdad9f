//! The profile: the operations of a step, the bytes that each moves and the arithmetic that it does at least, and the
//! times measured.

use std::ops::Add;
use std::time::Duration;

/// An operation of the forward pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs)] // the variants are the operations of `model::forward`
pub enum Operation {
    Embed,
    Norm,
    Qkv,
    RopeStore,
    Attention,
    AttnOut,
    Router,
    Sort,
    Gather,
    Mlp1,
    Mlp2,
    Unembed,
    Argmax,
    Draw,
    Score,
}

/// Every operation, in the order of the forward pass.
pub const OPERATIONS: [Operation; 15] = [
    Operation::Embed,
    Operation::Norm,
    Operation::Qkv,
    Operation::RopeStore,
    Operation::Attention,
    Operation::AttnOut,
    Operation::Router,
    Operation::Sort,
    Operation::Gather,
    Operation::Mlp1,
    Operation::Mlp2,
    Operation::Unembed,
    Operation::Argmax,
    Operation::Draw,
    Operation::Score,
];

impl Operation {
    /// The operation's name in the table.
    pub fn name(self) -> &'static str {
        match self {
            Operation::Embed => "embed",
            Operation::Norm => "norm",
            Operation::Qkv => "qkv",
            Operation::RopeStore => "rope_store",
            Operation::Attention => "attention",
            Operation::AttnOut => "attn_out",
            Operation::Router => "router",
            Operation::Sort => "sort",
            Operation::Gather => "gather",
            Operation::Mlp1 => "mlp1_swiglu",
            Operation::Mlp2 => "mlp2_combine",
            Operation::Unembed => "unembed",
            Operation::Argmax => "argmax",
            Operation::Draw => "draw",
            Operation::Score => "score",
        }
    }
}

/// The least that a call of an operation must move and compute: every input read once, every output written once.
#[derive(Clone, Copy, Debug, Default)]
pub struct Cost {
    /// Bytes read and written in the device's memory.
    pub bytes: u64,
    /// Floating-point operations; a multiply-add is two.
    pub flops: u64,
}

impl Add for Cost {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            bytes: self.bytes + other.bytes,
            flops: self.flops + other.flops,
        }
    }
}

/// Sums over the calls of one operation.
#[derive(Clone, Copy, Debug, Default)]
pub struct OperationTotal {
    /// Number of calls.
    pub calls: u64,
    /// Time of all calls.
    pub time: Duration,
    /// Cost of all calls.
    pub cost: Cost,
}

/// A device's roofline: the highest rates of its memory and its matrix cores, as measured.
#[derive(Clone, Copy, Debug)]
pub struct Roofline {
    /// Bytes that the memory moves in a second, read and written.
    pub bytes_per_s: f64,
    /// Operations that the matrix cores do in a second.
    pub flops_per_s: f64,
    /// Those beside attention's exponentials; as many where that is not measured.
    pub attention_flops_per_s: f64,
}

/// What limits an operation: the memory's bandwidth or the matrix cores' rate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)] // the two rates of `Roofline`
pub enum LimitedBy {
    Memory,
    Matrix,
}

impl LimitedBy {
    /// The limit's name in the table.
    pub fn name(self) -> &'static str {
        match self {
            LimitedBy::Memory => "memory",
            LimitedBy::Matrix => "matrix",
        }
    }
}

impl Roofline {
    /// The least time that an operation takes on this device, as a share of `seconds`, and what limits it.
    pub fn share(&self, operation: Operation, cost: Cost, seconds: f64) -> (f64, LimitedBy) {
        let memory = cost.bytes as f64 / self.bytes_per_s;
        let flops_per_s = match operation {
            Operation::Attention => self.attention_flops_per_s,
            _ => self.flops_per_s,
        };
        let matrix = cost.flops as f64 / flops_per_s;
        let (least, limit) = if matrix > memory {
            (matrix, LimitedBy::Matrix)
        } else {
            (memory, LimitedBy::Memory)
        };
        (if seconds > 0.0 { least / seconds } else { 0.0 }, limit)
    }
}

/// How evenly rows are spread over the experts of a layer: the rows of the busiest expert, divided by the mean of all
/// experts.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Spread {
    /// Number of layers recorded.
    pub layers: u64,
    /// The sum of the ratio over these layers.
    pub busiest_sum: f64,
    /// The largest ratio of these layers.
    pub busiest_most: f64,
}

impl Spread {
    /// Records a layer. `rows` is the number of rows of each expert.
    pub fn add(&mut self, rows: &[u32]) {
        let all: u64 = rows.iter().map(|&n| u64::from(n)).sum();
        let most = rows.iter().copied().max().unwrap_or(0);
        if all == 0 {
            return;
        }
        let busiest = f64::from(most) * rows.len() as f64 / all as f64;
        self.layers += 1;
        self.busiest_sum += busiest;
        self.busiest_most = self.busiest_most.max(busiest);
    }

    /// The mean ratio of the layers recorded.
    pub fn busiest(&self) -> f64 {
        self.busiest_sum / self.layers.max(1) as f64
    }
}

/// How steps followed each other on a device. `idle` is near 0 if copying and sampling are hidden behind the steps.
#[derive(Clone, Copy, Debug, Default)]
pub struct StepTimes {
    /// Number of steps.
    pub steps: u64,
    /// From the start of a step's first kernel to the end of its last.
    pub computing: Duration,
    /// From the end of a step to the start of the next.
    pub idle: Duration,
    /// From the end of a step until its logits are on the host.
    pub copying: Duration,
}

impl StepTimes {
    /// The share of the time from the first step's start to the last one's end in which the device computed.
    pub fn busy(&self) -> Option<f64> {
        let all = self.computing + self.idle;
        (!all.is_zero()).then(|| self.computing.as_secs_f64() / all.as_secs_f64())
    }
}

/// A kernel that ran for an operation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KernelCalls {
    /// The operation.
    pub operation: Operation,
    /// The kernel's name in its code object.
    pub name: String,
    /// How often it was launched.
    pub calls: u64,
}

/// Calls, times and costs by operation.
#[derive(Clone, Debug, Default)]
pub struct Profile {
    totals: [OperationTotal; OPERATIONS.len()],
    /// The kernels that ran, those of an operation in the order in which each came first.
    pub kernels: Vec<KernelCalls>,
    /// The device's roofline, if it was measured.
    pub roofline: Option<Roofline>,
    /// How evenly rows were spread over the experts, if it was recorded.
    pub spread: Spread,
    /// How steps followed each other, if they were looked at as wholes.
    pub steps: StepTimes,
}

impl Profile {
    /// Adds one call.
    pub fn add(&mut self, operation: Operation, time: Duration, cost: Cost) {
        let total = &mut self.totals[operation as usize];
        total.calls += 1;
        total.time += time;
        total.cost.bytes += cost.bytes;
        total.cost.flops += cost.flops;
    }

    /// Calls, time and cost of one operation.
    pub fn total(&self, operation: Operation) -> OperationTotal {
        self.totals[operation as usize]
    }

    /// The table: operation, calls, total seconds, average microseconds, share of the time, GB/s and GFLOP/s. With a
    /// roofline TFLOP/s, the share of the limiting rate that was reached, and which rate limits the operation.
    pub fn table(&self) -> String {
        let all: f64 = self.totals.iter().map(|t| t.time.as_secs_f64()).sum();
        let (flops, unit) = match self.roofline {
            Some(_) => ("TFLOP/s", 1e-12),
            None => ("GFLOP/s", 1e-9),
        };
        let mut out = format!(
            "{:<14}{:>9}{:>10}{:>12}{:>8}{:>9}{:>10}",
            "operation", "calls", "total s", "average us", "share", "GB/s", flops
        );
        out += if self.roofline.is_some() {
            "  of the limit\n"
        } else {
            "\n"
        };
        for operation in OPERATIONS {
            let t = self.total(operation);
            if t.calls == 0 {
                continue;
            }
            let seconds = t.time.as_secs_f64();
            let per_second = |n: u64| if seconds > 0.0 { n as f64 / seconds } else { 0.0 };
            out += &format!(
                "{:<14}{:>9}{:>10.3}{:>12.1}{:>7.1}%{:>9.1}{:>10.1}",
                operation.name(),
                t.calls,
                seconds,
                seconds / t.calls as f64 * 1e6,
                if all > 0.0 { 100.0 * seconds / all } else { 0.0 },
                per_second(t.cost.bytes) * 1e-9,
                per_second(t.cost.flops) * unit,
            );
            out += &self.roofline.map_or("\n".into(), |roofline| {
                let (share, limit) = roofline.share(operation, t.cost, seconds);
                format!("{:>6.1}% {}\n", 100.0 * share, limit.name())
            });
        }
        out += &format!("{:<14}{:>9}{all:>10.3}\n", "all operations", "");
        out + &self.kernel_lines() + &self.notes()
    }

    /// A line for each kernel: its operation, its name, and how often it was launched.
    fn kernel_lines(&self) -> String {
        let mut out = String::new();
        for operation in OPERATIONS {
            for kernel in self.kernels.iter().filter(|kernel| kernel.operation == operation) {
                if out.is_empty() {
                    out = format!("{:<14}{:<36}{:>9}\n", "operation", "kernel", "calls");
                }
                out += &format!("{:<14}{:<36}{:>9}\n", operation.name(), kernel.name, kernel.calls);
            }
        }
        out
    }

    /// The last lines: the measured rates, and the spread over experts.
    fn notes(&self) -> String {
        let mut out = String::new();
        if let Some(roofline) = self.roofline {
            out += &format!(
                "limits measured here: memory {:.0} GB/s, matrix cores {:.0} TFLOP/s, and {:.0} beside attention's \
                 exponentials; experts' weights are counted as if rows chose experts evenly\n",
                roofline.bytes_per_s * 1e-9,
                roofline.flops_per_s * 1e-12,
                roofline.attention_flops_per_s * 1e-12,
            );
        }
        if self.spread.layers > 0 {
            out += &format!(
                "the busiest expert of a layer had {:.2} times the mean, at most {:.2} (last layer of {} steps)\n",
                self.spread.busiest(),
                self.spread.busiest_most,
                self.spread.layers
            );
        }
        if let Some(busy) = self.steps.busy() {
            out += &format!(
                "the device was busy for {:.1} % of the time from its first step to its last\n",
                100.0 * busy
            );
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROOFLINE: Roofline = Roofline {
        bytes_per_s: 4e12,
        flops_per_s: 8e14,
        attention_flops_per_s: 6e14,
    };

    #[test]
    fn an_operation_is_limited_by_what_takes_longer() {
        let share = |operation, bytes, flops, seconds| ROOFLINE.share(operation, Cost { bytes, flops }, seconds);
        let (mlp1, attention) = (Operation::Mlp1, Operation::Attention);
        assert_eq!(share(mlp1, 4_000_000, 400_000_000, 4e-6), (0.25, LimitedBy::Memory));
        assert_eq!(share(mlp1, 4_000_000, 1_600_000_000, 4e-6), (0.5, LimitedBy::Matrix));
        assert_eq!(
            share(attention, 4_000_000, 1_200_000_000, 4e-6),
            (0.5, LimitedBy::Matrix)
        );
        assert_eq!(share(mlp1, 4, 8, 0.0).0, 0.0);
    }

    #[test]
    fn the_table_has_the_limit_only_under_a_roof() {
        let mut profile = Profile::default();
        let cost = Cost {
            bytes: 4_000_000_000,
            flops: 0,
        };
        profile.add(Operation::Sort, Duration::from_millis(2), cost);
        assert!(!profile.table().contains("limit"));
        profile.roofline = Some(ROOFLINE);
        let table = profile.table();
        assert!(table.contains("50.0% memory"), "{table}");
        assert!(
            table.contains("memory 4000 GB/s, matrix cores 800 TFLOP/s, and 600 beside"),
            "{table}"
        );
    }

    #[test]
    fn the_table_names_the_kernels_of_each_operation() {
        let mut profile = Profile::default();
        assert!(!profile.table().contains("kernel"));
        for (operation, name, calls) in [
            (Operation::Mlp1, "mlp1_n128", 2),
            (Operation::Norm, "norm", 1),
            (Operation::Mlp1, "mlp1_n8", 1),
        ] {
            let name = name.to_owned();
            profile.kernels.push(KernelCalls { operation, name, calls });
        }
        let table = profile.table();
        let words = |line: &str| line.split_whitespace().collect::<Vec<_>>().join(" ");
        let lines: Vec<_> = table
            .lines()
            .skip_while(|line| !line.contains("kernel"))
            .map(words)
            .collect();
        assert_eq!(
            lines,
            [
                "operation kernel calls",
                "norm norm 1",
                "mlp1_swiglu mlp1_n128 2",
                "mlp1_swiglu mlp1_n8 1",
            ]
        );
    }

    #[test]
    fn the_spread_is_the_busiest_over_the_mean() {
        let mut spread = Spread::default();
        spread.add(&[1, 1, 1, 1]);
        spread.add(&[0, 8, 0, 0]);
        spread.add(&[0, 0, 0, 0]);
        assert_eq!((spread.layers, spread.busiest(), spread.busiest_most), (2, 2.5, 4.0));
    }
}
