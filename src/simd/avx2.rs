//! AVX2 with FMA and F16C (Haswell, Zen and later): two registers of eight.
#![allow(clippy::missing_safety_doc, reason = "the contract stands at the trait")]

use super::{LANES, Simd, VectorCode};
use crate::dtype::E2M1;
use half::f16;
use std::arch::x86_64::*;

/// Proof that this machine has AVX2, FMA and F16C.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Avx2(());

/// Two registers of eight float32.
#[derive(Clone, Copy)]
pub struct F32x16(__m256, __m256);

/// Two registers of eight words.
#[derive(Clone, Copy)]
pub struct U32x16(__m256i, __m256i);

/// Four registers of four float64.
#[derive(Clone, Copy)]
pub struct F64x16([__m256d; 4]);

/// Makes four float64 registers, one after the other. A macro and not a closure: a closure is compiled without the
/// instruction set, so where it is not inlined, intrinsics in it become calls.
macro_rules! each {
    ($i:ident => $made:expr) => {
        F64x16([
            each!(@ $i 0, $made),
            each!(@ $i 1, $made),
            each!(@ $i 2, $made),
            each!(@ $i 3, $made),
        ])
    };
    (@ $i:ident $index:literal, $made:expr) => {{
        const $i: usize = $index;
        $made
    }};
}

#[target_feature(enable = "avx2,fma,f16c")]
fn enabled<K: VectorCode>(simd: Avx2, kernel: K) -> K::Output {
    kernel.run(simd)
}

// SAFETY: `new` checks for every feature that the methods use, and nothing else makes a value.
#[allow(
    clippy::undocumented_unsafe_blocks,
    reason = "each block is a few instructions under the trait's contract"
)]
unsafe impl Simd for Avx2 {
    const NAME: &'static str = "AVX2";
    const DOT: bool = false;
    const TOKENS: usize = 2;
    type F = F32x16;
    type I = U32x16;
    type D = F64x16;

    fn new() -> Option<Self> {
        let detected =
            is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c");
        detected.then_some(Self(()))
    }

    fn vectorize<K: VectorCode>(self, kernel: K) -> K::Output {
        // SAFETY: `self` proves that the machine has the features.
        unsafe { enabled(self, kernel) }
    }

