//! Files that are opened for reading, and descriptors beside the program's stdin, stdout and stderr.

use std::fs::File;
use std::io::{Error, ErrorKind, Result};
use std::os::fd::AsRawFd;
use std::path::Path;

/// The same file with a descriptor above stderr's. Where the program has closed stdin, stdout or stderr, a file that is
/// opened gets that number: what is then written to stdout would go into the file.
pub fn above_stderr(file: File) -> Result<File> {
    if file.as_raw_fd() > libc::STDERR_FILENO {
        return Ok(file);
    }
    // The standard library's copies never have these numbers.
    file.try_clone()
}

/// Opens a file for reading. What is no file, such as a pipe that nobody may ever write to, is refused.
pub fn open_file(path: &Path) -> Result<File> {
    if !std::fs::metadata(path)?.is_file() {
        return Err(Error::new(ErrorKind::InvalidInput, "it is no file"));
    }
    File::open(path)
}
