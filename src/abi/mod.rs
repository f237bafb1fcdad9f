//! The C ABI: structs, exported functions, the panic and NULL guard, the last error.
//!
//! cbindgen generates `include/getp.h` from this module. The two `cfg`s are never set while compiling: cbindgen turns
//! them into the header's `#if`s (see `cbindgen.toml`). Those hide the eval program's structs from a program that
//! declares them itself and, in C++, also the three functions, which such a program declares without `extern "C"`.

#![allow(
    clippy::missing_safety_doc,
    reason = "these comments go into the C header, which states at its top what every pointer must be"
)]

#[cfg(not(getp_no_driver_structs))]
pub mod types;

pub mod batch;
#[cfg(not(all(getp_no_driver_structs, cplusplus)))]
pub mod driver;
pub mod event;
pub mod harmony;
pub mod library;
pub mod model;
pub mod options;
pub mod requests;
pub mod sampler;
pub mod status;
pub mod text;
pub mod tokenizer;

pub mod guard;
pub mod lifecycle;
mod pointer;
mod registry;
mod sized;
mod vocabulary;
