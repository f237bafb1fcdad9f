//! warm_up, inference and finish on the program's structs: checks the arguments, calls [`crate::engine`], and writes
//! the results back. The functions that open replicas are parameters, so that tests can pass their own.

use super::registry::{self, Batch, Opened, Original, Restored, Warm, WarmCell};
use super::types::{Requests, Sampler, Tokenizer, Transformer};
use super::vocabulary::Vocabulary;
use super::{guard, pointer};
use crate::backend::gpu::discover;
use crate::checkpoint::{Checkpoint, Field, PointerCheckpoint, config_from_bytes, explain_mapped};
use crate::engine::{Engine, Event, OpenReplicas, Outcome, Protocol, RankInputs, Reopen, Service};
use crate::error::{Error, Result};
use crate::memory::{self, Purpose};
use crate::options::{Options, VARIABLES, unknown_variables};
use crate::replica::{Pointers, Replica};
use crate::report;
use crate::request::Sampling;
use crate::requests::{self, Extent};
use crate::threads::{self, Thread};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// The functions that open replicas: the backends', or a test's.
pub struct Backends<'a> {
    /// Opens a replica on each device there is.
    pub open: OpenReplicas<'a>,
    /// Opens one replica after all others have failed.
    pub fallback: OpenFallback<'a>,
    /// Finds the other ranks.
    pub join: Join<'a>,
}

/// The way to the other ranks; `None` if there are none.
pub type Join<'a> = &'a (dyn Fn() -> Result<Option<Box<dyn Protocol>>> + Sync);

/// Opens one replica.
pub type OpenFallback<'a> = &'a (dyn Fn(&dyn Checkpoint, &Options) -> Result<Box<dyn Replica>> + Sync);

/// Warms a transformer up. Does nothing if it is warmed up already.
///
/// # Safety
///
/// Pointers that are not NULL point to what the structs' fields say; nobody else uses them during the call.
pub unsafe fn warm_up(transformer: *mut Transformer, tokenizer: *mut Tokenizer, backends: &Backends<'_>) -> Result<()> {
    pointer::check(transformer, "transformer")?;
    registry::with(transformer, |cell| {
        // SAFETY: guaranteed by our caller.
        let tokenizer = unsafe { pointer::borrow(tokenizer, "tokenizer") };
        let tokenizer = tokenizer.inspect_err(|why| {
            decline_to_warm_up(cell, backends, why);
            // SAFETY: checked above, and guaranteed by our caller.
            registry::note_failure(transformer, unsafe { &*transformer }, why);
        })?;
        // SAFETY: checked above, and guaranteed by our caller.
        unsafe { ensure_warm(cell, transformer, Some(tokenizer), backends) }.map(drop)
    })
}

/// Answers requests; gives the number of tokens stored. As soon as the request buffers are checked, each row is ended
/// with `-1`, so that rows are well formed even if something fails later. Fails if another call is writing to these
/// rows, and leaves them alone.
///
/// # Safety
///
/// Pointers that are not NULL point to what the structs' fields say, and nothing but other calls of these functions
/// uses them during the call. This includes the weights that the transformer was warmed up with: they are read again if
/// all devices fail.
pub unsafe fn inference(
    transformer: *mut Transformer,
    tokenizer: *mut Tokenizer,
    sampler: *mut Sampler,
    requests: *mut Requests,
    backends: &Backends<'_>,
) -> Result<i64> {
    let arguments = || {
        // SAFETY: guaranteed by our caller.
        let extent = unsafe { extent(requests) }?;
        let claim = registry::claim(extent.rows())?;
        // SAFETY: guaranteed by our caller; the claim keeps other calls away from the rows.
        let mut requests = unsafe { extent.view() };
        requests.clear_all();
        pointer::check(transformer, "transformer")?;
        // SAFETY: guaranteed by our caller.
        let tokenizer = unsafe { pointer::borrow(tokenizer, "tokenizer") }?;
        pointer::check(sampler, "sampler")?;
        Ok((claim, requests, tokenizer))
    };
    let (_claim, mut requests, tokenizer) = arguments().inspect_err(|why| decline(transformer, backends, why))?;
    registry::with(transformer, |cell| {
        let mut failed_before = None;
        if cell.is_none() {
            // SAFETY: checked above, and guaranteed by our caller.
            failed_before = registry::failed_before(transformer, unsafe { &*transformer });
            report::line(match failed_before {
                Some(_) => "warm_up has failed; warming up again",
                None => "inference came before warm_up; warming up now",
            });
        }
        // SAFETY: checked above, and guaranteed by our caller.
        let warm = unsafe { ensure_warm(cell, transformer, Some(tokenizer), backends) };
        let warm = warm.map_err(|why| match failed_before {
            Some(with) if with(&why) => Error::Again(why.into()),
            _ => why,
        })?;
        // SAFETY: guaranteed by our caller.
        unsafe { warm.inference(transformer, tokenizer, sampler, &mut requests, backends.fallback) }
    })
}

