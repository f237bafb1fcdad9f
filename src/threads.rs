//! Starts threads, with an error instead of an abort where there is no memory for one, and without the dynamic loader's
//! lock.
//!
//! The standard library's threads need both: its handle of a thread is allocated by the system's allocator, and
//! destructors of thread-local objects are registered with the C library, which aborts the process where it has no
//! memory, and which takes the lock that the loader holds while it runs a library's constructors. So a program that
//! warmed up in such a constructor, within `dlopen`, would wait for the new thread for ever, and the thread for the
//! lock. The library's threads are therefore made here, from the C library's, and the destructors of thread-local
//! objects are kept here, too.

mod destructors;

use crate::float_environment;
use destructors::Destructors;
use memmap2::MmapMut;
use std::any::Any;
use std::ffi::{CString, c_void};
use std::hint::black_box;
use std::io::{Error, Result};
use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::ptr::{null, null_mut};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

/// A thread's stack. The C library's default is as large as the main thread's may become.
const STACK_BYTES: usize = 2 << 20;

/// What starting a thread takes: its stack, and 1 MiB for the bookkeeping of the C library.
const START_BYTES: usize = STACK_BYTES + (1 << 20);

/// What a new thread allocates and frees at once, so that its malloc arena has memory for what it needs later.
const SPARE_BYTES: usize = 64 << 10;

/// The longest name of a thread that Linux takes.
const MOST_NAME_BYTES: usize = 15;

/// The result of a thread's work, or its panic.
pub type Ended<T> = std::result::Result<T, Box<dyn Any + Send>>;

/// A thread. Dropping it waits for the thread's end, unless the thread itself drops it.
pub struct Thread<T> {
    id: Option<libc::pthread_t>,
    end: Arc<Mutex<Option<Ended<T>>>>,
}

/// Starts a thread. Fails if there is no memory for it.
pub fn spawn<T: Send + 'static>(name: &str, work: impl FnOnce() -> T + Send + 'static) -> Result<Thread<T>> {
    // SAFETY: what the work uses lives as long as the process.
    unsafe { start(name, work, None) }
}

impl<T> Thread<T> {
    /// Waits for the thread's end.
    pub fn join(mut self) -> Ended<T> {
        self.wait();
        let ended = lock(&self.end).take();
        ended.unwrap_or_else(|| Err(Box::new("the thread has left no result")))
    }

    fn wait(&mut self) {
        if let Some(id) = self.id.take() {
            // SAFETY: the thread was started, and is waited for or let go once.
            unsafe {
                if libc::pthread_equal(id, libc::pthread_self()) != 0 {
                    libc::pthread_detach(id);
                } else {
                    libc::pthread_join(id, null_mut());
                }
            }
        }
    }
}

impl<T> Drop for Thread<T> {
    fn drop(&mut self) {
        self.wait();
    }
}

/// Where threads may use what lives longer than the scope: they have ended when [`scope`] returns.
pub struct Scope<'scope, 'env: 'scope> {
    running: Running,
    scope: PhantomData<&'scope mut &'scope ()>,
    env: PhantomData<&'env mut &'env ()>,
}

/// How many threads of a scope have not ended, and a signal that one has.
type Running = Arc<(Mutex<usize>, Condvar)>;

/// Calls `body` and waits for the threads that it has started within the scope.
pub fn scope<'env, T>(body: impl for<'scope> FnOnce(&'scope Scope<'scope, 'env>) -> T) -> T {
    let scope = Scope {
        running: Running::default(),
        scope: PhantomData,
        env: PhantomData,
    };
    let done = catch_unwind(AssertUnwindSafe(|| body(&scope)));
    let (running, ended) = &*scope.running;
    drop(ended.wait_while(lock(running), |running| *running > 0));
    done.unwrap_or_else(|panic| resume_unwind(panic))
}

