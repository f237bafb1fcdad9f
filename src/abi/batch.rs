//! `getp_batch`: requests of token ids that arrive while others run, and their events.

use super::event::{CEvent, Owned};
use super::lifecycle::{self, OnEventOf};
use super::model::Model;
use super::options::is_on;
use super::registry;
use super::sampler::{GETP_STATE_OF_SEED_0, check};
use super::sized::{self, SizedStruct};
use super::status::{GETP_CLOSED, GETP_OK, GETP_TIMED_OUT, Status};
use super::tokenizer::TokenizerHandle;
use super::{driver, guard, pointer};
use crate::batch::MOST_TOP;
use crate::checkpoint::Generation;
use crate::engine::{Ask, Service};
use crate::error::{Error, Result};
use crate::memory::{self, Purpose};
use crate::process::Process;
use crate::request::{EndTokens, LogProbs, Sampling};
use std::ffi::{c_int, c_void};
use std::mem::{offset_of, size_of};
use std::ptr::{null, null_mut};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Requests on their way through a model.
pub struct Batch {
    service: Arc<Service>,
    /// The process that opened it.
    process: Process,
    vocab_size: c_int,
    /// What the model's files say of answers.
    generation: Generation,
    /// What ends an answer by default.
    ends: Arc<EndTokens>,
    has_callback: bool,
}

/// How to open a batch. Call `getp_batch_options_init` before setting fields.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct BatchOptions {
    /// sizeof(getp_batch_options) as the program knows it, set by `getp_batch_options_init`.
    pub size: usize,
    /// Called with each event, on one thread of the library. It may call any function, must not throw, and has the
    /// event until it returns. With NULL, the default, `getp_batch_next` gives the events.
    pub on_event: Option<unsafe extern "C" fn(context: *mut c_void, event: *const CEvent)>,
    /// Passed to `on_event`.
    pub context: *mut c_void,
    /// If it is not NULL, ids that the model has and this vocabulary does not, with which the model's is padded, are
    /// never sampled. With NULL, the default, all may be. Log-probabilities are over all of the model's ids in any
    /// case, and prompts may have them. It is read while the batch is opened alone.
    pub tokenizer: *const TokenizerHandle,
}

/// What is asked of a model. Call `getp_request_init` before setting fields; all that is pointed to is read during
/// `getp_batch_submit` alone.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Request {
    /// sizeof(getp_request) as the program knows it, set by `getp_request_init`.
    pub size: usize,
    /// The prompt: `prompt_length` ids, each within the model's vocabulary. An empty one is refused by an event.
    pub prompt: *const c_int,
    /// Tokens of the prompt.
    pub prompt_length: usize,
    /// The most tokens of the answer, the one that ends it included; 0, the default: as many as the model's context (of
    /// a .bin file, its seq_len) and the KV cache have room for, and at least one, but no more than
    /// `getp_defaults.max_tokens`. A .bin file's seq_len is no limit for other numbers.
    pub max_tokens: usize,
    /// Before the answer has so many tokens, no token ends it: end and stop tokens are tokens like others till then.
    pub min_tokens: usize,
    /// 0 is greedy decoding. Finite and not negative, or GETP_OF_MODEL, the default: that of `getp_defaults`.
    pub temperature: f32,
    /// Within (0, 1): top-p (nucleus) sampling; with any other number all tokens can be sampled. GETP_OF_MODEL, the
    /// default: that of `getp_defaults`.
    pub topp: f32,
    /// The first state of the request's random number generator, GETP_STATE_OF_SEED_0 for 0, the default: the request
    /// draws what request 0 of `inference` draws from a sampler with that seed.
    pub seed: u64,
    /// Tokens that end the answer beside the model's end tokens, those of `getp_defaults`: `stop_length` ids.
    pub stop: *const c_int,
    /// How many.
    pub stop_length: usize,
    /// GETP_ON: the model's end tokens end no answer.
    pub ignore_end: c_int,
    /// The fewest tokens of an event that does not end the request. 0, the default: the only event is the last one,
    /// with the whole answer; 1: each token is an event, unless several have come before the program takes it.
    pub tokens_per_event: c_int,
    /// Given back with each event.
    pub tag: u64,
    /// GETP_ON: events have the log-probability of each token of the answer.
    pub logprobs: c_int,
    /// GETP_ON: events have the log-probability of each token of the prompt but the first.
    pub prompt_logprobs: c_int,
    /// How many of the most probable tokens events have for each of those: 0, the default, to GETP_MOST_TOP_LOGPROBS.
    pub top_logprobs: c_int,
    /// 0: a later version may use it.
    pub reserved: c_int,
}

