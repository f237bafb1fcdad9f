//! `getp_status`: what a call's failure is, as a number that a program can switch on.

use crate::error::{Error, GpuFault};
use std::ffi::c_int;

/// The result of a call. Failures are negative.
pub type Status = c_int;

/// The call has done its work.
pub const GETP_OK: Status = 0;
/// There was nothing by the time given. It is no failure.
pub const GETP_TIMED_OUT: Status = 1;
/// The batch was closed since its model was. It is no failure.
pub const GETP_CLOSED: Status = 2;
/// An argument, an option or a field of a struct is NULL, or has a value that nobody can mean.
pub const GETP_BAD_ARGUMENT: Status = -1;
/// There is not enough memory, on the host or on a device.
pub const GETP_NO_MEMORY: Status = -2;
/// There is no device to run on, or no driver or code for it.
pub const GETP_NO_DEVICE: Status = -3;
/// A device has failed, and no other one could take over.
pub const GETP_DEVICE_LOST: Status = -4;
/// A file cannot be read or written, or is not what it should be.
pub const GETP_BAD_FILE: Status = -5;
/// The file is a model, but not one that the library runs.
pub const GETP_UNSUPPORTED_MODEL: Status = -6;
/// The request cannot be answered by this model on these devices.
pub const GETP_REFUSED: Status = -7;
/// The call is not possible now, for example since another one runs, or since the process has forked.
pub const GETP_BAD_STATE: Status = -8;
/// A defect of the library.
pub const GETP_DEFECT: Status = -9;

/// The status that an error stands for.
pub fn of(error: &Error) -> Status {
    match error {
        Error::Null(_) | Error::Overflow(_) | Error::Format { .. } | Error::Option { .. } => GETP_BAD_ARGUMENT,
        Error::OutOfMemory { .. } => GETP_NO_MEMORY,
        Error::InFile(why) => match &**why {
            Error::Format { .. } | Error::Overflow(_) => GETP_BAD_FILE,
            other => of(other),
        },
        Error::Config { .. } | Error::Unsupported { .. } => GETP_UNSUPPORTED_MODEL,
        Error::Length { .. } | Error::Io { .. } => GETP_BAD_FILE,
        Error::Gpu { fault, .. } => match fault {
            GpuFault::OutOfMemory => GETP_NO_MEMORY,
            GpuFault::NoDriver
            | GpuFault::NoDevice
            | GpuFault::OldRuntime
            | GpuFault::NoBinary
            | GpuFault::InvalidImage
            | GpuFault::LoadFailed
            | GpuFault::NoKernel => GETP_NO_DEVICE,
            GpuFault::LostDevice | GpuFault::Capture | GpuFault::Other => GETP_DEVICE_LOST,
        },
        Error::State(_) => GETP_BAD_STATE,
        Error::Again(why) => of(why),
        Error::Internal(_) => GETP_DEFECT,
    }
}
