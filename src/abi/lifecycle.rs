//! warm_up, inference and finish on the program's structs: checks, then [`crate::engine`], then what the program
//! gets to see. Generic over where the replica comes from, so that tests bring their own.

use super::registry::{self, Original, Restored, Slot, Source};
use super::types::{Requests, Sampler, Tokenizer, Transformer};
use super::vocabulary::Vocabulary;
use super::{guard, pointer};
use crate::checkpoint::{Checkpoint, Field, PointerCheckpoint, config_from_bytes};
use crate::engine::{Engine, OpenReplicas, Outcome, Sampling};
use crate::error::{Error, Result};
use crate::options::{Options, VARIABLES, unknown_variables};
use crate::replica::{Pointers, Replica};
use crate::report;
use crate::requests::{self, Extent};
use std::sync::atomic::{AtomicU64, Ordering};

/// Where replicas come from: the backends, or a test's own.
pub struct Backends<'a> {
    /// Opens a replica on each device there is.
    pub open: OpenReplicas<'a>,
    /// Opens the replica that stands in when all of these have failed.
    pub fallback: OpenFallback<'a>,
}

/// Opens one replica.
pub type OpenFallback<'a> = &'a (dyn Fn(&dyn Checkpoint, &Options) -> Result<Box<dyn Replica>> + Sync);

/// A transformer that is warmed up.
pub struct Warm {
    engine: Engine,
    vocabulary: Vocabulary,
    /// Where the weights come from, if not from the program's struct.
    source: Option<Source>,
}

/// Warms a transformer up. Does nothing if it is.
///
/// # Safety
///
/// Pointers that are not NULL point to what the structs' fields say; nobody else uses them during the call.
pub unsafe fn warm_up(transformer: *mut Transformer, tokenizer: *mut Tokenizer, backends: &Backends<'_>) -> Result<()> {
    pointer::check(transformer, "transformer")?;
    // SAFETY: as our caller vouches.
    let tokenizer = unsafe { pointer::borrow(tokenizer, "tokenizer") }?;
    registry::with(transformer, |slot| {
        // SAFETY: checked above, and as our caller vouches.
        unsafe { ensure_warm(slot, transformer, tokenizer, backends.open) }.map(drop)
    })
}

/// Answers requests; gives the number of tokens stored. Every row is well formed from the first moment at which the
/// buffers are known to be usable. Rows that another call is writing to are refused and left alone.
///
/// # Safety
///
/// Pointers that are not NULL point to what the structs' fields say; nobody else uses them during the call, but other
/// calls of these functions. The same goes for the weights the transformer was warmed up with, which are read again if
/// all devices fail.
pub unsafe fn inference(
    transformer: *mut Transformer,
    tokenizer: *mut Tokenizer,
    sampler: *mut Sampler,
    requests: *mut Requests,
    backends: &Backends<'_>,
) -> Result<i64> {
    // SAFETY: as our caller vouches.
    let extent = unsafe { extent(requests) }?;
    let _claim = registry::claim(extent.rows())?;
    // SAFETY: as our caller vouches; other calls are kept away from the rows.
    let mut requests = unsafe { extent.view() };
    requests.clear_all();
    pointer::check(transformer, "transformer")?;
    // SAFETY: as our caller vouches.
    let tokenizer = unsafe { pointer::borrow(tokenizer, "tokenizer") }?;
    pointer::check(sampler, "sampler")?;
    registry::with(transformer, |slot| {
        if slot.is_none() {
            report::line("inference came before warm_up; warming up now");
        }
        // SAFETY: checked above, and as our caller vouches.
        let warm = unsafe { ensure_warm(slot, transformer, tokenizer, backends.open) }?;
        // SAFETY: as our caller vouches.
        unsafe { warm.inference(transformer, tokenizer, sampler, &mut requests, backends.fallback) }
    })
}