/// `getp_request.temperature` and `topp`: what the model's files say.
pub const GETP_OF_MODEL: f32 = -1.0;

/// The most that `getp_request.top_logprobs` may be.
pub const GETP_MOST_TOP_LOGPROBS: c_int = 20;

const _: () = {
    assert!(GETP_MOST_TOP_LOGPROBS as usize == MOST_TOP);
    assert!(size_of::<BatchOptions>() == 32 && size_of::<Request>() == 104);
    assert!(offset_of!(Request, temperature) == 40 && offset_of!(Request, tag) == 80);
};

// SAFETY: it begins with `size`. A function pointer of any bits is valid as long as nobody calls it.
unsafe impl SizedStruct for BatchOptions {
    const NAME: &'static str = "getp_batch_options";
    const SIZE: &'static str = "getp_batch_options.size";
    const SIZES: &'static [usize] = &[24, size_of::<Self>()];
    const RESERVED: &'static [usize] = &[];

    fn with_size(size: usize) -> Self {
        Self {
            size,
            on_event: None,
            context: null_mut(),
            tokenizer: null(),
        }
    }
}

// SAFETY: it begins with `size`, and its fields are numbers and pointers.
unsafe impl SizedStruct for Request {
    const NAME: &'static str = "getp_request";
    const SIZE: &'static str = "getp_request.size";
    const SIZES: &'static [usize] = &[size_of::<Self>()];
    const RESERVED: &'static [usize] = &[offset_of!(Request, reserved)];

    fn with_size(size: usize) -> Self {
        Self {
            size,
            prompt: null(),
            prompt_length: 0,
            max_tokens: 0,
            min_tokens: 0,
            temperature: GETP_OF_MODEL,
            topp: GETP_OF_MODEL,
            seed: 0,
            stop: null(),
            stop_length: 0,
            ignore_end: 0,
            tokens_per_event: 0,
            tag: 0,
            logprobs: 0,
            prompt_logprobs: 0,
            top_logprobs: 0,
            reserved: 0,
        }
    }
}

/// Sets `options->size` to `size` and all other fields to their defaults; the macro `getp_batch_options_init(options)`
/// passes `sizeof *options`.
///
/// Fails for a NULL or a size that no version of the struct can have: one line on stderr and the last error, returns
/// the failure.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn getp_batch_options_init_sized(options: *mut BatchOptions, size: usize) -> Status {
    guard::look_coded(|| {
        // SAFETY: the program passes a pointer to a struct of its own and its size.
        unsafe { sized::init(options, size, "options") }?;
        Ok(GETP_OK)
    })
}

/// Sets `request->size` to `size` and all other fields to their defaults; the macro `getp_request_init(request)` passes
/// `sizeof *request`.
///
/// Fails for a NULL or a size that no version of the struct can have: one line on stderr and the last error, returns
/// the failure.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn getp_request_init_sized(request: *mut Request, size: usize) -> Status {
    guard::look_coded(|| {
        // SAFETY: the program passes a pointer to a struct of its own and its size.
        unsafe { sized::init(request, size, "request") }?;
        Ok(GETP_OK)
    })
}

