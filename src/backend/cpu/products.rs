//! The inner loops of matrix products: one tile of 32 rows times one block of tokens. `gemm.rs` explains them.
//!
//! Where the compiler or the machine needs help (measured on Zen 4, AVX-512):
//!
//! - LLVM takes a chain of `vpdpwssd` apart into products and sums; the instruction is therefore inline assembly
//!   (`simd/avx512.rs`).
//! - Broadcasting a word by a float load and using it in an integer dot product costs a third of the rate; the assembly
//!   broadcasts in the dot product's memory operand instead.
//! - `exact`: products of eight lanes go straight into the conversion to float64; products of sixteen would have to be
//!   split first (4.3 instead of 5.3 cycles for 16 products in a loop that does nothing else).
//! - Where arithmetic and memory take about equal time, they do not overlap by themselves; prefetching 16 KiB ahead
//!   into L2, and 2 MiB pages, make them overlap. Where memory alone is the limit, prefetching slows it down.
//! - With one or two tokens an expert, decoding MXFP4 takes 58 cycles for 32 columns of 32 rows, which the memory
//!   delivers in 65. One byte permutation decodes 32 codes, since the instruction takes its index modulo the table's
//!   length.

use super::mode::{ComputeMode, Encoding, MAX_TOKENS};
use super::tiles::{Sums, TILE};
use crate::dtype::MXFP4_BLOCK;
use crate::options::Precision;
use crate::simd::{LANES, Simd, VectorCode};
use crate::weights::WeightFormat;

/// One tile times one block. It is a kernel of its own so that it is compiled once for each instruction set, and not
/// once more for each epilogue.
pub struct Product<'a> {
    pub mode: ComputeMode,
    /// The encoding of the block's words.
    pub encoding: Encoding,
    /// The tile's format.
    pub format: WeightFormat,
    pub args: Args<'a>,
    /// Output: each token's sums.
    pub sums: &'a mut [Sums; MAX_TOKENS],
}

impl VectorCode for Product<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        macro_rules! by_tokens {
            ($($t:literal)*) => {
                match self.args.scales.len() {
                    // SAFETY: `args` holds a tile and a block in the layouts that the kernels read, `sums` has an
                    // element for each token.
                    $($t if const { $t <= S::TOKENS } => unsafe {
                        let sums = product::<S, $t>(self.mode.precision, self.encoding, self.format, self.args);
                        for (out, sums) in self.sums.iter_mut().zip(sums) {
                            S::store(out.as_mut_ptr(), sums[0]);
                            S::store(out.as_mut_ptr().add(LANES), sums[1]);
                        }
                    },)*
                    _ => unreachable!("blocks have at most {MAX_TOKENS} tokens"),
                }
            };
        }
        by_tokens!(1 2 3 4 5 6 7 8 9 10 11 12);
    }
}

/// A tile and a block of tokens.
#[derive(Clone, Copy)]
pub struct Args<'a> {
    /// The tile's bytes.
    pub weights: &'a [u8],
    /// Columns of the tile.
    pub cols: usize,
    /// The block's words, `[word][token]`.
    pub words: &'a [u32],
    /// The scale of each token in the block.
    pub scales: &'a [f32],
}

/// The sums of the tile's rows for `T` tokens.
#[inline(always)]
unsafe fn product<S: Simd, const T: usize>(
    precision: Precision,
    encoding: Encoding,
    format: WeightFormat,
    args: Args<'_>,
) -> [[S::F; 2]; T] {
    // SAFETY: guaranteed by our caller.
    unsafe {
        match (precision, encoding, format) {
            (Precision::Fast, Encoding::Bf16Pairs, _) => dot_bf16::<S, T>(args),
            (Precision::Fast, Encoding::I16Pairs, _) => dot_mxfp4::<S, T>(args),
            (Precision::Fast, Encoding::F32, WeightFormat::F32) => multiply_add::<S, ColumnF32, T>(args),
            (Precision::Fast, Encoding::F32, WeightFormat::Bf16) => multiply_add::<S, ColumnsBf16, T>(args),
            (Precision::Fast, Encoding::F32, WeightFormat::Mxfp4) => multiply_add::<S, ColumnsMxfp4, T>(args),
            (Precision::Exact, _, WeightFormat::F32) => sum_in_f64::<S, ColumnF32, T>(args),
            (Precision::Exact, _, WeightFormat::Bf16) => sum_in_f64::<S, ColumnsBf16, T>(args),
            (Precision::Exact, _, WeightFormat::Mxfp4) => sum_in_f64::<S, ColumnsMxfp4, T>(args),
        }
    }
}

