//! Destructors of thread-local objects.
//!
//! Rust's standard library registers them by `__cxa_thread_atexit_impl`, a function of the C library that takes the
//! dynamic loader's lock and aborts where it has no memory. Within the library that name is the function below, which
//! keeps them in a list of the thread's. The library's own threads go through theirs before they end; for those of the
//! program a key of POSIX's does it, whose lack of memory is an error. What is called then must still be there, so the
//! library is linked as one that is never unloaded (`build.rs`).

#![cfg_attr(miri, allow(dead_code, reason = "Miri calls destructors itself"))]

use std::cell::{Cell, RefCell};
use std::ffi::{c_int, c_void};
use std::mem::{ManuallyDrop, MaybeUninit};
use std::ptr::null;
use std::sync::atomic::{AtomicU32, Ordering};

type Destructor = unsafe extern "C" fn(*mut c_void);

thread_local! {
    /// Whether this is one of the library's own threads.
    static OURS: Cell<bool> = const { Cell::new(false) };
    /// The destructors of its objects, and the objects. Not dropped, since it would need a destructor itself.
    static LIST: ManuallyDrop<RefCell<Vec<(Destructor, *mut c_void)>>> =
        const { ManuallyDrop::new(RefCell::new(Vec::new())) };
}

/// Calls the destructors of the calling thread's objects, the latest first.
fn call_all() {
    // A destructor may register others.
    while let Some((destructor, object)) = LIST.with(|list| list.borrow_mut().pop()) {
        // SAFETY: who registered it asked for this call, on this thread.
        unsafe { destructor(object) };
    }
    LIST.with(|list| list.take());
}

/// Makes the calling thread one of the library's own. Dropping it calls the destructors of its thread-local objects.
pub struct Destructors(());

impl Destructors {
    pub fn of_this_thread() -> Self {
        OURS.set(true);
        Self(())
    }
}

impl Drop for Destructors {
    fn drop(&mut self) {
        call_all();
        // What is registered from here on, by destructors of keys, is called as on the program's threads.
        OURS.set(false);
    }
}

/// The key whose destructor calls those of the program's threads, and 1; 0 before there is one.
static KEY: AtomicU32 = AtomicU32::new(0);

/// Sees to it that the calling thread, one of the program's, calls its destructors when it ends. Fails where there is
/// no key or no memory. The main thread, which ends with the program, calls none.
fn call_at_end() -> Option<()> {
    extern "C" fn at_end(_: *mut c_void) {
        call_all();
    }
    let ok = |code: c_int| (code == 0).then_some(());
    let mut made = MaybeUninit::uninit();
    let mut key = KEY.load(Ordering::Relaxed);
    // SAFETY: the pointer is to a local variable, and a key is used or deleted behind its creation. A key's value is
    // not followed.
    unsafe {
        if key == 0 {
            ok(libc::pthread_key_create(made.as_mut_ptr(), Some(at_end)))?;
            let made = made.assume_init();
            key = made + 1;
            if let Err(theirs) = KEY.compare_exchange(0, key, Ordering::Relaxed, Ordering::Relaxed) {
                libc::pthread_key_delete(made);
                key = theirs;
            }
        }
        ok(libc::pthread_setspecific(
            key - 1,
            null::<c_void>().wrapping_byte_add(1),
        ))
    }
}

// The name is hidden: it is meant for the library's own code and not for the program's.
#[cfg(all(target_os = "linux", target_arch = "x86_64", not(miri)))]
std::arch::global_asm!(
    ".globl __cxa_thread_atexit_impl",
    ".hidden __cxa_thread_atexit_impl",
    ".type __cxa_thread_atexit_impl, @function",
    "__cxa_thread_atexit_impl:",
    "jmp {register}",
    register = sym register,
);

#[cfg(all(target_os = "linux", target_arch = "aarch64", not(miri)))]
std::arch::global_asm!(
    ".globl __cxa_thread_atexit_impl",
    ".hidden __cxa_thread_atexit_impl",
    ".type __cxa_thread_atexit_impl, %function",
    "__cxa_thread_atexit_impl:",
    "b {register}",
    register = sym register,
);

/// Registers the destructor of an object of the calling thread. Without memory for that the object is never destroyed.
#[cfg(all(target_os = "linux", any(target_arch = "x86_64", target_arch = "aarch64"), not(miri)))]
unsafe extern "C" fn register(destructor: Destructor, object: *mut c_void, _library: *mut c_void) -> c_int {
    if !OURS.get() && call_at_end().is_none() {
        return -1;
    }
    LIST.with(|list| list.borrow_mut().push((destructor, object)));
    0
}
