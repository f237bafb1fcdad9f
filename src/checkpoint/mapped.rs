//! Files mapped into memory. Reading a page behind the end of a file that has become shorter raises SIGBUS, which
//! cannot be turned into an error; so the file's length is checked again before each tensor is read.

use std::fs::{File, Metadata};
use std::ops::Deref;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use memmap2::Mmap;

use crate::descriptors::{above_stderr, open_file};
use crate::error::{Error, Result};
use crate::file_kind::{self, GivenAs};

/// A file that the library has mapped for reading. It must not be changed while this lives.
#[derive(Debug)]
pub(super) struct MappedFile {
    path: PathBuf,
    file: File,
    map: Mmap,
}

impl MappedFile {
    /// Maps the file.
    pub(super) fn open(path: &Path) -> Result<Self> {
        let error = |error| Error::io(path, error);
        let file = open_file(path).and_then(above_stderr).map_err(error)?;
        // SAFETY: the map is read-only and private. The types that hold it document that the file must not be changed
        // while they live; `check` finds one that has become shorter.
        let map = unsafe { Mmap::map(&file) }.map_err(error)?;
        Ok(Self {
            path: path.to_owned(),
            file,
            map,
        })
    }

    /// Refuses a file that has become shorter.
    pub(super) fn check(&self) -> Result<()> {
        let metadata = self.file.metadata().map_err(|error| Error::io(&self.path, error))?;
        check_length(&self.path, &metadata, self.map.len() as u64)
    }
}

impl Deref for MappedFile {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.map
    }
}

/// A file that the program has mapped and keeps open.
#[derive(Debug)]
pub(super) struct WatchedFile {
    /// `/proc/self/fd/N` of the program's descriptor.
    path: PathBuf,
    inode: u64,
    bytes: u64,
}

impl WatchedFile {
    /// The file open as `descriptor`, expected to have `bytes`. `None` if it is not the file mapped at `data`: the
    /// program may have closed it, and the descriptor may be another file's now.
    pub(super) fn new(descriptor: i32, data: *const u8, bytes: u64) -> Option<Self> {
        let path = PathBuf::from(format!("/proc/self/fd/{descriptor}"));
        let inode = std::fs::metadata(&path).ok().filter(Metadata::is_file)?.ino();
        let maps = std::fs::read_to_string("/proc/self/maps").ok()?;
        let is_mapped = maps.lines().any(|line| inode_at(line, data) == Some(inode));
        is_mapped.then_some(Self { path, inode, bytes })
    }

    /// Refuses a file that has become shorter. A file that the program has closed since cannot be checked, and passes.
    pub(super) fn check(&self) -> Result<()> {
        match std::fs::metadata(&self.path) {
            Ok(metadata) if metadata.ino() == self.inode => check_length(&self.path, &metadata, self.bytes),
            _ => Ok(()),
        }
    }
}

/// The error for a model in the program's memory. If the file open as `descriptor` is the one mapped at `data`, it
/// names that, and what it seems to be if it is no model.
pub fn explain_mapped(descriptor: i32, data: *const u8, error: Error) -> Error {
    let of_contents = matches!(error, Error::Config { .. } | Error::Overflow(_) | Error::Length { .. });
    match WatchedFile::new(descriptor, data, 0).filter(|_| of_contents) {
        Some(file) => {
            let name = std::fs::read_link(&file.path).ok().filter(|name| name.exists());
            file_kind::explain(&name.unwrap_or(file.path), error, GivenAs::Model)
        }
        None => error,
    }
}

/// The inode in a line of `/proc/self/maps`, if the line's address range contains `data`.
fn inode_at(line: &str, data: *const u8) -> Option<u64> {
    // start-end, permissions, offset, device, inode
    let mut words = line.split_ascii_whitespace();
    let (start, end) = words.next()?.split_once('-')?;
    let range = usize::from_str_radix(start, 16).ok()?..usize::from_str_radix(end, 16).ok()?;
    let inode = words.nth(3)?.parse().ok()?;
    Some(inode).filter(|_| range.contains(&data.addr()))
}

fn check_length(path: &Path, metadata: &Metadata, bytes: u64) -> Result<()> {
    if metadata.len() >= bytes {
        return Ok(());
    }
    Err(Error::Length {
        what: path.display().to_string(),
        expected_bytes: bytes,
        actual_bytes: metadata.len(),
    })
}
