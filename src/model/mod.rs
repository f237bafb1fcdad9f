//! The model's mathematics over [`crate::ops::Ops`].

mod forward;
mod rope;
mod weights;

pub use forward::{Activations, Scratch, StageWeights, enter, forward, forward_layer, forward_layers, leave};
pub use rope::Rope;
pub use weights::{Head, LayerWeights, Load, Weights};
