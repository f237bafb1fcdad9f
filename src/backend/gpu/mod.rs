//! The operations on GPUs: one host side for every runtime and every target.
//!
//! [`driver`] is the seam to a runtime, [`family`] the one to a family of kernels, whose tables are in [`catalogue`];
//! everything else is the same for all.

pub mod args;
pub mod attention_plan;
pub mod attention_runs;
#[path = "../../../kernels/catalogue.rs"]
pub mod catalogue;
pub mod code_objects;
pub mod context;
pub mod device_choice;
pub mod discover;
pub mod driver;
pub mod family;
pub mod group;
pub mod kv;
pub mod launch;
mod launches;
pub mod layout;
mod limits;
pub mod logits;
pub mod memory;
pub mod open;
pub mod ops;
pub mod peaks;
pub mod profile;
pub mod replica;
pub mod shapes;
pub mod shared_keys;
pub mod stage;
pub mod staging;
pub mod step;
mod supports;
pub mod target;
pub mod weights;
mod whole_rows;
