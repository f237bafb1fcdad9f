//! AVX-512 with BF16 dot products and VNNI (Cooper Lake, Sapphire Rapids, Zen 4 and later).
#![allow(clippy::missing_safety_doc, reason = "the contract stands at the trait")]

use super::{LANES, Simd, VectorCode};
use crate::dtype::E2M1;
use half::f16;
use std::arch::x86_64::*;

/// Proof that this machine has AVX-512 with BF16 and VNNI.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Avx512(());

/// Two registers of eight float64.
#[derive(Clone, Copy)]
pub struct F64x16(__m512d, __m512d);

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx512vnni,avx2,fma,f16c")]
fn enabled<K: VectorCode>(simd: Avx512, kernel: K) -> K::Output {
    kernel.run(simd)
}

// SAFETY: `new` checks for every feature that the methods use, and nothing else makes a value.
#[allow(
    clippy::undocumented_unsafe_blocks,
    reason = "each block is one instruction under the trait's contract"
)]
unsafe impl Simd for Avx512 {
    const NAME: &'static str = "AVX-512 BF16 VNNI";
    const DOT: bool = true;
    const TOKENS: usize = 12;
    type F = __m512;
    type I = __m512i;
    type D = F64x16;

    fn new() -> Option<Self> {
        let detected = is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512dq")
            && is_x86_feature_detected!("avx512vl")
            && is_x86_feature_detected!("avx512bf16")
            && is_x86_feature_detected!("avx512vnni")
            && is_x86_feature_detected!("fma")
            && is_x86_feature_detected!("f16c");
        detected.then_some(Self(()))
    }

    fn vectorize<K: VectorCode>(self, kernel: K) -> K::Output {
        // SAFETY: `self` proves that the machine has the features.
        unsafe { enabled(self, kernel) }
    }

