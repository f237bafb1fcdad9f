//! File descriptors that stay open beside the program's stdin, stdout and stderr.

use std::fs::File;
use std::io::Result;
use std::os::fd::AsRawFd;

/// The same file with a descriptor above stderr's. Where the program has closed stdin, stdout or stderr, a file that is
/// opened gets that number: what is then written to stdout would go into the file.
pub fn above_stderr(file: File) -> Result<File> {
    if file.as_raw_fd() > libc::STDERR_FILENO {
        return Ok(file);
    }
    // The standard library's copies never have these numbers.
    file.try_clone()
}
