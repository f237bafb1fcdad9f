//! `getp_sampler`: how tokens are sampled, in the eval program's layout.

use super::model::Model;
use super::types::Sampler;
use super::{guard, pointer};
use std::cell::UnsafeCell;
use std::ptr::null_mut;

/// How tokens are sampled.
pub struct SamplerHandle {
    /// The program and calls on other threads may write to it.
    sampler: UnsafeCell<Sampler>,
}

/// Makes a sampler for `model`. `temperature` 0 is greedy decoding. `topp` within (0, 1) is top-p (nucleus) sampling;
/// with any other value all tokens can be sampled. `seed` is the random number generator's first state.
///
/// Fails for a NULL: one line on stderr and the last error, returns NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn getp_sampler_open(
    model: *const Model,
    temperature: f32,
    topp: f32,
    seed: u64,
) -> *mut SamplerHandle {
    guard::work(null_mut(), || {
        // SAFETY: the program passes what `getp_model_open` gave.
        let model = unsafe { pointer::borrow(model, "model") }?;
        let sampler = Sampler {
            vocab_size: model.vocab_size(),
            probindex: null_mut(),
            temperature,
            topp,
            rng_state: seed,
        };
        let sampler = UnsafeCell::new(sampler);
        Ok(Box::into_raw(Box::new(SamplerHandle { sampler })))
    })
}

/// The struct to pass to `inference`. It belongs to `sampler` and is valid until that is closed.
///
/// Fails for a NULL: one line on stderr and the last error, returns NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn getp_sampler_get(sampler: *mut SamplerHandle) -> *mut Sampler {
    guard::look(null_mut(), || {
        // SAFETY: the program passes what `getp_sampler_open` gave.
        let handle = unsafe { pointer::borrow(sampler, "sampler") }?;
        Ok(handle.sampler.get())
    })
}

/// Closes a sampler. Does nothing for NULL.
///
/// Fails only by a defect of the library: one line on stderr and the last error.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn getp_sampler_close(sampler: *mut SamplerHandle) {
    guard::look((), || {
        if !sampler.is_null() {
            // SAFETY: the program passes what `getp_sampler_open` gave, for the last time.
            drop(unsafe { Box::from_raw(sampler) });
        }
        Ok(())
    });
}
