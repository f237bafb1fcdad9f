//! What operations cost: bytes that cross memory once, and operations of arithmetic. The queue times them beside it.

use super::values::y_elements;
use crate::backend::gpu::args::WIRE_ROWS;
use crate::backend::gpu::shapes::{GemmLaunch, NormWork, Numbers, Product};
use crate::backend::gpu::weights::Matrix;
use crate::batch::StepPlan;
use crate::config::ModelConfig;
use crate::profile::Cost;

/// The costs of a step's operations.
pub struct Costs<'a> {
    pub config: &'a ModelConfig,
    pub numbers: &'a Numbers,
    /// Rows of the step: its shape's are those of its bucket.
    pub rows: usize,
    /// The same of those whose logits are wanted.
    pub wanted: usize,
}

impl Costs<'_> {
    /// Rows of this table, in the wire format.
    pub fn embed(&self, table: &Matrix) -> Cost {
        let row_bytes = table.bytes.bytes() / table.rows.next_multiple_of(WIRE_ROWS);
        moved(self.rows * (row_bytes + 4 * self.config.hidden_dim))
    }

    /// A norm reads the stream, and writes terms and what else it is for.
    pub fn norm(&self, work: &NormWork) -> Cost {
        let rows = if work.wanted_only { self.wanted } else { self.rows };
        let bytes = 4 + 2 * self.numbers.terms + 4 * usize::from(work.for_router) + self.sum_bytes(work.adds);
        moved(rows * self.config.hidden_dim * bytes)
    }

    /// Reading the stream, and adding the experts' outputs.
    pub fn settle(&self) -> Cost {
        moved(self.rows * self.config.hidden_dim * (4 + self.sum_bytes(true)))
    }

    /// What adding the experts' outputs to an element of the stream moves, that being read anyway.
    fn sum_bytes(&self, adds: bool) -> usize {
        if adds {
            self.config.experts_per_token * y_elements(self.numbers).bytes() + 4
        } else {
            0
        }
    }

    /// Weights, inputs and outputs moved once; each term of an input is a product of its own.
    pub fn product(&self, product: Product, w: &Matrix, chosen: &GemmLaunch) -> Cost {
        let k = self.config.experts_per_token;
        let terms = self.numbers.terms;
        let (rows, weights_read) = match product {
            Product::Mlp1 | Product::Mlp2 => (self.rows * k, experts_hit(self.rows, k, w.members)),
            Product::Greedy | Product::Logits => (self.wanted, 1.0),
            Product::Qkv | Product::AttnOut => (self.rows, 1.0),
        };
        let out_bytes = match product {
            Product::Qkv | Product::Logits => 4 * w.rows,
            // The residual stream is read, too.
            Product::AttnOut => 8 * w.rows,
            // A gate and its up become one.
            Product::Mlp1 => w.rows / 2 * 2 * terms,
            Product::Mlp2 => y_elements(self.numbers).bytes() * w.rows,
            Product::Greedy => 8 * chosen.candidates,
        };
        let weight_bytes = (w.bytes.bytes() as f64 * weights_read) as usize;
        Cost {
            bytes: (weight_bytes + rows * (2 * terms * w.cols + out_bytes)) as u64,
            flops: 2 * (rows * w.rows * w.cols * terms) as u64,
        }
    }

    /// Queries, keys and values from float32 to the cache's format.
    pub fn rope_store(&self) -> Cost {
        moved(self.rows * self.config.qkv_dim() * (4 + self.numbers.kv.bytes()))
    }

    /// Keys and values read once by each sequence, queries and the output by each row.
    pub fn attention(&self, plan: &StepPlan, windowed: bool) -> Cost {
        let c = self.config;
        let (mut keys_read, mut products) = (0, 0);
        for chunk in &plan.chunks {
            let last = chunk.first_position + chunk.rows;
            let seen = |end: usize| if windowed { end.min(c.sliding_window) } else { end };
            keys_read += last.min(seen(last) + chunk.rows - 1);
            products += chunk.rows * (seen(chunk.first_position + 1) + seen(last)) / 2;
        }
        let kv_bytes = keys_read * 2 * c.n_kv_heads * c.head_dim * self.numbers.kv.bytes();
        let row_bytes = c.q_dim() * (self.numbers.kv.bytes() + 2 * self.numbers.terms);
        Cost {
            bytes: (kv_bytes + plan.rows() * row_bytes) as u64,
            flops: (4 * products * c.q_dim()) as u64,
        }
    }

    /// The router, whose input stays in the multiprocessor.
    pub fn route(&self, w: &Matrix) -> Cost {
        let c = self.config;
        Cost {
            bytes: (8 * self.rows * c.experts_per_token + w.bytes.bytes()) as u64,
            flops: (2 * self.rows * c.n_experts * c.hidden_dim) as u64,
        }
    }

    /// The router's input, where it is read from memory.
    pub fn router_input(&self) -> Cost {
        moved(4 * self.rows * self.config.hidden_dim)
    }

    /// Giving each row's experts their slots.
    pub fn sort(&self) -> Cost {
        moved(8 * self.rows * self.config.experts_per_token)
    }

    /// Copying rows to their slots.
    pub fn gather(&self) -> Cost {
        let c = self.config;
        moved(2 * self.numbers.terms * self.rows * c.hidden_dim * (1 + c.experts_per_token))
    }

    /// The largest of so many candidates a row, each with its index unless they are the `whole_rows`.
    pub fn argmax(&self, candidates: usize, whole_rows: bool) -> Cost {
        moved(self.wanted * candidates * if whole_rows { 4 } else { 8 })
    }

    /// So many rows of logits.
    pub fn logits(&self, rows: usize) -> Cost {
        moved(4 * rows * self.config.vocab_size)
    }
}

/// The share of `experts` experts that any of `rows` rows reaches, each row having `k` of them: their weights are read.
/// The host does not know which they are; it counts as if rows chose evenly.
fn experts_hit(rows: usize, k: usize, experts: usize) -> f64 {
    1.0 - (1.0 - k as f64 / experts as f64).powf(rows as f64)
}

/// A cost of bytes alone.
fn moved(bytes: usize) -> Cost {
    Cost {
        bytes: bytes as u64,
        flops: 0,
    }
}
