//! The library's version, the last error, and a model's statistics.

use super::types::Transformer;
use super::{guard, lifecycle, pointer};
use crate::replica::Replica;
use std::ffi::{c_char, c_int};

/// Counters of a model since it was warmed up, and its memory.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct Stats {
    /// Tokens stored in answers.
    pub tokens: u64,
    /// Prompt tokens of the requests that were accepted.
    pub prompt_tokens: u64,
    /// Forward passes over a batch, on all devices.
    pub steps: u64,
    /// Seconds in `inference`, tokenization and printing included.
    pub seconds: f64,
    /// Bytes of the packed weights on all devices.
    pub packed_bytes: u64,
    /// Bytes of the KV caches of all devices.
    pub kv_bytes: u64,
}

/// The library's version, for example "0.1.0". Never fails.
#[unsafe(no_mangle)]
pub extern "C" fn getp_version() -> *const c_char {
    concat!(env!("CARGO_PKG_VERSION"), "\0").as_ptr().cast()
}

/// The calling thread's last error, one line without a newline, or NULL if there is none. warm_up, inference, finish,
/// getp_stats and the open functions clear it when they begin; the other functions keep it, and replace it if they
/// fail. The string is valid until the thread calls another function of this library. When a thread ends and its
/// thread_local objects have been destroyed, for example in functions passed to atexit, the result is NULL. Never
/// fails.
#[unsafe(no_mangle)]
pub extern "C" fn getp_last_error() -> *const c_char {
    guard::last_error()
}

/// Writes the statistics of `transformer` to `*stats`; returns 0.
///
/// Fails for a NULL or a transformer that is not warmed up: one line on stderr and the last error, returns -1, and
/// `*stats` is unchanged.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn getp_stats(transformer: *const Transformer, stats: *mut Stats) -> c_int {
    guard::work(-1, || {
        pointer::check(stats, "stats")?;
        let done = lifecycle::with_engine(transformer, |engine| Stats {
            tokens: engine.stats().tokens,
            prompt_tokens: engine.stats().prompt_tokens,
            steps: engine.stats().steps,
            seconds: engine.stats().seconds,
            packed_bytes: engine.replicas().map(packed_bytes).sum(),
            kv_bytes: engine.replicas().map(|replica| replica.kv_bytes()).sum(),
        })?;
        // SAFETY: the program passes a pointer to a struct of its own.
        unsafe { stats.write(done) };
        Ok(0)
    })
}

fn packed_bytes(replica: &dyn Replica) -> u64 {
    replica.pack_report().kinds.iter().map(|kind| kind.bytes).sum()
}
