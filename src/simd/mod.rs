//! Sixteen float32 lanes, whatever the machine has under them.
//!
//! Kernels are written once over [`Simd`] and run through [`Simd::vectorize`], whose one `#[target_feature]`
//! function everything else is inlined into; that is why every method here is `#[inline(always)]`. An instance
//! holds instructions only, no algorithm: what two instances would share belongs into a kernel.
//!
//! A value of an instruction set proves that the machine has it: only detection makes one, and a kernel runs with one.
//! So safe code cannot reach instructions that are absent.
//!
//! ```
//! # use getp::simd::{Avx512, Kernel, Level, Simd};
//! # struct Nothing;
//! # impl Kernel for Nothing {
//! #     type Output = ();
//! #     fn run<S: Simd>(self, _: S) {}
//! # }
//! if let Some(avx512) = Avx512::new() {
//!     Level::Avx512(avx512).run(Nothing);
//! }
//! ```
//!
//! ```compile_fail,E0423
//! # use getp::simd::{Avx512, Kernel, Level, Simd};
//! # struct Nothing;
//! # impl Kernel for Nothing {
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
use once_cell::sync::OnceCell;

/// Lanes of every vector.
pub const LANES: usize = 16;

/// A kernel: a computation that is compiled once for each instruction set.
pub trait Kernel {
    /// What it computes.
    type Output;
    /// Runs it on instructions that `simd` proves to be there. Implementations are `#[inline(always)]`.
    fn run<S: Simd>(self, simd: S) -> Self::Output;
}

