//! Destructors of the thread-local objects of the library's own threads.
//!
//! Rust's standard library registers them by `__cxa_thread_atexit_impl`, a function of the C library that takes the
//! dynamic loader's lock and aborts where it has no memory. Within the library that name is the function below, which
//! keeps those of the library's threads in a list of the thread's and hands the others on: those of the program's
//! threads, for which the C library also keeps the library from being unloaded.

use std::cell::{Cell, RefCell};
use std::ffi::{c_int, c_void};

type Destructor = unsafe extern "C" fn(*mut c_void);

thread_local! {
    /// Whether this is one of the library's own threads.
    static OURS: Cell<bool> = const { Cell::new(false) };
    /// The destructors of its objects, and the objects. Not dropped, since it would need a destructor itself.
    static LIST: std::mem::ManuallyDrop<RefCell<Vec<(Destructor, *mut c_void)>>> =
        const { std::mem::ManuallyDrop::new(RefCell::new(Vec::new())) };
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
        // A destructor may register others.
        while let Some((destructor, object)) = LIST.with(|list| list.borrow_mut().pop()) {
            // SAFETY: who registered it asked for this call, on this thread.
            unsafe { destructor(object) };
        }
        LIST.with(|list| list.take());
        // What is registered from here on, by destructors of the C library's keys, is the C library's.
        OURS.set(false);
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

/// Registers the destructor of an object of the calling thread; `library` is the library that it belongs to.
#[cfg(all(target_os = "linux", any(target_arch = "x86_64", target_arch = "aarch64"), not(miri)))]
unsafe extern "C" fn register(destructor: Destructor, object: *mut c_void, library: *mut c_void) -> c_int {
    if OURS.get() {
        LIST.with(|list| list.borrow_mut().push((destructor, object)));
        return 0;
    }
    type Register = unsafe extern "C" fn(Destructor, *mut c_void, *mut c_void) -> c_int;
    // SAFETY: a C string, and a function of this type where there is one.
    unsafe {
        let found = libc::dlsym(libc::RTLD_DEFAULT, c"__cxa_thread_atexit_impl".as_ptr());
        match std::mem::transmute::<*mut c_void, Option<Register>>(found) {
            Some(register) => register(destructor, object, library),
            // The object is not destroyed.
            None => -1,
        }
    }
}
