//! AMD code objects, by hipcc or any clang with an AMD target. The kernels include no header of ROCm's, so that a
//! distribution's clang and lld do.

use super::catalogue::Toolchain;
use super::compiler::{Compiler, Compilers};
use std::cmp::Reverse;
use std::env;
use std::process::Command;

/// clang's first release that knows gfx942 and compiles these kernels without spills.
const OLDEST_CLANG: u32 = 17;
const NEWEST_CLANG: u32 = 22;

pub struct Hip;

impl Compilers for Hip {
    const TOOLCHAIN: Toolchain = Toolchain::Hip;
    const NAME: &'static str = "AMD";
    const FEATURE: &'static str = "CARGO_FEATURE_HIP";
    const ARCHS_VARIABLE: &'static str = "GETP_HIP_ARCHS";
    const COMPILER_VARIABLE: &'static str = "GETP_HIPCC";
    const HOME_VARIABLE: &'static str = "ROCM_PATH";
    const WANTED: &'static str = "hipcc, or clang 17 or later with lld";

    /// The newest first: Debian's hipcc of ROCm 5.2 is a clang 15, which spills.
    fn compilers() -> Vec<Compiler> {
        let rocm = env::var(Self::HOME_VARIABLE).unwrap_or_else(|_| "/opt/rocm".into());
        let hipcc = [String::from("hipcc"), format!("{rocm}/bin/hipcc")];
        let clang = (OLDEST_CLANG..=NEWEST_CLANG)
            .rev()
            .map(|version| format!("clang-{version}"));
        let programs = hipcc.into_iter().chain(clang).chain(["clang".into()]);
        let mut found: Vec<Compiler> = programs.filter_map(Compiler::find).collect();
        found.sort_by_key(|compiler| Reverse(clang_version(compiler)));
        found
    }

    fn command(compiler: &Compiler, arch: &str) -> Command {
        let mut command = Command::new(&compiler.program);
        if is_hipcc(compiler) {
            // The code object's version is left to it: what its own runtime loads.
            command.arg("--genco");
        } else {
            command.args(["--cuda-device-only", "-mcode-object-version=5"]);
        }
        command
            .args(["-std=c++17", "-O3", "--no-gpu-bundle-output", "-nogpulib", "-nogpuinc"])
            .arg(format!("--offload-arch={arch}"));
        command
    }
}

fn is_hipcc(compiler: &Compiler) -> bool {
    compiler
        .program
        .file_name()
        .is_some_and(|name| name.to_string_lossy().contains("hipcc"))
}

/// 22 of `clang version 22.1.0`.
fn clang_version(compiler: &Compiler) -> u32 {
    let behind = compiler.version.split("clang version ").nth(1).unwrap_or_default();
    behind
        .split('.')
        .next()
        .and_then(|major| major.parse().ok())
        .unwrap_or(0)
}
