//! Samples the next token from a row of logits, as the evaluation program does.
//!
//! Every rounding is the program's: a seed gives the same answer only if float32 and double are used where the program
//! uses them. Cases that the program's C leaves undefined:
//! - NaN never is the largest logit; if all are NaN, or there are none, the greedy token is 0;
//! - `topp` outside of (0, 1), NaN included, samples from all tokens;
//! - if nucleus sampling keeps nothing (one token only, `topp` below one token's share, NaN), the greedy token;
//! - a temperature so small that the largest logit divided by it overflows: the greedy token, which is what a sample
//!   tends to as the temperature falls;
//! - an infinite temperature makes all logits equal; `abi` lets no negative one and no NaN through;
//! - probabilities that are NaN for another reason (a NaN or +Inf logit) never exceed the random number, so that the
//!   last token is sampled, as in the program.
//!
//! What makes it fast: a row is read once, since the device has found its largest logit; `expf` is computed on sixteen
//! lanes (`exp`); four rows go together, since the additions of one row depend on each other. In the same pass
//! candidates for the nucleus are kept, by a bound from the partial sum, and of these only the most probable are sorted
//! (`nucleus`). With hundreds of rows a step the host's memory bandwidth is the limit.

mod exp;
mod nucleus;

use crate::batch::Draw;
use crate::error::Result;
use crate::grammar;
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
    /// How its token is sampled.
    pub draw: Draw,
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

/// Samples tokens from logits `[vocab]`. Its memory serves any number of sequences.
#[derive(Debug)]
pub struct Sampler {
    vocab_size: usize,
    /// Probabilities of the row; `[vocab]`.
    probabilities: Vec<f32>,
    /// For rows sampled together; the first one also for a row sampled alone.
    nuclei: [Nucleus; TOGETHER],
    /// The smallest probability for which there is room in a nucleus.
    least: f32,
    /// Of a row with a mask, the tokens that it has and their logits.
    allowed: (Vec<u32>, Vec<f32>),
}

impl Sampler {
    /// A sampler of rows of `vocab_size` logits. Before it samples, [`Self::make_room`].
    pub fn new(vocab_size: usize) -> Self {
        Self {
            vocab_size,
            probabilities: Vec::new(),
            nuclei: Default::default(),
            least: f32::INFINITY,
            allowed: Default::default(),
        }
    }

    /// Allocates what rows with this temperature and `topp` need, if it is not there yet.
    pub fn make_room(&mut self, temperature: f32, topp: f32) -> Result<()> {
        if temperature == 0.0 {
            return Ok(());
        }
        let vocab = self.vocab_size;
        memory::reserve(&mut self.probabilities, vocab, Purpose::Draws)?;
        let least = least(vocab, topp);
        if has_nucleus(topp) && least < self.least {
            let make_room = |nucleus: &mut Nucleus| nucleus.make_room(vocab, least);
            self.nuclei.iter_mut().try_for_each(make_room)?;
            self.least = least;
        }
        Ok(())
    }

    /// The token sampled from `logits` `[vocab]`; at a temperature of 0 the argmax, whatever `topp` is.
    pub fn sample(&mut self, logits: &[f32], draw: Draw) -> u32 {
        if draw.is_greedy() {
            return argmax(logits);
        }
        let largest = self.softmax(logits, draw.temperature);
        if largest.is_infinite() {
            let greedy = argmax(logits);
            // It overflowed, unless the logit itself is infinite.
            if logits[greedy as usize].is_finite() {
                return greedy;
            }
        }
        if has_nucleus(draw.topp) {
            self.draw_from_nucleus(draw).unwrap_or_else(|| argmax(logits))
        } else {
            first_or_last(&self.probabilities, draw.coin)
        }
    }

    /// The token sampled from those of a mask alone, as if the row of logits had no others: see
    /// [`crate::grammar::Matcher::mask`]. 0 if it has none of them.
    pub fn sample_allowed(&mut self, logits: &[f32], mask: &[u32], draw: Draw) -> Result<u32> {
        let (mut tokens, mut of_tokens) = std::mem::take(&mut self.allowed);
        tokens.clear();
        of_tokens.clear();
        memory::reserve(&mut tokens, logits.len(), Purpose::Draws)?;
        memory::reserve(&mut of_tokens, logits.len(), Purpose::Draws)?;
        for token in grammar::tokens(mask).take_while(|&token| (token as usize) < logits.len()) {
            tokens.push(token);
            of_tokens.push(logits[token as usize]);
        }
        let mut row = Row {
            logits: &of_tokens,
            largest: of_tokens.get(argmax(&of_tokens) as usize).copied().unwrap_or(f32::NAN),
            draw,
            token: 0,
        };
        if !row.logits.is_empty() {
            self.sample_rows(std::slice::from_mut(&mut row));
        }
        let token = tokens.get(row.token as usize).copied().unwrap_or(0);
        self.allowed = (tokens, of_tokens);
        Ok(token)
    }