/// How far ahead weights are prefetched into the L2 cache: enough to cover the latency of DRAM at a core's share of the
/// bandwidth. That is in the same tile or the next.
const PREFETCH_BYTES: usize = 16 << 10;

/// Prefetches the weights `PREFETCH_BYTES` after `w`; that address may be past the end of the matrix.
#[inline(always)]
unsafe fn prefetch<S: Simd>(w: *const u32) {
    // SAFETY: a prefetch accepts any address.
    unsafe { S::prefetch(w.cast::<u8>().wrapping_add(PREFETCH_BYTES)) }
}

#[inline(always)]
unsafe fn dot_bf16<S: Simd, const T: usize>(args: Args<'_>) -> [[S::F; 2]; T] {
    // SAFETY: a tile has two vectors for each column pair, the block a word for each pair and token.
    unsafe {
        let mut sums = [[S::splat(0.0); 2]; T];
        let (mut w, mut x) = (args.weights.as_ptr().cast::<u32>(), args.words.as_ptr());
        for _ in 0..args.cols.div_ceil(2) {
            let (w0, w1) = (S::i_load(w), S::i_load(w.add(LANES)));
            // With fewer tokens memory bandwidth is the limit, and prefetching makes it slower.
            if T > 2 {
                prefetch::<S>(w);
                prefetch::<S>(w.wrapping_add(LANES));
            }
            for (t, sums) in sums.iter_mut().enumerate() {
                sums[0] = S::dot_bf16(sums[0], w0, x.add(t));
                sums[1] = S::dot_bf16(sums[1], w1, x.add(t));
            }
            w = w.add(TILE);
            x = x.add(T);
        }
        sums
    }
}

#[inline(always)]
unsafe fn dot_mxfp4<S: Simd, const T: usize>(args: Args<'_>) -> [[S::F; 2]; T] {
    // SAFETY: guaranteed by our caller.
    unsafe {
        let mut out = [[S::splat(0.0); 2]; T];
        // With few tokens: both vectors together, and several accumulators for each sum, to hide the dot product's
        // latency. With many, the integer and float32 sums of one vector fill the registers.
        match T {
            1 | 2 => dot_mxfp4_vectors::<S, T, 2, 4>(args, 0, &mut out),
            3 | 4 => dot_mxfp4_vectors::<S, T, 2, 2>(args, 0, &mut out),
            5 | 6 => dot_mxfp4_vectors::<S, T, 2, 1>(args, 0, &mut out),
            _ => {
                dot_mxfp4_vectors::<S, T, 1, 1>(args, 0, &mut out);
                dot_mxfp4_vectors::<S, T, 1, 1>(args, 1, &mut out);
            }
        }
        out
    }
}

