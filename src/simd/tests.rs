//! Every method of every instruction set that this machine has, compared with scalar code.

use super::*;
use crate::dtype::E2M1;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

type Lanes = [f32; LANES];

/// Values whose sums, products and comparisons cover every special case.
const SPECIAL: Lanes = [
    0.0,
    -0.0,
    1.0,
    -1.0,
    f32::NAN,
    f32::INFINITY,
    f32::NEG_INFINITY,
    f32::MAX,
    f32::MIN,
    f32::MIN_POSITIVE,
    1e-40,
    -1e-40,
    1.0 + f32::EPSILON,
    16_777_215.0,
    -0.1,
    std::f32::consts::PI,
];

/// Runs a check, which is a kernel, on every instruction set that this machine has.
macro_rules! on_every_level {
    ($($name:ident: $simd:ident => $body:block)*) => {
        $(#[test]
        fn $name() {
            struct Check;
            impl VectorCode for Check {
                type Output = ();
                fn run<$simd: Simd>(self, _: $simd) $body
            }
            for level in Level::available() {
                level.run(Check);
            }
        })*
    };
}

fn rng() -> ChaCha8Rng {
    ChaCha8Rng::seed_from_u64(1)
}

/// All pairs of special values, then random values of any exponent.
fn operands() -> Vec<[Lanes; 3]> {
    let mut rng = rng();
    let rotated = |by: usize| std::array::from_fn(|i| SPECIAL[(i + by) % LANES]);
    let mut all: Vec<_> = (0..LANES)
        .map(|by| [SPECIAL, rotated(by), rotated(3 * by + 1)])
        .collect();
    let mut random = || std::array::from_fn(|_| f32::from_bits(rng.random()));
    all.extend((0..200).map(|_| [random(), random(), random()]));
    all
}

fn load<S: Simd>(x: &Lanes) -> S::F {
    // SAFETY: called under `VectorCode::run`, with sixteen elements.
    unsafe { S::load(x.as_ptr()) }
}

fn lanes<S: Simd>(x: S::F) -> Lanes {
    let mut out = [0.0; LANES];
    // SAFETY: as above.
    unsafe { S::store(out.as_mut_ptr(), x) };
    out
}

fn words<S: Simd>(x: S::I) -> [u32; LANES] {
    // SAFETY: as above. A store keeps all bits, whatever they mean.
    lanes::<S>(unsafe { S::from_bits(x) }).map(f32::to_bits)
}

fn i_load<S: Simd>(x: &[u32; LANES]) -> S::I {
    // SAFETY: as above.
    unsafe { S::i_load(x.as_ptr()) }
}

/// Asserts equal bits, or NaN in both.
#[track_caller]
fn assert_same<S: Simd>(got: Lanes, expected: impl Fn(usize) -> f32) {
    for (i, got) in got.into_iter().enumerate() {
        let expected = expected(i);
        let same = got.to_bits() == expected.to_bits() || got.is_nan() && expected.is_nan();
        assert!(same, "{}: lane {i} is {got:e} and should be {expected:e}", S::NAME);
    }
}

