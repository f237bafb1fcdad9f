//! The logits file.
