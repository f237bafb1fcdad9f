//! warm_up, inference and finish in words.