    /// Samples each row as [`Self::sample`] does.
    pub fn sample_rows(&mut self, rows: &mut [Row<'_>]) {
        let alike = |a: &Row<'_>, b: &Row<'_>| (a.draw.temperature, a.draw.topp) == (b.draw.temperature, b.draw.topp);
        for rows in rows.chunk_by_mut(alike) {
            let level = exp::level().filter(|_| draws_numbers(rows[0].draw.temperature));
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
    }

    fn sample_row(&mut self, level: Option<Level>, row: &mut Row<'_>) {
        let drawn = level.is_some_and(|level| self.sample_together(level, std::array::from_mut(row)));
        if !drawn {
            row.token = self.sample(row.logits, row.draw);
        }
    }

    /// Samples rows with the same temperature and `topp`, whose values are all finite; returns false and does nothing
    /// if one of them has other values.
    fn sample_together<const N: usize>(&mut self, level: Level, rows: &mut [Row<'_>; N]) -> bool {
        let n = rows[0].logits.len();
        let Draw { temperature, topp, .. } = rows[0].draw;
        // Dividing by a number above 0 keeps the order, so the largest stays the largest.
        let maxima = rows.each_ref().map(|row| row.largest / temperature);
        if n < 2 || rows.iter().any(|row| row.logits.len() != n) || maxima.iter().any(|max| !max.is_finite()) {
            return false;
        }
        let nucleus = has_nucleus(topp);
        let least = if nucleus { least(n, topp) } else { f32::INFINITY };
        let sums = self.exponentials(level, rows, maxima, least);
        if sums.iter().any(|sum| sum.is_nan()) {
            return false;
        }
        for (i, row) in rows.iter_mut().enumerate() {
            row.token = if nucleus {
                let drawn = self.nuclei[i].draw(topp, least, sums[i], row.draw.coin);
                drawn.unwrap_or_else(|| argmax(row.logits))
            } else {
                draw_from_all(level, row, maxima[i], sums[i])
            };
        }
        true
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
                    temperature: rows[0].draw.temperature,
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

    /// Fills in the probabilities; gives the largest logit, divided by the temperature. The program subtracts it in
    /// double and rounds to float32; that equals one float32 subtraction, as a double difference of two floats rounded
    /// again is the same.
    fn softmax(&mut self, logits: &[f32], temperature: f32) -> f32 {
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
        max
    }

    /// Samples from the nucleus: the most probable tokens, up to a sum above `topp`. `None` if no token is kept.
    fn draw_from_nucleus(&mut self, draw: Draw) -> Option<u32> {
        let least = least(self.probabilities.len(), draw.topp);
        let nucleus = &mut self.nuclei[0];
        nucleus.clear();
        nucleus.keep(Level::detect(), 0, &self.probabilities, least);
        nucleus.draw(draw.topp, least, 1.0, draw.coin)
    }
}

/// The first token at which the running sum exceeds the random number, or the last one. The exponentials up to it
/// are recomputed: storing all of them would cost more memory traffic.
fn draw_from_all(level: Level, row: &Row<'_>, max: f32, sum: f64) -> u32 {
    let (logits, draw) = (row.logits, row.draw);
    let mut values = [0.0; BLOCK];
    let mut mass = 0.0_f32;
    for (first, logits) in (0..).step_by(BLOCK).zip(logits.chunks(BLOCK)) {
        let values = &mut values[..logits.len()];
        level.run(exp::Exponentials {
            logits,
            temperature: draw.temperature,
            max,
            out: values,
        });
        let reached = values.iter().position(|&e| {
            mass += (f64::from(e) / sum) as f32;
            draw.coin < mass
        });
        if let Some(at) = reached {
            return (first + at) as u32;
        }
    }
    logits.len() as u32 - 1
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
fn first_or_last(probabilities: &[f32], coin: f32) -> u32 {
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
    use crate::random::random_f32;
    use rand::{Rng, SeedableRng};
    use rand_chacha::ChaCha8Rng;

    /// One sequence's sampler, with a random stream of its own.
    struct Alone {
        sampler: Sampler,
        temperature: f32,
        topp: f32,
        state: u64,
    }

    impl Alone {
        fn new(vocab: usize, temperature: f32, topp: f32, state: u64) -> Self {
            let mut sampler = Sampler::new(vocab);
            sampler.make_room(temperature, topp).unwrap();
            Self {
                sampler,
                temperature,
                topp,
                state,
            }
        }

        fn sample(&mut self, logits: &[f32]) -> u32 {
            let Self { temperature, topp, .. } = *self;
            let coin = random_f32(&mut self.state);
            let draw = Draw {
                temperature,
                topp,
                coin,
            };
            self.sampler.sample(logits, draw)
        }
    }

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
            let temperature = [0.1, 0.7, 1.0, 2.5, f32::INFINITY][case % 5];
            let topp = [0.0, 0.3, 0.9, 0.999, 1.0, -1.0, 2.0][case % 7];
            let mut state = rng.random();
            let mut sampler = Alone::new(n, temperature, topp, state);
            for _ in 0..5 {
                let logits = random_logits(&mut rng, n);
                let expected = reference(&logits, temperature, topp, &mut state);
                assert_eq!(
                    sampler.sample(&logits),
                    expected,
                    "n {n} temperature {temperature} topp {topp}"
                );
                assert_eq!(sampler.state, state);
            }
        }
    }

    #[test]
    fn greedy_takes_the_first_largest_whatever_topp_is() {
        for (temperature, topp) in [(0.0, 0.9), (-0.0, 0.0), (0.0, f32::NAN)] {
            assert_eq!(Alone::new(4, temperature, topp, 7).sample(&[1.0, 3.0, 3.0, 2.0]), 1);
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
            let mut sampler = Alone::new(4, 1.0, topp, 42);
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

    /// Of a mask's tokens each has the share that it has among them, and they are all that is drawn. Drawn first from
    /// all tokens and again where that one is forbidden, the shares are the same.
    #[test]
    fn tokens_of_a_mask_are_drawn_as_if_there_were_no_others() {
        let logits: Vec<f32> = [0.1_f32, 0.3, 0.05, 0.25, 0.2, 0.1].map(f32::ln).to_vec();
        let mask = [0b11_1010_u32, u32::MAX];
        let shares = [0.0, 0.3, 0.0, 0.25, 0.2, 0.1].map(|share| share / 0.85);
        const DRAWS: usize = 40_000;
        for first_of_all in [false, true] {
            let mut sampler = Sampler::new(logits.len());
            sampler.make_room(1.0, 1.0).unwrap();
            let mut state = 7;
            let mut counts = [0; 6];
            for _ in 0..DRAWS {
                let mut draw = || Draw {
                    temperature: 1.0,
                    topp: 1.0,
                    coin: random_f32(&mut state),
                };
                let (first, again) = (draw(), draw());
                let token = sampler.sample(&logits, first);
                let token = match first_of_all && grammar::tokens(&mask).any(|allowed| allowed == token) {
                    true => token,
                    false => sampler.sample_allowed(&logits, &mask, again).unwrap(),
                };
                counts[token as usize] += 1;
            }
            for (count, share) in counts.into_iter().zip(shares) {
                // Five standard deviations, at most 0.5 / sqrt(DRAWS) each.
                let found = f64::from(count) / DRAWS as f64;
                assert!((found - share).abs() <= 0.0125, "{first_of_all}: {counts:?}");
            }
            assert_eq!(counts[0] + counts[2], 0);
        }
    }

    #[test]
    fn the_largest_of_a_mask_is_greedy() {
        let mut sampler = Sampler::new(70);
        let mut logits = vec![0.0; 70];
        (logits[5], logits[33], logits[69], logits[40]) = (9.0, 3.0, 3.0, f32::NAN);
        let mut greedy = |mask: &[u32]| sampler.sample_allowed(&logits, mask, Draw::GREEDY).unwrap();
        assert_eq!(greedy(&[!0, !0, !0]), 5);
        assert_eq!(greedy(&[!(1 << 5), !0, !0]), 33);
        assert_eq!(greedy(&[0, 1 << 8, 1 << 5]), 69);
        // One token, none, and none within the row.
        assert_eq!([greedy(&[1 << 31]), greedy(&[]), greedy(&[0, 0, 1 << 6])], [31, 0, 0]);
    }

    #[test]
    fn a_nucleus_that_keeps_nothing_is_greedy() {
        assert_eq!(Alone::new(1, 1.0, 0.5, 1).sample(&[2.0]), 0);
        assert_eq!(Alone::new(4, 1.0, 0.01, 1).sample(&[1.0; 4]), 0);
        assert_eq!(Alone::new(3, 1.0, 0.5, 1).sample(&[f32::NAN, 1.0, 2.0]), 2);
    }

    #[test]
    fn probabilities_that_are_nan_fall_through_to_the_last_token() {
        for bad in [
            [f32::NAN, 1.0, 2.0],
            [1.0, f32::NAN, 2.0],
            [f32::INFINITY, 1.0, 2.0],
            [f32::NEG_INFINITY; 3],
        ] {
            assert_eq!(Alone::new(3, 1.0, 1.0, 1).sample(&bad), 2, "{bad:?}");
        }
    }

    #[test]
    fn a_temperature_that_overflows_is_greedy() {
        // At 1e-38 logits up to 3.4 can be divided; the others overflow to an infinity of their sign.
        let rows: [[f32; 4]; 4] = [
            [3.0, 3.3, 3.3, 1.0],
            [3.0, 9.0, 9.0, 8.0],
            [-9.0, -8.0, -8.5, f32::NEG_INFINITY],
            [0.0, 1e-20, -2.0, 3e38],
        ];
        let largest = [1, 1, 1, 3];
        for temperature in [1e-38, 1e-45, f32::MIN_POSITIVE] {
            for topp in [1.0, 0.0, 0.9, 1e-6] {
                let mut sampler = Sampler::new(4);
                sampler.make_room(temperature, topp).unwrap();
                let coin = 0.7;
                let draw = Draw {
                    temperature,
                    topp,
                    coin,
                };
                for (logits, expected) in rows.iter().zip(largest) {
                    let mut rows = [Row {
                        logits,
                        largest: logits[expected],
                        draw,
                        token: 0,
                    }; 5];
                    sampler.sample_rows(&mut rows);
                    let alone = sampler.sample(logits, draw);
                    let is_tie = |token: u32| logits[token as usize] == logits[expected];
                    let overflows = (logits[expected] / temperature).is_infinite();
                    assert!(
                        is_tie(alone) && (!overflows || alone as usize == expected),
                        "{logits:?} {temperature} {topp}: {alone}"
                    );
                    assert!(rows.iter().all(|row| row.token == alone));
                }
            }
        }
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
                let mut sampler = Alone::new(2, temperature, topp, state);
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
        let mut sampler = Alone::new(vocab, 1.0, 0.99, 5);
        let before = (
            sampler.sampler.probabilities.as_ptr(),
            sampler.sampler.nuclei[0].memory(),
        );
        let mut state = 5;
        for _ in 0..2 {
            assert_eq!(sampler.sample(&logits), reference(&logits, 1.0, 0.99, &mut state));
        }
        assert_eq!(
            (
                sampler.sampler.probabilities.as_ptr(),
                sampler.sampler.nuclei[0].memory()
            ),
            before
        );
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
            let mut sampler = Sampler::new(n);
            let samplings = [(temperature, topp), (0.0, topp), (1.3, 0.7), (temperature, topp)];
            samplings.iter().for_each(|&(t, p)| sampler.make_room(t, p).unwrap());
            let mut all = rows_of_all_kinds(&mut rng, n);
            for _ in 0..4 {
                all.rotate_left(3);
                let mut rows: Vec<_> = all
                    .iter()
                    .enumerate()
                    .map(|(i, logits)| {
                        // In one half of the cases rows of several kinds are drawn together.
                        let (temperature, topp) = samplings[if case % 2 == 0 { 0 } else { i / 2 % 4 }];
                        let coin = rng.random();
                        Row {
                            logits,
                            largest: logits[argmax(logits) as usize],
                            draw: Draw {
                                temperature,
                                topp,
                                coin,
                            },
                            token: 0,
                        }
                    })
                    .collect();
                sampler.sample_rows(&mut rows);
                for row in &rows {
                    assert_eq!(row.token, sampler.sample(row.logits, row.draw), "n {n} {:?}", row.draw);
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
            let mut sampler = Alone::new(n, 0.8, topp, state);
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
