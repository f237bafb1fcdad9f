//! The registry, the one global variable with state: the engine of each `Transformer`, by the struct's address, and the
//! answer rows that calls are writing to.
//!
//! A forked process inherits the registry, but neither the engines' threads nor their devices, and a thread that does
//! not exist there may hold a cell's lock. So the registry's own lock is held over `fork`, each entry records the
//! process that made it, and an entry of another process is dropped without freeing its engine.

use super::types::{RunState, Transformer, TransformerWeights};
use super::vocabulary::Vocabulary;
use crate::checkpoint::Checkpoint;
use crate::engine::{Engine, Service, Totals};
use crate::error::{Error, Result};
use crate::float_environment;
use crate::options::Options;
use crate::process::Process;
use crate::replica::Pointers;
use crate::threads::Thread;
use crate::{sampler, simd};
use rustc_hash::FxHasher;
use std::cell::UnsafeCell;
use std::collections::BTreeMap;
use std::hash::{Hash, Hasher};
use std::mem::{self, MaybeUninit};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

/// A transformer that is warmed up.
pub struct Warm {
    pub engine: Engine,
    /// `None` until `inference` brings a tokenizer, if a batch has warmed the transformer up.
    pub vocabulary: Option<Vocabulary>,
    /// The checkpoint and options given to `getp_model_open`; `None` for a struct of the program's own.
    pub source: Option<Opened>,
}

/// A transformer's engine; `None` while it is not warmed up.
pub type WarmCell = Option<Warm>;

/// What `getp_model_open` was given.
#[derive(Clone)]
pub struct Opened {
    /// The weights.
    pub checkpoint: Arc<dyn Checkpoint>,
    pub options: Options,
}

/// The bytes of the program's struct from before `warm_up`, padding included.
pub type Original = [MaybeUninit<u8>; size_of::<Transformer>()];

/// The struct of a transformer that is warmed up.
struct Installed {
    /// From before `warm_up`.
    original: Original,
    /// With the replica's addresses that `warm_up` wrote into it.
    now: Transformer,
    totals: Arc<Totals>,
}

/// The entry of one `Transformer`.
struct Known {
    /// The process that made the entry.
    process: Process,
    /// Held while a call uses the transformer.
    cell: Arc<Mutex<WarmCell>>,
    /// Calls that use the transformer or wait for the cell. The thread of a batch begins when there are none, since
    /// they were made before the batch was opened.
    calls: usize,
    /// `Some` if `getp_model_open` made the struct. A struct of the program's own points to its weights itself.
    source: Option<Opened>,
    /// `Some` while it is warmed up.
    warm: Option<Installed>,
    /// The batch that was opened last, until a later call finds it closed.
    batch: Option<Batch>,
}

/// A batch, and the threads that work for it. Dropping it waits for their end.
pub struct Batch {
    pub service: Arc<Service>,
    /// Whoever drops them waits for their end.
    pub threads: Vec<Thread<()>>,
}

/// The values of the fields of `TransformerWeights`.
type Addresses = [usize; 16];

/// Number of finished transformers whose addresses are kept, to recognize copies of their structs.
const FINISHED: usize = 64;

/// A transformer that could not be warmed up the last time, so that the user is told of it when that is tried again.
#[derive(Clone, Copy)]
struct Failed {
    /// The struct's address.
    at: usize,
    /// Its weights: another struct at the address has others.
    weights: Addresses,
    /// A fingerprint of the reason.
    why: u64,
}

/// Number of such transformers that are kept.
const FAILED: usize = 16;

struct Registry {
    known: BTreeMap<usize, Known>,
    /// The addresses that were written into the transformers finished last: a ring, the oldest at `next`.
    finished: [Addresses; FINISHED],
    next: usize,
    /// The transformers that failed last, the latest first.
    failed: [Option<Failed>; FAILED],
    /// The process and the address range of the answer rows of each `inference` that is running.
    writing: Vec<(Process, Range<usize>)>,
}

// SAFETY: the pointers in the structs are only compared, never dereferenced.
unsafe impl Send for Installed {}

static REGISTRY: Mutex<Registry> = Mutex::new(Registry {
    known: BTreeMap::new(),
    finished: [[0; 16]; FINISHED],
    next: 0,
    failed: [None; FAILED],
    writing: Vec::new(),
});

/// A call has ended, or a batch is closed.
static CHANGED: Condvar = Condvar::new();

