//! The one global: what is known of each `Transformer`, by its address, which rows calls are writing to, and which
//! files are open as inputs.
//!
//! A process that was forked inherits it, but none of the threads and devices behind it, nor does it know who held
//! which slot then. So the lock on all of it is held over `fork`, and what another process has made is given up by its
//! name and not touched.

use super::lifecycle::Warm;
use super::types::{RunState, Transformer, TransformerWeights};
use crate::checkpoint::Checkpoint;
use crate::error::{Error, Result};
use crate::options::Options;
use crate::replica::Pointers;
use crate::{sampler, simd};
use std::cell::UnsafeCell;
use std::collections::BTreeMap;
use std::mem::{self, MaybeUninit};
use std::ops::Range;
use std::process;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// What warming up made of a transformer, until it is finished.
pub type Slot = Option<Warm>;

/// What `getp_model_open` was given.
#[derive(Clone)]
pub struct Source {
    /// The weights.
    pub checkpoint: Arc<dyn Checkpoint>,
    /// The choices.
    pub options: Options,
}

/// The program's struct as it was, padding included.
pub type Original = [MaybeUninit<u8>; size_of::<Transformer>()];

/// The struct of a transformer that is warmed up: as it was, and as it is.
struct Installed {
    original: Original,
    now: Transformer,
}

/// What is known of one `Transformer`.
struct Known {
    /// Who knows it.
    process: u32,
    /// Held while a call uses the transformer.
    slot: Arc<Mutex<Slot>>,
    /// Where its weights come from, if the library itself opened it; the program's own hold theirs.
    source: Option<Source>,
    /// There while it is warmed up.
    warm: Option<Installed>,
}

/// Addresses of a replica's weights.
type Addresses = [usize; 16];

/// How many finished transformers are remembered.
const FINISHED: usize = 64;

struct Registry {
    known: BTreeMap<usize, Known>,
    /// What the transformers finished last were given, from the oldest at `next` on.
    finished: [Addresses; FINISHED],
    next: usize,
    /// Addresses of rows that calls are writing to, and the calls' process.
    writing: Vec<(u32, Range<usize>)>,
}

// SAFETY: the addresses in the structs are only compared with others, never followed.
unsafe impl Send for Installed {}

static REGISTRY: Mutex<Registry> = Mutex::new(Registry {
    known: BTreeMap::new(),
    finished: [[0; 16]; FINISHED],
    next: 0,
    writing: Vec::new(),
});

/// Does `work` with a transformer's slot. Others may use theirs meanwhile; who wants the same one waits. Fails if
/// another process has warmed it up.
pub fn with<T>(transformer: *const Transformer, work: impl FnOnce(&mut Slot) -> Result<T>) -> Result<T> {
    let slot = registry().slot(transformer.addr())?;
    let forget = Forget { transformer, slot };
    // Declared behind `forget`, so that the slot is free again when that looks at it.
    let mut slot = lock(&forget.slot);
    work(&mut slot)
}

/// Drops what is known of a transformer that nobody needs any more, also when the work panicked.
struct Forget {
    transformer: *const Transformer,
    slot: Arc<Mutex<Slot>>,
}

impl Drop for Forget {
    fn drop(&mut self) {
        registry().forget(self.transformer.addr(), &self.slot);
    }
}

/// Where a transformer's weights come from, if the library opened it.
pub fn source(transformer: *const Transformer) -> Option<Source> {
    let registry = registry();
    registry.known.get(&transformer.addr())?.source.clone()
}

/// Notes where a transformer's weights come from; `None` when the model is closed.
pub fn set_source(transformer: *const Transformer, source: Option<Source>) {
    let mut registry = registry();
    let known = registry.known.entry(transformer.addr()).or_insert_with(Known::new);
    let before = mem::replace(&mut known.source, source);
    let slot = known.slot.clone();
    registry.forget(transformer.addr(), &slot);
    drop(registry);
    drop(before); // which may take a while
}

