//! The allocator: the C library's, and where that has nothing left, a small reserve for small requests.
//!
//! Rust aborts the process when an allocation fails that was not asked for fallibly: a thread's name, the text of an
//! error. These are small and few, and the reserve lasts for thousands of them, so that a program that has run out of
//! memory is told so and lives on.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::UnsafeCell;
use std::ptr::{copy_nonoverlapping, null_mut};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The most bytes of a request that the reserve serves.
pub const MOST_BYTES: usize = 16 << 10;

const SLOT_BYTES: usize = 256;
const SLOTS: usize = 4096;

#[global_allocator]
static ALLOCATOR: Allocator = Allocator;

/// The reserve. Its pages are not touched before they are needed.
static RESERVE: Reserve = Reserve {
    slots: UnsafeCell::new([Slot([0; SLOT_BYTES]); SLOTS]),
    taken: Mutex::new([false; SLOTS]),
};

/// Whether a pointer points into the reserve.
pub fn holds<T>(pointer: *const T) -> bool {
    RESERVE.slot(pointer.cast()).is_some()
}

struct Reserve {
    slots: UnsafeCell<[Slot; SLOTS]>,
    taken: Mutex<[bool; SLOTS]>,
}

#[derive(Clone, Copy)]
#[repr(C, align(256))]
struct Slot([u8; SLOT_BYTES]);

// SAFETY: a slot is handed out once until it is given back, under the lock, and its bytes are touched by nobody else.
unsafe impl Sync for Reserve {}

impl Reserve {
    /// The slot a pointer points into.
    fn slot(&self, pointer: *const u8) -> Option<usize> {
        let offset = pointer.addr().checked_sub(self.slots.get().addr())?;
        Some(offset / SLOT_BYTES).filter(|&slot| slot < SLOTS)
    }

    /// Zeroed memory for a small request, or NULL.
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
        let start = self.slots.get().cast::<Slot>().wrapping_add(first).cast::<u8>();
        // SAFETY: these slots lie in the array, and are nobody else's from now on.
        unsafe { start.write_bytes(0, n * SLOT_BYTES) };
        start
    }

    /// Takes a request's memory back.
    fn give_back(&self, slot: usize, layout: Layout) {
        let n = layout.size().div_ceil(SLOT_BYTES);
        self.lock()[slot..slot + n].fill(false);
    }

    fn lock(&self) -> MutexGuard<'_, [bool; SLOTS]> {
        self.taken.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// See the module.
struct Allocator;

// SAFETY: memory is the system's or slots of the reserve, of the size and alignment asked for, and goes back to where it
// came from, which its address tells. Nothing here unwinds: slots are within the array, and locking allocates nothing.
unsafe impl GlobalAlloc for Allocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: handed on.
        let pointer = unsafe { System.alloc(layout) };
        if pointer.is_null() {
            RESERVE.take(layout)
        } else {
            pointer
        }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: handed on.
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
            // SAFETY: handed on; it is the system's.
            None => unsafe { System.dealloc(pointer, layout) },
        }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, bytes: usize) -> *mut u8 {
        if !holds(pointer) {
            // SAFETY: handed on; it is the system's.
            let moved = unsafe { System.realloc(pointer, layout, bytes) };
            if !moved.is_null() {
                return moved;
            }
        }
        // SAFETY: the caller's size is not 0 and fits with the alignment; both pieces have room for what is copied, and
        // do not overlap.
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

    /// A reserve of its own, so that other tests' allocations leave it alone.
    fn reserve() -> Box<Reserve> {
        Box::new(Reserve {
            slots: UnsafeCell::new([Slot([1; SLOT_BYTES]); SLOTS]),
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
