//! NVIDIA code objects, by nvcc.

use super::catalogue::Toolchain;
use super::compiler::{Compiler, Compilers};
use std::env;
use std::path::{Path, PathBuf};
use std::process::Command;

pub struct Cuda;

/// How the names of architectures begin that are compiled to PTX, a text, in place of code.
pub const PTX: &str = "compute_";

impl Compilers for Cuda {
    const TOOLCHAIN: Toolchain = Toolchain::Cuda;
    const NAME: &'static str = "NVIDIA";
    const FEATURE: &'static str = "CARGO_FEATURE_CUDA";
    const ARCHS_VARIABLE: &'static str = "GETP_CUDA_ARCHS";
    const COMPILER_VARIABLE: &'static str = "NVCC";
    const HOME_VARIABLE: &'static str = "CUDA_HOME";
    const WANTED: &'static str = "nvcc";

    fn compilers() -> Vec<Compiler> {
        let home = env::var_os(Self::HOME_VARIABLE).map_or_else(|| PathBuf::from("/usr/local/cuda"), PathBuf::from);
        let programs = [PathBuf::from("nvcc"), home.join("bin/nvcc")];
        programs.into_iter().filter_map(Compiler::find).collect()
    }

    fn command(compiler: &Compiler, arch: &str) -> Command {
        let mut command = Command::new(&compiler.program);
        command.args(["-x", "cu", "-std=c++17", "-O3"]);
        let number = arch.trim_start_matches("sm_");
        match arch.starts_with(PTX) {
            true => command.arg("-ptx").arg(format!("-gencode=arch={arch},code={arch}")),
            false => command
                .arg("-cubin")
                .arg(format!("-gencode=arch={PTX}{number},code=sm_{number}")),
        };
        // NVIDIA's Python packages have the headers beside bin/, where nvcc does not look for them.
        if let Some(include) = include_dir(&compiler.program) {
            command.arg("-I").arg(include);
        }
        command
    }
}

fn include_dir(nvcc: &Path) -> Option<PathBuf> {
    let include = nvcc.parent()?.parent()?.join("include");
    include.is_dir().then_some(include)
}
