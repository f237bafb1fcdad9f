//! The random numbers that tokens are sampled with: the evaluation program's generator, one for each request.

/// The initial generator state of a request: its own, so that its answer does not depend on the other requests.
///
/// The first has the program's own state, 0 included, as the program's own loop would; the others have outputs of
/// splitmix64 seeded with it (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014), but never
/// 0, where xorshift would stay.
pub fn request_seed(base: u64, request: usize) -> u64 {
    const GAMMA: u64 = 0x9E37_79B9_7F4A_7C15;
    if request == 0 {
        return base;
    }
    let mut z = base.wrapping_add(GAMMA.wrapping_mul(request as u64));
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^= z >> 31;
    if z == 0 { GAMMA } else { z }
}

/// The generator's state after one token.
pub fn next_state(mut state: u64) -> u64 {
    random_f32(&mut state);
    state
}

/// The generator's state after so many tokens.
pub fn state_after(state: u64, tokens: usize) -> u64 {
    (0..tokens).fold(state, |state, _| next_state(state))
}

/// The random number in [0, 1) for the token `ahead` tokens after the next one.
pub fn coin(state: u64, ahead: usize) -> f32 {
    random_f32(&mut state_after(state, ahead))
}

/// The next number in [0, 1): 24 bits of xorshift64* (Vigna, "An experimental exploration of Marsaglia's xorshift
/// generators, scrambled", 2016).
pub fn random_f32(state: &mut u64) -> f32 {
    *state ^= *state >> 12;
    *state ^= *state << 25;
    *state ^= *state >> 27;
    let high = (state.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 32) as u32;
    (high >> 8) as f32 / 16_777_216.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_stream_is_xorshift64_star() {
        // By hand from state 1: 1 ^ 1 << 25 = 0x2000001; its product with the multiplier has 0x47E4CE4B on top.
        let mut state = 1;
        assert_eq!(random_f32(&mut state), 4_711_630.0 / 16_777_216.0);
        assert_eq!(state, 0x200_0001);
        assert_eq!(random_f32(&mut state), 11_259_814.0 / 16_777_216.0);
        assert_eq!(state, 0x4_0040_0080_2801);
        let mut state = u64::MAX;
        assert_eq!(random_f32(&mut state), 16_329_929.0 / 16_777_216.0);
        assert_eq!(state, 0xFFF0_001F_FE00_0000);
    }

    #[test]
    fn coins_are_known_ahead() {
        let mut state = 42;
        for ahead in 0..5 {
            assert_eq!(next_state(state), {
                let mut next = state;
                random_f32(&mut next);
                next
            });
            assert_eq!(coin(42, ahead), random_f32(&mut state));
        }
    }

    #[test]
    fn coins_are_even_and_below_one() {
        let mut state = 42;
        let coins: Vec<f32> = (0..20_000).map(|_| random_f32(&mut state)).collect();
        assert!(coins.iter().all(|coin| (0.0..1.0).contains(coin)));
        let mean = coins.iter().sum::<f32>() / 20_000.0;
        // The mean of 20,000 has a standard deviation of 0.289 / sqrt(20000) = 0.002; the gate is five of them.
        assert!((mean - 0.5).abs() < 0.01, "{mean}");
    }

    #[test]
    fn request_seeds_are_splitmix64() {
        assert_eq!(request_seed(1_234_567, 0), 1_234_567);
        assert_eq!(request_seed(0, 0), 0);
        // Published outputs of splitmix64 seeded with 0 and with 1234567.
        assert_eq!(request_seed(0, 1), 0xE220_A839_7B1D_CDAF);
        assert_eq!(request_seed(0, 2), 0x6E78_9E6A_A1B9_65F4);
        assert_eq!(request_seed(1_234_567, 1), 0x599E_D017_FB08_FC85);
        // The finaliser maps 0 to 0, so this base would give the second request the state 0.
        assert_ne!(request_seed(0_u64.wrapping_sub(0x9E37_79B9_7F4A_7C15), 1), 0);
    }
}
