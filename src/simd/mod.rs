//! Vectors of sixteen float32 lanes, on every instruction set.
//!
//! Kernels are written once, generic over [`Simd`], and run through [`Simd::vectorize`]. It calls one
//! `#[target_feature]` function, and everything else is inlined into that; so every method here is `#[inline(always)]`.
//! Implementations of [`Simd`] only wrap instructions; algorithms are in the kernels.
//!
//! A value of a type that implements [`Simd`] proves that the machine has the instructions: only detection makes one,
//! and a kernel needs one to run. So safe code cannot execute instructions that the machine lacks.
//!
//! ```
//! # use getp::simd::{Avx512, VectorCode, Level, Simd};
//! # struct Nothing;
//! # impl VectorCode for Nothing {
//! #     type Output = ();
//! #     fn run<S: Simd>(self, _: S) {}
//! # }
//! if let Some(avx512) = Avx512::new() {
//!     Level::Avx512(avx512).run(Nothing);
//! }
//! ```
//!
//! ```compile_fail,E0423
//! # use getp::simd::{Avx512, VectorCode, Level, Simd};
//! # struct Nothing;
//! # impl VectorCode for Nothing {
//! #     type Output = ();
//! #     fn run<S: Simd>(self, _: S) {}
//! # }
//! Level::Avx512(Avx512(())).run(Nothing);
//! ```

mod avx2;
mod avx512;
mod portable;
#[cfg(test)]
mod tests;

pub use avx2::Avx2;
pub use avx512::Avx512;
pub use portable::Portable;

use half::f16;
use std::sync::OnceLock;

/// Lanes of a vector.
pub const LANES: usize = 16;

/// A kernel: a computation that is compiled once for each instruction set.
pub trait VectorCode {
    /// The kernel's result.
    type Output;
    /// Runs the kernel with the instructions of `S`. Implementations are `#[inline(always)]`.
    fn run<S: Simd>(self, simd: S) -> Self::Output;
}