/// Opens a batch on `model`, and warms the model up if it is not. From here to `getp_batch_close` its requests run on a
/// thread of the library, and `inference` refuses the model's transformer; `finish` and `getp_model_close` close the
/// batch. `options` may be NULL.
///
/// On failure: one line on stderr and the last error, returns NULL. It fails if the model has an open batch, and where
/// several processes share the requests (MPI).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn getp_batch_open(model: *mut Model, options: *const BatchOptions) -> *mut Batch {
    guard::work(null_mut(), || {
        // SAFETY: the program passes what `getp_model_open` gave.
        let model = unsafe { pointer::borrow(model, "model") }?;
        let options = match options.is_null() {
            true => BatchOptions::with_size(size_of::<BatchOptions>()),
            // SAFETY: the program passes its own struct.
            false => unsafe { sized::read(options, "options") }?,
        };
        let drawable = match options.tokenizer.is_null() {
            true => None,
            // SAFETY: the program passes what `getp_tokenizer_open` gave.
            false => Some(drawable(
                unsafe { pointer::borrow(options.tokenizer, "options") }?,
                model,
            )?),
        };
        let context = Context(options.context);
        let has_callback = options.on_event.is_some();
        let on_event = options.on_event.map(|on_event| -> OnEventOf {
            Box::new(move |service, event| {
                let (event, context) = (Owned::new(event, service.opened), &context);
                // SAFETY: the program passes a function for this struct, and what it is to be given.
                unsafe { on_event(context.0, event.told()) };
            })
        });
        // SAFETY: the transformer is the model's, and nobody else writes to it.
        let service = unsafe { lifecycle::open_batch(model.transformer(), &driver::BACKENDS, on_event, drawable) }?;
        Ok(Box::into_raw(Box::new(Batch {
            service,
            process: Process::this(),
            vocab_size: model.vocab_size(),
            generation: model.generation().clone(),
            ends: Arc::new(EndTokens::new(&model.generation().ends)),
            has_callback,
        })))
    })
}

/// Queues a request. If `id` is not NULL, `*id` becomes its number within the batch, from 0 on. May be called from any
/// thread, also from `on_event`. It does not wait for other requests. Events may come before it has returned: `tag`
/// tells whose they are.
///
/// Requests start in the order in which they are submitted, each as soon as the KV cache has room for it, by its
/// prompt's length and its `max_tokens`, beside those that run. So one that may become long holds up those behind it;
/// who serves strangers gives each a `max_tokens`. Prompts are computed one after the other, beside the answers'
/// tokens.
///
/// A request that the model's devices have no room for is not a failure: its only event says so.
///
/// Fails for a NULL, a bad field, a closed model, or a lack of memory: one line on stderr and the last error, returns
/// the failure.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn getp_batch_submit(batch: *mut Batch, request: *const Request, id: *mut u64) -> Status {
    guard::coded(|| {
        // SAFETY: the program passes what `getp_batch_open` gave.
        let batch = unsafe { Batch::borrow(batch) }?;
        // SAFETY: the program passes its own struct.
        let request = unsafe { sized::read(request, "request") }?;
        if !id.is_null() {
            pointer::check(id, "id")?;
        }
        // SAFETY: what the struct points to is as long as it says.
        let number = batch.service.submit(unsafe { batch.ask(&request) }?)?;
        if !id.is_null() {
            // SAFETY: checked above; the program passes a pointer to a variable of its own.
            unsafe { id.write(number as u64) };
        }
        Ok(GETP_OK)
    })
}

/// Gives the next event: `*event` is the program's until it passes it to `getp_event_free`. Waits for one up to
/// `seconds`, for ever if that is negative, and not at all if it is 0; returns GETP_TIMED_OUT, and `*event` is NULL,
/// if there is none by then, and GETP_CLOSED if the model has been closed, which leaves the batch to be closed.
/// Several threads may wait. A thread that is to end needs a time-out: nothing else wakes it, and the batch may be
/// closed only when nobody waits.
///
/// Fails for a NULL, `seconds` that are NaN, and a batch with an `on_event`: one line on stderr and the last error,
/// returns the failure.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn getp_batch_next(batch: *mut Batch, seconds: f64, event: *mut *const CEvent) -> Status {
    guard::coded(|| {
        pointer::check(event, "event")?;
        // SAFETY: checked above; the program passes a pointer to a variable of its own.
        unsafe { event.write(null()) };
        // SAFETY: the program passes what `getp_batch_open` gave.
        let batch = unsafe { Batch::borrow(batch) }?;
        if batch.has_callback {
            return Err(Error::State("the batch hands its events to on_event".into()));
        }
        let deadline = deadline(seconds)?;
        let Some(next) = batch.service.next(deadline) else {
            return Ok(match batch.service.is_closed() {
                true => GETP_CLOSED,
                false => GETP_TIMED_OUT,
            });
        };
        // SAFETY: as above.
        unsafe { event.write(CEvent::into_raw(next, batch.service.opened)) };
        Ok(GETP_OK)
    })
}

