//! warm_up, inference and finish on the program's structs: checks, then [`crate::engine`], then what the program
//! gets to see. Generic over where the replica comes from, so that tests bring their own.

use super::registry::{self, Slot, Source};
use super::types::{Requests, RunState, Sampler, Tokenizer, Transformer, TransformerWeights};
use super::vocabulary::Vocabulary;
use super::{guard, pointer};
use crate::checkpoint::{Checkpoint, Field, PointerCheckpoint, config_from_bytes};
use crate::engine::{Engine, OpenReplicas, Outcome, Sampling};
use crate::error::{Error, Result};
use crate::options::{Options, VARIABLES, unknown_variables};
use crate::replica::{Pointers, Replica};
use crate::report;
use crate::requests;
use std::mem::MaybeUninit;

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
    original: Original,
    installed: Installed,
}

/// The program's struct as it was, padding included.
type Original = [MaybeUninit<u8>; size_of::<Transformer>()];

/// The program's struct as it is while warmed up.
struct Installed(Transformer);

// SAFETY: its addresses are only compared with others, never followed.
unsafe impl Send for Installed {}

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
        unsafe { slot.ensure_warm(transformer, tokenizer, backends.open) }.map(drop)
    })
}

/// Answers requests; gives the number of tokens stored. Every row is well formed from the first moment at which the
/// buffers are known to be usable.
///
/// # Safety
///
/// Pointers that are not NULL point to what the structs' fields say; nobody else uses them during the call. The same
/// goes for the weights the transformer was warmed up with, which are read again if all devices fail.
pub unsafe fn inference(
    transformer: *mut Transformer,
    tokenizer: *mut Tokenizer,
    sampler: *mut Sampler,
    requests: *mut Requests,
    backends: &Backends<'_>,
) -> Result<i64> {
    // SAFETY: as our caller vouches.
    let mut requests = unsafe { view(requests) }?;
    requests.clear_all();
    pointer::check(transformer, "transformer")?;
    // SAFETY: as our caller vouches.
    let tokenizer = unsafe { pointer::borrow(tokenizer, "tokenizer") }?;
    // SAFETY: as our caller vouches.
    let sampler = unsafe { pointer::borrow_mut(sampler, "sampler") }?;
    registry::with(transformer, |slot| {
        if slot.warm.is_none() {
            report::line("inference came before warm_up; warming up now");
        }
        // SAFETY: checked above, and as our caller vouches.
        let warm = unsafe { slot.ensure_warm(transformer, tokenizer, backends.open) }?;
        // SAFETY: as our caller vouches.
        unsafe { warm.inference(tokenizer, sampler, &mut requests, backends.fallback) }
    })
}

/// Gives back everything `warm_up` made and the struct as it was. Does nothing if it is not warmed up.
///
/// # Safety
///
/// `transformer` is NULL or points to a [`Transformer`] that nobody else uses during the call.
pub unsafe fn finish(transformer: *mut Transformer) -> Result<()> {
    pointer::check(transformer, "transformer")?;
    registry::with(transformer, |slot| {
        if let Some(warm) = slot.warm.take() {
            // SAFETY: checked above, and as our caller vouches.
            unsafe { warm.restore(transformer) };
        }
    });
    Ok(())
}

/// Looks at the engine of a transformer that is warmed up.
pub fn with_engine<T>(transformer: *const Transformer, look: impl FnOnce(&Engine) -> T) -> Result<T> {
    pointer::check(transformer, "transformer")?;
    let looked = registry::with(transformer, |slot| slot.warm.as_ref().map(|warm| look(&warm.engine)));
    looked.ok_or_else(|| Error::State("the transformer is not warmed up; call warm_up first".into()))
}

impl Slot {
    /// # Safety
    ///
    /// As [`warm_up`]; `transformer` is neither NULL nor misaligned.
    unsafe fn ensure_warm(
        &mut self,
        transformer: *mut Transformer,
        tokenizer: &Tokenizer,
        open: OpenReplicas<'_>,
    ) -> Result<&mut Warm> {
        // SAFETY: as our caller vouches.
        let current = unsafe { &*transformer };
        if self.warm.as_ref().is_some_and(|warm| !warm.is_of(current)) {
            report::line("the transformer at this address is not the one warmed up there; dropping that one");
            self.warm = None;
        }
        let warm = match self.warm.take() {
            Some(warm) => warm,
            // SAFETY: as our caller vouches.
            None => unsafe { self.make_warm(transformer, tokenizer, open) }?,
        };
        Ok(self.warm.insert(warm))
    }

