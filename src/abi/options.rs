//! `getp_options`: the options as a C struct.

use super::{guard, pointer};
use crate::error::{Error, Result};
use crate::options::{self, Choices, Precision, Print};
use crate::report;
use std::ffi::{c_char, c_int};
use std::mem::{offset_of, size_of};

/// A switch of `getp_options` that is on.
pub const GETP_ON: c_int = 1;
/// A switch of `getp_options` that is off.
pub const GETP_OFF: c_int = 2;
/// `getp_options.print`: only answers, each after its request's number.
pub const GETP_ANSWER: c_int = 3;
/// `getp_options.precision`: the eval program's logits, on the CPU bit for bit, on GPUs within a tolerance.
pub const GETP_EXACT: c_int = 1;
/// `getp_options.precision`: the fastest arithmetic within the tolerances that ARCHITECTURE.md states.
pub const GETP_FAST: c_int = 2;

/// How to run a model. A field that is 0 or NULL takes the value of its GETP_* environment variable, or the default if
/// that is not set. Call `getp_options_init` before setting fields.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// sizeof(getp_options) as the program knows it, set by `getp_options_init`.
    pub size: usize,
    /// GETP_EXACT, the default on the CPU, or GETP_FAST, the default on GPUs (GETP_PRECISION=exact|fast).
    pub precision: c_int,
    /// Worker threads on the host; by default one a core (GETP_THREADS).
    pub threads: c_int,
    /// The most sequences in one step; by default 128 on the CPU, 1024 on GPUs (GETP_MAX_BATCH).
    pub max_batch: c_int,
    /// The most tokens in one step; by default 512 on the CPU, 8192 on GPUs (GETP_STEP_TOKENS).
    pub step_tokens: c_int,
    /// The most memory for a device's KV cache in MiB; by default at most half of free memory, on a GPU nearly all of
    /// it (GETP_KV_MB).
    pub kv_mb: c_int,
    /// What to print of each request on stdout. GETP_ON, the default: prompt and answer; GETP_ANSWER: the request's
    /// number and its answer; GETP_OFF: nothing (GETP_PRINT=0|1|answer).
    pub print: c_int,
    /// A progress bar if stderr is a terminal: GETP_ON, the default, or GETP_OFF (GETP_PROGRESS=0|1).
    pub progress: c_int,
    /// Time each kind of kernel and print a table: GETP_ON, or GETP_OFF, the default (GETP_PROFILE=0|1).
    pub profile: c_int,
    /// The path of a file to write the logits of every position to, prompts included; by default none (GETP_LOGITS).
    pub logits: *const c_char,
    /// Where to run: "auto", the default, is every GPU that can be used or else the CPU; "cpu"; "hip" or "cuda", all
    /// devices of it or some as in "cuda:0,2" (GETP_DEVICE).
    pub device: *const c_char,
    /// Weights that are not finite are an error, not a warning, and prompts that would be cut are refused: GETP_ON, or
    /// GETP_OFF, the default (GETP_STRICT=0|1).
    pub strict: c_int,
    /// Not read.
    pub reserved: c_int,
    /// GPUs that make a replica together, each with some of the layers; by default as few as have room
    /// (GETP_GROUP=auto|N).
    pub group: c_int,
    /// The most memory to use on each GPU in MiB; by default what is free (GETP_DEVICE_MB).
    pub device_mb: c_int,
}

// A program compiled with an older header must keep working: fields are only ever added at the end.
const _: () = {
    assert!(size_of::<Options>() == 72);
    assert!(offset_of!(Options, size) == 0 && offset_of!(Options, precision) == 8);
    assert!(offset_of!(Options, profile) == 36 && offset_of!(Options, logits) == 40);
    assert!(offset_of!(Options, device) == 48 && offset_of!(Options, strict) == 56);
    assert!(offset_of!(Options, group) == 64 && offset_of!(Options, device_mb) == 68);
};

/// The struct's sizes in all versions, oldest first. Whoever adds a field adds a size.
const SIZES: [usize; 4] = [
    offset_of!(Options, device),
    offset_of!(Options, strict),
    offset_of!(Options, group),
    size_of::<Options>(),
];
const VERSION: &str = env!("CARGO_PKG_VERSION");
/// The largest size accepted from a newer header's struct, so that garbage is not taken for a size.
const MOST_BYTES: usize = 4096;

/// Sets `options->size` to `size` and all other fields to their defaults. The macro `getp_options_init(options)` passes
/// `sizeof *options`, the size in the header that the program was compiled with; the library's version may be another.
///
/// Fails for a NULL or a size that no version of the struct can have: one line on stderr and the last error.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn getp_options_init_sized(options: *mut Options, size: usize) {
    // SAFETY: the program passes a pointer to a struct of its own and its size.
    guard::look((), || unsafe { init(options, size) });
}

/// Called by programs compiled with a header from before [`getp_options_init_sized`]. Which version of the struct they
/// have is not known, so only the fields of the oldest version are set here, and read later.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn getp_options_init(options: *mut Options) {
    guard::look((), || {
        // SAFETY: the program passes a pointer to a struct of its own, which is no smaller than the oldest version.
        unsafe { init(options, SIZES[0]) }?;
        report::line(
            "the program was compiled with an older getp.h: of getp_options the fields up to `logits` are read; \
             compile it anew to use the others",
        );
        Ok(())
    });
}