/// Computes vectors `first..first + V` of the tile. Each sum over a block of 32 columns is split over `C` accumulators;
/// since these are integers, that does not change the result.
#[inline(always)]
unsafe fn dot_mxfp4_vectors<S: Simd, const T: usize, const V: usize, const C: usize>(
    args: Args<'_>,
    first: usize,
    out: &mut [[S::F; 2]; T],
) {
    // SAFETY: a tile has four column groups of two vectors for each block of 32 columns, then the scales; the block
    // of tokens has a word for each column pair and token.
    unsafe {
        let mut sums = [[S::splat(0.0); V]; T];
        let mut w = args.weights.as_ptr().cast::<u32>().add(first * LANES);
        let mut x = args.words.as_ptr();
        let mut scales = args.weights.as_ptr().add(args.cols / 8 * TILE * 4 + first * LANES);
        for _ in 0..args.cols / MXFP4_BLOCK {
            let mut block = [[[S::i_zero(); C]; V]; T];
            for _ in 0..4 {
                let words: [S::I; V] = std::array::from_fn(|v| S::i_load(w.add(v * LANES)));
                for v in 0..V {
                    prefetch::<S>(w.wrapping_add(v * LANES));
                }
                macro_rules! pair {
                    ($index:literal) => {
                        for v in 0..V {
                            let d = S::e2m1_words::<{ 4 * $index }>(words[v]);
                            for t in 0..T {
                                block[t][v][$index % C] = S::dot_i16(block[t][v][$index % C], d, x.add($index * T + t));
                            }
                        }
                    };
                }
                pair!(0);
                pair!(1);
                pair!(2);
                pair!(3);
                w = w.add(TILE);
                x = x.add(4 * T);
            }
            for v in 0..V {
                let scale = S::scales(scales.add(v * LANES));
                for t in 0..T {
                    let mut sum = block[t][v][0];
                    for &chain in &block[t][v][1..] {
                        sum = S::i_add(sum, chain);
                    }
                    sums[t][v] = S::fma(S::i_to_f(sum), scale, sums[t][v]);
                }
            }
            scales = scales.add(TILE);
        }
        for (t, sums) in sums.into_iter().enumerate() {
            for (v, sum) in sums.into_iter().enumerate() {
                out[t][first + v] = S::mul(sum, S::splat(args.scales[t]));
            }
        }
    }
}

/// Decodes a format's words to float32.
trait Columns {
    /// Columns in a word.
    const COLUMNS: usize;
    /// The values of one vector of word `group` of the tile: a vector for each of its `COLUMNS` columns. The other
    /// elements of the result are not used.
    unsafe fn decode<S: Simd>(args: &Args<'_>, group: usize, vector: usize) -> [S::F; 8];
}

#[inline(always)]
unsafe fn word(args: &Args<'_>, group: usize, vector: usize) -> *const u32 {
    // SAFETY: the caller guarantees that the group and the vector are in the tile.
    unsafe { args.weights.as_ptr().cast::<u32>().add(group * TILE + vector * LANES) }
}

struct ColumnF32;
struct ColumnsBf16;
struct ColumnsMxfp4;

impl Columns for ColumnF32 {
    const COLUMNS: usize = 1;
    #[inline(always)]
    unsafe fn decode<S: Simd>(args: &Args<'_>, group: usize, vector: usize) -> [S::F; 8] {
        // SAFETY: guaranteed by our caller.
        unsafe { [S::load(word(args, group, vector).cast()); 8] }
    }
}

impl Columns for ColumnsBf16 {
    const COLUMNS: usize = 2;
    #[inline(always)]
    unsafe fn decode<S: Simd>(args: &Args<'_>, group: usize, vector: usize) -> [S::F; 8] {
        // SAFETY: guaranteed by our caller.
        unsafe {
            let w = S::i_load(word(args, group, vector));
            let (low, high) = (S::bf16_low(w), S::bf16_high(w));
            [low, high, low, high, low, high, low, high]
        }
    }
}

impl Columns for ColumnsMxfp4 {
    const COLUMNS: usize = 8;
    #[inline(always)]
    unsafe fn decode<S: Simd>(args: &Args<'_>, group: usize, vector: usize) -> [S::F; 8] {
        // SAFETY: guaranteed by our caller; after the words the tile has scales, one for each row and four groups.
        unsafe {
            let w = S::i_load(word(args, group, vector));
            let scales = args
                .weights
                .as_ptr()
                .add(args.cols / 8 * TILE * 4 + group / 4 * TILE + vector * LANES);
            let scale = S::scales(scales);
            [
                S::mul(S::e2m1::<0>(w), scale),
                S::mul(S::e2m1::<16>(w), scale),
                S::mul(S::e2m1::<4>(w), scale),
                S::mul(S::e2m1::<20>(w), scale),
                S::mul(S::e2m1::<8>(w), scale),
                S::mul(S::e2m1::<24>(w), scale),
                S::mul(S::e2m1::<12>(w), scale),
                S::mul(S::e2m1::<28>(w), scale),
            ]
        }
    }
}

/// The Euclidean norms of a tile's rows, rounded up.
pub struct RowNorms<'a> {
    /// The tile, and a block without tokens.
    pub args: Args<'a>,
    /// The tile's format.
    pub format: WeightFormat,
}

