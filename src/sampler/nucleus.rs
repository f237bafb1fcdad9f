//! Nucleus sampling: sorts the most probable tokens of a row, no more than needed.
//!
//! The sorted order and the float32 sum in that order decide which token is sampled. The sum ends as soon as it exceeds
//! `topp`, which a peaked distribution reaches with a few tokens: those above a threshold are sorted first. If their
//! sum is too small, all tokens are distributed to buckets by the leading bits of their probabilities, and a bucket is
//! sorted only when the sum reaches it.

use crate::error::Result;
use crate::memory::{self, Purpose};
use crate::simd::{LANES, Level, Simd, VectorCode};

/// Leading bits: eight of the exponent and ten of the fraction, so that a bucket of a flat row holds some twenty
/// tokens.
const BUCKET_SHIFT: u32 = 13;
/// Fewer than this are sorted at once.
const FEW: usize = 2048;
/// Tokens this probable are tried first. There are at most as many as its inverse, few enough to sort at once.
const PROBABLE: f32 = 1.0 / FEW as f32;
/// A margin for the roundings between an exponential and its probability.
pub const MARGIN: f64 = 1.0 - 1e-6;
/// Up to this many of sixteen values are stored one by one.
const SPARSE: u32 = 4;

/// See the module. Its memory is reused from row to row.
#[derive(Clone, Debug, Default)]
pub struct Nucleus {
    /// The tokens kept, as [`rank_key`] packs them.
    keys: Vec<u64>,
    probable: Vec<u64>,
    dealt: Vec<u64>,
    /// The end of each bucket in `dealt`.
    ends: Vec<u32>,
}

impl Nucleus {
    /// Allocates room for `vocab` tokens, of which those with a probability of at least `least` are kept.
    pub fn make_room(&mut self, vocab: usize, least: f32) -> Result<()> {
        self.clear();
        self.probable.clear();
        self.dealt.clear();
        self.ends.clear();
        memory::reserve(&mut self.keys, vocab, Purpose::Draws)?;
        memory::reserve(
            &mut self.probable,
            vocab.min((1.0 / PROBABLE) as usize + 1),
            Purpose::Draws,
        )?;
        memory::reserve(&mut self.dealt, vocab, Purpose::Draws)?;
        memory::reserve(&mut self.ends, buckets(least.min(1.0)), Purpose::Draws)
    }

    /// Appends the tokens of `values`, the first of which is token `first`, whose value is at least `floor`.
    pub fn keep(&mut self, level: Level, first: usize, values: &[f32], floor: f32) {
        level.run(Keep {
            keys: &mut self.keys,
            first: first as u32,
            values,
            floor,
        });
    }

    /// Where kept tokens are stored.
    #[cfg(test)]
    pub fn memory(&self) -> [*const u64; 3] {
        [&self.keys, &self.probable, &self.dealt].map(|keys| keys.as_ptr())
    }

    /// Drops all kept tokens.
    pub fn clear(&mut self) {
        self.keys.clear();
    }

    /// Samples from the most probable of the kept tokens, up to a sum above `topp`; `None` if none is kept. A token's
    /// probability is its value over `sum`, at most 1; tokens below `least`, which is above 0, are not in a nucleus.
    pub fn draw(&mut self, topp: f32, least: f32, sum: f64, coin: f32) -> Option<u32> {
        self.draw_from_probable(topp, least, sum, coin)
            .or_else(|| self.draw_from_all(topp, least, sum, coin))
    }

    /// Samples from the tokens of at least [`PROBABLE`], if their sum exceeds `topp`.
    fn draw_from_probable(&mut self, topp: f32, least: f32, sum: f64, coin: f32) -> Option<u32> {
        let least = least.max(PROBABLE);
        // Below this a value's probability is below `least`, however it is rounded.
        let floor = (f64::from(least) * sum * MARGIN) as f32;
        let last_key = rank_key(floor, u32::MAX);
        self.probable.clear();
        for &key in self.keys.iter().filter(|&&key| key <= last_key) {
            let p = probability(key, sum);
            if p >= least {
                self.probable.push(rank_key(p, key as u32));
            }
        }
        self.probable.sort_unstable(); // the keys differ, so this is the stable order of the probabilities
        let (mass, last) = mass_above(&self.probable, topp, 0.0);
        last.map(|last| pick(&self.probable[..=last], coin * mass))
    }

