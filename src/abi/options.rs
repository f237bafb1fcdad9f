//! `getp_options`: the options as a C struct.

use super::guard;
use super::sized::{self, SizedStruct};
use super::status::{GETP_OK, Status};
use crate::error::{Error, Result};
use crate::options::{Choices, WrittenValue, table};
use crate::report;
use std::ffi::{CStr, OsStr, c_char, c_int};
use std::mem::{offset_of, size_of};
use std::os::unix::ffi::OsStrExt;

/// A switch of `getp_options` that is on.
pub const GETP_ON: c_int = 1;
/// A switch of `getp_options` that is off.
pub const GETP_OFF: c_int = 2;
/// `getp_options.print`: only answers, each after its request's number.
pub const GETP_ANSWER: c_int = 3;
/// `getp_options.precision`: the eval program's logits, on the CPU bit for bit, on GPUs within a tolerance.
pub const GETP_EXACT: c_int = 1;
/// `getp_options.precision`: the fastest arithmetic within the tolerances that docs/precision.md states.
pub const GETP_FAST: c_int = 2;

/// `getp_options.steps`: a request's steps are the positions that are computed.
pub const GETP_POSITIONS: c_int = 1;
/// `getp_options.steps`: a request's steps are the tokens of its prompt and answer together.
pub const GETP_TOKENS: c_int = 2;

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
    /// The most tokens in one step; by default 512 on the CPU, on GPUs 8192, or 16384 with much room
    /// (GETP_STEP_TOKENS).
    pub step_tokens: c_int,
    /// The most memory for a device's KV cache in MiB; by default at most half of free memory, on a GPU nearly all of
    /// it (GETP_KV_MB).
    pub kv_mb: c_int,
    /// What to print of each request on stdout. GETP_ON, the default: prompt and answer; GETP_ANSWER: the request's
    /// number and its answer; GETP_OFF: nothing (GETP_PRINT=0|1|answer).
    pub print: c_int,
    /// A progress bar if stderr is a terminal: GETP_ON, the default, or GETP_OFF (GETP_PROGRESS=0|1).
    pub progress: c_int,
    /// Time each operation and print a table: GETP_ON, or GETP_OFF, the default (GETP_PROFILE=0|1).
    pub profile: c_int,
    /// The path of a file to write the logits of every position to, prompts included; by default none (GETP_LOGITS).
    pub logits: *const c_char,
    /// Where to run: "auto", the default, is every GPU that can be used or else the CPU; "cpu"; "hip" or "cuda", all
    /// devices of it or some as in "cuda:0,2" (GETP_DEVICE).
    pub device: *const c_char,
    /// Weights that are not finite are an error, not a warning, and prompts that would be cut are refused: GETP_ON, or
    /// GETP_OFF, the default (GETP_STRICT=0|1).
    pub strict: c_int,
    /// 0: a later version may use it.
    pub reserved: c_int,
    /// GPUs that make a replica together, each with some of the layers; by default as few as have room
    /// (GETP_GROUP=auto|N).
    pub group: c_int,
    /// The most memory to use on each GPU in MiB; by default what is free (GETP_DEVICE_MB).
    pub device_mb: c_int,
    /// What the steps of a request, its `max_seq_len`, count. GETP_POSITIONS, the default: the positions that are
    /// computed, so that a prompt of n tokens gets up to max_seq_len - n + 1. GETP_TOKENS: the tokens of prompt and
    /// answer together, so that there are up to max_seq_len - n (GETP_STEPS=positions|tokens).
    pub steps: c_int,
    /// 0: a later version may use it.
    pub reserved_2: c_int,
}

// A program compiled with an older header must keep working: fields are only ever added at the end.
const _: () = {
    assert!(size_of::<Options>() == 80);
    assert!(offset_of!(Options, size) == 0 && offset_of!(Options, precision) == 8);
    assert!(offset_of!(Options, profile) == 36 && offset_of!(Options, logits) == 40);
    assert!(offset_of!(Options, device) == 48 && offset_of!(Options, strict) == 56);
    assert!(offset_of!(Options, group) == 64 && offset_of!(Options, device_mb) == 68);
    assert!(offset_of!(Options, steps) == 72);
};

// SAFETY: it begins with `size`, and its fields are numbers and pointers.
unsafe impl SizedStruct for Options {
    const NAME: &'static str = "getp_options";
    const SIZE: &'static str = "getp_options.size";
    const SIZES: &'static [usize] = &[
        offset_of!(Options, device),
        offset_of!(Options, strict),
        offset_of!(Options, group),
        offset_of!(Options, steps),
        size_of::<Options>(),
    ];
    const RESERVED: &'static [usize] = &[offset_of!(Options, reserved), offset_of!(Options, reserved_2)];

    fn with_size(size: usize) -> Self {
        Self {
            size,
            ..Self::default()
        }
    }
}

