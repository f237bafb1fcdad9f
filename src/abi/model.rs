//! `getp_model`: a model the library opens itself, for programs without the eval program's loader.

use super::options::Options;
use super::registry::{self, Opened};
use super::types::{Config, RunState, Transformer, TransformerWeights};
use super::{guard, lifecycle, pointer};
use crate::checkpoint::{BinCheckpoint, Checkpoint, SafetensorsCheckpoint, config_to_bytes};
use crate::error::{Error, Result};
use crate::options::Choices;
use std::ffi::{c_char, c_int};
use std::path::Path;
use std::ptr::null_mut;
use std::sync::Arc;

/// An open model.
pub struct Model {
    /// A separate allocation, because its address is the handle and because the program and calls on other threads may
    /// write to it.
    transformer: *mut Transformer,
    vocab_size: c_int,
}

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
            checkpoint: open(path).map_err(Error::in_file)?,
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
        let transformer = Box::into_raw(Box::new(blank(config)));
        registry::set_source(transformer, Some(source));
        Self {
            transformer,
            vocab_size: config.vocab_size,
        }
    }

    /// The model's struct.
    pub fn transformer(&self) -> *mut Transformer {
        self.transformer
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

fn open(path: &Path) -> Result<Arc<dyn Checkpoint>> {
    if path.is_dir() {
        return Ok(Arc::new(SafetensorsCheckpoint::open(path)?));
    }
    Ok(Arc::new(BinCheckpoint::open(path)?))
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
