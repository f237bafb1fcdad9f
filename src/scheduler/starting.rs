//! Starts: of whom, when, and behind which beginning.

use super::Scheduler;
use super::kv_cache::CachedBeginning;
use super::lending::Growing;
use super::limits::FULL_TABLES;
use super::sequence::Sequence;

impl Scheduler {
    /// Starts waiting sequences while there is room. The first one that does not fit holds up those after it: otherwise
    /// a long one might wait for ever.
    pub(super) fn admit(&mut self) {
        while let Some(first) = self.waiting.front() {
            let ring = self.limits.need(first.n_prompt(), first.max_positions()).window;
            let starting = first.starting(ring);
            let most = self.limits.beginning(first.n_prompt(), first.scores_prompt());
            let found = self.cache.find(&first.tokens, most);
            if !self.fits(starting, found) {
                return;
            }
            let (Some(sequence), Some(slot)) = (self.waiting.pop_front(), self.free_slots.pop()) else {
                return;
            };
            self.start(sequence, ring, slot, found);
        }
    }

    /// Whether a slot is free, such a sequence may have its first blocks behind the beginning that was found for it,
    /// and it is its time.
    pub(super) fn fits(&mut self, starting: Growing, found: CachedBeginning) -> bool {
        if !self.running.is_empty() && !self.pace.may_start(self.steps, self.limits.turns()) {
            return false;
        }
        if self.free_slots.is_empty() {
            return false;
        }
        if found.held == 0 {
            return self.lending.may_start(starting.held, starting);
        }
        // What others hold of the beginning is free only when this one has ended, too.
        self.share(found.held, true);
        self.count_anew();
        let others: usize = self.in_order().map(|(_, sequence)| sequence.elsewhere).sum();
        let fits = others <= (FULL_TABLES - 1) * self.limits.blocks
            && !self.lending.is_stuck()
            && self.lending.may_start(starting.held - found.held, starting);
        self.share(found.held, false);
        self.stale = true;
        fits
    }

    /// Starts a sequence that fits, with a ring of so many blocks, behind the beginning found for it.
    fn start(&mut self, mut sequence: Sequence, ring: usize, slot: usize, found: CachedBeginning) {
        let starting = sequence.starting(ring);
        if found.held > 0 {
            self.share(found.held, true);
            self.count_anew();
        }
        self.lending.start(starting.held - found.held, starting);
        self.pace.start(self.steps);
        self.rings += ring;
        let first = sequence.first_full;
        self.cache.start(&mut sequence, first, ring);
        if sequence.awaits_beginning {
            self.awaiting += 1;
        } else {
            self.shared_tokens += sequence.newly_shared() as u64;
        }
        self.slots[slot] = Some(sequence);
        self.running.push(slot);
    }

    /// Notes for those that hold the first `held` nodes found last that a younger sequence holds them, too, or that it
    /// does not, after all.
    fn share(&mut self, held: usize, does: bool) {
        let nodes = &self.cache.found()[..held];
        super::for_youngest_holders(&mut self.slots, &self.running, nodes, 0, |elsewhere, more| {
            *elsewhere = if does { *elsewhere + more } else { *elsewhere - more };
        });
    }

    /// Gives those that wait for their beginning what they attend to of it, where it has been computed.
    pub(super) fn hand_over(&mut self) {
        for place in (0..self.running.len()).rev() {
            let slot = self.running[place];
            let Some(sequence) = &mut self.slots[slot] else {
                continue;
            };
            if sequence.awaits_beginning && self.cache.is_computed(sequence) {
                if self.cache.hand_over(sequence) {
                    self.awaiting -= 1;
                    self.shared_tokens += sequence.newly_shared() as u64;
                } else {
                    self.take_back(slot);
                }
            }
        }
    }
}