/// Calls `work` with a transformer's cell, which is locked meanwhile: calls on the same transformer wait, calls on
/// others do not. Fails if another process has warmed the transformer up, or if a batch is open on it.
pub fn with<T>(transformer: *const Transformer, work: impl FnOnce(&mut WarmCell) -> Result<T>) -> Result<T> {
    loop {
        let mut registry = registry();
        let Some(closed) = registry.closed_batch(transformer.addr())? else {
            let call = registry.begin_call(transformer.addr())?;
            drop(registry);
            return call.with_cell(work);
        };
        drop(registry);
        drop(closed); // unlocked, since its threads may use the registry
    }
}

/// The same for the thread of an open batch, which waits for the calls that came before the batch. Calls nothing if the
/// batch is closed before they have ended: then others may be using the cell already.
pub fn with_batch(at: usize, service: &Service, work: impl FnOnce(&mut WarmCell) -> Result<()>) -> Result<()> {
    let mut registry = registry();
    while registry.known.get(&at).is_some_and(|known| known.calls > 0) && !service.is_closed() {
        registry = CHANGED.wait(registry).unwrap_or_else(PoisonError::into_inner);
    }
    if service.is_closed() {
        return Ok(());
    }
    let call = registry.begin_call(at)?;
    drop(registry);
    call.with_cell(work)
}

/// A call that uses a transformer. When it is dropped, also by a panic, the transformer's entry is removed if it is
/// empty and nobody else uses it.
struct Call {
    at: usize,
    cell: Arc<Mutex<WarmCell>>,
}

impl Call {
    fn with_cell<T>(self, work: impl FnOnce(&mut WarmCell) -> Result<T>) -> Result<T> {
        // Declared after `self`, so that it is dropped, and the cell unlocked, first.
        let mut cell = lock(&self.cell);
        work(&mut cell)
    }
}

impl Drop for Call {
    fn drop(&mut self) {
        let mut registry = registry();
        if let Some(known) = registry.known.get_mut(&self.at) {
            known.calls -= 1;
        }
        registry.forget(self.at, &self.cell);
        CHANGED.notify_all();
    }
}

/// The checkpoint and options of a transformer that `getp_model_open` made.
pub fn source(transformer: *const Transformer) -> Option<Opened> {
    let registry = registry();
    registry.known.get(&transformer.addr())?.source.clone()
}

/// Sets the checkpoint and options of a transformer that `getp_model_open` made; `None` when the model is closed.
pub fn set_source(transformer: *const Transformer, source: Option<Opened>) {
    let mut registry = registry();
    let known = registry.known.entry(transformer.addr()).or_insert_with(Known::new);
    let before = mem::replace(&mut known.source, source);
    let cell = known.cell.clone();
    registry.forget(transformer.addr(), &cell);
    drop(registry);
    drop(before); // unlocked, since unmapping a checkpoint may take a while
}

/// Writes a replica's addresses into the program's struct, whose cell the caller has locked.
///
/// # Safety
///
/// `transformer` points to a [`Transformer`] nobody else uses.
pub unsafe fn install(transformer: *mut Transformer, pointers: Pointers, totals: Arc<Totals>) {
    let mut registry = registry();
    let known = registry.known.entry(transformer.addr()).or_insert_with(Known::new);
    // SAFETY: guaranteed by our caller; any struct may be read as an array of `MaybeUninit<u8>`, padding included.
    known.warm = Some(unsafe {
        let original = transformer.cast::<Original>().read();
        (&raw mut (*transformer).weights).write(TransformerWeights::from_arrays(pointers.weights));
        (&raw mut (*transformer).state).write(RunState::from_arrays(pointers.state));
        let now = transformer.read();
        Installed { original, now, totals }
    });
}

/// Notes a batch that was opened on a transformer, whose cell the caller has locked. Gives the batch back if another
/// one has been opened since the call began.
pub fn set_batch(transformer: *const Transformer, mut batch: Batch) -> std::result::Result<(), Batch> {
    let mut registry = registry();
    let Some(known) = registry.known.get_mut(&transformer.addr()) else {
        return Err(batch);
    };
    if let Some(before) = &mut known.batch {
        if !before.service.is_closed() {
            return Err(batch);
        }
        // They may wait for the cell, so they cannot be waited for here.
        batch.threads.append(&mut before.threads);
    }
    known.batch = Some(batch);
    Ok(())
}

/// Why nobody else can use a transformer.
pub fn another_is_open() -> Error {
    Error::State("a batch is open on this model; close it first".into())
}

/// Closes a batch, without waiting for its threads.
pub fn close(service: &Service) {
    service.close();
    let _registry = registry(); // nobody is between its check and its wait
    CHANGED.notify_all();
}

