//! Compilers of kernels, and how they are called.

use super::catalogue::Toolchain;
use std::path::PathBuf;
use std::process::Command;

/// A program that compiles kernels.
pub struct Compiler {
    /// How it is called.
    pub program: PathBuf,
    /// Its version in words.
    pub version: String,
}

impl Compiler {
    /// The compiler called `program`, if it runs.
    pub fn find(program: impl Into<PathBuf>) -> Option<Self> {
        let program = program.into();
        let output = Command::new(&program).arg("--version").output().ok()?;
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        // g++ has it in its first line, without a word for it.
        let named = |line: &&str| line.contains("version") || line.contains("release");
        let version = text.lines().find(named).or(text.lines().next());
        output.status.success().then(|| Self {
            version: version.unwrap_or_default().trim().to_owned(),
            program,
        })
    }

    /// Its name and version.
    pub fn describe(&self) -> String {
        format!("{} ({})", self.program.display(), self.version)
    }
}

/// What differs from one vendor to another.
pub trait Compilers {
    /// Which one the catalogue names.
    const TOOLCHAIN: Toolchain;
    /// For messages.
    const NAME: &'static str;
    /// The cargo feature, as a build script sees it.
    const FEATURE: &'static str;
    /// The variable that names architectures.
    const ARCHS_VARIABLE: &'static str;
    /// The variable that names the only compiler to try.
    const COMPILER_VARIABLE: &'static str;
    /// The variable that names the folder of the vendor's toolchain, where a compiler is looked for.
    const HOME_VARIABLE: &'static str;
    /// The compilers that it takes, in words.
    const WANTED: &'static str;

    /// The compilers there are if none is named, the best first.
    fn compilers() -> Vec<Compiler>;
    /// The command that compiles for `arch`, but for the folders of headers, the source and `-o`.
    fn command(compiler: &Compiler, arch: &str) -> Command;
}
