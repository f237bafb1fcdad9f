//! What the rows of NVIDIA's families have in common: their kernels are made of the same headers (`kernels/mma`).

/// Lanes of a wave.
pub const WARP: usize = 32;
/// Keys and values of one head in a page, at 16 bits and 64 dims.
pub const CACHE_TILE_BYTES: usize = 2 * 64 * 64 * 2;
/// A partial sum of decode attention.
pub const PARTIAL_BYTES: usize = 8 * (64 + 2) * 4;
/// Rows up to which decode attention has a job done by a team of four warps.
pub const TEAM_ROWS: usize = 8;
/// Rows up to which it has one done by two warps, in windowed layers.
pub const PAIR_ROWS: usize = 64;
