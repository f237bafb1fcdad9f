//! The code objects that the library carries: that they are what the host and the catalogue say, and what the compilers made
//! of the kernels.
//!
//! Without code objects (no GPU's feature, no GETP_*_ARCHS) the host's choices are compared with the catalogue alone;
//! `make test-gpu` builds them.

mod catalogue;
mod resources;
mod spills;
