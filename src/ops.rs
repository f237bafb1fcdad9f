//! The model's operations.
