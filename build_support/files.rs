//! Where files lie.

use std::env;
use std::ffi::OsStr;
use std::fs;
use std::path::PathBuf;

/// Cargo's folder for what the build makes.
pub fn out_dir() -> PathBuf {
    PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"))
}

/// The `.hip` files of folders, sorted.
pub fn sources(folders: &[&str]) -> Vec<PathBuf> {
    let mut files: Vec<PathBuf> = folders
        .iter()
        .filter_map(|folder| fs::read_dir(folder).ok())
        .flatten()
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(|path| path.extension() == Some(OsStr::new("hip")))
        .collect();
    files.sort();
    files
}
