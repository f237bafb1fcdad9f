//! Number formats of the released weights (OCP Microscaling Formats, MXFP4).

/// Number of values in an MXFP4 block.
pub const MXFP4_BLOCK: usize = 32;

/// Size of the codes of an MXFP4 block in bytes.
pub const MXFP4_BLOCK_BYTES: usize = MXFP4_BLOCK / 2;

/// The values of the sixteen E2M1 codes.
pub const E2M1: [f32; 16] = [
    0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0,
];

/// The value of an E8M0 scale: `2^(scale - 127)`, and NaN for 255.
pub fn e8m0_to_f32(scale: u8) -> f32 {
    match scale {
        0 => f32::from_bits(0x0040_0000), // 2^-127 is subnormal
        255 => f32::NAN,
        _ => f32::from_bits(u32::from(scale) << 23),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn e8m0_covers_subnormal_normal_and_nan() {
        assert_eq!(e8m0_to_f32(0), 2f32.powi(-126) / 2.0);
        assert_eq!(e8m0_to_f32(1), 2f32.powi(-126));
        assert_eq!(e8m0_to_f32(127), 1.0);
        assert_eq!(e8m0_to_f32(254), 2f32.powi(127));
        assert!(e8m0_to_f32(255).is_nan());
    }
}
