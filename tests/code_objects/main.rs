//! The code objects in the library: they match the host and the catalogue, and the compilers made them without spills.
//!
//! Without code objects (no GPU's feature, no GETP_*_ARCHS) the host's choices are compared with the catalogue alone,
//! and the other tests are ignored; `make test-gpu` builds them.

mod catalogue;
#[path = "../common/code_objects.rs"]
mod code_objects;
mod resources;
mod spills;

use getp::backend::gpu::catalogue::{Toolchain, platform_of};
use getp::backend::gpu::code_objects::CODE_OBJECTS;
use std::ffi::CStr;

/// A feature that the library was built without is not among them, nor are its architectures.
#[test]
fn features_and_their_architectures_can_be_asked() {
    let of = |feature: &str, toolchain: Toolchain| {
        let mut objects: Vec<&str> = CODE_OBJECTS.iter().map(|object| object.arch).collect();
        objects.retain(|arch| platform_of(arch).is_some_and(|(_, platform)| platform.toolchain == toolchain));
        objects.dedup();
        match objects.is_empty() {
            true => feature.to_owned(),
            false => format!("{feature}={}", objects.join(",")),
        }
    };
    let mut expected = vec!["cpu".to_owned()];
    expected.extend(cfg!(feature = "hip").then(|| of("hip", Toolchain::Hip)));
    expected.extend(cfg!(feature = "cuda").then(|| of("cuda", Toolchain::Cuda)));
    expected.extend(cfg!(feature = "mpi").then(|| "mpi".to_owned()));
    expected.extend(cfg!(feature = "simt").then(|| "simt".to_owned()));
    expected.extend(cfg!(feature = "tokenizer-json").then(|| "tokenizer-json".to_owned()));
    // SAFETY: a C string that lives as long as the library.
    let features = unsafe { CStr::from_ptr(getp::abi::library::getp_features()) };
    assert_eq!(features.to_str().unwrap(), expected.join(" "));
}