impl<'scope> Scope<'scope, '_> {
    /// Starts a thread that ends within the scope. Fails if there is no memory for it.
    pub fn spawn<T: Send + 'scope>(
        &'scope self,
        name: &str,
        work: impl FnOnce() -> T + Send + 'scope,
    ) -> Result<Thread<T>> {
        let runs = Runs::one_more(&self.running);
        // SAFETY: `scope` waits until the work is done, also if the thread's handle is forgotten.
        unsafe { start(name, work, Some(runs)) }
    }
}

/// Counts a thread of a scope until it is dropped.
struct Runs(Running);

impl Runs {
    fn one_more(running: &Running) -> Self {
        *lock(&running.0) += 1;
        Self(running.clone())
    }
}

impl Drop for Runs {
    fn drop(&mut self) {
        *lock(&self.0.0) -= 1;
        self.0.1.notify_all();
    }
}

/// Signals that a new thread has allocated what it needs.
#[derive(Clone, Default)]
struct StartSignal(Arc<(Mutex<bool>, Condvar)>);

impl StartSignal {
    fn tell(self) {
        let mut spare: Vec<u8> = Vec::new();
        // Failure is ignored: the thread still works unless memory runs out before it uses its thread-local objects.
        let _ = spare.try_reserve_exact(SPARE_BYTES);
        drop(black_box(spare));
        let (started, changed) = &*self.0;
        *lock(started) = true;
        changed.notify_one();
    }

    fn wait(&self) {
        let (started, changed) = &*self.0;
        drop(changed.wait_while(lock(started), |started| !*started));
    }
}

/// What a new thread is given: all it does.
type Main<'a> = Box<dyn FnOnce() + Send + 'a>;

/// Starts a thread if there is memory for it, and waits until it has begun, so that this thread does not use up that
/// memory meanwhile.
///
/// # Safety
///
/// What `work` and its result use lives until the thread has ended, or has dropped `runs`.
unsafe fn start<'a, T: Send + 'a>(
    name: &str,
    work: impl FnOnce() -> T + Send + 'a,
    runs: Option<Runs>,
) -> Result<Thread<T>> {
    // Mapped and not allocated, since the allocator might keep the memory instead of returning it to the system.
    drop(MmapMut::map_anon(START_BYTES).map_err(|_| Error::other("no memory for its stack"))?);
    let name = CString::new(&name.as_bytes()[..name.len().min(MOST_NAME_BYTES)])?;
    let end = Arc::new(Mutex::new(None));
    let (started, theirs) = (StartSignal::default(), end.clone());
    let begun = started.clone();
    let main: Main<'_> = Box::new(move || {
        // SAFETY: this thread, and a C string.
        unsafe { libc::pthread_setname_np(libc::pthread_self(), name.as_ptr()) };
        drop(name);
        begun.tell();
        let ended = catch_unwind(AssertUnwindSafe(work));
        *lock(&theirs) = Some(ended);
        drop((theirs, runs));
    });
    let main = Box::into_raw(Box::new(main));
    // SAFETY: the thread takes the box; our caller vouches for how long it may be used.
    let id = unsafe { create(main.cast()) };
    if id.is_err() {
        // SAFETY: no thread has taken it.
        drop(unsafe { Box::from_raw(main) });
    }
    let thread = Thread { id: Some(id?), end };
    started.wait();
    Ok(thread)
}

/// # Safety
///
/// `main` is a `Box<Main>` as a pointer, which becomes the new thread's.
unsafe fn create(main: *mut c_void) -> Result<libc::pthread_t> {
    let mut attributes = MaybeUninit::uninit();
    let mut id = MaybeUninit::uninit();
    let check = |code| match code {
        0 => Ok(()),
        code => Err(Error::from_raw_os_error(code)),
    };
    // SAFETY: all pointers are to local variables, the attributes being initialized first. Miri knows none.
    unsafe {
        if cfg!(miri) {
            check(libc::pthread_create(id.as_mut_ptr(), null(), run, main))?;
            return Ok(id.assume_init());
        }
        check(libc::pthread_attr_init(attributes.as_mut_ptr()))?;
        let sized = check(libc::pthread_attr_setstacksize(attributes.as_mut_ptr(), STACK_BYTES));
        let created = sized.and_then(|()| check(libc::pthread_create(id.as_mut_ptr(), attributes.as_ptr(), run, main)));
        libc::pthread_attr_destroy(attributes.as_mut_ptr());
        created?;
        Ok(id.assume_init())
    }
}

