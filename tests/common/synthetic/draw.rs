//! The distributions of a synthetic tensor's values, and their encodings.

use getp::dtype::{E2M1, MXFP4_BLOCK, MXFP4_BLOCK_BYTES, e8m0_to_f32};
use half::bf16;
use rayon::prelude::*;

/// How values are encoded as bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Encoding {
    F32,
    Bf16,
    /// MXFP4 codes.
    Blocks,
    /// MXFP4 scales.
    Scales,
}

impl Encoding {
    /// Size of `values` values in bytes.
    pub fn bytes(self, values: usize) -> usize {
        match self {
            Self::F32 => values * 4,
            Self::Bf16 => values * 2,
            Self::Blocks => values / MXFP4_BLOCK * MXFP4_BLOCK_BYTES,
            Self::Scales => values / MXFP4_BLOCK,
        }
    }
}

/// Number of bytes that a thread makes at a time: a whole number of MXFP4 blocks in every encoding.
const CHUNK_BYTES: usize = 64 << 10;

/// The distribution of a tensor's values.
pub enum Source {
    Normal(Normal),
    Blocks(Blocks),
}

impl Source {
    /// Writes the tensor's bytes from `start` on, in parallel. `start` and the length are multiples of an MXFP4 block.
    pub fn fill(&self, encoding: Encoding, start: usize, bytes: &mut [u8]) {
        bytes.par_chunks_mut(CHUNK_BYTES).enumerate().for_each(|(i, chunk)| {
            let start = start + i * CHUNK_BYTES;
            match self {
                Self::Normal(normal) => normal.fill(encoding, start, chunk),
                Self::Blocks(blocks) => blocks.fill(encoding, start, chunk),
            }
        });
    }
}

/// Values that are approximately normally distributed.
pub struct Normal {
    pub key: u64,
    pub mean: f32,
    pub std: f32,
    /// Whether values are rounded to bfloat16.
    pub bf16: bool,
}

impl Normal {
    /// The sum of four uniform numbers of 16 bits, scaled to the mean and standard deviation.
    fn value(&self, index: usize) -> f32 {
        const MEAN: i32 = 4 * 0xffff / 2;
        const STD: f32 = 37_837.227; // 65536 * sqrt(4 / 12)
        let bits = random(self.key, index as u64);
        let sum: i32 = [0, 16, 32, 48]
            .map(|shift| (bits >> shift & 0xffff) as i32)
            .iter()
            .sum();
        let value = self.mean + (sum - MEAN) as f32 * (self.std / STD);
        if self.bf16 {
            bf16::from_f32(value).to_f32()
        } else {
            value
        }
    }

    fn fill(&self, encoding: Encoding, start: usize, bytes: &mut [u8]) {
        match encoding {
            Encoding::F32 => {
                let out = bytes.as_chunks_mut().0.iter_mut().zip(start / 4..);
                out.for_each(|(out, i)| *out = self.value(i).to_le_bytes());
            }
            Encoding::Bf16 => {
                let out = bytes.as_chunks_mut().0.iter_mut().zip(start / 2..);
                out.for_each(|(out, i)| *out = bf16::from_f32(self.value(i)).to_le_bytes());
            }
            Encoding::Blocks | Encoding::Scales => unreachable!("{encoding:?} of values that are not MXFP4"),
        }
    }
}

/// MXFP4 blocks with approximately normally distributed values.
pub struct Blocks {
    key: u64,
    /// The code for each value of a random byte.
    codes: Box<[u8; 256]>,
    /// The mean of the blocks' exponents.
    exponent: i32,
}

/// 64-bit random numbers for a block: four for its 32 codes, one for its exponent.
const BLOCK_DRAWS: u64 = 5;

