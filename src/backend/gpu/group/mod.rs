//! Several devices as one replica: a pipeline of stages, each of which has a contiguous range of the model's layers.
//!
//! [`form`] says which devices go together, [`cut`] which layers each has, both from what [`demand`] counts; [`hop`] brings
//! rows from a stage to the next. What runs them is [`super::replica`], for one device as for several.

pub mod cut;
pub mod demand;
pub mod form;
pub mod hop;
