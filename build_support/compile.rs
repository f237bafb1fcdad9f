//! Code objects, each from a file of kernels for an architecture.

use super::cache;
use super::catalogue::Table;
use super::compiler::{Compiler, Compilers};
use super::files::out_dir;
use super::instances::Sources;
use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

/// A compiled file of kernels.
pub struct CodeObject {
    /// Whose kernels.
    pub family: &'static Table,
    /// What it runs on.
    pub arch: String,
    /// Its source as the catalogue names it, for example `norm.hip`; it may be one that the build makes.
    pub file: String,
    /// Where it lies.
    pub path: PathBuf,
}

/// In what ptxas says where it makes wgmmas wait for each other.
const LOSS: &str = "Potential Performance Loss";

/// Compiles every file for one architecture; gives the first failure's output.
pub fn compile_all<T: Compilers>(
    compiler: &Compiler,
    arch: &str,
    family: &'static Table,
    sources: &Sources,
) -> Result<Vec<CodeObject>, String> {
    in_parallel(&sources.files, |source| {
        let file = below_kernels(source);
        let path = out_dir().join(format!("{arch}-{}.o", file.replace(['/', '.'], "-")));
        let mut command = T::command(compiler, arch);
        command.args(include_flags(sources)).arg(source);
        let said = cache::compile(compiler, command, source, &path)?;
        let losses = said.lines().filter(|line| line.contains(LOSS));
        losses.for_each(|line| println!("cargo::warning={file} for {arch}: {line}"));
        let arch = arch.to_owned();
        Ok(CodeObject {
            family,
            arch,
            file,
            path,
        })
    })
}

/// Whether the compiler makes a code object for `arch` of a file without kernels.
pub fn knows<T: Compilers>(compiler: &Compiler, arch: &str) -> bool {
    let source = out_dir().join("empty.hip");
    fs::write(&source, "").expect("OUT_DIR can be written");
    let mut command = T::command(compiler, arch);
    command.arg(&source).arg("-o").arg(source.with_extension("o"));
    command.output().is_ok_and(|output| output.status.success())
}

/// Where kernels look for headers: `kernels/`, and where what is made for their family lies.
pub fn include_flags(sources: &Sources) -> [String; 2] {
    ["-Ikernels".into(), format!("-I{}", sources.include.display())]
}

/// A source's name as the catalogue gives it, for example `norm.hip`, wherever it lies.
pub fn below_kernels(source: &Path) -> String {
    let made = out_dir().join("kernels");
    let below = source.strip_prefix("kernels").or(source.strip_prefix(made));
    below.unwrap_or(source).display().to_string()
}

/// What `job` makes of every file, in their order, or the first failure; as many at once as cargo allows.
pub fn in_parallel<T: Send>(
    files: &[PathBuf],
    job: impl Fn(&Path) -> Result<T, String> + Sync,
) -> Result<Vec<T>, String> {
    let jobs = env::var("NUM_JOBS").ok().and_then(|jobs| jobs.parse().ok());
    let next = AtomicUsize::new(0);
    let worker = || {
        let mut results = Vec::new();
        while let Some((index, file)) = take(files, &next) {
            let result = job(file);
            if result.is_err() {
                next.store(files.len(), Ordering::Relaxed);
            }
            results.push((index, result));
        }
        results
    };
    let mut results = thread::scope(|scope| {
        let workers: Vec<_> = (0..jobs.unwrap_or(1)).map(|_| scope.spawn(worker)).collect();
        let results = workers.into_iter().map(|worker| worker.join().expect("no job panics"));
        results.flatten().collect::<Vec<_>>()
    });
    results.sort_by_key(|(index, _)| *index);
    results.into_iter().map(|(_, result)| result).collect()
}

/// The next file that nobody has taken.
fn take<'a>(files: &'a [PathBuf], next: &AtomicUsize) -> Option<(usize, &'a PathBuf)> {
    let index = next.fetch_add(1, Ordering::Relaxed);
    Some((index, files.get(index)?))
}