    #[inline(always)]
    unsafe fn splat(x: f32) -> __m512 {
        unsafe { _mm512_set1_ps(x) }
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> __m512 {
        unsafe { _mm512_loadu_ps(p) }
    }
    #[inline(always)]
    unsafe fn store(p: *mut f32, x: __m512) {
        unsafe { _mm512_storeu_ps(p, x) }
    }
    #[inline(always)]
    unsafe fn add(a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_add_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn sub(a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_sub_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn mul(a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_mul_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn div(a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_div_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn fma(a: __m512, b: __m512, c: __m512) -> __m512 {
        unsafe { _mm512_fmadd_ps(a, b, c) }
    }
    #[inline(always)]
    unsafe fn max(a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_max_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn min(a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_min_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn at_least(a: __m512, b: __m512) -> u32 {
        unsafe { _mm512_cmp_ps_mask::<_CMP_GE_OQ>(a, b).into() }
    }

    #[inline(always)]
    unsafe fn i_zero() -> __m512i {
        unsafe { _mm512_setzero_si512() }
    }
    #[inline(always)]
    unsafe fn i_load(p: *const u32) -> __m512i {
        unsafe { _mm512_loadu_si512(p.cast()) }
    }
    #[inline(always)]
    unsafe fn i_add(a: __m512i, b: __m512i) -> __m512i {
        unsafe { _mm512_add_epi32(a, b) }
    }
    #[inline(always)]
    unsafe fn i_shl<const BITS: u32>(a: __m512i) -> __m512i {
        unsafe { _mm512_slli_epi32::<BITS>(a) }
    }
    #[inline(always)]
    unsafe fn i_to_f(a: __m512i) -> __m512 {
        unsafe { _mm512_cvtepi32_ps(a) }
    }
    #[inline(always)]
    unsafe fn bits(a: __m512) -> __m512i {
        unsafe { _mm512_castps_si512(a) }
    }
    #[inline(always)]
    unsafe fn from_bits(a: __m512i) -> __m512 {
        unsafe { _mm512_castsi512_ps(a) }
    }

    #[inline(always)]
    unsafe fn d_zero() -> F64x16 {
        unsafe { F64x16(_mm512_setzero_pd(), _mm512_setzero_pd()) }
    }
    #[inline(always)]
    unsafe fn d_add(sum: F64x16, x: __m512) -> F64x16 {
        unsafe {
            let high = _mm512_extractf32x8_ps::<1>(x);
            F64x16(
                _mm512_add_pd(sum.0, _mm512_cvtps_pd(_mm512_castps512_ps256(x))),
                _mm512_add_pd(sum.1, _mm512_cvtps_pd(high)),
            )
        }
    }
    #[inline(always)]
    unsafe fn d_add_product(sum: F64x16, w: __m512, x: f32) -> F64x16 {
        // Products of eight lanes can be widened at once; one of sixteen would have to be split first. The weight's
        // halves are split once for all tokens.
        unsafe {
            let x = _mm256_set1_ps(x);
            let low = _mm256_mul_ps(_mm512_castps512_ps256(w), x);
            let high = _mm256_mul_ps(_mm512_extractf32x8_ps::<1>(w), x);
            F64x16(
                _mm512_add_pd(sum.0, _mm512_cvtps_pd(low)),
                _mm512_add_pd(sum.1, _mm512_cvtps_pd(high)),
            )
        }
    }
    #[inline(always)]
    unsafe fn d_round(sum: F64x16) -> __m512 {
        unsafe { _mm512_insertf32x8::<1>(_mm512_castps256_ps512(_mm512_cvtpd_ps(sum.0)), _mm512_cvtpd_ps(sum.1)) }
    }
    #[inline(always)]
    unsafe fn d_splat(x: f64) -> F64x16 {
        unsafe { F64x16(_mm512_set1_pd(x), _mm512_set1_pd(x)) }
    }
    #[inline(always)]
    unsafe fn d_sub(a: F64x16, b: F64x16) -> F64x16 {
        unsafe { F64x16(_mm512_sub_pd(a.0, b.0), _mm512_sub_pd(a.1, b.1)) }
    }
    #[inline(always)]
    unsafe fn d_mul(a: F64x16, b: F64x16) -> F64x16 {
        unsafe { F64x16(_mm512_mul_pd(a.0, b.0), _mm512_mul_pd(a.1, b.1)) }
    }
    #[inline(always)]
    unsafe fn d_fma(a: F64x16, b: F64x16, c: F64x16) -> F64x16 {
        unsafe { F64x16(_mm512_fmadd_pd(a.0, b.0, c.0), _mm512_fmadd_pd(a.1, b.1, c.1)) }
    }
    #[inline(always)]
    unsafe fn d_lookup<const SHIFT: u32>(table: &[u64; 32], index: F64x16) -> F64x16 {
        unsafe { F64x16(lookup::<SHIFT>(table, index.0), lookup::<SHIFT>(table, index.1)) }
    }
    #[inline(always)]
    unsafe fn d_store(p: *mut f64, x: F64x16) {
        unsafe {
            _mm512_storeu_pd(p, x.0);
            _mm512_storeu_pd(p.add(8), x.1);
        }
    }

    #[inline(always)]
    unsafe fn bf16_low(w: __m512i) -> __m512 {
        unsafe { _mm512_castsi512_ps(_mm512_slli_epi32::<16>(w)) }
    }
    #[inline(always)]
    unsafe fn bf16_high(w: __m512i) -> __m512 {
        unsafe { _mm512_castsi512_ps(_mm512_and_si512(w, _mm512_set1_epi32(0xffff_0000_u32 as i32))) }
    }
    #[inline(always)]
    unsafe fn e2m1<const SHIFT: u32>(w: __m512i) -> __m512 {
        // The permutation reads only the low four bits of each index.
        unsafe { _mm512_permutexvar_ps(_mm512_srli_epi32::<SHIFT>(w), _mm512_loadu_ps(E2M1.as_ptr())) }
    }
    #[inline(always)]
    unsafe fn scales(p: *const u8) -> __m512 {
        unsafe { _mm512_castsi512_ps(_mm512_slli_epi32::<23>(_mm512_cvtepu8_epi32(_mm_loadu_si128(p.cast())))) }
    }
    #[inline(always)]
    unsafe fn load_f16(p: *const f16) -> __m512 {
        unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(p.cast())) }
    }
    #[inline(always)]
    unsafe fn store_f16(p: *mut f16, x: __m512) {
        unsafe { _mm256_storeu_si256(p.cast(), _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(x)) }
    }

    #[inline(always)]
    unsafe fn dot_bf16(acc: __m512, w: __m512i, x: *const u32) -> __m512 {
        unsafe {
            let x = _mm512_set1_epi32(x.read().cast_signed());
            _mm512_dpbf16_ps(
                acc,
                std::mem::transmute::<__m512i, __m512bh>(w),
                std::mem::transmute::<__m512i, __m512bh>(x),
            )
        }
    }
    #[inline(always)]
    unsafe fn e2m1_words<const SHIFT: u32>(w: __m512i) -> __m512i {
        const TABLE: [i16; 32] = {
            const HALF: [i16; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];
            let mut t = [0; 32];
            let mut i = 0;
            while i < 32 {
                t[i] = HALF[i % 16];
                i += 1;
            }
            t
        };
        // The permutation reads the low five bits of each index; the table repeats, so bit 4 does not matter.
        unsafe { _mm512_permutexvar_epi16(_mm512_srli_epi16::<SHIFT>(w), _mm512_loadu_si512(TABLE.as_ptr().cast())) }
    }
    #[inline(always)]
    unsafe fn dot_i16(acc: __m512i, w: __m512i, x: *const u32) -> __m512i {
        unsafe { vpdpwssd(acc, w, x) }
    }
    #[inline(always)]
    unsafe fn transpose(rows: &[[u32; LANES]; LANES]) -> [[u32; LANES]; LANES] {
        let mut columns = [[0; LANES]; LANES];
        unsafe {
            // Quarter q of fours[g][c] is column 4 q + c of rows 4 g to 4 g + 3.
            let mut fours = [[_mm512_setzero_si512(); 4]; 4];
            for (four, rows) in fours.iter_mut().zip(rows.as_chunks::<4>().0) {
                let [a, b, c, d] = *rows;
                let [a, b, c, d] = [
                    _mm512_loadu_si512(a.as_ptr().cast()),
                    _mm512_loadu_si512(b.as_ptr().cast()),
                    _mm512_loadu_si512(c.as_ptr().cast()),
                    _mm512_loadu_si512(d.as_ptr().cast()),
                ];
                let (ab, cd) = (_mm512_unpacklo_epi32(a, b), _mm512_unpacklo_epi32(c, d));
                four[0] = _mm512_unpacklo_epi64(ab, cd);
                four[1] = _mm512_unpackhi_epi64(ab, cd);
                let (ab, cd) = (_mm512_unpackhi_epi32(a, b), _mm512_unpackhi_epi32(c, d));
                four[2] = _mm512_unpacklo_epi64(ab, cd);
                four[3] = _mm512_unpackhi_epi64(ab, cd);
            }
            for c in 0..4 {
                // Of two vectors' quarters the even ones, or the odd ones.
                const EVEN: i32 = 0b10_00_10_00;
                const ODD: i32 = 0b11_01_11_01;
                let even = [
                    _mm512_shuffle_i32x4::<EVEN>(fours[0][c], fours[1][c]),
                    _mm512_shuffle_i32x4::<EVEN>(fours[2][c], fours[3][c]),
                ];
                let odd = [
                    _mm512_shuffle_i32x4::<ODD>(fours[0][c], fours[1][c]),
                    _mm512_shuffle_i32x4::<ODD>(fours[2][c], fours[3][c]),
                ];
                let quarters = [
                    _mm512_shuffle_i32x4::<EVEN>(even[0], even[1]),
                    _mm512_shuffle_i32x4::<EVEN>(odd[0], odd[1]),
                    _mm512_shuffle_i32x4::<ODD>(even[0], even[1]),
                    _mm512_shuffle_i32x4::<ODD>(odd[0], odd[1]),
                ];
                for (q, column) in quarters.iter().enumerate() {
                    _mm512_storeu_si512(columns[4 * q + c].as_mut_ptr().cast(), *column);
                }
            }
        }
        columns
    }
    #[inline(always)]
    unsafe fn prefetch(p: *const u8) {
        unsafe { _mm_prefetch::<_MM_HINT_T1>(p.cast()) }
    }
}

/// `vpdpwssd` in inline assembly. From the intrinsic LLVM makes two worse things: it splits a chain of them into
/// products and sums, twice the work, to shorten a latency that many accumulators already hide; and it broadcasts `x`
/// with a float instruction, whose result reaches an integer instruction a cycle later.
///
/// # Safety
/// `x` is valid for reading a word, and the machine has the instruction.
#[inline]
#[target_feature(enable = "avx512f,avx512vnni")]
unsafe fn vpdpwssd(mut acc: __m512i, w: __m512i, x: *const u32) -> __m512i {
    // SAFETY: reads one word, which the caller guarantees to be valid.
    unsafe {
        std::arch::asm!(
            "vpdpwssd {acc}, {w}, dword ptr [{x}]{{1to16}}",
            acc = inout(zmm_reg) acc,
            w = in(zmm_reg) w,
            x = in(reg) x,
            options(pure, readonly, nostack, preserves_flags)
        );
    }
    acc
}

/// Half of [`Simd::d_lookup`]. The table is held in four registers: a permutation of two of them looks up one of
/// sixteen words, and bit 4 of the index selects the pair of registers.
///
/// # Safety
/// The machine has the instruction set; to be fast, called inside [`Simd::vectorize`].
#[inline(always)]
unsafe fn lookup<const SHIFT: u32>(table: &[u64; 32], index: __m512d) -> __m512d {
    // SAFETY: the caller guarantees the instructions; the table has four times eight words.
    unsafe {
        let words = table.as_ptr();
        let index = _mm512_castpd_si512(index);
        let low = _mm512_permutex2var_epi64(
            _mm512_loadu_si512(words.cast()),
            index,
            _mm512_loadu_si512(words.add(8).cast()),
        );
        let high = _mm512_permutex2var_epi64(
            _mm512_loadu_si512(words.add(16).cast()),
            index,
            _mm512_loadu_si512(words.add(24).cast()),
        );
        let upper = _mm512_test_epi64_mask(index, _mm512_set1_epi64(16));
        let found = _mm512_mask_mov_epi64(low, upper, high);
        _mm512_castsi512_pd(_mm512_add_epi64(found, _mm512_slli_epi64::<SHIFT>(index)))
    }
}