/// Gives back everything `warm_up` made and the struct as it was. Does nothing if it is not warmed up.
///
/// # Safety
///
/// `transformer` is NULL or points to a [`Transformer`] that nobody else uses during the call.
pub unsafe fn finish(transformer: *mut Transformer) -> Result<()> {
    pointer::check(transformer, "transformer")?;
    // SAFETY: checked above, and as our caller vouches.
    let inherited = unsafe { registry::finish_inherited(transformer) };
    if inherited.is_some() {
        say_if_changed(inherited);
        return Ok(());
    }
    registry::with(transformer, |slot| {
        let Some(warm) = slot.take() else {
            // SAFETY: as above.
            return registry::check_no_copy(unsafe { &*transformer });
        };
        // SAFETY: as above. The struct is put back before what it points to goes.
        say_if_changed(unsafe { registry::restore(transformer) });
        drop(warm);
        Ok(())
    })
}

fn say_if_changed(restored: Option<Restored>) {
    if restored == Some(Restored::Changed) {
        report::line("the transformer has been changed since it was warmed up; it is left as it is");
    }
}

/// Looks at the engine of a transformer that is warmed up.
pub fn with_engine<T>(transformer: *const Transformer, look: impl FnOnce(&Engine) -> T) -> Result<T> {
    pointer::check(transformer, "transformer")?;
    registry::with(transformer, |slot| match slot {
        Some(warm) => Ok(look(&warm.engine)),
        None => Err(Error::State(
            "the transformer is not warmed up; call warm_up first".into(),
        )),
    })
}

/// # Safety
///
/// As [`warm_up`]; `transformer` is neither NULL nor misaligned, and the slot its own.
unsafe fn ensure_warm<'a>(
    slot: &'a mut Slot,
    transformer: *mut Transformer,
    tokenizer: &Tokenizer,
    open: OpenReplicas<'_>,
) -> Result<&'a mut Warm> {
    // SAFETY: as our caller vouches.
    let current = unsafe { &*transformer };
    if slot.is_some() && !registry::is_installed(transformer, current) {
        report::line("the transformer at this address is not the one warmed up there; dropping that one");
        *slot = None;
        registry::replaced(transformer);
    }
    let warm = match slot.take() {
        Some(warm) => warm,
        // SAFETY: as our caller vouches.
        None => unsafe { warm_from(transformer, tokenizer, open) }?,
    };
    Ok(slot.insert(warm))
}

/// # Safety
///
/// As [`ensure_warm`].
unsafe fn warm_from(transformer: *mut Transformer, tokenizer: &Tokenizer, open: OpenReplicas<'_>) -> Result<Warm> {
    warn_of_unknown_variables();
    // SAFETY: as our caller vouches.
    registry::check_no_copy(unsafe { &*transformer })?;
    // SAFETY: as our caller vouches.
    let vocabulary = unsafe { Vocabulary::read(tokenizer) }?;
    let source = registry::source(transformer);
    let engine = match &source {
        Some(source) => Engine::warm_up(&*source.checkpoint, source.options.clone(), open),
        None => {
            let options = Options::from_env()?;
            // SAFETY: as our caller vouches.
            let checkpoint = unsafe { program_checkpoint(&*transformer) }?;
            Engine::warm_up(&checkpoint, options, open)
        }
    }?;
    // SAFETY: as our caller vouches.
    unsafe { registry::install(transformer, first_pointers(&engine)?) };
    Ok(Warm {
        engine,
        vocabulary,
        source,
    })
}

impl Warm {
    /// # Safety
    ///
    /// As [`inference`]; `transformer` and `sampler` are neither NULL nor misaligned.
    unsafe fn inference(
        &mut self,
        transformer: *const Transformer,
        tokenizer: &Tokenizer,
        sampler: *mut Sampler,
        requests: &mut requests::Requests<'_>,
        fallback: OpenFallback<'_>,
    ) -> Result<i64> {
        // SAFETY: as our caller vouches.
        unsafe { self.vocabulary.follow(tokenizer) }?;
        // SAFETY: as our caller vouches.
        let mut sampling = unsafe { self.sampling(sampler) }?;
        let original = registry::original(transformer);
        let original = original.ok_or_else(|| Error::Internal("a transformer was warmed up without a trace".into()))?;
        let source = &self.source;
        // SAFETY: as our caller vouches.
        let reopen = |options: &Options| unsafe { reopen(source.as_ref(), &original, options, fallback) };
        let outcome = self
            .engine
            .inference(self.vocabulary.tokenizer(), &mut sampling, requests, &reopen);
        // SAFETY: as our caller vouches.
        unsafe { rng_state(sampler) }.store(sampling.rng_state, Ordering::Relaxed);
        tokens(outcome?)
    }

