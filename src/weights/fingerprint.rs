//! A fingerprint of packed values, taken while they are packed: processes that answer together compare it.
//!
//! It holds every value, reads nothing twice, and is the same for any backend. It takes an eighth of the packing's rate
//! on two cores, so libraries without the feature `mpi` leave it out.

use crate::simd::{Level, Simd, VectorCode};

/// Bytes mixed at once: sixteen words, which compilers keep in vector registers.
const BLOCK: usize = 64;

/// Mixes bytes into a fingerprint. Each word's way is reversible, so two rows that differ in one value always have
/// different lanes.
pub struct Fingerprint([u32; BLOCK / 4]);

impl Fingerprint {
    /// Of nothing yet.
    #[inline(always)]
    pub fn new() -> Self {
        Self([0; BLOCK / 4])
    }

    /// Adds bytes. In a library without the feature `mpi` nobody compares fingerprints, and it does nothing.
    #[inline(always)]
    pub fn add(&mut self, bytes: &[u8]) {
        if !cfg!(any(test, feature = "mpi")) {
            return;
        }
        let (blocks, rest) = bytes.as_chunks::<BLOCK>();
        blocks.iter().for_each(|block| self.add_block(block));
        if !rest.is_empty() {
            let mut last = [0; BLOCK];
            last[..rest.len()].copy_from_slice(rest);
            self.add_block(&last);
        }
    }

    #[inline(always)]
    fn add_block(&mut self, block: &[u8; BLOCK]) {
        for (lane, word) in self.0.iter_mut().zip(block.as_chunks::<4>().0) {
            let mixed = *lane ^ u32::from_le_bytes(*word);
            *lane = mixed.rotate_left(13).wrapping_mul(0x9e37_79b1);
        }
    }

    /// The fingerprint of what was added, as a part at this place: the sum of all parts', in any order, is that of the
    /// whole.
    #[inline(always)]
    pub fn at(self, place: u64) -> u64 {
        let words = self.0.iter().map(|&lane| u64::from(lane));
        words.fold(mixed(place), |fingerprint, word| mixed(fingerprint ^ word))
    }
}

fn mixed(word: u64) -> u64 {
    (word ^ word >> 32).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29)
}

/// The fingerprint of float32 values.
pub fn fingerprint_of(values: &[f32]) -> u64 {
    Level::detect().run(FingerprintOf(values))
}

struct FingerprintOf<'a>(&'a [f32]);

impl VectorCode for FingerprintOf<'_> {
    type Output = u64;

    #[inline(always)]
    fn run<S: Simd>(self, _: S) -> u64 {
        let mut fingerprint = Fingerprint::new();
        fingerprint.add(bytemuck::cast_slice(self.0));
        fingerprint.at(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Changes that leave sums, or the bits of most words, as they are.
    #[test]
    fn any_change_of_values_or_places_is_seen() {
        let values: Vec<f32> = (0..2880).map(|i| (i * 7919 % 97) as f32 - 48.0).collect();
        let change = |change: fn(&mut Vec<f32>)| {
            let mut values = values.clone();
            change(&mut values);
            fingerprint_of(&values)
        };
        let changes = [
            fingerprint_of(&values),
            change(|values| values[2879] += 1.0),
            change(|values| values[1000] = -values[1000]),
            change(|values| values.iter_mut().for_each(|value| *value = -*value)),
            change(|values| values.swap(1, 2)),
            change(|values| values.swap(1, 17)),
            change(|values| values.swap(0, 2864)),
            change(|values| values.reverse()),
            change(|values| values.truncate(2879)),
        ];
        for (i, a) in changes.iter().enumerate() {
            assert!(changes[..i].iter().all(|b| a != b), "{i}");
        }
        let at = |place| {
            let mut fingerprint = Fingerprint::new();
            fingerprint.add(&[1, 2, 3]);
            fingerprint.at(place)
        };
        assert_ne!(at(0).wrapping_add(at(3)), at(1).wrapping_add(at(2)));
    }
}
