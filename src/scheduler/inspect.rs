//! What tests ask of the scheduler.

use super::Scheduler;

impl Scheduler {
    /// Blocks of the KV cache that no sequence holds.
    pub fn free_blocks(&self) -> usize {
        self.cache.full.free() + self.cache.window.free()
    }

    /// Blocks that the rings of running sequences may need.
    pub fn blocks_for_rings(&self) -> usize {
        self.rings
    }

    /// Whether a slot's sequence cannot be planned before it gets a block of the full layers.
    pub fn waits_for_block(&self, slot: usize) -> bool {
        let sequence = self.slots.get(slot).and_then(Option::as_ref);
        sequence.is_some_and(|sequence| sequence.lacks_block(self.limits.block_tokens))
    }

    /// Preempts the sequence that started last, if others run, too.
    pub fn preempt_youngest(&mut self) {
        if let [_, .., youngest] = self.running[..] {
            self.preempt(youngest);
        }
    }

    /// The next position to plan of a slot's sequence.
    pub fn planned(&self, slot: usize) -> Option<usize> {
        Some(self.slots.get(slot)?.as_ref()?.planned)
    }
}