/// An instruction set. [`Simd::new`] gives a value only on machines that have it.
///
/// # Safety
/// The unsafe methods may only be called where a value of the type exists and, to be fast, from inside
/// [`Simd::vectorize`]. Pointers must be valid for sixteen elements of their type, of any alignment, unless the method
/// says otherwise. Implementations must not make a value on a machine that lacks one of their instructions.
#[allow(clippy::missing_safety_doc, reason = "the contract is stated at the trait")]
pub unsafe trait Simd: Copy + Send + Sync + 'static {
    /// The name in the line that `warm_up` prints.
    const NAME: &'static str;
    /// Whether [`Simd::dot_bf16`] and [`Simd::dot_i16`] are single instructions. If not, float32 multiply-adds are
    /// faster, and these two are never called.
    const DOT: bool;
    /// The most tokens in a block of a matrix product, as their accumulators for 32 rows fit into the registers.
    const TOKENS: usize;
    /// Sixteen float32.
    type F: Copy;
    /// Sixteen 32-bit words.
    type I: Copy;
    /// Sixteen float64.
    type D: Copy;

    /// Detects the instruction set; `None` if the machine does not have it.
    fn new() -> Option<Self>;
    /// Runs a kernel with the instruction set enabled.
    fn vectorize<K: VectorCode>(self, kernel: K) -> K::Output;

    /// A vector with all lanes `x`.
    unsafe fn splat(x: f32) -> Self::F;
    /// Loads sixteen consecutive values.
    unsafe fn load(p: *const f32) -> Self::F;
    /// Stores sixteen consecutive values.
    unsafe fn store(p: *mut f32, x: Self::F);
    /// `a + b`.
    unsafe fn add(a: Self::F, b: Self::F) -> Self::F;
    /// `a - b`.
    unsafe fn sub(a: Self::F, b: Self::F) -> Self::F;
    /// `a * b`.
    unsafe fn mul(a: Self::F, b: Self::F) -> Self::F;
    /// `a / b`.
    unsafe fn div(a: Self::F, b: Self::F) -> Self::F;
    /// `a * b + c`, rounded once if the machine has FMA.
    unsafe fn fma(a: Self::F, b: Self::F, c: Self::F) -> Self::F;
    /// The larger of each lane; `b` if either is NaN.
    unsafe fn max(a: Self::F, b: Self::F) -> Self::F;
    /// The smaller of each lane; `b` if either is NaN.
    unsafe fn min(a: Self::F, b: Self::F) -> Self::F;
    /// A mask with a bit for each lane, set if `a >= b`.
    unsafe fn at_least(a: Self::F, b: Self::F) -> u32;

    /// All lanes 0.
    unsafe fn i_zero() -> Self::I;
    /// Loads sixteen consecutive words.
    unsafe fn i_load(p: *const u32) -> Self::I;
    /// `a + b`, wrapping.
    unsafe fn i_add(a: Self::I, b: Self::I) -> Self::I;
    /// Shift left by `BITS`.
    unsafe fn i_shl<const BITS: u32>(a: Self::I) -> Self::I;
    /// Converts signed integers to float32.
    unsafe fn i_to_f(a: Self::I) -> Self::F;
    /// The bits of float32 values.
    unsafe fn bits(a: Self::F) -> Self::I;
    /// The float32 values with these bits.
    unsafe fn from_bits(a: Self::I) -> Self::F;

    /// All lanes 0.
    unsafe fn d_zero() -> Self::D;
    /// `sum + float64(x)`, lane by lane.
    unsafe fn d_add(sum: Self::D, x: Self::F) -> Self::D;
    /// `sum + float64(w * x)`, the product rounded to float32.
    #[inline(always)]
    unsafe fn d_add_product(sum: Self::D, w: Self::F, x: f32) -> Self::D {
        // SAFETY: the caller upholds the trait's contract.
        unsafe { Self::d_add(sum, Self::mul(w, Self::splat(x))) }
    }
    /// Each lane rounded to float32.
    unsafe fn d_round(sum: Self::D) -> Self::F;
    /// A vector with all lanes `x`.
    unsafe fn d_splat(x: f64) -> Self::D;
    /// `a - b`.
    unsafe fn d_sub(a: Self::D, b: Self::D) -> Self::D;
    /// `a * b`.
    unsafe fn d_mul(a: Self::D, b: Self::D) -> Self::D;
    /// `a * b + c`, rounded once if the machine has FMA.
    unsafe fn d_fma(a: Self::D, b: Self::D, c: Self::D) -> Self::D;
    /// With `i` the bits of a lane of `index`: the float64 whose bits are `table[i % 32] + (i << SHIFT)`.
    unsafe fn d_lookup<const SHIFT: u32>(table: &[u64; 32], index: Self::D) -> Self::D;
    /// Stores sixteen consecutive float64.
    unsafe fn d_store(p: *mut f64, x: Self::D);

    /// Widens the bfloat16 in the low half of each word.
    unsafe fn bf16_low(w: Self::I) -> Self::F;
    /// Widens the bfloat16 in the high half of each word.
    unsafe fn bf16_high(w: Self::I) -> Self::F;
    /// Decodes the E2M1 code in bits `SHIFT..SHIFT + 4` of each word.
    unsafe fn e2m1<const SHIFT: u32>(w: Self::I) -> Self::F;
    /// Loads sixteen E8M0 scales as float32. None of them may be 0 or 255.
    unsafe fn scales(p: *const u8) -> Self::F;
    /// Loads sixteen float16, widened to float32.
    unsafe fn load_f16(p: *const f16) -> Self::F;
    /// Stores sixteen float16, rounded to nearest even.
    unsafe fn store_f16(p: *mut f16, x: Self::F);

    /// `acc + w.low * x.low + w.high * x.high` on pairs of bfloat16. `x` points to one word, used for all lanes.
    unsafe fn dot_bf16(acc: Self::F, w: Self::I, x: *const u32) -> Self::F;
    /// Decodes the E2M1 code in bits `SHIFT..SHIFT + 4` of each half word, to twice its value as a signed 16-bit
    /// integer.
    unsafe fn e2m1_words<const SHIFT: u32>(w: Self::I) -> Self::I;
    /// `acc + w.low * x.low + w.high * x.high` on pairs of signed 16-bit integers. `x` points to one word, used for all
    /// lanes.
    unsafe fn dot_i16(acc: Self::I, w: Self::I, x: *const u32) -> Self::I;

    /// Makes word `i` of row `j` word `j` of row `i`.
    unsafe fn transpose(rows: &[[u32; LANES]; LANES]) -> [[u32; LANES]; LANES];

    /// Prefetches the cache line of an address into the L2 cache. The address need not be valid.
    unsafe fn prefetch(p: *const u8);

    /// `e^x`, relative error at most 2e-7; at most 2e-38 below -87, clamped above 88; NaN of NaN.
    #[inline(always)]
    unsafe fn exp(x: Self::F) -> Self::F {
        // With x = n ln 2 + r and |r| <= ln 2 / 2: e^r is a Taylor polynomial, and n is added to its exponent. Adding
        // 1.5 * 2^23 rounds to the integer n and leaves it in the low bits of the sum.
        // SAFETY: the caller upholds the trait's contract.
        unsafe {
            // With x as the second operand of `min` and `max`, NaN passes the clamps.
            let x = Self::max(Self::splat(-87.5), Self::min(Self::splat(88.0), x));
            let magic = Self::splat(12_582_912.0);
            let shifted = Self::fma(x, Self::splat(std::f32::consts::LOG2_E), magic);
            let n = Self::sub(shifted, magic);
            let r = Self::fma(n, Self::splat(-0.693_145_75), x);
            let r = Self::fma(n, Self::splat(-1.428_606_8e-6), r);
            let mut p = Self::splat(1.0 / 5040.0);
            for c in [1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0] {
                p = Self::fma(p, r, Self::splat(c));
            }
            let power = Self::from_bits(Self::i_add(Self::bits(p), Self::i_shl::<23>(Self::bits(shifted))));
            // Adds 0; or NaN if x is NaN, since adding to the exponent may have changed the NaN into a number.
            Self::add(power, Self::sub(x, x))
        }
    }
}

