//! The model: its dimensions and its mathematics over [`crate::ops::Ops`].

mod config;
mod forward;
mod rope;

pub use config::ModelConfig;
pub use forward::{Activations, Head, LayerWeights, Scratch, Stage, Weights, forward, forward_layer};
pub use rope::Rope;
