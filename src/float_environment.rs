//! C's floating-point environment: the rounding mode, whether subnormal numbers count as zero, which exceptions raise
//! SIGFPE, and the flags of those that were met.
//!
//! Each thread has one, and a new thread begins with its creator's. A program may have set another than C's default
//! one; `-ffast-math` alone has subnormal numbers count as zero. The library's results are those of the default one, so
//! it computes in that one, and leaves the program's as it was.

use std::ffi::c_int;
use std::mem::MaybeUninit;
use std::ptr;

/// C's `fenv_t`, which has 32 bytes on x86-64 and 8 on AArch64.
#[repr(C, align(16))]
struct Environment([u64; 8]);

unsafe extern "C" {
    fn fegetenv(environment: *mut Environment) -> c_int;
    fn fesetenv(environment: *const Environment) -> c_int;
}

/// Where C's `FE_DFL_ENV` is known to be the address -1. Miri knows none of this.
const KNOWN: bool = cfg!(all(any(target_arch = "x86_64", target_arch = "aarch64"), not(miri)));

/// Puts the calling thread's environment back when dropped, its flags included.
struct Program(Option<MaybeUninit<Environment>>);

impl Program {
    fn keep() -> Self {
        let mut now = MaybeUninit::uninit();
        // SAFETY: there is room for the whole environment.
        let kept = KNOWN && unsafe { fegetenv(now.as_mut_ptr()) } == 0;
        Self(kept.then_some(now))
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        if let Some(before) = &self.0 {
            // SAFETY: `keep` has filled it.
            unsafe { fesetenv(before.as_ptr()) };
        }
    }
}

/// Runs `work` in C's default environment: numbers are rounded to the nearest, subnormal ones are numbers, and no
/// exception raises a signal.
pub fn in_default<T>(work: impl FnOnce() -> T) -> T {
    let _program = Program::keep();
    set_default();
    apart(work)
}

/// Gives the calling thread, one of the library's own, C's default environment.
pub fn set_default() {
    if KNOWN {
        // SAFETY: this address names the default environment.
        unsafe { fesetenv(ptr::without_provenance(usize::MAX)) };
    }
}

/// Not inlined, since the compiler may move arithmetic over a change of the environment.
#[inline(never)]
fn apart<T>(work: impl FnOnce() -> T) -> T {
    work()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::hint::black_box;
    use std::thread;

    unsafe extern "C" {
        fn fesetround(mode: c_int) -> c_int;
        fn fetestexcept(exceptions: c_int) -> c_int;
    }

    #[cfg(target_arch = "x86_64")]
    const UPWARD: c_int = 0x800;
    #[cfg(target_arch = "aarch64")]
    const UPWARD: c_int = 0x40_0000;
    #[cfg(target_arch = "x86_64")]
    const INEXACT: c_int = 0x20;
    #[cfg(target_arch = "aarch64")]
    const INEXACT: c_int = 0x10;

    /// Its nearest float32 is the one below.
    fn inexact() -> f32 {
        black_box(1.0_f32) / black_box(25.0)
    }

    #[test]
    fn the_program_s_rounding_is_set_aside_and_put_back_also_by_a_panic() {
        let nearest = inexact();
        let calls = move || {
            // SAFETY: this thread ends with its own environment.
            unsafe { fesetround(UPWARD) };
            let upward = inexact();
            let inside = in_default(inexact);
            let panicked = std::panic::catch_unwind(|| in_default(|| panic!("on purpose")));
            (upward, inside, panicked.is_err(), inexact())
        };
        let (upward, inside, panicked, after) = thread::spawn(calls).join().unwrap();
        assert!(panicked && inside == nearest && upward > nearest && after == upward);
    }

    #[test]
    fn the_program_s_flags_are_not_touched() {
        let flags = || {
            let before = in_default(|| {
                // Else nothing would be computed.
                black_box(inexact());
                // SAFETY: asks alone.
                unsafe { fetestexcept(INEXACT) }
            });
            // SAFETY: as above.
            (before, unsafe { fetestexcept(INEXACT) })
        };
        assert_eq!(thread::spawn(flags).join().unwrap(), (INEXACT, 0));
    }
}
