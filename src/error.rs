//! What can go wrong, in words that say what to do about it.
//!
//! Every failure of the library is one of these. At the C boundary it becomes one line on stderr and the
//! text behind `getp_last_error`.

mod purpose;

pub use purpose::Purpose;

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
    #[error("no memory for {purpose} ({bytes} bytes); {}, or free memory", purpose.remedy())]
    OutOfMemory {
        /// What it was for.
        purpose: Purpose,
        /// How much was asked for.
        bytes: u64,
    },
    /// A GPU's runtime refused a call.
    #[error("{device}: {call}: {fault}{}", code.map(|c| format!(" (code {c})")).unwrap_or_default())]
    Gpu {
        /// The device, for example `cuda:0`.
        device: String,
        /// The call, for example `cuMemAlloc(1073741824 bytes)`.
        call: String,
        /// What kind of failure it is.
        fault: GpuFault,
        /// The runtime's own number.
        code: Option<i32>,
    },
    /// A call came at the wrong time.
    #[error("{0}")]
    State(String),
    /// The library itself failed; a panic was caught.
    #[error("internal error: {0}; please report it")]
    Internal(String),
}

/// What went wrong on a GPU, in words that say what to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum GpuFault {
    /// Its memory is full.
    #[error("out of device memory; lower GETP_KV_MB or GETP_MAX_BATCH, or free the device")]
    OutOfMemory,
    /// Its driver is missing, or library and kernel module do not fit each other.
    #[error("no working driver; install the device's driver or set GETP_DEVICE=cpu")]
    NoDriver,
    /// There is no such device.
    #[error("no such device; see GETP_DEVICE")]
    NoDevice,
    /// The device no longer answers, or an earlier kernel failed on it.
    #[error("the device is lost; what ran on it runs again elsewhere")]
    LostDevice,
    /// The code object was not made for this device, or lacks a kernel.
    #[error("the code object does not fit the device; build getp for its architecture")]
    BadCode,
    /// Anything else.
    #[error("the runtime refused the call")]
    Other,
}

/// The library's result.
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    /// A failure of the file system, with the file it happened to.
    pub fn io(path: impl Into<PathBuf>, source: std::io::Error) -> Self {
        Self::Io {
            path: path.into(),
            source,
        }
    }

    /// Whether a device of this name failed, for example `cuda:0`.
    pub fn is_of(&self, name: &str) -> bool {
        matches!(self, Self::Gpu { device, .. } if device == name)
    }

    /// A file or tensor that does not hold what it should.
    pub fn format(what: impl Into<String>, why: impl Into<String>) -> Self {
        Self::Format {
            what: what.into(),
            why: why.into(),
        }
    }
}
