//! The program's stdout and stderr, written to without raising signals: a closed pipe is an error.
//!
//! A write to a pipe without a reader raises SIGPIPE, and a write beyond the limit on file sizes raises SIGXFSZ. By
//! default both end the program, and the library must not change the program's signal handlers. So both signals are
//! blocked in the calling thread while it writes, and a signal that the write has raised is consumed before they are
//! unblocked.
//!
//! Rust's own `stdout` and `stderr` are not used, since their locks may be held, after `fork`, by a thread that does
//! not exist in the new process.

use std::io::{self, ErrorKind, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, RawFd};
use std::ptr::null_mut;

/// stdout or stderr.
#[derive(Clone, Copy, Debug)]
pub enum Stream {
    /// For answers.
    Stdout,
    /// For messages and the progress bar.
    Stderr,
}

impl Stream {
    /// Whether it is the terminal that the process was started from.
    pub fn is_controlling_terminal(self) -> bool {
        // SAFETY: a number goes in and a number comes out.
        unsafe { libc::tcgetsid(self.as_raw_fd()) != -1 }
    }
}

impl AsRawFd for Stream {
    fn as_raw_fd(&self) -> RawFd {
        match self {
            Self::Stdout => libc::STDOUT_FILENO,
            Self::Stderr => libc::STDERR_FILENO,
        }
    }
}

impl Write for Stream {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let fd = self.as_raw_fd();
        loop {
            match quietly(bytes.len(), || write(fd, bytes)) {
                // The program has made the file descriptor non-blocking, and the pipe is full.
                Err(error) if error.kind() == ErrorKind::WouldBlock => wait_until_writable(fd)?,
                written => return written,
            }
        }
    }

    /// Does nothing: writes are not buffered.
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Calls `write`, which writes `bytes` bytes, and suppresses SIGPIPE and SIGXFSZ that it raises.
pub fn quietly(bytes: usize, write: impl FnOnce() -> io::Result<usize>) -> io::Result<usize> {
    let raised = signals(&[libc::SIGPIPE, libc::SIGXFSZ]);
    let mut before = MaybeUninit::uninit();
    // SAFETY: both sets are local variables.
    unsafe { libc::pthread_sigmask(libc::SIG_BLOCK, &raised, before.as_mut_ptr()) };
    let pending = pending();
    let written = write();
    // A write that raises a signal may have written a part of the bytes.
    if !matches!(written, Ok(n) if n == bytes) {
        for signal in [libc::SIGPIPE, libc::SIGXFSZ] {
            // SAFETY: a valid set and a valid number.
            if unsafe { libc::sigismember(&pending, signal) } == 0 {
                take(signal);
            }
        }
    }
    // SAFETY: the set was filled above.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, before.as_ptr(), null_mut()) };
    written
}

fn write(fd: RawFd, bytes: &[u8]) -> io::Result<usize> {
    // SAFETY: pointer and length are a slice's.
    let written = unsafe { libc::write(fd, bytes.as_ptr().cast(), bytes.len()) };
    usize::try_from(written).map_err(|_| io::Error::last_os_error())
}

fn wait_until_writable(fd: RawFd) -> io::Result<()> {
    let mut poll = libc::pollfd {
        fd,
        events: libc::POLLOUT,
        revents: 0,
    };
    // SAFETY: `poll` is one local struct.
    match unsafe { libc::poll(&mut poll, 1, -1) } {
        -1 => Err(io::Error::last_os_error()),
        _ => Ok(()),
    }
}

/// A set of these signals.
fn signals(numbers: &[libc::c_int]) -> libc::sigset_t {
    let mut set = MaybeUninit::uninit();
    // SAFETY: the set is emptied, and so initialized, before anything else.
    unsafe {
        libc::sigemptyset(set.as_mut_ptr());
        for &number in numbers {
            libc::sigaddset(set.as_mut_ptr(), number);
        }
        set.assume_init()
    }
}

/// The blocked signals that are pending for the calling thread or for the process.
fn pending() -> libc::sigset_t {
    let mut set = signals(&[]);
    // SAFETY: the set is a local variable.
    unsafe { libc::sigpending(&mut set) };
    set
}

/// Consumes a blocked signal, if it is pending.
fn take(signal: libc::c_int) {
    let now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: set and time are local variables; NULL means that no details are wanted.
    while unsafe { libc::sigtimedwait(&signals(&[signal]), null_mut(), &now) } == -1
        && io::Error::last_os_error().kind() == ErrorKind::Interrupted
    {}
}
