//! The C ABI: structs, exported functions, the panic and NULL guard, the last error.
//!
//! `include/getp.h` is made from this module by cbindgen. The two `cfg`s are never set while compiling: cbindgen turns
//! them into the header's `#if`s (see `cbindgen.toml`), which hide the eval program's structs from a program that has
//! its own, and from C++ also the three functions, which such a program declares with C++ linkage.

#![allow(
    clippy::missing_safety_doc,
    reason = "the exports' comments are the C header's, whose head says once what pointers must be"
)]

#[cfg(not(getp_no_driver_structs))]
pub mod types;

#[cfg(not(all(getp_no_driver_structs, cplusplus)))]
pub mod driver;
pub mod library;
pub mod model;
pub mod options;
pub mod requests;
pub mod sampler;
pub mod tokenizer;

pub mod guard;
pub mod lifecycle;
mod pointer;
mod registry;
mod vocabulary;
