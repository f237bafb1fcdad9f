//! Compiles the kernels for the SIMT machine emulated on the CPU, into a shared library at `GETP_SIMT_KERNELS`.
//!
//! `CXX` names the compiler (default `c++`). tests/programs/simt.sh makes one more such library, with AddressSanitizer.

use super::cache;
use super::catalogue::table_of;
use super::compile;
use super::compiler::Compiler;
use super::files::out_dir;
use super::header;
use super::instances::{self, Sources};
use std::env;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The machine's architecture.
pub const DEVICE: &str = "simt";

/// Compiles every kernel file of the family that the machine emulates.
pub fn build() {
    println!("cargo::rerun-if-changed=kernels");
    println!("cargo::rerun-if-env-changed=CXX");
    header::check();
    let program = env::var_os("CXX").unwrap_or_else(|| "c++".into());
    let Some(compiler) = Compiler::find(&program) else {
        panic!("{program:?} does not run; feature simt needs g++ or clang++ (set CXX)");
    };
    let family = table_of(DEVICE).expect("a family is emulated on the CPU");
    let mut sources = instances::sources(family);
    sources.files.push("kernels/gpu/simt.cpp".into());
    let objects = compile::in_parallel(&sources.files, |source| object(&compiler, &sources, source));
    let objects = objects.unwrap_or_else(|why| panic!("{why}"));
    let library = out_dir().join("libgetp_simt_kernels.so");
    link(&compiler, &objects, &library);
    println!("cargo::rustc-env=GETP_SIMT_KERNELS={}", library.display());
}

/// `kernels/norm.hip` becomes `kernels_norm.hip.o`.
fn object(compiler: &Compiler, sources: &Sources, source: &Path) -> Result<PathBuf, String> {
    let name = format!("kernels_{}.o", compile::below_kernels(source).replace('/', "_"));
    let object = out_dir().join(name);
    let mut command = command(compiler);
    command.args(["-c", "-fPIC", "-std=c++17", "-fvisibility=hidden", "-x", "c++"]);
    command.args(compile::include_flags(sources)).arg(source);
    cache::compile(compiler, command, source, &object)?;
    Ok(object)
}

fn link(compiler: &Compiler, objects: &[PathBuf], library: &Path) {
    let mut link = command(compiler);
    link.arg("-shared").args(objects).arg("-o").arg(library);
    link.args(["-lpthread", "-ldl"]);
    let output = link.output().expect("the compiler ran before");
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{link:?}\n{errors}");
}

fn command(compiler: &Compiler) -> Command {
    let mut command = Command::new(&compiler.program);
    command.arg("-O2");
    if !compiler.version.contains("clang") {
        command.arg("-fno-weak");
    }
    command
}