    #[inline(always)]
    unsafe fn splat(x: f32) -> F32x16 {
        unsafe { F32x16(_mm256_set1_ps(x), _mm256_set1_ps(x)) }
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> F32x16 {
        unsafe { F32x16(_mm256_loadu_ps(p), _mm256_loadu_ps(p.add(8))) }
    }
    #[inline(always)]
    unsafe fn store(p: *mut f32, x: F32x16) {
        unsafe {
            _mm256_storeu_ps(p, x.0);
            _mm256_storeu_ps(p.add(8), x.1);
        }
    }
    #[inline(always)]
    unsafe fn add(a: F32x16, b: F32x16) -> F32x16 {
        unsafe { F32x16(_mm256_add_ps(a.0, b.0), _mm256_add_ps(a.1, b.1)) }
    }
    #[inline(always)]
    unsafe fn sub(a: F32x16, b: F32x16) -> F32x16 {
        unsafe { F32x16(_mm256_sub_ps(a.0, b.0), _mm256_sub_ps(a.1, b.1)) }
    }
    #[inline(always)]
    unsafe fn mul(a: F32x16, b: F32x16) -> F32x16 {
        unsafe { F32x16(_mm256_mul_ps(a.0, b.0), _mm256_mul_ps(a.1, b.1)) }
    }
    #[inline(always)]
    unsafe fn div(a: F32x16, b: F32x16) -> F32x16 {
        unsafe { F32x16(_mm256_div_ps(a.0, b.0), _mm256_div_ps(a.1, b.1)) }
    }
    #[inline(always)]
    unsafe fn fma(a: F32x16, b: F32x16, c: F32x16) -> F32x16 {
        unsafe { F32x16(_mm256_fmadd_ps(a.0, b.0, c.0), _mm256_fmadd_ps(a.1, b.1, c.1)) }
    }
    #[inline(always)]
    unsafe fn max(a: F32x16, b: F32x16) -> F32x16 {
        unsafe { F32x16(_mm256_max_ps(a.0, b.0), _mm256_max_ps(a.1, b.1)) }
    }
    #[inline(always)]
    unsafe fn min(a: F32x16, b: F32x16) -> F32x16 {
        unsafe { F32x16(_mm256_min_ps(a.0, b.0), _mm256_min_ps(a.1, b.1)) }
    }

    #[inline(always)]
    unsafe fn at_least(a: F32x16, b: F32x16) -> u32 {
        unsafe {
            let low = _mm256_movemask_ps(_mm256_cmp_ps::<_CMP_GE_OQ>(a.0, b.0));
            let high = _mm256_movemask_ps(_mm256_cmp_ps::<_CMP_GE_OQ>(a.1, b.1));
            (low | high << 8) as u32
        }
    }
    #[inline(always)]
    unsafe fn i_zero() -> U32x16 {
        unsafe { U32x16(_mm256_setzero_si256(), _mm256_setzero_si256()) }
    }
    #[inline(always)]
    unsafe fn i_load(p: *const u32) -> U32x16 {
        unsafe { U32x16(_mm256_loadu_si256(p.cast()), _mm256_loadu_si256(p.add(8).cast())) }
    }
    #[inline(always)]
    unsafe fn i_add(a: U32x16, b: U32x16) -> U32x16 {
        unsafe { U32x16(_mm256_add_epi32(a.0, b.0), _mm256_add_epi32(a.1, b.1)) }
    }
    #[inline(always)]
    unsafe fn i_shl<const BITS: u32>(a: U32x16) -> U32x16 {
        unsafe {
            let by = _mm_cvtsi32_si128(BITS.cast_signed());
            U32x16(_mm256_sll_epi32(a.0, by), _mm256_sll_epi32(a.1, by))
        }
    }
    #[inline(always)]
    unsafe fn i_to_f(a: U32x16) -> F32x16 {
        unsafe { F32x16(_mm256_cvtepi32_ps(a.0), _mm256_cvtepi32_ps(a.1)) }
    }
    #[inline(always)]
    unsafe fn bits(a: F32x16) -> U32x16 {
        unsafe { U32x16(_mm256_castps_si256(a.0), _mm256_castps_si256(a.1)) }
    }
    #[inline(always)]
    unsafe fn from_bits(a: U32x16) -> F32x16 {
        unsafe { F32x16(_mm256_castsi256_ps(a.0), _mm256_castsi256_ps(a.1)) }
    }

    #[inline(always)]
    unsafe fn d_zero() -> F64x16 {
        unsafe { F64x16([_mm256_setzero_pd(); 4]) }
    }
    #[inline(always)]
    unsafe fn d_add(sum: F64x16, x: F32x16) -> F64x16 {
        unsafe {
            let wide = [
                _mm256_castps256_ps128(x.0),
                _mm256_extractf128_ps::<1>(x.0),
                _mm256_castps256_ps128(x.1),
                _mm256_extractf128_ps::<1>(x.1),
            ];
            each!(I => _mm256_add_pd(sum.0[I], _mm256_cvtps_pd(wide[I])))
        }
    }
    #[inline(always)]
    unsafe fn d_round(sum: F64x16) -> F32x16 {
        unsafe {
            let s = sum.0;
            F32x16(
                _mm256_set_m128(_mm256_cvtpd_ps(s[1]), _mm256_cvtpd_ps(s[0])),
                _mm256_set_m128(_mm256_cvtpd_ps(s[3]), _mm256_cvtpd_ps(s[2])),
            )
        }
    }
    #[inline(always)]
    unsafe fn d_splat(x: f64) -> F64x16 {
        unsafe { F64x16([_mm256_set1_pd(x); 4]) }
    }
    #[inline(always)]
    unsafe fn d_sub(a: F64x16, b: F64x16) -> F64x16 {
        unsafe { each!(I => _mm256_sub_pd(a.0[I], b.0[I])) }
    }
    #[inline(always)]
    unsafe fn d_mul(a: F64x16, b: F64x16) -> F64x16 {
        unsafe { each!(I => _mm256_mul_pd(a.0[I], b.0[I])) }
    }
    #[inline(always)]
    unsafe fn d_fma(a: F64x16, b: F64x16, c: F64x16) -> F64x16 {
        unsafe { each!(I => _mm256_fmadd_pd(a.0[I], b.0[I], c.0[I])) }
    }
    #[inline(always)]
    unsafe fn d_lookup<const SHIFT: u32>(table: &[u64; 32], index: F64x16) -> F64x16 {
        unsafe { each!(I => lookup::<SHIFT>(table, index.0[I])) }
    }
    #[inline(always)]
    unsafe fn d_store(p: *mut f64, x: F64x16) {
        unsafe {
            for (i, part) in x.0.into_iter().enumerate() {
                _mm256_storeu_pd(p.add(4 * i), part);
            }
        }
    }

    #[inline(always)]
    unsafe fn bf16_low(w: U32x16) -> F32x16 {
        unsafe { Self::from_bits(Self::i_shl::<16>(w)) }
    }
    #[inline(always)]
    unsafe fn bf16_high(w: U32x16) -> F32x16 {
        unsafe {
            let mask = _mm256_set1_epi32(0xffff_0000_u32.cast_signed());
            Self::from_bits(U32x16(_mm256_and_si256(w.0, mask), _mm256_and_si256(w.1, mask)))
        }
    }
    #[inline(always)]
    unsafe fn e2m1<const SHIFT: u32>(w: U32x16) -> F32x16 {
        // The permutation looks up the magnitude by the low three bits of the code; the fourth bit becomes the sign.
        unsafe {
            let magnitudes = _mm256_loadu_ps(E2M1.as_ptr());
            let down = _mm_cvtsi32_si128(SHIFT.cast_signed());
            let up = _mm_cvtsi32_si128(28 - SHIFT.cast_signed());
            let sign = _mm256_set1_epi32(i32::MIN);
            let value = |half| {
                let magnitude = _mm256_permutevar8x32_ps(magnitudes, _mm256_srl_epi32(half, down));
                let sign = _mm256_and_si256(_mm256_sll_epi32(half, up), sign);
                _mm256_or_ps(magnitude, _mm256_castsi256_ps(sign))
            };
            F32x16(value(w.0), value(w.1))
        }
    }
    #[inline(always)]
    unsafe fn scales(p: *const u8) -> F32x16 {
        unsafe {
            let low = _mm256_cvtepu8_epi32(_mm_loadl_epi64(p.cast()));
            let high = _mm256_cvtepu8_epi32(_mm_loadl_epi64(p.add(8).cast()));
            Self::from_bits(Self::i_shl::<23>(U32x16(low, high)))
        }
    }
    #[inline(always)]
    unsafe fn load_f16(p: *const f16) -> F32x16 {
        unsafe {
            F32x16(
                _mm256_cvtph_ps(_mm_loadu_si128(p.cast())),
                _mm256_cvtph_ps(_mm_loadu_si128(p.add(8).cast())),
            )
        }
    }
    #[inline(always)]
    unsafe fn store_f16(p: *mut f16, x: F32x16) {
        unsafe {
            _mm_storeu_si128(p.cast(), _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(x.0));
            _mm_storeu_si128(p.add(8).cast(), _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(x.1));
        }
    }

    #[inline(always)]
    unsafe fn transpose(rows: &[[u32; LANES]; LANES]) -> [[u32; LANES]; LANES] {
        let mut columns = [[0; LANES]; LANES];
        unsafe {
            for first_row in [0, 8] {
                for first in [0, 8] {
                    // Half h of fours[g][c] is column 4 h + c of rows 4 g to 4 g + 3, of eight columns from `first`.
                    let mut fours = [[_mm256_setzero_si256(); 4]; 2];
                    for (g, four) in fours.iter_mut().enumerate() {
                        let row = |i: usize| rows[first_row + 4 * g + i][first..].as_ptr().cast();
                        let [a, b, c, d] = [row(0), row(1), row(2), row(3)];
                        let (a, b) = (_mm256_loadu_si256(a), _mm256_loadu_si256(b));
                        let (c, d) = (_mm256_loadu_si256(c), _mm256_loadu_si256(d));
                        let (ab, cd) = (_mm256_unpacklo_epi32(a, b), _mm256_unpacklo_epi32(c, d));
                        four[0] = _mm256_unpacklo_epi64(ab, cd);
                        four[1] = _mm256_unpackhi_epi64(ab, cd);
                        let (ab, cd) = (_mm256_unpackhi_epi32(a, b), _mm256_unpackhi_epi32(c, d));
                        four[2] = _mm256_unpacklo_epi64(ab, cd);
                        four[3] = _mm256_unpackhi_epi64(ab, cd);
                    }
                    for c in 0..4 {
                        let low = _mm256_permute2x128_si256::<0x20>(fours[0][c], fours[1][c]);
                        let high = _mm256_permute2x128_si256::<0x31>(fours[0][c], fours[1][c]);
                        _mm256_storeu_si256(columns[first + c][first_row..].as_mut_ptr().cast(), low);
                        _mm256_storeu_si256(columns[first + 4 + c][first_row..].as_mut_ptr().cast(), high);
                    }
                }
            }
        }
        columns
    }
    #[inline(always)]
    unsafe fn prefetch(p: *const u8) {
        unsafe { _mm_prefetch::<_MM_HINT_T1>(p.cast()) }
    }

    unsafe fn dot_bf16(_: F32x16, _: U32x16, _: *const u32) -> F32x16 {
        unreachable!("DOT is false")
    }
    unsafe fn e2m1_words<const SHIFT: u32>(_: U32x16) -> U32x16 {
        unreachable!("DOT is false")
    }
    unsafe fn dot_i16(_: U32x16, _: U32x16, _: *const u32) -> U32x16 {
        unreachable!("DOT is false")
    }
}

/// `table[index % 32] + (index << SHIFT)` of four words. Scalar loads are no slower than a gather, and on many machines
/// faster.
///
/// # Safety
/// The machine has the instruction set; to be fast, called inside [`Simd::vectorize`].
#[inline(always)]
unsafe fn lookup<const SHIFT: u32>(table: &[u64; 32], index: __m256d) -> __m256d {
    // SAFETY: the caller guarantees the instructions; `lanes` has four words.
    unsafe {
        let index = _mm256_castpd_si256(index);
        let mut lanes = [0_u64; 4];
        _mm256_storeu_si256(lanes.as_mut_ptr().cast(), index);
        let word = |lane: usize| table[lanes[lane] as usize % 32].cast_signed();
        let found = _mm256_set_epi64x(word(3), word(2), word(1), word(0));
        let shifted = _mm256_sll_epi64(index, _mm_cvtsi32_si128(SHIFT as i32));
        _mm256_castsi256_pd(_mm256_add_epi64(found, shifted))
    }
}