/// Sets `options->size` to `size` and all other fields to their defaults. The macro `getp_options_init(options)` passes
/// `sizeof *options`, the size in the header that the program was compiled with; the library's version may be another.
///
/// Fails for a NULL or a size that no version of the struct can have: one line on stderr and the last error, returns
/// the failure.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn getp_options_init_sized(options: *mut Options, size: usize) -> Status {
    guard::look_coded(|| {
        // SAFETY: the program passes a pointer to a struct of its own and its size.
        unsafe { sized::init(options, size, "options") }?;
        Ok(GETP_OK)
    })
}

/// Called by programs compiled with a header from before [`getp_options_init_sized`]. Which version of the struct they
/// have is not known, so only the fields of the oldest version are set here, and read later.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn getp_options_init(options: *mut Options) {
    guard::look((), || {
        // SAFETY: the program passes a pointer to a struct of its own, which is no smaller than the oldest version.
        unsafe { sized::init(options, Options::SIZES[0], "options") }?;
        report::warning(
            "the program was compiled with an older getp.h: of getp_options the fields up to `logits` are read; \
             compile it anew to use the others",
        );
        Ok(())
    });
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
            steps: 0,
            reserved_2: 0,
        }
    }
}

impl Options {
    /// Reads the program's struct, whose version may be another one.
    ///
    /// # Safety
    ///
    /// `options` is NULL, or points to a struct of as many bytes as its `size` says.
    pub unsafe fn read(options: *const Self) -> Result<Self> {
        // SAFETY: guaranteed by our caller.
        unsafe { sized::read(options, "options") }
    }

    /// The options that are set in the struct. Fails if a value is not valid.
    ///
    /// # Safety
    ///
    /// Fields that are strings are NULL or C strings.
    pub unsafe fn choices(&self) -> Result<Choices> {
        let mut choices = Choices::default();
        macro_rules! choose {
            ($($(#[$_doc:meta])* $field:ident: $_type:ty = $_default:expr, $_variable:literal, $_kind:expr;)*) => {
                $(
                    // SAFETY: guaranteed by our caller.
                    if let Some(written) = unsafe { self.$field.written() } {
                        choices.$field(concat!("getp_options.", stringify!($field)), written)?;
                    }
                )*
            };
        }
        table!(choose);
        Ok(choices)
    }
}

/// A field for an option.
trait Field {
    /// Its value; `None` if it is not set.
    ///
    /// # Safety
    ///
    /// A pointer is NULL or a C string that nobody writes to for `'a`.
    unsafe fn written<'a>(self) -> Option<WrittenValue<'a>>;
}

impl Field for c_int {
    unsafe fn written<'a>(self) -> Option<WrittenValue<'a>> {
        (self != 0).then_some(WrittenValue::Number(self))
    }
}

impl Field for *const c_char {
    unsafe fn written<'a>(self) -> Option<WrittenValue<'a>> {
        if self.is_null() {
            return None;
        }
        // SAFETY: not NULL, and guaranteed by our caller.
        let bytes = unsafe { CStr::from_ptr(self) }.to_bytes();
        Some(WrittenValue::Text(OsStr::from_bytes(bytes)))
    }
}

/// Whether a switch of another struct is on; off is the default.
pub fn is_on(name: &'static str, value: c_int) -> Result<bool> {
    match value {
        0 | GETP_OFF => Ok(false),
        GETP_ON => Ok(true),
        other => Err(Error::Option {
            name,
            value: other.to_string(),
            known: "0, GETP_ON or GETP_OFF".into(),
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A value that a field takes, whatever option it is.
    trait Valid {
        const VALID: Self;
    }

    impl Valid for c_int {
        const VALID: Self = 2;
    }

    impl Valid for *const c_char {
        const VALID: Self = c"cpu".as_ptr();
    }

    fn choices(options: &Options) -> Choices {
        // SAFETY: strings of the struct are NULL or C strings.
        unsafe { options.choices() }.unwrap()
    }

    #[test]
    fn each_field_sets_its_own_option_alone() {
        macro_rules! each {
            ($($(#[$_doc:meta])* $field:ident: $_type:ty = $_default:expr, $_variable:literal, $_kind:expr;)*) => {
                let set = |choices: &Choices| {
                    let set = [$((stringify!($field), choices.$field.is_some())),*];
                    let set = set.into_iter().filter(|(_, is_set)| *is_set);
                    set.map(|(field, _)| field).collect::<Vec<_>>()
                };
                assert_eq!(set(&choices(&Options::default())), [""; 0]);
                $(
                    let mut options = Options::default();
                    options.$field = Valid::VALID;
                    let chosen = choices(&options);
                    assert_eq!(set(&chosen), [stringify!($field)]);
                    assert_eq!(chosen.names.$field, concat!("getp_options.", stringify!($field)));
                )*
            };
        }
        table!(each);
    }
}
