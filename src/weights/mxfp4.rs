//! Rows of MXFP4 in the one form that is packed, from float32 or from blocks that are stored as MXFP4.
//!
//! Of all scales that hold a block's values, the form has the smallest: the block's largest magnitude is then 4 or 6
//! times the scale. A block of zeros has scale 127. Kernels read scales 1 to 252 and no value that is subnormal, so a
//! block that would need another is no MXFP4 to them. Codes are two a byte, the even column's in the low half.

use crate::dtype::{MXFP4_BLOCK, MXFP4_BLOCK_BYTES};
use std::ops::RangeInclusive;

/// The scale of a block of zeros: 2^0.
const SCALE_OF_ZEROS: u8 = 127;

/// Encodes a row of float32; `false` if a block is not exact. A block's scale is the largest power of two not above its
/// largest magnitude, divided by four: E2M1's largest value is 6, so with a smaller scale the largest magnitude would
/// not fit, and a larger one has fewer bits for the others. If that scale is not exact, none is.
#[inline(always)]
pub fn encode(row: &[f32], codes: &mut [u8], scales: &mut [u8]) -> bool {
    let mut fits = true;
    let (blocks, _) = row.as_chunks::<MXFP4_BLOCK>();
    let (codes, _) = codes.as_chunks_mut::<MXFP4_BLOCK_BYTES>();
    for ((block, packed), scale) in blocks.iter().zip(codes).zip(scales) {
        let largest = block.iter().fold(0, |m, v| m.max(v.to_bits() & 0x7fff_ffff));
        let exponent = if largest == 0 {
            u32::from(SCALE_OF_ZEROS) + 2
        } else {
            largest >> 23
        };
        // Exponent 255 is infinite or NaN. Kernels do not support a scale of 0.
        fits &= exponent < 255 && exponent > 2;
        let e = exponent.wrapping_sub(2);
        *scale = e as u8;
        let mut misfit = 0;
        let mut codes = [0; MXFP4_BLOCK];
        for (code, v) in codes.iter_mut().zip(block) {
            // `step` is the exponent and the first bit of the mantissa, relative to the scale: 1, 1.5, 2, 3, 4, 6 times
            // the scale are steps 0 to 5, and 0.5 is step -2. The other bits of the mantissa must be 0.
            let bits = v.to_bits();
            let magnitude = bits & 0x7fff_ffff;
            let step = ((magnitude >> 22) as i32).wrapping_sub((e << 1) as i32);
            let zero = magnitude == 0;
            let half = step == -2;
            let normal = step >= 0;
            let m = if zero {
                0
            } else if half {
                1
            } else {
                step + 2
            };
            misfit |= u32::from(!(zero | half | normal)) | (magnitude & 0x003f_ffff);
            *code = (m as u32 & 7 | bits >> 31 << 3) as u8;
        }
        for (byte, pair) in packed.iter_mut().zip(codes.as_chunks::<2>().0) {
            *byte = pair[0] | pair[1] << 4;
        }
        fits &= misfit == 0;
    }
    fits
}

/// Blocks that are looked at together.
const RUN: usize = 32;

/// Scales at which kernels read all codes.
const SCALES: RangeInclusive<u8> = 2..=252;

/// Whether blocks have the form as they are stored, at scales at which kernels read all codes. Nearly all do.
#[inline(always)]
pub fn are_in_form(blocks: &[u8], scales: &[u8]) -> bool {
    let (blocks, _) = blocks.as_chunks::<MXFP4_BLOCK_BYTES>();
    for (blocks, scales) in blocks.chunks(RUN).zip(scales.chunks(RUN)) {
        if !is_run_in_form(blocks, scales, &mut [0; RUN]) {
            return false;
        }
    }
    true
}

/// The same of at most [`RUN`] blocks, of each of which `tops` becomes [`tops_of`]. No block has a branch of its own,
/// so that compilers look at several at once.
#[inline(always)]
fn is_run_in_form(blocks: &[[u8; MXFP4_BLOCK_BYTES]], scales: &[u8], tops: &mut [u64; RUN]) -> bool {
    let mut have_largest = true;
    for (tops, block) in tops.iter_mut().zip(blocks) {
        *tops = tops_of(u128::from_le_bytes(*block));
        have_largest &= *tops != 0;
    }
    scales
        .iter()
        .fold(have_largest, |all, scale| all & SCALES.contains(scale))
}

/// Takes a row of blocks as they are stored, and brings those into the form that do not have it; `false` if a block is
/// none to kernels.
#[inline(always)]
pub fn take(blocks: &[u8], stored: &[u8], codes: &mut [u8], scales: &mut [u8]) -> bool {
    codes.copy_from_slice(blocks);
    scales.copy_from_slice(stored);
    let mut fits = true;
    let (codes, _) = codes.as_chunks_mut::<MXFP4_BLOCK_BYTES>();
    for (codes, scales) in codes.chunks_mut(RUN).zip(scales.chunks_mut(RUN)) {
        let mut tops = [0; RUN];
        if is_run_in_form(codes, scales, &mut tops) {
            continue;
        }
        // Which ones are not, without a branch for each, since nobody can foretell which.
        let mut others = 0_u32;
        for (i, (scale, &tops)) in scales.iter().zip(&tops).enumerate() {
            others |= u32::from(tops == 0 || !SCALES.contains(scale)) << i;
        }
        while others != 0 {
            let i = others.trailing_zeros() as usize;
            others &= others - 1;
            fits &= bring_into_form(&mut codes[i], &mut scales[i]);
        }
    }
    fits
}