/// Tells the other ranks, if there are any, that this one cannot begin an inference.
fn decline(transformer: *const Transformer, backends: &Backends<'_>, why: &Error) {
    if pointer::check(transformer, "transformer").is_err() {
        return;
    }
    let told = registry::with(transformer, |cell| {
        match cell {
            Some(warm) => warm.engine.decline(why),
            // They warm up before it.
            cell => decline_to_warm_up(cell, backends, why),
        }
        Ok(())
    });
    // In a process that may not use the transformer the call fails anyway.
    drop(told);
}

/// The same of warming up, where there is no engine yet: with one it has nothing to do.
fn decline_to_warm_up(cell: &WarmCell, backends: &Backends<'_>, why: &Error) {
    if cell.is_none()
        && let Ok(Some(ranks)) = (backends.join)()
    {
        ranks.decline(why);
    }
}

/// Frees what `warm_up` allocated and restores the struct. Does nothing if it is not warmed up.
///
/// # Safety
///
/// `transformer` is NULL or points to a [`Transformer`] that nobody else uses during the call.
pub unsafe fn finish(transformer: *mut Transformer) -> Result<()> {
    pointer::check(transformer, "transformer")?;
    // SAFETY: checked above, and guaranteed by our caller.
    let inherited = unsafe { registry::finish_inherited(transformer) };
    registry::forget_failure(transformer);
    if inherited.is_some() {
        say_if_changed(inherited);
        return Ok(());
    }
    registry::end_batch(transformer);
    registry::with(transformer, |cell| {
        let Some(warm) = cell.take() else {
            // SAFETY: as above.
            return registry::check_no_copy(unsafe { &*transformer });
        };
        // SAFETY: as above. The struct is restored before the memory it points to is freed.
        say_if_changed(unsafe { registry::restore(transformer) });
        drop(warm);
        Ok(())
    })
}

/// Calls a program's function with an event of the service.
pub type OnEventOf = Box<dyn FnMut(&Service, Event) + Send>;

/// Warms a transformer up that `getp_model_open` made, if it is not, and opens a batch on it; gives what takes its
/// requests. With `on_event` a thread hands the events over.
///
/// # Safety
///
/// `transformer` points to a [`Transformer`] that nobody but calls of these functions uses until the batch is closed or
/// the transformer is finished.
pub unsafe fn open_batch(
    transformer: *mut Transformer,
    backends: &'static Backends<'static>,
    on_event: Option<OnEventOf>,
    drawable: Option<usize>,
) -> Result<Arc<Service>> {
    registry::with(transformer, |cell| {
        // SAFETY: guaranteed by our caller.
        let warm = unsafe { ensure_warm(cell, transformer, None, backends) }?;
        let Some(source) = warm.source.clone() else {
            return Err(Error::State("a batch needs a model of getp_model_open".into()));
        };
        warm.engine.draw_below(drawable);
        let service = Arc::new(warm.engine.service()?);
        let mut threads = memory::room(2, Purpose::Threads)?;
        let (at, served) = (transformer.addr(), service.clone());
        let reopen = move |options: &Options| (backends.fallback)(&*source.checkpoint, options);
        if let Some(mut on_event) = on_event {
            let told = service.clone();
            let hand_over = move || told.tell_all(|event| on_event(&told, event));
            threads.push(start_thread("getp events", hand_over)?);
        }
        let thread = start_thread("getp batch", move || serve(at, &served, &reopen));
        threads.push(thread.inspect_err(|_| service.close())?);
        let batch = Batch {
            service: service.clone(),
            threads,
        };
        // Dropping one that another has come before waits for its threads, which have not begun.
        registry::set_batch(transformer, batch).map_err(|batch| {
            registry::close(&batch.service);
            registry::another_is_open()
        })?;
        Ok(service)
    })
}