    fn draw_from_all(&mut self, topp: f32, least: f32, sum: f64, coin: f32) -> Option<u32> {
        self.keys.retain_mut(|key| {
            let p = probability(*key, sum);
            *key = rank_key(p, *key as u32);
            p >= least
        });
        if self.keys.len() <= FEW {
            self.keys.sort_unstable();
            let (mass, last) = mass_above(&self.keys, topp, 0.0);
            let last = last.or(self.keys.len().checked_sub(1))?;
            return Some(pick(&self.keys[..=last], coin * mass));
        }
        self.deal(least);
        let (mut mass, mut start) = (0.0, 0);
        for &end in &self.ends {
            let end = end as usize;
            self.dealt[start..end].sort_unstable();
            let (reached, last) = mass_above(&self.dealt[start..end], topp, mass);
            mass = reached;
            if let Some(last) = last {
                return Some(pick(&self.dealt[..=start + last], coin * mass));
            }
            start = end;
        }
        Some(pick(&self.dealt, coin * mass))
    }

    /// Distributes the keys to buckets, the most probable first.
    fn deal(&mut self, least: f32) {
        self.ends.clear();
        self.ends.resize(buckets(least), 0);
        for &key in &self.keys {
            self.ends[bucket(key)] += 1;
        }
        // Counts become starts; filling turns starts into ends.
        let mut start = 0;
        for end in &mut self.ends {
            start += std::mem::replace(end, start);
        }
        self.dealt.clear();
        self.dealt.resize(self.keys.len(), 0);
        for &key in &self.keys {
            let at = &mut self.ends[bucket(key)];
            self.dealt[*at as usize] = key;
            *at += 1;
        }
    }
}

/// The bucket of a probability's key.
fn bucket(key: u64) -> usize {
    (key.wrapping_sub(rank_key(1.0, 0)) >> (32 + BUCKET_SHIFT)) as usize
}

/// Buckets of probabilities from 1 down to `least`.
fn buckets(least: f32) -> usize {
    bucket(rank_key(least, 0)) + 1
}

/// See [`Nucleus::keep`].
struct Keep<'a> {
    keys: &'a mut Vec<u64>,
    first: u32,
    values: &'a [f32],
    floor: f32,
}

impl VectorCode for Keep<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        let (chunks, tail) = self.values.as_chunks::<LANES>();
        let mut first = self.first;
        for chunk in chunks {
            // SAFETY: under `VectorCode::run`; a chunk has sixteen values.
            let mut kept = unsafe { S::at_least(S::load(chunk.as_ptr()), S::splat(self.floor)) };
            if kept.count_ones() <= SPARSE {
                while kept != 0 {
                    let lane = kept.trailing_zeros();
                    self.keys.push(rank_key(chunk[lane as usize], first + lane));
                    kept &= kept - 1;
                }
            } else {
                // Without a branch, which would be mispredicted where every other token is kept.
                let mut end = self.keys.len();
                self.keys.resize(end + LANES, 0);
                for (token, &value) in (first..).zip(chunk) {
                    self.keys[end] = rank_key(value, token);
                    end += usize::from(value >= self.floor);
                }
                self.keys.truncate(end);
            }
            first += LANES as u32;
        }
        let kept = (first..).zip(tail).filter(|&(_, &value)| value >= self.floor);
        self.keys.extend(kept.map(|(token, &value)| rank_key(value, token)));
    }
}

/// A kept value's probability, rounded as the program rounds it.
fn probability(key: u64, sum: f64) -> f32 {
    (f64::from(key_value(key)) / sum) as f32
}

/// The running float32 sum of sorted keys from `mass` on, up to where it exceeds `topp`, and that index.
fn mass_above(sorted: &[u64], topp: f32, mut mass: f32) -> (f32, Option<usize>) {
    let reached = sorted.iter().position(|&key| {
        mass += key_value(key);
        mass > topp
    });
    (mass, reached)
}

/// The first of the sorted keys at which the running sum exceeds `target`, or the last one; there is one.
fn pick(sorted: &[u64], target: f32) -> u32 {
    let drawn = super::first_above(sorted.iter().map(|&key| key_value(key)), target);
    sorted[drawn.unwrap_or(sorted.len() - 1)] as u32
}

/// Packs a value that is not negative and its token so that keys ascend as values descend, then as tokens ascend: the
/// bits of such floats are ordered as they are.
pub fn rank_key(value: f32, token: u32) -> u64 {
    u64::from(!value.to_bits()) << 32 | u64::from(token)
}

fn key_value(key: u64) -> f32 {
    f32::from_bits(!((key >> 32) as u32))
}