/// Puts a replica's addresses into the program's struct, whose slot the caller holds.
///
/// # Safety
///
/// `transformer` points to a [`Transformer`] nobody else uses.
pub unsafe fn install(transformer: *mut Transformer, pointers: Pointers) {
    let mut registry = registry();
    let known = registry.known.entry(transformer.addr()).or_insert_with(Known::new);
    // SAFETY: as our caller vouches; the bytes of a struct may be read as bytes that need not be initialized.
    known.warm = Some(unsafe {
        let original = transformer.cast::<Original>().read();
        (&raw mut (*transformer).weights).write(TransformerWeights::from_arrays(pointers.weights));
        (&raw mut (*transformer).state).write(RunState::from_arrays(pointers.state));
        let now = transformer.read();
        Installed { original, now }
    });
}

/// What became of a struct that was warmed up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Restored {
    /// It is as it was before.
    Restored,
    /// The program has changed it meanwhile: it is left alone.
    Changed,
}

/// Puts the struct back as it was; `None` if it was not warmed up.
///
/// # Safety
///
/// `transformer` points to a [`Transformer`] nobody else uses.
pub unsafe fn restore(transformer: *mut Transformer) -> Option<Restored> {
    // SAFETY: as our caller vouches.
    unsafe { registry().restore(transformer) }
}

/// Forgets what was put into a struct that the program has replaced by another one.
pub fn replaced(transformer: *const Transformer) {
    registry().take_warm(transformer.addr());
}

/// Finishes what the process has inherited that this one was forked from: the struct is put back, the engine's memory
/// stays. `None` if the transformer is not inherited, or was not warmed up.
///
/// # Safety
///
/// As [`restore`].
pub unsafe fn finish_inherited(transformer: *mut Transformer) -> Option<Restored> {
    let mut registry = registry();
    let known = registry.known.get_mut(&transformer.addr())?;
    if known.process == process::id() {
        return None;
    }
    known.leave_behind();
    let slot = known.slot.clone();
    // SAFETY: as our caller vouches.
    let restored = unsafe { registry.restore(transformer) };
    registry.forget(transformer.addr(), &slot);
    restored
}

/// Whether a struct is as warming up has left it.
pub fn is_installed(transformer: *const Transformer, current: &Transformer) -> bool {
    let registry = registry();
    let known = registry.known.get(&transformer.addr());
    known
        .and_then(|known| known.warm.as_ref())
        .is_some_and(|warm| warm.is(current))
}

/// The program's struct as it was before it was warmed up.
pub fn original(transformer: *const Transformer) -> Option<Original> {
    let registry = registry();
    let warm = registry.known.get(&transformer.addr())?.warm.as_ref()?;
    Some(warm.original)
}

/// Refuses a struct that holds what was put into another one: it is a copy, and these addresses are no weights.
pub fn check_no_copy(current: &Transformer) -> Result<()> {
    let weights = addresses(&current.weights);
    if weights == Addresses::default() {
        return Ok(());
    }
    let registry = registry();
    let is_warm = |known: &Known| {
        let warm = known.warm.as_ref();
        warm.is_some_and(|warm| addresses(&warm.now.weights) == weights)
    };
    let why = match registry.known.iter().find(|(_, known)| is_warm(known)) {
        Some((at, _)) => format!("the one warmed up at {at:#x}; pass that one"),
        None if registry.finished.contains(&weights) => "one that has been finished; pass that one".into(),
        None => return Ok(()),
    };
    Err(Error::State(format!("the transformer is a copy of {why}")))
}

/// Rows that one call is writing to.
pub struct Claim(Range<usize>);

/// Keeps other calls away from rows at these addresses until the claim is dropped.
pub fn claim(rows: Range<usize>) -> Result<Claim> {
    let mut registry = registry();
    let process = process::id();
    registry.writing.retain(|(other, _)| *other == process);
    let overlaps = |other: &Range<usize>| other.start < rows.end && rows.start < other.end;
    if registry.writing.iter().any(|(_, other)| overlaps(other)) {
        let why = "another call is answering these requests; wait for it, or pass others";
        return Err(Error::State(why.into()));
    }
    if !rows.is_empty() {
        registry.writing.push((process, rows.clone()));
    }
    Ok(Claim(rows))
}

impl Drop for Claim {
    fn drop(&mut self) {
        let mut registry = registry();
        registry.writing.retain(|(_, rows)| *rows != self.0);
        registry.give_back_memory();
    }
}

