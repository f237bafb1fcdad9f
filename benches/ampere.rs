//! The time of decoding steps on Ampere's cards, estimated by a model, since it has not been measured on one.
//!
//!     cargo bench --profile dev --bench ampere
//!
//! *Products.* Each tile of the kernel that the library chooses goes to the multiprocessor that is free first, at the
//! share of mma.sync's peak that its loop reached on an H100 with 8,192 rows
//! (benches/record/h100/2026-11-27-ampere.md). A product takes at least the time in which its weights and activations
//! cross memory. Tokens select experts at random, with a fixed seed.
//!
//! *Attention* takes the time of its keys' and values' bytes, *the rest* that of its bytes, and each launch a fixed
//! time, which was fitted to a step of one row on that H100. The H100 is modelled, too, to be compared with what was
//! measured.

#![allow(missing_docs)]

mod chosen;
mod layer;
mod parameter;

use chosen::Chosen;
use getp::backend::gpu::catalogue::{Elements, Kernel};
use getp::backend::gpu::family::{self, Family};
use getp::backend::gpu::shapes::{GemmShape, MatrixForm, Numbers, Product};
use getp::backend::gpu::target::Target;
use getp::config::ModelConfig;

/// A card by its published figures, but for the H100's, which were measured.
struct Card {
    name: &'static str,
    multiprocessors: usize,
    /// Of mma.sync with FP16 in and float32 sums.
    flops: f64,
    /// Of memory, as it is reached.
    bytes_a_second: f64,
}

/// Of the memory's published rate so much is taken as reached: 3.0 of an H100's 3.35 TB/s.
const MEMORY_REACHED: f64 = 3.0 / 3.35;

const CARDS: [Card; 3] = [
    Card {
        name: "H100",
        multiprocessors: 132,
        flops: 641e12,
        bytes_a_second: 3.0e12,
    },
    Card {
        name: "A100 80GB",
        multiprocessors: 108,
        flops: 312e12,
        bytes_a_second: 2.039e12 * MEMORY_REACHED,
    },
    Card {
        name: "RTX 4090",
        multiprocessors: 128,
        flops: 165e12,
        bytes_a_second: 1.008e12 * MEMORY_REACHED,
    },
];

/// The share of mma.sync's peak in the loops, of MXFP4 and of 16-bit weights.
const MXFP4_SHARE: f64 = 0.57;
const W16_SHARE: f64 = 0.55;
const LAUNCH: f64 = 4.9e-6;
/// Keys of a row in the middle of a sequence of 32 + 992 tokens.
const KEYS: usize = 528;

struct Model<'a> {
    config: &'a ModelConfig,
    card: &'a Card,
    target: Target,
}

impl Model<'_> {
    /// The kernels that the library chooses.
    fn chosen(&self) -> Chosen<'_> {
        Chosen {
            target: &self.target,
            config: self.config,
            numbers: Numbers::new(Elements::F16, false),
        }
    }

    /// Seconds of a product in a step of so many rows, of which each group has its own.
    fn product(&self, product: Product, rows: usize, counts: &[usize]) -> f64 {
        let shape = self.chosen().shape(product, rows);
        let kernel = self.target.gemm(&shape).expect("a kernel").launch.kernel;
        let columns = layer::columns(self.config, product);
        let weights = layer::weight_bytes(&self.target, &shape, columns);
        let groups = counts.iter().filter(|&&rows| rows > 0).count();
        let all: usize = counts.iter().sum();
        let bytes = groups * weights + all * (2 * columns + 4 * shape.n);
        let crossing = bytes as f64 / self.card.bytes_a_second;
        crossing.max(self.multiplying(kernel, &shape, columns, counts))
    }

    /// When the last multiprocessor has multiplied its tiles.
    fn multiplying(&self, kernel: &Kernel, shape: &GemmShape, columns: usize, counts: &[usize]) -> f64 {
        let block_rows = kernel.cut.rows;
        let width = parameter::number(kernel, "WIDTH").expect("the maker has it");
        let share = if shape.form == MatrixForm::Mxfp4 {
            MXFP4_SHARE
        } else {
            W16_SHARE
        };
        let rate = self.card.flops * share / self.card.multiprocessors as f64;
        let mut ends = vec![0.0; self.card.multiprocessors];
        for &rows in counts.iter().filter(|&&rows| rows > 0) {
            let tiles = rows.div_ceil(kernel.tokens);
            let tokens = rows.div_ceil(tiles).next_multiple_of(width);
            let seconds = (2 * block_rows * tokens * columns) as f64 / rate;
            for _ in 0..tiles * shape.n.div_ceil(block_rows) {
                let first = ends.iter_mut().min_by(|a, b| f64::total_cmp(a, b));
                *first.expect("there are multiprocessors") += seconds;
            }
        }
        ends.into_iter().fold(0.0, f64::max)
    }

    /// Seconds of a step of the whole model.
    fn step(&self, rows: usize) -> f64 {
        let c = self.config;
        let counts = layer::expert_rows(c, rows);
        let products = self.product(Product::Qkv, rows, &[rows])
            + self.product(Product::AttnOut, rows, &[rows])
            + self.product(Product::Mlp1, rows, &counts)
            + self.product(Product::Mlp2, rows, &counts);
        // Half of the layers see a window.
        let keys = rows * (KEYS + KEYS.min(c.sliding_window)) / 2;
        let kept = keys * 2 * 2 * c.head_dim * c.n_kv_heads;
        // Norms, rotation, the experts' inputs: some forty bytes of each element of the residual stream.
        let other = rows * 40 * c.hidden_dim;
        let moved = (kept + other) as f64 / self.card.bytes_a_second;
        let layer = products + moved + self.chosen().launches(rows) as f64 * LAUNCH;
        let last = self.product(Product::Greedy, rows, &[rows]) + layer::STEP_LAUNCHES as f64 * LAUNCH;
        c.n_layers as f64 * layer + last
    }
}

fn main() {
    let config = ModelConfig::preset_20b();
    let is_there = |name: &str| name == "ampere";
    let family: &'static dyn Family = family::of("sm_80", is_there).expect("the family");
    println!("20b, decoding rows of {KEYS} positions: ms a step, tokens a second");
    for card in &CARDS {
        let target = Target {
            family,
            multiprocessors: card.multiprocessors,
        };
        let model = Model {
            config: &config,
            card,
            target,
        };
        for rows in [1, 32, 256, 890] {
            let step = model.step(rows);
            println!(
                "{:<10}{rows:>5} rows{:>8.2} ms{:>9.0} tok/s",
                card.name,
                step * 1e3,
                rows as f64 / step
            );
        }
    }
}