/// A thread's first function.
extern "C" fn run(main: *mut c_void) -> *mut c_void {
    float_environment::set_default();
    // Dropped last: it calls the destructors of what `main` used.
    let _destructors = Destructors::of_this_thread();
    // SAFETY: `start` has made it so, for this thread alone.
    let main = unsafe { Box::from_raw(main.cast::<Main<'_>>()) };
    // The work's panic is caught within; one here comes from dropping what the work has left.
    let _ = catch_unwind(AssertUnwindSafe(main));
    null_mut()
}

/// Locks, also after a panic: what these locks protect is replaced as a whole.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;
    use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

    #[test]
    fn threads_have_their_names_and_results() {
        let name = || {
            let mut name = [0_u8; 16];
            // SAFETY: the name has at most 16 bytes.
            unsafe { libc::prctl(libc::PR_GET_NAME, name.as_mut_ptr()) };
            name
        };
        assert!(spawn("one", name).unwrap().join().unwrap().starts_with(b"one\0"));
        let borrowed = AtomicBool::new(false);
        scope(|scope| {
            let thread = scope.spawn("two", || borrowed.store(true, Ordering::Relaxed));
            thread.unwrap().join().unwrap();
        });
        assert!(borrowed.into_inner());
    }

    #[test]
    fn a_thread_that_panics_is_told_by_its_handle() {
        let thread = spawn("three", || panic!("on purpose")).unwrap();
        assert!(thread.join().is_err());
    }

    #[test]
    fn a_scope_waits_for_its_threads_also_for_those_whose_handles_are_kept_and_after_a_panic() {
        let (begin, ended) = (AtomicBool::new(false), AtomicUsize::new(0));
        let work = || {
            while !begin.load(Ordering::Relaxed) {
                std::thread::yield_now();
            }
            ended.fetch_add(1, Ordering::Relaxed);
        };
        let mut kept = None;
        let panicked = catch_unwind(AssertUnwindSafe(|| {
            scope(|scope| {
                kept = Some(scope.spawn("kept", work).unwrap());
                scope.spawn("let go", || begin.store(true, Ordering::Relaxed)).unwrap();
                panic!("on purpose");
            })
        }));
        assert!(panicked.is_err());
        assert_eq!(ended.into_inner(), 1);
    }

    #[test]
    fn thread_local_objects_are_dropped_before_the_thread_has_ended() {
        static DROPPED: AtomicUsize = AtomicUsize::new(0);
        struct Last;
        struct First;
        thread_local! {
            static LAST: Last = const { Last };
            static FIRST: Cell<Option<First>> = const { Cell::new(None) };
        }
        impl Drop for First {
            // Registers another destructor, while destructors run.
            fn drop(&mut self) {
                LAST.with(|_| ());
                DROPPED.fetch_add(1, Ordering::Relaxed);
            }
        }
        impl Drop for Last {
            fn drop(&mut self) {
                DROPPED.fetch_add(1, Ordering::Relaxed);
            }
        }
        let work = || FIRST.set(Some(First));
        spawn("objects", work).unwrap().join().unwrap();
        assert_eq!(DROPPED.load(Ordering::Relaxed), 2);
        // On a thread of the program.
        std::thread::spawn(work).join().unwrap();
        assert_eq!(DROPPED.load(Ordering::Relaxed), 4);
    }
}