/// Doubles a block's codes and halves its scale until it has the form; `false` if it is none to kernels.
fn bring_into_form(block: &mut [u8; MXFP4_BLOCK_BYTES], scale: &mut u8) -> bool {
    let mut codes = u128::from_le_bytes(*block);
    if *scale == 255 {
        return false;
    }
    if codes & (7 * EACH) == 0 {
        *scale = SCALE_OF_ZEROS;
        return true;
    }
    while tops_of(codes) == 0 {
        codes = doubled(codes);
        *scale = scale.saturating_sub(1);
    }
    *block = codes.to_le_bytes();
    match *scale {
        // Half of this scale is subnormal.
        1 => halves(codes) == 0,
        scale => SCALES.contains(&scale),
    }
}

/// The lowest bit of each code. The magnitudes 0, 0.5, 1, 1.5, 2, 3, 4 and 6 have codes 0 to 7.
const EACH: u128 = u128::MAX / 15;

/// Not 0 if one of a block's codes is 4 or 6 times its scale.
#[inline(always)]
fn tops_of(codes: u128) -> u64 {
    let tops = |codes: u64| (codes >> 1) & (codes >> 2) & EACH as u64;
    tops(codes as u64) | tops((codes >> 64) as u64)
}

/// The lowest bits of the codes that are half their scale.
fn halves(codes: u128) -> u128 {
    codes & !(codes >> 1) & !(codes >> 2) & EACH
}

/// All codes twice as large, none of which is 4 or more: 0.5 becomes the next code, larger ones the next but one.
fn doubled(codes: u128) -> u128 {
    codes + halves(codes) + 2 * (((codes >> 1) | (codes >> 2)) & EACH)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::{E2M1, e8m0_to_f32};

    /// What was stored, by way of float32.
    fn by_float32(blocks: &[u8], stored: &[u8]) -> Option<(Vec<u8>, Vec<u8>)> {
        let value = |i: usize| {
            let code = (blocks[i / 2] >> (4 * (i % 2))) & 15;
            E2M1[usize::from(code)] * e8m0_to_f32(stored[i / MXFP4_BLOCK])
        };
        let values: Vec<f32> = (0..2 * blocks.len()).map(value).collect();
        let (mut codes, mut scales) = (vec![0; blocks.len()], vec![0; stored.len()]);
        encode(&values, &mut codes, &mut scales).then_some((codes, scales))
    }

    #[track_caller]
    fn check(blocks: &[u8], stored: &[u8]) {
        let (mut codes, mut scales) = (vec![0xff; blocks.len()], vec![0xff; stored.len()]);
        let taken = take(blocks, stored, &mut codes, &mut scales).then_some((codes, scales));
        assert_eq!(taken, by_float32(blocks, stored), "{blocks:x?} {stored:?}");
    }

    /// The codes of a block whose magnitudes are among `set`, a bit for each of the eight, all of them there.
    fn block_of(set: u32, signs: u32) -> [u8; MXFP4_BLOCK_BYTES] {
        let magnitudes: Vec<u8> = (0..8).filter(|code| set >> code & 1 != 0).collect();
        let code = |i: usize| {
            let magnitude = magnitudes[(i * 7 + 3) % magnitudes.len()];
            magnitude | ((signs >> i & 1) as u8 * 8)
        };
        std::array::from_fn(|byte| code(2 * byte) | code(2 * byte + 1) << 4)
    }

    /// Every set of magnitudes that a block can have, at every scale: whether it is taken, its codes and its scale are
    /// those that its values give.
    #[test]
    fn a_stored_block_is_taken_as_its_values_would_be() {
        for set in 1..256 {
            let signs = [0, u32::MAX, 0x9e37_79b9_u32.rotate_left(set)];
            for scale in 0..=255 {
                signs.iter().for_each(|&signs| check(&block_of(set, signs), &[scale]));
            }
        }
    }

    /// One code at every place of a block of zeros.
    #[test]
    fn every_code_counts() {
        for place in 0..MXFP4_BLOCK {
            for code in 0..16 {
                let mut block = [0; MXFP4_BLOCK_BYTES];
                block[place / 2] = code << (4 * (place % 2));
                for scale in [0, 1, 2, 3, 4, 127, 252, 253, 254, 255] {
                    check(&block, &[scale]);
                }
            }
        }
    }

    /// Rows of several blocks, in the form and not, with one that is none at every place.
    #[test]
    fn a_row_is_its_blocks() {
        let kinds = [
            (block_of(0xff, 0x5555_5555), 120),
            (block_of(0x0f, 0x1234_5678), 130),
            (block_of(0x01, 0xffff_0000), 7),
            (block_of(0x80, 0), 252),
        ];
        for length in [1, 2, 5, 90] {
            let row: Vec<_> = (0..length).map(|i| kinds[i * i % 4]).collect();
            let check = |row: &[([u8; MXFP4_BLOCK_BYTES], u8)]| {
                let (blocks, scales): (Vec<_>, Vec<_>) = row.iter().copied().unzip();
                check(blocks.as_flattened(), &scales);
            };
            check(&row);
            check(&vec![kinds[0]; length]);
            for at in 0..length {
                for scale in [0, 1, 253, 255] {
                    let mut row = row.clone();
                    row[at].1 = scale;
                    check(&row);
                }
            }
        }
    }
}
