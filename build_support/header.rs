//! Kernels and host are compiled apart: nothing but this finds out that they do not have the same structs.

use super::fingerprint;
use std::fs;

const SOURCE: &str = "src/backend/gpu/args.rs";
const HEADER: &str = "kernels/args.h";

/// Ends a build of kernels with a header that was not made from the host's structs.
pub fn check() {
    println!("cargo::rerun-if-changed={SOURCE}");
    let read = |path| fs::read_to_string(path).unwrap_or_else(|error| panic!("{path}: {error}"));
    let made_from = format!("fingerprint {:016x}", fingerprint::of(&read(SOURCE)));
    assert!(
        read(HEADER).contains(&made_from),
        "{HEADER} was not made from this {SOURCE}; run, without features, GETP_BLESS=1 cargo test --test header"
    );
}
