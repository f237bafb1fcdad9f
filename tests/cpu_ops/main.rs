//! The CPU backend compared with the oracle in `tests/common/oracle.rs`: each operation and the whole forward pass, on
//! every instruction set of this machine, in both precisions, with weights in every format, and at shapes that are not
//! multiples of a tile or a vector.
//!
//! `exact` is compared bit for bit with the eval program's arithmetic (`Letter`), on the portable instruction set
//! without fused multiply-adds. `fast` is compared with float64, within error bounds that `margins` computes.

#[path = "../common/oracle.rs"]
mod oracle;
#[path = "../common/plans.rs"]
mod plans;
#[path = "../common/synthetic.rs"]
mod synthetic;

mod attention;
mod dense;
mod draw;
mod experts;
mod forward;
mod margins;
mod odd_values;

use getp::backend::cpu::ComputeMode;
use getp::options::Precision;
use margins::Margin;

/// Makes a test of each function generic over the cache's element, which runs it on every mode of this machine.
macro_rules! on_every_engine {
    ($($check:ident)*) => {
        $(#[test]
        fn $check() {
            for level in getp::simd::Level::available() {
                let mode = |precision| getp::backend::cpu::ComputeMode { level, precision };
                checks::$check::<f32>(mode(getp::options::Precision::Exact));
                checks::$check::<half::f16>(mode(getp::options::Precision::Fast));
            }
        })*
    };
}
use on_every_engine;

/// The eval program's arithmetic as the mode's instruction set has it.
fn letter(mode: ComputeMode) -> oracle::Letter {
    oracle::Letter {
        fused: !mode.level.is_portable(),
    }
}

/// `got` lies within the margins, and in `exact` is the letter's result to the bit.
#[track_caller]
fn compare(mode: ComputeMode, what: &str, got: &[f32], letter: &[f32], real: &[Margin]) {
    assert_eq!(got.len(), real.len(), "{mode:?} {what}: how many values");
    for (i, (&got, real)) in got.iter().zip(real).enumerate() {
        let error = (f64::from(got) - real.value).abs();
        assert!(
            error <= real.error,
            "{mode:?} {what}: value {i} is {got:e}, {error:e} from {:e}, which is more than {:e}",
            real.value,
            real.error
        );
    }
    if mode.precision == Precision::Exact {
        assert_same_bits(got, letter, &format!("{mode:?} {what}"));
    }
}

/// Equal to the bit; NaN equals NaN.
#[track_caller]
fn assert_same_bits(got: &[f32], expected: &[f32], what: &str) {
    assert_eq!(got.len(), expected.len(), "{what}: how many values");
    for (i, (a, b)) in got.iter().zip(expected).enumerate() {
        let same = a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan();
        assert!(same, "{what}: value {i} is {a:e} and should be {b:e} to the bit");
    }
}
