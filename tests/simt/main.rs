//! The emulated SIMT machine and its driver detect each kind of mistake that they are meant to detect.

#![cfg(feature = "simt")]

mod driver;
mod machine;

use std::path::{Path, PathBuf};
use std::process::Command;

/// Compiles to a file of this name in the tests' own folder.
fn compile(name: &str, flags: &[&str], sources: &[&str]) -> PathBuf {
    let out = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let mut command = Command::new(std::env::var_os("CXX").unwrap_or_else(|| "c++".into()));
    command.current_dir(env!("CARGO_MANIFEST_DIR"));
    command.args(["-std=c++17", "-fvisibility=hidden", "-Ikernels", "-x", "c++"]);
    command
        .args(flags)
        .args(sources)
        .arg("-o")
        .arg(&out)
        .args(["-lpthread", "-ldl"]);
    let output = command.output().expect("a C++ compiler (set CXX)");
    assert!(
        output.status.success(),
        "{command:?}: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    out
}