/// An instruction set that this machine has: [`Simd::new`] makes a value of it nowhere else.
///
/// # Safety
/// Unsafe methods may only be called where there is a value of the type, and, to be fast, from inside
/// [`Simd::vectorize`]. Pointers must be valid for sixteen elements of their type, of any alignment. Implementations give
/// out no value on a machine that lacks an instruction of theirs.
#[allow(clippy::missing_safety_doc, reason = "the contract stands at the trait")]
pub unsafe trait Simd: Copy + Send + Sync + 'static {
    /// The name in the summary line.
    const NAME: &'static str;
    /// Whether [`Simd::dot_bf16`] and [`Simd::dot_i16`] are single instructions; elsewhere float32
    /// multiply-adds are faster, and the dot products are never called.
    const DOT: bool;
    /// Tokens whose accumulators for 32 rows fit the registers.
    const TOKENS: usize;
    /// Sixteen float32.
    type F: Copy;
    /// Sixteen 32-bit words.
    type I: Copy;
    /// Sixteen float64.
    type D: Copy;

    /// Detects it; `None` where the machine does not have it.
    fn new() -> Option<Self>;
    /// Runs a kernel with the instruction set enabled.
    fn vectorize<K: Kernel>(self, kernel: K) -> K::Output;

    /// All lanes `x`.
    unsafe fn splat(x: f32) -> Self::F;
    /// Sixteen consecutive values.
    unsafe fn load(p: *const f32) -> Self::F;
    /// Sixteen consecutive values.
    unsafe fn store(p: *mut f32, x: Self::F);
    /// `a + b`.
    unsafe fn add(a: Self::F, b: Self::F) -> Self::F;
    /// `a - b`.
    unsafe fn sub(a: Self::F, b: Self::F) -> Self::F;
    /// `a * b`.
    unsafe fn mul(a: Self::F, b: Self::F) -> Self::F;
    /// `a / b`.
    unsafe fn div(a: Self::F, b: Self::F) -> Self::F;
    /// `a * b + c`, rounded once where the machine can.
    unsafe fn fma(a: Self::F, b: Self::F, c: Self::F) -> Self::F;
    /// The larger; `b` where either is NaN.
    unsafe fn max(a: Self::F, b: Self::F) -> Self::F;
    /// The smaller; `b` where either is NaN.
    unsafe fn min(a: Self::F, b: Self::F) -> Self::F;
    /// A bit for each lane where `a >= b`.
    unsafe fn at_least(a: Self::F, b: Self::F) -> u32;

    /// All lanes 0.
    unsafe fn i_zero() -> Self::I;
    /// Sixteen consecutive words.
    unsafe fn i_load(p: *const u32) -> Self::I;
    /// `a + b`, wrapping.
    unsafe fn i_add(a: Self::I, b: Self::I) -> Self::I;
    /// Shift left by `BITS`.
    unsafe fn i_shl<const BITS: u32>(a: Self::I) -> Self::I;
    /// Signed integers to float32.
    unsafe fn i_to_f(a: Self::I) -> Self::F;
    /// The bits of float32.
    unsafe fn bits(a: Self::F) -> Self::I;
    /// Float32 of the bits.
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
    /// All lanes `x`.
    unsafe fn d_splat(x: f64) -> Self::D;
    /// `a - b`.
    unsafe fn d_sub(a: Self::D, b: Self::D) -> Self::D;
    /// `a * b`.
    unsafe fn d_mul(a: Self::D, b: Self::D) -> Self::D;
    /// `a * b + c`, rounded once where the machine can.
    unsafe fn d_fma(a: Self::D, b: Self::D, c: Self::D) -> Self::D;
    /// In each lane the word of the table that the low five of its bits name, plus its bits shifted left by `SHIFT`.
    unsafe fn d_lookup<const SHIFT: u32>(table: &[u64; 32], index: Self::D) -> Self::D;
    /// Sixteen consecutive float64.
    unsafe fn d_store(p: *mut f64, x: Self::D);

    /// The bfloat16 in the low half of each word.
    unsafe fn bf16_low(w: Self::I) -> Self::F;
    /// The bfloat16 in the high half of each word.
    unsafe fn bf16_high(w: Self::I) -> Self::F;
    /// The E2M1 value in the four bits of each word from bit `SHIFT` on.
    unsafe fn e2m1<const SHIFT: u32>(w: Self::I) -> Self::F;
    /// Sixteen E8M0 scales, none of them 0 or 255.
    unsafe fn scales(p: *const u8) -> Self::F;
    /// Sixteen float16.
    unsafe fn load_f16(p: *const f16) -> Self::F;
    /// Sixteen float16, rounded to nearest even.
    unsafe fn store_f16(p: *mut f16, x: Self::F);

    /// `acc + w.low * x.low + w.high * x.high` on bfloat16 pairs, `x` the same for all lanes.
    unsafe fn dot_bf16(acc: Self::F, w: Self::I, x: *const u32) -> Self::F;
    /// In each half word, twice the E2M1 value in its four bits from bit `SHIFT` on, as a signed 16-bit integer.
    unsafe fn e2m1_words<const SHIFT: u32>(w: Self::I) -> Self::I;
    /// `acc + w.low * x.low + w.high * x.high` on signed 16-bit pairs, `x` the same for all lanes.
    unsafe fn dot_i16(acc: Self::I, w: Self::I, x: *const u32) -> Self::I;

    /// Asks for the cache line of an address, which need not be valid, into the second cache.
    unsafe fn prefetch(p: *const u8);

    /// `e^x`, relative error at most 2e-7; at most 2e-38 below -87, clamped above 88; NaN of NaN.
    #[inline(always)]
    unsafe fn exp(x: Self::F) -> Self::F {
        // x = n ln 2 + r; e^r by its Taylor polynomial on |r| <= ln 2 / 2, n added to the exponent. Adding
        // 1.5 * 2^23 leaves n in the low bits of the sum.
        // SAFETY: the caller upholds the trait's contract.
        unsafe {
            // In this order of the operands NaN passes the clamps.
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
            // Adds 0; or NaN, whose bits the exponent's sum may have made into anything.
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
    /// The widest one, detected once.
    pub fn detect() -> Self {
        static LEVEL: OnceCell<Level> = OnceCell::new();
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

    /// The name in the summary line.
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
    pub fn run<K: Kernel>(self, kernel: K) -> K::Output {
        match self {
            Self::Avx512(simd) => simd.vectorize(kernel),
            Self::Avx2(simd) => simd.vectorize(kernel),
            Self::Portable(simd) => simd.vectorize(kernel),
        }
    }
}