fn start_thread(name: &str, work: impl FnOnce() + Send + 'static) -> Result<Thread<()>> {
    let thread = threads::spawn(name, work);
    thread.map_err(|error| {
        Error::State(format!(
            "cannot start a thread for a batch: {error}; lower GETP_THREADS"
        ))
    })
}

/// Lets the engine of the transformer at an address serve a batch until it is closed.
fn serve(at: usize, service: &Service, reopen: Reopen<'_>) {
    let serve = || {
        registry::with_batch(at, service, |cell| match cell {
            Some(warm) => warm.engine.serve_all(service, reopen),
            None => Err(Error::State("the model has been finished".into())),
        })
    };
    let served = catch_unwind(AssertUnwindSafe(serve));
    let served = served.unwrap_or_else(|_| Err(Error::Internal("the thread of a batch has panicked".into())));
    if let Err(why) = served {
        report::error(format_args!("the batch ends: {why}"));
        service.fail(why);
    }
}

fn say_if_changed(restored: Option<Restored>) {
    if restored == Some(Restored::Changed) {
        report::warning("the transformer has been changed since it was warmed up; it is left as it is");
    }
}

/// Calls `look` with the engine of a transformer. Fails if it is not warmed up, or a batch is open on it.
pub fn with_engine<T>(transformer: *const Transformer, look: impl FnOnce(&Engine) -> T) -> Result<T> {
    pointer::check(transformer, "transformer")?;
    registry::with(transformer, |cell| match cell {
        Some(warm) => Ok(look(&warm.engine)),
        None => Err(Error::State(
            "the transformer is not warmed up; call warm_up first".into(),
        )),
    })
}

/// # Safety
///
/// Same requirements as [`warm_up`]; `transformer` is neither NULL nor misaligned, and `cell` is its cell.
unsafe fn ensure_warm<'a>(
    cell: &'a mut WarmCell,
    transformer: *mut Transformer,
    tokenizer: Option<&Tokenizer>,
    backends: &Backends<'_>,
) -> Result<&'a mut Warm> {
    // SAFETY: guaranteed by our caller.
    let current = unsafe { &*transformer };
    if cell.is_some() && !registry::is_installed(transformer, current) {
        report::warning("the transformer at this address is not the one warmed up there; dropping that one");
        *cell = None;
        registry::replaced(transformer);
    }
    let warm = match cell.take() {
        Some(warm) => warm,
        None => {
            // SAFETY: guaranteed by our caller.
            let warm = unsafe { warm_from(transformer, tokenizer, backends) };
            // A warm-up that fails leaves the struct as it was.
            warm.inspect_err(|why| registry::note_failure(transformer, current, why))?
        }
    };
    registry::forget_failure(transformer);
    Ok(cell.insert(warm))
}

/// # Safety
///
/// Same requirements as [`ensure_warm`].
unsafe fn warm_from(
    transformer: *mut Transformer,
    tokenizer: Option<&Tokenizer>,
    backends: &Backends<'_>,
) -> Result<Warm> {
    warn_of_unknown_variables();
    let source = registry::source(transformer);
    let begin = || {
        // SAFETY: guaranteed by our caller.
        registry::check_no_copy(unsafe { &*transformer })?;
        // SAFETY: guaranteed by our caller.
        let vocabulary = tokenizer.map(|tokenizer| unsafe { Vocabulary::read(tokenizer) });
        let vocabulary = vocabulary.transpose()?;
        let opened = match &source {
            Some(source) => source.clone(),
            None => Opened {
                options: Options::from_env()?,
                // SAFETY: guaranteed by our caller.
                checkpoint: Arc::new(unsafe { program_checkpoint(&*transformer) }?),
            },
        };
        Ok((vocabulary, opened))
    };
    let (vocabulary, engine) = start(begin(), backends)?;
    // SAFETY: guaranteed by our caller.
    unsafe { registry::install(transformer, first_pointers(&engine)?, engine.totals()) };
    Ok(Warm {
        engine,
        vocabulary,
        source,
    })
}

