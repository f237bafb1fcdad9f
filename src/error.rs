//! What can go wrong, in words that say what to do about it.
//!
//! Every failure of the library is one of these. At the C boundary it becomes one line on stderr and the
//! text behind `getp_last_error`.

use std::path::PathBuf;

/// A failure. Its `Display` is one line: what is wrong, with the value found, and what would be right.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A pointer the contract requires is NULL.
    #[error("{0} is NULL; pass the pointer the program was given or opened")]
    Null(&'static str),
    /// A field of the model's configuration cannot be right.
    #[error("config: {field} is {value}; {expected}")]
    Config {
        /// The field as the C struct names it.
        field: &'static str,
        /// The value found.
        value: String,
        /// What would be accepted.
        expected: String,
    },
    /// A product of sizes does not fit the address space.
    #[error("{0} overflows the address space; the sizes it is made of cannot be right")]
    Overflow(&'static str),
    /// A file or buffer is not as long as its header says.
    #[error(
        "{what} has {actual_bytes} bytes where {expected_bytes} are needed; it is truncated or its header is wrong"
    )]
    Length {
        /// Which file or buffer.
        what: String,
        /// Bytes needed by what the header says.
        expected_bytes: u64,
        /// Bytes found.
        actual_bytes: u64,
    },
    /// A file does not hold what it should.
    #[error("{what}: {why}")]
    Format {
        /// Which file, tensor or buffer.
        what: String,
        /// What is wrong with it.
        why: String,
    },
    /// The operating system refused an operation on a file.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The system's reason.
        source: std::io::Error,
    },
    /// An option has a value that is not known.
    #[error("{name}={value} is not known; use {known}")]
    Option {
        /// The option's name as the user wrote it.
        name: &'static str,
        /// The value found.
        value: String,
        /// The values accepted.
        known: String,
    },
    /// Memory could not be had.
    #[error("no memory for {what} ({bytes} bytes); lower GETP_MAX_BATCH or GETP_KV_MB, or free memory")]
    OutOfMemory {
        /// What it was for.
        what: &'static str,
        /// How much was asked for.
        bytes: u64,
    },
    /// A call came at the wrong time.
    #[error("{0}")]
    State(String),
    /// The library itself failed; a panic was caught.
    #[error("internal error: {0}; please report it")]
    Internal(String),
}

/// The library's result.
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// A failure of the file system, with the file it happened to.
    pub fn io(path: impl Into<PathBuf>, source: std::io::Error) -> Self {
        Self::Io {
            path: path.into(),
            source,
        }
    }

    /// A file or tensor that does not hold what it should.
    pub fn format(what: impl Into<String>, why: impl Into<String>) -> Self {
        Self::Format {
            what: what.into(),
            why: why.into(),
        }
    }
}
