//! A slice whose elements different workers write concurrently.

use std::marker::PhantomData;

/// A mutable slice that workers may write concurrently, as long as no element is touched by two of them.
pub struct Shared<'a, T> {
    pointer: *mut T,
    len: usize,
    slice: PhantomData<&'a mut [T]>,
}

// SAFETY: access is `unsafe` and its contract is that no element is touched by two workers.
unsafe impl<T: Send> Sync for Shared<'_, T> {}
// SAFETY: as above.
unsafe impl<T: Send> Send for Shared<'_, T> {}

impl<'a, T> Shared<'a, T> {
    /// Shares a slice while it is borrowed.
    pub fn new(slice: &'a mut [T]) -> Self {
        Self {
            pointer: slice.as_mut_ptr(),
            len: slice.len(),
            slice: PhantomData,
        }
    }

    /// The elements `start..start + len`.
    ///
    /// # Safety
    /// No other worker may use them while the result lives.
    #[inline(always)]
    #[allow(clippy::mut_from_ref, reason = "the caller guarantees that the result is exclusive")]
    pub unsafe fn slice(&self, start: usize, len: usize) -> &mut [T] {
        assert!(
            start <= self.len && len <= self.len - start,
            "a worker's part lies outside the shared memory"
        );
        // SAFETY: in bounds, and the caller's contract makes it exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.pointer.add(start), len) }
    }
}
