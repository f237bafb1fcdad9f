//! The most probable tokens of a row, in order, as far as they are needed.
//!
//! Their order and the float32 sum in that order decide which token is drawn, so nothing may be left out; but the sum ends
//! as soon as it exceeds `topp`. Many tokens are therefore first dealt into buckets by their probability's leading bits, and
//! a bucket is sorted only when the sum reaches it.

/// Leading bits: eight of the exponent and ten of the fraction, so that a bucket of a flat row holds some twenty tokens.
const BUCKET_SHIFT: u32 = 13;
/// Fewer than this are sorted at once.
const FEW: usize = 2048;

/// See the module. Its memory is reused from row to row.
#[derive(Clone, Debug, Default)]
pub struct Nucleus {
    /// What is kept, as [`rank_key`] packs it.
    keys: Vec<u64>,
    dealt: Vec<u64>,
    /// The end of each bucket in `dealt`.
    ends: Vec<u32>,
}

impl Nucleus {
    /// Room for all of `vocab` tokens.
    pub fn new(vocab: usize) -> Self {
        Self {
            keys: Vec::with_capacity(vocab),
            dealt: Vec::with_capacity(vocab),
            ends: Vec::new(),
        }
    }

    /// Keeps the tokens of the row from `first` on whose value is at least `floor`, behind those kept so far.
    pub fn keep(&mut self, first: usize, values: &[f32], floor: f32) {
        let mut end = self.keys.len();
        self.keys.resize(end + values.len(), 0);
        // Without a branch, which would be foretold badly where every other token is kept.
        for (token, &value) in (first as u32..).zip(values) {
            self.keys[end] = rank_key(value, token);
            end += usize::from(value >= floor);
        }
        self.keys.truncate(end);
    }

    /// Where it keeps them.
    #[cfg(test)]
    pub fn memory(&self) -> (*const u64, *const u64) {
        (self.keys.as_ptr(), self.dealt.as_ptr())
    }

    /// Forgets what is kept.
    pub fn clear(&mut self) {
        self.keys.clear();
    }

    /// Turns the values kept into what `probability` makes of them, and keeps those that are at least `least`.
    pub fn normalize(&mut self, least: f32, probability: impl Fn(f32) -> f32) {
        self.keys.retain_mut(|key| {
            let p = probability(key_value(*key));
            *key = rank_key(p, *key as u32);
            p >= least
        });
    }

    /// Draws from the most probable tokens whose mass exceeds `topp`; `None` if none is kept. No probability kept is less
    /// than `least`, which is above 0, or more than 1.
    pub fn draw(&mut self, topp: f32, least: f32, coin: f32) -> Option<u32> {
        if self.keys.len() <= FEW {
            self.keys.sort_unstable(); // the keys differ, so this is the stable order of the probabilities
            let (mass, last) = mass_above(&self.keys, topp, 0.0);
            let last = last.or(self.keys.len().checked_sub(1))?;
            return Some(pick(&self.keys[..=last], coin * mass));
        }
        self.deal(least);
        let (mut mass, mut start) = (0.0, 0);
        for &end in &self.ends {
            let end = end as usize;
            self.dealt[start..end].sort_unstable();
            let (sum, last) = mass_above(&self.dealt[start..end], topp, mass);
            mass = sum;
            if let Some(last) = last {
                return Some(pick(&self.dealt[..=start + last], coin * mass));
            }
            start = end;
        }
        Some(pick(&self.dealt, coin * mass))
    }

    /// Deals the keys into buckets, the most probable first.
    fn deal(&mut self, least: f32) {
        let bucket = |key: u64| (key.wrapping_sub(rank_key(1.0, 0)) >> (32 + BUCKET_SHIFT)) as usize;
        self.ends.clear();
        self.ends.resize(bucket(rank_key(least, 0)) + 1, 0);
        for &key in &self.keys {
            self.ends[bucket(key)] += 1;
        }
        // Counts become starts, and dealing turns starts into ends.
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

/// Packs a value that is not negative and its token so that keys ascend as values descend, then as tokens ascend: the bits
/// of such floats are ordered as they are.
fn rank_key(value: f32, token: u32) -> u64 {
    u64::from(!value.to_bits()) << 32 | u64::from(token)
}

fn key_value(key: u64) -> f32 {
    f32::from_bits(!((key >> 32) as u32))
}
