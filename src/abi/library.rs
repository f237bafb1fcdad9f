//! What concerns the library as a whole: its version, the last error, the statistics of a model.

use super::types::Transformer;
use super::{guard, lifecycle, pointer};
use crate::replica::Replica;
use std::ffi::{c_char, c_int};

/// What a model has done since it was warmed up.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct Stats {
    /// Tokens stored in answers.
    pub tokens: u64,
    /// Tokens of the prompts that could be queued.
    pub prompt_tokens: u64,
    /// Steps.
    pub steps: u64,
    /// Seconds in `inference`.
    pub seconds: f64,
    /// Bytes of the packed weights.
    pub packed_bytes: u64,
    /// Bytes of the KV cache.
    pub kv_bytes: u64,
}

/// The library's version, for example "0.1.0". Never fails.
#[unsafe(no_mangle)]
pub extern "C" fn getp_version() -> *const c_char {
    concat!(env!("CARGO_PKG_VERSION"), "\0").as_ptr().cast()
}

/// What went wrong in the calling thread's latest call of warm_up, inference, finish, getp_stats or an open function,
/// or in an accessor or a close function since; NULL if nothing. One line without its newline. It stays valid until
/// the thread's next call of a function of this library other than this one. NULL too where the thread ends and its
/// thread_local objects are gone, as in functions passed to atexit. Never fails.
#[unsafe(no_mangle)]
pub extern "C" fn getp_last_error() -> *const c_char {
    guard::last_error()
}

/// Writes what `transformer` has done since it was warmed up to `stats`; returns 0.
///
/// On failure, a NULL or a transformer that is not warmed up: one line on stderr and the last error, returns -1, and
/// `stats` is as it was.
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