impl Blocks {
    /// Blocks with about this standard deviation. Blocks' exponents differ from `exponent` by -1, 0 or 1, with odds
    /// 1:2:1: the root mean square of that scale is 1.25. The standard deviation of the codes makes up for the rest.
    pub fn new(key: u64, std: f32) -> Self {
        let std = f64::from(std) / 1.25;
        // Codes have a standard deviation of 1.25 to 2.5, so that they use their range and few are its end, 6.
        let exponent = (std / 1.25).log2().floor();
        let spread = std / exponent.exp2();
        let codes = std::array::from_fn(|i| {
            // Quantiles of the logistic distribution, close to the normal distribution's and in closed form.
            let p = (i as f64 + 0.5) / 256.0;
            let deviation = (p / (1.0 - p)).ln() * 3f64.sqrt() / std::f64::consts::PI;
            nearest_code((deviation * spread) as f32)
        });
        Self {
            key,
            codes: Box::new(codes),
            exponent: exponent as i32,
        }
    }

    /// The codes of a block, the even index in the low nibble.
    fn codes(&self, block: usize) -> [u8; MXFP4_BLOCK_BYTES] {
        let first = block as u64 * BLOCK_DRAWS;
        let code = |draw: u64, byte: u32| self.codes[(draw >> (8 * byte) & 0xff) as usize];
        let mut codes = [0; MXFP4_BLOCK_BYTES];
        for (i, codes) in codes.as_chunks_mut::<4>().0.iter_mut().enumerate() {
            let draw = random(self.key, first + i as u64);
            *codes = [0, 2, 4, 6].map(|byte| code(draw, byte) | code(draw, byte + 1) << 4);
        }
        codes
    }

    /// The scale of a block.
    fn scale(&self, block: usize) -> u8 {
        let coins = random(self.key, block as u64 * BLOCK_DRAWS + 4);
        let around = (coins & 1) as i32 + (coins >> 1 & 1) as i32 - 1;
        (127 + self.exponent + around).clamp(0, 254) as u8
    }

    fn fill(&self, encoding: Encoding, start: usize, bytes: &mut [u8]) {
        match encoding {
            Encoding::F32 => {
                let blocks = bytes.as_chunks_mut::<{ 4 * MXFP4_BLOCK }>().0.iter_mut();
                blocks
                    .zip(start / (4 * MXFP4_BLOCK)..)
                    .for_each(|(out, i)| self.widen(i, out));
            }
            Encoding::Blocks => {
                let blocks = bytes.as_chunks_mut().0.iter_mut().zip(start / MXFP4_BLOCK_BYTES..);
                blocks.for_each(|(out, i)| *out = self.codes(i));
            }
            Encoding::Scales => bytes.iter_mut().zip(start..).for_each(|(out, i)| *out = self.scale(i)),
            Encoding::Bf16 => {
                let blocks = bytes.as_chunks_mut::<{ 2 * MXFP4_BLOCK }>().0.iter_mut();
                blocks.zip(start / (2 * MXFP4_BLOCK)..).for_each(|(out, i)| {
                    let mut wide = [0; 4 * MXFP4_BLOCK];
                    self.widen(i, &mut wide);
                    // The value is exact in bfloat16, the upper half of a float32.
                    let halves = out.as_chunks_mut::<2>().0.iter_mut().zip(wide.as_chunks::<4>().0);
                    halves.for_each(|(out, wide)| *out = [wide[2], wide[3]]);
                });
            }
        }
    }

    /// Writes a block's values as float32.
    fn widen(&self, block: usize, out: &mut [u8; 4 * MXFP4_BLOCK]) {
        let scale = e8m0_to_f32(self.scale(block));
        let values = E2M1.map(|value| (value * scale).to_le_bytes());
        for (out, byte) in out.as_chunks_mut::<8>().0.iter_mut().zip(self.codes(block)) {
            let pair = [byte & 15, byte >> 4].map(|code| values[usize::from(code)]);
            out.copy_from_slice(pair.as_flattened());
        }
    }
}

/// The code of the nearest E2M1 value, with `value`'s sign, so that zeros have both signs.
fn nearest_code(value: f32) -> u8 {
    let distance = |&code: &usize| (value.abs() - E2M1[code]).abs();
    let code = (0..8).min_by(|a, b| distance(a).total_cmp(&distance(b))).unwrap_or(0);
    code as u8 | if value < 0.0 { 8 } else { 0 }
}

/// Number `index` of the random stream `key`, by SplitMix64, which computes any number of a stream directly.
pub fn random(key: u64, index: u64) -> u64 {
    let mut z = key.wrapping_add(index.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ z >> 31
}