/// # Safety
///
/// `options` is NULL, or points to `size` bytes that may be written to, if any version of the struct has that size.
unsafe fn init(options: *mut Options, size: usize) -> Result<()> {
    pointer::check(options, "options")?;
    let known = known_bytes(size)?;
    let default = Options {
        size,
        ..Options::default()
    };
    let (to, from) = (options.cast::<u8>(), (&raw const default).cast());
    // SAFETY: the caller's struct has `size` bytes, at least `known`, and ours has these.
    unsafe {
        to.write_bytes(0, size);
        to.copy_from_nonoverlapping(from, known);
    }
    Ok(())
}

/// How many bytes of a struct of `size` bytes are fields of this version. Fails if no version can have that size.
fn known_bytes(size: usize) -> Result<usize> {
    let later = size_of::<Options>()..=MOST_BYTES;
    if SIZES.contains(&size) || later.contains(&size) {
        return Ok(size.min(size_of::<Options>()));
    }
    let known = format!("{}, as getp_options_init sets it", size_of::<Options>());
    Err(unknown("getp_options.size", size, known))
}

impl Default for Options {
    fn default() -> Self {
        Self {
            size: size_of::<Self>(),
            precision: 0,
            threads: 0,
            max_batch: 0,
            step_tokens: 0,
            kv_mb: 0,
            print: 0,
            progress: 0,
            profile: 0,
            logits: std::ptr::null(),
            device: std::ptr::null(),
            strict: 0,
            reserved: 0,
            group: 0,
            device_mb: 0,
        }
    }
}

impl Options {
    /// Reads the program's struct, whose version may be older or newer than this one. Fields that an older one lacks
    /// are left at their defaults. Fails if a field is set that only a newer one has.
    ///
    /// # Safety
    ///
    /// `options` is NULL, or points to a struct of as many bytes as its `size` says.
    pub unsafe fn read(options: *const Self) -> Result<Self> {
        pointer::check(options, "options")?;
        // SAFETY: every version of the struct begins with its size.
        let size = unsafe { (&raw const (*options).size).read() };
        let known = known_bytes(size)?;
        let mut read = Self::default();
        // SAFETY: both structs have `known` bytes, and any bytes are valid for the fields.
        unsafe {
            (&raw mut read)
                .cast::<u8>()
                .copy_from_nonoverlapping(options.cast(), known)
        };
        // SAFETY: the caller's struct has `size` bytes, at least `known`.
        let rest = unsafe { std::slice::from_raw_parts(options.cast::<u8>().add(known), size - known) };
        if let Some(at) = rest.iter().position(|&byte| byte != 0) {
            let at = known + at;
            let why = format!("its byte {at} is set, for which this library, of version {VERSION}, has no field");
            return Err(Error::format("getp_options", why));
        }
        Ok(read)
    }

    /// The options that are set in the struct. Fails if a value is not valid.
    ///
    /// # Safety
    ///
    /// `logits` and `device` are NULL or C strings.
    pub unsafe fn choices(&self) -> Result<Choices> {
        let logits = match self.logits.is_null() {
            true => None,
            // SAFETY: guaranteed by our caller.
            false => Some(unsafe { pointer::path(self.logits, "getp_options.logits") }?.to_owned()),
        };
        let device = match self.device.is_null() {
            true => None,
            false => {
                let name = "getp_options.device";
                // SAFETY: guaranteed by our caller.
                let value = unsafe { pointer::path(self.device, name) }?;
                Some(options::device(name, value.as_os_str())?)
            }
        };
        Ok(Choices {
            precision: precision(self.precision)?,
            device,
            threads: number("getp_options.threads", self.threads)?,
            max_batch: number("getp_options.max_batch", self.max_batch)?,
            step_tokens: number("getp_options.step_tokens", self.step_tokens)?,
            kv_mb: number("getp_options.kv_mb", self.kv_mb)?,
            group: number("getp_options.group", self.group)?.map(Some),
            device_mb: number("getp_options.device_mb", self.device_mb)?,
            print: print(self.print)?,
            progress: switch("getp_options.progress", self.progress)?,
            profile: switch("getp_options.profile", self.profile)?,
            logits,
            strict: switch("getp_options.strict", self.strict)?,
        })
    }
}

fn precision(value: c_int) -> Result<Option<Precision>> {
    match value {
        0 => Ok(None),
        GETP_EXACT => Ok(Some(Precision::Exact)),
        GETP_FAST => Ok(Some(Precision::Fast)),
        _ => Err(unknown(
            "getp_options.precision",
            value,
            "GETP_EXACT or GETP_FAST".into(),
        )),
    }
}

fn print(value: c_int) -> Result<Option<Print>> {
    match value {
        0 => Ok(None),
        GETP_ON => Ok(Some(Print::Text)),
        GETP_OFF => Ok(Some(Print::Nothing)),
        GETP_ANSWER => Ok(Some(Print::Answer)),
        _ => Err(unknown(
            "getp_options.print",
            value,
            "GETP_ON, GETP_ANSWER or GETP_OFF".into(),
        )),
    }
}

fn switch(name: &'static str, value: c_int) -> Result<Option<bool>> {
    match value {
        0 => Ok(None),
        GETP_ON => Ok(Some(true)),
        GETP_OFF => Ok(Some(false)),
        _ => Err(unknown(name, value, "GETP_ON or GETP_OFF".into())),
    }
}

fn number(name: &'static str, value: c_int) -> Result<Option<usize>> {
    let number = usize::try_from(value).map_err(|_| unknown(name, value, "a number from 0, the default".into()))?;
    Ok((number > 0).then_some(number))
}

fn unknown(name: &'static str, value: impl ToString, known: String) -> Error {
    Error::Option {
        name,
        value: value.to_string(),
        known,
    }
}
