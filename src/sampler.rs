//! Samples the next token from a row of logits, as the evaluation program does.
//!
//! Every rounding is the program's: a seed gives the same answer only if float32 and double are used where the program
//! uses them. Cases that the program's C leaves undefined:
//! - NaN never is the largest logit; if all are NaN, or there are none, the greedy token is 0;
//! - `topp` outside of (0, 1), NaN included, samples from all tokens;
//! - if nucleus sampling keeps nothing (one token only, `topp` below one token's share, NaN), the greedy token;
//! - a negative temperature reverses the order of the logits, an infinite one makes them all equal;
//! - probabilities that are NaN (a NaN temperature, a NaN or +Inf logit, logits that overflow when divided) never
//!   exceed the random number, so that the last token is sampled, as in the program.

mod exp;
mod nucleus;

use crate::error::Result;
use crate::memory::{self, Purpose};
use crate::simd::Level;
use nucleus::{MARGIN, Nucleus};
use std::array::from_fn;

pub use exp::{POWERS as EXPONENTIAL_POWERS, level as exponential_level, table as exponential_table};

/// Rows sampled together: a row's sum is a chain of dependent additions, so that four rows take no longer than one.
const TOGETHER: usize = 4;
/// Exponentials of a row computed at a time: those of the rows sampled together fit the L1 cache.
const BLOCK: usize = 512;

/// A row of logits `[vocab]` to sample.
#[derive(Clone, Copy, Debug)]
pub struct Row<'a> {
    /// The row.
    pub logits: &'a [f32],
    /// The largest logit; any value if one is NaN.
    pub largest: f32,
    /// The state of its random number generator.
    pub rng_state: u64,
    /// The token sampled.
    pub token: u32,
}

/// Whether a device samples the same tokens as the host: the temperature keeps the logits' order, and the C library's
/// `expf` has the bits of glibc's, whose algorithm the device uses.
pub fn device_may_draw(temperature: f32) -> bool {
    draws_numbers(temperature) && exp::level().is_some()
}

/// A device sorts only tokens at least this probable: others are not in the nucleus, or the nucleus is too large for
/// it.
pub fn least_probable(vocab: usize, topp: f32) -> f32 {
    const LEAST: f32 = 1.0 / 16384.0;
    least(vocab, topp).max(LEAST)
}

/// Samples tokens from logits. Its memory is allocated once and serves any number of sequences.
#[derive(Debug)]
pub struct Sampler {
    temperature: f32,
    topp: f32,
    rng_state: u64,
    /// Probabilities of the row; `[vocab]`.
    probabilities: Vec<f32>,
    /// For rows sampled together; the first one also for a row sampled alone.
    nuclei: [Nucleus; TOGETHER],
}

impl Sampler {
    /// A sampler of rows of `vocab_size` logits. A temperature of 0 is greedy and leaves the state alone.
    pub fn new(vocab_size: usize, temperature: f32, topp: f32, rng_state: u64) -> Result<Self> {
        let draws = temperature != 0.0;
        let nucleus = || match draws && has_nucleus(topp) {
            true => Nucleus::new(vocab_size, least(vocab_size, topp)),
            false => Ok(Nucleus::default()),
        };
        Ok(Self {
            temperature,
            topp,
            rng_state,
            probabilities: memory::room(if draws { vocab_size } else { 0 }, Purpose::Draws)?,
            nuclei: [nucleus()?, nucleus()?, nucleus()?, nucleus()?],
        })
    }

    /// The generator's state, to be written back to the program's struct.
    pub fn rng_state(&self) -> u64 {
        self.rng_state
    }

    /// The token sampled from `logits` `[vocab]` with the sampler's own generator.
    pub fn sample(&mut self, logits: &[f32]) -> u32 {
        let mut rng_state = self.rng_state;
        let token = self.sample_with(logits, &mut rng_state);
        self.rng_state = rng_state;
        token
    }

    /// The token sampled from `logits` `[vocab]` with the generator of state `rng_state`.
    pub fn sample_with(&mut self, logits: &[f32], rng_state: &mut u64) -> u32 {
        if self.temperature == 0.0 {
            return argmax(logits);
        }
        self.sample_by(logits, random_f32(rng_state))
    }

