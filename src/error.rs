//! The library's errors. Their texts say what to do.
//!
//! At the C boundary an error becomes one line on stderr and the text of `getp_last_error`.

mod purpose;

pub use purpose::Purpose;

use std::path::PathBuf;

/// An error. Its `Display` is one line: what is wrong, with the value found, and what would be right.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A pointer is NULL that must not be.
    #[error("{0} is NULL; pass the pointer the program was given or opened")]
    Null(&'static str),
    /// A field of the model's configuration has a value that is not possible or not supported.
    #[error("config: {field} is {value}; {expected}")]
    Config {
        /// The field's name in the C struct.
        field: &'static str,
        /// The value found.
        value: String,
        /// What would be accepted.
        expected: String,
    },
    /// A product of sizes does not fit the address space.
    #[error("{0} overflows the address space; the sizes it is made of cannot be right")]
    Overflow(&'static str),
    /// A file or buffer does not have the length that its header gives.
    #[error(
        "{what} has {actual_bytes} bytes where {expected_bytes} are needed; it is truncated or its header is wrong"
    )]
    Length {
        /// Which file or buffer.
        what: String,
        /// Bytes needed according to the header.
        expected_bytes: u64,
        /// Bytes found.
        actual_bytes: u64,
    },
    /// The contents of a file, tensor, argument or request are not valid.
    #[error("{what}: {why}")]
    Format {
        /// Which file, tensor, argument or request.
        what: String,
        /// What is wrong, and what would be right.
        why: String,
    },
    /// A file is a model, but not one that the library runs.
    #[error("{what}: {why}")]
    Unsupported {
        /// Which file, or what of the model.
        what: String,
        /// What it has, and what would be right.
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
    /// An option has an unknown value.
    #[error("{name}={value} is not known; use {known}")]
    Option {
        /// The name of the environment variable or of the struct's field.
        name: &'static str,
        /// The value found.
        value: String,
        /// The values accepted.
        known: String,
    },
    /// An allocation failed.
    #[error("no memory for {purpose} ({bytes} bytes); {}, or free memory", purpose.remedy())]
    OutOfMemory {
        /// What the memory was for.
        purpose: Purpose,
        /// Size of the allocation.
        bytes: u64,
    },
    /// A call of a GPU runtime failed.
    #[error("{device}: {call}: {fault}{}", code.map(|c| format!(" (code {c})")).unwrap_or_default())]
    Gpu {
        /// The device, for example `cuda:0`.
        device: String,
        /// The call, for example `cuMemAlloc(1073741824 bytes)`.
        call: String,
        /// The kind of failure.
        fault: GpuFault,
        /// The runtime's error code.
        code: Option<i32>,
    },
    /// A call is not possible in the present state, for example before `warm_up`.
    #[error("{0}")]
    State(String),
    /// Warming up has failed once more, for the reason that the user has already been told.
    #[error("{0}")]
    Again(Box<Error>),
    /// An error in what a file holds.
    #[error("{0}")]
    InFile(Box<Error>),
    /// A defect of the library, for example a panic that was caught.
    #[error("internal error: {0}; please report it")]
    Internal(String),
}

/// The kind of a GPU runtime's failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum GpuFault {
    /// The device's memory is full.
    #[error("out of device memory; lower GETP_KV_MB or GETP_MAX_BATCH, or free the device")]
    OutOfMemory,
    /// The driver is missing, or its library does not match its kernel module.
    #[error("no working driver; install the device's driver or set GETP_DEVICE=cpu")]
    NoDriver,
    /// There is no such device.
    #[error("no such device; see GETP_DEVICE")]
    NoDevice,
    /// The device no longer responds, or an earlier kernel failed on it.
    #[error("the device is lost; what ran on it runs again elsewhere")]
    LostDevice,
    /// The runtime is one that cannot capture kernels in graphs.
    #[error("ROCm before 5.6 leaves kernels out of graphs; install ROCm 5.6 or later, or set GETP_DEVICE=cpu")]
    OldRuntime,
    /// The code object has no code for this device.
    #[error("the code object has no code for this device; build getp for its architecture")]
    NoBinary,
    /// The code object is damaged, or of a format that the runtime does not know.
    #[error("the runtime knows no such code object; build getp anew, or install a runtime as new as the compiler")]
    InvalidImage,
    /// The code object could not be linked or made ready.
    #[error("the runtime could not load the code object; its own log says why (AMD_LOG_LEVEL=3 for ROCm's)")]
    LoadFailed,
    /// The code object lacks a kernel or a symbol.
    #[error("the code object has no such kernel; build getp anew")]
    NoKernel,
    /// The capture of a graph was invalidated.
    #[error("another thread's call has invalidated the capture of a graph")]
    Capture,
    /// Any other failure.
    #[error("the runtime refused the call")]
    Other,
}

/// A result with the library's error.
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    /// An error of the operating system, and the file that it is about.
    pub fn io(path: impl Into<PathBuf>, source: std::io::Error) -> Self {
        Self::Io {
            path: path.into(),
            source,
        }
    }

    /// The error as one in what a file holds.
    pub fn in_file(self) -> Self {
        Self::InFile(Box::new(self))
    }

    /// What is printed of it: its text, unless the user has read that.
    pub fn line(&self) -> String {
        match self {
            Self::Again(_) => "warming up has failed again, for the same reason".into(),
            error => error.to_string(),
        }
    }

    /// Whether it is a GPU error of the device with this name, for example `cuda:0`.
    pub fn is_of(&self, name: &str) -> bool {
        matches!(self, Self::Gpu { device, .. } if device == name)
    }

    /// An [`Error::Format`].
    pub fn format(what: impl Into<String>, why: impl Into<String>) -> Self {
        Self::Format {
            what: what.into(),
            why: why.into(),
        }
    }

    /// A model that the library does not run.
    pub fn unsupported(what: impl Into<String>, why: impl Into<String>) -> Self {
        Self::Unsupported {
            what: what.into(),
            why: why.into(),
        }
    }
}

/// Number of characters after which a message cuts a value.
const MOST_SHOWN: usize = 60;

/// A value for a message.
pub fn shown(value: &impl std::fmt::Display) -> String {
    cut(value.to_string(), MOST_SHOWN)
}

/// A text of at most `most` characters, with dots where there were more.
pub fn cut(text: String, most: usize) -> String {
    match text.char_indices().nth(most) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text,
    }
}
