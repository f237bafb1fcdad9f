//! Compute units, and the blocks that they work on.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// Waves that a compute unit works on at once.
const WAVES_AT_ONCE: usize = 8;
/// SIMDs of a compute unit, each with a matrix core.
pub const SIMDS: f64 = 4.0;
/// Lanes of a wave.
pub const WAVE: usize = 64;

#[derive(Clone, Default)]
struct Unit {
    now: f64,
    /// What is left of each of its blocks, in seconds alone on all SIMDs.
    running: Vec<f64>,
}

impl Unit {
    fn least(&self) -> f64 {
        self.running.iter().copied().fold(f64::MAX, f64::min)
    }

    fn free_at(&self, places: usize) -> f64 {
        match self.running.len() < places {
            true => self.now,
            false => self.now + self.least() * self.running.len() as f64,
        }
    }

    fn begin(&mut self, block: f64, places: usize) {
        if self.running.len() == places {
            let least = self.least();
            self.now += least * self.running.len() as f64;
            self.running.iter_mut().for_each(|left| *left -= least);
            self.running.retain(|left| *left > 1e-12);
        }
        self.running.push(block);
    }
}

/// When the last block, of so many waves, ends. Each block in order goes to the compute unit that has a free place
/// first. Blocks on one compute unit share its rate; a wave has at most a SIMD's. Blocks are in seconds alone on all
/// SIMDs of a compute unit.
pub fn last_end(compute_units: usize, blocks: &[f64], waves: usize) -> f64 {
    let places = WAVES_AT_ONCE / waves;
    let mut units = vec![Unit::default(); compute_units];
    // Times are not negative, so their bits are in their order.
    let rank = |unit: &Unit, at: usize| Reverse((unit.free_at(places).to_bits(), unit.running.len(), at));
    let mut next: BinaryHeap<_> = units.iter().enumerate().map(|(at, unit)| rank(unit, at)).collect();
    for &block in blocks {
        let Reverse((.., at)) = next.pop().expect("there are compute units");
        units[at].begin(block, places);
        next.push(rank(&units[at], at));
    }
    let alone = SIMDS / waves as f64;
    let ends = units.iter().map(|unit| {
        let longest = unit.running.iter().copied().fold(0.0, f64::max);
        unit.now + unit.running.iter().sum::<f64>().max(longest * alone)
    });
    ends.fold(0.0, f64::max)
}
