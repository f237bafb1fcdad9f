//! Allocations whose size depends on the model, the options or the input. If one fails, the result is an error that
//! names the option to lower.
//!
//! All allocations that may be large are made with these functions. Small ones (a name, a line of text, a table of a
//! few entries) are ordinary Rust allocations; if the system has no memory even for those, they come from
//! [`mod@reserve`], so that the error can be reported and memory freed. The functions here never take memory from the
//! reserve.
//!
//! Most memory is asked for while warming up, and before a request is taken. Where a step cannot have what it needs,
//! its replica fails as by any other failure, and what was answered counts.

pub mod reserve;

pub use crate::error::Purpose;

use crate::error::{Error, Result};

/// The error for a failed allocation of `values` values of `T`.
pub fn lacking<T>(values: usize, purpose: Purpose) -> Error {
    Error::OutOfMemory {
        purpose,
        bytes: (values as u64).saturating_mul(size_of::<T>() as u64),
    }
}

/// An empty vector with a capacity of `n` values.
pub fn room<T>(n: usize, purpose: Purpose) -> Result<Vec<T>> {
    let mut vec = Vec::new();
    let had = vec.try_reserve_exact(n).is_ok() && !reserve::holds(vec.as_ptr());
    if had { Ok(vec) } else { Err(lacking::<T>(n, purpose)) }
}

/// A vector of `n` copies of a value.
pub fn filled<T: Clone>(value: T, n: usize, purpose: Purpose) -> Result<Vec<T>> {
    let mut vec = room(n, purpose)?;
    vec.resize(n, value);
    Ok(vec)
}

/// Like [`Vec::reserve`]: makes sure that `more` values can be appended.
pub fn reserve<T>(vec: &mut Vec<T>, more: usize, purpose: Purpose) -> Result<()> {
    if vec.capacity() - vec.len() >= more || vec.try_reserve(more).is_ok() && !reserve::holds(vec.as_ptr()) {
        return Ok(());
    }
    Err(lacking::<T>(vec.len().saturating_add(more), purpose))
}

/// Like [`Vec::push`].
pub fn push<T>(vec: &mut Vec<T>, value: T, purpose: Purpose) -> Result<()> {
    reserve(vec, 1, purpose)?;
    vec.push(value);
    Ok(())
}

/// Like [`Vec::resize`].
pub fn resize<T: Clone>(vec: &mut Vec<T>, n: usize, value: T, purpose: Purpose) -> Result<()> {
    reserve(vec, n.saturating_sub(vec.len()), purpose)?;
    vec.resize(n, value);
    Ok(())
}

/// Like [`Vec::extend_from_slice`].
pub fn append<T: Copy>(vec: &mut Vec<T>, values: &[T], purpose: Purpose) -> Result<()> {
    reserve(vec, values.len(), purpose)?;
    vec.extend_from_slice(values);
    Ok(())
}

/// Like [`Vec::extend`].
pub fn extend<T>(vec: &mut Vec<T>, values: impl IntoIterator<Item = T>, purpose: Purpose) -> Result<()> {
    let values = values.into_iter();
    reserve(vec, values.size_hint().0, purpose)?;
    for value in values {
        push(vec, value, purpose)?;
    }
    Ok(())
}

/// Collects the values into a vector.
pub fn collect<T>(values: impl IntoIterator<Item = T>, purpose: Purpose) -> Result<Vec<T>> {
    let values = values.into_iter();
    let mut vec = room(values.size_hint().0, purpose)?;
    extend(&mut vec, values, purpose)?;
    Ok(vec)
}

/// Collects the values into a vector, or gives the first error.
pub fn try_collect<T>(values: impl IntoIterator<Item = Result<T>>, purpose: Purpose) -> Result<Vec<T>> {
    let values = values.into_iter();
    let mut vec = room(values.size_hint().0, purpose)?;
    for value in values {
        push(&mut vec, value?, purpose)?;
    }
    Ok(vec)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_cannot_be_had_is_an_error_that_names_size_purpose_and_remedy() {
        let error = room::<u64>(1 << 58, Purpose::Step).unwrap_err().to_string();
        let bytes = 1_u64 << 61;
        assert_eq!(
            error,
            format!("no memory for a step ({bytes} bytes); lower GETP_STEP_TOKENS or GETP_MAX_BATCH, or free memory")
        );
        assert!(filled(0_u8, usize::MAX, Purpose::Step).is_err());
        let mut vec = vec![1_u64];
        assert!(reserve(&mut vec, usize::MAX, Purpose::Step).is_err());
        assert!(resize(&mut vec, usize::MAX, 0, Purpose::Step).is_err());
        assert!(extend(&mut vec, std::iter::repeat_n(1, 1 << 60), Purpose::Step).is_err());
        assert_eq!(vec, [1]);
    }

    #[test]
    fn what_can_be_had_is_as_vec_has_it() {
        let purpose = Purpose::Step;
        assert_eq!(filled(3, 2, purpose).unwrap(), [3, 3]);
        let mut vec = collect((0..100).filter(|i| i % 40 == 0), purpose).unwrap();
        push(&mut vec, 5, purpose).unwrap();
        resize(&mut vec, 5, 7, purpose).unwrap();
        assert_eq!(vec, [0, 40, 80, 5, 7]);
        resize(&mut vec, 1, 7, purpose).unwrap();
        extend(&mut vec, [1, 2], purpose).unwrap();
        assert_eq!(vec, [0, 1, 2]);
        let refused = || Err(Error::Null("x"));
        assert!(try_collect([Ok(1), refused()], purpose).is_err());
        assert_eq!(try_collect([Ok(1)], purpose).unwrap(), [1]);
    }
}
