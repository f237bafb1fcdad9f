//! The operations on GPUs: one host side for every runtime and every target.
//!
//! [`driver`] is the seam to a runtime, [`target`] the one to a family of kernels; everything else is the same for all.

pub mod args;
pub mod attention_plan;
pub mod ceilings;
pub mod choice;
pub mod code_objects;
pub mod context;
pub mod driver;
mod grids;
pub mod kv;
pub mod logits;
pub mod memory;
pub mod open;
pub mod ops;
mod profile;
pub mod replica;
pub mod staging;
pub mod step;
pub mod target;
pub mod tiles;
pub mod weights;
pub mod wire;
