//! What tells whether `kernels/args.h` was made from this `args.rs`. The test that makes the header uses it, too.

/// 64-bit FNV-1a of a text.
pub fn of(text: &str) -> u64 {
    text.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    })
}