    /// The token sampled from `logits` `[vocab]` with the random number `coin`, at a temperature other than 0.
    pub fn sample_by(&mut self, logits: &[f32], coin: f32) -> u32 {
        self.softmax(logits);
        if has_nucleus(self.topp) {
            self.draw_from_nucleus(coin).unwrap_or_else(|| argmax(logits))
        } else {
            draw(&self.probabilities, coin)
        }
    }

    /// Samples each row as [`Self::sample_with`] does.
    pub fn sample_rows(&mut self, rows: &mut [Row<'_>]) {
        let level = exp::level().filter(|_| draws_numbers(self.temperature));
        for group in rows.chunks_mut(TOGETHER) {
            let drawn = match (level, <&mut [Row<'_>; TOGETHER]>::try_from(&mut *group)) {
                (Some(level), Ok(rows)) => self.sample_together(level, rows),
                _ => false,
            };
            if !drawn {
                group.iter_mut().for_each(|row| self.sample_row(level, row));
            }
        }
    }

    fn sample_row(&mut self, level: Option<Level>, row: &mut Row<'_>) {
        let drawn = level.is_some_and(|level| self.sample_together(level, std::array::from_mut(row)));
        if !drawn {
            row.token = self.sample_with(row.logits, &mut row.rng_state);
        }
    }

    /// Samples rows whose values are all finite; returns false and does nothing if one of them has other values.
    fn sample_together<const N: usize>(&mut self, level: Level, rows: &mut [Row<'_>; N]) -> bool {
        let n = rows[0].logits.len();
        // Dividing by a number above 0 keeps the order, so the largest stays the largest.
        let maxima = rows.each_ref().map(|row| row.largest / self.temperature);
        if n < 2 || rows.iter().any(|row| row.logits.len() != n) || maxima.iter().any(|max| !max.is_finite()) {
            return false;
        }
        let nucleus = has_nucleus(self.topp);
        let least = if nucleus { least(n, self.topp) } else { f32::INFINITY };
        let sums = self.exponentials(level, rows, maxima, least);
        if sums.iter().any(|sum| sum.is_nan()) {
            return false;
        }
        for (i, row) in rows.iter_mut().enumerate() {
            let coin = random_f32(&mut row.rng_state);
            row.token = if nucleus {
                let drawn = self.nuclei[i].draw(self.topp, least, sums[i], coin);
                drawn.unwrap_or_else(|| argmax(row.logits))
            } else {
                self.draw_from_all(level, row.logits, maxima[i], sums[i], coin)
            };
        }
        true
    }

    /// The first token at which the running sum exceeds the random number, or the last one. The exponentials up to it
    /// are recomputed: storing all of them would cost more memory traffic.
    fn draw_from_all(&self, level: Level, logits: &[f32], max: f32, sum: f64, coin: f32) -> u32 {
        let mut values = [0.0; BLOCK];
        let mut mass = 0.0_f32;
        for (first, logits) in (0..).step_by(BLOCK).zip(logits.chunks(BLOCK)) {
            let values = &mut values[..logits.len()];
            level.run(exp::Exponentials {
                logits,
                temperature: self.temperature,
                max,
                out: values,
            });
            let reached = values.iter().position(|&e| {
                mass += (f64::from(e) / sum) as f32;
                coin < mass
            });
            if let Some(at) = reached {
                return (first + at) as u32;
            }
        }
        logits.len() as u32 - 1
    }

    /// Each row's sum of exponentials; its nucleus keeps tokens whose probability can be `least` or more.
    fn exponentials<const N: usize>(
        &mut self,
        level: Level,
        rows: &[Row<'_>; N],
        maxima: [f32; N],
        least: f32,
    ) -> [f64; N] {
        let n = rows[0].logits.len();
        let mut sums = [0.0_f64; N];
        let mut values = [[0.0_f32; BLOCK]; N];
        self.nuclei.iter_mut().for_each(Nucleus::clear);
        for first in (0..n).step_by(BLOCK) {
            let len = BLOCK.min(n - first);
            for i in 0..N {
                let largest = level.run(exp::Exponentials {
                    logits: &rows[i].logits[first..first + len],
                    temperature: self.temperature,
                    max: maxima[i],
                    out: &mut values[i][..len],
                });
                // A lower bound of the whole sum: what has been summed, and at least 1 of the largest logit. The last
                // factor allows for the roundings up to the probability.
                let floor = (f64::from(least) * sums[i].max(1.0) * MARGIN) as f32;
                if largest >= floor {
                    self.nuclei[i].keep(level, first, &values[i][..len], floor);
                }
            }
            #[allow(clippy::needless_range_loop, reason = "the same place of several rows at once")]
            for j in 0..len {
                sums = from_fn(|i| sums[i] + f64::from(values[i][j]));
            }
        }
        sums
    }

    /// Fills in the probabilities. The program subtracts the maximum in double and rounds to float32; that equals one
    /// float32 subtraction, as a double difference of two floats rounded again is the same.
    fn softmax(&mut self, logits: &[f32]) {
        let temperature = self.temperature;
        self.probabilities.clear();
        self.probabilities
            .extend(logits.iter().map(|logit| logit / temperature));
        let first = self.probabilities.first().copied().unwrap_or(0.0);
        // NaN fails the comparison: it is the maximum if it comes first, and is ignored elsewhere.
        let max = self
            .probabilities
            .iter()
            .fold(first, |max, &x| if x > max { x } else { max });
        let mut sum = 0.0_f64;
        for x in &mut self.probabilities {
            *x = (*x - max).exp();
            sum += f64::from(*x);
        }
        for x in &mut self.probabilities {
            *x = (f64::from(*x) / sum) as f32;
        }
    }

    /// Samples from the nucleus: the most probable tokens, up to a sum above `topp`. `None` if no token is kept.
    fn draw_from_nucleus(&mut self, coin: f32) -> Option<u32> {
        let least = least(self.probabilities.len(), self.topp);
        let nucleus = &mut self.nuclei[0];
        nucleus.clear();
        nucleus.keep(Level::detect(), 0, &self.probabilities, least);
        nucleus.draw(self.topp, least, 1.0, coin)
    }
}

/// Argmax: the lowest index of the largest logit; NaN is never the largest. 0 if there is none.
pub fn argmax(logits: &[f32]) -> u32 {
    let mut best: Option<(u32, f32)> = None;
    for (index, &logit) in (0..).zip(logits) {
        if !logit.is_nan() && best.is_none_or(|(_, largest)| logit > largest) {
            best = Some((index, logit));
        }
    }
    best.map_or(0, |(index, _)| index)
}

/// The initial generator state of a request: its own, so that its answer does not depend on the other requests.
///
/// The first has the program's own state, 0 included, as the program's own loop would; the others have outputs of
/// splitmix64 seeded with it (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014), but never
/// 0, where xorshift would stay.
pub fn request_seed(base: u64, request: usize) -> u64 {
    const GAMMA: u64 = 0x9E37_79B9_7F4A_7C15;
    if request == 0 {
        return base;
    }
    let mut z = base.wrapping_add(GAMMA.wrapping_mul(request as u64));
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^= z >> 31;
    if z == 0 { GAMMA } else { z }
}

/// The generator's state after one token.
pub fn next_state(mut state: u64) -> u64 {
    random_f32(&mut state);
    state
}

/// The random number in [0, 1) for the token `ahead` tokens after the next one.
pub fn coin(state: u64, ahead: usize) -> f32 {
    let mut state = (0..ahead).fold(state, |state, _| next_state(state));
    random_f32(&mut state)
}

/// The next number in [0, 1): 24 bits of xorshift64* (Vigna, "An experimental exploration of Marsaglia's xorshift
/// generators, scrambled", 2016).
fn random_f32(state: &mut u64) -> f32 {
    *state ^= *state >> 12;
    *state ^= *state << 25;
    *state ^= *state >> 27;
    let high = (state.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 32) as u32;
    (high >> 8) as f32 / 16_777_216.0
}

/// Whether logits divided by the temperature are numbers in the same order.
fn draws_numbers(temperature: f32) -> bool {
    0.0 < temperature && temperature.is_finite()
}

/// Of `n` tokens, those less probable than this cannot be in the nucleus.
fn least(n: usize, topp: f32) -> f32 {
    (1.0 - topp) / n.saturating_sub(1) as f32
}

/// Whether `topp` asks for nucleus sampling.
pub fn has_nucleus(topp: f32) -> bool {
    0.0 < topp && topp < 1.0
}

/// The first token at which the running sum exceeds the random number, or the last one.
fn draw(probabilities: &[f32], coin: f32) -> u32 {
    let last = probabilities.len().saturating_sub(1);
    first_above(probabilities.iter().copied(), coin).unwrap_or(last) as u32
}

/// The first index at which the running float32 sum exceeds `target`.
fn first_above(mut probabilities: impl Iterator<Item = f32>, target: f32) -> Option<usize> {
    let mut sum = 0.0_f32;
    probabilities.position(|p| {
        sum += p;
        target < sum
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::{Rng, SeedableRng};
    use rand_chacha::ChaCha8Rng;

    /// A reference of the program's sampling: one function with loops, indices and a stable sort of pairs.
    fn reference(logits: &[f32], temperature: f32, topp: f32, state: &mut u64) -> u32 {
        let n = logits.len();
        let mut p: Vec<f32> = logits.iter().map(|l| l / temperature).collect();
        let max = p.iter().fold(f64::NEG_INFINITY, |m, &x| m.max(f64::from(x)));
        let mut sum = 0.0_f64;
        for x in p.iter_mut() {
            *x = ((f64::from(*x) - max) as f32).exp();
            sum += f64::from(*x);
        }
        for x in p.iter_mut() {
            *x = (f64::from(*x) / sum) as f32;
        }
        *state ^= *state >> 12;
        *state ^= *state << 25;
        *state ^= *state >> 27;
        let bits = state.wrapping_mul(0x2545F4914F6CDD1D) >> 40;
        let coin = bits as f32 / (1 << 24) as f32;
        let mut pairs: Vec<(f32, usize)> = p.iter().copied().zip(0..n).collect();
        let mut target = coin;
        if 0.0 < topp && topp < 1.0 {
            pairs.retain(|pair| pair.0 >= (1.0 - topp) / (n - 1) as f32);
            pairs.sort_by(|a, b| b.0.partial_cmp(&a.0).unwrap());
            let mut mass = 0.0_f32;
            for i in 0..pairs.len() {
                mass += pairs[i].0;
                if mass > topp {
                    pairs.truncate(i + 1);
                    break;
                }
            }
            target = coin * mass;
        }
        let mut cdf = 0.0_f32;
        for pair in &pairs {
            cdf += pair.0;
            if target < cdf {
                return pair.1 as u32;
            }
        }
        // An empty nucleus is undefined in the program; here the token is the argmax.
        pairs.last().map_or_else(|| argmax(logits), |pair| pair.1 as u32)
    }

    /// Logits on a coarse grid, so that many are equal.
    fn random_logits(rng: &mut ChaCha8Rng, n: usize) -> Vec<f32> {
        (0..n)
            .map(|_| (rng.random_range(-6.0_f32..6.0) * 4.0).round() / 4.0)
            .collect()
    }

    #[test]
    fn draws_are_those_of_the_reference() {
        let mut rng = ChaCha8Rng::seed_from_u64(1);
        for case in 0..600 {
            let n = [2, 3, 17, 1000][case % 4];
            let temperature = [0.1, 0.7, 1.0, 2.5, -1.0][case % 5];
            let topp = [0.0, 0.3, 0.9, 0.999, 1.0, -1.0, 2.0][case % 7];
            let mut state = rng.random();
            let mut sampler = Sampler::new(n, temperature, topp, state).unwrap();
            for _ in 0..5 {
                let logits = random_logits(&mut rng, n);
                let expected = reference(&logits, temperature, topp, &mut state);
                assert_eq!(
                    sampler.sample(&logits),
                    expected,
                    "n {n} temperature {temperature} topp {topp}"
                );
                assert_eq!(sampler.rng_state(), state);
            }
        }
    }

    #[test]
    fn the_stream_is_xorshift64_star() {
        // By hand from state 1: 1 ^ 1 << 25 = 0x2000001; its product with the multiplier has 0x47E4CE4B on top.
        let mut state = 1;
        assert_eq!(random_f32(&mut state), 4_711_630.0 / 16_777_216.0);
        assert_eq!(state, 0x200_0001);
        assert_eq!(random_f32(&mut state), 11_259_814.0 / 16_777_216.0);
        assert_eq!(state, 0x4_0040_0080_2801);
        let mut state = u64::MAX;
        assert_eq!(random_f32(&mut state), 16_329_929.0 / 16_777_216.0);
        assert_eq!(state, 0xFFF0_001F_FE00_0000);
    }

    #[test]
    fn coins_are_known_ahead() {
        let mut state = 42;
        for ahead in 0..5 {
            assert_eq!(next_state(state), {
                let mut next = state;
                random_f32(&mut next);
                next
            });
            assert_eq!(coin(42, ahead), random_f32(&mut state));
        }
    }

    #[test]
    fn coins_are_even_and_below_one() {
        let mut state = 42;
        let coins: Vec<f32> = (0..20_000).map(|_| random_f32(&mut state)).collect();
        assert!(coins.iter().all(|coin| (0.0..1.0).contains(coin)));
        let mean = coins.iter().sum::<f32>() / 20_000.0;
        // The mean of 20,000 has a standard deviation of 0.289 / sqrt(20000) = 0.002; the gate is five of them.
        assert!((mean - 0.5).abs() < 0.01, "{mean}");
    }

    #[test]
    fn request_seeds_are_splitmix64() {
        assert_eq!(request_seed(1_234_567, 0), 1_234_567);
        assert_eq!(request_seed(0, 0), 0);
        // Published outputs of splitmix64 seeded with 0 and with 1234567.
        assert_eq!(request_seed(0, 1), 0xE220_A839_7B1D_CDAF);
        assert_eq!(request_seed(0, 2), 0x6E78_9E6A_A1B9_65F4);
        assert_eq!(request_seed(1_234_567, 1), 0x599E_D017_FB08_FC85);
        // The finaliser maps 0 to 0, so this base would give the second request the state 0.
        assert_ne!(request_seed(0_u64.wrapping_sub(0x9E37_79B9_7F4A_7C15), 1), 0);
    }

    #[test]
    fn greedy_takes_the_first_largest_and_leaves_the_stream_alone() {
        for temperature in [0.0, -0.0] {
            let mut sampler = Sampler::new(4, temperature, 0.9, 7).unwrap();
            assert_eq!(sampler.sample(&[1.0, 3.0, 3.0, 2.0]), 1);
            assert_eq!(sampler.rng_state(), 7);
        }
        let (nan, inf) = (f32::NAN, f32::INFINITY);
        assert_eq!(argmax(&[nan, 1.0, nan, 2.0]), 3);
        assert_eq!(argmax(&[nan, -inf, -inf]), 1);
        assert_eq!(argmax(&[1.0, inf, inf]), 1);
        assert_eq!(argmax(&[nan, nan]), 0);
        assert_eq!(argmax(&[-0.0, 0.0]), 0);
        assert_eq!(argmax(&[]), 0);
    }

    #[test]
    fn frequencies_follow_the_probabilities() {
        let logits: Vec<f32> = [0.5_f32, 0.3, 0.15, 0.05].iter().map(|p| p.ln()).collect();
        let frequencies = |topp| {
            let mut sampler = Sampler::new(4, 1.0, topp, 42).unwrap();
            let mut counts = [0.0; 4];
            for _ in 0..20_000 {
                counts[sampler.sample(&logits) as usize] += 1.0 / 20_000.0;
            }
            counts
        };
        // A frequency's standard deviation is at most 0.5 / sqrt(20000) = 0.0035; the gate is four of them.
        let near = |a: [f64; 4], b: [f64; 4]| a.iter().zip(b).all(|(a, b)| (a - b).abs() < 0.014);
        assert!(near(frequencies(1.0), [0.5, 0.3, 0.15, 0.05]));
        assert!(near(frequencies(0.7), [0.625, 0.375, 0.0, 0.0]));
    }

    #[test]
    fn a_nucleus_that_keeps_nothing_is_greedy() {
        assert_eq!(Sampler::new(1, 1.0, 0.5, 1).unwrap().sample(&[2.0]), 0);
        assert_eq!(Sampler::new(4, 1.0, 0.01, 1).unwrap().sample(&[1.0; 4]), 0);
        assert_eq!(Sampler::new(3, 1.0, 0.5, 1).unwrap().sample(&[f32::NAN, 1.0, 2.0]), 2);
    }

    #[test]
    fn probabilities_that_are_nan_fall_through_to_the_last_token() {
        for bad in [
            [f32::NAN, 1.0, 2.0],
            [1.0, f32::NAN, 2.0],
            [f32::INFINITY, 1.0, 2.0],
            [f32::NEG_INFINITY; 3],
        ] {
            assert_eq!(Sampler::new(3, 1.0, 1.0, 1).unwrap().sample(&bad), 2, "{bad:?}");
        }
        assert_eq!(Sampler::new(3, f32::NAN, 1.0, 1).unwrap().sample(&[3.0, 2.0, 1.0]), 2);
    }

    #[test]
    fn nothing_makes_it_panic_or_leave_the_row() {
        let odd = [
            0.0,
            -0.0,
            1.0,
            -1.0,
            0.5,
            1e-40,
            f32::MAX,
            f32::MIN,
            f32::INFINITY,
            f32::NEG_INFINITY,
            f32::NAN,
        ];
        for (temperature, topp) in odd.iter().flat_map(|&t| odd.map(|p| (t, p))) {
            for state in [0, 1, u64::MAX] {
                let mut sampler = Sampler::new(2, temperature, topp, state).unwrap();
                assert_eq!(sampler.sample(&[]), 0);
                for logits in odd.windows(3) {
                    assert!(sampler.sample(logits) < 3, "temperature {temperature} topp {topp}");
                }
            }
        }
    }

    #[test]
    fn a_row_of_the_whole_vocabulary_needs_no_new_memory() {
        let vocab = 201_088;
        let logits: Vec<f32> = (0..vocab).map(|i| (i % 977) as f32 * 1e-3).collect();
        let mut sampler = Sampler::new(vocab, 1.0, 0.99, 5).unwrap();
        let before = (sampler.probabilities.as_ptr(), sampler.nuclei[0].memory());
        let mut state = 5;
        for _ in 0..2 {
            assert_eq!(sampler.sample(&logits), reference(&logits, 1.0, 0.99, &mut state));
        }
        assert_eq!((sampler.probabilities.as_ptr(), sampler.nuclei[0].memory()), before);
    }

    /// Flat rows, peaked ones, rows with ties, with values far from the others, with NaN and infinities.
    fn rows_of_all_kinds(rng: &mut ChaCha8Rng, n: usize) -> Vec<Vec<f32>> {
        let mut rows: Vec<Vec<f32>> = [0.0, 0.5, 1.0, 3.0, 10.0, 60.0]
            .into_iter()
            .map(|spread: f32| (0..n).map(|_| spread * rng.random_range(-2.0_f32..2.0)).collect())
            .collect();
        rows.push(random_logits(rng, n));
        for odd in [f32::NEG_INFINITY, f32::NAN, f32::INFINITY, -1e30] {
            let mut row = random_logits(rng, n);
            row[n / 3] = odd;
            rows.push(row);
        }
        rows
    }

    #[test]
    fn rows_together_are_drawn_as_each_alone() {
        let mut rng = ChaCha8Rng::seed_from_u64(3);
        for case in 0..60 {
            let n = [2, 17, 511, 1024, 5000, 20_011][case % 6];
            let temperature = [0.1, 0.8, 1.0, 1.7][case % 4];
            let topp = [0.05, 0.9, 0.999, 1.0, 0.5][case % 5];
            let mut sampler = Sampler::new(n, temperature, topp, 1).unwrap();
            let mut all = rows_of_all_kinds(&mut rng, n);
            for _ in 0..4 {
                all.rotate_left(3);
                let mut rows: Vec<_> = all
                    .iter()
                    .map(|logits| Row {
                        logits,
                        largest: logits[argmax(logits) as usize],
                        rng_state: rng.random(),
                        token: 0,
                    })
                    .collect();
                let mut alone = rows.clone();
                sampler.sample_rows(&mut rows);
                for (row, alone) in rows.iter().zip(&mut alone) {
                    alone.token = sampler.sample_with(alone.logits, &mut alone.rng_state);
                    let got = (row.token, row.rng_state);
                    assert_eq!(
                        got,
                        (alone.token, alone.rng_state),
                        "n {n} temperature {temperature} topp {topp}"
                    );
                }
            }
        }
    }

    #[test]
    fn a_wide_nucleus_is_that_of_the_reference() {
        let mut rng = ChaCha8Rng::seed_from_u64(4);
        let n = 30_000;
        for topp in [0.3, 0.9, 0.999] {
            let logits: Vec<f32> = (0..n)
                .map(|_| (rng.random_range(-2.0_f32..2.0) * 64.0).round() / 64.0)
                .collect();
            let mut state: u64 = rng.random();
            let mut sampler = Sampler::new(n, 0.8, topp, state).unwrap();
            for _ in 0..20 {
                assert_eq!(
                    sampler.sample(&logits),
                    reference(&logits, 0.8, topp, &mut state),
                    "topp {topp}"
                );
            }
        }
    }
}