/// Closes the batch of a transformer, if it has one, and waits for the end of its threads.
pub fn end_batch(transformer: *const Transformer) {
    let batch = registry().take_batch(transformer.addr());
    if let Some(batch) = batch {
        close(&batch.service);
    }
}

/// The counters of a transformer's engine. Fails if it is not warmed up, or by another process.
pub fn totals(transformer: *const Transformer) -> Result<Arc<Totals>> {
    let mut registry = registry();
    let cell = registry.cell(transformer.addr())?;
    let known = registry.known.get(&transformer.addr());
    let totals = known
        .and_then(|known| known.warm.as_ref())
        .map(|warm| warm.totals.clone());
    registry.forget(transformer.addr(), &cell);
    totals.ok_or_else(|| Error::State("the transformer is not warmed up; call warm_up first".into()))
}

/// Notes that a transformer could not be warmed up.
pub fn note_failure(transformer: *const Transformer, current: &Transformer, why: &Error) {
    let mut registry = registry();
    registry.forget_failure(transformer.addr());
    registry.failed.rotate_right(1);
    registry.failed[0] = Some(Failed {
        at: transformer.addr(),
        weights: addresses(&current.weights),
        why: fingerprint(why),
    });
}

/// Whether the last warm-up of a transformer has failed, and if so, whether for this reason.
pub fn failed_before(
    transformer: *const Transformer,
    current: &Transformer,
) -> Option<impl Fn(&Error) -> bool + use<>> {
    let weights = addresses(&current.weights);
    let is_it = |failed: &&Failed| failed.at == transformer.addr() && failed.weights == weights;
    let why = registry().failed.iter().flatten().find(is_it)?.why;
    Some(move |other: &Error| fingerprint(other) == why)
}

/// Drops the note of a failure: the transformer is warmed up, finished or closed.
pub fn forget_failure(transformer: *const Transformer) {
    registry().forget_failure(transformer.addr());
}

fn fingerprint(why: &Error) -> u64 {
    let mut hasher = FxHasher::default();
    why.to_string().hash(&mut hasher);
    hasher.finish()
}

/// What [`restore`] did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Restored {
    /// The struct has its bytes from before `warm_up` again.
    Restored,
    /// The program has changed the struct since `warm_up`, so it was not written to.
    Changed,
}

/// Restores the struct's bytes from before `warm_up`; `None` if it was not warmed up.
///
/// # Safety
///
/// `transformer` points to a [`Transformer`] nobody else uses.
pub unsafe fn restore(transformer: *mut Transformer) -> Option<Restored> {
    // SAFETY: guaranteed by our caller.
    unsafe { registry().restore(transformer) }
}

/// Drops the record of the addresses written into a struct that the program has since replaced by another one.
pub fn replaced(transformer: *const Transformer) {
    registry().take_warm(transformer.addr());
}

/// Finishes a transformer that was warmed up before `fork`, in the parent process: the struct is restored, and the
/// engine's memory is leaked. `None` if this process made the entry, or if the transformer was not warmed up.
///
/// # Safety
///
/// Same requirements as [`restore`].
pub unsafe fn finish_inherited(transformer: *mut Transformer) -> Option<Restored> {
    let mut registry = registry();
    let known = registry.known.get_mut(&transformer.addr())?;
    if known.process == Process::this() {
        return None;
    }
    known.leave_behind();
    let cell = known.cell.clone();
    // SAFETY: guaranteed by our caller.
    let restored = unsafe { registry.restore(transformer) };
    registry.forget(transformer.addr(), &cell);
    restored
}

/// Whether a struct holds what `warm_up` wrote into it.
pub fn is_installed(transformer: *const Transformer, current: &Transformer) -> bool {
    let registry = registry();
    let known = registry.known.get(&transformer.addr());
    known
        .and_then(|known| known.warm.as_ref())
        .is_some_and(|warm| warm.is(current))
}

/// The bytes of the program's struct from before `warm_up`.
pub fn original(transformer: *const Transformer) -> Option<Original> {
    let registry = registry();
    let warm = registry.known.get(&transformer.addr())?.warm.as_ref()?;
    Some(warm.original)
}

/// Refuses a struct that holds the addresses which `warm_up` wrote into another one: it is a copy, and the addresses do
/// not point to float32 weights.
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

/// The address range of the rows that one call is writing to.
pub struct Claim(Range<usize>);

