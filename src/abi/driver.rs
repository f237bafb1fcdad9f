//! The three functions, under their C and their C++ names.

use super::types::{Requests, Sampler, Tokenizer, Transformer};
use super::{guard, lifecycle};
use crate::backend;
use lifecycle::Backends;
use std::ffi::c_longlong;

const BACKENDS: Backends<'_> = Backends {
    open: &backend::open,
    fallback: &backend::cpu::open,
};

/// Packs the transformer's weights and makes room to run it, as the environment's GETP_* variables say or the options
/// it was opened with. Does nothing if it is warmed up already. While it is, `weights` and `state` belong to the
/// library.
///
/// On failure: one line on stderr and the last error, and the struct is as it was. `inference` then tries again.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warm_up(transformer: *mut Transformer, tokenizer: *mut Tokenizer) {
    // SAFETY: the program passes its own structs, and leaves them alone during the call.
    guard::work((), || unsafe { lifecycle::warm_up(transformer, tokenizer, &BACKENDS) });
}

/// Answers every request into its own row, warming up first if need be, and returns the number of tokens stored.
/// Prints each request's text on stdout, as GETP_PRINT says. The sampler's random state becomes what request 0 left.
///
/// On failure: one line on stderr and the last error. Rows not answered hold -1 alone, and the tokens of those
/// answered count; if nothing could be done, -1 is returned. A request that cannot be answered by itself (empty, or
/// longer than the steps or than a directory says its model is) gets -1 alone and a line, and is no failure. Rows that
/// another call is writing to are left to it: the call fails.
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

/// Gives everything back and the struct as it was. Does nothing if the transformer is not warmed up. The tokenizer is
/// not looked at.
///
/// On failure, which only a bad pointer or a copy of the struct is: one line on stderr and the last error.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn finish(transformer: *mut Transformer, tokenizer: *mut Tokenizer) {
    let _ = tokenizer; // the program's signature has it
    // SAFETY: the program passes its own struct, and leaves it alone during the call.
    guard::work((), || unsafe { lifecycle::finish(transformer) });
}

/// [`warm_up`] under the name a C++ program without `extern "C"` looks for; fails as it does.
#[unsafe(export_name = "_Z7warm_upP11TransformerP9Tokenizer")]
pub unsafe extern "C" fn warm_up_cpp(transformer: *mut Transformer, tokenizer: *mut Tokenizer) {
    // SAFETY: the same contract.
    unsafe { warm_up(transformer, tokenizer) }
}

/// [`inference`] under the name a C++ program without `extern "C"` looks for; fails as it does.
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

/// [`finish`] under the name a C++ program without `extern "C"` looks for; fails as it does.
#[unsafe(export_name = "_Z6finishP11TransformerP9Tokenizer")]
pub unsafe extern "C" fn finish_cpp(transformer: *mut Transformer, tokenizer: *mut Tokenizer) {
    // SAFETY: the same contract.
    unsafe { finish(transformer, tokenizer) }
}
