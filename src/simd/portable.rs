//! Plain arrays, for any machine; the compiler vectorizes what it can.
#![allow(clippy::missing_safety_doc, reason = "the contract stands at the trait")]

use super::{LANES, Simd, VectorCode};
use crate::dtype::E2M1;
use half::f16;
use std::array::from_fn;

/// Vectors as arrays, for any machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Portable;

// SAFETY: no instruction beyond the target's own is used.
#[allow(
    clippy::undocumented_unsafe_blocks,
    reason = "each block reads or writes what the trait's contract allows"
)]
unsafe impl Simd for Portable {
    const NAME: &'static str = "portable";
    const DOT: bool = false;
    const TOKENS: usize = 2;
    type F = [f32; LANES];
    type I = [u32; LANES];
    type D = [f64; LANES];

    fn new() -> Option<Self> {
        Some(Self)
    }

    fn vectorize<K: VectorCode>(self, kernel: K) -> K::Output {
        kernel.run(self)
    }

    #[inline(always)]
    unsafe fn splat(x: f32) -> [f32; LANES] {
        [x; LANES]
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> [f32; LANES] {
        unsafe { p.cast::<[f32; LANES]>().read_unaligned() }
    }
    #[inline(always)]
    unsafe fn store(p: *mut f32, x: [f32; LANES]) {
        unsafe { p.cast::<[f32; LANES]>().write_unaligned(x) }
    }
    #[inline(always)]
    unsafe fn add(a: [f32; LANES], b: [f32; LANES]) -> [f32; LANES] {
        from_fn(|i| a[i] + b[i])
    }
    #[inline(always)]
    unsafe fn sub(a: [f32; LANES], b: [f32; LANES]) -> [f32; LANES] {
        from_fn(|i| a[i] - b[i])
    }
    #[inline(always)]
    unsafe fn mul(a: [f32; LANES], b: [f32; LANES]) -> [f32; LANES] {
        from_fn(|i| a[i] * b[i])
    }
    #[inline(always)]
    unsafe fn div(a: [f32; LANES], b: [f32; LANES]) -> [f32; LANES] {
        from_fn(|i| a[i] / b[i])
    }
    #[inline(always)]
    unsafe fn fma(a: [f32; LANES], b: [f32; LANES], c: [f32; LANES]) -> [f32; LANES] {
        // `mul_add` would be a library call on machines without the instruction.
        from_fn(|i| a[i] * b[i] + c[i])
    }
    #[inline(always)]
    unsafe fn max(a: [f32; LANES], b: [f32; LANES]) -> [f32; LANES] {
        from_fn(|i| if a[i] > b[i] { a[i] } else { b[i] })
    }
    #[inline(always)]
    unsafe fn min(a: [f32; LANES], b: [f32; LANES]) -> [f32; LANES] {
        from_fn(|i| if a[i] < b[i] { a[i] } else { b[i] })
    }

    #[inline(always)]
    unsafe fn at_least(a: [f32; LANES], b: [f32; LANES]) -> u32 {
        (0..LANES).fold(0, |mask, i| mask | u32::from(a[i] >= b[i]) << i)
    }
    #[inline(always)]
    unsafe fn i_zero() -> [u32; LANES] {
        [0; LANES]
    }
    #[inline(always)]
    unsafe fn i_load(p: *const u32) -> [u32; LANES] {
        unsafe { p.cast::<[u32; LANES]>().read_unaligned() }
    }
    #[inline(always)]
    unsafe fn i_add(a: [u32; LANES], b: [u32; LANES]) -> [u32; LANES] {
        from_fn(|i| a[i].wrapping_add(b[i]))
    }
    #[inline(always)]
    unsafe fn i_shl<const BITS: u32>(a: [u32; LANES]) -> [u32; LANES] {
        a.map(|x| x << BITS)
    }
    #[inline(always)]
    unsafe fn i_to_f(a: [u32; LANES]) -> [f32; LANES] {
        a.map(|x| x.cast_signed() as f32)
    }
    #[inline(always)]
    unsafe fn bits(a: [f32; LANES]) -> [u32; LANES] {
        a.map(f32::to_bits)
    }
    #[inline(always)]
    unsafe fn from_bits(a: [u32; LANES]) -> [f32; LANES] {
        a.map(f32::from_bits)
    }

    #[inline(always)]
    unsafe fn d_zero() -> [f64; LANES] {
        [0.0; LANES]
    }
    #[inline(always)]
    unsafe fn d_add(sum: [f64; LANES], x: [f32; LANES]) -> [f64; LANES] {
        from_fn(|i| sum[i] + f64::from(x[i]))
    }
    #[inline(always)]
    unsafe fn d_round(sum: [f64; LANES]) -> [f32; LANES] {
        sum.map(|x| x as f32)
    }
    #[inline(always)]
    unsafe fn d_splat(x: f64) -> [f64; LANES] {
        [x; LANES]
    }
    #[inline(always)]
    unsafe fn d_sub(a: [f64; LANES], b: [f64; LANES]) -> [f64; LANES] {
        from_fn(|i| a[i] - b[i])
    }
    #[inline(always)]
    unsafe fn d_mul(a: [f64; LANES], b: [f64; LANES]) -> [f64; LANES] {
        from_fn(|i| a[i] * b[i])
    }
    #[inline(always)]
    unsafe fn d_fma(a: [f64; LANES], b: [f64; LANES], c: [f64; LANES]) -> [f64; LANES] {
        from_fn(|i| a[i] * b[i] + c[i])
    }
    #[inline(always)]
    unsafe fn d_lookup<const SHIFT: u32>(table: &[u64; 32], index: [f64; LANES]) -> [f64; LANES] {
        index.map(|x| {
            let bits = x.to_bits();
            f64::from_bits(table[bits as usize % 32].wrapping_add(bits << SHIFT))
        })
    }
    #[inline(always)]
    unsafe fn d_store(p: *mut f64, x: [f64; LANES]) {
        unsafe { p.cast::<[f64; LANES]>().write_unaligned(x) }
    }

    #[inline(always)]
    unsafe fn bf16_low(w: [u32; LANES]) -> [f32; LANES] {
        w.map(|x| f32::from_bits(x << 16))
    }
    #[inline(always)]
    unsafe fn bf16_high(w: [u32; LANES]) -> [f32; LANES] {
        w.map(|x| f32::from_bits(x & 0xffff_0000))
    }
    #[inline(always)]
    unsafe fn e2m1<const SHIFT: u32>(w: [u32; LANES]) -> [f32; LANES] {
        w.map(|x| E2M1[(x >> SHIFT & 15) as usize])
    }
    #[inline(always)]
    unsafe fn scales(p: *const u8) -> [f32; LANES] {
        let scales = unsafe { p.cast::<[u8; LANES]>().read_unaligned() };
        scales.map(|e| f32::from_bits(u32::from(e) << 23))
    }
    #[inline(always)]
    unsafe fn load_f16(p: *const f16) -> [f32; LANES] {
        let halves = unsafe { p.cast::<[f16; LANES]>().read_unaligned() };
        halves.map(f16::to_f32)
    }
    #[inline(always)]
    unsafe fn store_f16(p: *mut f16, x: [f32; LANES]) {
        unsafe { p.cast::<[f16; LANES]>().write_unaligned(x.map(f16::from_f32)) }
    }

    #[inline(always)]
    unsafe fn transpose(rows: &[[u32; LANES]; LANES]) -> [[u32; LANES]; LANES] {
        from_fn(|i| from_fn(|j| rows[j][i]))
    }
    #[inline(always)]
    unsafe fn prefetch(_: *const u8) {}

    unsafe fn dot_bf16(_: [f32; LANES], _: [u32; LANES], _: *const u32) -> [f32; LANES] {
        unreachable!("DOT is false")
    }
    unsafe fn e2m1_words<const SHIFT: u32>(_: [u32; LANES]) -> [u32; LANES] {
        unreachable!("DOT is false")
    }
    unsafe fn dot_i16(_: [u32; LANES], _: [u32; LANES], _: *const u32) -> [u32; LANES] {
        unreachable!("DOT is false")
    }
}