    /// What the program's sampler says, which must be this model's: the program would draw from as many logits as it
    /// says.
    ///
    /// # Safety
    ///
    /// `sampler` points to a [`Sampler`] that nobody but other calls writes to.
    unsafe fn sampling(&self, sampler: *mut Sampler) -> Result<Sampling> {
        // SAFETY: as our caller vouches; other calls write to `rng_state` alone.
        let (vocab_size, temperature, topp) =
            unsafe { ((*sampler).vocab_size, (*sampler).temperature, (*sampler).topp) };
        let models = self.engine.config().vocab_size;
        if usize::try_from(vocab_size) != Ok(models) {
            let why = format!("vocab_size is {vocab_size} where the model has {models}");
            return Err(Error::format("Sampler", why));
        }
        Ok(Sampling {
            temperature,
            topp,
            // SAFETY: as our caller vouches.
            rng_state: unsafe { rng_state(sampler) }.load(Ordering::Relaxed),
        })
    }
}

/// The sampler's random state. Two calls on different transformers may share a sampler: what it then holds is either's.
///
/// # Safety
///
/// `sampler` points to a [`Sampler`] for `'a`, whose random state nobody but calls of `inference` uses.
unsafe fn rng_state<'a>(sampler: *mut Sampler) -> &'a AtomicU64 {
    // SAFETY: as our caller vouches.
    unsafe { AtomicU64::from_ptr(&raw mut (*sampler).rng_state) }
}

/// Where the program's request buffers lie.
///
/// # Safety
///
/// As [`inference`].
unsafe fn extent(requests: *const Requests) -> Result<Extent> {
    pointer::check(requests, "requests")?;
    // SAFETY: as our caller vouches.
    let r = unsafe { requests.read() };
    Extent::check(
        r.num_reqs,
        r.max_token_len,
        r.max_seq_len,
        r.str_reqs.cast(),
        r.tok_gens,
    )
}

/// The weights behind the program's struct.
///
/// # Safety
///
/// The weights' pointers that are not NULL point to what their fields say, unchanged as long as the result lives.
unsafe fn program_checkpoint(transformer: &Transformer) -> Result<PointerCheckpoint> {
    let config = config_from_bytes(&transformer.config.to_bytes())?;
    let arrays = transformer.weights.arrays();
    // SAFETY: as our caller vouches.
    let mut checkpoint = unsafe { PointerCheckpoint::new(config, arrays) }?;
    // The program maps its file and points into it: what lies beyond the end would be a bus error, not an error.
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

/// Opens a replica from the same weights as before.
///
/// # Safety
///
/// As [`inference`]; `original` is a [`Transformer`].
unsafe fn reopen(
    source: Option<&Source>,
    original: &Original,
    options: &Options,
    fallback: OpenFallback<'_>,
) -> Result<Box<dyn Replica>> {
    if let Some(source) = source {
        return fallback(&*source.checkpoint, options);
    }
    // SAFETY: as our caller vouches; the bytes need not be aligned.
    let transformer = unsafe { original.as_ptr().cast::<Transformer>().read_unaligned() };
    // SAFETY: as our caller vouches.
    fallback(&unsafe { program_checkpoint(&transformer) }?, options)
}

/// The addresses the program gets to see: those of the first replica.
fn first_pointers(engine: &Engine) -> Result<Pointers> {
    let first = engine.replicas().next();
    first
        .map(|replica| replica.pointers())
        .ok_or_else(|| Error::Internal("an engine was warmed up without a replica".into()))
}

fn tokens(outcome: Outcome) -> Result<i64> {
    match outcome.failure {
        Some(failure) if outcome.tokens == 0 => return Err(failure),
        Some(failure) => guard::record(&failure),
        None => {}
    }
    Ok(outcome.tokens.cast_signed())
}

/// In the environment that the process was started with, which is where a slip of the keyboard is.
fn warn_of_unknown_variables() {
    let unknown = unknown_variables(&std::fs::read("/proc/self/environ").unwrap_or_default());
    if !unknown.is_empty() {
        let (unknown, known) = (unknown.join(", "), VARIABLES.join(", "));
        report::line(format_args!(
            "{unknown}: not known and not used; the environment may set {known}"
        ));
    }
}
