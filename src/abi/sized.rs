//! Structs that begin with their size, so that a program and the library may be of different versions.

use super::pointer;
use crate::error::{Error, Result};
use std::ffi::c_int;
use std::mem::size_of;

const VERSION: &str = env!("CARGO_PKG_VERSION");
/// The largest size accepted from a newer header's struct, so that garbage is not taken for a size.
const MOST_BYTES: usize = 4096;

/// A struct of the header whose first field is `size: usize`.
///
/// # Safety
///
/// The struct is `repr(C)` and begins with that field, and any bytes are valid for all its fields.
pub unsafe trait SizedStruct: Copy {
    /// The struct's name in the header.
    const NAME: &'static str;
    /// The name of its first field.
    const SIZE: &'static str;
    /// Its sizes in all versions, oldest first. Whoever adds a field adds a size.
    const SIZES: &'static [usize];
    /// Offsets of its fields of type `int` that no version has used yet.
    const RESERVED: &'static [usize];

    /// All fields at their defaults, but with this size.
    fn with_size(size: usize) -> Self;
}

/// How many bytes of a struct of `size` bytes are fields of this version. Fails if no version can have that size.
fn known_bytes<T: SizedStruct>(size: usize) -> Result<usize> {
    let later = size_of::<T>()..=MOST_BYTES;
    if T::SIZES.contains(&size) || later.contains(&size) {
        return Ok(size.min(size_of::<T>()));
    }
    Err(Error::Option {
        name: T::SIZE,
        value: size.to_string(),
        known: format!("{}, as {}_init sets it", size_of::<T>(), T::NAME),
    })
}

/// Sets all fields of the program's struct to their defaults, and its size.
///
/// # Safety
///
/// `to` is NULL, or points to `size` bytes that may be written to, if any version of the struct has that size.
pub unsafe fn init<T: SizedStruct>(to: *mut T, size: usize, what: &'static str) -> Result<()> {
    pointer::check(to, what)?;
    let known = known_bytes::<T>(size)?;
    let default = T::with_size(size);
    let (to, from) = (to.cast::<u8>(), (&raw const default).cast());
    // SAFETY: the caller's struct has `size` bytes, at least `known`, and ours has these.
    unsafe {
        to.write_bytes(0, size);
        to.copy_from_nonoverlapping(from, known);
    }
    Ok(())
}

/// Reads the program's struct, whose version may be older or newer than this one. Fields that an older one lacks are
/// left at their defaults. Fails if a field is set that only a newer one has, be it behind this one's fields or in the
/// place of a reserved one.
///
/// # Safety
///
/// `from` is NULL, or points to a struct of as many bytes as its first field says.
pub unsafe fn read<T: SizedStruct>(from: *const T, what: &'static str) -> Result<T> {
    pointer::check(from, what)?;
    // SAFETY: every version of the struct begins with its size.
    let size = unsafe { from.cast::<usize>().read() };
    let known = known_bytes::<T>(size)?;
    let mut read = T::with_size(size_of::<T>());
    // SAFETY: both structs have `known` bytes, and any bytes are valid for the fields.
    unsafe {
        (&raw mut read)
            .cast::<u8>()
            .copy_from_nonoverlapping(from.cast(), known)
    };
    let reserved = T::RESERVED.iter().flat_map(|&field| field..field + size_of::<c_int>());
    let mut later = reserved.filter(|&at| at < known).chain(known..size);
    // SAFETY: the caller's struct has `size` bytes.
    if let Some(at) = later.find(|&at| unsafe { from.cast::<u8>().add(at).read() } != 0) {
        let why = format!("its byte {at} is set, for which this library, of version {VERSION}, has no field");
        return Err(Error::format(T::NAME, why));
    }
    Ok(read)
}

/// Whether the program's struct, of which it knows `size` bytes, can be written to: it has all of the library's fields,
/// or as many bytes as one of the older versions. `macro_name` is what a program calls.
pub fn check_writable<T>(
    to: *mut T,
    size: usize,
    older: &[usize],
    what: &'static str,
    macro_name: &'static str,
) -> Result<()> {
    pointer::check(to, what)?;
    if !older.contains(&size) && !(size_of::<T>()..=MOST_BYTES).contains(&size) {
        return Err(Error::format(
            "size",
            format!("it is {size}; call {macro_name}, the macro"),
        ));
    }
    Ok(())
}

/// Writes to the program's struct, of which it knows `size` bytes, what the library has; fields of a later version
/// become 0.
///
/// # Safety
///
/// [`check_writable`] has taken `to` and `size`, and `to` points to `size` bytes that may be written to.
pub unsafe fn write<T: Copy>(to: *mut T, size: usize, from: T) {
    let (to, from) = (to.cast::<u8>(), (&raw const from).cast());
    // SAFETY: the caller's struct has `size` bytes, and ours as many as are copied.
    unsafe {
        to.write_bytes(0, size);
        to.copy_from_nonoverlapping(from, size.min(size_of::<T>()));
    }
}
