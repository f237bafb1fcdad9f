//! Stages, their costs and times.