    /// # Safety
    ///
    /// As [`Slot::ensure_warm`].
    unsafe fn make_warm(
        &self,
        transformer: *mut Transformer,
        tokenizer: &Tokenizer,
        open: OpenReplicas<'_>,
    ) -> Result<Warm> {
        warn_of_unknown_variables();
        // SAFETY: as our caller vouches.
        let vocabulary = unsafe { Vocabulary::read(tokenizer) }?;
        let engine = match &self.source {
            Some(source) => Engine::warm_up(&*source.checkpoint, source.options.clone(), open),
            None => {
                let options = Options::from_env()?;
                // SAFETY: as our caller vouches.
                let checkpoint = unsafe { program_checkpoint(&*transformer) }?;
                Engine::warm_up(&checkpoint, options, open)
            }
        }?;
        // SAFETY: as our caller vouches.
        let (original, installed) = unsafe { install(transformer, first_pointers(&engine)?) };
        Ok(Warm {
            engine,
            vocabulary,
            source: self.source.clone(),
            original,
            installed,
        })
    }
}

impl Warm {
    /// # Safety
    ///
    /// As [`inference`].
    unsafe fn inference(
        &mut self,
        tokenizer: &Tokenizer,
        sampler: &mut Sampler,
        requests: &mut requests::Requests<'_>,
        fallback: OpenFallback<'_>,
    ) -> Result<i64> {
        if !self.vocabulary.is_of(tokenizer) {
            // SAFETY: as our caller vouches.
            self.vocabulary = unsafe { Vocabulary::read(tokenizer) }?;
        }
        self.check_sampler(sampler)?;
        let mut sampling = Sampling {
            temperature: sampler.temperature,
            topp: sampler.topp,
            rng_state: sampler.rng_state,
        };
        let (source, original) = (&self.source, &self.original);
        // SAFETY: as our caller vouches.
        let reopen = |options: &Options| unsafe { reopen(source.as_ref(), original, options, fallback) };
        let outcome = self
            .engine
            .inference(self.vocabulary.tokenizer(), &mut sampling, requests, &reopen);
        sampler.rng_state = sampling.rng_state;
        tokens(outcome?)
    }

    /// The program would draw from as many logits as its sampler says, so that another number is a mix-up.
    fn check_sampler(&self, sampler: &Sampler) -> Result<()> {
        let vocab_size = self.engine.config().vocab_size;
        if usize::try_from(sampler.vocab_size) == Ok(vocab_size) {
            return Ok(());
        }
        let why = format!("vocab_size is {} where the model has {vocab_size}", sampler.vocab_size);
        Err(Error::format("Sampler", why))
    }

    /// Whether `current` is the struct warming up has left.
    fn is_of(&self, current: &Transformer) -> bool {
        current.config == self.installed.0.config && current.weights == self.installed.0.weights
    }

    /// Puts the struct back as it was.
    ///
    /// # Safety
    ///
    /// `transformer` points to a [`Transformer`] nobody else uses.
    unsafe fn restore(self, transformer: *mut Transformer) {
        // SAFETY: as our caller vouches.
        if !self.is_of(unsafe { &*transformer }) {
            report::line("the transformer has been changed since it was warmed up; it is left as it is");
            return;
        }
        // SAFETY: both have the struct's size; ours does not overlap the program's.
        unsafe { transformer.cast::<Original>().write(self.original) };
    }
}

/// A view of the program's request buffers.
///
/// # Safety
///
/// As [`inference`].
unsafe fn view<'a>(requests: *mut Requests) -> Result<requests::Requests<'a>> {
    // SAFETY: as our caller vouches.
    let r = unsafe { pointer::borrow(requests, "requests") }?;
    // SAFETY: as our caller vouches.
    unsafe {
        requests::Requests::from_raw(
            r.num_reqs,
            r.max_token_len,
            r.max_seq_len,
            r.str_reqs.cast(),
            r.tok_gens,
        )
    }
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
    let checkpoint = unsafe { PointerCheckpoint::new(config, arrays) }?;
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

/// Puts the replica's addresses into the program's struct; gives it as it was and as it is now.
///
/// # Safety
///
/// `transformer` points to a [`Transformer`] nobody else uses.
unsafe fn install(transformer: *mut Transformer, pointers: Pointers) -> (Original, Installed) {
    // SAFETY: the bytes of a struct may be read as bytes that need not be initialized.
    let original = unsafe { transformer.cast::<Original>().read() };
    // SAFETY: as our caller vouches.
    let current = unsafe { &mut *transformer };
    current.weights = TransformerWeights::from_arrays(pointers.weights);
    current.state = RunState::from_arrays(pointers.state);
    (original, Installed(*current))
}

fn tokens(outcome: Outcome) -> Result<i64> {
    match outcome.failure {
        Some(failure) if outcome.tokens == 0 => return Err(failure),
        Some(failure) => guard::record(&failure),
        None => {}
    }
    Ok(outcome.tokens.cast_signed())
}

fn warn_of_unknown_variables() {
    let unknown = unknown_variables(std::env::vars_os().map(|(name, _)| name));
    if !unknown.is_empty() {
        let (unknown, known) = (unknown.join(", "), VARIABLES.join(", "));
        report::line(format_args!(
            "{unknown}: not known and not used; the environment may set {known}"
        ));
    }
}
