//! Which process this is.
//!
//! A process that is forked or cloned inherits the library's engines, but neither their threads nor their devices. Its
//! number does not tell it from its parent: in a PID namespace of its own it may have the same. So a mark is kept in a
//! page of memory that the kernel empties in every new process, whichever way it is made. A kernel older than Linux
//! 4.14 cannot: there `fork` empties it, and the number in it tells the others, unless it is the parent's.

use memmap2::MmapMut;
use std::mem;
use std::process;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, Ordering};

/// A process: of those that descend from one another no two are equal.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Process(u64);

/// The number of processes that have made a mark: this one and those that it descends from.
static MARKED: AtomicU32 = AtomicU32::new(0);

impl Process {
    /// This process. Takes no lock: a thread that is within may not exist in a new process.
    pub fn this() -> Self {
        let mark = mark();
        let found = mark.load(Ordering::Relaxed);
        let id = u64::from(process::id());
        if found & u64::from(u32::MAX) == id {
            return Self(found);
        }
        let new = u64::from(MARKED.fetch_add(1, Ordering::Relaxed)) << u32::BITS | id;
        match mark.compare_exchange(found, new, Ordering::Relaxed, Ordering::Relaxed) {
            Ok(_) => Self(new),
            Err(of_another_thread) => Self(of_another_thread),
        }
    }
}

/// Where the mark of this process is; 0 is none.
fn mark() -> &'static AtomicU64 {
    static PLACE: AtomicPtr<AtomicU64> = AtomicPtr::new(null_mut());
    let mut place = PLACE.load(Ordering::Acquire);
    if place.is_null() {
        let mut page = emptied_page();
        let new = page
            .as_mut()
            .map_or_else(emptied_by_fork, |page| page.as_mut_ptr().cast());
        place = match PLACE.compare_exchange(null_mut(), new, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => {
                mem::forget(page);
                new
            }
            Err(of_another_thread) => of_another_thread,
        };
    }
    // SAFETY: there is an aligned value, which stays: this function's pages are unmapped only if no mark is there.
    unsafe { &*place }
}

/// A page that is zero, and zero again in each process that is made of this one; `None` if the kernel has none.
fn emptied_page() -> Option<MmapMut> {
    let mut page = MmapMut::map_anon(size_of::<AtomicU64>()).ok()?;
    // SAFETY: the page is ours, and begins at this address.
    let refused = unsafe { libc::madvise(page.as_mut_ptr().cast(), page.len(), libc::MADV_WIPEONFORK) };
    (refused == 0).then_some(page)
}

/// A variable that is zero, and zero again in each process that is forked from this one.
fn emptied_by_fork() -> *mut AtomicU64 {
    static MARK: AtomicU64 = AtomicU64::new(0);
    extern "C" fn in_child() {
        MARK.store(0, Ordering::Relaxed);
    }
    // SAFETY: the function takes no arguments, and the library stays. Where there is no memory to register it, the
    // process's number has to do.
    unsafe { libc::pthread_atfork(None, None, Some(in_child)) };
    (&raw const MARK).cast_mut()
}