/// Warms up with the vocabulary, the weights and the options, or the reason why there are none.
fn start<V>(begun: Result<(V, Opened)>, backends: &Backends<'_>) -> Result<(V, Engine)> {
    if let Some(ranks) = (backends.join)()? {
        let (vocabulary, opened) = begun.inspect_err(|why| ranks.decline(why))?;
        let inputs = RankInputs {
            checkpoint: &*opened.checkpoint,
            devices: discover::addresses(&opened.options, opened.checkpoint.config()),
            options: opened.options.clone(),
        };
        let engine = ranks.warm_up(inputs, backends.open)?;
        return Ok((vocabulary, engine));
    }
    let (vocabulary, opened) = begun?;
    let engine = Engine::warm_up(&*opened.checkpoint, opened.options, backends.open)?;
    Ok((vocabulary, engine))
}

impl Warm {
    /// # Safety
    ///
    /// Same requirements as [`inference`]; `transformer` and `sampler` are neither NULL nor misaligned.
    unsafe fn inference(
        &mut self,
        transformer: *const Transformer,
        tokenizer: &Tokenizer,
        sampler: *mut Sampler,
        requests: &mut requests::Requests<'_>,
        fallback: OpenFallback<'_>,
    ) -> Result<i64> {
        let mut prepare = || {
            match &mut self.vocabulary {
                // SAFETY: guaranteed by our caller.
                Some(vocabulary) => unsafe { vocabulary.follow(tokenizer) }?,
                // SAFETY: guaranteed by our caller.
                none => *none = Some(unsafe { Vocabulary::read(tokenizer) }?),
            }
            // SAFETY: guaranteed by our caller.
            let sampling = unsafe { self.sampling(sampler) }?;
            let original = registry::original(transformer);
            let original =
                original.ok_or_else(|| Error::Internal("a transformer was warmed up without a trace".into()))?;
            Ok((sampling, original))
        };
        let prepared = prepare();
        let prepared = prepared.inspect_err(|why| self.engine.decline(why));
        let (mut sampling, original) = prepared?;
        let source = &self.source;
        // SAFETY: guaranteed by our caller.
        let reopen = |options: &Options| unsafe { reopen(source.as_ref(), &original, options, fallback) };
        let tokenizer = self.vocabulary.as_ref().map(Vocabulary::tokenizer);
        let tokenizer = tokenizer.ok_or_else(|| Error::Internal("an inference without a vocabulary".into()))?;
        // The program's own transformers and vocabularies have equally many tokens.
        let may_be_padded = source.is_some();
        self.engine.draw_below(may_be_padded.then(|| tokenizer.vocab_size()));
        let outcome = self.engine.inference(tokenizer, &mut sampling, requests, &reopen);
        // SAFETY: guaranteed by our caller.
        unsafe { rng_state(sampler) }.store(sampling.rng_state, Ordering::Relaxed);
        tokens(outcome?)
    }

    /// The sampling parameters of the program's sampler, whose `vocab_size` must be the model's.
    ///
    /// # Safety
    ///
    /// `sampler` points to a [`Sampler`] that nobody but other calls writes to.
    unsafe fn sampling(&self, sampler: *mut Sampler) -> Result<Sampling> {
        // SAFETY: guaranteed by our caller; other calls write to `rng_state` alone.
        let (vocab_size, temperature, topp) =
            unsafe { ((*sampler).vocab_size, (*sampler).temperature, (*sampler).topp) };
        let models = self.engine.config().vocab_size;
        if usize::try_from(vocab_size) != Ok(models) {
            let why = format!("vocab_size is {vocab_size} where the model has {models}");
            return Err(Error::format("Sampler", why));
        }
        // SAFETY: guaranteed by our caller.
        let rng_state = unsafe { rng_state(sampler) }.load(Ordering::Relaxed);
        let (sampling, replaced) = Sampling::as_main_would(temperature, topp, rng_state)?;
        if self.engine.speaks() {
            replaced.iter().for_each(report::warning);
        }
        Ok(sampling)
    }
}

/// The sampler's random state. Two concurrent calls on different transformers may share a sampler; afterwards it holds
/// the state that one of them left.
///
/// # Safety
///
/// `sampler` points to a [`Sampler`] for `'a`, whose random state nobody but calls of `inference` uses.
unsafe fn rng_state<'a>(sampler: *mut Sampler) -> &'a AtomicU64 {
    // SAFETY: guaranteed by our caller.
    unsafe { AtomicU64::from_ptr(&raw mut (*sampler).rng_state) }
}

