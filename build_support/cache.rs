//! Compiled kernels, kept by what they were made of.
//!
//! Cargo runs the build script again for every set of features and every profile, each time with an empty folder, and
//! once more when any kernel changes. Most files are then what they were, and one takes up to a minute. So an object's
//! name in `getp-kernels/`, in cargo's target folder, is a hash of all that it depends on: the compiler and its
//! version, the arguments, the file, and the headers of ours that it includes. Where the build's own folder lies is no
//! part of it. What is there need not be made. `cargo clean` empties the folder.

use super::compiler::Compiler;
use super::files::out_dir;
use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io;
use std::path::{Path, PathBuf};
use std::process::{self, Command};

/// Runs a command that compiles `source` and takes `-o`, if it has not run before; `object` becomes a copy of what it
/// made. Gives what the compiler said.
pub fn compile(compiler: &Compiler, mut command: Command, source: &Path, object: &Path) -> Result<String, String> {
    let kept = folder().join(format!("{:016x}.o", key(compiler, &command, source)));
    let said = kept.with_extension("txt");
    if !kept.exists() || !said.exists() {
        // Whole or not there, whoever else builds in the same folder.
        let part = kept.with_extension(process::id().to_string());
        command.arg("-o").arg(&part);
        let output = command.output().map_err(|error| format!("{command:?}: {error}"))?;
        if !output.status.success() {
            return Err(format!("{command:?}\n{}", String::from_utf8_lossy(&output.stderr)));
        }
        in_words(fs::write(&said, &output.stderr), &said)?;
        in_words(fs::rename(&part, &kept), &kept)?;
    }
    in_words(fs::copy(&kept, object), object)?;
    Ok(fs::read_to_string(&said).unwrap_or_default())
}

fn in_words<T>(result: io::Result<T>, path: &Path) -> Result<T, String> {
    result.map_err(|error| format!("{}: {error}", path.display()))
}

/// `OUT_DIR` is `target/PROFILE/build/getp-HASH/out`.
fn folder() -> PathBuf {
    let out = out_dir();
    let target = out.ancestors().nth(4).expect("OUT_DIR lies in the target folder");
    let folder = target.join("getp-kernels");
    fs::create_dir_all(&folder).expect("cargo's target folder can be written");
    folder
}

fn key(compiler: &Compiler, command: &Command, source: &Path) -> u64 {
    let mut hasher = DefaultHasher::new();
    compiler.program.hash(&mut hasher);
    compiler.version.hash(&mut hasher);
    let own = out_dir().display().to_string();
    let mut folders = Vec::new();
    for argument in command.get_args().map(|argument| argument.to_string_lossy()) {
        folders.extend(argument.strip_prefix("-I").map(PathBuf::from));
        argument.replace(&own, "").hash(&mut hasher);
    }
    let mut files = Vec::new();
    read_with_includes(source, &folders, &mut files);
    files.iter().for_each(|(_, text)| text.hash(&mut hasher));
    hasher.finish()
}

/// Adds a file and what it includes by `#include "..."`, wanted by the target or not.
fn read_with_includes(file: &Path, folders: &[PathBuf], files: &mut Vec<(PathBuf, String)>) {
    let Ok(path) = file.canonicalize() else {
        return;
    };
    if files.iter().any(|(known, _)| *known == path) {
        return;
    }
    let text = fs::read_to_string(&path).unwrap_or_default();
    files.push((path, text.clone()));
    let names = text
        .lines()
        .filter_map(|line| line.trim_start().strip_prefix("#include \""));
    for name in names.filter_map(|name| name.split('"').next()) {
        // Beside the file, or in a folder that -I names.
        let beside = file.parent().unwrap_or(Path::new(""));
        read_with_includes(&beside.join(name), folders, files);
        folders
            .iter()
            .for_each(|folder| read_with_includes(&folder.join(name), folders, files));
    }
}
