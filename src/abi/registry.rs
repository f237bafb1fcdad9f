//! The one global: what is known of each `Transformer`, by its address.

use super::lifecycle::Warm;
use super::types::Transformer;
use crate::checkpoint::Checkpoint;
use crate::options::Options;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// What is known of one `Transformer`.
#[derive(Default)]
pub struct Slot {
    /// Where its weights come from, if the library itself opened it; the program's own hold theirs.
    pub source: Option<Source>,
    /// What warming up made, until it is finished.
    pub warm: Option<Warm>,
}

/// What `getp_model_open` was given.
#[derive(Clone)]
pub struct Source {
    /// The weights.
    pub checkpoint: Arc<dyn Checkpoint>,
    /// The choices.
    pub options: Options,
}

type Slots = BTreeMap<usize, Arc<Mutex<Slot>>>;

static SLOTS: Mutex<Slots> = Mutex::new(BTreeMap::new());

/// Does `work` with a transformer's slot. Others may use theirs meanwhile; who wants the same one waits.
pub fn with<T>(transformer: *const Transformer, work: impl FnOnce(&mut Slot) -> T) -> T {
    let slot = lock(&SLOTS).entry(transformer.addr()).or_default().clone();
    let forget = Forget { transformer, slot };
    // Declared behind `forget`, so that the slot is free again when that looks at it.
    let mut slot = lock(&forget.slot);
    work(&mut slot)
}

/// Drops a slot nobody needs any more, also when the work panicked.
struct Forget {
    transformer: *const Transformer,
    slot: Arc<Mutex<Slot>>,
}

impl Drop for Forget {
    fn drop(&mut self) {
        let mut slots = lock(&SLOTS);
        // One is the map's and one ours; others come by only under the lock held here, so that none can hold the
        // slot's own. Of two who leave at once both may see the other: then an empty slot stays for the next to clear.
        if Arc::strong_count(&self.slot) > 2 {
            return;
        }
        let slot = lock(&self.slot);
        if slot.source.is_none() && slot.warm.is_none() {
            slots.remove(&self.transformer.addr());
        }
        if slots.is_empty() {
            // An emptied map would keep its node.
            *slots = Slots::new();
        }
    }
}

/// Locks, also after a panic: what a slot holds is replaced as a whole, so that it is never half done.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