/// The addresses and sizes of the program's request buffers, checked.
///
/// # Safety
///
/// Same requirements as [`inference`].
unsafe fn extent(requests: *const Requests) -> Result<Extent> {
    pointer::check(requests, "requests")?;
    // SAFETY: guaranteed by our caller.
    let r = unsafe { requests.read() };
    Extent::check(
        r.num_reqs,
        r.max_token_len,
        r.max_seq_len,
        r.str_reqs.cast(),
        r.tok_gens,
    )
}

/// The float32 weights that the program's struct points to.
///
/// # Safety
///
/// The weights' pointers that are not NULL point to what their fields say, unchanged as long as the result lives.
unsafe fn program_checkpoint(transformer: &Transformer) -> Result<PointerCheckpoint> {
    // SAFETY: guaranteed by our caller.
    let checkpoint = unsafe { program_arrays(transformer) };
    checkpoint.map_err(|error| explain_mapped(transformer.fd, transformer.data.cast_const().cast(), error))
}

/// # Safety
///
/// Same requirements as [`program_checkpoint`].
unsafe fn program_arrays(transformer: &Transformer) -> Result<PointerCheckpoint> {
    let config = config_from_bytes(&transformer.config.to_bytes())?;
    let arrays = transformer.weights.arrays();
    // SAFETY: guaranteed by our caller.
    let mut checkpoint = unsafe { PointerCheckpoint::new(config, arrays) }?;
    // The program maps its file and points into the mapping. Reading behind the file's end would be SIGBUS.
    let (start, bytes) = (
        transformer.data.cast_const().cast::<u8>(),
        transformer.file_size.max(0) as u64,
    );
    let embedding = arrays[Field::TokenEmbeddingTable as usize].addr();
    let is_mapped = !start.is_null()
        && embedding
            .checked_sub(start.addr())
            .is_some_and(|at| (at as u64) < bytes);
    if is_mapped {
        checkpoint.check_range(start, bytes)?;
        checkpoint.watch(transformer.fd, start, bytes)?;
    }
    Ok(checkpoint)
}

/// Packs the weights that the transformer was warmed up with again, for a replica that `fallback` opens.
///
/// # Safety
///
/// Same requirements as [`inference`]; `original` is a [`Transformer`].
unsafe fn reopen(
    source: Option<&Opened>,
    original: &Original,
    options: &Options,
    fallback: OpenFallback<'_>,
) -> Result<Box<dyn Replica>> {
    if let Some(source) = source {
        return fallback(&*source.checkpoint, options);
    }
    // SAFETY: guaranteed by our caller; the bytes need not be aligned.
    let transformer = unsafe { original.as_ptr().cast::<Transformer>().read_unaligned() };
    // SAFETY: guaranteed by our caller.
    fallback(&unsafe { program_checkpoint(&transformer) }?, options)
}

/// The addresses of the first replica's buffers, for the program's struct.
fn first_pointers(engine: &Engine) -> Result<Pointers> {
    let first = engine.replicas().next().map(|replica| replica.pointers());
    let first = first.or_else(|| engine.ranks().map(|ranks| Pointers::all_at(ranks.address())));
    first.ok_or_else(|| Error::Internal("an engine was warmed up without a replica".into()))
}

fn tokens(outcome: Outcome) -> Result<i64> {
    match outcome.failure {
        Some(failure) if outcome.tokens == 0 => return Err(failure),
        Some(failure) => guard::record(&failure),
        None => {}
    }
    Ok(outcome.tokens.cast_signed())
}

/// Warns of `GETP_*` variables that the library does not know, which are most likely misspelt. It reads the environment
/// that the process was started with, not later changes.
pub fn warn_of_unknown_variables() {
    let unknown = unknown_variables(&std::fs::read("/proc/self/environ").unwrap_or_default());
    if !unknown.is_empty() {
        let (unknown, known) = (unknown.join(", "), VARIABLES.join(", "));
        report::warning(format_args!(
            "{unknown}: not known and not used; the environment may set {known}"
        ));
    }
}
