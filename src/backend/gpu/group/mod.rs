//! Several devices as one replica: a pipeline of stages, each of which has a contiguous range of the model's layers.
//!
//! [`form`] says which devices go together, [`cut`] which layers each has.

pub mod cut;
pub mod form;
