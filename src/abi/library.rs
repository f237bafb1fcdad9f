//! The library's version and features, the last error, and a model's statistics.

use super::status::{GETP_OK, Status};
use super::types::Transformer;
use super::{guard, pointer, registry, sized};
use crate::error::Result;
use std::ffi::c_char;
use std::mem::offset_of;

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
    /// Seconds in `inference`, tokenization and printing included, and seconds with requests in an open batch.
    pub seconds: f64,
    /// Bytes of the packed weights on all devices.
    pub packed_bytes: u64,
    /// Bytes of the KV caches of all devices.
    pub kv_bytes: u64,
    /// Devices that work, or groups of devices that work together.
    pub devices: u64,
    /// Devices, or groups, that have failed; others have gone on with their requests.
    pub lost_devices: u64,
    /// Of the prompt tokens: those that were not computed, since an earlier prompt or answer had begun with the same
    /// ones.
    pub shared_tokens: u64,
    /// Tokens that were computed again: where answers become longer than those before, the sequences that began last
    /// may have to give their blocks of the KV cache to others; and where a device has failed, others begin anew with
    /// its requests.
    pub recomputed_tokens: u64,
}

/// The library's version, for example "0.1.0". GETP_VERSION is that of the header. Never fails.
#[unsafe(no_mangle)]
pub extern "C" fn getp_version() -> *const c_char {
    concat!(env!("CARGO_PKG_VERSION"), "\0").as_ptr().cast()
}

/// What the library was built with: "cpu", and behind it each feature, with the architectures that it has kernels for,
/// for example "cpu hip=gfx90a,gfx942 mpi", with a space between two of them. Never fails.
#[unsafe(no_mangle)]
pub extern "C" fn getp_features() -> *const c_char {
    concat!(env!("FEATURES_OF_GETP"), "\0").as_ptr().cast()
}

/// The calling thread's last error, one line without a newline, or NULL if there is none. warm_up, inference, finish,
/// getp_stats, the open functions, getp_batch_submit, getp_batch_next, getp_batch_cancel, getp_batch_cancel_all,
/// getp_tokenizer_encode, getp_tokenizer_decode, getp_decoder_next, getp_decoder_end, and getp_harmony_render, _read,
/// _reader_next and _reader_end clear it when they begin; the other functions keep it, and replace it if they fail. The
/// string is valid until the thread calls another function of this library. Of a text of more than 4095 bytes it is the
/// beginning; stderr has all of it. Never fails.
#[unsafe(no_mangle)]
pub extern "C" fn getp_last_error() -> *const c_char {
    guard::last_error()
}

/// What kind of failure the calling thread's last error is; GETP_OK if it has none, as getp_last_error says. Never
/// fails.
#[unsafe(no_mangle)]
pub extern "C" fn getp_last_status() -> Status {
    guard::last_status()
}

/// Writes the statistics of `transformer` to `*stats`, of which the program knows `size` bytes; the macro
/// `getp_stats(transformer, stats)` passes `sizeof *stats`. May be called while other calls use the transformer, or a
/// batch is open on it. Returns GETP_OK.
///
/// Fails for a NULL, a size that no version of the struct can have, or a transformer that is not warmed up: one line on
/// stderr and the last error, returns the failure, and `*stats` is unchanged.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn getp_stats_sized(transformer: *const Transformer, stats: *mut Stats, size: usize) -> Status {
    // SAFETY: the program passes a pointer to a struct of its own and its size.
    guard::coded(|| unsafe { write_stats(transformer, stats, size) })
}

/// Called by programs compiled with a header from before [`getp_stats_sized`], which know the struct's first fields.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn getp_stats(transformer: *const Transformer, stats: *mut Stats) -> Status {
    // SAFETY: as above.
    guard::coded(|| unsafe { write_stats(transformer, stats, OLDEST_BYTES) })
}

/// Size of the oldest version of the struct; programs compiled with 0.1.0's header know it up to `shared_tokens`.
const OLDEST_BYTES: usize = offset_of!(Stats, devices);

/// # Safety
///
/// `stats` is NULL, or points to `size` bytes that may be written to.
unsafe fn write_stats(transformer: *const Transformer, stats: *mut Stats, size: usize) -> Result<Status> {
    let older = [OLDEST_BYTES, offset_of!(Stats, shared_tokens)];
    sized::check_writable(stats, size, &older, "stats", "getp_stats")?;
    pointer::check(transformer, "transformer")?;
    let now = registry::totals(transformer)?.read();
    let now = Stats {
        tokens: now.tokens,
        prompt_tokens: now.prompt_tokens,
        steps: now.steps,
        seconds: now.seconds,
        packed_bytes: now.packed_bytes,
        kv_bytes: now.kv_bytes,
        devices: now.replicas,
        lost_devices: now.lost_replicas,
        shared_tokens: now.shared_tokens,
        recomputed_tokens: now.recomputed_tokens,
    };
    // SAFETY: checked above; our caller guarantees the bytes.
    unsafe { sized::write(stats, size, now) };
    Ok(GETP_OK)
}
