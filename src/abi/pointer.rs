//! Checks of pointers that the program passes, made before anything is read through them: NULL and alignment.

use crate::error::{Error, Result};
use std::ffi::{CStr, OsStr, c_char};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// A shared reference to what `pointer` points to.
///
/// # Safety
///
/// Unless it is NULL or misaligned, which is refused, `pointer` must point to a `T` that nobody writes to for `'a`.
pub unsafe fn borrow<'a, T>(pointer: *const T, what: &'static str) -> Result<&'a T> {
    check(pointer, what)?;
    // SAFETY: neither NULL nor misaligned; the caller guarantees the rest.
    Ok(unsafe { &*pointer })
}

/// An exclusive reference to what `pointer` points to.
///
/// # Safety
///
/// Unless it is NULL or misaligned, which is refused, `pointer` must point to a `T` that nobody else reads or writes
/// for `'a`.
pub unsafe fn borrow_mut<'a, T>(pointer: *mut T, what: &'static str) -> Result<&'a mut T> {
    check(pointer, what)?;
    // SAFETY: neither NULL nor misaligned; the caller guarantees the rest.
    Ok(unsafe { &mut *pointer })
}

/// The path that a C string holds.
///
/// # Safety
///
/// Unless it is NULL, which is refused, `path` must be a C string that nobody writes to for `'a`.
pub unsafe fn path<'a>(path: *const c_char, what: &'static str) -> Result<&'a Path> {
    check(path, what)?;
    // SAFETY: not NULL; the caller guarantees the rest.
    let bytes = unsafe { CStr::from_ptr(path) }.to_bytes();
    Ok(Path::new(OsStr::from_bytes(bytes)))
}

/// `length` values that `pointer` points to; with none of them it may be NULL.
///
/// # Safety
///
/// Unless it is NULL or misaligned, which is refused, `pointer` must point to `length` values that nobody writes to for
/// `'a`.
pub unsafe fn slice<'a, T>(pointer: *const T, length: usize, what: &'static str) -> Result<&'a [T]> {
    if length == 0 {
        return Ok(&[]);
    }
    check(pointer, what)?;
    if length > isize::MAX as usize / size_of::<T>() {
        return Err(Error::Overflow(what));
    }
    // SAFETY: neither NULL nor misaligned, and no longer than memory; the caller guarantees the rest.
    Ok(unsafe { std::slice::from_raw_parts(pointer, length) })
}

/// Refuses NULL and misaligned pointers.
pub fn check<T>(pointer: *const T, what: &'static str) -> Result<()> {
    if pointer.is_null() {
        return Err(Error::Null(what));
    }
    if !pointer.is_aligned() {
        return Err(Error::format(
            what,
            format!("{pointer:p} is not aligned; pass the pointer as it was given"),
        ));
    }
    Ok(())
}
