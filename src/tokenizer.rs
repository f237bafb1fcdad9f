//! The program's byte-level BPE, in near-linear time.
