//! Exact packing.
