//! Starts threads, with an error instead of an abort where there is no memory for one.
//!
//! The C library aborts the process if it has no memory to register a thread-local object's destructor, and Rust's
//! handle of the current thread is such an object. So before a thread starts, the memory that it needs is tried.

use crate::memory::{self, Purpose};
use memmap2::MmapMut;
use std::hint::black_box;
use std::io::{Error, Result};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::{Builder, JoinHandle, Scope, ScopedJoinHandle};

/// What starting a thread takes: its stack, 2 MiB by Rust's default, and 1 MiB for the bookkeeping of Rust and the C
/// library.
const START_BYTES: usize = (2 << 20) + (1 << 20);

/// What a new thread allocates and frees at once, so that its malloc arena has memory for thread-local objects later.
const SPARE_BYTES: usize = 64 << 10;

/// Far more than the C library needs to register a destructor.
const NOTE_BYTES: usize = 1 << 10;

/// Whether there is memory to register the destructor of a thread-local object. To be asked before this thread uses
/// such an object for the first time: without that memory the C library aborts the process.
pub fn may_have_objects() -> bool {
    // `black_box` keeps the compiler from removing the allocation.
    memory::room::<u8>(NOTE_BYTES, Purpose::Threads).is_ok_and(|room| black_box(room).capacity() > 0)
}

/// Starts a thread. Fails if there is no memory for it.
pub fn spawn<T: Send + 'static>(name: String, work: impl FnOnce() -> T + Send + 'static) -> Result<JoinHandle<T>> {
    with_room(|started| Builder::new().name(name).spawn(|| started.then(work)))
}

/// Starts a thread that ends within a scope. Fails if there is no memory for it.
pub fn spawn_scoped<'scope, T: Send + 'scope>(
    scope: &'scope Scope<'scope, '_>,
    name: String,
    work: impl FnOnce() -> T + Send + 'scope,
) -> Result<ScopedJoinHandle<'scope, T>> {
    with_room(|started| Builder::new().name(name).spawn_scoped(scope, || started.then(work)))
}

/// Signals that a new thread has allocated what it needs. Not a channel: waiting on one makes Rust's handle of the
/// waiting thread, which belongs to the program and would keep it.
#[derive(Clone, Default)]
struct Started(Arc<(Mutex<bool>, Condvar)>);

impl Started {
    fn then<T>(self, work: impl FnOnce() -> T) -> T {
        let mut spare: Vec<u8> = Vec::new();
        // Failure is ignored: the thread still works unless memory runs out before it uses its thread-local objects.
        let _ = spare.try_reserve_exact(SPARE_BYTES);
        drop(black_box(spare));
        let (started, changed) = &*self.0;
        *started.lock().unwrap_or_else(PoisonError::into_inner) = true;
        changed.notify_one();
        drop(self);
        work()
    }

    fn wait(&self) {
        let (started, changed) = &*self.0;
        let started = started.lock().unwrap_or_else(PoisonError::into_inner);
        drop(changed.wait_while(started, |started| !*started));
    }
}

/// Starts a thread if there is memory for it, and waits until it has begun, so that this thread does not use up that
/// memory meanwhile.
fn with_room<H>(start: impl FnOnce(Started) -> Result<H>) -> Result<H> {
    // Mapped and not allocated, since the allocator might keep the memory instead of returning it to the system.
    drop(MmapMut::map_anon(START_BYTES).map_err(|_| Error::other("no memory for its stack"))?);
    let started = Started::default();
    let handle = start(started.clone())?;
    started.wait();
    Ok(handle)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicBool, Ordering};

    #[test]
    fn threads_have_their_names_and_results() {
        let name = || std::thread::current().name().map(str::to_owned);
        assert_eq!(spawn("one".into(), name).unwrap().join().unwrap().unwrap(), "one");
        let borrowed = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let thread = spawn_scoped(scope, "two".into(), || borrowed.store(true, Ordering::Relaxed));
            thread.unwrap().join().unwrap();
        });
        assert!(borrowed.into_inner());
    }

    #[test]
    fn a_thread_that_panics_is_told_by_its_handle() {
        let thread = spawn("three".into(), || panic!("on purpose")).unwrap();
        assert!(thread.join().is_err());
    }
}
