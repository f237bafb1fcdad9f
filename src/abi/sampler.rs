//! `getp_sampler`: how tokens are sampled, in the eval program's layout.

use super::model::Model;
use super::types::Sampler;
use super::{guard, pointer};
use crate::error::{Error, Result};
use crate::sampler::has_nucleus;
use std::cell::UnsafeCell;
use std::ptr::null_mut;

/// How tokens are sampled.
pub struct SamplerHandle {
    /// The program and calls on other threads may write to it.
    sampler: UnsafeCell<Sampler>,
}

/// The generator's first state for the seed 0: with a state of 0 it would give the number 0 again and again.
pub const GETP_STATE_OF_SEED_0: u64 = 0x9E37_79B9_7F4A_7C15;

/// Makes a sampler for `model`.
///
/// `temperature` 0 is greedy decoding. It must be finite and not negative. Where it is so small that a row's largest
/// logit divided by it is infinite, that row is greedy, too. `topp` within (0, 1) is top-p (nucleus) sampling; with any
/// other number all tokens can be sampled. At a temperature of 0 it is not looked at.
///
/// `seed` is the first state of request 0's random number generator, GETP_STATE_OF_SEED_0 for the seed 0. The states of
/// the other requests are derived from it.
///
/// Fails for a NULL, a temperature that is negative, infinite or NaN, or a `topp` that is NaN: one line on stderr and
/// the last error, returns NULL.
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
        check(temperature, topp)?;
        let sampler = Sampler {
            vocab_size: model.vocab_size(),
            probindex: null_mut(),
            temperature,
            // `inference` takes a number out of range for the evaluation program's, whose `main` would replace it.
            topp: if has_nucleus(topp) { topp } else { 1.0 },
            rng_state: if seed == 0 { GETP_STATE_OF_SEED_0 } else { seed },
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

/// Refuses numbers that say nothing about how to sample.
pub fn check(temperature: f32, topp: f32) -> Result<()> {
    if !temperature.is_finite() || temperature < 0.0 {
        let why = format!("it is {temperature}; use 0, which is greedy, or a finite number above it");
        return Err(Error::format("temperature", why));
    }
    if temperature != 0.0 && topp.is_nan() {
        return Err(Error::format(
            "topp",
            "it is NaN; use a number, 1 to sample from all tokens",
        ));
    }
    Ok(())
}
