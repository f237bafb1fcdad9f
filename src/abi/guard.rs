//! The wrapper around the body of every export: a panic becomes an error, and an error becomes one line on stderr and
//! the last error. Nothing exits or aborts. The body runs in C's default floating-point environment.
//!
//! The process's panic hook is not replaced, so a panic also prints Rust's own message.

use super::status::{self, GETP_DEFECT, GETP_OK, Status};
use crate::error::{Error, Result};
use crate::float_environment;
use crate::report;
use std::any::Any;
use std::cell::Cell;
use std::ffi::c_char;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Size in bytes of what is kept of an error's text, its end included. Longer ones are lists of what is wrong in a
/// file; they are whole on stderr.
const KEPT_BYTES: usize = 4 << 10;

/// What ends a text that was cut.
const CUT: &str = "...";

thread_local! {
    /// What [`getp_last_error`](super::library::getp_last_error) returns on this thread; empty for no error. It is kept
    /// in place and not allocated, so that it needs no destructor and is there as long as the thread.
    static LAST_ERROR: Cell<[u8; KEPT_BYTES]> = const { Cell::new([0; KEPT_BYTES]) };
    /// The status of the last error.
    static LAST_STATUS: Cell<Status> = const { Cell::new(GETP_OK) };
}

/// Runs the body of a call that does work. A failure is recorded, and the result is `failed`. The last error of earlier
/// calls is cleared first.
pub fn work<T>(failed: T, body: impl FnOnce() -> Result<T>) -> T {
    keep("");
    look(failed, body)
}

/// Runs the body of an accessor or a close function. A failure is recorded, and the result is `failed`. Success keeps
/// the last error of earlier calls, so that a program may close its handles before it asks what went wrong.
pub fn look<T>(failed: T, body: impl FnOnce() -> Result<T>) -> T {
    float_environment::in_default(|| {
        // `AssertUnwindSafe`: what the body was changing is dropped, or is behind a lock whose users handle poisoning.
        let result = catch_unwind(AssertUnwindSafe(body));
        let result = result.unwrap_or_else(|panic| Err(Error::Internal(message(&*panic))));
        result.unwrap_or_else(|error| {
            record(&error);
            failed
        })
    })
}

/// Runs the body of a call that does work and returns a status: a failure's, or the body's.
pub fn coded(body: impl FnOnce() -> Result<Status>) -> Status {
    keep("");
    look_coded(body)
}

/// The same of an accessor, which keeps the last error of earlier calls.
pub fn look_coded(body: impl FnOnce() -> Result<Status>) -> Status {
    let mut failure = GETP_OK;
    let done = look(None, || body().inspect_err(|why| failure = status::of(why)).map(Some));
    // Without a result and an error it has panicked.
    done.unwrap_or(if failure == GETP_OK { GETP_DEFECT } else { failure })
}

/// Writes `error` on stderr and keeps it as this thread's last error.
pub fn record(error: &Error) {
    report::error(error.line());
    keep(&report::escaped(&error.to_string()));
    LAST_STATUS.set(status::of(error));
}

/// The status of this thread's last error; GETP_OK if there is none.
pub fn last_status() -> Status {
    LAST_STATUS.get()
}

/// The text of this thread's last error, or NULL.
pub fn last_error() -> *const c_char {
    LAST_ERROR.with(|last| {
        let text = last.as_ptr().cast_const().cast::<c_char>();
        // SAFETY: the first byte of the array, which nobody writes to meanwhile.
        let is_none = unsafe { text.read() } == 0;
        if is_none { std::ptr::null() } else { text }
    })
}

/// Replaces this thread's last error, without allocating.
fn keep(text: &str) {
    LAST_STATUS.set(GETP_OK);
    let most = KEPT_BYTES - 1;
    let (whole, end) = match text.len() <= most {
        true => (text, ""),
        false => (&text[..text.floor_char_boundary(most - CUT.len())], CUT),
    };
    let bytes = whole.bytes().chain(end.bytes()).chain([0]);
    LAST_ERROR.with(|last| {
        let places = (last as &Cell<[u8]>).as_slice_of_cells();
        places.iter().zip(bytes).for_each(|(place, byte)| place.set(byte));
    });
}

fn message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| text.to_string());
    text.or_else(|| panic.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "a panic".into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ffi::CStr;

    fn last() -> Option<String> {
        let text = last_error();
        // SAFETY: not NULL, it is the string this thread keeps, and nothing replaces it meanwhile.
        (!text.is_null()).then(|| unsafe { CStr::from_ptr(text) }.to_str().unwrap().to_owned())
    }

    #[test]
    fn failures_are_kept_until_the_next_work() {
        assert_eq!(work(-1, || Err(Error::Null("transformer"))), -1);
        assert!(last().unwrap().starts_with("transformer is NULL"));
        assert_eq!(look(-1, || Ok(3)), 3);
        assert!(last().is_some());
        assert_eq!(work(-1, || Ok(4)), 4);
        assert_eq!(last(), None);
    }

    #[test]
    fn a_panic_is_an_error() {
        assert_eq!(work(-1, || panic!("lost {} of {}", 1, 2)), -1);
        assert_eq!(last().unwrap(), "internal error: lost 1 of 2; please report it");
        assert_eq!(look(-1, || panic!("plain")), -1);
        assert_eq!(last().unwrap(), "internal error: plain; please report it");
    }

    #[test]
    fn a_long_error_is_cut_between_characters() {
        let fits = "é".repeat(KEPT_BYTES / 2 - 1) + "e";
        keep(&fits);
        assert_eq!(last().unwrap(), fits);
        keep(&(fits.clone() + "e"));
        assert_eq!(last().unwrap(), "é".repeat(KEPT_BYTES / 2 - 2) + CUT);
        keep("");
        assert_eq!(last(), None);
    }

    #[test]
    fn each_thread_has_its_own() {
        work((), || Err(Error::Null("here")));
        std::thread::spawn(|| assert_eq!(last(), None)).join().unwrap();
        assert!(last().is_some());
    }
}