on_every_level! {
    arithmetic_is_the_scalars: S => {
        let fused = S::NAME != Portable::NAME;
        for [x, y, z] in operands() {
            let (a, b, c) = (load::<S>(&x), load::<S>(&y), load::<S>(&z));
            // SAFETY: under `VectorCode::run`.
            let [add, sub, mul, div, fma, max, min, splat] = unsafe {
                [
                    S::add(a, b),
                    S::sub(a, b),
                    S::mul(a, b),
                    S::div(a, b),
                    S::fma(a, b, c),
                    S::max(a, b),
                    S::min(a, b),
                    S::splat(x[3]),
                ]
            };
            assert_same::<S>(lanes::<S>(add), |i| x[i] + y[i]);
            assert_same::<S>(lanes::<S>(sub), |i| x[i] - y[i]);
            assert_same::<S>(lanes::<S>(mul), |i| x[i] * y[i]);
            assert_same::<S>(lanes::<S>(div), |i| x[i] / y[i]);
            assert_same::<S>(lanes::<S>(fma), |i| if fused { x[i].mul_add(y[i], z[i]) } else { x[i] * y[i] + z[i] });
            // The second operand unless the first compares as larger (smaller): also for NaN and for zeros of either
            // sign.
            assert_same::<S>(lanes::<S>(max), |i| if x[i] > y[i] { x[i] } else { y[i] });
            assert_same::<S>(lanes::<S>(min), |i| if x[i] < y[i] { x[i] } else { y[i] });
            assert_same::<S>(lanes::<S>(splat), |_| x[3]);
            // SAFETY: as above.
            let mask = unsafe { S::at_least(a, b) };
            assert!((0..LANES).all(|i| (mask >> i & 1 == 1) == (x[i] >= y[i])) && mask >> LANES == 0);
        }
    }

    words_wrap_and_shift: S => {
        let mut rng = rng();
        for _ in 0..100 {
            let (x, y): ([u32; LANES], [u32; LANES]) = (rng.random(), rng.random());
            let (a, b) = (i_load::<S>(&x), i_load::<S>(&y));
            // SAFETY: under `VectorCode::run`.
            unsafe {
                assert_eq!(words::<S>(S::i_add(a, b)), std::array::from_fn(|i| x[i].wrapping_add(y[i])));
                assert_eq!(words::<S>(S::i_shl::<5>(a)), x.map(|x| x << 5));
                assert_eq!(words::<S>(S::bits(S::from_bits(a))), x);
                assert_same::<S>(lanes::<S>(S::i_to_f(a)), |i| x[i].cast_signed() as f32);
                assert_eq!(words::<S>(S::i_zero()), [0; LANES]);
            }
        }
    }

    float64_sums_take_rounded_products: S => {
        // Finite operands, all of whose products need more than 24 bits.
        let mut rng = rng();
        let mut random = || std::array::from_fn::<f32, LANES, _>(|_| rng.random_range(-2.0..2.0_f32));
        // SAFETY: under `VectorCode::run`; the array has sixteen elements.
        unsafe {
            let (mut sum, mut expected) = (S::d_zero(), [0.0_f64; LANES]);
            for _ in 0..100 {
                let (x, w, scalar) = (random(), random(), random()[0]);
                sum = S::d_add(sum, load::<S>(&x));
                sum = S::d_add_product(sum, load::<S>(&w), scalar);
                for (i, sum) in expected.iter_mut().enumerate() {
                    *sum += f64::from(x[i]);
                    *sum += f64::from(w[i] * scalar);
                }
            }
            let mut got = [0.0; LANES];
            S::d_store(got.as_mut_ptr(), sum);
            assert_eq!(got.map(f64::to_bits), expected.map(f64::to_bits), "{}", S::NAME);
            assert_same::<S>(lanes::<S>(S::d_round(sum)), |i| expected[i] as f32);
        }
    }

    float64_computes_and_looks_up: S => {
        let x: Lanes = std::array::from_fn(|i| i as f32 - 7.0);
        let table = std::array::from_fn(|i| (i as u64) << 32);
        let (mut computed, mut found) = ([0.0_f64; LANES], [0.0_f64; LANES]);
        // SAFETY: under `VectorCode::run`; the arrays have sixteen elements.
        unsafe {
            let x = S::d_add(S::d_zero(), load::<S>(&x));
            let product = S::d_mul(x, S::d_splat(3.0));
            S::d_store(computed.as_mut_ptr(), S::d_fma(product, x, S::d_sub(x, S::d_splat(0.5))));
            // 1.5 * 2^52 leaves the integer in the low bits.
            let index = S::d_fma(x, S::d_splat(5.0), S::d_splat(6_755_399_441_055_744.0));
            S::d_store(found.as_mut_ptr(), S::d_lookup::<47>(&table, index));
        }
        for (i, x) in x.into_iter().enumerate() {
            let x = f64::from(x);
            assert_eq!(computed[i], 3.0 * x * x + x - 0.5, "{}", S::NAME);
            let index = (5.0 * x) as i64;
            let expected = table[(index & 31) as usize].wrapping_add(index.cast_unsigned() << 47);
            assert_eq!(found[i].to_bits(), expected, "{}", S::NAME);
        }
    }

    bfloat16_widens_to_its_bits: S => {
        for high in (0..=u16::MAX).step_by(LANES) {
            let word = |i: usize| u32::from(high + i as u16) << 16 | u32::from(!(high + i as u16));
            let x = std::array::from_fn(word);
            // SAFETY: under `VectorCode::run`.
            let (low, high) = unsafe { (S::bf16_low(i_load::<S>(&x)), S::bf16_high(i_load::<S>(&x))) };
            assert_eq!(lanes::<S>(low).map(f32::to_bits), x.map(|w| w << 16), "{}", S::NAME);
            assert_eq!(lanes::<S>(high).map(f32::to_bits), x.map(|w| w & 0xffff_0000), "{}", S::NAME);
        }
    }

    e2m1_reads_its_four_bits_only: S => {
        macro_rules! at {
            ($($shift:literal)*) => {
                $(for others in [0, u32::MAX, 0x5a5a_5a5a] {
                    let x = std::array::from_fn(|i| others & !(15 << $shift) | (i as u32) << $shift);
                    // SAFETY: under `VectorCode::run`.
                    let values = lanes::<S>(unsafe { S::e2m1::<$shift>(i_load::<S>(&x)) });
                    assert_same::<S>(values, |i| E2M1[i]);
                })*
            };
        }
        at!(0 4 8 12 16 20 24 28);
    }

    scales_are_powers_of_two: S => {
        let all: Vec<u8> = (1..=254).collect();
        for scales in all.windows(LANES) {
            // SAFETY: under `VectorCode::run`, with sixteen elements.
            let values = lanes::<S>(unsafe { S::scales(scales.as_ptr()) });
            assert_same::<S>(values, |i| (f64::from(scales[i]) - 127.0).exp2() as f32);
        }
    }

    float16_widens_and_rounds_to_nearest_even: S => {
        for first in (0..=u16::MAX).step_by(LANES) {
            let halves: [f16; LANES] = std::array::from_fn(|i| f16::from_bits(first + i as u16));
            // SAFETY: under `VectorCode::run`, with sixteen elements.
            let values = lanes::<S>(unsafe { S::load_f16(halves.as_ptr()) });
            // The library's own arithmetic, not the machine's instruction.
            assert_same::<S>(values, |i| halves[i].to_f32_const());
        }
        let mut rng = rng();
        for round in 0..2000 {
            let x: Lanes = std::array::from_fn(|i| {
                // Values within reach of float16; next to a tie between two of them; of any kind.
                let half = f16::from_bits(rng.random()).to_f32_const();
                match round % 3 {
                    0 => half * rng.random_range(0.5..2.0_f32),
                    1 => f32::from_bits((half.to_bits() | 0x1000).wrapping_add_signed(i as i32 % 3 - 1)),
                    _ => f32::from_bits(rng.random()),
                }
            });
            let mut halves = [f16::ZERO; LANES];
            // SAFETY: as above.
            unsafe { S::store_f16(halves.as_mut_ptr(), load::<S>(&x)) };
            assert_same::<S>(halves.map(f16::to_f32_const), |i| f16::from_f32_const(x[i]).to_f32_const());
        }
    }

    dot_products_pair_low_with_low: S => {
        if !S::DOT {
            return;
        }
        let mut rng = rng();
        for _ in 0..200 {
            // Integers of eight bits are exact in bfloat16, and sums of their products in float32.
            let mut whole = || rng.random_range(-128..=128_i32);
            let w: [[i32; 2]; LANES] = std::array::from_fn(|_| [whole(), whole()]);
            let x: [i32; 2] = [whole(), whole()];
            let acc = std::array::from_fn::<i32, LANES, _>(|i| i as i32 * 1000 - 7000);
            let sum = |i: usize| acc[i] + w[i][0] * x[0] + w[i][1] * x[1];

            let half = |v: i32| (v as f32).to_bits() >> 16;
            let pair = |[low, high]: [i32; 2]| half(low) | half(high) << 16;
            let [weights, input] = [w.map(pair), [pair(x); LANES]];
            // SAFETY: under `VectorCode::run`; the input is one word.
            let got = unsafe { S::dot_bf16(load::<S>(&acc.map(|a| a as f32)), i_load::<S>(&weights), input.as_ptr()) };
            assert_same::<S>(lanes::<S>(got), |i| sum(i) as f32);

            let pair = |[low, high]: [i32; 2]| low as u32 & 0xffff | (high as u32) << 16;
            let [weights, input] = [w.map(pair), [pair(x); LANES]];
            // SAFETY: as above.
            let got = unsafe { S::dot_i16(i_load::<S>(&acc.map(|a| a as u32)), i_load::<S>(&weights), input.as_ptr()) };
            assert_eq!(words::<S>(got).map(u32::cast_signed), std::array::from_fn(sum));
        }
        // The extremes of 16 bits: nothing saturates.
        let word = u32::from_ne_bytes([0x01, 0x80, 0xff, 0x7f]); // -32767 and 32767
        // SAFETY: as above.
        let got = unsafe { S::dot_i16(S::i_zero(), i_load::<S>(&[word; LANES]), &raw const word) };
        assert_eq!(words::<S>(got), [2 * 32_767 * 32_767; LANES]);
    }

    e2m1_words_are_twice_the_values: S => {
        if !S::DOT {
            return;
        }
        macro_rules! at {
            ($($shift:literal)*) => {
                $(for others in [0, u32::MAX, 0x5a5a_5a5a] {
                    let codes = |i: usize| [i as u32, 15 - i as u32];
                    let word = |i: usize| {
                        let [low, high] = codes(i);
                        others & !(0x000f_000f << $shift) | low << $shift | high << ($shift + 16)
                    };
                    // SAFETY: under `VectorCode::run`.
                    let got = words::<S>(unsafe { S::e2m1_words::<$shift>(i_load::<S>(&std::array::from_fn(word))) });
                    for (i, got) in got.into_iter().enumerate() {
                        let twice = codes(i).map(|code| (2.0 * E2M1[code as usize]) as i16);
                        assert_eq!([got as i16, (got >> 16) as i16], twice);
                    }
                })*
            };
        }
        at!(0 4 8 12);
    }

    rows_become_columns: S => {
        let rows: [[u32; LANES]; LANES] = std::array::from_fn(|j| std::array::from_fn(|i| (j << 16 | i) as u32));
        // SAFETY: under `VectorCode::run`.
        let columns = unsafe { S::transpose(&rows) };
        for (i, column) in columns.iter().enumerate() {
            for (j, &word) in column.iter().enumerate() {
                assert_eq!(word, (j << 16 | i) as u32);
            }
        }
    }

    exp_keeps_its_bound: S => {
        // SAFETY: under `VectorCode::run`.
        let exp = |x: Lanes| lanes::<S>(unsafe { S::exp(load::<S>(&x)) });
        let mut worst = 0.0_f64;
        for i in 0..20_000 {
            let x: Lanes = std::array::from_fn(|lane| -87.0 + (i * LANES + lane) as f32 * (175.0 / 320_000.0));
            for (x, y) in x.into_iter().zip(exp(x)) {
                let real = f64::from(x).exp();
                worst = worst.max((f64::from(y) / real - 1.0).abs());
            }
        }
        assert!(worst <= 2e-7, "{}: off by {worst:e}", S::NAME);

        let ends = exp(std::array::from_fn(|i| {
            [0.0, -0.0, f32::INFINITY, 1e9, f32::NEG_INFINITY, -1e9, -87.4, -88.0][i % 8]
        }));
        assert_eq!(ends[..2], [1.0, 1.0]);
        let largest = f64::from(88.0_f32).exp();
        assert!(ends[2..4].iter().all(|&y| (f64::from(y) / largest - 1.0).abs() <= 2e-7));
        assert!(ends[4..8].iter().all(|&y| (0.0..=2e-38).contains(&y)), "{}: {ends:?}", S::NAME);

        // NaN of any payload and sign.
        let mut rng = rng();
        for _ in 0..100 {
            let nan = exp(std::array::from_fn(|_| f32::from_bits(rng.random::<u32>() | 0x7f80_0001)));
            assert!(nan.iter().all(|y| y.is_nan()), "{}: {nan:?}", S::NAME);
        }
    }
}
