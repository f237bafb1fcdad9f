//! The library's allocator: the C library's and, if that fails, a static reserve of 1 MiB for small allocations.
//!
//! Rust aborts the process when an ordinary allocation fails, for example of a thread's name or an error's text. Such
//! allocations are small and few. The reserve serves thousands of them, so that lack of memory becomes an error.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::UnsafeCell;
use std::ptr::{copy_nonoverlapping, null_mut};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Size in bytes of the largest allocation that the reserve serves.
pub const MOST_BYTES: usize = 16 << 10;

const SLOT_BYTES: usize = 256;
const SLOTS: usize = 4096;

#[global_allocator]
static ALLOCATOR: Allocator = Allocator;

/// The reserve. It takes no memory until it is used, since its pages are zero.
static RESERVE: Reserve = Reserve {
    slots: UnsafeCell::new([ReserveSlot([0; SLOT_BYTES]); SLOTS]),
    taken: Mutex::new([false; SLOTS]),
};

/// Whether `pointer` is in the reserve.
pub fn holds<T>(pointer: *const T) -> bool {
    RESERVE.slot(pointer.cast()).is_some()
}

struct Reserve {
    slots: UnsafeCell<[ReserveSlot; SLOTS]>,
    taken: Mutex<[bool; SLOTS]>,
}

#[derive(Clone, Copy)]
#[repr(C, align(256))]
struct ReserveSlot([u8; SLOT_BYTES]);

// SAFETY: a slot is taken and given back under the lock, and between that only its owner uses its bytes.
unsafe impl Sync for Reserve {}

impl Reserve {
    /// The slot that contains `pointer`.
    fn slot(&self, pointer: *const u8) -> Option<usize> {
        let offset = pointer.addr().checked_sub(self.slots.get().addr())?;
        Some(offset / SLOT_BYTES).filter(|&slot| slot < SLOTS)
    }

    /// Zeroed memory for a small allocation, or NULL.
    fn take(&self, layout: Layout) -> *mut u8 {
        if layout.size() > MOST_BYTES || layout.align() > SLOT_BYTES {
            return null_mut();
        }
        let n = layout.size().div_ceil(SLOT_BYTES);
        let mut taken = self.lock();
        let Some(first) = taken.windows(n).position(|run| !run.contains(&true)) else {
            return null_mut();
        };
        taken[first..first + n].fill(true);
        let start = self.slots.get().cast::<ReserveSlot>().wrapping_add(first).cast::<u8>();
        // SAFETY: these slots are in the array, and nobody else uses them from now on.
        unsafe { start.write_bytes(0, n * SLOT_BYTES) };
        start
    }

    /// Frees an allocation's slots.
    fn give_back(&self, slot: usize, layout: Layout) {
        let n = layout.size().div_ceil(SLOT_BYTES);
        self.lock()[slot..slot + n].fill(false);
    }

    fn lock(&self) -> MutexGuard<'_, [bool; SLOTS]> {
        self.taken.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The C library's allocator with the reserve behind it.
struct Allocator;

// SAFETY: memory is the C library's or slots of the reserve, of the size and alignment asked for. Its address tells
// where it is from, and it is freed there. Nothing here unwinds: slots are within the array, and locking does not
// allocate.
unsafe impl GlobalAlloc for Allocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: guaranteed by our caller.
        let pointer = unsafe { System.alloc(layout) };
        if pointer.is_null() {
            RESERVE.take(layout)
        } else {
            pointer
        }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: guaranteed by our caller.
        let pointer = unsafe { System.alloc_zeroed(layout) };
        if pointer.is_null() {
            RESERVE.take(layout)
        } else {
            pointer
        }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        match RESERVE.slot(pointer) {
            Some(slot) => RESERVE.give_back(slot, layout),
            // SAFETY: guaranteed by our caller; the memory is the C library's.
            None => unsafe { System.dealloc(pointer, layout) },
        }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, bytes: usize) -> *mut u8 {
        if !holds(pointer) {
            // SAFETY: guaranteed by our caller; the memory is the C library's.
            let moved = unsafe { System.realloc(pointer, layout, bytes) };
            if !moved.is_null() {
                return moved;
            }
        }
        // SAFETY: the caller guarantees a size that is not 0 and valid with the alignment; both allocations have at
        // least the bytes that are copied, and do not overlap.
        unsafe {
            let moved = self.alloc(Layout::from_size_align_unchecked(bytes, layout.align()));
            if !moved.is_null() {
                copy_nonoverlapping(pointer, moved, layout.size().min(bytes));
                self.dealloc(pointer, layout);
            }
            moved
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layout(bytes: usize) -> Layout {
        Layout::from_size_align(bytes, 8).unwrap()
    }

    /// A separate reserve, so that the allocations of other tests do not use it.
    fn reserve() -> Box<Reserve> {
        Box::new(Reserve {
            slots: UnsafeCell::new([ReserveSlot([1; SLOT_BYTES]); SLOTS]),
            taken: Mutex::new([false; SLOTS]),
        })
    }

    #[test]
    fn small_requests_are_served_until_the_reserve_is_used_up_and_again_when_they_are_back() {
        let reserve = reserve();
        let all: Vec<_> = std::iter::repeat_with(|| reserve.take(layout(MOST_BYTES)))
            .take_while(|pointer| !pointer.is_null())
            .collect();
        assert_eq!(all.len(), SLOTS * SLOT_BYTES / MOST_BYTES);
        assert!(reserve.take(layout(1)).is_null());
        let middle = all[all.len() / 2];
        reserve.give_back(reserve.slot(middle).unwrap(), layout(MOST_BYTES));
        assert!(reserve.take(layout(MOST_BYTES)) == middle);
    }

    #[test]
    fn memory_is_zero_aligned_and_does_not_overlap() {
        let reserve = reserve();
        let sizes = [1, 256, 257, 4096, 3];
        let mut end = 0;
        for bytes in sizes {
            let start = reserve.take(layout(bytes));
            assert!(start.addr().is_multiple_of(SLOT_BYTES) && start.addr() >= end);
            // SAFETY: taken above.
            let memory = unsafe { std::slice::from_raw_parts(start, bytes) };
            assert!(memory.iter().all(|&byte| byte == 0));
            end = start.addr() + bytes;
        }
    }

    #[test]
    fn large_requests_are_refused() {
        let reserve = reserve();
        assert!(reserve.take(layout(MOST_BYTES + 1)).is_null());
        assert!(
            reserve
                .take(Layout::from_size_align(8, 2 * SLOT_BYTES).unwrap())
                .is_null()
        );
    }

    #[test]
    fn only_its_own_pointers_are_held() {
        assert!(!holds(&raw const ALLOCATOR));
        assert!(!holds(vec![1_u8].as_ptr()));
        assert!(holds(RESERVE.slots.get().cast::<u8>()));
        assert!(!holds(RESERVE.slots.get().wrapping_add(1)));
    }
}
