//! The model's mathematics over [`crate::ops::Ops`].

mod forward;
mod rope;

pub use forward::{Activations, Head, LayerWeights, Scratch, Stage, Weights, forward, forward_layer};
pub use rope::Rope;
