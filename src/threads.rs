//! Threads that start where there is memory for them, or not at all.
//!
//! The C library ends the process when it cannot note that a thread has objects to destroy at its end, and Rust's own
//! handle to the thread is such an object. So what a thread takes before its own work is asked for first.

use crate::memory::{self, Purpose};
use memmap2::MmapMut;
use std::hint::black_box;
use std::io::{Error, Result};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::{Builder, JoinHandle, Scope, ScopedJoinHandle};

/// A thread's stack as Rust makes it, and room for what the C library and Rust note of the thread.
const START_BYTES: usize = (2 << 20) + (1 << 20);

/// What a thread leaves in its own allocator, for the objects that it will have later.
const SPARE_BYTES: usize = 64 << 10;

/// Far more than the C library takes to note an object.
const NOTE_BYTES: usize = 1 << 10;

/// Whether the C library has memory to note that this thread has an object to destroy at its end: where it has none
/// when a `thread_local` object is used for the first time, it ends the process.
pub fn may_have_objects() -> bool {
    // Seen from outside, so that the compiler does not leave the allocation out.
    memory::room::<u8>(NOTE_BYTES, Purpose::Threads).is_ok_and(|room| black_box(room).capacity() > 0)
}

/// Starts a thread.
pub fn spawn<T: Send + 'static>(name: String, work: impl FnOnce() -> T + Send + 'static) -> Result<JoinHandle<T>> {
    with_room(|started| Builder::new().name(name).spawn(|| started.then(work)))
}

/// Starts a thread that ends within a scope.
pub fn spawn_scoped<'scope, T: Send + 'scope>(
    scope: &'scope Scope<'scope, '_>,
    name: String,
    work: impl FnOnce() -> T + Send + 'scope,
) -> Result<ScopedJoinHandle<'scope, T>> {
    with_room(|started| Builder::new().name(name).spawn_scoped(scope, || started.then(work)))
}

/// Where a thread says that it has what starting takes. A channel would leave the program's thread with a handle to
/// itself, which is never given back.
#[derive(Clone, Default)]
struct Started(Arc<(Mutex<bool>, Condvar)>);

impl Started {
    fn then<T>(self, work: impl FnOnce() -> T) -> T {
        let mut spare: Vec<u8> = Vec::new();
        // Without it the thread works as well, as long as nobody else takes what there is.
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

/// Starts a thread if there is room, and waits until it has begun: nobody here takes what the thread was promised.
fn with_room<H>(start: impl FnOnce(Started) -> Result<H>) -> Result<H> {
    // Mapped, not allocated: an allocator would keep it.
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
