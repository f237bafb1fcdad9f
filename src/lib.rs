//! getp runs OpenAI's gpt-oss in offline batches behind the C ABI of an existing evaluation program.
//!
//! ARCHITECTURE.md explains the flow of data and what each module does. The C functions are in [`abi`]; Rust programs
//! (the tests, examples and benchmarks) may use the modules directly.

pub mod abi;
pub mod backend;
pub mod batch;
pub mod checkpoint;
pub mod cluster;
pub mod config;
pub mod descriptors;
pub mod dtype;
pub mod engine;
pub mod error;
pub mod file_kind;
pub mod float_environment;
pub mod grammar;
pub mod harmony;
pub mod kv_blocks;
pub mod logits;
pub mod memory;
pub mod model;
pub mod ops;
pub mod options;
pub mod process;
pub mod profile;
pub mod random;
pub mod replica;
pub mod report;
pub mod request;
pub mod requests;
pub mod sampler;
pub mod scheduler;
pub mod simd;
pub mod tensors;
pub mod text;
pub mod threads;
pub mod tokenizer;
pub mod weights;
pub mod workers;