/// Cancels a request: its last event comes at once, with tokens that have come and without those of steps that are
/// under way. Does nothing to one that has ended.
///
/// Fails for a NULL, for an `id` that the batch has not given, and for a lack of memory, when the request goes on:
/// one line on stderr and the last error, returns the failure.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn getp_batch_cancel(batch: *mut Batch, id: u64) -> Status {
    guard::coded(|| {
        // SAFETY: the program passes what `getp_batch_open` gave.
        let batch = unsafe { Batch::borrow(batch) }?;
        batch.service.cancel(usize::try_from(id).unwrap_or(usize::MAX))?;
        Ok(GETP_OK)
    })
}

/// Cancels all requests that have not ended.
///
/// Fails for a NULL or a lack of memory: one line on stderr and the last error, returns the failure.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn getp_batch_cancel_all(batch: *mut Batch) -> Status {
    guard::coded(|| {
        // SAFETY: the program passes what `getp_batch_open` gave.
        let batch = unsafe { Batch::borrow(batch) }?;
        batch.service.cancel_all()?;
        Ok(GETP_OK)
    })
}

/// The most tokens that the answer to a prompt of `prompt_length` tokens may have, by the KV cache and the model's
/// context, which a .bin file does not have; 0 if such a prompt has no room.
///
/// Fails for a NULL: one line on stderr and the last error, returns 0.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn getp_batch_most_tokens(batch: *const Batch, prompt_length: usize) -> usize {
    guard::look(0, || {
        // SAFETY: the program passes what `getp_batch_open` gave.
        let batch = unsafe { Batch::borrow(batch) }?;
        Ok(match batch.service.most_positions(prompt_length) {
            0 => 0,
            most => most + 1 - prompt_length,
        })
    })
}

/// Requests whose last event the program has not been given.
///
/// Fails for a NULL: one line on stderr and the last error, returns 0.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn getp_batch_unfinished(batch: *const Batch) -> usize {
    guard::look(0, || {
        // SAFETY: the program passes what `getp_batch_open` gave.
        let batch = unsafe { Batch::borrow(batch) }?;
        Ok(batch.service.untaken())
    })
}

/// Closes a batch and drops what has not ended. It waits for no request: the step under way ends later, and whoever
/// uses the model next waits for that. Unless `on_event` calls this, it waits for a call of `on_event` that runs; there
/// is none afterwards. Does nothing for NULL. The model stays warmed up.
///
/// `on_event` may still run for an event that was taken before, so what it uses must live on: whoever uses the model
/// next, or closes it, on another thread, waits for its return. No other call may use the batch meanwhile or
/// afterwards.
///
/// Fails only by a defect of the library: one line on stderr and the last error.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn getp_batch_close(batch: *mut Batch) {
    guard::look((), || {
        if batch.is_null() {
            return Ok(());
        }
        // SAFETY: the program passes what `getp_batch_open` gave, for the last time.
        let batch = unsafe { Box::from_raw(batch) };
        if batch.process == Process::this() {
            registry::close(&batch.service);
        } else {
            // Threads that do not exist here may hold its locks.
            std::mem::forget(batch.service);
        }
        Ok(())
    });
}

/// What the program's function is given, on another thread than the one that passed it.
struct Context(*mut c_void);

// SAFETY: the library does nothing with it; the program has said that it is for the function that it passed with it.
unsafe impl Send for Context {}

impl Batch {
    /// # Safety
    ///
    /// `batch` is NULL or what `getp_batch_open` gave, and is not closed during `'a`.
    unsafe fn borrow<'a>(batch: *const Self) -> Result<&'a Self> {
        // SAFETY: guaranteed by our caller.
        let batch = unsafe { pointer::borrow(batch, "batch") }?;
        if batch.process == Process::this() {
            return Ok(batch);
        }
        Err(Error::State(
            "the batch was opened before fork, by another process; here open a model, then a batch".into(),
        ))
    }

