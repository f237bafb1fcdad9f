//! The model: its dimensions and its mathematics over [`crate::ops::Ops`].

mod config;

pub use config::ModelConfig;
