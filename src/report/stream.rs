//! The program's stdout and stderr, written so that a reader who has gone is an error and not a signal.
//!
//! A write to a pipe that nobody reads raises SIGPIPE, one beyond the limit on a file's size SIGXFSZ. Both end a
//! program that has not asked for anything else, and what it has asked for is not ours to change. So they are blocked
//! in the calling thread while it writes, and one that the write has raised is taken before they are let through again.
//!
//! Nothing here takes a lock of Rust's own `stdout` and `stderr`: after `fork` a thread that is not there any more may
//! hold it.

use std::io::{self, ErrorKind, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, RawFd};
use std::ptr::null_mut;

/// One of the two.
#[derive(Clone, Copy, Debug)]
pub enum Stream {
    /// For answers.
    Stdout,
    /// For lines and the progress bar.
    Stderr,
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
                // The program has made it non-blocking; it is full.
                Err(error) if error.kind() == ErrorKind::WouldBlock => wait_until_writable(fd)?,
                written => return written,
            }
        }
    }

    /// Nothing is held back.
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Does `write`, which is to write `bytes` bytes, without the signals that it may raise.
pub fn quietly(bytes: usize, write: impl FnOnce() -> io::Result<usize>) -> io::Result<usize> {
    let raised = signals(&[libc::SIGPIPE, libc::SIGXFSZ]);
    let mut before = MaybeUninit::uninit();
    // SAFETY: two sets of this function's own.
    unsafe { libc::pthread_sigmask(libc::SIG_BLOCK, &raised, before.as_mut_ptr()) };
    let pending = pending();
    let written = write();
    // Part of the bytes may have been written before the signal was raised.
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
    // SAFETY: the bytes are a slice's.
    let written = unsafe { libc::write(fd, bytes.as_ptr().cast(), bytes.len()) };
    usize::try_from(written).map_err(|_| io::Error::last_os_error())
}

fn wait_until_writable(fd: RawFd) -> io::Result<()> {
    let mut poll = libc::pollfd {
        fd,
        events: libc::POLLOUT,
        revents: 0,
    };
    // SAFETY: one struct of this function's own.
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

/// The blocked signals that wait for the calling thread or for the program.
fn pending() -> libc::sigset_t {
    let mut set = signals(&[]);
    // SAFETY: a set of this function's own.
    unsafe { libc::sigpending(&mut set) };
    set
}

/// Takes a blocked signal, if it is pending.
fn take(signal: libc::c_int) {
    let now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: a set and a time of this function's own; NULL asks for no details.
    while unsafe { libc::sigtimedwait(&signals(&[signal]), null_mut(), &now) } == -1
        && io::Error::last_os_error().kind() == ErrorKind::Interrupted
    {}
}