    /// Checks a request and copies what it points to.
    ///
    /// # Safety
    ///
    /// `request` points to as many ids as it says.
    unsafe fn ask(&self, request: &Request) -> Result<Ask> {
        let of_model = |given: f32, default| if given == GETP_OF_MODEL { default } else { given };
        let temperature = of_model(request.temperature, self.generation.temperature);
        let topp = of_model(request.topp, self.generation.topp);
        check(temperature, topp)?;
        // SAFETY: guaranteed by our caller.
        let prompt = unsafe { self.tokens(request.prompt, request.prompt_length, "prompt") }?;
        // SAFETY: guaranteed by our caller.
        let stops = unsafe { self.tokens(request.stop, request.stop_length, "stop") }?;
        let ends: &[u32] = match is_on("getp_request.ignore_end", request.ignore_end)? {
            false => &self.generation.ends,
            true => &[],
        };
        let has_defaults = stops.is_empty() && !ends.is_empty();
        let per_event = usize::try_from(request.tokens_per_event).map_err(|_| {
            let why = format!("it is {}; use 0 or more", request.tokens_per_event);
            Error::format("getp_request.tokens_per_event", why)
        })?;
        let asked = (request.max_tokens > 0).then_some(request.max_tokens);
        let max_positions = self.service.positions(prompt.len(), asked, self.generation.max_tokens);
        Ok(Ask {
            max_positions,
            prompt,
            grammar: None,
            min_tokens: request.min_tokens,
            logprobs: LogProbs {
                answer: is_on("getp_request.logprobs", request.logprobs)?,
                prompt: is_on("getp_request.prompt_logprobs", request.prompt_logprobs)?,
                top: top(request.top_logprobs)?,
            },
            sampling: Sampling {
                temperature,
                topp,
                rng_state: if request.seed == 0 {
                    GETP_STATE_OF_SEED_0
                } else {
                    request.seed
                },
            },
            ends: match has_defaults {
                true => self.ends.clone(),
                false => Arc::new(EndTokens::with_stops(ends, stops)),
            },
            tag: request.tag,
            tokens_per_event: per_event,
        })
    }

    /// Copies token ids.
    ///
    /// # Safety
    ///
    /// `ids` is NULL or points to `length` ids.
    unsafe fn tokens(&self, ids: *const c_int, length: usize, what: &'static str) -> Result<Vec<u32>> {
        // SAFETY: guaranteed by our caller.
        let ids = unsafe { pointer::slice(ids, length, what) }?;
        if let Some(at) = ids.iter().position(|&id| id < 0 || id >= self.vocab_size) {
            let why = format!(
                "its token {at} is {}; the model's are from 0 to {}",
                ids[at],
                self.vocab_size - 1
            );
            return Err(Error::format(what, why));
        }
        memory::collect(ids.iter().map(|id| id.cast_unsigned()), Purpose::Requests)
    }
}

/// The ids that a vocabulary has of the model's.
fn drawable(tokenizer: &TokenizerHandle, model: &Model) -> Result<usize> {
    let tokens = tokenizer.text().vocabulary().vocab_size();
    let models = model.vocab_size();
    if c_int::try_from(tokens).is_ok_and(|tokens| tokens <= models) {
        return Ok(tokens);
    }
    let why = format!("it has {tokens} tokens, and the model {models}; use the model's own");
    Err(Error::format("getp_batch_options.tokenizer", why))
}

/// A number of most probable tokens.
fn top(number: c_int) -> Result<usize> {
    let top = usize::try_from(number).ok().filter(|&top| top <= MOST_TOP);
    top.ok_or_else(|| Error::Option {
        name: "getp_request.top_logprobs",
        value: number.to_string(),
        known: format!("a number from 0 to {MOST_TOP}"),
    })
}

/// The time in so many seconds; `None` for never.
fn deadline(seconds: f64) -> Result<Option<Instant>> {
    if seconds.is_nan() {
        return Err(Error::format(
            "seconds",
            "they are NaN; use a number, a negative one to wait for ever",
        ));
    }
    let wait = Duration::try_from_secs_f64(seconds).ok();
    Ok(wait.and_then(|wait| Instant::now().checked_add(wait)))
}