/// An instruction set of this machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Level {
    /// AVX-512 with BF16 dot products and VNNI.
    Avx512(Avx512),
    /// AVX2 with FMA and F16C.
    Avx2(Avx2),
    /// Any machine.
    Portable(Portable),
}

impl Level {
    /// The widest instruction set of this machine, detected once.
    pub fn detect() -> Self {
        static LEVEL: OnceLock<Level> = OnceLock::new();
        *LEVEL.get_or_init(|| Self::available()[0])
    }

    /// Every level this machine can run, the widest first.
    pub fn available() -> Vec<Self> {
        let all = [
            Avx512::new().map(Self::Avx512),
            Avx2::new().map(Self::Avx2),
            Portable::new().map(Self::Portable),
        ];
        all.into_iter().flatten().collect()
    }

    /// The name in the line that `warm_up` prints.
    pub fn name(self) -> &'static str {
        match self {
            Self::Avx512(_) => Avx512::NAME,
            Self::Avx2(_) => Avx2::NAME,
            Self::Portable(_) => Portable::NAME,
        }
    }

    /// Whether nothing but the machine's base instructions is used.
    pub fn is_portable(self) -> bool {
        matches!(self, Self::Portable(_))
    }

    /// Runs a kernel on it.
    pub fn run<K: VectorCode>(self, kernel: K) -> K::Output {
        match self {
            Self::Avx512(simd) => simd.vectorize(kernel),
            Self::Avx2(simd) => simd.vectorize(kernel),
            Self::Portable(simd) => simd.vectorize(kernel),
        }
    }
}