impl Registry {
    fn slot(&mut self, at: usize) -> Result<Arc<Mutex<Slot>>> {
        let known = self.known.entry(at).or_insert_with(Known::new);
        if known.process != process::id() {
            if known.warm.is_some() {
                let why =
                    "the transformer was warmed up before fork, by another process; here call finish, then warm_up";
                return Err(Error::State(why.into()));
            }
            known.leave_behind();
        }
        Ok(known.slot.clone())
    }

    /// # Safety
    ///
    /// As [`restore`].
    unsafe fn restore(&mut self, transformer: *mut Transformer) -> Option<Restored> {
        let warm = self.take_warm(transformer.addr())?;
        // SAFETY: as our caller vouches.
        if !warm.is(unsafe { &*transformer }) {
            return Some(Restored::Changed);
        }
        // SAFETY: both have the struct's size; ours does not overlap the program's.
        unsafe { transformer.cast::<Original>().write(warm.original) };
        Some(Restored::Restored)
    }

    fn take_warm(&mut self, at: usize) -> Option<Installed> {
        let warm = self.known.get_mut(&at)?.warm.take()?;
        self.finished[self.next] = addresses(&warm.now.weights);
        self.next = (self.next + 1) % FINISHED;
        Some(warm)
    }

    /// Drops a transformer's entry if there is nothing in it. The caller has its slot in hand, but does not hold it.
    fn forget(&mut self, at: usize, slot: &Arc<Mutex<Slot>>) {
        // One is the map's and one the caller's; others come by only under the lock on all of this. Of two who leave at
        // once both may see the other: then an empty entry stays for the next to clear.
        let is_used = Arc::strong_count(slot) > 2;
        let is_empty = |known: &Known| known.source.is_none() && known.warm.is_none();
        if !is_used && self.known.get(&at).is_some_and(is_empty) {
            self.known.remove(&at);
        }
        self.give_back_memory();
    }

    /// What has been emptied would keep its memory.
    fn give_back_memory(&mut self) {
        if self.known.is_empty() {
            self.known = BTreeMap::new();
        }
        if self.writing.is_empty() {
            self.writing = Vec::new();
        }
    }
}

impl Known {
    fn new() -> Self {
        Self {
            process: process::id(),
            slot: Arc::default(),
            source: None,
            warm: None,
        }
    }

    /// Begins anew in a process that was forked.
    fn leave_behind(&mut self) {
        // The engine's threads are not here, so that dropping it would wait for ever, its devices are another
        // process's, and a thread that is not here may hold the lock.
        mem::forget(mem::take(&mut self.slot));
        self.process = process::id();
    }
}

impl Installed {
    fn is(&self, current: &Transformer) -> bool {
        current.config == self.now.config && current.weights == self.now.weights
    }
}

fn addresses(weights: &TransformerWeights) -> Addresses {
    weights.arrays().map(|array| array.addr())
}

fn registry() -> MutexGuard<'static, Registry> {
    static HOLDS_OVER_FORK: AtomicBool = AtomicBool::new(false);
    if !HOLDS_OVER_FORK.swap(true, Ordering::Relaxed) {
        // SAFETY: the functions take nothing, and go with the library when it is unloaded. Where there is no memory for
        // them, a process forked while another thread is in here hangs in its next call.
        unsafe { libc::pthread_atfork(Some(before_fork), Some(after_fork), Some(after_fork)) };
    }
    lock(&REGISTRY)
}

/// The registry, from before a fork to behind it.
struct Held(UnsafeCell<Option<MutexGuard<'static, Registry>>>);

// SAFETY: only who holds the registry's lock looks at it.
unsafe impl Sync for Held {}

static HELD: Held = Held(UnsafeCell::new(None));

extern "C" fn before_fork() {
    // Whoever is finding these out now is waited for: nobody would end it in the new process.
    simd::Level::detect();
    sampler::exponential_level();
    sampler::exponential_table();
    let registry = lock(&REGISTRY);
    // SAFETY: we hold the lock.
    unsafe { *HELD.0.get() = Some(registry) };
}

extern "C" fn after_fork() {
    // SAFETY: the thread that forks holds the lock, in both processes.
    drop(unsafe { (*HELD.0.get()).take() });
}

/// Locks, also after a panic: what lies behind these locks is replaced as a whole, so that it is never half done.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
