//! The code objects in the library: they match the host and the catalogue, and the compilers made them without spills.
//!
//! Without code objects (no GPU's feature, no GETP_*_ARCHS) the host's choices are compared with the catalogue alone, and
//! the other tests are ignored; `make test-gpu` builds them.

mod catalogue;
#[path = "../common/code_objects.rs"]
mod code_objects;
mod resources;
mod spills;