/// Claims the rows at these addresses until the result is dropped. Fails if another call has claimed any of them.
pub fn claim(rows: Range<usize>) -> Result<Claim> {
    let mut registry = registry();
    let process = Process::this();
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
    /// A batch of this process; one of another is leaked, since its threads do not exist here.
    fn take_batch(&mut self, at: usize) -> Option<Batch> {
        let known = self.known.get_mut(&at)?;
        if known.process != Process::this() {
            mem::forget(known.batch.take());
        }
        known.batch.take()
    }

    /// A transformer's batch that is closed, to be dropped. Fails if it has an open one.
    fn closed_batch(&mut self, at: usize) -> Result<Option<Batch>> {
        let batch = self.take_batch(at);
        match (batch, self.known.get_mut(&at)) {
            (Some(batch), Some(known)) if !batch.service.is_closed() => {
                known.batch = Some(batch);
                Err(another_is_open())
            }
            (batch, _) => Ok(batch),
        }
    }

    /// Counts a call until the result is dropped.
    fn begin_call(&mut self, at: usize) -> Result<Call> {
        let cell = self.cell(at)?;
        if let Some(known) = self.known.get_mut(&at) {
            known.calls += 1;
        }
        Ok(Call { at, cell })
    }

    fn cell(&mut self, at: usize) -> Result<Arc<Mutex<WarmCell>>> {
        let known = self.known.entry(at).or_insert_with(Known::new);
        if known.process != Process::this() {
            if known.warm.is_some() {
                let why =
                    "the transformer was warmed up before fork, by another process; here call finish, then warm_up";
                return Err(Error::State(why.into()));
            }
            known.leave_behind();
        }
        Ok(known.cell.clone())
    }

    /// # Safety
    ///
    /// Same requirements as [`restore`].
    unsafe fn restore(&mut self, transformer: *mut Transformer) -> Option<Restored> {
        let warm = self.take_warm(transformer.addr())?;
        // SAFETY: guaranteed by our caller.
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

    fn forget_failure(&mut self, at: usize) {
        let is_it = |failed: &Option<Failed>| failed.is_some_and(|failed| failed.at == at);
        self.failed
            .iter_mut()
            .filter(|failed| is_it(failed))
            .for_each(|failed| *failed = None);
    }

    /// Removes a transformer's entry if it is empty and no other call uses it. `cell` is the entry's, not locked.
    fn forget(&mut self, at: usize, cell: &Arc<Mutex<WarmCell>>) {
        // One reference is the map's and one the caller's; more are made only under the registry's lock. Two calls that
        // end at once may each count the other's reference; then an empty entry stays until the next call removes it.
        let is_used = Arc::strong_count(cell) > 2;
        let is_empty = |known: &Known| known.source.is_none() && known.warm.is_none();
        if !is_used && self.known.get(&at).is_some_and(is_empty) {
            self.known.remove(&at);
        }
        self.give_back_memory();
    }

    /// Frees the memory that an emptied map and vector would keep.
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
            process: Process::this(),
            cell: Arc::default(),
            calls: 0,
            source: None,
            warm: None,
            batch: None,
        }
    }

    /// Makes an entry inherited over `fork` this process's own, with a new cell.
    fn leave_behind(&mut self) {
        // The old cell is leaked: the engine's threads do not exist here, so dropping it would wait for ever; its
        // devices are another process's; and a thread that does not exist here may hold the lock.
        mem::forget((mem::take(&mut self.cell), self.batch.take()));
        self.calls = 0;
        self.process = Process::this();
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
        // SAFETY: the functions take no arguments, and the library is never unloaded. If registering them fails for
        // lack of memory, a process forked while another thread holds the lock hangs in its next call.
        unsafe { libc::pthread_atfork(Some(before_fork), Some(after_fork), Some(after_fork)) };
    }
    lock(&REGISTRY)
}

/// The registry's lock, held from before a fork until after it.
struct ForkLock(UnsafeCell<Option<MutexGuard<'static, Registry>>>);

// SAFETY: only the thread that holds the registry's lock uses it.
unsafe impl Sync for ForkLock {}

static HELD: ForkLock = ForkLock(UnsafeCell::new(None));

extern "C" fn before_fork() {
    // Waits for a thread that is initializing one of these: in the forked process that thread would not exist, and the
    // initialization would never end.
    float_environment::in_default(|| {
        simd::Level::detect();
        sampler::exponential_level();
        sampler::exponential_table();
    });
    let registry = lock(&REGISTRY);
    // SAFETY: we hold the lock.
    unsafe { *HELD.0.get() = Some(registry) };
}

extern "C" fn after_fork() {
    // SAFETY: the thread that forks holds the lock, in both processes.
    drop(unsafe { (*HELD.0.get()).take() });
}

/// Locks, even if a thread panicked with the lock held: what these locks guard is replaced as a whole, so it is never
/// half changed.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
