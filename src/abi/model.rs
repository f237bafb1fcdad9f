//! `getp_model`: a model the library opens itself, for programs without the eval program's loader.

use super::options::Options;
use super::registry::{self, Opened};
use super::sized;
use super::status::{GETP_OK, Status};
use super::types::{Config, RunState, Transformer, TransformerWeights};
use super::{guard, lifecycle, pointer};
use crate::checkpoint::{self, Generation, config_to_bytes};
use crate::error::{Error, Result};
use crate::options::Choices;
use crate::report;
use std::ffi::{c_char, c_int};
use std::ptr::null_mut;

/// An open model.
pub struct Model {
    /// A separate allocation, because its address is the handle and because the program and calls on other threads may
    /// write to it.
    transformer: *mut Transformer,
    vocab_size: c_int,
    generation: Generation,
}

/// What a model's files say of its answers: how a request is answered whose fields are left at their defaults.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Defaults {
    /// The tokens that end an answer: `end_count` ids, which belong to the model.
    pub ends: *const c_int,
    /// How many.
    pub end_count: usize,
    /// The most tokens of an answer; 0: as many as there is room for.
    pub max_tokens: usize,
    /// 0 is greedy.
    pub temperature: f32,
    /// 1: all tokens can be sampled.
    pub topp: f32,
}

const _: () = assert!(size_of::<Defaults>() == 32);

/// Opens the model at `path`: a `.bin` file, or a directory with `config.json` and safetensors files. The files must
/// not change while the model is open. With `options` NULL all options come from the environment, or are defaults.
///
/// On failure: one line on stderr and the last error, returns NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn getp_model_open(path: *const c_char, options: *const Options) -> *mut Model {
    guard::work(null_mut(), || {
        // SAFETY: the program passes a C string.
        let path = unsafe { pointer::path(path, "path") }?;
        // SAFETY: the program passes NULL or its own struct.
        let choices = unsafe { choices(options) }?;
        let options = choices.or_env()?.complete()?;
        let source = Opened {
            checkpoint: checkpoint::open(path).map_err(Error::in_file)?,
            options,
        };
        Ok(Box::into_raw(Box::new(Model::new(source))))
    })
}

/// The struct to pass to `warm_up`, `inference` and `finish`. It belongs to `model` and is valid until that is closed.
/// Its weights and state are NULL until `warm_up`, which reads the file.
///
/// Fails for a NULL: one line on stderr and the last error, returns NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn getp_model_transformer(model: *mut Model) -> *mut Transformer {
    guard::look(null_mut(), || {
        // SAFETY: the program passes what `getp_model_open` gave.
        let model = unsafe { pointer::borrow(model, "model") }?;
        Ok(model.transformer())
    })
}

/// Writes to `*defaults`, of which the program knows `size` bytes, what the model's files say of its answers; the macro
/// `getp_model_defaults(model, defaults)` passes `sizeof *defaults`. In a directory that is `generation_config.json`,
/// whose `eos_token_id` may also stand in `config.json`. Without them, and of a .bin file: greedy, and the end tokens
/// 199999 and 200002. Returns GETP_OK.
///
/// Fails for a NULL or a size that no version of the struct can have: one line on stderr and the last error, returns
/// the failure, and `*defaults` is unchanged.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn getp_model_defaults_sized(
    model: *const Model,
    defaults: *mut Defaults,
    size: usize,
) -> Status {
    guard::look_coded(|| {
        // SAFETY: the program passes what `getp_model_open` gave.
        let Generation {
            ends,
            temperature,
            topp,
            max_tokens,
            ..
        } = &unsafe { pointer::borrow(model, "model") }?.generation;
        let now = Defaults {
            ends: ends.as_ptr().cast(),
            end_count: ends.len(),
            max_tokens: max_tokens.unwrap_or(0),
            temperature: *temperature,
            topp: *topp,
        };
        sized::check_writable(defaults, size, &[], "defaults", "getp_model_defaults")?;
        // SAFETY: just checked; the program passes a pointer to a struct of its own and its size.
        unsafe { sized::write(defaults, size, now) };
        Ok(GETP_OK)
    })
}

/// Closes a model, and finishes it first if it is warmed up. Does nothing for NULL. Using the model afterwards, or
/// closing it twice, is undefined behaviour.
///
/// Fails only by a defect of the library: one line on stderr and the last error.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn getp_model_close(model: *mut Model) {
    guard::look((), || {
        if !model.is_null() {
            // SAFETY: the program passes what `getp_model_open` gave, for the last time.
            drop(unsafe { Box::from_raw(model) });
        }
        Ok(())
    });
}

impl Model {
    fn new(source: Opened) -> Self {
        let config = Config::from_bytes(config_to_bytes(source.checkpoint.config()));
        let generation = source.checkpoint.generation();
        generation.ignored.iter().for_each(report::warning);
        let transformer = Box::into_raw(Box::new(blank(config)));
        registry::set_source(transformer, Some(source));
        Self {
            transformer,
            vocab_size: config.vocab_size,
            generation,
        }
    }

    /// The model's struct.
    pub fn transformer(&self) -> *mut Transformer {
        self.transformer
    }

    /// What its files say of answers.
    pub fn generation(&self) -> &Generation {
        &self.generation
    }

    /// Tokens in the model's vocabulary.
    pub fn vocab_size(&self) -> c_int {
        self.vocab_size
    }
}

impl Drop for Model {
    fn drop(&mut self) {
        // SAFETY: made by `new`, and nobody uses it any more. It cannot fail: the pointer is valid and the struct no
        // copy.
        let _ = unsafe { lifecycle::finish(self.transformer) };
        registry::set_source(self.transformer, None);
        // SAFETY: made by `new`, and nobody uses it any more.
        drop(unsafe { Box::from_raw(self.transformer) });
    }
}

/// # Safety
///
/// `options` is NULL or points to a struct of as many bytes as it says, whose strings are NULL or C strings.
unsafe fn choices(options: *const Options) -> Result<Choices> {
    if options.is_null() {
        return Ok(Choices::default());
    }
    // SAFETY: guaranteed by our caller.
    unsafe { Options::read(options)?.choices() }
}

/// A transformer without weights.
fn blank(config: Config) -> Transformer {
    const NO_FILE: c_int = -1;
    Transformer {
        config,
        weights: TransformerWeights::from_arrays([null_mut(); 16]),
        state: RunState::from_arrays([null_mut(); 21]),
        fd: NO_FILE,
        data: null_mut(),
        file_size: 0,
    }
}
