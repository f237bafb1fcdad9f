//! The three functions, under their C and their C++ names.

use super::types::{Requests, Sampler, Tokenizer, Transformer};
use super::{guard, lifecycle};
use crate::backend;
use crate::engine::Protocol;
use crate::error::Result;
use lifecycle::Backends;
use std::ffi::c_longlong;

/// The library's own backends.
pub const BACKENDS: Backends<'_> = Backends {
    open: &backend::open,
    fallback: &backend::cpu::open,
    join: &join,
};

/// Finds the processes that mpirun or srun has started with this one.
#[cfg(feature = "mpi")]
fn join() -> Result<Option<Box<dyn Protocol>>> {
    Ok(crate::cluster::mpi::join()?.map(|mpi| Box::new(mpi) as _))
}

/// Without MPI there is no way to others.
#[cfg(not(feature = "mpi"))]
fn join() -> Result<Option<Box<dyn Protocol>>> {
    Ok(None)
}

/// Packs the transformer's weights for the devices and allocates their KV caches. Options are those given to
/// getp_model_open; for a struct of the program's own they are the GETP_* environment variables. Does nothing if the
/// transformer is warmed up already. From here to `finish` the library owns `weights` and `state`.
///
/// On failure: one line on stderr and the last error; the struct is unchanged, and `inference` warms up again.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warm_up(transformer: *mut Transformer, tokenizer: *mut Tokenizer) {
    // SAFETY: the program passes its own structs, and leaves them alone during the call.
    guard::work((), || unsafe { lifecycle::warm_up(transformer, tokenizer, &BACKENDS) });
}

/// Writes each request's answer to its row of `tok_gens` and returns the number of tokens stored. Warms up first if
/// that has not been done. Prints each request's text on stdout, as GETP_PRINT says.
///
/// Request 0 draws from the sampler's `rng_state`, which becomes the state after its last token. Every other request
/// draws from a state of its own, derived from that one, so that its answer depends neither on the requests before it
/// nor on the batch. In the evaluation program one state goes through all requests in turn: of sampled answers only
/// request 0's is the same.
///
/// On failure: one line on stderr and the last error. Rows without an answer hold only -1. The return value is the
/// number of tokens in the other rows, or -1 if there are none. The call fails, and leaves the rows alone, if another
/// call is writing to them, or if a field of `requests` cannot be what it should be.
///
/// A request that cannot be answered does not fail the call: it gets a row of only -1 and a line on stderr. This holds
/// for an empty prompt, a prompt that takes up all of `max_seq_len`, one longer than the context of a model opened from
/// a directory, and for more positions than the KV cache can hold.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn inference(
    transformer: *mut Transformer,
    tokenizer: *mut Tokenizer,
    sampler: *mut Sampler,
    requests: *mut Requests,
) -> c_longlong {
    guard::work(-1, || {
        // SAFETY: the program passes its own structs, and leaves them alone during the call.
        unsafe { lifecycle::inference(transformer, tokenizer, sampler, requests, &BACKENDS) }
    })
}

/// Frees what `warm_up` allocated and restores `weights` and `state`. Does nothing if the transformer is not warmed up.
/// `tokenizer` is not used.
///
/// Fails only for a bad pointer or a copy of the struct: one line on stderr and the last error.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn finish(transformer: *mut Transformer, tokenizer: *mut Tokenizer) {
    let _ = tokenizer; // the program's signature has it
    // SAFETY: the program passes its own struct, and leaves it alone during the call.
    guard::work((), || unsafe { lifecycle::finish(transformer) });
}

/// [`warm_up`] under the mangled name that a C++ declaration without `extern "C"` refers to.
#[unsafe(export_name = "_Z7warm_upP11TransformerP9Tokenizer")]
pub unsafe extern "C" fn warm_up_cpp(transformer: *mut Transformer, tokenizer: *mut Tokenizer) {
    // SAFETY: the same contract.
    unsafe { warm_up(transformer, tokenizer) }
}

/// [`inference`] under the mangled name that a C++ declaration without `extern "C"` refers to.
#[unsafe(export_name = "_Z9inferenceP11TransformerP9TokenizerP7SamplerP8Requests")]
pub unsafe extern "C" fn inference_cpp(
    transformer: *mut Transformer,
    tokenizer: *mut Tokenizer,
    sampler: *mut Sampler,
    requests: *mut Requests,
) -> c_longlong {
    // SAFETY: the same contract.
    unsafe { inference(transformer, tokenizer, sampler, requests) }
}

/// [`finish`] under the mangled name that a C++ declaration without `extern "C"` refers to.
#[unsafe(export_name = "_Z6finishP11TransformerP9Tokenizer")]
pub unsafe extern "C" fn finish_cpp(transformer: *mut Transformer, tokenizer: *mut Tokenizer) {
    // SAFETY: the same contract.
    unsafe { finish(transformer, tokenizer) }
}