impl VectorCode for RowNorms<'_> {
    type Output = Sums;

    #[inline(always)]
    fn run<S: Simd>(self, _: S) -> Sums {
        // SAFETY: `args` holds a tile of this format.
        unsafe {
            match self.format {
                WeightFormat::F32 => row_norms::<S, ColumnF32>(self.args),
                WeightFormat::Bf16 => row_norms::<S, ColumnsBf16>(self.args),
                WeightFormat::Mxfp4 => row_norms::<S, ColumnsMxfp4>(self.args),
            }
        }
    }
}

#[inline(always)]
unsafe fn row_norms<S: Simd, C: Columns>(args: Args<'_>) -> Sums {
    let mut norms = [0.0_f32; TILE];
    // SAFETY: guaranteed by our caller; the norms are two vectors.
    unsafe {
        let mut sums = [S::splat(0.0); 2];
        for group in 0..args.cols.div_ceil(C::COLUMNS) {
            for (vector, sum) in sums.iter_mut().enumerate() {
                for &w in C::decode::<S>(&args, group, vector).iter().take(C::COLUMNS) {
                    *sum = S::fma(w, w, *sum);
                }
            }
        }
        S::store(norms.as_mut_ptr(), sums[0]);
        S::store(norms.as_mut_ptr().add(LANES), sums[1]);
    }
    // A square that underflows is too small by at most the smallest normal number. The factor covers rounding in the
    // sum.
    let lacking = args.cols as f32 * f32::MIN_POSITIVE;
    norms.map(|squares| (squares + lacking).sqrt() * 1.001)
}

#[inline(always)]
unsafe fn multiply_add<S: Simd, C: Columns, const T: usize>(args: Args<'_>) -> [[S::F; 2]; T] {
    // SAFETY: the tile has all groups, and the block of tokens a word for each column and token.
    unsafe {
        let mut sums = [[S::splat(0.0); 2]; T];
        for group in 0..args.cols.div_ceil(C::COLUMNS) {
            let (w0, w1) = (C::decode::<S>(&args, group, 0), C::decode::<S>(&args, group, 1));
            let x = args.words.as_ptr().cast::<f32>().add(group * C::COLUMNS * T);
            for c in 0..C::COLUMNS {
                for (t, sums) in sums.iter_mut().enumerate() {
                    let x = S::splat(x.add(c * T + t).read());
                    sums[0] = S::fma(w0[c], x, sums[0]);
                    sums[1] = S::fma(w1[c], x, sums[1]);
                }
            }
        }
        sums
    }
}

#[inline(always)]
unsafe fn sum_in_f64<S: Simd, C: Columns, const T: usize>(args: Args<'_>) -> [[S::F; 2]; T] {
    // SAFETY: as in `multiply_add`.
    unsafe {
        let mut out = [[S::splat(0.0); 2]; T];
        for vector in 0..2 {
            let mut sums = [S::d_zero(); T];
            for group in 0..args.cols.div_ceil(C::COLUMNS) {
                let w = C::decode::<S>(&args, group, vector);
                let x = args.words.as_ptr().cast::<f32>().add(group * C::COLUMNS * T);
                for (c, &w) in w.iter().enumerate().take(C::COLUMNS) {
                    for (t, sum) in sums.iter_mut().enumerate() {
                        *sum = S::d_add_product(*sum, w, x.add(c * T + t).read());
                    }
                }
            }
            for (out, sum) in out.iter_mut().zip(sums) {
                out[vector] = S::d_round(sum);
            }
        }
        out
    }
}
